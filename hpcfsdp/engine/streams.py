"""Streams of work, and the waits between them: one interface for accelerators, for the CPU, and for tests.

The engine has five streams. It launches work on them, and makes one stream wait for what another has done. Every wait
has a name (``Wait``) and a reason, see docs/developers/streams.md. On the CPU a stream is a list of what runs in the
background.
"""

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


class Stream(Enum):
    """Where work runs: in order within a stream, concurrently across streams."""

    COMPUTE = "compute"  # the module's own operations, the optimizer, and everything else that the user does
    GATHER = "gather"
    REDUCE = "reduce"
    REPLICATE = "replicate"
    """Reduces over replicas what REDUCE has reduced over the shards: one goes between nodes, the other within them."""
    HOST = "host"  # the program itself, which reads and writes host memory; it runs ahead of the others


OWN_STREAMS = (Stream.GATHER, Stream.REDUCE, Stream.REPLICATE)  # the streams that the engine makes on a device


class Wait(Enum):
    """Why one stream waits for another."""

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
Finish = Callable[[], None] | None


class Streams(Protocol):
    """The streams of one device."""

    overlap: bool  # whether they run concurrently, so that a gather can run while another unit computes

    def launch(self, stream: Stream, begin: Begin, finish: Finish = None, *, label: str = "") -> Any:
        """Put work on a stream: `begin`, then `finish`. Return the event that both are done. `label` is for traces."""

    def record(self, stream: Stream) -> Any:
        """Return the event that everything on the stream up to here is done."""

    def wait(self, stream: Stream, event: Any, why: Wait) -> None:
        """Start nothing that comes later on `stream` before the event."""

    def proceed(self) -> None:
        """Let work go on that only goes on while the program calls it. Returns at once."""

    def drain(self) -> None:
        """Wait for the work on all streams, and drop each `finish` that has not run. Collective as the work."""

    def refuse_capture(self, what: str) -> None:
        """Raise an ``EngineError`` if `what` the program does next would go to a graph instead of to the device."""


class _LaunchedWork:
    __slots__ = ("began_ns", "done", "finish", "label", "stream", "work")

    def __init__(self, stream: Stream, work: Work | None, finish: Finish, label: str, began_ns: int) -> None:
        self.stream, self.work, self.finish, self.done = stream, work, finish, False
        self.label, self.began_ns = label, began_ns


class HostStreams:
    """The streams of the CPU. Collectives run in the background, everything else runs at once."""

    overlap = False

    def __init__(self) -> None:
        self._pending: dict[Stream, deque[_LaunchedWork]] = {stream: deque() for stream in Stream}

    def launch(self, stream: Stream, begin: Begin, finish: Finish = None, *, label: str = "") -> _LaunchedWork | None:
        waiting = self._pending[stream]
        began_ns = time.perf_counter_ns() if timeline.recorder is not None else 0
        work = begin(True)
        work = None if isinstance(work, Finished) else work
        if work is None and not waiting:
            if finish is not None:
                finish()
            if timeline.recorder is not None:
                timeline.recorder.add_span(stream.value, label, began_ns, time.perf_counter_ns())
            return None
        waiting.append(_LaunchedWork(stream, work, finish, label, began_ns))
        return waiting[-1]

    def record(self, stream: Stream) -> _LaunchedWork | None:
        return self._pending[stream][-1] if self._pending[stream] else None

    def wait(self, stream: Stream, event: _LaunchedWork | None, why: Wait) -> None:
        if event is None or event.done:
            return
        waiting_ns = time.perf_counter_ns()
        is_written = why is Wait.VALUES_GATHERED and self._wait_for_outputs(event)
        while not (is_written or event.done):  # in order: `finish` may be collective
            first = self._pending[event.stream].popleft()
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
                timeline.recorder.add_span(first.stream.value, first.label, first.began_ns, ended_ns)
        if timeline.recorder is not None and timeline.recorder.traces:
            timeline.recorder.add_span(timeline.WAITS, why.name, waiting_ns, time.perf_counter_ns())

    def _wait_for_outputs(self, event: _LaunchedWork) -> bool:
        """Wait until all that a stream has up to an event is written; others may still read what this rank sends.

        Returns False where only ``wait`` knows, or something is to be done with what was written.
        """
        up_to = list(self._pending[event.stream])
        up_to = up_to[: up_to.index(event) + 1]
        if not all(isinstance(pending.work, Running) and pending.finish is None for pending in up_to):
            return False
        for pending in up_to:
            try:
                pending.work.wait_for_outputs()
            except BaseException:
                self._pending[event.stream].remove(pending)
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

    def refuse_capture(self, what: str) -> None:
        """Do nothing: there are no graphs."""


