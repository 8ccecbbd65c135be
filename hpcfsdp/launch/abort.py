"""An uncaught exception on one rank ends the whole job within seconds; the others would wait in a collective."""

from __future__ import annotations

import sys
import traceback
from types import TracebackType
from typing import Any

_previous: Any = None


def install(comm: Any) -> None:
    """From now on an uncaught exception prints its traceback, with rank and host, and aborts all processes of MPI."""
    global _previous
    if comm.size == 1 or _previous is not None:
        return
    from hpcfsdp.launch.bootstrap import host_name

    rank, size, host = comm.rank, comm.size, host_name()

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        sys.stdout.flush()
        sys.stderr.write(f"hpcfsdp: rank {rank} of {size} on {host} ends the job after an uncaught error\n{text}")
        sys.stderr.flush()
        from mpi4py import MPI

        MPI.COMM_WORLD.Abort(130 if issubclass(kind, KeyboardInterrupt) else getattr(error, "exit_code", 1))

    _previous = sys.excepthook
    sys.excepthook = report_and_abort


def uninstall() -> None:
    """Give uncaught exceptions back to whoever had them before ``install``."""
    global _previous
    if _previous is not None:
        sys.excepthook = _previous
        _previous = None
