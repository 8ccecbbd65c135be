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


@contextlib.contextmanager
def step_progress(
    logger: logging.Logger, rank: int, first: int, last: int, every: int
) -> Iterator[Callable[[int, str], None]]:
    """Show steps `first` to `last` on rank 0: a bar on a terminal, elsewhere a line of the log after `every` so many.

    The block gets a function to call with the number and the summary of each step that is done.
    """

    def write_line(step: int, text: str) -> None:
        if step % every == 0 or step in (first, last):
            logger.info("step %d/%d %s", step, last, text)

    if rank != 0 or not _can_show_bars():
        yield write_line if rank == 0 else lambda step, text: None
        return
    from rich import progress as rich

    columns = rich.BarColumn(), rich.MofNCompleteColumn(), rich.TimeRemainingColumn()
    with rich.Progress(*columns, rich.TextColumn("{task.description}"), console=_console()) as bar:
        task = bar.add_task("", total=last, completed=first - 1)
        yield lambda step, text: bar.update(task, completed=step, description=text)


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
