"""Writes a golden file of today's format: ``mpirun -n 2 python tests/golden/make.py PATH``.

A golden file is made once for a version of the format, and never again: it stands for the files that users have.
"""

import sys

import numpy as np
import torch
from torch import nn

import hpcfsdp
from hpcfsdp import checkpoint


class Tiny(nn.Module):
    """Tied weights, several dtypes, a buffer, a scalar, something empty."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(5, 3)
        self.head = nn.Linear(3, 5, bias=False)
        self.head.weight = self.embed.weight
        self.body = nn.Linear(3, 3)
        self.short = nn.Parameter(torch.zeros(7, dtype=torch.bfloat16), requires_grad=False)
        self.empty = nn.Parameter(torch.zeros(0, 2), requires_grad=False)
        self.register_buffer("count", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False, True]))
        with torch.no_grad():
            for index, tensor in enumerate((self.embed.weight, self.body.weight, self.body.bias, self.short)):
                tensor.copy_((torch.arange(tensor.numel()) / 4 + index).view(tensor.shape))


def main(path: str) -> None:
    world = hpcfsdp.init("cpu")
    torch.manual_seed(world.rank)
    np.random.seed(world.rank)
    model = Tiny()
    sharded = hpcfsdp.FullyShardedDataParallel(model, ignored_states=[model.short, model.empty], use_orig_params=True)
    optimizer = torch.optim.AdamW(sharded.parameters(), lr=0.125, betas=(0.5, 0.75), eps=1e-3, weight_decay=0.0)
    for param in sharded.parameters():
        if param.requires_grad:
            param.grad = torch.ones_like(param)
    optimizer.step()
    extra = {"words": ["a", "b"], "pairs": {1: 2.5}, "table": np.arange(6).reshape(2, 3)}
    checkpoint.save(path, model=sharded, optimizer=optimizer, step=3, extra=extra, config={"width": 3})
    hpcfsdp.finalize()


if __name__ == "__main__":
    main(sys.argv[1])
