"""Progress of a training or a long command: a bar if stderr is a terminal, since bars flood job logs."""

from __future__ import annotations

import contextlib
import importlib.util
import logging
import sys
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING

from hpcfsdp import env
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from rich.console import Console


class Progress:
    """Receives every step. A context manager. This class shows nothing."""

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, *_: object) -> None:
        pass

    def step(self, step: int, text: str) -> None:
        """Note that step number `step` is done. `text` is its summary."""


class _LogLines(Progress):
    def __init__(self, logger: logging.Logger, first: int, last: int, every: int) -> None:
        self._logger, self._first, self._last, self._every = logger, first, last, every

    def step(self, step: int, text: str) -> None:
        if step % self._every == 0 or step in (self._first, self._last):
            self._logger.info("step %d/%d %s", step, self._last, text)


class _Bar(Progress):
    def __init__(self, first: int, last: int) -> None:
        from rich import progress as rich

        columns = rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn()
        self._bar = rich.Progress(*columns, rich.TextColumn("{task.description}"), console=_console())
        self._task = self._bar.add_task("", total=last, completed=first - 1)

    def __enter__(self) -> _Bar:
        self._bar.__enter__()
        return self

    def __exit__(self, *details: object) -> None:
        self._bar.__exit__(*details)

    def step(self, step: int, text: str) -> None:
        self._bar.update(self._task, completed=step, description=text)


def step_progress(logger: logging.Logger, rank: int, first: int, last: int, every: int) -> Progress:
    """Return the display of steps `first` to `last` on rank 0: without a terminal a line after `every` so many."""
    if rank != 0:
        return Progress()
    return _Bar(first, last) if _can_show_bars() else _LogLines(logger, first, last, every)


@contextlib.contextmanager
def byte_progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """Show a bar for `nbytes` bytes during the block, `what` in front of it, if stderr is a terminal.

    The block gets a function to call with the number of bytes of each step.
    """
    if not _can_show_bars():
        yield lambda step: None
        return
    from rich import progress as rich

    columns = rich.BarColumn(), rich.DownloadColumn(True), rich.TimeRemainingColumn()
    text = rich.TextColumn("{task.description}", markup=False)
    with rich.Progress(text, *columns, console=_console(), transient=True) as bar:
        task = bar.add_task(shown(what), total=nbytes)
        yield lambda step: bar.advance(task, step)


def _can_show_bars() -> bool:
    """Return whether stderr is a terminal, and rich is installed: without the extra `cli` work goes on without bars."""
    return sys.stderr.isatty() and importlib.util.find_spec("rich") is not None


def _console() -> Console:
    from rich.console import Console

    return Console(stderr=True, no_color=env.colour_refused() or None)
