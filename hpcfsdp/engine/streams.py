"""Queues of work on a device, and the waits between them: one face for GPUs, for the CPU, and for tests.

The engine has four queues. It launches work on them, says which memory that reads and writes, and makes one queue wait
for what another has done. Every wait has a name (``Wait``) and a reason; docs/design/streams.md tells them all. What is
read and written matters to the tests alone, which prove that no wait is missing.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Iterable
from enum import Enum
from typing import Any, Protocol

import torch

from hpcfsdp.comm.communicator import Work
from hpcfsdp.comm.progress import Finished


class Queue(Enum):
    """Where work is put. Work of one queue is done in order; queues run side by side."""

    COMPUTE = "compute"
    """The module's own operations, the optimizer, and everything else that the user does."""
    GATHER = "gather"
    REDUCE = "reduce"
    HOST = "host"
    """The program itself, which reads and writes host memory; it runs ahead of the others."""


class Wait(Enum):
    """Why one queue waits for another."""

    SHARDS_WRITTEN = "a gather reads shards that the optimizer wrote"
    VALUES_USED = "a gather writes memory in which the values of another unit were computed with"
    VALUES_GATHERED = "the module computes with values that a gather wrote"
    GATHERED_IN_VAIN = "shards may be written, and memory freed, that a gather used for a unit that was not called"
    GRADS_WRITTEN = "a reduction reads gradients that autograd wrote"
    GRADS_TAKEN = "gradients are written to memory that a reduction read"
    GRADS_REDUCED = "the optimizer reads what a reduction wrote"
    GRADS_LANDED = "the program reads gradients that a reduction brought to host memory"
    SHARDS_READ = "the program may write shards in host memory that a gather read"


Place = tuple[int, str]
"""Memory by name: the flat parameter that it belongs to, and which part of it."""

Begin = Callable[[bool], Work | None]
"""Starts work; told whether it may go on behind the caller's back, it then returns the work to wait for."""


class Streams(Protocol):
    """The queues of one device.

    Attributes:
        overlap: whether queues run side by side, so that memory for one unit more lets a gather run while another unit
            is computed with.
    """

    overlap: bool

    def launch(
        self,
        queue: Queue,
        begin: Begin,
        finish: Callable[[], None] | None = None,
        *,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> Any:
        """Put work on a queue: `begin`, and `finish` when that is done. Returns the event that both are done."""

    def record(self, queue: Queue) -> Any:
        """The event that everything on the queue up to here is done."""

    def wait(self, queue: Queue, event: Any, why: Wait) -> None:
        """Let nothing that comes on `queue` start before the event."""

    def touch(self, queue: Queue, *, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        """Say that work which others put on the queue uses this memory."""

    def free(self, *places: Place) -> None:
        """Say that the memory may be given to another place of the same kind from here on."""

    def drain(self) -> None:
        """Collective. End what has been begun on all queues, and forget what was to be done after it."""


class HostStreams:
    """The queues of the CPU. Collectives go on behind the caller's back, everything else is done where it stands."""

    overlap = False

    def __init__(self) -> None:
        self._pending: dict[Queue, deque[_Pending]] = {queue: deque() for queue in Queue}

    def launch(
        self,
        queue: Queue,
        begin: Begin,
        finish: Callable[[], None] | None = None,
        *,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> _Pending | None:
        del reads, writes
        waiting = self._pending[queue]
        work = begin(True)
        work = None if isinstance(work, Finished) else work
        if work is None and not waiting:
            if finish is not None:
                finish()
            return None
        waiting.append(_Pending(queue, work, finish))
        return waiting[-1]

    def record(self, queue: Queue) -> _Pending | None:
        return self._pending[queue][-1] if self._pending[queue] else None

    def wait(self, queue: Queue, event: _Pending | None, why: Wait) -> None:
        del queue, why
        # In order, for what is left to do may be collective.
        while event is not None and not event.done:
            first = self._pending[event.queue].popleft()
            first.done = True
            work, finish, first.work, first.finish = first.work, first.finish, None, None
            if work is not None:
                work.wait()
            if finish is not None:
                finish()

    def touch(self, queue: Queue, *, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        pass

    def free(self, *places: Place) -> None:
        pass

    def drain(self) -> None:
        for waiting in self._pending.values():
            while waiting:
                first = waiting.popleft()
                first.done = True
                if first.work is not None:
                    first.work.wait()


class _Pending:
    __slots__ = ("done", "finish", "queue", "work")

    def __init__(self, queue: Queue, work: Work | None, finish: Callable[[], None] | None) -> None:
        self.queue, self.work, self.finish, self.done = queue, work, finish, False


class CudaStreams:
    """The queues of a GPU: CUDA streams, of which COMPUTE is the one that is current."""

    overlap = True

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._streams = {
            Queue.GATHER: torch.cuda.Stream(device, priority=-1),
            Queue.REDUCE: torch.cuda.Stream(device, priority=-1),
        }

    def launch(
        self,
        queue: Queue,
        begin: Begin,
        finish: Callable[[], None] | None = None,
        *,
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> torch.cuda.Event:
        del reads, writes
        with torch.cuda.stream(self._stream(queue)):
            begin(False)
            if finish is not None:
                finish()
            return self.record(queue)

    def record(self, queue: Queue) -> torch.cuda.Event:
        event = torch.cuda.Event()
        event.record(self._stream(queue))
        return event

    def wait(self, queue: Queue, event: torch.cuda.Event | None, why: Wait) -> None:
        del why
        if event is None:
            return
        if queue is Queue.HOST:
            event.synchronize()
        else:
            self._stream(queue).wait_event(event)

    def touch(self, queue: Queue, *, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        pass

    def free(self, *places: Place) -> None:
        pass

    def drain(self) -> None:
        for stream in self._streams.values():  # the program waits, too: it may free or write host memory next
            stream.synchronize()

    def _stream(self, queue: Queue) -> torch.cuda.Stream:
        return self._streams.get(queue) or torch.cuda.current_stream(self._device)


def streams_for(device: torch.device) -> Streams:
    """The queues of a device."""
    return CudaStreams(device) if device.type == "cuda" else HostStreams()
