"""What an engine costs the host: forward and backward of many small units, in one process, where no byte travels.

Peers work on torch's "fake" process group, hpcfsdp on its communicator of the same kind, both as rank 0 of several.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.bench.step import OWN, wrap
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.comm.fake import FakeCommunicator

PLAIN = "plain"
ENGINES = (PLAIN, "fsdp1", "fsdp1_orig", "fsdp2", OWN, f"{OWN}_orig")
RANKS = 8
WIDTH, ROWS = 16, 2
_CALLS = 4
"""Steps in a run: a single one would show what it costs to come back into a cold cache after the others."""


class SmallUnit(nn.Module):
    """So small that computing it costs little but the launching of its kernels."""

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
        skipped: engine -> why it was not measured.
    """

    units: int
    times: dict[str, Times]
    skipped: dict[str, str]

    def per_unit(self, engine: str) -> Times:
        """Seconds for each unit."""
        return Times(tuple(seconds / self.units for seconds in self.times[engine].seconds))

    def over_plain(self, engine: str) -> Times:
        """Seconds for each unit above those that the plain modules took in the same round."""
        both = zip(self.per_unit(engine).seconds, self.per_unit(PLAIN).seconds, strict=True)
        return Times(tuple(mine - plain for mine, plain in both))


def measure(*, units: int, repeats: int, engines: Sequence[str] = ENGINES) -> Measurement:
    """Take the default process group of this process, which must have none yet, and measure all engines in turn."""
    dist.init_process_group("fake", rank=0, world_size=RANKS)
    try:
        steps: dict[str, Callable[[], None]] = {}
        skipped: dict[str, str] = {}
        for engine in engines:
            group = FakeCommunicator(0, RANKS) if engine.startswith(OWN) else dist.group.WORLD
            try:
                steps[engine] = _step(engine, group, units)
            except NotImplementedError as error:
                skipped[engine] = str(error)
        return Measurement(units, in_turn(FakeCommunicator(), steps, repeats=repeats, warmup=8, calls=_CALLS), skipped)
    finally:
        dist.destroy_process_group()


def _step(engine: str, group: Any, units: int) -> Callable[[], None]:
    torch.manual_seed(0)
    model = wrap(engine, nn.Sequential(*(SmallUnit() for _ in range(units))), group, unit=SmallUnit)
    x = torch.randn(ROWS, WIDTH)

    def step() -> None:
        model(x).sum().backward()
        model.zero_grad()

    return step
