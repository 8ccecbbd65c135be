"""Profiles of long operations: seconds and bytes by phase, logged at debug level."""

from __future__ import annotations

import contextlib
import contextvars
import enum
import logging
import time
from collections.abc import Iterator
from dataclasses import dataclass


class Phase(enum.Enum):
    """A phase of an operation."""

    PREPROCESSING = "preprocessing"
    OBJECT_GATHER = "object gather"
    TENSOR_ALL_GATHER = "tensor all-gather"
    DEVICE_TO_HOST = "device to host"
    RESHARDING = "resharding"


@dataclass
class Spent:
    """The sums over all turns of a phase: seconds without those of nested phases, and bytes as given to ``profile``."""

    seconds: float = 0.0
    nbytes: int = 0
    turns: int = 0


class SimpleProfiler:
    """A context that sums what ``profile`` measures in it, and logs a line at its end.

    Only the innermost profiler measures. Where none is active, or the log level is above debug, ``profile`` costs next
    to nothing.
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
        """Measure a turn of a phase, within the context. Turns may be nested, also of the same phase."""
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
    """Return a context whose time, and moved bytes, count for `phase` in the active profiler, if there is one."""
    profiler = _current.get()
    return contextlib.nullcontext() if profiler is None else profiler.measure(phase, nbytes)
