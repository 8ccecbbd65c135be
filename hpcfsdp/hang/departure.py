"""The end of a job: a rank that fails aborts all processes within seconds, and the others detect one that leaves early.

- An uncaught exception prints its traceback with rank and host (``tracebacks``), and aborts all processes: the others
  would wait for this one in a collective.
- ``sys.exit`` does not reach the exception hook. The process would wait in ``MPI_Finalize`` for the others, and these
  for it in a collective. A rank that exits with an error code waits ``GRACE_S`` for the others to exit, too (all may
  have found the same error), then aborts the job. It does not after ``hpcfsdp.finalize()``, which all ranks call.
- A rank that exits without an error before the others notifies them. A rank that waits for it in a collective raises an
  error (``departed``).
- Ranks are children of a daemon of their launcher on the node (slurmstepd, prted, hydra_pmi_proxy). If that is killed,
  the scheduler can neither signal nor end them, and does not know of their end. Where the daemons of other ranks live,
  the job would wait for ever. So a rank whose launcher has died asks itself to stop, and ends without ``MPI_Finalize``,
  which would wait for the launcher.
"""

import atexit
import contextlib
import functools
import gc
import io
import logging
import os
import signal
import sys
import threading
import time
import weakref
from array import array
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Any, NoReturn

from hpcfsdp import env
from hpcfsdp.errors import HpcfsdpError, RankLostError
from hpcfsdp.hang import lost, tracebacks
from hpcfsdp.text.terminal import shown_lines

log = logging.getLogger("hpcfsdp.job")

OUTPUT_GRACE_S = 0.5  # seconds between the output and an abort: launchers drop output that arrives after it
GRACE_S = 4.0
TELL_AFTER_S = 1.0
LOOK_EVERY_S = 1.0  # seconds between two looks whether the launcher lives
_LOOK_EVERY_IF_IT_GOES_ON_S = 0.1
TOLD_BY_ONE = 128
"""A rank that exits early notifies so many others, and each of them as many more, once it waits or exits itself."""
_TAG = 1
Hook = Callable[[type[BaseException], BaseException, TracebackType | None], Any]
_OPEN_MPI_LAUNCHERS = ("prterun", "prted", "mpirun", "mpiexec", "orterun", "orted")
"""Names of the processes that start ranks, in versions 5 and 4."""

_departures: "Departures | None" = None  # None in a job of one rank
_process = 0  # the process that is a rank, and not one that was forked from it
_watching = _parent = 0
"""The process that watches its launcher, and the launcher's process; a forked child does not watch."""
_last: "weakref.ref[_Exit] | None" = None
_code: int = 0  # the error code of this process; 0 if it exits without an error, or if the code is not known
is_clean = False  # whether all ranks have finished their collectives: each may exit as it likes


def catch_errors(comm: Any) -> None:
    """Not collective. Install an exception hook that prints the traceback, with rank and host, and aborts the job.

    A hook of the user prints in place of this one. May be called again, after torch has installed its hook.
    """
    if comm.size == 1:
        return
    hook = behind = sys.excepthook
    while behind is not None:  # through the hooks of torch and of this module
        hook, behind = behind, None
        if isinstance(hook, _EndOfJob):
            behind = hook.before
        elif getattr(hook, "__module__", "").startswith("torch."):
            from hpcfsdp import _compat  # loads torch, after MPI

            behind = _compat.hook_behind_torch(hook)
    sys.excepthook = _EndOfJob(hook, comm.rank, comm.size)


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
        """Return what this rank prints: a message for ``end_job``, and a function that prints more."""
        from mpi4py import MPI

        mine = tracebacks.error_of(self._rank, kind, error, trace)
        errors = [mine]
        if getattr(error, "raised_on_all_ranks", False):
            if self._rank:
                time.sleep(tracebacks.TOGETHER_S)
        elif _departures is not None and not MPI.Is_finalized():
            found = tracebacks.exchange(_departures.comm, mine) or errors
            errors = sorted(found, key=lambda each: each is not mine)
        if self.before is sys.__excepthook__:  # at once: other ranks print, too
            return tracebacks.merged(errors, self._size), lambda: None
        own = [each for each in errors if each.stack == errors[0].stack]
        others = [each for each in errors if each not in own]

        def show() -> None:
            self.before(kind, error, trace)
            if others:
                sys.stderr.write(f"hpcfsdp: {shown_lines(tracebacks.merged(others, self._size))}\n")

        return f"{tracebacks.who(own, self._size)}: {tracebacks.ENDED}", show


