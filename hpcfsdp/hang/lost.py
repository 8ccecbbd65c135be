"""Processes of the job that have died, where MPI goes on without them: ``mpirun --with-ft ulfm``.

MPI reports a death to every process as soon as that makes progress. All waits of hpcfsdp look for such reports, and
raise ``RankLostError``. A rank that hangs is not dead: whoever has waited for the hang limit ends the processes of its
node that have not waited for anything meanwhile, and MPI reports these.
"""

import contextlib
import logging
import os
import signal
import struct
import threading
import time
from array import array
from collections.abc import Callable, Iterator, Sequence
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import CommunicationError, HangError, RankLostError
from hpcfsdp.hang import calls, stacks

log = logging.getLogger("hpcfsdp.job")

FAILURES = (75, 76, 77)
"""Error classes of Open MPI: a process has failed, one that a receive from any may wait for, or a communicator was
revoked."""
NEWS_S = 0.5  # how long an error of another kind may come before MPI reports the death that has caused it
_SEAT = struct.Struct("qqdq")
"""Of a process in the memory of its node: its pid, its start, when it last waited, and its namespace of pids."""
SEAT_BYTES = _SEAT.size
LATE_TAG, DISMISS_TAG, DONE_TAG, END_TAG = range(4)
"""Tags of messages about the job itself: the last one of a lost world; to spares that their waiting ends, or will when
all are done; of ``end_others``."""
_SENT_WITHIN_S = 1.0
_BEAT_EVERY_S = 0.05
_LOOK_EVERY_S = 1.0
_LOOK_OUT_EVERY_S = 0.1
_LONGEST_PAUSE_S = 0.01
_END_EVERY_S = 1.0
REPORTED_WITHIN_S = 10.0  # how long MPI may take to report a process that was killed

goes_on = False
"""Whether this process trains, or is a spare, in a job that goes on after a loss."""
generation = 0
"""How often the job has gone on after a loss. Communicators of an earlier generation refuse all calls."""


class Watch:
    """What this process knows about deaths among the ranks of an mpi4py communicator. No method is collective."""

    def __init__(
        self,
        comm: Any,
        world: Sequence[int],
        hosts: Sequence[str],
        gone: Sequence[int] = (),
        before: "Watch | None" = None,
    ) -> None:
        """`world` has the ranks of `comm` that are those of the world, in order; `hosts` a name for each of `comm`.

        The deaths of ranks in `gone` are no news. The seat of this process is that of the watch `before`.
        """
        from mpi4py import MPI  # before torch on Cray

        self._mpi = MPI
        self._comm, self._world, self._hosts = comm, tuple(world), hosts
        self._group = comm.Get_group()
        self._gone = frozenset(gone)
        self._known, self._lost = len(self._gone), tuple[int, ...]()
        self._seats = memoryview(b"") if before is None else before._seats
        self._mine, self._node = (0, ()) if before is None else (before._mine, before._node)
        self._beaten_s = self._looked_s = 0.0
        self._ended_s: dict[int, float] = {}  # since when processes of the node have ended, perhaps unknown to MPI

    def sit(self, seats: memoryview, place: int, node: Sequence[int]) -> None:
        """Take a seat in memory that the processes of the `node`, ranks of `comm`, share: ``SEAT_BYTES`` for each."""
        self._seats, self._mine, self._node = seats, place, node
        pid = os.getpid()
        _SEAT.pack_into(seats, SEAT_BYTES * place, pid, stacks.start_of(pid), time.monotonic(), _namespace())

    def _neighbours(self) -> Iterator[tuple[int, int, int, float]]:
        """Yield place, pid, start and last wait of the processes of the node whose pids mean the same here."""
        mine = _namespace()
        for place, (pid, started, beat_s, namespace) in enumerate(_SEAT.iter_unpack(self._seats)):
            if pid and namespace == mine:  # others are in containers of their own
                yield place, pid, started, beat_s

    def dead(self) -> list[int]:
        """Return the ranks of the communicator that MPI reports as dead."""
        failed = self._comm.Get_failed()
        try:
            return sorted(type(failed).Translate_ranks(failed, range(failed.size), self._group)) if failed.size else []
        finally:
            failed.Free()

    def lost(self) -> Sequence[int]:
        """Return the ranks of the world that have died since this watch began."""
        failed = self._comm.Get_failed()
        size = failed.size
        failed.Free()
        if size != self._known:
            news = set(self.dead()) - self._gone
            self._known, self._lost = size, tuple(rank for rank, of in enumerate(self._world) if of in news)
            if not self._lost:  # the world goes on: receives from any rank, too
                self._comm.Ack_failed(size)
        return self._lost

    def check(self, waited_for: str) -> None:
        """Raise RankLostError, naming what this rank `waited_for`, if ranks of the world have died."""
        self.beat()
        self.look_for_end()  # which makes progress of MPI's, other than waits on shared memory
        self.look_for_exits()
        if ranks := self.lost():
            hosts = tuple(self._hosts[self._world[rank]] for rank in ranks)
            raise RankLostError.of(ranks, hosts, calls.within(waited_for))

    def look_for_end(self) -> None:
        """End this process if another one has ended the job."""
        try:
            if not self._comm.Iprobe(self._mpi.ANY_SOURCE, END_TAG):
                return
        except self._mpi.Exception as error:  # of a receive from any rank, once one has died
            if error.Get_error_class() not in FAILURES:
                raise
            return
        self._comm.Recv(code := array("i", [0]), self._mpi.ANY_SOURCE, END_TAG)
        os._exit(code[0])

    def end_others(self, code: int) -> None:
        """Have all other processes of the job end with this exit code: Open MPI's Abort leaves some running."""
        dead, sent = self.dead(), []
        for rank in range(self._comm.size):
            if rank != self._comm.rank and rank not in dead:
                sent.append(self._comm.Isend(array("i", [code]), rank, END_TAG))
        until_s = time.monotonic() + _SENT_WITHIN_S
        while time.monotonic() < until_s and not all(request.Get_status() for request in sent):
            time.sleep(0.001)

    @property
    def is_alone(self) -> bool:
        """Whether all other processes have died."""
        return len(self.dead()) == self._comm.size - 1

    def beat(self) -> None:
        """Note that this process waits, and so does not hang."""
        now_s = time.monotonic()  # the same clock for all processes of a node
        if self._seats and now_s - self._beaten_s > _BEAT_EVERY_S:
            self._beaten_s = now_s
            struct.pack_into("d", self._seats, SEAT_BYTES * self._mine + 16, now_s)

    def look_for_exits(self) -> None:
        """Raise if a process of this node has ended, and MPI does not report it: Open MPI leaves out exit codes."""
        now_s = time.monotonic()
        if not self._seats or now_s - self._looked_s < _LOOK_EVERY_S:
            return
        self._looked_s = now_s
        ended = [place for place, pid, start, _ in self._neighbours() if stacks.process(pid, start).state in ("", "Z")]
        self._ended_s = {rank: self._ended_s.get(rank, now_s) for rank in map(self._node.__getitem__, ended)}
        late = [rank for rank, since_s in self._ended_s.items() if now_s - since_s > REPORTED_WITHIN_S]
        if found := sorted(set(late).difference(self.dead() if late else ())):
            raise CommunicationError(
                f"process(es) {found} of the job on {self._hosts[found[0]]} have ended with an exit code of their own "
                "(os._exit, or exit in C code): that ends the job"
            )

    def end_hung(self, limit_s: float) -> list[int]:
        """Kill the processes of this node, this one last, that have not waited for `limit_s`. Return their pids."""
        ended = []
        for _, pid, started, beat_s in sorted(self._neighbours(), key=lambda each: each[0] == self._mine):
            hangs = time.monotonic() - beat_s > limit_s
            if hangs and stacks.process(pid, started).state in ("R", "S", "D", "T", "t"):
                log.error("process %d has hung for %.0f s: it is killed, so that the others can go on", pid, limit_s)
                os.kill(pid, signal.SIGKILL)
                ended.append(pid)
        return ended


