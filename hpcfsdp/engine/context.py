"""What all units under one root share: gathered memory, the order of units, the queue of reductions.

Gradients are reduced in an order that is the same on all ranks, although which parameters get gradients in a backward,
and when, may differ. A gradient enters the queue when the backward of its unit begins, and is reduced when it is
complete and all before it have been. Two buffers are used in turn, so that one is reduced while the other is filled;
gradients that come before their buffer is free wait on their leaves.
"""

from __future__ import annotations

import weakref
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.order import Confirmation, Event, Position, Turn, describe
from hpcfsdp.engine.streams import Place, Queue, Streams, Wait
from hpcfsdp.flat.gradient import FlatGrad
from hpcfsdp.flat.param import FlatParam

END: Event = ("end", "")
MOST_PATHS = 64
"""How many orders are remembered: training and evaluation have a few each, layers that are left out at random all."""


class Values:
    """The gathered values of one unit's flat parameters.

    Attributes:
        gathers: the flat parameters that are gathered, and not resident.
        places: the names of the memory that they are gathered into.
        is_gathered: whether that memory is taken; changed by ``Context`` alone.
        gathered: the event that the values are there; changed by ``Context`` alone.
    """

    def __init__(self, flats: Sequence[FlatParam]) -> None:
        self.flats = tuple(flats)
        self.gathers = tuple(flat for flat in self.flats if not flat.is_here)
        self.places = [(id(flat), "values") for flat in self.gathers]
        self.is_gathered = False
        self.gathered: Any = None

    @property
    def is_unsharded(self) -> bool:
        """Whether the module computes with them."""
        return any(flat.is_unsharded for flat in self.flats)


class Context:
    """The queues of work of one root, and what is gathered on them.

    Attributes:
        ahead: what is gathered, and has not been computed with yet.
        shards_written: the event that the optimizer has written the shards.
    """

    def __init__(self, streams: Streams, order: Order) -> None:
        self.streams = streams
        self.order = order
        self.reductions = Reductions(streams)
        self.ahead: dict[Values, None] = {}
        self.shards_written: Any = None
        self._by_name: Mapping[str, Values] = {}
        self._retired: deque[tuple[Values, Any]] = deque()  # resharded, with their memory still taken

    def name(self, values: Mapping[str, Values]) -> None:
        """Not collective. Say which unit has which values, for ``gather_ahead``."""
        self._by_name = values

    def unshard(self, values: Values, *, ahead: bool = False) -> None:
        """Collective. Begin to gather a unit's parameters, unless that has begun.

        Args:
            ahead: another unit is computed with first.
        """
        if values.is_gathered or not values.gathers:
            return
        values.is_gathered = True
        streams = self.streams
        streams.wait(Queue.GATHER, self.shards_written, Wait.SHARDS_WRITTEN)
        self.free_retired(keep=0 if ahead else 1, unless=values)
        for flat in values.gathers:
            values.gathered = streams.launch(
                Queue.GATHER,
                lambda async_op, flat=flat: flat.gather(async_op=async_op),
                reads=[(id(flat), "shard")],
                writes=[(id(flat), "values")],
            )

    def await_unshard(self, values: Values) -> None:
        """Have the module compute with the gathered values."""
        self.ahead.pop(values, None)
        self.streams.wait(Queue.COMPUTE, values.gathered, Wait.VALUES_GATHERED)
        self.streams.touch(Queue.COMPUTE, reads=values.places)
        for flat in values.flats:
            flat.bind()

    def reshard(self, values: Values) -> None:
        """Free a unit's gathered values."""
        if values in self.ahead:
            del self.ahead[values]
            self.streams.wait(Queue.COMPUTE, values.gathered, Wait.GATHERED_IN_VAIN)
        for flat in values.flats:
            flat.unbind()
        if values.is_gathered:
            values.is_gathered = False
            self.streams.touch(Queue.COMPUTE, reads=values.places)
            self._retired.append((values, self.streams.record(Queue.COMPUTE)))
            if not self.streams.overlap:
                self.free_retired(keep=0)

    def free_retired(self, *, keep: int, unless: Values | None = None) -> None:
        """Free memory of units that were resharded, the oldest first; `unless` takes up its own again.

        The last one is kept while the next is gathered for immediate use: that goes into other memory, and does not
        wait until the one before has been computed with. What is gathered ahead has that much time anyway.
        """
        for values, event in list(self._retired):
            if values is not unless and len(self._retired) <= keep:
                return
            self._retired.remove((values, event))
            self.streams.wait(Queue.GATHER, event, Wait.VALUES_USED)
            if values is not unless:
                for flat in values.gathers:
                    flat.free()
                self.streams.free(*values.places)

    def gather_ahead(self, kind: str) -> None:
        """Collective. Begin to gather the unit that is known to do `kind` next."""
        name = self.order.upcoming(kind)
        values = self._by_name.get(name) if name is not None else None
        if values is not None and values.gathers and not values.is_gathered:
            self.ahead[values] = None
            self.unshard(values, ahead=True)


