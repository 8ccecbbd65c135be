"""Steps of stock torch on gloo and on this project's backend."""

from __future__ import annotations

from collections.abc import Mapping

import torch.distributed as dist

from hpcfsdp.bench.harness import Ratio, Table, Times, faster_cell, in_turn, time_cells, times_json
from hpcfsdp.bench.step import NAMES, STOCK, training_step
from hpcfsdp.world import World


def measure(world: World, *, layers: int, width: int, repeats: int) -> Table:
    """Time steps of stock torch on gloo and on this project's backend. Collective over all ranks."""
    shape = {"layers": layers, "width": width, "rank": world.rank, "ranks": world.size}
    groups = {name: dist.new_group(list(range(world.size)), backend=name) for name in ("gloo", "hpcmpi")}
    found = {}
    for engine in STOCK:
        steps = {name: training_step(engine, group, **shape) for name, group in groups.items()}
        found[engine] = in_turn(world.host, steps, repeats=repeats, warmup=3)
    return table(found)


def table(found: Mapping[str, Mapping[str, Times]]) -> Table:
    """Return a row for each engine and backend, with its speed as a multiple of that on gloo."""
    rows = [
        (engine, name, *time_cells(times), faster_cell(times, ways["gloo"]))
        for engine, ways in found.items()
        for name, times in ways.items()
    ]
    ratios = [
        Ratio.of_speeds(f"{NAMES[engine]} on hpcmpi: speed of a step / on gloo", ways["hpcmpi"], ways["gloo"])
        for engine, ways in found.items()
        if "hpcmpi" in ways
    ]
    as_json = {engine: times_json(ways) for engine, ways in found.items()}
    return Table(("engine", "backend", "step", "min-max", "against gloo"), rows, as_json, ratios=ratios)
