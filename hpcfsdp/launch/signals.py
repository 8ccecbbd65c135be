"""Signals by which a scheduler announces the end of a job, turned into a flag that is read at a step boundary."""

from __future__ import annotations

import signal
from types import FrameType

STOP_SIGNALS = (signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM)


class StopRequest:
    """While entered, the first of ``STOP_SIGNALS`` sets ``received``; nothing else happens inside the handler.

    Saving a checkpoint there would run in the middle of a collective. The training loop agrees on the flag among the
    ranks between two steps, since a signal may reach one rank earlier than another.
    """

    def __init__(self) -> None:
        self.received: int = 0
        """Number of the signal, 0 while none has come."""
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
