"""Stock torch on this project's backend and on gloo: the training step of DDP, FSDP1 and FSDP2, in one run."""

from __future__ import annotations

import gc
from collections.abc import Mapping

import torch.distributed as dist

from hpcfsdp.bench.step import NAMES, STOCK, training_step
from hpcfsdp.bench.tables import Ratio, Table, faster_cell, time_cells, times_json
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


def table(found: Mapping[str, Mapping[str, Times]]) -> Table:
    """A row for each engine and backend, with its speed as a multiple of that of gloo."""
    rows = [
        (engine, name, *time_cells(times), faster_cell(times, ways["gloo"]))
        for engine, ways in found.items()
        for name, times in ways.items()
    ]
    as_json = {engine: times_json(ways) for engine, ways in found.items()}
    ratios = [
        Ratio.of_speeds(f"{NAMES[engine]} on hpcmpi: speed of a step / on gloo", ways["hpcmpi"], ways["gloo"])
        for engine, ways in found.items()
        if "hpcmpi" in ways
    ]
    return Table(("engine", "backend", "step", "min-max", "against gloo"), rows, as_json, ratios=ratios)
