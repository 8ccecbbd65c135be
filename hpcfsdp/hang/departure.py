"""The end of a job: a rank that fails aborts all processes within seconds, and the others detect one that leaves early.

- An uncaught exception prints its traceback with rank and host, and aborts all processes: the others would wait for
  this one in a collective. Ranks that fail within a moment of each other print one text (``tracebacks``).
- ``sys.exit`` does not reach the exception hook. The process would wait in ``MPI_Finalize`` for the others, and these
  for it in a collective. A rank that exits with an error code waits ``GRACE_S`` for the others to exit, too (all may
  have found the same error), then aborts the job. It does not after ``hpcfsdp.finalize()``, which all ranks call.
- A rank that exits without an error before the others sends them a message. A rank that waits for it in a collective
  raises an error (``departed``).
- Where the launcher of a rank has died, ``MPI_Finalize`` would wait for it: the ranks end without.
"""

from __future__ import annotations

import atexit
import contextlib
import functools
import gc
import io
import os
import sys
import threading
import time
import weakref
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hpcfsdp import env
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.hang import orphan, tracebacks
from hpcfsdp.text.terminal import shown_lines

OUTPUT_GRACE_S = 0.5
"""Before an abort: launchers drop output that arrives after it."""

Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
GRACE_S = 4.0
SEND_AFTER_S = 1.0
MOST_RANKS = 128
"""In jobs of more ranks a rank that exits early sends no messages, and ranks that wait for it time out."""
_TAG = 1
_OPEN_MPI_LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")
"""Names of the processes that start ranks, in versions 5 and 4."""

_comm: Any = None
_process = 0
_last: weakref.ref[_Exit] | None = None
_code: int = 0
"""The error code of this process; 0 if it exits without an error, or if the code is not known."""
_is_clean = False
_gone: set[int] = set()


def catch_errors(comm: Any) -> None:
    """Not collective. Install an exception hook that prints the traceback, with rank and host, and aborts the job.

    A hook of the user prints in place of this one. May be called again, after torch has installed its hook.
    """
    if comm.size > 1:
        sys.excepthook = _EndOfJob(_hook_of_user(sys.excepthook), comm.rank, comm.size)


def _hook_of_user(hook: Hook) -> Hook:
    """The hook that prints exceptions, behind the hooks of torch and of this module."""
    while True:
        behind = None
        if isinstance(hook, _EndOfJob):
            behind = hook.before
        elif getattr(hook, "__module__", "").startswith("torch."):
            from hpcfsdp import _compat  # loads torch, after MPI

            behind = _compat.hook_behind_torch(hook)
        if behind is None:
            return hook
        hook = behind


class _EndOfJob:
    """The exception hook of a rank."""

    _is_running = False

    def __init__(self, before: Hook, rank: int, size: int) -> None:
        self.before = before
        self._rank, self._size = rank, size
        self._process = os.getpid()

    def __call__(self, kind: type[BaseException], error: BaseException, trace: TracebackType | None) -> None:
        # A forked child is not a rank. And a hook that was set later may call this one, from within it.
        if os.getpid() != self._process or _EndOfJob._is_running:
            self.before(kind, error, trace)
            return
        _EndOfJob._is_running = True
        try:
            try:
                message, show = self._text(kind, error, trace)
            except BaseException:  # a second Ctrl-C, no memory: the job must end all the same
                message = f"rank {self._rank} of {self._size} on {env.host_name()}: {tracebacks.ENDED}"
                show = functools.partial(self.before, kind, error, trace)
            end_job(message, exit_code(error), show)
        finally:
            _EndOfJob._is_running = False

    def _text(
        self, kind: type[BaseException], error: BaseException, trace: TracebackType | None
    ) -> tuple[str, Callable[[], Any]]:
        """What this rank prints: a message for ``end_job``, and a function that prints more."""
        failures = self._failures(tracebacks.failure_of(self._rank, kind, error, trace), error)
        if self.before is sys.__excepthook__:  # at once: other ranks print, too
            return tracebacks.merged(failures, self._size), lambda: None
        own = [failure for failure in failures if failure.stack == failures[0].stack]
        others = [failure for failure in failures if failure not in own]

        def show() -> None:
            self.before(kind, error, trace)
            if others:
                sys.stderr.write(f"hpcfsdp: {shown_lines(tracebacks.merged(others, self._size))}\n")

        return f"{tracebacks.who(own, self._size)}: {tracebacks.ENDED}", show

    def _failures(self, mine: tracebacks.Failure, error: BaseException) -> list[tracebacks.Failure]:
        """This rank's failure, and those of others that it is to print with it."""
        from mpi4py import MPI

        if getattr(error, "raised_on_all_ranks", False):
            if self._rank:
                time.sleep(tracebacks.TOGETHER_S)
            return [mine]
        if _comm is None or MPI.Is_finalized():
            return [mine]
        found = tracebacks.exchange(_comm, mine) or [mine]
        return sorted(found, key=lambda failure: failure is not mine)


def exit_code(error: BaseException) -> int:
    """The code with which a job ends after this error."""
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, HpcfsdpError) else 1


