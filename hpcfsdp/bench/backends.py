"""Stock torch on this project's backend and on gloo: the training step of DDP, FSDP1 and FSDP2, in one run."""

from __future__ import annotations

import gc

import torch.distributed as dist

from hpcfsdp.bench.step import STOCK, training_step
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.world import World


def measure(world: World, *, layers: int, width: int, repeats: int) -> dict[str, dict[str, Times]]:
    """Collective over all ranks. engine -> backend -> times of a step: forward, backward, AdamW."""
    ranks = list(range(world.size))
    groups = {name: dist.new_group(ranks, backend=name) for name in ("gloo", "hpcmpi")}
    found = {}
    for engine in STOCK:
        steps = {
            name: training_step(engine, group, layers=layers, width=width, rank=world.rank, ranks=world.size)
            for name, group in groups.items()
        }
        found[engine] = in_turn(world.host, steps, repeats=repeats, warmup=3)
    del steps
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    return found
