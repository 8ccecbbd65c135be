"""The host time of an engine: forward and backward of many small units, in one process that sends nothing.

Peers run on torch's "fake" process group, hpcfsdp on its fake communicator, both as rank 0 of several.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp.api.fully_shard import shard_modules
from hpcfsdp.bench.step import NAMES, OWN, OWN_ROWS, units, wrap
from hpcfsdp.bench.tables import Ratio, Table, ratio_cell, time_cells, times_json
from hpcfsdp.bench.timing import Times, in_turn
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


@dataclass(frozen=True)
class Measurement:
    """Steps of several engines.

    Attributes:
        units: in the model.
        times: engine -> times of a step of the whole model.
        skipped: engine -> the reason why it was not measured.
    """

    units: int
    times: dict[str, Times]
    skipped: dict[str, str]


def measure(*, units: int, repeats: int) -> Measurement:
    """Make the default process group of this process, and measure all engines in turn."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    try:
        steps: dict[str, Callable[[], None]] = {}
        skipped: dict[str, str] = {}
        for engine in ENGINES:
            group = FakeCommunicator(0, RANKS) if engine.startswith(OWN) else dist.group.WORLD
            try:
                steps[engine] = _step(engine, group, units)
            except NotImplementedError as error:
                skipped[engine] = str(error)
        return Measurement(units, in_turn(FakeCommunicator(), steps, repeats=repeats, warmup=8, calls=_CALLS), skipped)
    finally:
        dist.destroy_process_group()


def table(found: Measurement) -> Table:
    """A row for each engine, for each unit of the model, and hpcfsdp's overhead as a multiple of its overhead."""
    per_unit = {engine: Times(tuple(s / found.units for s in times.seconds)) for engine, times in found.times.items()}
    over = {  # the plain modules of the same round
        engine: Times(tuple(s - plain for s, plain in zip(times.seconds, per_unit[PLAIN].seconds, strict=True)))
        for engine, times in per_unit.items()
    }
    rows = [
        (engine, *time_cells(times), *time_cells(over[engine]), ratio_cell(over[OWN], over[engine]))
        if engine != PLAIN
        else (engine, *time_cells(times), "", "", "")
        for engine, times in per_unit.items()
    ]
    as_json: dict[str, Any] = {
        engine: {**one, "median_over_plain_s": over[engine].median_s} for engine, one in times_json(per_unit).items()
    }
    as_json |= {engine: {"skipped": reason} for engine, reason in found.skipped.items()}
    notes = [f"{engine} was skipped: {reason}" for engine, reason in found.skipped.items()]
    columns = ("engine", "per unit", "min-max", "over plain", "min-max", "hpcfsdp / it, over plain")
    ratios = [
        Ratio.of_times(f"{NAMES[engine]}: Python time of a unit / {NAMES[peer]}", over[engine], over[peer])
        for engine in (OWN, OWN_ROWS)
        for peer in ("fsdp2",)
        if {engine, peer} <= set(over)
    ]
    return Table(columns, rows, as_json, notes, ratios=ratios)


def shard_rows(model: nn.Module, unit: type[nn.Module], comm: FakeCommunicator) -> None:
    """``fully_shard`` for each `unit` and the model, over a communicator that imagines the ranks of torch's group."""
    device_mesh = DeviceMesh.from_group(dist.group.WORLD, "cpu")
    mesh = UnitMesh(ShardingStrategy.FULL_SHARD, {"shard": comm}, comm, np.arange(comm.size)[None], device_mesh)
    for module in (*units(model, unit), model):
        shard_modules([module], mesh)


def _step(engine: str, group: Any, units: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = nn.Sequential(*(SmallUnit() for _ in range(units)))
    if engine == OWN_ROWS:
        shard_rows(model, SmallUnit, group)
    else:
        model = wrap(engine, model, group, unit=SmallUnit)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step
