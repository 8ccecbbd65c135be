"""Signals that announce the end of a job, as a flag that the program reads between steps."""

from __future__ import annotations

import mmap
import os
import signal
import struct
import threading
import time
from types import FrameType

from hpcfsdp.errors import LaunchError

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


_TIME = struct.Struct("d")
_SETTLED_S = 0.5
"""A scheduler sends SIGTERM to all processes of a job, to the rank perhaps a moment after its children."""
_TOGETHER_S = 3.0


class StopSignals:
    """A context in which the first of ``STOP_SIGNALS`` sets ``received``, and later ones do nothing.

    The handler saves no checkpoint: it may run in the middle of a collective. Once a signal has arrived the handlers
    stay after the end of the context: the program is about to leave, and another signal must not kill it meanwhile.
    """

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal, 0 before one arrives."""
        self._previous: dict[int, object] = {}
        self._terminated = mmap.mmap(-1, _TIME.size)  # when the rank got SIGTERM, for children that it forks
        self._survived_s = 0.0

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("signals can be handled in the main thread alone: enter hpcfsdp.preemption() there")
        for number in STOP_SIGNALS:
            before = signal.signal(number, self._note)
            self._previous.setdefault(number, before)  # entered again where other code has set handlers meanwhile
        return self

    def __exit__(self, *_: object) -> None:
        previous, self._previous = self._previous, {}
        if self.received:
            return
        for number, handler in previous.items():
            if signal.getsignal(number) == self._note:  # not where the program, or exit_requeue, has set another one
                signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside of Python

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
        if number == signal.SIGTERM:
            _TIME.pack_into(self._terminated, 0, time.monotonic())

    def end_child(self, number: int, _frame: FrameType | None) -> None:
        """End a forked child as ``Process.terminate`` wants it, unless the rank has been told to stop as well.

        Then the child, which may load the data of the next step, lives on until it is told so once more.
        """
        time.sleep(_SETTLED_S)
        (told_s,) = _TIME.unpack_from(self._terminated)
        if time.monotonic() - told_s < _TOGETHER_S and told_s != self._survived_s:
            self._survived_s = told_s
            return
        signal.signal(number, signal.SIG_DFL)
        os.kill(os.getpid(), number)


def _in_child() -> None:
    owner = getattr(signal.getsignal(signal.SIGTERM), "__self__", None)
    if isinstance(owner, StopSignals):
        signal.signal(signal.SIGTERM, owner.end_child)


os.register_at_fork(after_in_child=_in_child)


def ignore_stop_signals() -> None:
    """Not collective. From now on none of ``STOP_SIGNALS`` ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
