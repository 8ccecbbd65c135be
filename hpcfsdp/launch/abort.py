"""An uncaught exception on one rank ends the whole job within seconds; the others would wait in a collective."""

from __future__ import annotations

import sys
import time
import traceback
from types import TracebackType
from typing import Any

from hpcfsdp import env

OUTPUT_GRACE_S = 0.5
"""Launchers drop output that has not reached them when the abort does."""

_previous: Any = None


def install(comm: Any) -> None:
    """From now on an uncaught exception prints its traceback, with rank and host, and ends all processes of the job."""
    global _previous
    if comm.size == 1:
        return

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        code = 130 if issubclass(kind, KeyboardInterrupt) else getattr(error, "exit_code", 1)
        abort(f"ended the job after an uncaught error\n{text}", code)

    _previous = _previous or sys.excepthook
    sys.excepthook = report_and_abort


def uninstall() -> None:
    """Give uncaught exceptions back to whoever had them before ``install``."""
    global _previous
    if _previous is not None:
        sys.excepthook = _previous
        _previous = None


def abort(message: str, exit_code: int) -> None:
    """Print a message with rank and host, and end all processes of the job. Does not return."""
    from mpi4py import MPI

    world = MPI.COMM_WORLD
    sys.stdout.flush()
    sys.stderr.write(f"hpcfsdp: rank {world.rank} of {world.size} on {env.host_name()}: {message.rstrip()}\n")
    sys.stderr.flush()
    time.sleep(OUTPUT_GRACE_S)
    world.Abort(exit_code)
