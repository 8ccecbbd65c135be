"""Where the time of a long operation goes: seconds and bytes by phase, told at debug level."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass


class Phase(enum.Enum):
    """What an operation is busy with."""

    PREPROCESSING = "preprocessing"
    OBJECT_GATHER = "object gather"
    TENSOR_ALL_GATHER = "tensor all-gather"
    DEVICE_TO_HOST = "device to host"
    RESHARDING = "resharding"


@dataclass
class Spent:
    """On one phase, all its turns together.

    Attributes:
        seconds: without those of phases that ran inside of it.
        nbytes: that it was said to move.
        turns: how often it was entered.
    """

    seconds: float = 0.0
    nbytes: int = 0
    turns: int = 0


class SimpleProfiler:
    """Collects what ``profile`` measures inside of ``with SimpleProfiler(...)``; on the way out a line goes to the log.

    Profilers do not see each other: one within another takes what happens in it. Where none is active, or the log does
    not take debug messages, ``profile`` costs next to nothing.
    """

    def __init__(self, title: str, log: logging.Logger) -> None:
        self.title = title
        self.spent: dict[Phase, Spent] = {}
        self._log = log
        self._inner: list[float] = []
        self._token: contextvars.Token[SimpleProfiler | None] | None = None

    def __enter__(self) -> SimpleProfiler:
        self._token = _current.set(self if self._log.isEnabledFor(logging.DEBUG) else None)
        self._began = time.perf_counter()
        return self

    def __exit__(self, *_error: object) -> None:
        _current.reset(self._token)
        if self._log.isEnabledFor(logging.DEBUG):
            self._log.debug("%s: %.3f s; %s", self.title, time.perf_counter() - self._began, self)

    def __str__(self) -> str:
        return ", ".join(
            f"{phase.value} {spent.seconds:.3f} s in {spent.turns}"
            + (f" ({spent.nbytes / (1 << 20):.1f} MiB)" if spent.nbytes else "")
            for phase, spent in self.spent.items()
        )

    @contextlib.contextmanager
    def measure(self, phase: Phase, nbytes: int) -> Iterator[None]:
        """A turn of a phase; turns may be nested, also of the same phase."""
        began = time.perf_counter()
        self._inner.append(0.0)
        try:
            yield
        finally:
            took, inner = time.perf_counter() - began, self._inner.pop()
            if self._inner:
                self._inner[-1] += took
            spent = self.spent.setdefault(phase, Spent())
            spent.seconds += took - inner
            spent.nbytes += nbytes
            spent.turns += 1


_current: contextvars.ContextVar[SimpleProfiler | None] = contextvars.ContextVar("profiler", default=None)


def profile(phase: Phase, nbytes: int = 0) -> contextlib.AbstractContextManager[None]:
    """A context whose time counts for `phase` in the profiler that is active, if there is one.

    Args:
        nbytes: that are moved in it.
    """
    profiler = _current.get()
    return contextlib.nullcontext() if profiler is None else profiler.measure(phase, nbytes)
