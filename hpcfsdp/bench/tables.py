"""The tables that ``hpcfsdp bench`` prints, and cells that several of them share."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any, NamedTuple

from hpcfsdp.bench.timing import Times
from hpcfsdp.text.terminal import shown

MIB = 1 << 20


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
        """The time of hpcfsdp / that of `other`."""
        return cls.of_rounds(name, own.ratios_to(other))

    @classmethod
    def of_speeds(cls, name: str, own: Times, other: Times) -> Ratio:
        """The speed of hpcfsdp / that of `other`."""
        return cls.of_rounds(name, other.ratios_to(own), better="higher")

    @classmethod
    def of_rounds(cls, name: str, rounds: Sequence[float], better: str = "lower") -> Ratio:
        return cls(name, statistics.median(rounds), min(rounds), max(rounds), better)


class Table(NamedTuple):
    """A measurement as a table, and as JSON; perhaps with a line above it, and notes and a second table below it.

    `ratios` go into the summary of all benchmarks.
    """

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    as_json: Any
    notes: Sequence[str] = ()
    second: Table | None = None
    heading: str = ""
    ratios: Sequence[Ratio] = ()

    def lines(self) -> Iterator[str]:
        """As Markdown."""
        if self.heading:
            yield from (self.heading, "")
        yield from markdown(self.columns, self.rows)
        for note in self.notes:
            yield from ("", note)
        if self.second is not None:
            yield ""
            yield from self.second.lines()


def markdown(columns: Sequence[str], rows: Iterable[Sequence[str]]) -> Iterator[str]:
    """The lines of a table."""
    for row in (columns, ["---"] * len(columns), *rows):
        yield "| " + " | ".join(map(shown, row)) + " |"


def readable(seconds: float) -> str:
    """0.0015 -> "1.50 ms"."""
    return f"{seconds * 1e6:.1f} us" if seconds < 1e-3 else f"{seconds * 1e3:.2f} ms"


def time_cells(times: Times) -> tuple[str, str]:
    """The median, and the fastest and the slowest run."""
    return readable(times.median_s), f"{readable(min(times.seconds))} - {readable(max(times.seconds))}"


def ratio_cell(times: Times | None, other: Times) -> str:
    """`times` as a multiple of `other`; empty for a missing or the same measurement."""
    return "" if times is None or times is other else f"{times.ratio_to(other):.2f}x"


def faster_cell(times: Times, gloo: Times | None) -> str:
    """How many times as fast as gloo."""
    return "" if gloo is None or gloo is times else f"{gloo.median_s / times.median_s:.2f}x"


def times_json(ways: Mapping[str, Times]) -> dict[str, dict[str, Any]]:
    """The median and all runs of each way."""
    return {name: {"median_s": times.median_s, "seconds": list(times.seconds)} for name, times in ways.items()}


def mib(nbytes: int) -> str:
    return f"{round(nbytes / MIB, 1) + 0.0:.1f} MiB"  # zero has no sign: a peak may be a page below its baseline


def peak_cells(peaks: Sequence[int], analytic: int) -> tuple[str, ...]:
    """The highest peak, the lowest and the highest, the analytic one, and the highest as a multiple of it."""
    low, high = min(peaks), max(peaks)
    return mib(high), f"{mib(low)} - {mib(high)}", mib(analytic), f"{high / analytic:.3f}x"


def peak_json(peak: Any) -> dict[str, Any]:
    """The fields of a peak, and its ratio to the analytic one."""
    return {**asdict(peak), "peak_bytes": peak.peak_bytes, "analytic_ratio": peak.peak_bytes / peak.analytic_bytes}
