"""Queues of work on a device, and the waits between them: one interface for accelerators, for the CPU, and for tests.

The engine has five queues. It launches work on them, and makes one queue wait for what another has done. Every wait has
a name (``Wait``) and a reason, see docs/developers/streams.md.
"""

from __future__ import annotations

import time
import weakref
from collections import deque
from collections.abc import Callable
from enum import Enum
from typing import Any, Protocol

import torch

from hpcfsdp import accelerator, timeline
from hpcfsdp.comm.communicator import Work
from hpcfsdp.comm.progress import Finished, Running
from hpcfsdp.errors import EngineError
from hpcfsdp.hang import watch as hang


class Queue(Enum):
    """Where work runs: in order within a queue, concurrently across queues."""

    COMPUTE = "compute"
    """The module's own operations, the optimizer, and everything else that the user does."""
    GATHER = "gather"
    REDUCE = "reduce"
    REPLICATE = "replicate"
    """Reduces over replicas what REDUCE has reduced over the shards: one goes between nodes, the other within them."""
    HOST = "host"
    """The program itself, which reads and writes host memory; it runs ahead of the others."""


OWN_QUEUES = (Queue.GATHER, Queue.REDUCE, Queue.REPLICATE)
"""Those that the engine makes."""


class Wait(Enum):
    """Why one queue waits for another."""

    SHARDS_WRITTEN = "a gather reads shards that the optimizer wrote"
    VALUES_USED = "a gather writes memory in which the values of another unit were computed with"
    VALUES_GATHERED = "the module computes with values that a gather wrote"
    GATHERED_IN_VAIN = "shards may be written, and memory freed, that a gather used for a unit that was not called"
    GRADS_WRITTEN = "a reduction reads gradients that autograd wrote"
    SHARD_REDUCED = "an all-reduce over replicas reads what a reduce-scatter wrote"
    GRADS_TAKEN = "gradients are written to memory that a reduction read"
    GRADS_REDUCED = "the optimizer reads what a reduction wrote"
    GRADS_LANDED = "the program reads gradients that a reduction brought to host memory"
    SHARDS_READ = "the program may write shards in host memory that a gather read"


Begin = Callable[[bool], Work | None]
"""Starts work. Called with whether the work may go on in the background; then it returns the work to wait for."""


class Streams(Protocol):
    """The queues of one device.

    Attributes:
        overlap: whether queues run concurrently, so that a gather can run while another unit computes.
    """

    overlap: bool

    def launch(self, queue: Queue, begin: Begin, finish: Callable[[], None] | None = None, *, label: str = "") -> Any:
        """Put work on a queue: `begin`, and `finish` when that is done. Returns the event that both are done.

        Args:
            label: what it works on, for a trace.
        """

    def record(self, queue: Queue) -> Any:
        """The event that everything on the queue up to here is done."""

    def wait(self, queue: Queue, event: Any, why: Wait) -> None:
        """Start nothing that comes later on `queue` before the event."""

    def proceed(self) -> None:
        """Not collective, at once. Let work go on that only goes on while the program calls it."""

    def drain(self) -> None:
        """Collective. Wait for the work on all queues, and drop each `finish` that has not run."""


class HostStreams:
    """The queues of the CPU. Collectives run in the background, everything else runs at once."""

    overlap = False

    def __init__(self) -> None:
        self._pending: dict[Queue, deque[_Pending]] = {queue: deque() for queue in Queue}

    def launch(
        self, queue: Queue, begin: Begin, finish: Callable[[], None] | None = None, *, label: str = ""
    ) -> _Pending | None:
        waiting = self._pending[queue]
        began_ns = time.perf_counter_ns() if timeline.recorder is not None else 0
        work = begin(True)
        work = None if isinstance(work, Finished) else work
        if work is None and not waiting:
            if finish is not None:
                finish()
            if timeline.recorder is not None:
                timeline.recorder.add_span(queue.value, label, began_ns, time.perf_counter_ns())
            return None
        waiting.append(_Pending(queue, work, finish, label, began_ns))
        return waiting[-1]

    def record(self, queue: Queue) -> _Pending | None:
        return self._pending[queue][-1] if self._pending[queue] else None

    def wait(self, queue: Queue, event: _Pending | None, why: Wait) -> None:
        if event is None or event.done:
            return
        recorder = timeline.recorder
        if recorder is None or not recorder.traces:
            self._wait(event, why)
            return
        began_ns = time.perf_counter_ns()
        self._wait(event, why)
        recorder.add_span(timeline.WAITS, why.name, began_ns, time.perf_counter_ns())

    def _wait(self, event: _Pending, why: Wait) -> None:
        if why is Wait.VALUES_GATHERED and self._wait_for_outputs(event):
            return
        # In order: `finish` may be collective.
        while not event.done:
            first = self._pending[event.queue].popleft()
            first.done = True
            work, finish, first.work, first.finish = first.work, first.finish, None, None
            if work is not None:
                work.wait()
            if finish is not None:
                finish()
            if timeline.recorder is not None and first.began_ns:
                # Mostly it has ended before the program came to wait for it.
                ended_ns = time.perf_counter_ns() if finish is not None else getattr(work, "ended_ns", 0)
                ended_ns = ended_ns or time.perf_counter_ns()
                timeline.recorder.add_span(first.queue.value, first.label, first.began_ns, ended_ns)

    def _wait_for_outputs(self, event: _Pending) -> bool:
        """Wait until all that was put on a queue up to an event is written; others may still read what this rank sends.

        Returns False where only ``wait`` knows, or something is to be done with what was written.
        """
        up_to = list(self._pending[event.queue])
        up_to = up_to[: up_to.index(event) + 1]
        if not all(isinstance(pending.work, Running) and pending.finish is None for pending in up_to):
            return False
        for pending in up_to:
            try:
                pending.work.wait_for_outputs()
            except BaseException:
                self._pending[event.queue].remove(pending)
                pending.done = True
                raise
        return True

    def proceed(self) -> None:
        for waiting in self._pending.values():
            if waiting and waiting[0].work is not None:
                waiting[0].work.is_completed()  # messages of the others arrive, too

    def drain(self) -> None:
        for waiting in self._pending.values():
            while waiting:
                first = waiting.popleft()
                first.done = True
                if first.work is not None:
                    first.work.wait()


