"""``hpcfsdp watch RUN_DIR``: follows a running job in a terminal. Needs neither MPI nor torch."""

from __future__ import annotations

import argparse
import os
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.cli.arguments import Parser, number_in
from hpcfsdp.cli.printing import console, print_json, print_line
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.report.live import ASCII_BLOCKS, BLOCKS, Follower, View, line_of, rows_of, view_of
from hpcfsdp.report.run_folder import check_folder, nothing_in
from hpcfsdp.text.terminal import shown

_EXIT_INTERRUPTED = 130
_LABEL = 12
"""Columns of the labels."""

parser = Parser(
    "watch",
    "Follow a run from any node that sees its folder: step, loss, throughput, waits, memory, the slowest rank, the "
    "last checkpoint, and the last warnings. It ends when the run does not run: at once, or with --wait after the "
    "run has begun again. Without a terminal it prints a line for each change. A folder that is not there yet is "
    "waited for.",
    "hpcfsdp watch runs/quickstart                 # until the run ends, or Ctrl-C",
    "hpcfsdp watch runs/quickstart --once          # the state now",
    "hpcfsdp watch runs/quickstart --once --json   # for programs",
    "hpcfsdp watch runs/quickstart --wait          # also after a requeue that has not begun yet",
    "hpcfsdp watch runs/quickstart --interval 60   # on a busy file system",
)
add = parser.add_argument
add("run_dir", metavar="RUN_DIR", type=Path, help="the folder of the run")
add("--once", action="store_true", help="print the state now, and end")
add("--wait", action="store_true", help="if the run does not run now, wait until it begins again")
_SECONDS = number_in(0.1, 86401, "a number of seconds from 0.1 to 86400")
add("--interval", metavar="SECONDS", type=_SECONDS, default=2.0, help="between two looks at the files (default 2)")


def main(arguments: Sequence[str]) -> int:
    """Show the run until it ends; the exit code."""
    options = parser.parse_args(arguments)
    if options.json and not options.once:
        raise UsageError("watch: --json is for --once")
    if options.wait and options.once:
        raise UsageError("watch: --wait and --once exclude each other")
    follower = Follower(options.run_dir)
    try:
        if options.once:
            _show_once(follower, options.json)
        elif sys.stdout.isatty():
            from rich.live import Live

            with Live(console=console(moving=True), auto_refresh=False) as live:
                for view in _views(follower, options):
                    live.update(_drawn(follower.folder, view), refresh=True)
        else:
            last = ""
            for view in _views(follower, options):
                line = _waiting(follower.folder) if view is None else line_of(view)
                if line != last:
                    print_line(time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()), line)
                    sys.stdout.flush()
                last = line
    except OSError as error:
        raise HpcfsdpError(f"{error.filename or options.run_dir}: cannot be read: {reason(error)}") from error
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED
    return 0


def _show_once(follower: Follower, as_json: bool) -> None:
    check_folder(follower.folder)
    view = _look(follower)
    if view is None:
        raise nothing_in(follower.folder)
    if as_json:
        print_json({"run_dir": str(follower.folder), **view.as_json()})
    elif sys.stdout.isatty():
        console().print(_drawn(follower.folder, view))
    else:
        print_line(line_of(view))


def _views(follower: Follower, options: argparse.Namespace) -> Iterator[View | None]:
    """Yield the state of the run again and again, until it does not run (any more, if asked to wait for it)."""
    has_run = False
    while True:
        if os.path.lexists(follower.folder):
            check_folder(follower.folder)
        view = _look(follower)
        yield view
        if view is not None:
            runs = view.summary.status == "running"
            if not runs and (has_run or not options.wait):
                return
            has_run = has_run or runs
        time.sleep(options.interval)


def _look(follower: Follower) -> View | None:
    follower.poll()
    return view_of(follower.run(), tuple(follower.warnings), time.time()) if follower.has_begun else None


def _waiting(folder: Path) -> str:
    if not folder.exists():
        return f"waiting for {folder}: there is no such folder yet"
    return f"waiting for the first step: nothing is recorded in {folder} yet"


def _drawn(folder: Path, view: View | None) -> Any:
    """Return what a terminal shows."""
    from rich.table import Table
    from rich.text import Text

    screen = console()
    blocks = BLOCKS if (screen.encoding or "").lower().startswith("utf") else ASCII_BLOCKS
    table = Table.grid(padding=(0, 2, 0, 0))
    table.add_column(width=_LABEL, no_wrap=True)
    table.add_column(overflow="fold")
    table.add_row(Text("run", style="dim"), Text(shown(folder), style="bold"))
    if view is None:
        table.add_row(Text("status", style="dim"), Text(shown(_waiting(folder))))
        return table
    for label, text in rows_of(view, min(screen.width, 100) - _LABEL - 3, blocks):
        table.add_row(Text(label, style="dim"), Text(text, style="yellow" if label == "warning" else ""))
    return table
