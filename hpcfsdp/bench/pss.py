"""Memory of processes as their proportional set size, sampled from a process of its own.

What processes share counts once: each has its part of it. Run as ``python -m hpcfsdp.bench.pss PID...`` this is the
sampler: it reads "start" and "stop" from its standard input, and answers each with a number of bytes. From the outside,
since a sampling thread would take turns with the measured program for the interpreter, and would not see several
processes at one time.

``/proc/PID/smaps_rollup`` is exact, but the kernel walks through all pages for it: milliseconds, in which a peak passes
by, and in which the process cannot map memory. ``/proc/PID/status`` takes microseconds. So the first says where a
process stands when watching starts, and what it shares whenever that changes; the second, how it goes on from there.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import subprocess
import sys
from collections.abc import Sequence

from hpcfsdp.errors import LaunchError

INTERVAL_S = 0.0003

_OWN = re.compile(rb"^(?:RssAnon|VmSwap):\s*(\d+) kB$", re.MULTILINE)
_SHARED = re.compile(rb"^RssShmem:\s*(\d+) kB$", re.MULTILINE)
# Without memory that mirrors files, which is program code: how much of it is there depends on who else runs it.
_OWN_PART = re.compile(rb"^(?:Pss_Anon|SwapPss):\s*(\d+) kB$", re.MULTILINE)
_SHARED_PART = re.compile(rb"^Pss_Shmem:\s*(\d+) kB$", re.MULTILINE)


class Sampler:
    """Watches processes of this node from another process."""

    def __init__(self, pids: Sequence[int]) -> None:
        """Start it.

        Raises:
            LaunchError: this system does not tell what memory processes hold.
        """
        Watch(pids).close()  # raises here what would go wrong there
        self._process = subprocess.Popen(
            [sys.executable, "-m", __name__, *map(str, pids)],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def start(self) -> int:
        """Begin to watch; the bytes that all the processes hold at this moment."""
        return self._ask("start")

    def stop(self) -> int:
        """The most that each process has held since ``start``, added up.

        Not the most that all have held at one moment, which depends on how they happen to be in step.
        """
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


class Watch:
    """The bytes that each of some processes holds: its own memory, and an equal part of what they all share."""

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
                f"/proc does not say what memory processes {', '.join(map(str, pids))} hold ({error}); Linux does from "
                "5.4 on"
            ) from None

    def begin(self) -> list[int]:
        """What they hold now, exactly. ``now`` goes on from here."""
        exact = [_read(fd) for fd in self._rollup]
        rough = [_read(fd) for fd in self._status]
        self._ahead = [_kib(_OWN_PART, one) - _kib(_OWN, other) for one, other in zip(exact, rough, strict=True)]
        self._sharers = [_kib(_SHARED, text) for text in rough]
        self._shared = sum(_kib(_SHARED_PART, text) for text in exact)
        return self.now()

    def now(self) -> list[int]:
        """What they hold now, quickly."""
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
    watch = Watch(pids)
    while sys.stdin.readline():
        peaks = watch.begin()
        print(sum(peaks), flush=True)
        asked = False
        while not asked:
            asked = bool(select.select([sys.stdin], [], [], INTERVAL_S)[0])
            peaks = list(map(max, peaks, watch.now()))
        sys.stdin.readline()
        print(sum(peaks), flush=True)


if __name__ == "__main__":
    # What it watches has ended, and so does it.
    with contextlib.suppress(LaunchError, OSError, ValueError):
        main([int(pid) for pid in sys.argv[1:]])