def exit_code(error: BaseException) -> int:
    if isinstance(error, KeyboardInterrupt):
        return 130
    return error.exit_code if isinstance(error, HpcfsdpError) else 1


def uncaught() -> BaseException | None:
    """Return the uncaught error, if a hook that the user has set later has printed it and has not aborted the job."""
    return None if isinstance(sys.excepthook, _EndOfJob) else getattr(sys, "last_value", None)


def abort(message: str, exit_code: int) -> None:
    """Print a message with rank and host, and abort all processes of the job. Does not return while MPI runs."""
    from mpi4py import MPI

    who = "" if MPI.Is_finalized() else f"rank {MPI.COMM_WORLD.rank} of {MPI.COMM_WORLD.size} on "
    end_job(f"{who}{env.host_name()}: {message}", exit_code)


def end_job(message: str, exit_code: int, show: Callable[[], Any] = lambda: None) -> None:
    """Do as ``abort``, with a message that names ranks and hosts itself; `show` prints more."""
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
            if lost.current is not None:
                lost.current.end_others(exit_code & 0xFF or 1)
            # The launcher names the rank that ended, in fewer lines than after MPI_Abort. Where all others have died it
            # forgets the code of an abort.
            if _launcher_sees_exit() or (lost.current is not None and lost.current.is_alone):
                os._exit(exit_code & 0xFF or 1)
            MPI.COMM_WORLD.Abort(exit_code & 0xFF or 1)


def _launcher_sees_exit() -> bool:
    """Return whether this process is a child of Open MPI's launcher, which ends all processes as soon as one fails.

    A shell script or a profiler between them may run on, or end without an error.
    """
    with contextlib.suppress(OSError):  # no Linux
        parent = Path(f"/proc/{os.getppid()}/comm")
        return env.launcher_ends_all() and parent.read_text().strip() in _OPEN_MPI_LAUNCHERS
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


class Departures:
    """The ranks that have left the program (`gone`), as far as messages over `comm`, of all ranks, have named them."""

    def __init__(self, comm: Any) -> None:
        self.comm = comm
        self.gone: set[int] = set()
        self._sent: list[Any] = []

    def notify(self, rank: int) -> None:
        """Notify the ranks below this one in the tree that `rank` has left. Not collective."""
        size, place = self.comm.size, (self.comm.rank - rank) % self.comm.size
        first = TOLD_BY_ONE * place + 1
        for other in range(first, min(first + TOLD_BY_ONE, size)):
            self._sent.append(self.comm.Isend(array("i", [rank]), (rank + other) % size, _TAG))

    def receive(self) -> set[int]:
        """Not collective. Receive what has arrived, and pass it on. Return ``gone``."""
        from mpi4py import MPI

        try:
            while (message := self.comm.Improbe(tag=_TAG)) is not None:
                message.Recv(left := array("i", [0]))
                self.gone.add(left[0])
                self.notify(left[0])
        except MPI.Exception as error:  # of a receive from any rank, once one has died
            lost.translate(error, "the end of other ranks")
        return self.gone

    def complete(self, has_left: bool) -> None:
        """Complete all messages, after this rank `has_left` and notified the others, or not. Collective over `comm`."""
        flags = bytearray(self.comm.size)
        self.comm.Allgather(bytearray([has_left]), flags)
        awaited = {rank for rank, flag in enumerate(flags) if flag and rank != self.comm.rank}
        while not awaited <= self.receive():
            time.sleep(0.001)
        for request in self._sent:
            request.Wait()