class _Pending:
    __slots__ = ("began_ns", "done", "finish", "label", "queue", "work")

    def __init__(
        self, queue: Queue, work: Work | None, finish: Callable[[], None] | None, label: str, began_ns: int
    ) -> None:
        self.queue, self.work, self.finish, self.done = queue, work, finish, False
        self.label, self.began_ns = label, began_ns


class DeviceStreams:
    """The queues of an accelerator: its streams. COMPUTE is the current one."""

    overlap = True

    def __init__(self, device: torch.device) -> None:
        """Raises an ``EngineError`` where the allocator does not keep memory apart by streams."""
        if not accelerator.frees_by_stream(device):
            raise EngineError(
                f"the allocator of {device} is cudaMallocAsync, which may give memory that hpcfsdp has freed to "
                "another stream while it is still in use: remove backend:cudaMallocAsync from PYTORCH_ALLOC_CONF "
                "(PYTORCH_CUDA_ALLOC_CONF)"
            )
        self._device = device
        self._streams = {queue: accelerator.new_stream(device, priority=-1) for queue in OWN_QUEUES}
        self._launched: dict[Queue, tuple[torch.Event, float]] = {}  # the last work on each, and when
        watched = hang.current()
        if watched is not None:
            watched.add_probe(weakref.WeakMethod(self.longest_wait))

    def launch(
        self, queue: Queue, begin: Begin, finish: Callable[[], None] | None = None, *, label: str = ""
    ) -> torch.Event:
        recorder = self._recorder if timeline.recorder is not None else None
        with accelerator.on(self._stream(queue)):
            began = recorder.now(self._stream(queue)) if recorder is not None and recorder.traces else None
            begin(False)
            if finish is not None:
                finish()
            if began is not None:
                recorder.add_span(queue.value, label, began, recorder.now(self._stream(queue)))
            event = self.record(queue)
        self._launched[queue] = event, time.monotonic()
        return event

    def longest_wait(self) -> tuple[float, str] | None:
        """Not collective, from any thread. For how long the oldest work has not been done, and on which queue."""
        waits = [(began_s, queue) for queue, (event, began_s) in tuple(self._launched.items()) if not event.query()]
        if not waits:
            return None
        began_s, queue = min(waits, key=lambda wait: wait[0])
        return time.monotonic() - began_s, f"the {queue.value} queue of {self._device}"

    def record(self, queue: Queue) -> torch.Event:
        return accelerator.record(self._stream(queue))

    def wait(self, queue: Queue, event: torch.Event | None, why: Wait) -> None:
        if event is None:
            return
        recorder = self._recorder if timeline.recorder is not None else None
        if queue is Queue.HOST:
            with timeline.waiting(why.name):
                event.synchronize()
        elif recorder is not None and (queue is Queue.COMPUTE or recorder.traces):
            compute = queue is Queue.COMPUTE
            recorder.queue_waits(queue.value, why.name, self._stream(queue), event, counts=compute)
        else:
            self._stream(queue).wait_event(event)

    def proceed(self) -> None:
        """The device needs no call for that."""

    def drain(self) -> None:
        for stream in self._streams.values():  # the program waits too: it may free or write host memory next
            stream.synchronize()

    @property
    def _recorder(self) -> timeline.Recorder | None:
        """The recorder, if it reads the times of this device."""
        recorder = timeline.recorder
        return recorder if recorder is not None and recorder.device == self._device else None

    def _stream(self, queue: Queue) -> torch.Stream:
        return self._streams.get(queue) or accelerator.current_stream(self._device)


def streams_for(device: torch.device) -> Streams:
    """The queues of a device."""
    return DeviceStreams(device) if accelerator.is_accelerator(device) else HostStreams()