class DeviceStreams:
    """The streams of an accelerator. COMPUTE is the current one."""

    overlap = True

    def __init__(self, device: torch.device) -> None:
        """Raise an ``EngineError`` where the allocator does not keep memory apart by streams."""
        if not accelerator.frees_by_stream(device):
            raise EngineError(
                f"the allocator of {device} is cudaMallocAsync, which may give memory that hpcfsdp has freed to "
                "another stream while it is still in use: remove backend:cudaMallocAsync from PYTORCH_ALLOC_CONF "
                "(PYTORCH_CUDA_ALLOC_CONF)"
            )
        self._device = device
        self._device_streams = {stream: accelerator.new_stream(device, priority=-1) for stream in OWN_STREAMS}
        self._launched: dict[Stream, tuple[torch.Event, float]] = {}  # the last work on each, not known to be done
        if hang.watcher is not None:
            hang.watcher.add_probe(weakref.WeakMethod(self.longest_wait))

    def launch(self, stream: Stream, begin: Begin, finish: Finish = None, *, label: str = "") -> torch.Event:
        recorder = self._recorder if timeline.recorder is not None else None
        with accelerator.on(self._stream(stream)):
            began = recorder.now(self._stream(stream)) if recorder is not None and recorder.traces else None
            begin(False)
            if finish is not None:
                finish()
            if began is not None:
                recorder.add_span(stream.value, label, began, recorder.now(self._stream(stream)))
            event = self.record(stream)
        self._launched[stream] = event, time.monotonic()
        return event

    def longest_wait(self, limit_s: float) -> tuple[float, str] | None:
        """Return for how long the oldest work has not been done, and on which stream, if that is more than `limit_s`.

        The device is asked once about work that is older than that: while a graph is captured no thread may ask it.
        """
        now_s, found = time.monotonic(), None
        for stream, launched in tuple(self._launched.items()):
            event, began_s = launched
            if now_s - began_s <= limit_s:
                continue
            if accelerator.is_done(event):
                if self._launched.get(stream) is launched:  # the program launches on
                    del self._launched[stream]
            elif found is None or began_s < found[0]:
                found = began_s, f"the {stream.value} stream of {self._device}"
        return None if found is None else (now_s - found[0], found[1])

    def record(self, stream: Stream) -> torch.Event:
        return accelerator.record(self._stream(stream))

    def wait(self, stream: Stream, event: torch.Event | None, why: Wait) -> None:
        if event is None:
            return
        recorder = self._recorder if timeline.recorder is not None else None
        if stream is Stream.HOST:
            with timeline.waiting(why.name):
                event.synchronize()
        elif recorder is not None and (stream is Stream.COMPUTE or recorder.traces):
            compute = stream is Stream.COMPUTE
            recorder.stream_waits(stream.value, why.name, self._stream(stream), event, counts=compute)
        else:
            self._stream(stream).wait_event(event)

    def proceed(self) -> None:
        """Do nothing: the device needs no call for that."""

    def drain(self) -> None:
        for stream in self._device_streams.values():  # the program waits too: it may free or write host memory next
            stream.synchronize()

    def refuse_capture(self, what: str) -> None:
        if accelerator.is_capturing(self._device):
            raise EngineError(
                f"{what}: a stream of {self._device} is capturing a graph (torch.cuda.graph, or torch.compile with "
                'mode="reduce-overhead"), and a replay would leave out what ranks do together on the host. Do not '
                'capture units of hpcfsdp: compile with another mode, such as "max-autotune-no-cudagraphs"'
            )

    @property
    def _recorder(self) -> timeline.Recorder | None:
        """The recorder, if it reads the times of this device."""
        recorder = timeline.recorder
        return recorder if recorder is not None and recorder.device == self._device else None

    def _stream(self, stream: Stream) -> torch.Stream:
        return self._device_streams.get(stream) or accelerator.current_stream(self._device)


def streams_for(device: torch.device) -> Streams:
    """Return the streams of a device."""
    return DeviceStreams(device) if accelerator.is_accelerator(device) else HostStreams()
