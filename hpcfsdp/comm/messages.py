"""Bytes of tensors as MPI messages between two ranks.

A message that is longer than the buffer of its receive may overwrite what lies behind the buffer before MPI reports the
truncation: Open MPI copies all of it, straight from the memory of the sender. So no receive is posted ahead. A probe
matches each message and gives its length, and the message is received into a buffer of this length. That is the
caller's tensor only where the tensor has it.

The bytes of a tensor follow a header: what the sender has called, and how many bytes there are. Few bytes follow in the
same message, more in messages of their own.
"""

from __future__ import annotations

import functools
import struct
import threading
from collections import deque
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import xxhash
from mpi4py import MPI

from hpcfsdp.comm.failures import Failure, Failures
from hpcfsdp.comm.progress import Condition
from hpcfsdp.comm.window import fitted
from hpcfsdp.errors import CommunicationError

_NUMBERS = struct.Struct("<qqQ")  # the number of the call, the bytes of the tensor, a hash of what must be alike
_LABEL_BYTES = 192
_HEADER_BYTES = _NUMBERS.size + _LABEL_BYTES
_INLINE_BYTES = 1 << 13
"""Up to here the bytes follow in the message of their header: copying them costs less than another message."""
_PART_BYTES = 1 << 26
"""Longer messages go in parts: one of MPI has fewer than 2**31 elements, and a part that fits nowhere is received into
scratch memory of its size."""
_LOOKS = 8
"""Peers whose messages are looked for at a time."""
_LISTEN_EVERY = 64
"""Looks in vain after which a rank asks whether the call has failed elsewhere."""

_abandoned: list[Any] = []
"""What a collective that failed has left under way: MPI may read and write these tensors until the program ends."""


def _bytes_of(tensor: torch.Tensor) -> tuple[int, int]:
    """Where a tensor's bytes begin, and how many they are."""
    # Not tensor.numpy(): that marks the storage as shared, and a shared storage cannot be freed by resizing it.
    return tensor.data_ptr(), tensor.numel() * tensor.element_size()


def _parts(tensor: torch.Tensor) -> Iterator[list[Any]]:
    """The tensor's bytes, as mpi4py takes buffers."""
    address, nbytes = _bytes_of(tensor)
    for begin in range(0, nbytes, _PART_BYTES):
        count = min(_PART_BYTES, nbytes - begin)
        yield [MPI.buffer.fromaddress(address + begin, count), count, MPI.BYTE]


@functools.lru_cache(1024)
def _stamp(text: str) -> bytes:
    return fitted(text, _LABEL_BYTES)


@functools.lru_cache(1024)
def _key(compared: str) -> int:
    return xxhash.xxh3_64_intdigest(compared.encode())


class Call:
    """One collective of one communicator, or one message to or from another rank.

    Attributes:
        label: what it is, in errors.
        tag: that of its messages.
        sequence: its number among the collectives of the communicator; 0 for what is not counted.
        stamp: what its messages say that it is, for the messages of errors.
    """

    __slots__ = ("_compared", "_key", "inbox", "label", "sequence", "stamp", "tag")

    def __init__(
        self,
        inbox: Inbox,
        label: str,
        tag: int,
        sequence: int = 0,
        *,
        compared: str | None = None,
        within: str | None = None,
    ) -> None:
        """
        Args:
            label: the same on all ranks.
            compared: what sender and receiver must have in common; None for the label.
            within: the label with the public call that this rank is in. Those of others may differ: a rank that has no
                more data takes part in the collectives of a backward without having one.
        """
        self.inbox = inbox
        self.label = within or label
        self.tag = tag
        self.sequence = sequence
        self.stamp = _stamp(compared or self.label)
        self._compared = compared
        self._key = _key(compared or label)

    @property
    def rank(self) -> int:
        return self.inbox.rank

    @property
    def size(self) -> int:
        return self.inbox.size

    def mail(self) -> Mail:
        return Mail(self)

    def header(self, nbytes: int) -> bytes:
        """What comes before the bytes of a tensor."""
        return _NUMBERS.pack(self.sequence, nbytes, self._key) + self.stamp

    def find_fault(self, header: bytes, expected: int, peer: int) -> Failure | None:
        """What is wrong with a header from `peer` where `expected` bytes for this call are to come; None: nothing."""
        sequence, nbytes, key = _NUMBERS.unpack_from(header)
        if (sequence, nbytes, key) == (self.sequence, expected, self._key):
            return None
        stamp = header[_NUMBERS.size :]
        text = ""
        if key == self._key:
            text = f"rank {peer} sent {nbytes} bytes where {expected} bytes were expected"
            text += "; sizes or dtypes differ between these ranks"
        elif self._compared is not None:
            text = f"rank {peer} sent {_text(stamp)} where {self._compared} was expected"
        return self.failure(peer, text, stamp)

    def failure(self, peer: int, text: str, stamp: bytes) -> Failure:
        return Failure(self.sequence, self.rank, peer, _text(self.stamp), _text(stamp), text)

    def hear_of_failures(self, looks: int) -> None:
        """Not collective. Raise what another rank has found to be wrong with this collective.

        Args:
            looks: how often this rank has looked for what it waits for.
        """
        if not self.sequence:
            return
        if looks % _LISTEN_EVERY == 0:
            self.inbox.failures.listen()
        failure = self.inbox.failures.of(self.sequence)
        if failure is not None:
            raise self.error(failure)

    def error(self, failure: Failure) -> CommunicationError:
        return failure.error(self.label, self.rank, _text(self.stamp))


