"""How far a long command has come, on stderr, where stderr is a terminal."""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator

from hpcfsdp import env
from hpcfsdp.terminal import shown


@contextlib.contextmanager
def progress(what: str, nbytes: int) -> Iterator[Callable[[int], None]]:
    """A bar while the block runs, gone when it ends; nothing at all where stderr is no terminal.

    Args:
        what: is done, for the front of the bar.
        nbytes: to go through in all.

    Returns:
        What is to be called with the number of bytes of each step.
    """
    if not sys.stderr.isatty():
        yield _nothing
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn, TimeRemainingColumn

    columns = (TextColumn("{task.description}", markup=False), BarColumn(), DownloadColumn(True), TimeRemainingColumn())
    console = Console(stderr=True, no_color=env.colour_refused() or None)
    with Progress(*columns, console=console, transient=True) as bar:
        task = bar.add_task(shown(what), total=nbytes)
        yield lambda step: bar.advance(task, step)


def _nothing(nbytes: int) -> None:
    """Nobody looks."""
