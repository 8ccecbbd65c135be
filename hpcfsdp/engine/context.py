"""What all units under one root share: gathered memory, the order of units, the queue of reductions.

All ranks reduce gradients in the same order, although ranks may differ in which parameters get gradients, and when.
A gradient enters the queue when the backward of its unit begins. It is reduced when it is complete and all before it
have been reduced. On a CPU two buffers alternate: one is reduced while the other is filled. Gradients that arrive
before their buffer is free wait on their leaves. On a device they wait there until all of the unit have arrived: by
then what the unit has saved for its backward is freed, and one buffer is enough.
"""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.order import Confirmation, Event, Node, Position
from hpcfsdp.engine.streams import Queue, Streams, Wait
from hpcfsdp.hang import events
from hpcfsdp.params.gradient import FlatGrad
from hpcfsdp.params.sharded_params import ShardedParams

END: Event = ("end", "")
_NOTED = {"forward": events.FORWARD, "backward": events.BACKWARD}
MOST_PATHS = 64
"""Remembered orders. Training and evaluation need a few each; layers skipped at random make a new one in each step."""

_SLOTS_BETWEEN_NODES = 4
"""Shared buffers for gradients where nodes exchange messages: a reduction may last as long as a unit computes."""


class Values:
    """The gathered values of one unit's flat parameters.

    Attributes:
        name: of the unit.
        gathers: the flat parameters that are not resident.
        takes_messages: whether other nodes send them to a CPU, while the program computes. The program runs ahead of a
            device by itself, and within a node a gather moves no bytes.
        is_gathered: whether memory is allocated for them; changed by ``Context`` alone.
        gathered: the event that the gather is done; changed by ``Context`` alone.
    """

    def __init__(self, sharded_params: Sequence[ShardedParams], name: str = "") -> None:
        self.sharded_params = tuple(sharded_params)
        self.name = name
        self.gathers = tuple(flat for flat in self.sharded_params if not flat.is_here)
        self.takes_messages = any(flat.comm.spans_nodes for flat in self.gathers)
        self.is_gathered = False
        self.gathered: Any = None

    @property
    def is_unsharded(self) -> bool:
        """Whether the leaves show them."""
        return any(flat.is_unsharded for flat in self.sharded_params)


def _gather(flat: ShardedParams, async_op: bool) -> Any:
    return flat.gather(async_op=async_op)


