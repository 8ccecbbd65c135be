"""Some ranks of an mpi4py communicator, with messages of their own: what hpcfsdp communicates over in ``resilient``.

Where processes may die, no communicator of MPI is made after the start: a report of a death that arrives while one is
made ends the process (Open MPI 5.0), and a rank that waits for a dead one in the making cannot be called back. Messages
of one communicator reach the processes that live whoever has died. So each part has a range of its tags. Nothing here
blocks within MPI: all waits raise ``RankLostError``, and handle signals.
"""

from __future__ import annotations

import functools
import pickle
import zlib
from collections.abc import Callable, Generator, Sequence
from typing import Any, NoReturn

import numpy as np
from mpi4py import MPI

from hpcfsdp.errors import CommunicationError
from hpcfsdp.hang import lost

_TAGS = 1 << 16  # of one part: those of its callers' messages, its own, and those of parts that are made
_CALLERS, _OWN = 1 << 15, 1 << 14

_Steps = Generator[None, None, list[bytes]]

_next_context = 1  # the next range of tags; ranks that make a part agree on the highest. The first: see hang/lost.py
_sent: list[tuple[Any, Any]] = []
"""Requests of messages that a lost rank has left pending, with their memory."""


def start_again() -> None:
    """Not collective. All parts and messages of this process are gone: use their tags again."""
    global _next_context
    _next_context = 1
    _sent[:] = [each for each in _sent if not lost.is_settled(each[0])]


