"""The processes of a job that live: which of them are the world, which wait as spares, and how they agree on it."""

import contextlib
import functools
import time
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from typing import Any

from mpi4py import MPI

from hpcfsdp import env
from hpcfsdp.comm.mpi import messages
from hpcfsdp.comm.mpi.node_memory import share
from hpcfsdp.comm.mpi.part_comm import PartComm, start_again
from hpcfsdp.errors import RankLostError
from hpcfsdp.hang import departure, lost
from hpcfsdp.launch import job
from hpcfsdp.launch.topology import Topology

_BITS = 15  # of a digest, which with its complement fits into the number that MPI agrees on
_MASK = (1 << _BITS) - 1
_DONE = 1 << 2 * _BITS
_ALL, _WORLD, _NODE = 1, 2, 3  # contexts of the first communicators, the same on all processes


def unable() -> str:
    """Not collective. Return why this job cannot go on after a loss; "" if it can."""
    library = MPI.Get_library_version().splitlines()[0].strip("\x00 ")
    if not library.startswith("Open MPI v5") or not hasattr(MPI.Comm, "Iagree"):
        return f"{library} cannot go on after a process has died; Open MPI 5 can, with mpi4py 4"
    if not env.goes_on_after_loss():
        return f"{library} was started without that: mpirun --with-ft ulfm"
    return ""