class Order:
    """What the units have done in this pass (a forward with its backward), against passes before.

    Each rank remembers the orders that all ranks have gone through together, as a tree: a step that follows a known
    path costs nothing. A model that leaves out layers at random takes another path in each step, so only the paths that
    were taken last are remembered; all ranks forget the same ones, since they have taken the same.
    """

    def __init__(self, comm: Communicator, label: str, *, confirm: bool) -> None:
        """Not collective.

        Args:
            comm: all ranks that have to keep the same order.
            label: of the engine, the same on all ranks, unlike that of any other.
            confirm: have the ranks confirm each new turn; else others compare ``digest``.
        """
        self._root = Turn(("begin", ""), 0, "", None)
        self._at = Position(self._root)
        self._ends: dict[Turn, None] = {}  # of the paths that are remembered, the one taken last at the end
        self._confirms = confirm and comm.size > 1
        self.confirmation = Confirmation(comm, label, self._at)

    @property
    def digest(self) -> str:
        """A short text that ranks share when they have done the same since the pass began."""
        return self._at.turn.digest

    @property
    def passes(self) -> int:
        """How many have begun."""
        return self._at.passes

    def begin(self) -> None:
        """Collective where the last pass ended in a new way. Begin a pass."""
        if self._at.turn is not self._root:
            self.note(END)
        self.forget()
        self._at.passes += 1

    def note(self, event: Event) -> None:
        """Collective where the turn is new. This rank is about to do `event`.

        Raises:
            DisagreementError: another rank does something else; both are named.
        """
        known = self._at.turn.following.get(event)
        if known is None:
            if self._confirms:
                self.confirmation.confirm(event)
            known = self._at.turn.follow(event)
        self._at.turn = known

    def upcoming(self, kind: str) -> str | None:
        """The unit that will do `kind` next, if it is known from passes before."""
        following = self._at.turn.following
        if len(following) != 1:
            return None
        known, name = next(iter(following))
        return name if known == kind else None

    def path(self) -> list[str]:
        """What this rank has done since the pass began."""
        found, turn = [], self._at.turn
        while turn.before is not None:
            found.append(describe(turn.event))
            turn = turn.before
        return found[::-1]

    def forget(self) -> None:
        """Not collective. End the pass where it is; its path is remembered, and the oldest forgotten if there are too
        many."""
        end, self._at.turn = self._at.turn, self._root
        if end is self._root:
            return
        self._ends.pop(end, None)
        self._ends[end] = None
        if len(self._ends) > MOST_PATHS:
            turn = next(iter(self._ends))
            del self._ends[turn]
            while turn.before is not None and not turn.following and turn not in self._ends:
                del turn.before.following[turn.event]
                turn = turn.before


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        memory: shared with the other ranks of the node; None where each gradient gets memory of its own.
        waiting: gradients that are to be put together in it; the first has it.
        event: that the last reduction out of it is done.
        in_use: what of it has been given out; keeps memory that is not the slot's own alive until it is unused.
    """

    memory: torch.Tensor | None = None
    waiting: deque[FlatGrad] = field(default_factory=deque)
    event: Any = None
    in_use: torch.Tensor | None = None

    @property
    def place(self) -> Place:
        """The name of its memory."""
        return id(self), "grad"


@dataclass(eq=False)
class Ring:
    """The two buffers of gradients of one dtype and communicator.

    Attributes:
        comm: on whose memory reductions work best, None for memory of their own.
        numel: of the largest gradient.
        turn: whose turn it is.
    """

    comm: Communicator | None
    dtype: torch.dtype
    numel: int = 0
    slots: tuple[Slot, Slot] = field(default_factory=lambda: (Slot(), Slot()))
    turn: int = 0


class Reductions:
    """The queue of gradients that wait to be complete, and to be reduced.

    Attributes:
        keeps_back: whether gradients wait for a later synchronisation instead, as within ``no_sync``.
    """

    def __init__(self, streams: Streams) -> None:
        self.keeps_back = False
        self._streams = streams
        self._shared: dict[tuple[Any, torch.dtype], Ring] = {}
        self._rings: dict[FlatGrad, Ring] = {}
        self._queue: dict[FlatGrad, Slot] = {}
        self._last: dict[FlatGrad, Any] = {}

    def plan(self, grad: FlatGrad) -> None:
        """Before the first use: say that `grad` will want a buffer."""
        flat = grad.flat
        comm = flat.comm if flat.comm.size > 1 else flat.replicas
        comm = comm if comm is not None and comm.shares_memory else None
        dtype = flat.dtypes.reduce
        ring = self._rings[grad] = self._shared.setdefault((comm, dtype), Ring(comm, dtype))
        ring.numel = max(ring.numel, grad.numel)

    def alloc(self) -> None:
        """Collective the first time. Take the memory that is shared with other ranks."""
        for ring in self._shared.values():
            for slot in ring.slots:
                if ring.comm is not None and slot.memory is None:
                    slot.memory = ring.comm.alloc(ring.numel, ring.dtype)
                    weakref.finalize(slot, ring.comm.free, slot.memory).atexit = False

    def enqueue(self, grad: FlatGrad) -> None:
        """Not collective, but in the same order on all ranks. Put `grad` at the end of the queue, once."""
        if grad in self._queue:
            return
        ring = self._rings[grad]
        slot = ring.slots[ring.turn]
        ring.turn = 1 - ring.turn
        slot.waiting.append(grad)
        self._queue[grad] = slot

    def take(self, grad: FlatGrad, index: int) -> bool:
        """A leaf has got a gradient: move it to the buffer if it can.

        Gradients that do not stand in the queue stay on their leaves.

        Returns:
            Whether `grad` stands in the queue.
        """
        slot = self._queue.get(grad)
        if slot is None:
            return False
        if slot.waiting[0] is grad:
            if grad.buffer is None:
                self._begin(grad, slot)  # takes all that have come
            else:
                grad.take(index)
        return True

    def advance(self) -> None:
        """Collective, unless gradients are kept back. Reduce those at the head of the queue that are complete."""
        while self._queue:
            grad, slot = next(iter(self._queue.items()))
            if grad.outstanding:
                return
            if grad.buffer is None:
                self._begin(grad, slot)
            if self.keeps_back:
                grad.keep_back()
                self._vacate(slot)
            else:
                self._reduce(grad, slot)
            del self._queue[grad]
            slot.waiting.popleft()
            if slot.waiting and slot.waiting[0].has_waiting:
                self._begin(slot.waiting[0], slot)

    def settle(self) -> None:
        """Everything has been reduced, and the compute queue has waited for it."""
        self._last.clear()
        for ring in self._shared.values():
            for slot in ring.slots:
                self._vacate(slot)

    def drop(self) -> None:
        """Let go of all buffers after a backward that was broken off."""
        self._queue.clear()
        self._last.clear()
        for ring in self._shared.values():
            ring.turn = 0
            for slot in ring.slots:
                slot.waiting.clear()
                self._vacate(slot)

    def _begin(self, grad: FlatGrad, slot: Slot) -> None:
        """Have `grad` put together in its buffer."""
        ring = self._rings[grad]
        self._streams.wait(Queue.COMPUTE, slot.event, Wait.GRADS_TAKEN)
        self._vacate(slot)
        if slot.memory is not None:
            slot.in_use = slot.memory[: grad.numel]
        else:
            slot.in_use = torch.empty(grad.numel, dtype=ring.dtype, device=grad.flat.device)
        self._streams.touch(Queue.COMPUTE, writes=[slot.place])  # as autograd does from here on, until it is reduced
        grad.begin(slot.in_use)

    def _reduce(self, grad: FlatGrad, slot: Slot) -> None:
        """Collective. Begin to average the gradient over ranks."""
        streams, own = self._streams, slot.memory is None
        streams.wait(Queue.REDUCE, self._last.get(grad), Wait.GRADS_TAKEN)
        grad.complete()
        streams.touch(Queue.COMPUTE, writes=[slot.place])
        streams.wait(Queue.REDUCE, streams.record(Queue.COMPUTE), Wait.GRADS_WRITTEN)
        label = f"gradients of {grad.name!r}"
        slot.event = self._last[grad] = streams.launch(
            Queue.REDUCE,
            lambda async_op: grad.reduce(label, async_op=async_op),
            lambda: grad.arrive(label, own_buffer=own),
            reads=[slot.place],
            writes=[place(grad, "shard grad")],
        )

    def _vacate(self, slot: Slot) -> None:
        """The memory is unused from here on; if it is not the slot's own it goes back to the allocator."""
        if slot.in_use is not None:
            slot.event = slot.in_use = None
            if slot.memory is None:
                self._streams.free(slot.place)


def place(grad: FlatGrad, part: str) -> Place:
    """The name of memory that belongs to a gradient."""
    return id(grad.flat), part
