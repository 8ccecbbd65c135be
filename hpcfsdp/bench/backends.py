"""Stock torch on this project's backend and on gloo: the training step of DDP, FSDP1 and FSDP2, in one run."""

from __future__ import annotations

import warnings
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FullyShardedDataParallel, fully_shard
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.train.config import ModelConfig
from hpcfsdp.train.model import GPT, VOCABULARY, Block
from hpcfsdp.world import World

CONTEXT, BATCH = 64, 2
ENGINES = ("ddp", "fsdp1", "fsdp2")


def measure(world: World, *, layers: int, width: int, repeats: int) -> dict[str, dict[str, Times]]:
    """Collective over all ranks. engine -> backend -> times of a step: forward, backward, AdamW."""
    ranks = list(range(world.size))
    groups = {name: dist.new_group(ranks, backend=name) for name in ("gloo", "hpcmpi")}
    found = {}
    for engine in ENGINES:
        steps = {name: _step(engine, group, layers, width, world.rank) for name, group in groups.items()}
        found[engine] = in_turn(world.host, steps, repeats=repeats, warmup=3)
    return found


def _step(engine: str, group: Any, layers: int, width: int, rank: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = _wrapped(engine, GPT(ModelConfig(layers=layers, width=width, heads=8, context=CONTEXT, dropout=0.0)), group)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-4)
    ids = torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))

    def step() -> None:
        F.cross_entropy(model(ids[:, :-1]).flatten(0, 1), ids[:, 1:].flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()

    return step


def _wrapped(engine: str, model: nn.Module, group: Any) -> nn.Module:
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 says that it is on its way out
        warnings.simplefilter("ignore", UserWarning)  # and that it runs on the CPU
        if engine == "ddp":
            return DistributedDataParallel(model, process_group=group)
        if engine == "fsdp1":
            policy = ModuleWrapPolicy({Block})
            return FullyShardedDataParallel(model, group, auto_wrap_policy=policy, device_id=torch.device("cpu"))
        mesh = DeviceMesh.from_group(group, "cpu")
        for block in model.blocks:
            fully_shard(block, mesh=mesh)
        return fully_shard(model, mesh=mesh)