def replaced(
    world: Sequence[int], spares: Sequence[int], dead: Sequence[int], node_of: Sequence[int]
) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return world and spares without the dead. A spare takes the place of one, of the same node if there is any there.

    If there is none, and spares have a node of their own, all places of the node move there: the world keeps its nodes.
    The ranks that lived are spares then, and what they had in memory is on the next node of the world. So that is not
    done in a world of one node, or where several nodes have lost ranks at once. Places that no spare takes are gone.

    `node_of` has the node of each process.
    """
    left, taken = [rank for rank in spares if rank not in dead], dict[int, int]()

    def take(places: Iterable[int], *, same_node: bool) -> None:
        for place in places:
            spare = next((rank for rank in left if not same_node or node_of[rank] == node_of[place]), None)
            if spare is not None:
                taken[place] = spare
                left.remove(spare)

    take((rank for rank in world if rank in dead), same_node=True)
    missing = [rank for rank in world if rank in dead and rank not in taken]
    nodes = {node_of[rank] for rank in world}
    if len({node_of[rank] for rank in missing}) == 1 and len(nodes) > 1:
        places = [rank for rank in world if node_of[rank] == node_of[missing[0]]]
        free = Counter(node_of[rank] for rank in left if node_of[rank] not in nodes)
        home = next((node for node, count in free.items() if count >= len(places)), None)
        if home is not None:
            retired = [rank for place in places if (rank := taken.pop(place, place)) not in dead]
            there = [rank for rank in left if node_of[rank] == home][: len(places)]
            left = [*(rank for rank in left if rank not in there), *retired]
            taken |= dict(zip(places, there, strict=True))
    take((rank for rank in missing if rank not in taken), same_node=False)
    return tuple(taken.get(rank, rank) for rank in world if rank not in dead or rank in taken), tuple(left)


class Survivors:
    """All processes of the job that live."""

    def __init__(self) -> None:
        """Take the job as it is: all live. Collective over all its ranks."""
        first = job.current_job()
        self._base: Any = first.comm
        self._nodes = first.topology
        self.rank, self.size = first.comm.rank, first.comm.size  # among all processes, also the dead
        self._node_of = [self._nodes.node_rank(rank) for rank in range(self.size)]
        self._hosts = first.comm.allgather(env.host_name())
        self.world, self.spares = tuple(range(self.size)), tuple[int, ...]()
        self.losses = 0  # after which the job has gone on
        self.noticed_s = 0.0  # when this process first met others because of the last one, by ``time.monotonic``
        self._dead: tuple[int, ...] = ()
        self._agreements = 0
        self._met = 0  # agreements before the last call of ``meet``
        self._is_done = False  # as far as this spare knows: ranks of the world have done their work
        self._agreement: tuple[MPI.Request, array[int]] | None = None

    @property
    def is_spare(self) -> bool:
        return self.rank in self.spares

    def divide(self, spares: int) -> None:
        """Make the highest of the ranks that live spares, as many, and the others the job. Collective over all."""
        living = [rank for rank in sorted((*self.world, *self.spares)) if rank not in self._dead]
        self.world, self.spares = tuple(living[: len(living) - spares]), tuple(living[len(living) - spares :])
        self._make_job()

    def dismiss(self) -> None:
        """Not collective. Have spares leave ``meet``: this rank ends the program."""
        for rank in self.spares:
            self._base.Isend(array("i"), rank, lost.DISMISS_TAG)

    def sit(self) -> None:
        """Have the processes of each node see when the others last waited. Collective over all, while they live."""
        ranks = self._nodes.node_of(self.rank)
        node = PartComm(self._base, ranks, _NODE)
        lost.current.sit(memoryview(share(node, node.size * lost.SEAT_BYTES).numpy().data), node.rank, ranks)

    def meet(self, *, done: bool) -> RankLostError | None:
        """Wait for all that live. Return None if all are `done`; otherwise the loss that the job has gone on from.

        Collective over all that live, those of the world and spares. A rank comes when its work is done, or when ranks
        were lost; a spare at once, and leaves when it is dismissed.
        """
        self.noticed_s, self._is_done, self._met = 0.0, False, self._agreements
        if done and not self.is_spare:  # spares wait for ever until then
            for rank in self.spares[self.world.index(self.rank) :: len(self.world)]:
                self._base.Isend(array("i", [self._met]), rank, lost.DONE_TAG)
        try:
            # Spares alone know of no work that is done.
            if self._agree(done=done, limited=not self.is_spare) and not set(self.world) <= set(self._dead):
                return None
        except _Dismissed:
            return None
        self.settle()
        gone = [(place, self._hosts[rank]) for place, rank in enumerate(self.world) if rank in self._dead]
        self.losses += 1
        lost.generation = self.losses  # of spares, too
        self.world, self.spares = replaced(self.world, self.spares, self._dead, self._node_of)
        self._make_job()
        return RankLostError.of([place for place, _ in gone], [host for _, host in gone], "hpcfsdp.resilient")

    def settle(self) -> None:
        """Have no message of an earlier world left. Collective over all that live."""
        while True:
            agreed, flushed = self._dead, True
            try:
                self._flush()
            except (RankLostError, MPI.Exception) as error:
                if isinstance(error, MPI.Exception) and error.Get_error_class() not in lost.FAILURES:
                    raise
                flushed = False
            if self._agree(done=flushed, limited=True) and self._dead == agreed:
                return

    def _agree(self, *, done: bool, limited: bool) -> bool:
        """Wait until all that live know the same deaths; return whether all are `done`. Collective over them."""
        while True:
            self._base.Ack_failed(self.size)
            dead = tuple(lost.current.dead())
            self._agreements += 1  # as often on all
            digest = hash((dead, self._agreements)) & _MASK
            # MPI has the bitwise and of all. Digests are equal if their and is the complement of that of complements.
            flags = array("i", [digest | (~digest & _MASK) << _BITS | done * _DONE])
            self._agreement = self._base.Iagree(flags), flags  # MPI writes there also if a spare is dismissed
            # Not Test: Open MPI ends it with an error as soon as a process dies, while others agree.
            lost.wait_until(
                self._agreement[0].Get_status,
                "resilient",
                self._look,
                limited=lambda: limited or self._is_done or tuple(lost.current.dead()) != self._dead,
            )
            try:
                self._agreement[0].Wait()
            except MPI.Exception as error:
                if error.Get_error_class() not in lost.FAILURES:
                    raise
                self.noticed_s = self.noticed_s or time.monotonic()
                continue  # a death that not all had acknowledged
            if flags[0] & _MASK == ~(flags[0] >> _BITS) & _MASK:
                self._dead = dead
                return bool(flags[0] & _DONE)
            self.noticed_s = self.noticed_s or time.monotonic()
            time.sleep(0.001)

    def _look(self, _: str) -> None:
        lost.current.beat()
        lost.current.look_for_end()
        lost.current.look_for_exits()
        with contextlib.suppress(MPI.Exception):  # a process has died since the agreement began: the next one
            if self.is_spare and self._base.Iprobe(MPI.ANY_SOURCE, lost.DISMISS_TAG):
                raise _Dismissed
            if self.is_spare and (message := self._base.Improbe(MPI.ANY_SOURCE, lost.DONE_TAG)) is not None:
                message.Recv(met := array("i", [0]))
                self._is_done |= met[0] == self._met  # others are of earlier calls

    def _flush(self) -> None:
        """Receive and drop all messages that were sent before. Collective over all that live.

        Raises RankLostError if one of them dies meanwhile.
        """
        living = [rank for rank in range(self.size) if rank not in self._dead]
        lost.current = lost.Watch(self._base, living, self._hosts, self._dead, lost.current)
        mark, status = array("i", [self._agreements]), MPI.Status()
        wait = functools.partial(lost.wait_until, what="resilient: late messages", look=lost.check)
        sent = [self._base.Isend(mark, rank, lost.LATE_TAG) for rank in living if rank != self.rank]
        for rank in living:
            found = b"" if rank != self.rank else mark.tobytes()
            while found != mark.tobytes() or (rank != self.rank and status.Get_tag() != lost.LATE_TAG):
                arrived = _Arrived(self._base, rank, status)
                wait(arrived)
                found = bytearray(status.Get_count(MPI.BYTE))
                wait(arrived.message.Irecv([found, MPI.BYTE]).Test)
        for request in sent:
            wait(request.Test)

    def _make_job(self) -> None:
        """Make the world the job of this process, with communicators that have no messages yet. Not collective."""
        start_again()
        messages.settle()
        lost.current = lost.Watch(self._base, self.world, self._hosts, self._dead, lost.current)
        departure.move_to(PartComm(self._base, (*self.world, *self.spares), _ALL))
        if not self.is_spare:
            topology = Topology.from_labels([self._node_of[rank] for rank in self.world])
            comm = PartComm(self._base, self.world, _WORLD)
            job.replace(job.Job(comm, topology))
            departure.catch_errors(comm)


class _Arrived:
    """Whether a message of a rank has arrived, with any tag, and that message."""

    def __init__(self, base: MPI.Intracomm, rank: int, status: MPI.Status) -> None:
        self._probe = functools.partial(base.Improbe, rank, MPI.ANY_TAG, status)
        self.message: MPI.Message | None = None

    def __call__(self) -> bool:
        self.message = self._probe()
        return self.message is not None


class _Dismissed(Exception):
    """The program ends, and needs no spares."""
