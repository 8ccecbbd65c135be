"""Progress of a long loop: a bar on a terminal, otherwise a log line every so often (bars flood job logs)."""

from __future__ import annotations

import logging
import sys
from types import TracebackType
from typing import Protocol

from hpcfsdp import env


class Progress(Protocol):
    """Told of every step. A context manager."""

    def __enter__(self) -> Progress: ...

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None: ...

    def step(self, step: int, text: str) -> None:
        """Step number `step` is done; `text` sums it up."""


class _Silent:
    def __enter__(self) -> _Silent:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int, text: str) -> None:
        pass


class _Lines(_Silent):
    def __init__(self, logger: logging.Logger, first: int, last: int, every: int) -> None:
        self._logger, self._first, self._last, self._every = logger, first, last, every

    def step(self, step: int, text: str) -> None:
        if step % self._every == 0 or step in (self._first, self._last):
            self._logger.info("step %d/%d %s", step, self._last, text)


class _Bar(_Silent):
    def __init__(self, first: int, last: int) -> None:
        from rich.console import Console
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress as RichProgress,
            TextColumn,
            TimeRemainingColumn,
        )

        console = Console(stderr=True, no_color=env.colour_refused() or None)
        columns = (BarColumn(), MofNCompleteColumn(), TimeRemainingColumn(), TextColumn("{task.description}"))
        self._bar = RichProgress(*columns, console=console)
        self._task = self._bar.add_task("", total=last, completed=first - 1)

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.__exit__(*details)

    def step(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)


def progress(logger: logging.Logger, rank: int, first: int, last: int, every: int) -> Progress:
    """What rank `rank` shows of steps `first` to `last`; other ranks than 0 show nothing.

    Args:
        every: steps between two lines where there is no terminal.
    """
    if rank != 0:
        return _Silent()
    return _Bar(first, last) if sys.stderr.isatty() else _Lines(logger, first, last, every)
