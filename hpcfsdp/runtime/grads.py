"""The memory of full gradients: two buffers in turn, the one filled by autograd while the other is reduced."""

from __future__ import annotations

import weakref
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.flat.gradient import FlatGrad
from hpcfsdp.runtime.streams import Place, Queue, Streams, Wait


@dataclass(eq=False)
class Slot:
    """One buffer.

    Attributes:
        memory: shared with the other ranks of the node; None where each gradient gets memory of its own.
        holder: whose gradient is being put together in it.
        event: that the last reduction out of it is done.
        in_use: what of it has been given out; keeps memory that is not the slot's own alive until nobody uses it.
    """

    memory: torch.Tensor | None = None
    holder: FlatGrad | None = None
    event: Any = None
    in_use: torch.Tensor | None = None

    @property
    def place(self) -> Place:
        """The name of its memory."""
        return id(self), "grad"


@dataclass
class Ring:
    """Buffers that are used in turn by gradients of one dtype and communicator.

    Attributes:
        comm: on whose memory reductions work best, None for memory of their own.
        numel: of the largest gradient.
        slots: one for a unit that holds other units and whose gradients take the whole backward, else two.
    """

    comm: Communicator | None
    dtype: torch.dtype
    numel: int = 0
    slots: list[Slot] = field(default_factory=list)
    turn: int = 0


class GradMemory:
    """Gives each gradient a buffer when its unit's backward begins, and has it reduced when that ends."""

    def __init__(self, streams: Streams) -> None:
        self._streams = streams
        self._rings: dict[FlatGrad, Ring] = {}
        self._shared: dict[tuple[Any, torch.dtype], Ring] = {}
        self._slots: dict[FlatGrad, Slot] = {}
        self._last: dict[FlatGrad, Any] = {}

    def plan(self, grad: FlatGrad, *, in_turn: bool) -> None:
        """Before the first use: say that `grad` will want a buffer.

        Args:
            in_turn: it shares two buffers with the others that do; else it has one of its own.
        """
        flat = grad.flat
        comm = flat.comm if flat.comm.size > 1 else flat.replicas
        comm = comm if comm is not None and comm.shares_memory else None
        if in_turn:
            key = (comm, flat.dtypes.wire)
            ring = self._shared.setdefault(key, Ring(comm, flat.dtypes.wire, slots=[Slot(), Slot()]))
        else:
            ring = Ring(comm, flat.dtypes.wire, slots=[Slot()])
        ring.numel = max(ring.numel, flat.layout.padded_numel)
        self._rings[grad] = ring

    def acquire(self, grad: FlatGrad, flush: Callable[[FlatGrad], None]) -> None:
        """Collective the first time. Have `grad` put together in the buffer whose turn it is.

        Args:
            flush: reduces the gradient of another unit that still holds the buffer, as far as it is there.
        """
        ring = self._rings[grad]
        slot = ring.slots[ring.turn]
        ring.turn = (ring.turn + 1) % len(ring.slots)
        if slot.holder is not None and slot.holder.buffer is not None:
            flush(slot.holder)
        self._streams.wait(Queue.COMPUTE, slot.event, Wait.GRADS_TAKEN)
        self._vacate(slot)
        if ring.comm is not None and slot.memory is None:
            slot.memory = ring.comm.alloc(ring.numel, ring.dtype)
            weakref.finalize(slot, ring.comm.free, slot.memory).atexit = False
        numel = grad.flat.layout.padded_numel
        if slot.memory is not None:
            buffer = slot.memory[:numel]
        else:
            buffer = torch.empty(numel, dtype=ring.dtype, device=grad.flat.device)
        slot.holder, slot.in_use = grad, buffer
        self._slots[grad] = slot
        self._streams.touch(Queue.COMPUTE, writes=[slot.place])  # as autograd does from here on, until it is reduced
        grad.begin(buffer)

    def reduce(self, grad: FlatGrad, label: str) -> None:
        """Collective. Begin to average the gradient over ranks."""
        slot, streams = self._slots.pop(grad), self._streams
        streams.wait(Queue.COMPUTE, self._last.get(grad), Wait.GRADS_TAKEN)
        streams.touch(Queue.COMPUTE, writes=[slot.place])
        streams.wait(Queue.REDUCE, streams.record(Queue.COMPUTE), Wait.GRADS_WRITTEN)
        own = slot.memory is None
        slot.holder = None
        slot.event = self._last[grad] = streams.launch(
            Queue.REDUCE,
            lambda async_op: grad.reduce(label, async_op=async_op),
            lambda: grad.arrive(label, own_buffer=own),
            reads=[slot.place],
            writes=[place(grad, "shard grad")],
        )

    def keep_back(self, grad: FlatGrad) -> None:
        """Let the gradient wait for a later synchronisation; the buffer is free again."""
        slot = self._slots.pop(grad)
        slot.holder = None
        grad.keep_back()
        self._vacate(slot)

    def settle(self) -> None:
        """Everything has been reduced, and the compute queue has waited for it."""
        self._last.clear()
        for ring in self._rings.values():
            for slot in ring.slots:
                self._vacate(slot)

    def drop(self) -> None:
        """Let go of all buffers after a backward that was broken off."""
        self._slots.clear()
        self._last.clear()
        for ring in self._rings.values():
            for slot in ring.slots:
                slot.holder = None
                self._vacate(slot)

    def _vacate(self, slot: Slot) -> None:
        """Nobody uses the memory any more; if it is not the slot's own it goes back to the allocator."""
        if slot.in_use is not None:
            slot.event = slot.in_use = None
            if slot.memory is None:
                self._streams.free(slot.place)


def place(grad: FlatGrad, part: str) -> Place:
    """The name of memory that belongs to a gradient."""
    return id(grad.flat), part