current: Watch | None = None  # None where a lost rank ends the job


def check(waited_for: str) -> None:
    """Not collective. Raise RankLostError, naming what this rank `waited_for`, if ranks of the world have died."""
    if current is not None:
        current.check(waited_for)


class Lookout:
    """A thread that acts when ranks of the world are lost: where this process may wait for a device, in C code."""

    def __init__(self, act: Callable[[], None]) -> None:
        """Not collective. MPI must have been started with MPI_THREAD_MULTIPLE."""
        self._act, self._ended = act, threading.Event()
        self._thread = threading.Thread(target=self._run, name="hpcfsdp-lost", daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Not collective. End the thread."""
        self._ended.set()
        self._thread.join()

    def _run(self) -> None:
        while not self._ended.wait(_LOOK_OUT_EVERY_S):
            watch = current
            if watch is not None:
                watch.look_for_end()
                if watch.lost():
                    self._act()
                    return


def translate(error: Any, waited_for: str) -> None:
    """Not collective. Return after an error of MPI's that comes from a death outside of the world.

    Raises RankLostError where ranks of the world have died, and other errors as they are.
    """
    if error.Get_error_class() not in FAILURES:
        raise error
    check(waited_for)


def _namespace() -> int:
    """Return the number of the namespace of pids of this process."""
    with contextlib.suppress(OSError):  # no Linux
        return os.stat("/proc/self/ns/pid").st_ino
    return 0


def is_settled(request: Any) -> bool:
    """Not collective. Return whether MPI no longer uses the memory of a request: it is complete, or its rank died."""
    from mpi4py import MPI  # before torch on Cray

    try:
        return bool(request.Test())
    except MPI.Exception:
        return True


def news(within_s: float | None = None) -> bool:
    """Not collective. Return whether ranks of the world are reported as dead within so many seconds, or ``NEWS_S``."""
    until_s = time.monotonic() + (NEWS_S if within_s is None else within_s)
    while current is not None:
        try:
            current.check("")
        except RankLostError:
            return True
        if time.monotonic() > until_s:
            break
        time.sleep(0.001)
    return False


def wait_until(
    is_over: Callable[[], bool], what: str, look: Callable[[str], None], *, limited: Callable[[], bool] = lambda: True
) -> None:
    """Not collective. Poll `is_over`, which makes progress of MPI's, until it returns true.

    Between two polls it calls `look` with `what` is waited for; ``check`` is one. While it is `limited`, it ends
    processes of this node that hang: those that have not waited for the hang limit, once this wait has taken as long.
    Raises HangError if that does not help: others may have begun to hang, or to wait, up to one hang limit later.
    """
    began_s, polls, due_s = 0.0, 0, 0.0
    limit_s = env.hang_s()
    while not is_over():
        look(what)
        polls += 1
        os.sched_yield()
        if polls < 100:
            continue
        now_s = time.monotonic()
        began_s = began_s or now_s
        waited_s = now_s - began_s
        if current is not None and 0 < limit_s < waited_s and now_s > due_s:
            due_s = now_s + _END_EVERY_S
            if not limited():
                began_s = now_s
            elif waited_s > 2 * limit_s + REPORTED_WITHIN_S:
                raise HangError(f"waited {waited_s:.0f} s in {what} for ranks that do not come, nor end")
            else:
                current.end_hung(limit_s)
        time.sleep(min(waited_s / 10, _LONGEST_PAUSE_S))
