"""The host time of an engine: forward and backward of many small units, in one process that sends nothing.

Peers run on torch's "fake" process group, hpcfsdp on its fake communicator, both as rank 0 of several.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp.api.fully_shard import shard_modules
from hpcfsdp.bench.harness import Ratio, Table, Times, in_turn, ratio_cell, time_cells, times_json
from hpcfsdp.bench.step import NAMES, OWN, OWN_ROWS, units, wrap
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.units.unit_mesh import UnitMesh

PLAIN = "plain"
ENGINES = (PLAIN, "fsdp1", "fsdp1_orig", "fsdp2", OWN, f"{OWN}_orig", OWN_ROWS)
RANKS = 8
WIDTH, ROWS = 16, 2
_CALLS = 4
"""Steps in a run: a single one would start with a cold cache after the other engines."""


class SmallUnit(nn.Module):
    """So small that its time is that of launching kernels."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.up, self.down = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(torch.relu(self.up(self.norm(x))))


def measure(*, units: int, repeats: int) -> Table:
    """Make the default process group of this process, and time all engines on a model of so many units."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    steps: dict[str, Callable[[], None]] = {}
    skipped: dict[str, str] = {}
    try:
        for engine in ENGINES:
            try:
                steps[engine] = _step(engine, units)
            except NotImplementedError as error:
                skipped[engine] = str(error)
        return table(units, in_turn(FakeCommunicator(), steps, repeats=repeats, warmup=8, calls=_CALLS), skipped)
    finally:
        dist.destroy_process_group()


def table(units: int, times: Mapping[str, Times], skipped: Mapping[str, str]) -> Table:
    """Return a row for each engine, with the time of one unit, and hpcfsdp's overhead as a multiple of its overhead.

    `times` are of a step of the whole model, `skipped` are reasons of engines that were not measured.
    """
    per_unit = {engine: Times(tuple(s / units for s in one.seconds)) for engine, one in times.items()}
    over = {  # the plain modules of the same round
        engine: Times(tuple(s - plain for s, plain in zip(one.seconds, per_unit[PLAIN].seconds, strict=True)))
        for engine, one in per_unit.items()
    }
    rows = [
        (engine, *time_cells(one), *time_cells(over[engine]), ratio_cell(over[OWN], over[engine]))
        if engine != PLAIN
        else (engine, *time_cells(one), "", "", "")
        for engine, one in per_unit.items()
    ]
    as_json: dict[str, Any] = {
        engine: {**one, "median_over_plain_s": over[engine].median_s} for engine, one in times_json(per_unit).items()
    }
    as_json |= {engine: {"skipped": reason} for engine, reason in skipped.items()}
    notes = [f"{engine} was skipped: {reason}" for engine, reason in skipped.items()]
    columns = ("engine", "per unit", "min-max", "over plain", "min-max", "hpcfsdp / it, over plain")
    ratios = [
        Ratio.of_times(f"{NAMES[engine]}: Python time of a unit / {NAMES['fsdp2']}", over[engine], over["fsdp2"])
        for engine in (OWN, OWN_ROWS)
        if {engine, "fsdp2"} <= set(over)
    ]
    return Table(columns, rows, as_json, notes, ratios=ratios, facts=(("ranks", RANKS), ("units", units)))


def shard_rows(model: nn.Module, unit: type[nn.Module], comm: FakeCommunicator) -> None:
    """Shard each `unit` and the model by ``fully_shard``, over a communicator for the ranks of torch's fake group."""
    device_mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    mesh = UnitMesh(ShardingStrategy.FULL_SHARD, {"shard": comm}, comm, np.arange(comm.size)[None], device_mesh)
    for module in (*units(model, unit), model):
        shard_modules([module], mesh)


def _step(engine: str, units: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(SmallUnit() for _ in range(units)))
    if engine == OWN_ROWS:
        shard_rows(model, SmallUnit, FakeCommunicator(0, RANKS))
    else:
        group = FakeCommunicator(0, RANKS) if engine.startswith(OWN) else dist.group.WORLD
        model = wrap(engine, model, group, unit=SmallUnit)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step
