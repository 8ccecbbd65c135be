"""Memory of processes as their proportional set size, sampled by another process.

Shared memory counts once: each process has an equal part of it. ``python -m tests.bench.pss PID...`` is the sampler: it
reads "start" and "stop" from its standard input, and answers each with a number of bytes. It is a process because a
sampling thread would compete with the measured program for the interpreter, and would not see other processes.

``/proc/PID/smaps_rollup`` is exact, but the kernel walks through all pages for it. That takes milliseconds, which may
miss a peak, and during which the process cannot map memory. ``/proc/PID/status`` takes microseconds. So the first gives
the memory at the start and the shared part whenever that changes, the second the changes since then.
"""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import re
import select
import subprocess
import sys
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from hpcfsdp.bench.harness import mib
from hpcfsdp.errors import LaunchError

if TYPE_CHECKING:
    from hpcfsdp.comm import Communicator

INTERVAL_S = 0.0003
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD = -1, -3
_LEAST_BYTES, _MOST_BYTES = 128 << 10, 32 << 20

_OWN = re.compile(rb"^(?:RssAnon|VmSwap):\s*(\d+) kB$", re.MULTILINE)
_SHARED = re.compile(rb"^RssShmem:\s*(\d+) kB$", re.MULTILINE)
# Without memory of mapped files, which is program code: its size depends on other processes that run it.
_OWN_PART = re.compile(rb"^(?:Pss_Anon|SwapPss):\s*(\d+) kB$", re.MULTILINE)
_SHARED_PART = re.compile(rb"^Pss_Shmem:\s*(\d+) kB$", re.MULTILINE)


class Sampler:
    """Watches processes of this node from another process."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Start the process. Raise a LaunchError where this system does not show the memory of processes."""
        PssReader(pids).close()  # raises the error of the sampler here
        command = [sys.executable, "-m", __name__, *map(str, pids)]
        self._process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)

    def start(self) -> int:
        """Begin to sample; return the bytes that all processes hold at this moment."""
        return self._ask("start")

    def stop(self) -> int:
        """Return the peaks since ``start``, added up: the peak of their sum depends on how they happen to coincide."""
        return self._ask("stop")

    def close(self) -> None:
        self._process.communicate()

    def _ask(self, word: str) -> int:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{word}\n")
            self._process.stdin.flush()
        answer = self._process.stdout.readline()
        if not answer:
            raise LaunchError("the process that samples memory has ended")
        return int(answer)


def sampled(comm: Communicator, sampler: Sampler | None, action: Callable[[], object]) -> tuple[int, int]:
    """Return bytes before `action`, and at its peak, with its result; 0 without a sampler. Collective over `comm`."""
    trim()
    comm.barrier()
    before = sampler.start() if sampler is not None else 0
    comm.barrier()
    result = action()
    comm.barrier()
    peak = sampler.stop() if sampler is not None else 0
    del result
    return before, peak


def give_back_at_once() -> None:
    """Have the C library return freed memory to the system at once."""
    # By default glibc keeps blocks below a size that grows with the largest freed one, and uses them again by chance.
    _set_limits(_LEAST_BYTES, _LEAST_BYTES)


def keep_freed() -> None:
    """Have the C library keep freed memory as it does by default, after large blocks were freed."""
    _set_limits(_MOST_BYTES, 2 * _MOST_BYTES)


def _set_limits(mapped: int, trimmed: int) -> None:
    with contextlib.suppress(OSError, AttributeError):  # another C library
        ctypes.CDLL(None).mallopt(_M_MMAP_THRESHOLD, mapped)
        ctypes.CDLL(None).mallopt(_M_TRIM_THRESHOLD, trimmed)


def trim() -> None:
    gc.collect()
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).malloc_trim(0)


class Peak(NamedTuple):
    """Peak bytes of some calls, above the memory before them, and the least peak that they can have."""

    calls: tuple[int, ...]
    analytic: int

    @property
    def highest(self) -> int:
        return max(self.calls)

    def cells(self) -> tuple[str, ...]:
        """Return the highest peak, all of them, the analytic one, and the highest as a multiple of it."""
        ratio = f"{self.highest / self.analytic:.3f}x"
        return mib(self.highest), f"{mib(min(self.calls))} - {mib(self.highest)}", mib(self.analytic), ratio

    def as_json(self, calls: str) -> dict[str, Any]:
        """Return all of it by name, with the peaks of the single calls under the key `calls`."""
        sizes = {calls: list(self.calls), "analytic_bytes": self.analytic, "peak_bytes": self.highest}
        return {**sizes, "analytic_ratio": self.highest / self.analytic}


class PssReader:
    """The bytes that each of some processes holds: its own memory, and an equal part of their shared memory."""

    def __init__(self, pids: Sequence[int]) -> None:
        self._status: list[int] = []
        self._rollup: list[int] = []
        try:
            for pid in pids:
                self._status.append(os.open(f"/proc/{pid}/status", os.O_RDONLY))
                self._rollup.append(os.open(f"/proc/{pid}/smaps_rollup", os.O_RDONLY))
            self.begin()
        except (OSError, ValueError) as error:
            self.close()
            raise LaunchError(
                f"/proc does not show the memory of processes {', '.join(map(str, pids))} ({error}); Linux does from "
                "5.4 on"
            ) from None

    def begin(self) -> list[int]:
        """Return what they hold now, exactly. ``now`` adds later changes to it."""
        exact = [_read(fd) for fd in self._rollup]
        rough = [_read(fd) for fd in self._status]
        self._ahead = [_kib(_OWN_PART, one) - _kib(_OWN, other) for one, other in zip(exact, rough, strict=True)]
        self._sharers = [_kib(_SHARED, text) for text in rough]
        self._shared = sum(_kib(_SHARED_PART, text) for text in exact)
        return self.now()

    def now(self) -> list[int]:
        """Return what they hold now, quickly."""
        rough = [_read(fd) for fd in self._status]
        sharers = [_kib(_SHARED, text) for text in rough]
        if sharers != self._sharers:
            self._sharers = sharers
            self._shared = sum(_kib(_SHARED_PART, _read(fd)) for fd in self._rollup)
        part = self._shared // len(rough)
        return [(_kib(_OWN, text) + ahead + part) << 10 for text, ahead in zip(rough, self._ahead, strict=True)]

    def close(self) -> None:
        for fd in (*self._status, *self._rollup):
            os.close(fd)


def _read(fd: int) -> bytes:
    return os.pread(fd, 1 << 14, 0)


def _kib(pattern: re.Pattern[bytes], text: bytes) -> int:
    found = pattern.findall(text)
    if not found:
        raise ValueError("the wanted lines are missing")
    return sum(map(int, found))


def main(pids: Sequence[int]) -> None:
    """Answer standard input until it ends."""
    reader = PssReader(pids)
    while sys.stdin.readline():
        peaks = reader.begin()
        print(sum(peaks), flush=True)
        asked = False
        while not asked:
            asked = bool(select.select([sys.stdin], [], [], INTERVAL_S)[0])
            peaks = list(map(max, peaks, reader.now()))
        sys.stdin.readline()
        print(sum(peaks), flush=True)


if __name__ == "__main__":
    # An error here means that the watched processes have ended.
    with contextlib.suppress(LaunchError, OSError, ValueError):
        main([int(pid) for pid in sys.argv[1:]])
