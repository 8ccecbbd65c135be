"""A failure on one rank ends the whole job within seconds; the others would wait in a collective."""

from __future__ import annotations

import contextlib
import io
import os
import sys
import time
import traceback
from collections.abc import Callable
from types import TracebackType
from typing import Any

from hpcfsdp import _compat, env
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.terminal import shown_lines

OUTPUT_GRACE_S = 0.5
"""Launchers drop output that has not reached them when the abort does."""
TOGETHER_S = 3.0
"""How long other ranks leave it to rank 0 to print an error that all of them raise, and to end the job."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]


def install(comm: Any) -> None:
    """From now on an uncaught exception prints its traceback, with rank and host, and ends all processes of the job.

    A hook that the user has set prints in place of this one. May be called again, to be in front of hooks that torch
    has put there since.
    """
    if comm.size > 1:
        sys.excepthook = _EndOfJob(_hook_of_user(sys.excepthook), comm.rank)


def _hook_of_user(hook: Hook) -> Hook:
    """What prints exceptions behind the hooks of torch and of this module."""
    while True:
        behind = hook.before if isinstance(hook, _EndOfJob) else _compat.hook_behind_torch(hook)
        if behind is None:
            return hook
        hook = behind


class _EndOfJob:
    """The exception hook of a rank."""

    _is_running = False

    def __init__(self, before: Hook, rank: int) -> None:
        self.before = before
        self._rank = rank
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A forked child is no rank: its parent is. And a hook that was set later may call this one, from within it.
        if os.getpid() != self._process or _EndOfJob._is_running:
            self.before(kind, error, trace)
            return
        _EndOfJob._is_running = True
        try:
            if self._rank and getattr(error, "raised_on_all_ranks", False):
                time.sleep(TOGETHER_S)
            message = "ended the job after an uncaught error"
            if self.before is sys.__excepthook__:  # in one piece: other ranks print, too
                message += "\n" + "".join(traceback.format_exception(kind, error, trace))
                abort(message, exit_code(error))
            else:
                abort(message, exit_code(error), lambda: self.before(kind, error, trace))
        finally:
            _EndOfJob._is_running = False


def exit_code(error: BaseException) -> int:
    """The code with which a job ends after this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, HpcfsdpError) else 1


def uncaught() -> BaseException | None:
    """What has ended this program, if a hook that the user has set later has printed it: that lets the job go on."""
    return None if isinstance(sys.excepthook, _EndOfJob) else getattr(sys, "last_value", None)


def abort(message: str, exit_code: int, show: Callable[[], Any] = lambda: None) -> None:
    """Print a message with rank and host, and end all processes of the job. Does not return, while MPI runs.

    Args:
        show: prints more to stderr.
    """
    from mpi4py import MPI

    running = not MPI.Is_finalized()
    who = f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on " if running else ""
    with contextlib.suppress(Exception):  # closed, or not there: the job has to end all the same
        sys.stdout.flush()
    with contextlib.suppress(BaseException):
        # torch's own exception hook collects what is printed until ours returns, which it does not.
        stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr
        with contextlib.redirect_stderr(stream):
            stream.write(f"hpcfsdp: {who}{env.host_name()}: {shown_lines(message.rstrip())}\n")
            show()
            stream.flush()
    if running:
        time.sleep(OUTPUT_GRACE_S)
        MPI.COMM_WORLD.Abort(exit_code & 0xFF or 1)