def uncaught() -> BaseException | None:
    """The uncaught error, if a hook that the user has set later has printed it and has not aborted the job."""
    return None if isinstance(sys.excepthook, _EndOfJob) else getattr(sys, "last_value", None)


def abort(message: str, exit_code: int, show: Callable[[], Any] = lambda: None) -> None:
    """Print a message with rank and host, and abort all processes of the job. Does not return while MPI runs.

    Args:
        show: prints more to stderr.
    """
    from mpi4py import MPI

    who = "" if MPI.Is_finalized() else f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on "
    end_job(f"{who}{env.host_name()}: {message}", exit_code, show)


def end_job(message: str, exit_code: int, show: Callable[[], Any] = lambda: None) -> None:
    """As ``abort``, with a message that names ranks and hosts itself."""
    from mpi4py import MPI

    try:
        with contextlib.suppress(Exception):  # closed or missing: the job must end all the same
            sys.stdout.flush()
        with contextlib.suppress(BaseException):
            # torch's own exception hook holds output back until ours returns, which it does not.
            stream = sys.__stderr__ if isinstance(sys.stderr, io.StringIO) and sys.__stderr__ else sys.stderr
            with contextlib.redirect_stderr(stream):
                stream.write(f"hpcfsdp: {shown_lines(message.rstrip())}\n")
                show()
                stream.flush()
        if not MPI.Is_finalized():
            time.sleep(OUTPUT_GRACE_S)
    finally:  # also after Ctrl-C
        if not MPI.Is_finalized():
            if _launcher_sees_exit():  # which names the rank that ended, in fewer lines than after MPI_Abort
                os._exit(exit_code & 0xFF or 1)
            MPI.COMM_WORLD.Abort(exit_code & 0xFF or 1)


def _launcher_sees_exit() -> bool:
    """Whether this process is a child of Open MPI's launcher, which ends all processes as soon as one fails.

    A shell script or a profiler between them may run on, or end without an error.
    """
    if not env.launcher_ends_all():
        return False
    try:
        return Path(f"/proc/{os.getppid()}/comm").read_text().strip() in _OPEN_MPI_LAUNCHERS
    except OSError:  # no Linux
        return False


class _Exit(SystemExit):
    """The exception of ``sys.exit``. When it is deleted it detects whether it has ended the program or been caught."""

    def __del__(self) -> None:
        global _code
        # Python deletes an uncaught one when no Python code runs any more, and a caught one within a function.
        if sys._getframe(0).f_back is None and threading.current_thread() is threading.main_thread():
            _code = _code_of(self)


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def install(comm: Any) -> None:
    """Collective over `comm`, an mpi4py communicator of all ranks. Install the hooks of this module, once."""
    global _comm, _process
    if comm.size == 1 or _comm is not None:
        return
    catch_errors(comm)
    _comm, _process = comm.Dup(), os.getpid()
    sys.exit = _exit
    atexit.register(_leave)


def mark_clean(clean: bool = True) -> None:
    """Not collective. All ranks have finished their collectives: how each exits then does not matter to the others."""
    global _is_clean
    _is_clean = clean


def departed() -> set[int]:
    """Not collective. The ranks that are known to have left the program."""
    from mpi4py import MPI

    status = MPI.Status()
    while _comm is not None and (message := _comm.Improbe(tag=_TAG, status=status)) is not None:
        message.Recv(bytearray(1))
        _gone.add(status.Get_source())
    return _gone


def _exit(status: Any = None, /) -> NoReturn:
    raise _make_exit(status)  # no local variable: a frame with its own exception keeps it alive


def _make_exit(status: Any) -> _Exit:
    global _last
    error = _Exit(*status) if isinstance(status, tuple) else _Exit() if status is None else _Exit(status)
    _last = weakref.ref(error)
    return error


def _leave() -> None:
    """Collective: every rank runs this when its program ends."""
    from mpi4py import MPI

    if os.getpid() != _process or MPI.Is_finalized():
        return
    error = uncaught()
    if error is not None and not _is_clean:
        abort("ended the job after an uncaught error", exit_code(error))
    gc.collect()  # a caught error that is still referenced in a cycle with its traceback
    alive = _last() if _last is not None else None
    exits_with = _code or (_code_of(alive) if alive is not None else 0)
    code = 0 if _is_clean else exits_with
    arrival, began_s, sent = _comm.Ibarrier(), time.monotonic(), []
    while not arrival.Test():
        waited_s = time.monotonic() - began_s
        if code and waited_s > GRACE_S:
            abort(f"left the program with exit code {code}, while other ranks still run", code)
        if waited_s > SEND_AFTER_S and not sent and not code and _comm.size <= MOST_RANKS:
            sent = [_comm.Isend(bytearray(1), peer, _TAG) for peer in range(_comm.size) if peer != _comm.rank]
        time.sleep(0.001)
    if _comm.size <= MOST_RANKS:
        # All ranks are here. Receive all messages: MPI must not end with messages in progress.
        for rank, has_sent in enumerate(_comm.allgather(bool(sent))):
            if has_sent and rank != _comm.rank and rank not in _gone:
                _comm.Recv(bytearray(1), rank, _TAG)
        MPI.Request.Waitall(sent)
    if _comm.allreduce(orphan.is_orphan(), MPI.MAX):
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exits_with)