class Context:
    """The queues of work of one root, and what is gathered on them.

    Attributes:
        ahead: values that are gathered and not used yet.
        shards_written: the event that the optimizer has written the shards.
        user_event: the program's own such event, for the next pass; None for the end of all that was enqueued.
        values_by_name: the values of each unit, for ``gather_ahead``.
    """

    def __init__(self, streams: Streams, order: Order, values_by_name: Mapping[str, Values]) -> None:
        self.streams = streams
        self.order = order
        self.reductions = Reductions(streams)
        self.ahead: dict[Values, None] = {}
        self.shards_written: Any = None
        self.user_event: Any = None
        self.values_by_name = values_by_name
        self._retired: deque[tuple[Values, Any]] = deque()  # resharded, with their memory not freed yet

    def unshard(self, values: Values, *, ahead: bool = False) -> None:
        """Collective. Begin to gather a unit's parameters, unless that has begun.

        Args:
            ahead: another unit computes first.
        """
        if values.is_gathered or not values.gathers:
            return
        values.is_gathered = True
        streams = self.streams
        streams.wait(Queue.GATHER, self.shards_written, Wait.SHARDS_WRITTEN)
        self.free_retired(keep=0 if ahead else 1, unless=values)
        for flat in values.gathers:
            gather = functools.partial(_gather, flat)
            values.gathered = streams.launch(Queue.GATHER, gather, flat.finish_gather, label=values.name)

    def await_unshard(self, values: Values) -> None:
        """Have the leaves show the gathered values."""
        self.ahead.pop(values, None)
        self.streams.wait(Queue.COMPUTE, values.gathered, Wait.VALUES_GATHERED)
        for flat in values.sharded_params:
            flat.bind()

    def reshard(self, values: Values) -> None:
        """Free a unit's gathered values."""
        if values in self.ahead or not self.streams.overlap:  # on the host other ranks may still read what is freed
            self.ahead.pop(values, None)
            self.streams.wait(Queue.COMPUTE, values.gathered, Wait.GATHERED_IN_VAIN)
        for flat in values.sharded_params:
            flat.unbind()
        if values.is_gathered:
            values.is_gathered = False
            self._retired.append((values, self.streams.record(Queue.COMPUTE)))
            if not self.streams.overlap or self.ahead or self.order.is_at_the_end:
                self.free_retired(keep=0)  # the next gather for immediate use is far

    def free_retired(self, *, keep: int, unless: Values | None = None) -> None:
        """Free memory of units that were resharded, the oldest first; `unless` uses its own again.

        The last one is kept while the next is gathered for immediate use. That gather writes other memory, so it need
        not wait for the computation with the last one. A gather ahead has that much time anyway.
        """
        for values, event in list(self._retired):
            if values is not unless and len(self._retired) <= keep:
                return
            self._retired.remove((values, event))
            self.streams.wait(Queue.GATHER, event, Wait.VALUES_USED)
            if values is not unless:
                for flat in values.gathers:
                    flat.free()

    def gather_ahead(self, kind: str) -> None:
        """Collective. Begin to gather the unit that will do `kind` next, if it is known."""
        name = self.order.upcoming(kind)
        values = self.values_by_name.get(name) if name is not None else None
        if values is not None:
            self.gather_in_advance(values)

    def gather_in_advance(self, values: Values) -> None:
        """Collective. Begin to gather the values of a unit that will be used in this pass."""
        if values.gathers and not values.is_gathered:
            self.ahead[values] = None
            self.unshard(values, ahead=True)


class Order:
    """The events of this pass (a forward with its backward), compared with those of earlier passes.

    Each rank remembers, as a tree, the orders that all ranks have followed together. A step along a known path costs
    nothing. A model that skips layers at random takes another path in each step, so only the latest paths are kept.
    All ranks forget the same ones, since they have followed the same.
    """

    def __init__(self, comm: Communicator, label: str, number: int = 1, *, confirm: bool) -> None:
        """Not collective.

        Args:
            comm: all ranks that have to keep the same order.
            label: of the engine, the same on all ranks, and unlike that of any other.
            number: of the model among those of these ranks.
            confirm: have the ranks confirm each new event; otherwise the caller compares ``digest``.
        """
        self._root = Node(("begin", ""), 0, "", None)
        self._at = Position(self._root, number)
        self._ends: dict[Node, None] = {}  # of the remembered paths, the latest last
        self._confirms = confirm and comm.size > 1
        self.confirmation = Confirmation(comm, label, self._at)

    @property
    def digest(self) -> str:
        """A short text, equal on ranks that have done the same since the pass began."""
        return self._at.node.digest

    @property
    def passes(self) -> int:
        """How many have begun."""
        return self._at.passes

    @property
    def step(self) -> str:
        """The pass, for messages; the same on all ranks, and unlike that of another model."""
        return self._at.step

    def begin(self) -> None:
        """Collective where the last pass ended in a new way. Begin a pass."""
        if self._at.node is not self._root:
            self.note(END)
        self.forget()
        self._at.passes += 1
        events.ring.note(events.PASS, str(self._at.passes))

    def note(self, event: Event) -> None:
        """Collective where the event is new at this place. This rank is about to do `event`.

        Raises:
            DisagreementError: another rank does something else. It names both.
        """
        if event[0] in _NOTED:
            events.ring.note(_NOTED[event[0]], event[1])
        known = self._at.node.children.get(event)
        if known is None:
            if self._confirms:
                self.confirmation.confirm(event)
            known = self._at.node.add(event)
        self._at.node = known

    def upcoming(self, kind: str) -> str | None:
        """The unit that will do `kind` next, if earlier passes all went on in one way."""
        children = self._at.node.children
        if len(children) != 1:
            return None
        known, name = next(iter(children))
        return name if known == kind else None

    @property
    def is_at_the_end(self) -> bool:
        """Whether earlier passes have all ended here."""
        return self._at.node.children.keys() == {END}

    def path(self) -> list[str]:
        """The events since the pass began."""
        return self._at.path()

    def forget(self) -> None:
        """Not collective. End the pass here. Its path is remembered; the oldest is forgotten if there are too many."""
        end, self._at.node = self._at.node, self._root
        if end is self._root:
            return
        self._ends.pop(end, None)
        self._ends[end] = None
        if len(self._ends) > MOST_PATHS:
            node = next(iter(self._ends))
            del self._ends[node]
            while node.parent is not None and not node.children and node not in self._ends:
                del node.parent.children[node.event]
                node = node.parent


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        memory: shared with the other ranks of the node; None where each gradient gets memory of its own.
        waiting: gradients that will use the buffer; the first uses it now.
        event: that the last reduction out of it is done.
        in_use: the part in use, and the shard reduced from it. They keep memory alive that is not the slot's own.
    """

    memory: torch.Tensor | None = None
    waiting: deque[FlatGrad] = field(default_factory=deque)
    event: Any = None
    in_use: tuple[torch.Tensor, ...] = ()

    def release(self) -> None:
        """Memory that is not the slot's own goes back to the allocator."""
        self.event, self.in_use = None, ()


