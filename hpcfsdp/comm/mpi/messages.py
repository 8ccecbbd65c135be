"""The messages of one call: bytes of tensors between two ranks, matched on arrival, and mismatches that end the call.

A message that is longer than the buffer of its receive may overwrite the memory behind the buffer before MPI reports
the truncation: Open MPI copies all of it, straight from the memory of the sender. So no receive is posted ahead. A
probe matches each message and gives its length, and this rank receives the message into a buffer of this length. That
is the caller's tensor only where the tensor has this length.

A header precedes the bytes of a tensor, or of several: the call of the sender, and the number of bytes. Few bytes
follow in the same message, more in messages of their own.
"""

from __future__ import annotations

import copy
import functools
import struct
import threading
from collections import deque
from collections.abc import Collection, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import xxhash
from mpi4py import MPI
from torch import Tensor

from hpcfsdp.comm import traffic
from hpcfsdp.comm.mpi.node_memory import decode_label, fit_label
from hpcfsdp.comm.progress import Condition
from hpcfsdp.comm.reduce import Tensors
from hpcfsdp.errors import CommunicationError, DifferentCallsError
from hpcfsdp.hang import lost

_NUMBERS = struct.Struct("<qqQq")
"""The number of the call, the bytes of the tensors, a hash of what must be equal, and the messages that follow."""
_LABEL_BYTES = 192
_HEADER_BYTES = _NUMBERS.size + _LABEL_BYTES
_INLINE_BYTES = 1 << 13
"""Bytes that follow in the message of their header: copying them costs less than another message."""
_PART_BYTES = 1 << 26
"""Longer messages are sent in parts: a message of MPI has fewer than 2**31 elements, and this rank receives a part that
fits nowhere into scratch memory of its size."""
_KEPT = 16  # mismatches that are stored: this rank may come to the call later than the rank that found it
_POLLED_RECEIVES = 8  # incomplete receives that a rank polls at a time
_POLLED_MISMATCHES = 64  # polls in vain after which a rank asks whether another one has found a mismatch in its call

abandoned: list[Any] = []
"""Requests that a failed collective left pending, with their tensors: MPI may use these until the program ends."""


def settle() -> None:
    """Not collective. Forget the requests of failed collectives that are complete, or of a rank that was lost."""
    abandoned[:] = [each for each in abandoned if not _is_settled(each[0])]


def _is_settled(requests: Any) -> bool:
    pending = [request for request, *_ in requests] if isinstance(requests, list) else [requests]
    return not [request for request in pending if not lost.is_settled(request)]


def _parts(tensors: Tensors) -> Iterator[list[Any]]:
    """Yield the tensors' bytes, as mpi4py takes buffers."""
    # Not tensor.numpy(): that marks the storage as shared, and a shared storage cannot be freed by resizing it.
    for tensor in tensors:
        address, nbytes = tensor.data_ptr(), tensor.nbytes
        for begin in range(0, nbytes, _PART_BYTES):
            count = min(_PART_BYTES, nbytes - begin)
            yield [MPI.buffer.fromaddress(address + begin, count), count, MPI.BYTE]


_encode = functools.lru_cache(1024)(functools.partial(fit_label, nbytes=_LABEL_BYTES))


@functools.lru_cache(1024)
def _hash(compared: str) -> int:
    return xxhash.xxh3_64_intdigest(compared.encode())


@dataclass(frozen=True)
class Mismatch:
    """A message that does not fit the call of the rank that received it."""

    sequence: int  # the number of the collective, the same on all ranks; 0 for none
    rank: int
    peer: int  # which sent it
    mine: str  # the calls of the two
    theirs: str
    text: str = ""  # what is wrong, if their calls are the same


