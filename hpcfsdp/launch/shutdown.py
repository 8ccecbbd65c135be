"""Ranks leave together: one that ends the program early is noticed, by itself or by those that wait for it.

An uncaught exception ends the job at once (abort.py). Leaving through ``sys.exit`` is not an exception to Python, and
without more the process would wait in ``MPI_Finalize`` for the others, and these for it in a collective.

- A rank that leaves with an error code waits ``GRACE_S`` for the others to leave, too (all may have found the same
  error), then ends the job. Not after ``hpcfsdp.finalize()``, to which all have come.
- A rank that leaves in any other way, and finds itself alone, says so to the others. Whoever waits for it in a
  collective raises an error instead (``departed``).
"""

from __future__ import annotations

import atexit
import gc
import os
import sys
import threading
import time
import weakref
from typing import Any, NoReturn

from hpcfsdp.launch.abort import abort, exit_code, uncaught

GRACE_S = 4.0
SAY_AFTER_S = 1.0
MOST_TOLD = 128
"""Ranks up to which one tells all others. In larger jobs those that wait for it go by their timeout."""
_TAG = 1

_comm: Any = None
_process = 0
_last: weakref.ref[_Exit] | None = None
_code: int = 0
"""The error code with which this process ends, 0 if it does without error or if that is not known."""
_is_clean = False
_gone: set[int] = set()


class _Exit(SystemExit):
    """What ``sys.exit`` raises. In its last moment it finds out whether it has ended the program or been caught."""

    def __del__(self) -> None:
        global _code
        # Python drops an uncaught one when no Python code is running any more; a caught one dies in some function.
        if sys._getframe(0).f_back is None and threading.current_thread() is threading.main_thread():
            _code = _code_of(self)


def _code_of(error: SystemExit) -> int:
    if error.code is None:
        return 0
    return error.code & 0xFF if isinstance(error.code, int) else 1


def install(comm: Any) -> None:
    """Not collective. Have this process say farewell to the ranks of `comm` when it ends; for once in its life.

    Args:
        comm: an mpi4py communicator of all ranks, used for this alone.
    """
    global _comm, _process
    if comm.size == 1 or _comm is not None:
        return
    _comm, _process = comm, os.getpid()
    sys.exit = _exit
    atexit.register(_leave)


def mark_clean(clean: bool = True) -> None:
    """Not collective. All ranks have come to the end of their common work: what each does then is its own matter."""
    global _is_clean
    _is_clean = clean


def departed() -> set[int]:
    """Not collective. The ranks that have said that they left the program."""
    from mpi4py import MPI

    status = MPI.Status()
    while _comm is not None and (letter := _comm.Improbe(tag=_TAG, status=status)) is not None:
        letter.Recv(bytearray(1))
        _gone.add(status.Get_source())
    return _gone


def _exit(status: Any = None, /) -> NoReturn:
    raise _made(status)  # and not held here: a frame that holds its own exception keeps it alive


def _made(status: Any) -> _Exit:
    global _last
    error = _Exit(*status) if isinstance(status, tuple) else _Exit() if status is None else _Exit(status)
    _last = weakref.ref(error)
    return error


def _leave() -> None:
    """Collective, in effect: every rank comes here when its program ends."""
    from mpi4py import MPI

    if os.getpid() != _process or MPI.Is_finalized():
        return
    error = uncaught()
    if error is not None and not _is_clean:
        abort("ended the job after an uncaught error", exit_code(error))
    gc.collect()  # an error that was caught, and lives on in a circle with its own traceback
    alive = _last() if _last is not None else None
    code = _code or (_code_of(alive) if alive is not None else 0)
    if _is_clean:
        code = 0
    arrival, began_s, told = _comm.Ibarrier(), time.monotonic(), []
    while not arrival.Test():
        waited_s = time.monotonic() - began_s
        if code and waited_s > GRACE_S:
            abort(f"left the program with exit code {code}, while other ranks are still inside of it", code)
        if waited_s > SAY_AFTER_S and not told and not code and _comm.size <= MOST_TOLD:
            told = [_comm.Isend(bytearray(1), peer, _TAG) for peer in range(_comm.size) if peer != _comm.rank]
        time.sleep(0.001)
    # All are here. What was said and not heard must be taken, or MPI would end with messages under way.
    for rank, has_told in enumerate(_comm.allgather(bool(told))):
        if has_told and rank != _comm.rank and rank not in _gone:
            _comm.Recv(bytearray(1), rank, _TAG)
    MPI.Request.Waitall(told)
