"""A trace of some steps in the format of Perfetto and Chrome: units, queues and waits, merged over ranks.

Each rank writes a part, in which times are on the clock of rank 0. Rank 0 joins the parts without reading them into
memory. Spans of a track that overlap without lying within each other get tracks of their own: viewers cannot draw them
in one.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
import statistics
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import torch

from hpcfsdp import accelerator, timeline
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import UsageError
from hpcfsdp.text import safe_files
from hpcfsdp.timeline import Recorder

log = logging.getLogger("hpcfsdp.observe")

FILE = "trace.json"
DEFAULT_STEPS = range(3, 6)
"""The first steps are slower than others: they allocate memory, and compare the order of units."""

_TRACKS = (
    *(timeline.STEPS, timeline.UNITS, "compute waits", "gather", "gather waits", "reduce", "reduce waits"),
    *("replicate", "replicate waits", timeline.WAITS, timeline.CHECKPOINTS),
)
"""The tracks, from top to bottom."""
_LANES = 1000
_ROUNDS = 9
_VISIBLE_WITHIN_S = 90.0  # clients of NFS see a new file after a minute at most
_CLOCK_BYTES = 64


def steps_to_trace(trace: bool | range) -> range | None:
    """Return the steps of a run to trace, the first one being 1; None for none."""
    if isinstance(trace, bool):
        return DEFAULT_STEPS if trace else None
    if not isinstance(trace, range) or trace.step != 1 or trace.start < 1 or not trace:
        raise UsageError(f"trace must be True, False or steps such as range(3, 6), counted from 1, not {trace!r}")
    return trace


class Trace:
    """Collects the spans of a recorder. Methods are collective over `comm`, except where marked."""

    def __init__(self, directory: Path, comm: Communicator, recorder: Recorder, rank: int, host: str) -> None:
        """Remove what a run that was killed has left. Not collective."""
        self._directory, self._comm, self._recorder = directory, comm, recorder
        self._rank, self._host = rank, host  # `rank` is that of the world
        self._parts = directory / f".{FILE}.parts"
        if comm.rank == 0:  # of a run that was killed; other ranks write after ``begin``, which waits for this one
            shutil.rmtree(self._parts, ignore_errors=True)
        self._shift_ns = 0
        self._first: Any = None  # a moment of the device, and the host's clock then
        self._first_ns = 0

    def begin(self) -> None:
        """Compare the clocks, and collect from here on. Waits for the device once."""
        recorder = self._recorder
        self._shift_ns = _clock_of_rank_0(self._comm)
        if recorder.is_timed:
            self._first = recorder.now()
            accelerator.synchronize(recorder.device)
            self._first_ns = time.perf_counter_ns()
        recorder.traces = True

    def end(self) -> None:
        """Write the trace. A rank that cannot write its part logs that, and is missing in it."""
        wrote = self.write_part()
        complete = torch.tensor([wrote], dtype=torch.int64, device=self._comm.device)
        self._comm.all_reduce(complete, "min")
        if self._comm.rank == 0:
            try:
                self._merge(wait=bool(complete.item()))
            except OSError as error:
                log.warning("%s cannot be written: %s", self._directory / FILE, error.strerror)

    def write_part(self) -> bool:
        """Write what this rank has collected; return whether that was possible. Not collective."""
        if self._recorder.is_timed:
            accelerator.synchronize(self._recorder.device)

        def moment(mark: Any) -> int:
            on_host = isinstance(mark, int)
            host_ns: int = mark if on_host else self._first_ns + int(self._first.elapsed_time(mark) * 1e6)
            return host_ns - self._shift_ns

        spans = [(each.track, each.name, moment(each.begin), moment(each.end)) for each in self._recorder.pop_spans()]
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            with safe_files.own_folder(self._parts, make=True) as folder:
                events = events_of(spans, pid=self._rank, process=f"rank {self._rank} ({self._host})")
                text = ",\n".join(map(json.dumps, events))
                safe_files.replace(self._part(self._comm.rank).name, text.encode(), folder=folder)
        except OSError as error:
            log.warning("rank %d cannot write its part of the trace: %s", self._rank, error.strerror)
            return False
        return True

    def _part(self, rank: int) -> Path:
        return self._parts / f"rank-{rank:06d}.json"

    def _merge(self, *, wait: bool) -> None:
        path, until_s = self._directory / FILE, time.monotonic() + (_VISIBLE_WITHIN_S if wait else 0.0)
        missing, first = [], True
        with safe_files.replacing(path) as merged:
            merged.write(b'{"displayTimeUnit": "ms", "traceEvents": [\n')
            for rank in range(self._comm.size):
                part = self._part(rank)
                while not part.exists() and time.monotonic() < until_s:
                    time.sleep(0.1)
                if not part.exists():
                    missing.append(rank)
                    continue
                merged.write(b"" if first else b",\n")
                first = False
                with safe_files.open_to_read(part) as file:
                    shutil.copyfileobj(file, merged)
            merged.write(b"\n]}\n")
        shutil.rmtree(self._parts, ignore_errors=True)
        if missing:
            log.warning("%s is without %d rank(s): %s", path, len(missing), missing[:16])
        log.info("wrote %s: open it in https://ui.perfetto.dev", path)


def events_of(spans: Iterable[tuple[str, str, int, int]], *, pid: int, process: str) -> Iterator[dict[str, Any]]:
    """Yield the events of one process: names, and a complete event ("X") for each (track, name, begin, end) in ns."""
    yield {"ph": "M", "name": "process_name", "pid": pid, "tid": 0, "args": {"name": process}}
    yield {"ph": "M", "name": "process_sort_index", "pid": pid, "tid": 0, "args": {"sort_index": pid}}
    by_track: dict[str, list[tuple[str, int, int]]] = {}
    for track, name, begin, end in spans:
        by_track.setdefault(track, []).append((name, begin, max(begin, end)))
    known = {track: place for place, track in enumerate(_TRACKS, 1)}
    for track, members in by_track.items():
        place = known.setdefault(track, len(known) + 1)
        for lane, lane_spans in enumerate(in_lanes(members)):
            tid = place * _LANES + lane
            name = track if lane == 0 else f"{track} ({lane + 1})"
            yield {"ph": "M", "name": "thread_name", "pid": pid, "tid": tid, "args": {"name": name}}
            yield {"ph": "M", "name": "thread_sort_index", "pid": pid, "tid": tid, "args": {"sort_index": tid}}
            for text, begin, end in lane_spans:
                times = {"ts": begin / 1e3, "dur": (end - begin) / 1e3}
                yield {"ph": "X", "name": text, "cat": track, "pid": pid, "tid": tid, **times}


def in_lanes(spans: Iterable[tuple[str, int, int]]) -> list[list[tuple[str, int, int]]]:
    """Divide spans so that any two in one lane are apart, or one lies within the other; each goes to the first lane."""
    lanes: list[tuple[list[tuple[str, int, int]], list[int]]] = []  # with the ends of spans that are open
    for span in sorted(spans, key=lambda span: (span[1], -span[2])):
        _, begin, end = span
        for _, ends in lanes:
            while ends and ends[-1] <= begin:
                ends.pop()
        lane = next((lane for lane in lanes if not lane[1] or end <= lane[1][-1]), None)
        if lane is None:
            lanes.append(lane := ([], []))
        lane[0].append(span)
        lane[1].append(end)
    return [members for members, _ in lanes]


def _clock_of_rank_0(comm: Communicator) -> int:
    """Return nanoseconds to subtract from this rank's clock: 0 is one moment on all ranks. Collective over `comm`.

    Ranks under one kernel have one clock. The others compare the ends of some barriers with those on rank 0, whose
    differences vary by what a message takes.
    """
    mine = []
    for _ in range(_ROUNDS):
        comm.barrier()
        mine.append(time.perf_counter_ns())
    theirs = torch.tensor(mine, dtype=torch.int64, device=comm.device)
    comm.broadcast(theirs, 0)
    clock = _name_of_clock().ljust(_CLOCK_BYTES, b"\0")[:_CLOCK_BYTES]
    name = torch.frombuffer(bytearray(clock), dtype=torch.uint8).to(comm.device)
    comm.broadcast(name, 0)
    first: list[int] = theirs.tolist()
    if bytes(name.tolist()) == clock and clock.strip(b"\0"):
        return first[-1]
    ahead = statistics.median(here - there for here, there in zip(mine, first, strict=True))
    return first[-1] + int(ahead)


def _name_of_clock() -> bytes:
    """Name the clock of ``time.perf_counter``, which starts with the kernel; empty where that is not known."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_bytes().strip()
        return boot + b" %d" % os.stat("/proc/self/ns/time").st_ino
    except OSError:
        return b""