class MpiCall:
    """One collective of one communicator, or one message to or from another rank.

    `ranks` take part, as the communicator numbers them; `rank` is the place of this one among them.
    """

    __slots__ = ("_encoded", "_expected", "_hash", "label", "matcher", "rank", "ranks", "sequence", "size", "tag")

    def __init__(
        self,
        matcher: MessageMatcher,
        label: str,
        tag: int,
        sequence: int = 0,
        *,
        expected: str | None = None,
        within: str | None = None,
    ) -> None:
        """Not collective. `label` and `sequence` are the same on all ranks; 0: this call is not counted.

        For a message between two ranks `expected` is what they must have in common; otherwise the label is compared.
        `within` is the label with the public call that this rank is in. That of other ranks may differ: a rank that has
        no more data takes part in the collectives of a backward without having one.
        """
        self.matcher, self.rank, self.size = matcher, matcher.rank, matcher.size
        self.ranks: Sequence[int] = range(matcher.size)
        self.label = within or label
        self.tag, self.sequence = tag, sequence
        self._encoded = _encode(expected or self.label)
        self._hash = _hash(expected or label)
        self._expected = expected

    def among(self, ranks: Sequence[int]) -> MpiCall:
        """Return the part of this call that only `ranks` take part in, this rank among them."""
        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.ranks = [self.ranks[rank] for rank in ranks]
        return part

    def find_mismatch(self, header: bytes, nbytes: int, peer: int) -> Mismatch | None:
        """Compare a header from `peer` with the one of this call for a tensor of `nbytes` bytes."""
        sequence, sent_nbytes, sent_hash, _ = _NUMBERS.unpack_from(header)
        if (sequence, sent_nbytes, sent_hash) == (self.sequence, nbytes, self._hash):
            return None
        theirs, text = decode_label(header[_NUMBERS.size :]), ""
        if sent_hash == self._hash:
            text = f"rank {peer} sent {sent_nbytes} bytes where {nbytes} bytes were expected"
            text += "; sizes or dtypes differ between these ranks"
        elif self._expected is not None:
            text = f"rank {peer} sent {theirs} where {self._expected} was expected"
        return Mismatch(self.sequence, self.matcher.rank, peer, decode_label(self._encoded), theirs, text)

    def foreign_message(self, nbytes: int, peer: int | None) -> Mismatch:
        """Return the mismatch of a message of `nbytes` bytes that is no part of any call."""
        mine, text = decode_label(self._encoded), f"rank {peer} sent {nbytes} bytes that belong to no expected message"
        return Mismatch(self.sequence, self.matcher.rank, peer or 0, mine, mine, text)

    def check_mismatches(self, polls: int) -> None:
        """Raise the mismatch that another rank has found in this collective. Receives after many `polls` alone."""
        if self.sequence:
            if polls % _POLLED_MISMATCHES == 0:
                self.matcher.receive_mismatches()
            mismatch = self.matcher.mismatches.get(self.sequence)
            if mismatch is not None:
                raise self.error(mismatch)

    def error(self, mismatch: Mismatch) -> CommunicationError:
        rank, mine = self.matcher.rank, decode_label(self._encoded)
        if mismatch.text:
            where = "" if rank == mismatch.rank else f"failed on rank {mismatch.rank}: "
            return CommunicationError(f"{self.label} on rank {rank}: {where}{mismatch.text}")
        other, theirs = (mismatch.peer, mismatch.theirs) if mine == mismatch.mine else (mismatch.rank, mismatch.mine)
        return DifferentCallsError(f"rank {rank} calls {mine}, but rank {other} calls {theirs}")


