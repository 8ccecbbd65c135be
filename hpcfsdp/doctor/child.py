"""A child process for steps that may end a process, with a limit on its time. It reports facts by lines of JSON."""

from __future__ import annotations

import contextlib
import json
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from types import FrameType
from typing import Any

DUMP_SIGNAL = signal.SIGUSR2
"""Has the child print its stack to stderr (``faulthandler``)."""

_POLL_S = 0.05
_DUMP_S = 0.5
_END_S = 4.0
_LEAVE_S = 30.0
"""A child that has reported everything may take so long to end: on a busy node MPI takes seconds to finalize."""
_KEPT_BYTES = 1 << 16
_TAIL_LINES = 12
_FRAMES = 3
_NATIVE_FRAME = re.compile(r"\[\S+:\d+\] +\[ *\d+\] ")  # as Open MPI prints them


class Child:
    """``python -m module arguments FD``: it writes JSON objects, one on a line, to the file descriptor FD.

    Attributes:
        facts: its reports; later values of a key replace earlier ones.
        failure: how it ended, if not by itself with exit code 0; None as long as nothing is wrong.
        deadline: by ``time.monotonic``.
    """

    def __init__(self, module: str, *arguments: str, limit_s: float, forward: bool = False) -> None:
        """Start it. The parent stops waiting after `limit_s` seconds.

        With `forward` its output goes to stderr at once: a launcher that ends the job may leave no time for more.
        """
        self.facts: dict[str, Any] = {}
        self.failure: str | None = None
        self.deadline = time.monotonic() + limit_s
        self._limit_s = limit_s
        self._forward = forward
        self._report, self._printed, self._stack = b"", b"", b""
        self._dumping = False
        self._signal = 0
        self._reports, reports = os.pipe()
        self._output, output = os.pipe()
        os.set_blocking(self._reports, False)
        os.set_blocking(self._output, False)
        os.set_inheritable(reports, True)
        # A launcher that ends the job sends SIGTERM and SIGKILL a moment later: time for a message.
        self._previous = signal.signal(signal.SIGTERM, self._note)
        self._process = subprocess.Popen(
            [sys.executable, "-m", module, *arguments, str(reports)],
            stdin=subprocess.PIPE,
            stdout=output,  # not the parent's: MPI libraries print to stdout, too
            stderr=output,
            close_fds=False,  # one of them is a pipe to the mpirun of MPICH
        )
        os.close(reports)
        os.close(output)

    def __enter__(self) -> Child:
        return self

    def __exit__(self, *_: object) -> None:
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.close()
        if self.failure is None:
            self._wait_for_end(_END_S)
        if self._process.poll() is None:
            self._process.kill()
            self._process.wait()
        os.close(self._reports)
        os.close(self._output)
        signal.signal(signal.SIGTERM, signal.SIG_DFL if self._previous is None else self._previous)

    def wait_for(self, key: str) -> bool:
        """Wait until the child has reported `key`; False if it ended before, took too long, or a signal came."""
        while key not in self.facts and self.failure is None:
            ended = self._process.poll() is not None
            self._receive()
            if key in self.facts:
                break
            if ended:
                self.failure = how_it_ended(self._process.returncode)
            elif self._signal:
                self.failure = f"was ended from outside ({_signal_name(self._signal)} came)"
            elif time.monotonic() > self.deadline:
                self._dump()
                self.failure = f"gave no answer within {self._limit_s:g} s"
        return key in self.facts

    def answer(self, value: Any) -> None:
        """Send one line to the child."""
        with contextlib.suppress(BrokenPipeError):
            self._process.stdin.write(f"{json.dumps(value)}\n".encode())
            self._process.stdin.flush()

    def ended_well(self) -> bool:
        """Wait for the end of the child; False and a ``failure`` if that goes wrong."""
        if not self._wait_for_end(_LEAVE_S):
            self._dump()
            self.failure = f"did not end within {_LEAVE_S:g} s"
        elif self._process.returncode:
            self.failure = how_it_ended(self._process.returncode)
        return self.failure is None

    def output(self, *, unseen: bool = False) -> list[str]:
        """Return the last lines of its output, `unseen` ones alone if so; its last calls if its time was over."""
        printed = [] if unseen and self._forward else last_lines(self._printed.decode(errors="replace"))
        return printed + innermost_frames(self._stack.decode(errors="replace"))

    @property
    def ended_from_outside(self) -> bool:
        """Whether another process, such as the launcher, has sent SIGTERM."""
        return self._signal != 0

    def _wait_for_end(self, limit_s: float) -> bool:
        until = time.monotonic() + limit_s
        while self._process.poll() is None and time.monotonic() < until:
            self._receive()
        return self._process.poll() is not None

    def _receive(self) -> None:
        """Read reports and output, or wait a moment for some."""
        select.select([self._reports, self._output], [], [], _POLL_S)
        printed, report = _read(self._output), _read(self._reports)
        if self._dumping:
            self._stack += printed
        else:
            self._printed = (self._printed + printed)[-_KEPT_BYTES:]
            if self._forward and printed:
                sys.stderr.write(printed.decode(errors="replace"))
                sys.stderr.flush()
        *lines, self._report = (self._report + report).split(b"\n")
        for line in lines:
            self.facts |= json.loads(line)
        if not printed and not report:
            time.sleep(_POLL_S / 5)  # it has closed a pipe, so that select does not wait

    def _dump(self) -> None:
        self._receive()
        self._dumping = True
        self._process.send_signal(DUMP_SIGNAL)
        until = time.monotonic() + _DUMP_S
        while time.monotonic() < until:
            self._receive()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self._signal = number


def how_it_ended(code: int) -> str:
    """Return the return code of ``subprocess`` in words."""
    return f"ended the process ({_signal_name(-code)})" if code < 0 else f"ended the process (exit code {code})"


def last_lines(output: str) -> list[str]:
    """Return the end of some output, without rules and native stack frames."""
    lines = [line.rstrip() for line in output.replace("\0", "").splitlines() if line.strip(" -*=")]
    return [line for line in lines if not _NATIVE_FRAME.match(line)][-_TAIL_LINES:]


def innermost_frames(dump: str) -> list[str]:
    """Return the last calls in a stack that ``faulthandler`` printed."""
    frames = [line.strip() for line in dump.splitlines() if " File " in line and "<frozen " not in line]
    return [f"in {frame}" for frame in frames[:_FRAMES]]


def command_output(command: Sequence[str], limit_s: float) -> str | None:
    """Return the output of a short command, None if it fails or takes too long."""
    try:
        done = subprocess.run(
            command, stdin=subprocess.DEVNULL, capture_output=True, timeout=limit_s, text=True, check=False
        )
    except (OSError, subprocess.TimeoutExpired, UnicodeDecodeError):
        return None
    return done.stdout or done.stderr


def _read(pipe: int) -> bytes:
    received = b""
    with contextlib.suppress(BlockingIOError):
        while chunk := os.read(pipe, 1 << 16):
            received += chunk
    return received


def _signal_name(number: int) -> str:
    with contextlib.suppress(ValueError):
        return f"signal {number}, {signal.Signals(number).name}"
    return f"signal {number}"
