"""Times of competing ways to do one thing, measured in turn so that all meet the same noise."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from hpcfsdp.comm import Communicator


@dataclass(frozen=True)
class Times:
    """Seconds of repeated runs; each is that of the slowest rank."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: Times) -> float:
        """How many times as long as `other`: the median over rounds, which met the same noise."""
        return statistics.median(self.ratios_to(other))

    def ratios_to(self, other: Times) -> tuple[float, ...]:
        """The same for each round."""
        return tuple(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def timed(
    comm: Communicator, call: Callable[[], Any], calls: int = 1, finish: Callable[[], None] = lambda: None
) -> tuple[float, Any]:
    """Collective over `comm`. Seconds of one call on the slowest rank, and its result on this rank.

    The ranks start together. See ``in_turn`` for the arguments.
    """
    comm.barrier()
    began_s = time.perf_counter()
    for _ in range(calls):
        result = call()
    finish()
    mine = torch.tensor([(time.perf_counter() - began_s) / calls], dtype=torch.float64)
    comm.all_reduce(mine, "max")
    return float(mine), result


def in_turn(
    comm: Communicator,
    ways: Mapping[str, Callable[[], object]],
    *,
    repeats: int,
    warmup: int = 2,
    calls: int = 1,
    finish: Callable[[], None] = lambda: None,
) -> dict[str, Times]:
    """Collective over `comm`. Time each way `repeats` times, one after the other, the ranks starting together.

    Args:
        calls: of a way in each run; the time is that of one call. More than one for calls that are too short for the
            clock and for the start of the ranks.
        finish: called before the clock stops: waits for a device that the calls leave behind.
    """
    for way in ways.values():
        for _ in range(warmup):
            way()
    finish()
    found: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(repeats):
        for name, way in ways.items():
            found[name].append(timed(comm, way, calls, finish)[0])
    return {name: Times(tuple(seconds)) for name, seconds in found.items()}