def install(comm: Any) -> None:
    """Install the hooks of this module, once. Collective over `comm`, an mpi4py communicator of all ranks."""
    global _departures, _process
    if comm.size == 1 or _departures is not None:
        return
    catch_errors(comm)
    _departures, _process = Departures(comm.Dup()), os.getpid()
    sys.exit = _exit
    atexit.register(_leave)


def move_to(comm: Any) -> None:
    """Not collective. From now on ranks notify each other over `comm`, of all that live: others were lost."""
    global _departures
    if _departures is not None:
        _departures = Departures(comm)


def watch_launcher() -> None:
    """Not collective. From now on this process gets SIGTERM when its parent dies; may be called again.

    With ``hpcfsdp.preemption()`` all ranks then save a checkpoint and stop. Otherwise the signal ends this rank.
    """
    global _watching, _parent
    if _watching != os.getpid():
        _watching, _parent = os.getpid(), os.getppid()
        threading.Thread(target=_await_orphanhood, name="hpcfsdp-launcher", daemon=True).start()


def is_orphan() -> bool:
    """Not collective. Return whether this process watches its parent, and that has died."""
    return os.getpid() == _watching and os.getppid() != _parent


def _await_orphanhood() -> None:
    # Not PR_SET_PDEATHSIG: it is sent as soon as the thread ends that has started the process.
    goes_on = env.goes_on_after_loss()  # without this rank: the others take it for dead
    while not is_orphan():
        time.sleep(_LOOK_EVERY_IF_IT_GOES_ON_S if goes_on else LOOK_EVERY_S)
    log.error("the launcher of this rank (process %d) has died: this rank stops", _parent)
    os.kill(os.getpid(), signal.SIGKILL if goes_on else signal.SIGTERM)


def departed() -> set[int]:
    """Not collective. Return the ranks that are known to have left the program."""
    return set() if _departures is None else _departures.receive()


def _exit(status: Any = None, /) -> NoReturn:
    raise _make_exit(status)  # no local variable: a frame with its own exception keeps it alive


def _make_exit(status: Any) -> _Exit:
    global _last
    error = _Exit(*status) if isinstance(status, tuple) else _Exit() if status is None else _Exit(status)
    _last = weakref.ref(error)
    return error


def _leave() -> None:
    """End a rank: each runs this when its program ends. Collective over all processes of the job."""
    from mpi4py import MPI

    if _departures is None or os.getpid() != _process or MPI.Is_finalized():
        return
    error = uncaught()
    if error is not None and not is_clean:
        abort("ended the job after an uncaught error", exit_code(error))
    gc.collect()  # a caught error that is still referenced in a cycle with its traceback
    alive = _last() if _last is not None else None
    exits_with = _code or (_code_of(alive) if alive is not None else 0)
    code = 0 if is_clean else exits_with
    try:
        orphaned = _arrive_together(_departures, code)
    except (MPI.Exception, RankLostError) as problem:
        if lost.current is None:
            raise
        log.debug("a rank has ended before this one left the program: %s", problem)
        if exits_with:  # the launcher does not see it, and the others would wait
            lost.current.end_others(exits_with)
        orphaned = True
    # MPI_Finalize would wait for the launcher, and may for the dead.
    if orphaned or (lost.current is not None and lost.current.dead()):
        with contextlib.suppress(Exception):
            sys.stdout.flush()
            sys.stderr.flush()
        os._exit(exits_with)


def _arrive_together(departures: Departures, code: int) -> bool:
    """Wait until all ranks end, this one with an error `code`. Return whether one has lost its launcher. Collective."""
    from mpi4py import MPI

    arrival, began_s, has_left = departures.comm.Ibarrier(), time.monotonic(), False
    while not arrival.Test():
        lost.check("the end of the program")
        waited_s = time.monotonic() - began_s
        if code and waited_s > GRACE_S:
            abort(f"left the program with exit code {code}, while other ranks still run", code)
        if waited_s > TELL_AFTER_S and not has_left and not code:
            has_left = True
            departures.notify(departures.comm.rank)
        departures.receive()
        time.sleep(0.001)
    departures.complete(has_left)
    return departures.comm.allreduce(is_orphan(), MPI.MAX)