class Receive:
    """The receive of tensors: a header, and parts where the bytes are not in the header's message.

    `source` is None where any rank may send, until one has.
    """

    __slots__ = ("_first", "_parts", "_requests", "_skipped", "_tensors", "_unmatched", "call", "mismatch")
    __slots__ += ("is_matched", "source")

    def __init__(self, call: MpiCall, tensors: Tensors, source: int | None) -> None:
        self.call, self.source, self._tensors = call, source, tensors
        self.mismatch: Mismatch | None = None  # what is wrong with the messages
        self.is_matched = False  # all messages of the tensors
        self._first: bytearray | None = None  # the message that begins with the header
        self._parts: Iterator[list[Any]] | None = None  # their buffers; None until the header has been read
        self._unmatched = 0  # parts
        self._skipped = 0  # parts of a call that is over
        self._requests: list[tuple[MPI.Request, list[Any]]] = []

    def is_ready(self) -> bool:
        """Return whether it can match the next message: the header says which one that is."""
        return self.test() or (self._parts is not None and self.mismatch is None)

    def match(self, message: MPI.Message, source: int, nbytes: int) -> None:
        """Receive the next message of the source, of `nbytes` bytes."""
        self.source = source
        buffer = None
        if self._skipped:
            self._skipped -= 1
        elif self._parts is None:
            self._first = bytearray(nbytes)
            buffer = [self._first, nbytes, MPI.BYTE]
        else:
            self._unmatched -= 1
            self.is_matched = not self._unmatched
            buffer = next(self._parts, None) if self.mismatch is None else None
            if buffer is not None and buffer[1] != nbytes:
                self.mismatch, buffer = self.call.foreign_message(nbytes, source), None
        buffer = buffer or [bytearray(nbytes), nbytes, MPI.BYTE]
        self._requests.append((message.Irecv(buffer), buffer))

    def abandon(self) -> None:
        """Write to the tensors no more, except in receives that MPI has begun. Drop later messages."""
        if self.mismatch is None:
            self.mismatch = self.call.foreign_message(0, self.source)
        if self._requests:
            abandoned.append((self._requests, self.source, self._tensors))

    def test(self) -> bool:
        """Return whether all matched messages have been received."""
        while self._requests:
            if not self._requests[-1][0].Test():
                return False
            self._requests.pop()
        if self._first is not None:
            self._read_header(self._first)
            self._first = None
        return True

    def _read_header(self, first: bytearray) -> None:
        sequence, nbytes, _, following = _NUMBERS.unpack_from(first) if len(first) >= _HEADER_BYTES else (0, -1, 0, 0)
        inline = nbytes if nbytes <= _INLINE_BYTES else 0
        if nbytes < 0 or len(first) - _HEADER_BYTES != inline:
            self.mismatch = self.call.foreign_message(len(first), self.source)
            self._parts, self.is_matched = iter(()), True
            return
        if sequence < self.call.sequence:  # a message of a call that failed here, with a tag that is used again
            self._skipped = following
            return
        if self.mismatch is None:
            expected = sum(tensor.nbytes for tensor in self._tensors)
            self.mismatch = self.call.find_mismatch(bytes(first[:_HEADER_BYTES]), expected, self.source)
        if inline and self.mismatch is None:
            begin, inlined = _HEADER_BYTES, memoryview(first)
            for buffer, count, _ in _parts(self._tensors):
                buffer[:] = inlined[begin : begin + count]
                begin += count
        self._parts = _parts(self._tensors)
        self._unmatched = following
        self.is_matched = not following


class _TagQueue:
    """The receives of one tag."""

    def __init__(self) -> None:
        self.posted: list[Receive] = []  # without a message, in the order in which they were posted
        self.begun: dict[int, Receive] = {}  # by source: that of its next message


