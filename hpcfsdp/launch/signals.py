"""Signals that announce the end of a job, as a flag that the program reads between steps."""

from __future__ import annotations

import signal
import threading
from types import FrameType

from hpcfsdp.errors import LaunchError

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopSignals:
    """A context in which the first of ``STOP_SIGNALS`` sets ``received``, and later ones do nothing.

    The handler saves no checkpoint: it may run in the middle of a collective. Once a signal has arrived the handlers
    stay after the end of the context: the program is about to leave, and another signal must not kill it meanwhile.
    """

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal, 0 before one arrives."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopSignals:
        if threading.current_thread() is not threading.main_thread():
            raise LaunchError("signals can be handled in the main thread alone: enter hpcfsdp.preemption() there")
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        previous, self._previous = self._previous, {}
        if self.received:
            return
        for number, handler in previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside of Python

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number


def ignore_stop_signals() -> None:
    """Not collective. From now on none of ``STOP_SIGNALS`` ends this process."""
    for number in STOP_SIGNALS:
        signal.signal(number, signal.SIG_IGN)
