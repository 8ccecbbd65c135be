"""What all benchmarks share: ways that are timed in turn, their tables and ratios."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any, NamedTuple

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.text.terminal import shown

MIB = 1 << 20


class Times(NamedTuple):
    """Seconds of repeated runs; each is that of the slowest rank."""

    seconds: tuple[float, ...]

    @property
    def median_s(self) -> float:
        return statistics.median(self.seconds)

    def ratio_to(self, other: Times) -> float:
        """Return how many times as long as `other` it took: the median over rounds, which met the same noise."""
        return statistics.median(self.ratios_to(other))

    def ratios_to(self, other: Times) -> tuple[float, ...]:
        return tuple(mine / its for mine, its in zip(self.seconds, other.seconds, strict=True))


def timed(
    comm: Communicator, call: Callable[[], Any], calls: int = 1, finish: Callable[[], None] = lambda: None
) -> tuple[float, Any]:
    """Return the seconds of one of some calls on the slowest rank, and its result on this rank.

    Collective over `comm`: the ranks start together. See ``in_turn`` for `finish`.
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
    """Time each way `repeats` times, one after the other, so that all meet the same noise. Collective over `comm`.

    Args:
        warmup: calls of each way before the first that counts.
        calls: of a way in each run; the time is that of one call. More than one for calls that are too short for the
            clock and for the start of the ranks.
        finish: called before the clock stops: waits for a device that the calls leave behind.
    """
    for way in ways.values():
        for _ in range(warmup):
            way()
    finish()
    rounds = [[timed(comm, way, calls, finish)[0] for way in ways.values()] for _ in range(repeats)]
    return dict(zip(ways, map(Times, zip(*rounds, strict=True)), strict=True))


class Ratio(NamedTuple):
    """hpcfsdp next to a peer or a floor: what the summary of all benchmarks shows.

    Attributes:
        name: the same in every run.
        value: the median over rounds, or the only one.
        low, high: of all rounds.
        better: whether a "lower" or a "higher" ratio is better for hpcfsdp.
    """

    name: str
    value: float
    low: float
    high: float
    better: str = "lower"

    @classmethod
    def of_times(cls, name: str, own: Times, other: Times) -> Ratio:
        """Return the time of hpcfsdp / that of `other`."""
        return cls.of_rounds(name, own.ratios_to(other))

    @classmethod
    def of_speeds(cls, name: str, own: Times, other: Times) -> Ratio:
        """Return the speed of hpcfsdp / that of `other`."""
        return cls.of_rounds(name, other.ratios_to(own), better="higher")

    @classmethod
    def of_rounds(cls, name: str, rounds: Sequence[float], better: str = "lower") -> Ratio:
        return cls(name, statistics.median(rounds), min(rounds), max(rounds), better)


class Table(NamedTuple):
    """A measurement as a table, and as JSON; perhaps with a line above it, and notes and a second table below it.

    `ratios` go into the summary of all benchmarks, `facts` into the JSON of the command.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    as_json: Any
    notes: Sequence[str] = ()
    second: Table | None = None
    heading: str = ""
    ratios: Sequence[Ratio] = ()
    facts: Sequence[tuple[str, Any]] = ()

    def lines(self) -> Iterator[str]:
        """Yield the lines of Markdown."""
        yield from (self.heading, "") if self.heading else ()
        yield from markdown(self.columns, self.rows)
        for note in self.notes:
            yield from ("", note)
        if self.second is not None:
            yield from ("", *self.second.lines())


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """Yield the lines of a table."""
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(map(shown, row)) + " |"


def readable(seconds: float) -> str:
    """0.0015 -> "1.50 ms"."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def mib(nbytes: int) -> str:
    return f"{round(nbytes / MIB, 1) + 0.0:.1f} MiB"  # zero has no sign: a peak may be a page below its baseline


def time_cells(times: Times) -> tuple[str, str]:
    """Return the median, and the fastest and the slowest run."""
    return readable(times.median_s), f"{readable(min(times.seconds))} - {readable(max(times.seconds))}"


def ratio_cell(times: Times | None, other: Times) -> str:
    """Return `times` as a multiple of `other`; empty for a missing or the same measurement."""
    return "" if times is None or times is other else f"{times.ratio_to(other):.2f}x"


def faster_cell(times: Times, gloo: Times | None) -> str:
    """Return how many times as fast as gloo it was."""
    return "" if gloo is None or gloo is times else f"{gloo.median_s / times.median_s:.2f}x"


def times_json(ways: Mapping[str, Times], own: Times | None = None) -> dict[str, dict[str, Any]]:
    """Return the median and all runs of each way, and the time `own` of hpcfsdp as a multiple of it."""
    return {
        name: {"median_s": times.median_s, "seconds": list(times.seconds)}
        | ({} if own is None else {"hpcfsdp_ratio": own.ratio_to(times)})
        for name, times in ways.items()
    }
