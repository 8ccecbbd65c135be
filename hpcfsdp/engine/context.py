"""What all units under one root share: gathered memory, streams, the order of units, the queue of reductions.

All ranks reduce gradients in the same order, although ranks may differ in which parameters get gradients, and when.
A gradient enters the queue when the backward of its unit begins. It is reduced when it is complete and all before it
have been reduced. On a CPU two buffers alternate: one is reduced while the other is filled. Gradients that arrive
before their buffer is free wait on their leaves. On a device they wait there until all of the unit have arrived: by
then what the unit has saved for its backward is freed, and one buffer is enough.
"""

import functools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.order import Order
from hpcfsdp.engine.streams import Stream, Streams, Wait
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.params.sharded_params import ShardedParams

MOST_BETWEEN = 2
"""Shards that a device has reduced within the nodes, and not between them: one is reduced there, one is next."""
BUFFERS_BETWEEN_NODES = 4
"""Shared buffers for gradients where nodes exchange messages: a reduction may last as long as a unit computes."""


class UnshardedParams:
    """The unsharded parameters of one unit."""

    def __init__(self, sharded_params: Sequence[ShardedParams], name: str = "") -> None:
        self.sharded_params = tuple(sharded_params)
        self.name = name  # of the unit
        self.gathers = tuple(flat for flat in self.sharded_params if not flat.stays_gathered)
        # Whether other nodes send them to a CPU, while the program computes. It runs ahead of a device by itself, and
        # within a node a gather moves no bytes.
        self.takes_messages = any(flat.comm.spans_nodes for flat in self.gathers)
        self.is_gathered = False  # whether memory is allocated for them; changed by `Context` alone, as is:
        self.gathered: Any = None  # the event that the gather is done
        self.has_keepers = False  # whether ``ShardedParams.keepers`` have kept them since a forward

    @property
    def may_have_keepers(self) -> bool:
        return any(flat.keepers is not None for flat in self.gathers)

    @property
    def is_bound(self) -> bool:
        """Whether modules compute with them."""
        return any(flat.is_unsharded for flat in self.sharded_params)


class Context:
    """The streams of one root, and what is gathered on them."""

    def __init__(self, streams: Streams, order: Order, params_by_name: Mapping[str, UnshardedParams]) -> None:
        self.streams = streams
        self.order = order
        self.reductions = Reductions(streams)
        self.ahead: dict[UnshardedParams, None] = {}  # gathered and not used yet
        self.shards_written: Any = None  # the event that the optimizer has written the shards
        self.user_event: Any = None  # the program's own one, for the next iteration; None: all that was launched
        self.params_by_name = params_by_name  # by that of the unit, for `gather_ahead`
        self._retired: deque[tuple[UnshardedParams, Any]] = deque()  # resharded, with their memory not freed yet

    def unshard(self, params: UnshardedParams, *, ahead: bool = False) -> None:
        """Begin to gather parameters, `ahead` of other units' computation. Collective over the unit's ranks."""
        if params.is_gathered or not params.gathers:
            return
        params.is_gathered = True
        streams = self.streams
        streams.wait(Stream.GATHER, self.shards_written, Wait.SHARDS_WRITTEN)
        self.free_retired(keep=0 if ahead else 1, unless=params)
        for flat in params.gathers:
            params.gathered = streams.launch(Stream.GATHER, flat.gather, flat.finish_gather, label=params.name)

    def await_unshard(self, params: UnshardedParams) -> None:
        """Have modules compute with the gathered parameters."""
        self.ahead.pop(params, None)
        self.streams.wait(Stream.COMPUTE, params.gathered, Wait.VALUES_GATHERED)
        for flat in params.sharded_params:
            flat.bind()

    def reshard(self, params: UnshardedParams, *, after_forward: bool = False) -> None:
        """Free a unit's gathered parameters. `after_forward`, ``keepers`` keep them, until this is called otherwise."""
        if params in self.ahead or not self.streams.overlap:  # on the host other ranks may still read what is freed
            self.ahead.pop(params, None)
            self.streams.wait(Stream.COMPUTE, params.gathered, Wait.GATHERED_IN_VAIN)
        for flat in params.sharded_params:
            flat.unbind()
        if params.is_gathered or (params.has_keepers and not after_forward):
            params.is_gathered, params.has_keepers = False, after_forward and params.may_have_keepers
            self._retired.append((params, self.streams.record(Stream.COMPUTE)))
            if not self.streams.overlap or self.ahead or self.order.is_at_the_end:
                self.free_retired(keep=0)  # the next gather for immediate use is far

    def free_retired(self, *, keep: int, unless: UnshardedParams | None = None) -> None:
        """Free memory of units that were resharded, the oldest first; `unless` uses its own again.

        The last one is kept while the next is gathered for immediate use. That gather writes other memory, so it need
        not wait for the computation with the last one. A gather ahead has that much time anyway.
        """
        for params, event in list(self._retired):
            if params is not unless and len(self._retired) <= keep:
                return
            self._retired.remove((params, event))
            self.streams.wait(Stream.GATHER, event, Wait.VALUES_USED)
            if params is not unless:
                for flat in params.gathers:
                    flat.free(after_forward=params.has_keepers)

    def gather_ahead(self, kind: str) -> None:
        """Begin to gather the unit that will do `kind` next, if it is known. Collective over that unit's ranks."""
        name = self.order.upcoming(kind)
        if name is not None and (params := self.params_by_name.get(name)) is not None:
            self.gather_in_advance(params)

    def gather_in_advance(self, params: UnshardedParams) -> None:
        """Begin to gather a unit that will be used in this iteration. Collective over the unit's ranks."""
        if params.gathers and not params.is_gathered:
            self.ahead[params] = None
            self.unshard(params, ahead=True)


