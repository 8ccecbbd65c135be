"""A failure on one rank ends the whole job within seconds; the others would wait in a collective."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from types import TracebackType
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import HpcfsdpError

OUTPUT_GRACE_S = 0.5
"""Launchers drop output that has not reached them when the abort does."""


def install(comm: Any) -> None:
    """From now on an uncaught exception prints its traceback, with rank and host, and ends all processes of the job.

    May be called again, to be in front of hooks that others have put there since.
    """
    if comm.size == 1:
        return
    process = os.getpid()

    def report_and_abort(kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        text = "".join(traceback.format_exception(kind, error, trace))
        if os.getpid() != process:  # a forked child: its parent is the rank
            sys.stderr.write(text)
            return
        code = 130 if issubclass(kind, KeyboardInterrupt) else error.exit_code if isinstance(error, HpcfsdpError) else 1
        abort(f"ended the job after an uncaught error\n{text}", code)

    sys.excepthook = report_and_abort


def abort(message: str, exit_code: int) -> None:
    """Print a message with rank and host, and end all processes of the job. Does not return, while MPI runs."""
    from mpi4py import MPI

    running = not MPI.Is_finalized()
    who = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on " if running else ""
    with contextlib.suppress(Exception):  # closed, or not there: the job has to end all the same
        sys.stdout.flush()
    with contextlib.suppress(Exception):
        # torch's own exception hook collects what is printed until ours returns, which it does not.
        stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr
        stream.write(f"hpcfsdp: {who}{env.host_name()}: {message.rstrip()}\n")
        stream.flush()
    if running:
        time.sleep(OUTPUT_GRACE_S)
        MPI.COMM_WORLD.Abort(exit_code & 0xFF or 1)
