"""A flat parameter: one shard that stays, a buffer for all shards that comes and goes, and gradients on the way back.

The original parameters stay the objects they were. While the flat parameter is unsharded their data views the flat
buffer, so the all-gather's output is what the module computes with, without a copy. While it is sharded they view a
single NaN expanded to their shape: shape and dtype can be asked for, values read by mistake show at once, and writing
raises or is forgotten.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from hpcfsdp.comm import Communicator
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.storage import alloc_storage, free_storage


class FlatParam:
    """Parameters of one dtype, device and ``requires_grad``, laid out by a ``FlatLayout`` and sharded over `comm`.

    Attributes:
        layout: where each parameter lies.
        leaves: the original parameters, in the order of the layout's slots.
        parameter: this rank's shard, 1-D, ``layout.shard_numel`` elements: what the optimizer steps. Its ``grad`` is
            the averaged gradient of the shard.
    """

    def __init__(
        self, leaves: Sequence[nn.Parameter], layout: FlatLayout, comm: Communicator, *, sync_from: int | None = None
    ) -> None:
        """Collective over `comm` if `sync_from` is given. Take over the leaves' values and free their memory.

        Args:
            sync_from: the rank whose values all take; None where each rank's values are known to be the same.
        """
        self.layout = layout
        self.comm = comm
        self.leaves = tuple(leaves)
        first = self.leaves[0]
        self.requires_grad = first.requires_grad
        self._full = torch.empty(layout.padded_numel, dtype=layout.dtype, device=first.device)
        self._views = [self._full[slot.offset : slot.end].view(slot.shape) for slot in layout.slots]
        self._nothing_value = torch.nan if layout.dtype.is_floating_point or layout.dtype.is_complex else 0
        self._nothing = torch.full((len(self.leaves),), self._nothing_value, dtype=layout.dtype, device=first.device)
        self._placeholders = [
            nothing.expand(slot.shape) for nothing, slot in zip(self._nothing.unbind(), layout.slots, strict=True)
        ]
        self._gaps = layout.gaps()
        self._grad: torch.Tensor | None = None
        self._filled = [False] * len(self.leaves)

        self._zero_gaps(self._full)
        for leaf, view, placeholder in zip(self.leaves, self._views, self._placeholders, strict=True):
            view.copy_(leaf.detach())
            leaf.data = placeholder
        if sync_from is not None:
            comm.broadcast(self._full, sync_from)
        self.parameter = nn.Parameter(self._segment(self._full).clone(), requires_grad=self.requires_grad)
        free_storage(self._full)

    @property
    def is_unsharded(self) -> bool:
        return self._full.untyped_storage().size() != 0

    @property
    def unsharded_bytes(self) -> int:
        """Bytes held beyond the shard and its gradient: the flat buffer and the gradient buffer, 0 when at rest."""
        grad_bytes = 0 if self._grad is None else self._grad.untyped_storage().nbytes()
        return self._full.untyped_storage().size() + grad_bytes

    def unshard(self) -> None:
        """Collective over `comm`. Gather all shards; the leaves hold their full values afterwards."""
        if not alloc_storage(self._full, self.layout.padded_numel):
            return
        self.comm.all_gather_into_tensor(self._full, self.parameter.data)
        for leaf, view in zip(self.leaves, self._views, strict=True):
            leaf.data = view

    def reshard(self) -> None:
        """Free the gathered values; only the shard is left."""
        if not free_storage(self._full):
            return
        self._nothing.fill_(self._nothing_value)
        for leaf, placeholder in zip(self.leaves, self._placeholders, strict=True):
            leaf.data = placeholder

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` views the gathered values, which are gone after ``reshard``."""
        if tensor.layout is not torch.strided or not self.is_unsharded:
            return False
        return tensor.untyped_storage().data_ptr() == self._full.untyped_storage().data_ptr()

    def alloc_grad(self) -> None:
        """Make room for the full gradient, unless there is."""
        if self._grad is None:
            self._grad = torch.empty_like(self._full)
            self._zero_gaps(self._grad)
            self._filled = [False] * len(self.leaves)

    @torch.no_grad()
    def take_grad(self, index: int) -> bool:
        """Move the gradient that autograd left on one leaf into the gradient buffer.

        Returns:
            Whether it is the first for this leaf since the buffer was allocated.
        """
        leaf, slot = self.leaves[index], self.layout.slots[index]
        grad, leaf.grad = leaf.grad, None
        if grad is None:
            return False
        if grad.layout is not torch.strided:
            raise EngineError(
                f"the gradient of {slot.fqn!r} is {grad.layout}: sparse gradients cannot be sharded; use a dense one"
            )
        self.alloc_grad()
        target = self._grad[slot.offset : slot.end].view(slot.shape)
        if self._filled[index]:
            target.add_(grad)
            return False
        target.copy_(grad)
        self._filled[index] = True
        return True

    @torch.no_grad()
    def reduce_grad(self) -> None:
        """Collective over `comm`. Average the gradient buffer over ranks, add this rank's segment to the shard's grad.

        Parameters that took no part in this backward count as zero.
        """
        if self._grad is None:
            return
        for filled, slot in zip(self._filled, self.layout.slots, strict=True):
            if not filled:
                self._grad[slot.offset : slot.end].zero_()
        shard_grad = torch.empty_like(self.parameter)
        self.comm.reduce_scatter_tensor(shard_grad, self._grad, "average")
        self._grad = None
        if self.parameter.grad is None:
            self.parameter.grad = shard_grad
        else:
            self.parameter.grad.add_(shard_grad)

    def drop_grad(self) -> None:
        """Forget gradients of a backward that was broken off."""
        self._grad = None
        for leaf in self.leaves:
            leaf.grad = None

    def _segment(self, full: torch.Tensor) -> torch.Tensor:
        numel = self.layout.shard_numel
        return full[self.comm.rank * numel : (self.comm.rank + 1) * numel]

    def _zero_gaps(self, full: torch.Tensor) -> None:
        for begin, end in self._gaps:
            full[begin:end].zero_()
