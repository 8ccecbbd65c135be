"""Signals that announce the end of a job, as a flag that the training reads between steps."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopRequest:
    """A context in which the first of ``STOP_SIGNALS`` sets ``received``.

    The handler saves no checkpoint: it may run in the middle of a collective. Ranks compare the flag between two steps,
    since a signal may reach one rank earlier than another.
    """

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal, 0 before one arrives."""
        self._previous: dict[int, object] = {}

    def __enter__(self) -> StopRequest:
        for number in STOP_SIGNALS:
            self._previous[number] = signal.signal(number, self._note)
        return self

    def __exit__(self, *_: object) -> None:
        for number, handler in self._previous.items():
            signal.signal(number, signal.SIG_DFL if handler is None else handler)  # None: set outside of Python
        self._previous.clear()

    def _note(self, number: int, _frame: FrameType | None) -> None:
        self.received = self.received or number