class PartComm:
    """The methods of an mpi4py communicator that hpcfsdp uses, and those of programs on Python objects.

    They are collective over its ranks as those of MPI are, with the same arguments. A method that is missing raises
    CommunicationError.
    """

    def __init__(self, base: MPI.Intracomm, ranks: Sequence[int], context: int | None = None) -> None:
        """Not collective. `ranks` are those of `base` that take part, this one among them, in their order here.

        `context` is the number of its range of tags, the same on all of them; None: the next one.
        """
        global _next_context
        self._base, self._ranks = base, tuple(ranks)
        self._places = {rank: place for place, rank in enumerate(self._ranks)}
        self.rank, self.size = self._places[base.rank], len(self._ranks)
        context = _next_context if context is None else context
        _next_context = context + 1
        if (context + 1) * _TAGS > base.Get_attr(MPI.TAG_UB):
            raise CommunicationError(f"{context} groups of ranks were made, and MPI has no tags for more")
        self._first_tag, self._calls = context * _TAGS, 0

    def __getattr__(self, name: str) -> NoReturn:
        if not name[:1].isupper() and not hasattr(MPI.Intracomm, name):
            raise AttributeError(name)
        raise CommunicationError(
            f"the communicator of a world in hpcfsdp.resilient has no {name}: it outlives lost ranks, and has bcast, "
            "scatter, gather, allgather, alltoall, reduce, allreduce, send, recv, and Barrier, Bcast, Allgather, "
            "Allreduce of MPI's methods"
        )

    # Messages

    def Isend(self, buffer: Any, dest: int, tag: int = 0) -> MPI.Request:
        return self._base.Isend(buffer, self._ranks[dest], self._first_tag + tag)

    def Improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = 0, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        return self._probe(self._base.Improbe, source, tag, status)

    def isend(self, value: Any, dest: int, tag: int = 0) -> MPI.Request:
        return self._base.isend(value, self._ranks[dest], self._first_tag + tag)

    def improbe(
        self, source: int = MPI.ANY_SOURCE, tag: int = 0, status: MPI.Status | None = None
    ) -> MPI.Message | None:
        return self._probe(self._base.improbe, source, tag, status)

    def send(self, value: Any, dest: int, tag: int = 0) -> None:
        blob = pickle.dumps(value)
        self._wait([self._base.Isend([blob, MPI.BYTE], self._ranks[dest], self._first_tag + tag)], blob)

    def recv(self, source: int, tag: int = 0) -> Any:
        return pickle.loads(self._finished(self._receive(self._ranks[source], self._first_tag + tag)))

    def _probe(self, probe: Callable[..., Any], source: int, tag: int, status: MPI.Status | None) -> Any:
        status = status or MPI.Status()
        place = source if source == MPI.ANY_SOURCE else self._ranks[source]
        try:
            message = probe(place, self._first_tag + tag, status)
        except MPI.Exception as error:
            lost.translate(error, "a message")
            return None
        if message is not None:
            status.Set_source(self._places[status.Get_source()])
        return message

    # Collectives on objects

    def allgather(self, value: Any) -> list[Any]:
        return [pickle.loads(blob) for blob in self._gather(pickle.dumps(value))]

    def gather(self, value: Any, root: int = 0) -> list[Any] | None:
        found = self._gather(pickle.dumps(value))
        return [pickle.loads(blob) for blob in found] if self.rank == root else None

    def bcast(self, value: Any, root: int = 0) -> Any:
        found = self._gather(pickle.dumps(value) if self.rank == root else b"")
        return value if self.rank == root else pickle.loads(found[root])

    def scatter(self, values: Sequence[Any] | None, root: int = 0) -> Any:
        return self.bcast(values, root)[self.rank]

    def alltoall(self, values: Sequence[Any]) -> list[Any]:
        return [of_rank[self.rank] for of_rank in self.allgather(values)]

    def allreduce(self, value: Any, op: Any = MPI.SUM) -> Any:
        return functools.reduce(op, self.allgather(value))

    def reduce(self, value: Any, op: Any = MPI.SUM, root: int = 0) -> Any:
        total = self.allreduce(value, op)
        return total if self.rank == root else None

    def barrier(self) -> None:
        self._gather(b"")

    # Collectives on buffers

    Barrier = barrier

    def Ibarrier(self) -> _Collective:
        return _Collective(self._rounds(b"", self._ranks, self._tag()))

    def Bcast(self, buffer: Any, root: int = 0) -> None:
        found = self._gather(bytes(_bytes(buffer)) if self.rank == root else b"")
        _bytes(buffer)[:] = found[root]

    def Allgather(self, sent: Any, received: Any) -> None:
        _bytes(received)[:] = b"".join(self._gather(bytes(_bytes(sent))))

    def Allreduce(self, sent: Any, received: Any, op: Any = MPI.SUM) -> None:
        result = np.asarray(received)
        mine = result if sent is MPI.IN_PLACE else np.asarray(sent)
        columns = zip(*(of_rank.ravel().tolist() for of_rank in self.allgather(mine)), strict=True)
        result.ravel()[:] = [functools.reduce(op, column) for column in columns]

    # Other parts

    def Split(self, color: int = 0, key: int = 0) -> PartComm:
        found = self.allgather((_next_context, color, key))
        own = sorted((key, place) for place, (_, of, key) in enumerate(found) if of == color)
        return PartComm(self._base, [self._ranks[place] for _, place in own], max(each[0] for each in found))

    def Dup(self) -> PartComm:
        return self.Split()

    def part(self, ranks: Sequence[int]) -> PartComm:
        """Make a part of these. Collective over `ranks`, ascending ranks of this one."""
        members = [self._ranks[rank] for rank in ranks]
        tag = self._first_tag + _CALLERS + _OWN + zlib.crc32(repr(members).encode()) % _OWN
        found = self._finished(self._rounds(pickle.dumps(_next_context), members, tag))
        return PartComm(self._base, members, max(map(pickle.loads, found)))

    def Free(self) -> None:
        """Not collective. The tags are not used again before ``start_again``."""

    def Get_attr(self, key: int) -> int:
        """Return the highest tag for messages of callers, for ``MPI.TAG_UB``."""
        return _CALLERS - 1

    def ranks_in(self, whole: PartComm) -> tuple[int, ...]:
        """Return the rank in another part, which has them all, of each rank of this one."""
        return tuple(whole._places[rank] for rank in self._ranks)

    def _tag(self) -> int:
        self._calls += 1
        return self._first_tag + _CALLERS + self._calls % _OWN

    def _gather(self, blob: bytes) -> list[bytes]:
        return self._finished(self._rounds(blob, self._ranks, self._tag()))

    def _rounds(self, blob: bytes, ranks: Sequence[int], tag: int) -> _Steps:
        """Return the bytes of all `ranks`, in order. A round doubles what each rank has."""
        size, mine, known = len(ranks), ranks.index(self._base.rank), [blob]
        while (count := len(known)) < size:
            message = pickle.dumps(known[: size - count])
            request = self._base.Isend([message, MPI.BYTE], ranks[(mine - count) % size], tag)
            _sent.append((request, message))
            known += pickle.loads((yield from self._receive(ranks[(mine + count) % size], tag)))
            yield from _completed(request)
            _sent.remove((request, message))
        return [known[(place - mine) % size] for place in range(size)]

    def _receive(self, source: int, tag: int) -> Generator[None, None, bytearray]:
        status = MPI.Status()
        while (message := self._base.Improbe(source, tag, status)) is None:
            yield
        found = bytearray(status.Get_count(MPI.BYTE))
        yield from _completed(message.Irecv([found, MPI.BYTE]))
        return found

    def _wait(self, requests: list[MPI.Request], memory: Any) -> None:
        _sent.extend((request, memory) for request in requests)
        for request in requests:
            self._finished(_completed(request))
            _sent.remove((request, memory))

    def _finished(self, steps: Generator[None, None, Any]) -> Any:
        """Take all steps, and return their result."""
        work = _Collective(steps)
        lost.wait_until(work.Test, "a collective of Python objects", lost.check)
        return work.result


class _Collective:
    """A collective in progress, with the method of MPI's requests that its users call."""

    def __init__(self, steps: Generator[None, None, Any]) -> None:
        self._steps, self.result, self._is_over = steps, None, False

    def Test(self) -> bool:
        try:
            if not self._is_over:
                next(self._steps)
        except StopIteration as end:
            self.result, self._is_over = end.value, True
        except MPI.Exception as error:
            lost.translate(error, "a message")
            raise
        return self._is_over


def _completed(request: MPI.Request) -> Generator[None, None, None]:
    while not request.Test():
        yield


def _bytes(buffer: Any) -> memoryview:
    """Return the bytes of a buffer of a program, which mpi4py takes with or without its type and count."""
    return memoryview(buffer[0] if isinstance(buffer, (list, tuple)) else buffer).cast("B")