@dataclass(eq=False)
class GradBuffer:
    """A buffer in which gradients are assembled, one at a time, and from which they are reduced."""

    memory: torch.Tensor | None = None  # that ranks of the node share; None where each gradient gets its own
    waiting: deque[ShardedGrad] = field(default_factory=deque)  # gradients that will use it; the first uses it now
    event: Any = None  # that the last reduction out of it is done
    in_use: torch.Tensor | None = None  # the part in use, to keep its memory

    def release(self) -> None:
        """Give memory that is not the buffer's own back to the allocator."""
        self.event = self.in_use = None


@dataclass(eq=False)
class BufferRing:
    """The buffers for gradients of one dtype and communicator, used in turn."""

    comm: Communicator | None  # provides memory in which it reduces fastest; None where each gradient gets its own
    dtype: torch.dtype
    buffers: list[GradBuffer] = field(default_factory=list)
    numel: int = 0  # of the largest gradient
    next_place: int = 0  # among the buffers, of that for the next gradient; the same on all ranks


class Reductions:
    """The queue of gradients to be completed and reduced."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._rings: dict[tuple[Any, torch.dtype, int], BufferRing] = {}
        self._ring_of: dict[ShardedGrad, BufferRing] = {}
        self._queue: dict[ShardedGrad, GradBuffer] = {}
        self._last: dict[ShardedGrad, Any] = {}  # events of the last reduction of each in this backward
        # What REDUCE has written for REPLICATE to read, in memory of REDUCE, with the event that it was read.
        self._between: deque[tuple[Any, torch.Tensor | None]] = deque()

    def plan(self, grad: ShardedGrad, index: int) -> None:
        """Reserve a buffer for `grad` before the first use. `index`: its place in its unit."""
        flat = grad.params
        comm = flat.comm if flat.comm.size > 1 else flat.replicas
        comm = comm if comm is not None and comm.shares_memory else None
        dtype = flat.dtypes.reduce
        # Shared memory stays small, in the cache. Elsewhere a unit's gradients must not wait for each other.
        place = index if comm is None else 0
        between_nodes = comm is not None and comm.spans_nodes
        count = grad.options.num_buffers if self._streams.overlap else BUFFERS_BETWEEN_NODES if between_nodes else 2
        ring = self._ring_of[grad] = self._rings.setdefault((comm, dtype, place), BufferRing(comm, dtype))
        ring.buffers += [GradBuffer() for _ in range(count - len(ring.buffers))]
        ring.numel = max(ring.numel, grad.numel)

    def alloc(self) -> None:
        """Allocate the memory that ranks share. Collective over these ranks the first time."""
        for ring in self._rings.values():
            for buffer in ring.buffers if ring.comm is not None else ():
                if buffer.memory is None:
                    buffer.memory = ring.comm.alloc(ring.numel, ring.dtype)
                    weakref.finalize(buffer, ring.comm.free, buffer.memory).atexit = False

    def enqueue(self, grad: ShardedGrad) -> None:
        """Append `grad` to the queue, once; in the same order on all ranks."""
        if grad in self._queue:
            return
        ring = self._ring_of[grad]
        buffer = self._queue[grad] = ring.buffers[ring.next_place]
        ring.next_place = (ring.next_place + 1) % len(ring.buffers)
        buffer.waiting.append(grad)

    def move_from_leaf(self, grad: ShardedGrad, index: int) -> bool:
        """Move the gradient of a leaf to the buffer, if there is one now. Return whether `grad` is in the queue."""
        buffer = self._queue.get(grad)
        if buffer is None:
            return False
        if buffer.waiting[0] is grad and not self._streams.overlap:
            if grad.buffer is None:
                self._begin(grad, buffer)  # moves all that have arrived
            else:
                grad.move_from_leaf(index)
        return True

    def advance(self) -> None:
        """Reduce gradients at the head of the queue that are complete. Collective over their ranks."""
        while self._queue:
            grad, buffer = next(iter(self._queue.items()))
            if grad.outstanding:
                return
            if grad.buffer is None:
                self._begin(grad, buffer)
            if grad.keeps_back:
                grad.keep_back()
                buffer.release()
            else:
                self._reduce(grad, buffer)
            del self._queue[grad]
            buffer.waiting.popleft()
            if buffer.waiting and buffer.waiting[0].has_waiting and not self._streams.overlap:
                self._begin(buffer.waiting[0], buffer)

    def release(self) -> None:
        """Release all buffers; the compute stream has waited for all reductions."""
        self._last.clear()
        self._between.clear()
        for ring in self._rings.values():
            for buffer in ring.buffers:
                buffer.release()

    def drop(self) -> None:
        """Empty the queue and release all buffers, after an exception in a backward: ranks may differ in the queue."""
        self._queue.clear()
        for ring in self._rings.values():
            ring.next_place = 0
            for buffer in ring.buffers:
                buffer.waiting.clear()
        self.release()

    def _begin(self, grad: ShardedGrad, buffer: GradBuffer) -> None:
        """Give `grad` its buffer."""
        self._streams.wait(Stream.COMPUTE, buffer.event, Wait.GRADS_TAKEN)
        buffer.release()
        if buffer.memory is not None:
            memory = buffer.memory[: grad.numel]
        else:
            memory = torch.empty(grad.numel, dtype=grad.params.dtypes.reduce, device=grad.params.device)
        buffer.in_use = memory
        grad.begin(memory)

    def _free_between(self) -> None:
        """Let REDUCE write where REPLICATE has read."""
        event, _ = self._between.popleft()
        self._streams.wait(Stream.REDUCE, event, Wait.GRADS_TAKEN)

    def _reduce(self, grad: ShardedGrad, buffer: GradBuffer) -> None:
        """Begin to average the gradient over ranks. Collective over its ranks."""
        streams, own = self._streams, buffer.memory is None
        streams.wait(Stream.REDUCE, self._last.get(grad), Wait.GRADS_TAKEN)
        grad.complete()
        streams.wait(Stream.REDUCE, streams.record(Stream.COMPUTE), Wait.GRADS_WRITTEN)
        label = f"gradients of {grad.name!r}"

        begin = functools.partial(grad.reduce, label)
        finish = functools.partial(grad.finish_reduce, own_buffer=own)
        if not grad.has_replicas:
            event = streams.launch(Stream.REDUCE, begin, finish, label=grad.name)
        elif streams.overlap:
            if len(self._between) >= MOST_BETWEEN:
                self._free_between()
            event = streams.launch(Stream.REDUCE, begin, grad.add_partial, label=grad.name)
            buffer.event = event  # the next gradient need not wait for other nodes
            arriving = grad.arriving
            streams.wait(Stream.REPLICATE, event, Wait.SHARD_REDUCED)
            self._last[grad] = streams.launch(
                Stream.REPLICATE, lambda async_op: grad.reduce_over_replicas(label), finish, label=grad.name
            )
            self._between.append((self._last[grad], arriving))
            return
        else:

            def finish_over_replicas() -> None:
                grad.add_partial()
                grad.reduce_over_replicas(label)
                finish()

            event = streams.launch(Stream.REDUCE, begin, finish_over_replicas, label=grad.name)
        buffer.event = self._last[grad] = event