class MessageMatcher:
    """Matches the messages of one communicator as MPI does: the first of each source and tag to the first receive.

    A rank sends the mismatches that it finds to all others, with a tag of their own.
    """

    def __init__(self, comm: MPI.Intracomm, mismatch_tag: int, node: Collection[int] = ()) -> None:
        """Not collective. `node`: the ranks that share one with this rank."""
        self.rank, self.size = comm.rank, comm.size
        self._node = frozenset(node)
        self.mismatches: dict[int, Mismatch] = {}  # that other ranks have found, by the number of the collective
        # Whether no posted receive has been cancelled: later messages for it would reach another communicator, if MPI
        # reused the context of this one.
        self.is_clean = True
        self._mismatch_tag = mismatch_tag
        self._announced: list[MPI.Request] = []
        self._comm = comm
        self._status = MPI.Status()
        self._queues: dict[int, _TagQueue] = {}  # by tag
        self._cancelled: deque[Receive] = deque()
        self._lock = threading.Lock()

    def send(self, call: MpiCall, tensors: Tensors, to: int) -> list[tuple[MPI.Request, Any]]:
        """Send tensors to a rank. Returns the requests with the memory that each reads."""
        nbytes, parts = sum(tensor.nbytes for tensor in tensors), list(_parts(tensors))
        inlined = parts if nbytes <= _INLINE_BYTES else []
        following = [] if inlined else parts
        first = bytearray(_NUMBERS.pack(call.sequence, nbytes, call._hash, len(following)) + call._encoded)
        for part, *_ in inlined:
            first += part
        if to not in self._node:
            traffic.count.sent_to_nodes += nbytes
        with self._lock:  # messages of two threads must not mix
            requests: list[tuple[MPI.Request, Any]] = [(self._comm.Isend([first, MPI.BYTE], to, call.tag), first)]
            requests += [(self._comm.Isend(part, to, call.tag), tensors) for part in following]
        return requests

    def post(self, receive: Receive) -> None:
        """Match later messages with this receive."""
        with self._lock:
            if self._cancelled:
                self._drop_cancelled()
            queue = self._queues.get(receive.call.tag)
            if queue is None:
                queue = self._queues[receive.call.tag] = _TagQueue()
            queue.posted.append(receive)

    def test(self, receive: Receive) -> bool:
        """Return whether a posted receive is complete. Matches the messages that have arrived from its source."""
        with self._lock:
            if self._cancelled:
                self._drop_cancelled()
            if not receive.is_matched:
                self._match(receive, self._queues[receive.call.tag])
            return receive.is_matched and receive.test()

    def cancel(self, receive: Receive) -> None:
        """Match no message with a posted receive, unless its first one has arrived."""
        # Not under the lock: the garbage collector may come here while this thread has it.
        self.is_clean = False
        receive.abandon()
        self._cancelled.append(receive)

    def announce(self, mismatch: Mismatch) -> None:
        with self._lock:
            self._announced = [request for request in self._announced if not request.Test()]
            for step in range(1, self.size):
                peer = (self.rank + step) % self.size
                self._announced.append(self._comm.isend(mismatch, dest=peer, tag=self._mismatch_tag))

    def receive_mismatches(self) -> None:
        with self._lock:
            while (message := self._comm.improbe(tag=self._mismatch_tag)) is not None:
                mismatch = message.recv()
                self.mismatches[mismatch.sequence] = mismatch
            for sequence in sorted(self.mismatches)[:-_KEPT]:
                del self.mismatches[sequence]

    def _match(self, receive: Receive, queue: _TagQueue) -> None:
        tag = receive.call.tag
        while not receive.is_matched:
            source = receive.source
            if queue.begun:
                before = list(queue.begun.values()) if source is None else [queue.begun.get(source)]
                if not all(begun is None or self._can_match(begun, queue) for begun in before):
                    return
                if receive.is_matched:
                    return
            wanted = MPI.ANY_SOURCE if source is None else source
            message = self._comm.Improbe(source=wanted, tag=tag, status=self._status)
            if message is None:
                return
            source = self._status.Get_source()
            target = queue.begun.get(source)
            if target is None:
                target = queue.begun[source] = next(each for each in queue.posted if each.source in (None, source))
                queue.posted.remove(target)
            target.match(message, source, self._status.Get_count(MPI.BYTE))
            self._can_match(target, queue)

    def _can_match(self, begun: Receive, queue: _TagQueue) -> bool:
        """Return whether the next message of the source of `begun` can be matched."""
        is_ready = begun.is_ready()
        if begun.is_matched:
            del queue.begun[begun.source]
            self._close(begun.call.tag, queue)
        return is_ready or begun.is_matched

    def _drop_cancelled(self) -> None:
        while self._cancelled:
            receive = self._cancelled.popleft()
            queue = self._queues.get(receive.call.tag)
            if queue is not None and receive in queue.posted:
                queue.posted.remove(receive)
                self._close(receive.call.tag, queue)

    def _close(self, tag: int, queue: _TagQueue) -> None:
        if not queue.posted and not queue.begun:
            self._queues.pop(tag, None)


