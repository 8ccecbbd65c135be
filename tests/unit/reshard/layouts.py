"""Parameters that tensor-parallel ranks cut in every way, and their layouts; no tests."""

import math

import torch
from torch.distributed.tensor import Replicate, Shard

from hpcfsdp.params.layout import FlatLayout, TensorBlock
from hpcfsdp.reshard.placements import mesh_blocks

PARAMS = {
    "columns": ((3, 5), Shard(1)),
    "plain": ((7,), None),
    "replicated": ((2, 3), Replicate()),
    "rows": ((5, 2), Shard(0)),
    "scalar": ((), None),
    "nothing": ((0, 4), None),
}
VALUES = [
    torch.arange(float(math.prod(shape))).view(shape) + 100 * place for place, (shape, _) in enumerate(PARAMS.values())
]


def layout_of(num_shards, num_blocks, block):
    """The layout of one tensor-parallel rank."""
    blocks = {}
    for name, (shape, placement) in PARAMS.items():
        if placement is not None and num_blocks > 1:
            boxes = mesh_blocks(shape, torch.arange(num_blocks), [placement])
            blocks[name] = TensorBlock(shape, tuple(boxes.values()), block, (placement,))
    params = [(name, blocks[name].box.sizes if name in blocks else shape, ()) for name, (shape, _) in PARAMS.items()]
    return FlatLayout.plan(params, torch.float32, num_shards, blocks)