@dataclass(eq=False)
class Ring:
    """The buffers for gradients of one dtype and communicator, one of each unit at a time.

    Attributes:
        comm: provides memory in which it reduces fastest; None where each gradient gets memory of its own.
        slots: used in turn.
        numel: of the largest gradient.
        next_slot: the index of the slot that the next gradient gets.
    """

    comm: Communicator | None
    dtype: torch.dtype
    slots: list[Slot]
    numel: int = 0
    next_slot: int = 0


class Reductions:
    """The queue of gradients to be completed and reduced."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._shared: dict[tuple[Any, torch.dtype, int], Ring] = {}
        self._rings: dict[FlatGrad, Ring] = {}
        self._queue: dict[FlatGrad, Slot] = {}
        self._last: dict[FlatGrad, Any] = {}

    def plan(self, grad: FlatGrad, index: int) -> None:
        """Not collective, before the first use. Reserve a buffer for `grad`, the one with this index in its unit."""
        flat = grad.flat
        comm = flat.comm if flat.comm.size > 1 else flat.replicas
        comm = comm if comm is not None and comm.shares_memory else None
        dtype = flat.dtypes.reduce
        # Shared memory stays small, in the cache. Elsewhere a unit's gradients must not wait for each other.
        place = index if comm is None else 0
        between_nodes = comm is not None and comm.spans_nodes
        count = grad.options.num_buffers if self._streams.overlap else _SLOTS_BETWEEN_NODES if between_nodes else 2
        ring = self._rings[grad] = self._shared.setdefault((comm, dtype, place), Ring(comm, dtype, []))
        ring.slots += [Slot() for _ in range(count - len(ring.slots))]
        ring.numel = max(ring.numel, grad.numel)

    def alloc(self) -> None:
        """Collective the first time. Allocate the memory that is shared with other ranks."""
        for ring in self._shared.values():
            for slot in ring.slots:
                if ring.comm is not None and slot.memory is None:
                    slot.memory = ring.comm.alloc(ring.numel, ring.dtype)
                    weakref.finalize(slot, ring.comm.free, slot.memory).atexit = False

    def enqueue(self, grad: FlatGrad) -> None:
        """Not collective, but in the same order on all ranks. Append `grad` to the queue, once."""
        if grad in self._queue:
            return
        ring = self._rings[grad]
        slot = ring.slots[ring.next_slot]
        ring.next_slot = (ring.next_slot + 1) % len(ring.slots)
        slot.waiting.append(grad)
        self._queue[grad] = slot

    def move_from_leaf(self, grad: FlatGrad, index: int) -> bool:
        """Move the gradient of a leaf to the buffer, if there is one now. Returns whether `grad` is in the queue."""
        slot = self._queue.get(grad)
        if slot is None:
            return False
        if slot.waiting[0] is grad and not self._streams.overlap:
            if grad.buffer is None:
                self._begin(grad, slot)  # moves all that have arrived
            else:
                grad.move_from_leaf(index)
        return True

    def advance(self) -> None:
        """Collective, unless they are kept back. Reduce gradients at the head of the queue that are complete."""
        while self._queue:
            grad, slot = next(iter(self._queue.items()))
            if grad.outstanding:
                return
            if grad.buffer is None:
                self._begin(grad, slot)
            if grad.keeps_back:
                grad.keep_back()
                slot.release()
            else:
                self._reduce(grad, slot)
            del self._queue[grad]
            slot.waiting.popleft()
            if slot.waiting and slot.waiting[0].has_waiting and not self._streams.overlap:
                self._begin(slot.waiting[0], slot)

    def settle(self) -> None:
        """Not collective. Release all buffers; the compute queue has waited for all reductions."""
        self._last.clear()
        for ring in self._shared.values():
            for slot in ring.slots:
                slot.release()

    def drop(self) -> None:
        """Not collective. Empty the queue and release all buffers, after an exception in a backward."""
        self._queue.clear()
        for ring in self._shared.values():
            ring.next_slot = 0
            for slot in ring.slots:
                slot.waiting.clear()
        self.settle()

    def _begin(self, grad: FlatGrad, slot: Slot) -> None:
        """Give `grad` its buffer."""
        ring = self._rings[grad]
        self._streams.wait(Queue.COMPUTE, slot.event, Wait.GRADS_TAKEN)
        slot.release()
        if slot.memory is not None:
            buffer = slot.memory[: grad.numel]
        else:
            buffer = torch.empty(grad.numel, dtype=ring.dtype, device=grad.flat.device)
        slot.in_use = (buffer,)
        grad.begin(buffer)

    def _reduce(self, grad: FlatGrad, slot: Slot) -> None:
        """Collective. Begin to average the gradient over ranks."""
        streams, own = self._streams, slot.memory is None
        streams.wait(Queue.REDUCE, self._last.get(grad), Wait.GRADS_TAKEN)
        grad.complete()
        streams.wait(Queue.REDUCE, streams.record(Queue.COMPUTE), Wait.GRADS_WRITTEN)
        label = f"gradients of {grad.name!r}"

        def begin(async_op: bool) -> Any:
            return grad.reduce(label, async_op=async_op)

        def finish() -> None:
            grad.finish_reduce(own_buffer=own)

        if not grad.has_replicas:
            event = streams.launch(Queue.REDUCE, begin, finish, label=grad.name)
        elif streams.overlap:
            # Whose memory is that of REDUCE, too.
            event = streams.launch(Queue.REDUCE, begin, grad.add_partial, label=grad.name)
            slot.in_use += (grad.arriving,)  # its memory is that of REDUCE, which is done with it before REPLICATE
            streams.wait(Queue.REPLICATE, event, Wait.SHARD_REDUCED)
            event = streams.launch(
                Queue.REPLICATE, lambda async_op: grad.reduce_over_replicas(label), finish, label=grad.name
            )
        else:
            event = streams.launch(
                Queue.REDUCE,
                begin,
                lambda: (grad.add_partial(), grad.reduce_over_replicas(label), finish()),
                label=grad.name,
            )
        slot.event = self._last[grad] = event
