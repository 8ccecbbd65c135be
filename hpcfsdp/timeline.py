"""Where the time of a rank goes: its waits for communication, and for a trace what each stream did.

The engine and the communicators report here while ``recorder`` is set. Otherwise each place of theirs costs the look at
one global. On the CPU a time is the host's clock. On an accelerator it is an event on a stream, which is read when it
is complete: nothing waits for the device.
"""

import contextlib
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp import accelerator

Mark = Any  # a moment: nanoseconds of ``time.perf_counter_ns``, or a timed ``torch.Event``

UNITS, WAITS, STEPS, CHECKPOINTS = "units", "waits", "steps", "checkpoints"
"""Tracks of a trace besides those of the engine's streams: the units on the compute stream, the waits of the host."""

_MOST_KEPT = 512  # waits that are kept before their times are added up


def seconds_between(begin: Mark, end: Mark) -> float:
    """Return the seconds between two moments of one kind, which have come."""
    if isinstance(begin, int):
        return float(end - begin) / 1e9
    return float(begin.elapsed_time(end)) / 1e3


def has_come(mark: Mark) -> bool:
    return isinstance(mark, int) or mark.query()


@dataclass
class Interval:
    """The time between two moments, of one or several steps."""

    begin: Mark
    end: Mark = None
    waits: list[tuple[Mark, Mark]] = field(default_factory=list)  # for communication, not added up yet: begin, end
    waited_s: float = 0.0  # the sum of the others
    pauses: list[tuple[Mark, Mark]] = field(default_factory=list)  # (begin, end) of times that do not count

    def add_up(self) -> None:
        while self.waits and has_come(self.waits[0][1]):
            self.waited_s += seconds_between(*self.waits.pop(0))

    def wait(self) -> None:
        """Wait until it is over, on a device that still computes it."""
        if not has_come(self.end):
            self.end.synchronize()

    def read(self) -> tuple[float, float]:
        """Return the seconds in all, and those of waits, when it is over."""
        self.add_up()
        seconds = seconds_between(self.begin, self.end) - sum(seconds_between(*pause) for pause in self.pauses)
        return max(seconds, 1e-9), min(max(self.waited_s, 0.0), max(seconds, 1e-9))


@dataclass(frozen=True)
class TraceSlice:
    """A piece of work, or a wait, on one track of a trace."""

    track: str
    name: str
    begin: Mark
    end: Mark


class Recorder:
    """Collects the waits of this rank, and spans while ``traces``."""

    def __init__(self, device: torch.device) -> None:
        self.device = device  # the times of its streams are read from events
        self.is_timed = accelerator.is_accelerator(device)
        self.traces = False
        self.spans: list[TraceSlice] = []  # since `traces` was set
        # Of gathered parameters that are in memory now, counted since the recorder was made, and at most.
        self.gathered_bytes = self.most_gathered_bytes = 0
        self._compute = accelerator.current_stream(device) if self.is_timed else None
        self._open: dict[tuple[str, str], Mark] = {}  # the phases that units are in
        self._paused = False
        self._depth = 0
        self._interval = Interval(self.now())

    def now(self, stream: torch.Stream | None = None) -> Mark:
        """Return this moment: on a device, when all work on `stream`, by default the compute stream, is done."""
        on = stream or self._compute
        return time.perf_counter_ns() if on is None else accelerator.record_timed(on)

    # Steps

    def end_interval(self) -> Interval:
        """End an interval here, and begin the next one."""
        if self.is_timed:
            self._compute = accelerator.current_stream(self.device)
        ended, self._interval = self._interval, Interval(self.now())
        ended.end = self._interval.begin
        return ended

    @contextlib.contextmanager
    def paused(self) -> Iterator[None]:
        """Let time and waits not count, as a context."""
        if self._paused:
            yield
            return
        begin, self._paused = self.now(), True
        try:
            yield
        finally:
            self._paused = False
            self._interval.pauses.append((begin, self.now()))

    def pop_most_gathered(self) -> int:
        """Return the most bytes of gathered parameters at a time since the last call."""
        most, self.most_gathered_bytes = self.most_gathered_bytes, self.gathered_bytes
        return most

    # What the engine and the communicators report

    def begin_wait(self) -> tuple[Mark, int]:
        """Note that the host begins to wait for other ranks, while the compute stream may run empty."""
        self._depth += 1
        return self.now(), time.perf_counter_ns()

    def end_wait(self, begun: tuple[Mark, int], label: str) -> None:
        """Note that the host has waited, in a collective with this label."""
        self._depth -= 1
        if not self._depth:  # otherwise the outer wait counts
            self._add_wait(begun[0], self.now())
        self.add_span(WAITS, label, begun[1], time.perf_counter_ns())

    def stream_waits(self, track: str, why: str, stream: torch.Stream, event: torch.Event, *, counts: bool) -> None:
        """Have the stream of a track wait for an event, and time that. A wait of the compute stream `counts`."""
        begin = self.now(stream)
        stream.wait_event(event)
        end = self.now(stream)
        if counts:
            self._add_wait(begin, end)
        self.add_span(f"{track} waits", why, begin, end)

    def change_state(self, unit: str, before: str, after: str) -> None:
        """Note that a unit goes from one ``TrainingState`` to another. Its backward lasts while it recomputes."""
        if not self.traces:
            return
        now = self.now()
        begin = self._open.pop((unit, before), None) if after != "recompute" else None
        if begin is not None:
            self.add_span(UNITS, f"{before} {unit}", begin, now)
        if after != "idle" and before != "recompute":
            self._open[unit, after] = now

    def add_span(self, track: str, name: str, begin: Mark, end: Mark) -> None:
        """Add a span, if they are kept."""
        if self.traces:
            self.spans.append(TraceSlice(track, name, begin, end))

    def count_gathered(self, nbytes: int) -> None:
        """Note that memory of gathered parameters was allocated, or freed if `nbytes` is negative."""
        self.gathered_bytes = max(0, self.gathered_bytes + nbytes)  # some may be from before the recorder
        self.most_gathered_bytes = max(self.most_gathered_bytes, self.gathered_bytes)

    def pop_spans(self) -> list[TraceSlice]:
        """Return all spans that are over, and keep none any more."""
        self.traces = False
        self._open.clear()
        found, self.spans = self.spans, []
        return found

    def _add_wait(self, begin: Mark, end: Mark) -> None:
        if self._paused:
            return
        self._interval.waits.append((begin, end))
        if not self.is_timed or len(self._interval.waits) > _MOST_KEPT:
            self._interval.add_up()


recorder: Recorder | None = None  # the recorder of this process, while a run is observed


@contextlib.contextmanager
def waiting(label: str) -> Iterator[None]:
    """Note a wait of the host for other ranks, as a context."""
    observer = recorder
    begun = observer.begin_wait() if observer is not None else None
    try:
        yield
    finally:
        if observer is not None and begun is not None:
            observer.end_wait(begun, label)
