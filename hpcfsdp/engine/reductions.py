"""Gradients on their way to being reduced: a queue in an order that is the same on all ranks, and its two buffers.

Which parameters get gradients in a backward, and when, may differ between ranks. The order of reductions may not: a
gradient enters the queue when the backward of its unit begins, and is reduced when it is complete and all before it
have been. Two buffers are used in turn, so that one is reduced while the other is filled; gradients that come before
their buffer is free wait on their leaves.
"""

from __future__ import annotations

import weakref
from collections import deque
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.engine.streams import Place, Queue, Streams, Wait
from hpcfsdp.flat.gradient import FlatGrad


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        memory: shared with the other ranks of the node; None where each gradient gets memory of its own.
        waiting: gradients that are to be put together in it; the first has it.
        event: that the last reduction out of it is done.
        in_use: what of it has been given out; keeps memory that is not the slot's own alive until nobody uses it.
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
        ring.numel = max(ring.numel, flat.layout.padded_numel)

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
        numel = grad.flat.layout.padded_numel
        if slot.memory is not None:
            slot.in_use = slot.memory[:numel]
        else:
            slot.in_use = torch.empty(numel, dtype=ring.dtype, device=grad.flat.device)
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
        """Nobody uses the memory any more; if it is not the slot's own it goes back to the allocator."""
        if slot.in_use is not None:
            slot.event = slot.in_use = None
            if slot.memory is None:
                self._streams.free(slot.place)


def place(grad: FlatGrad, part: str) -> Place:
    """The name of memory that belongs to a gradient."""
    return id(grad.flat), part