class Requests:
    """Sends and receives of one call. A ``Condition`` of progress.py that holds when all are complete."""

    def __init__(self, call: MpiCall) -> None:
        self.source: int | None = None  # which sent the last message
        self._call, self._matcher = call, call.matcher
        self._receives: deque[Receive] = deque()
        self._mismatch: Mismatch | None = None
        self._polls = 0
        # request, rank, and the memory that it reads, which must exist until the request is complete
        self._sends: list[tuple[MPI.Request, int, Any]] = []

    def send(self, tensors: Tensor | Tensors, to: int) -> None:
        """Send tensors. They must not change until all requests are complete."""
        to, tensors = self._call.ranks[to], (tensors,) if isinstance(tensors, Tensor) else tensors
        self._sends += [(request, to, read) for request, read in self._matcher.send(self._call, tensors, to)]

    def recv(self, tensors: Tensor | Tensors, source: int | None) -> None:
        """Receive tensors, as many as are sent together, from a rank, from any if `source` is None."""
        tensors = (tensors,) if isinstance(tensors, Tensor) else tensors
        receive = Receive(self._call, tensors, None if source is None else self._call.ranks[source])
        self._receives.append(receive)
        self._matcher.post(receive)

    def holds(self) -> bool:
        try:
            is_complete = self._test()
        except MPI.Exception as error:
            self.cancel()
            lost.check(self._call.label)
            where = f"{self._call.label} on rank {self._matcher.rank}"
            raise CommunicationError(f"{where}: {error.Get_error_string()}") from None
        if not is_complete:
            self._polls += 1
            try:
                self._call.check_mismatches(self._polls)
            except CommunicationError:
                self.cancel()
                raise
        elif self._mismatch is not None:
            raise self._call.error(self._mismatch)
        return is_complete

    def cancel(self) -> None:
        """Receive nothing more, and leave sends pending."""
        for receive in self._receives:
            self._matcher.cancel(receive)
        self._receives.clear()
        abandoned.extend(self._sends)
        self._sends.clear()

    def __del__(self) -> None:
        if self._receives or self._sends:
            self.cancel()

    def missing(self) -> list[int]:
        unsent = {rank for request, rank, _ in self._sends if not request.Get_status()}
        awaited = [receive.source for receive in self._receives if not self._matcher.test(receive)]
        return sorted(unsent.union(rank for rank in awaited if rank is not None))

    def _test(self) -> bool:
        misses = 0
        while misses < min(len(self._receives), _POLLED_RECEIVES):
            receive = self._receives[0]
            if not self._matcher.test(receive):
                self._receives.rotate(-1)
                misses += 1
                continue
            self._receives.popleft()
            self.source = receive.source
            if receive.mismatch is not None:
                self._mismatch = self._mismatch or receive.mismatch
                if receive.mismatch.sequence:
                    self.cancel()
                    self._matcher.announce(receive.mismatch)
        if self._receives:
            return False
        while self._sends:  # any test advances all messages, so one at a time is enough
            if not self._sends[-1][0].Test():
                return False
            self._sends.pop()
        return True


class UnlessFailed:
    """A ``Condition`` that also raises where the call has failed on another rank. See ``MpiCall.check_mismatches``."""

    def __init__(self, call: MpiCall, condition: Condition) -> None:
        self._call, self._condition, self._polls = call, condition, 0
        self.missing = condition.missing

    def holds(self) -> bool:
        if self._condition.holds():
            return True
        self._polls += 1
        self._call.check_mismatches(self._polls)
        return False