class Arrival:
    """The bytes of one tensor on their way here: a header, and parts where they are not in the header's message.

    Attributes:
        source: the rank that they come from; None where it is any, until it is known.
        failure: what is wrong with them.
        is_matched: whether no further message belongs to it.
    """

    __slots__ = ("_first", "_parts", "_requests", "_skipped", "_tensor", "_to_match", "call", "failure", "is_matched")
    __slots__ += ("source",)

    def __init__(self, call: Call, tensor: torch.Tensor, source: int | None) -> None:
        self.call = call
        self.source = source
        self.failure: Failure | None = None
        self.is_matched = False
        self._tensor = tensor
        self._first: bytearray | None = None  # the message that begins with the header
        self._parts: Iterator[list[Any]] | None = None  # where they go; None until the header has been read
        self._to_match = 0  # parts
        self._skipped = 0  # parts of a call that is over
        self._requests: list[tuple[MPI.Request, list[Any]]] = []

    def is_complete(self) -> bool:
        """Whether all bytes are here."""
        return self.is_matched and self._test()

    def is_ready(self) -> bool:
        """Whether it can take the next message: what that is depends on the header before it."""
        return self._test() or (self._parts is not None and self.failure is None)

    def take(self, message: MPI.Message, source: int, nbytes: int) -> None:
        """Receive the next message of the source, of `nbytes` bytes."""
        self.source = source
        buffer = None
        if self._skipped:
            self._skipped -= 1
        elif self._parts is None:
            self._first = bytearray(nbytes)
            buffer = [self._first, nbytes, MPI.BYTE]
        else:
            self._to_match -= 1
            self.is_matched = not self._to_match
            buffer = next(self._parts, None) if self.failure is None else None
            if buffer is not None and buffer[1] != nbytes:
                self.failure, buffer = self._garbled(nbytes), None
        buffer = buffer or [bytearray(nbytes), nbytes, MPI.BYTE]
        self._requests.append((message.Irecv(buffer), buffer))

    def give_up(self) -> None:
        """Leave the tensor alone as far as that is possible; what comes yet goes nowhere."""
        if self.failure is None:
            self.failure = self._garbled(0)
        if self._requests:
            _abandoned.append((self._requests, self.source, self._tensor))

    def _test(self) -> bool:
        """Whether all messages that have been matched are here."""
        while self._requests:
            if not self._requests[-1][0].Test():
                return False
            self._requests.pop()
        if self._first is not None:
            self._read_header(self._first)
            self._first = None
        return True

    def _read_header(self, first: bytearray) -> None:
        address, expected = _bytes_of(self._tensor)
        sequence, nbytes, _ = _NUMBERS.unpack_from(first) if len(first) >= _HEADER_BYTES else (0, -1, 0)
        inline = nbytes if nbytes <= _INLINE_BYTES else 0
        if nbytes < 0 or len(first) - _HEADER_BYTES != inline:
            self.failure, self._parts, self.is_matched = self._garbled(len(first)), iter(()), True
            return
        following = 0 if inline else -(-nbytes // _PART_BYTES)
        if sequence < self.call.sequence:  # a message of a call that failed here, and whose tag is used again
            self._skipped = following
            return
        if self.failure is None:
            self.failure = self.call.find_fault(bytes(first[:_HEADER_BYTES]), expected, self.source)
        if inline and self.failure is None:
            MPI.buffer.fromaddress(address, nbytes)[:] = memoryview(first)[_HEADER_BYTES:]
        self._parts = _parts(self._tensor)
        self._to_match = following
        self.is_matched = not following

    def _garbled(self, nbytes: int) -> Failure:
        text = f"rank {self.source} sent {nbytes} bytes that are no part of what was expected"
        return self.call.failure(self.source or 0, text, self.call.stamp)


class _Line:
    """The messages of one tag."""

    def __init__(self) -> None:
        self.waiting: list[Arrival] = []
        """What no message has come for, in the order in which it was expected."""
        self.begun: dict[int, Arrival] = {}
        """By source: what the next message from there belongs to."""


class Inbox:
    """The messages of one communicator, matched as MPI does: of each source and tag the first to the first expected.

    Attributes:
        failures: what is known of collectives that failed.
        is_clean: whether all that was expected has come. What comes later would go to another communicator, if MPI
            gave that the number of this one.
    """

    def __init__(self, comm: MPI.Intracomm, failures: Failures) -> None:
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.failures = failures
        self.is_clean = True
        self._comm = comm
        self._status = MPI.Status()
        self._lines: dict[int, _Line] = {}  # by tag
        self._forgotten: deque[Arrival] = deque()
        self._lock = threading.Lock()

    def send(self, call: Call, tensor: torch.Tensor, to: int) -> list[tuple[MPI.Request, Any]]:
        """Post the messages that bring a tensor to a rank, and what they read."""
        address, nbytes = _bytes_of(tensor)
        first = bytearray(call.header(nbytes))
        if 0 < nbytes <= _INLINE_BYTES:
            first += MPI.buffer.fromaddress(address, nbytes)
        with self._lock:  # those of two threads must not mix
            requests: list[tuple[MPI.Request, Any]] = [(self._comm.Isend([first, MPI.BYTE], to, call.tag), first)]
            if nbytes > _INLINE_BYTES:
                requests += [(self._comm.Isend(part, to, call.tag), tensor) for part in _parts(tensor)]
        return requests

    def expect(self, arrival: Arrival) -> None:
        with self._lock:
            if self._forgotten:
                self._clear()
            line = self._lines.get(arrival.call.tag)
            if line is None:
                line = self._lines[arrival.call.tag] = _Line()
            line.waiting.append(arrival)

    def look_for(self, arrival: Arrival) -> bool:
        """Whether a tensor that is expected is here; moves on what comes from its source."""
        with self._lock:
            if self._forgotten:
                self._clear()
            if not arrival.is_matched:
                self._match(arrival, self._lines[arrival.call.tag])
            return arrival.is_complete()

    def forget(self, arrival: Arrival) -> None:
        """Expect something no more."""
        # Not under the lock: the garbage collector may come here while this thread has it.
        self.is_clean = False
        arrival.give_up()
        self._forgotten.append(arrival)

    def _match(self, arrival: Arrival, line: _Line) -> None:
        tag = arrival.call.tag
        while not arrival.is_matched:
            source = arrival.source
            if line.begun:
                before = list(line.begun.values()) if source is None else [line.begun.get(source)]
                if not all(begun is None or self._goes_on(begun, line) for begun in before):
                    return
                if arrival.is_matched:
                    return
            wanted = MPI.ANY_SOURCE if source is None else source
            message = self._comm.Improbe(source=wanted, tag=tag, status=self._status)
            if message is None:
                return
            source = self._status.Get_source()
            taker = line.begun.get(source)
            if taker is None:
                taker = line.begun[source] = next(each for each in line.waiting if each.source in (None, source))
                line.waiting.remove(taker)
            taker.take(message, source, self._status.Get_count(MPI.BYTE))
            self._goes_on(taker, line)

    def _goes_on(self, begun: Arrival, line: _Line) -> bool:
        """Whether the next message of the source of `begun` can be taken."""
        ready = begun.is_ready()
        if begun.is_matched:
            del line.begun[begun.source]
            self._close(begun.call.tag, line)
        return ready or begun.is_matched

    def _clear(self) -> None:
        while self._forgotten:
            arrival = self._forgotten.popleft()
            line = self._lines.get(arrival.call.tag)
            if line is not None and arrival in line.waiting:
                line.waiting.remove(arrival)
                self._close(arrival.call.tag, line)

    def _close(self, tag: int, line: _Line) -> None:
        if not line.waiting and not line.begun:
            self._lines.pop(tag, None)


class Mail:
    """Messages under way, sent and received. A ``Condition`` of progress.py that holds when all are through."""

    def __init__(self, call: Call) -> None:
        self.source: int | None = None
        """The rank that the last message came from."""
        self._call = call
        self._inbox = call.inbox
        self._arrivals: deque[Arrival] = deque()
        self._failure: Failure | None = None
        self._looks = 0
        # request, rank, and what it reads, which must live until then
        self._sent: list[tuple[MPI.Request, int, Any]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Post a message. The tensor must not change until the mail is through."""
        self._sent += [(request, to, read) for request, read in self._inbox.send(self._call, tensor, to)]

    def receive(self, tensor: torch.Tensor, source: int | None) -> None:
        """Expect a message from a rank, from any if `source` is None."""
        arrival = Arrival(self._call, tensor, source)
        self._arrivals.append(arrival)
        self._inbox.expect(arrival)

    def holds(self) -> bool:
        try:
            done = self._move_on()
        except MPI.Exception as error:
            self.abandon()
            where = f"{self._call.label} on rank {self._call.rank}"
            raise CommunicationError(f"{where}: {error.Get_error_string()}") from None
        if not done:
            self._hear_of_failures()
        elif self._failure is not None:
            raise self._call.error(self._failure)
        return done

    def abandon(self) -> None:
        """Expect nothing more, and leave what is under way as it is."""
        for arrival in self._arrivals:
            self._inbox.forget(arrival)
        self._arrivals.clear()
        _abandoned.extend(self._sent)
        self._sent.clear()

    def __del__(self) -> None:
        if self._arrivals or self._sent:
            self.abandon()

    def missing(self) -> list[int]:
        unsent = {rank for request, rank, _ in self._sent if not request.Get_status()}
        awaited = [arrival.source for arrival in self._arrivals if not self._inbox.look_for(arrival)]
        return sorted(unsent.union(rank for rank in awaited if rank is not None))

    def _move_on(self) -> bool:
        """Take what has come; whether nothing is left to wait for."""
        misses = 0
        while misses < min(len(self._arrivals), _LOOKS):
            arrival = self._arrivals[0]
            if not self._inbox.look_for(arrival):
                self._arrivals.rotate(-1)
                misses += 1
                continue
            self._arrivals.popleft()
            self.source = arrival.source
            if arrival.failure is not None:
                self._fail(arrival.failure)
        if self._arrivals:
            return False
        while self._sent:  # any test moves all messages along, so one at a time is enough
            if not self._sent[-1][0].Test():
                return False
            self._sent.pop()
        return True

    def _fail(self, failure: Failure) -> None:
        self._failure = self._failure or failure
        if failure.sequence:
            self.abandon()
            self._inbox.failures.announce(failure)

    def _hear_of_failures(self) -> None:
        self._looks += 1
        try:
            self._call.hear_of_failures(self._looks)
        except CommunicationError:
            self.abandon()
            raise


class Heeding:
    """A ``Condition`` for which the messages of other ranks matter. Not theirs alone: see ``Call.hear_of_failures``."""

    def __init__(self, call: Call, condition: Condition) -> None:
        self._call = call
        self._condition = condition
        self._looks = 0

    def holds(self) -> bool:
        if self._condition.holds():
            return True
        self._looks += 1
        self._call.hear_of_failures(self._looks)
        return False

    def missing(self) -> Sequence[int]:
        return self._condition.missing()


def _text(stamp: bytes) -> str:
    return stamp.decode(errors="replace").rstrip()
