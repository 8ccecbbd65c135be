"""Memory behind a tensor, taken and given back while the tensor stays; the memory of gathered values."""

from __future__ import annotations

import weakref
from collections.abc import Sequence
from math import prod
from typing import Protocol

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.errors import EngineError


def alloc_storage(tensor: torch.Tensor, size: int | Sequence[int]) -> bool:
    """Give the storage of `tensor` room for `size` elements. The content is not defined.

    Args:
        size: the number of elements, or the shape that they have (a ``torch.Size``).

    Returns:
        Whether memory was allocated; False where it was there already.

    Raises:
        EngineError: the storage holds another number of elements, or belongs to somebody else.
    """
    storage = tensor.untyped_storage()
    wanted = (prod(size) if isinstance(size, Sequence) else size) * tensor.element_size()
    held = storage.size()
    if held == wanted:
        return False
    if held != 0:
        raise EngineError(f"the storage holds {held} bytes where {wanted} are to be allocated: free it first")
    _resize(storage, wanted)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Give the memory behind `tensor` back, for all tensors that view it. Sizes and strides of the tensors stay.

    Returns:
        Whether memory was freed; False where there was none.

    Raises:
        EngineError: `tensor` is not all that lives in the storage, or the storage belongs to somebody else.
    """
    storage = tensor.untyped_storage()
    held = storage.size()
    if held == 0:
        return False
    if tensor.storage_offset() != 0 or _spanned(tensor) * tensor.element_size() != held:
        raise EngineError(
            f"the tensor is not the sole occupant of its storage: it starts at element {tensor.storage_offset()} and "
            f"has shape {tuple(tensor.shape)} of {tensor.dtype}, the storage holds {held} bytes"
        )
    _resize(storage, 0)
    return True


def data_ptr_allocated(tensor: torch.Tensor) -> bool:
    """Whether there is memory behind `tensor`: not after ``free_storage``, on the meta device, or without elements."""
    return tensor.untyped_storage().data_ptr() != 0


def _spanned(tensor: torch.Tensor) -> int:
    """Elements of the storage from the first to the last that `tensor` views."""
    if tensor.is_contiguous():
        return tensor.numel()
    return 1 + sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))


def _resize(storage: torch.UntypedStorage, size_bytes: int) -> None:
    try:
        storage.resize_(size_bytes)
    except RuntimeError:
        if storage.resizable():
            raise
        raise EngineError(
            f"the storage of {storage.size()} bytes cannot be resized to {size_bytes}: its memory is not torch's own "
            "(NumPy, shared memory, a window of MPI); copy the tensor first"
        ) from None


class Buffer(Protocol):
    """Where the values of all shards come together: ``Whole``, ``Transient`` or ``Resident``.

    Attributes:
        full: 1-D, all shards; always the same tensor, whose memory may come and go.
        resident: whether the memory stays, so that values are there from one meeting of the ranks to the next.
    """

    full: torch.Tensor
    resident: bool

    @property
    def held_bytes(self) -> int:
        """Bytes that this rank holds for it now, beyond the shards."""

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> Work | None:
        """Collective. Have all shards stand in `full`."""

    def free(self) -> None:
        """Give the memory back, where it does not stay."""


class Whole:
    """One rank holds everything: the shard is the full parameter."""

    resident = True
    held_bytes = 0

    def __init__(self, shard: torch.Tensor) -> None:
        self.full = shard

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> None:
        del shard, async_op

    def free(self) -> None:
        pass


class Transient:
    """Memory taken for each gather and given back after use."""

    resident = False

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self.full = torch.empty(numel, dtype=dtype, device=device)  # until `free`: views are made of it first
        self._segment = segment(self.full, comm)

    @property
    def held_bytes(self) -> int:
        return self.full.untyped_storage().size()

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> Work | None:
        alloc_storage(self.full, self.full.numel())
        if self._comm.size == 1:
            self.full.copy_(shard, non_blocking=True)
            return None
        ready = shard
        if shard.dtype != self.full.dtype or shard.device != self.full.device:
            ready = self._segment
            ready.copy_(shard, non_blocking=True)
        return self._comm.all_gather_into_tensor(self.full, ready, async_op=async_op)

    def free(self) -> None:
        free_storage(self.full)


class Resident:
    """Memory that all ranks share, of which each has one segment: gathered as soon as everyone has written its own.

    No byte moves, and a node holds every value once. The price is that a segment may be written only while no rank
    computes with it: the ranks meet before its first and after its last use.
    """

    resident = True

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, *, is_cast: bool) -> None:
        """Collective over `comm`.

        Args:
            is_cast: the segment is a copy of the shard in another dtype, rather than the shard itself.
        """
        self.is_cast = is_cast
        self.full = comm.alloc(numel, dtype, gathered=True)
        weakref.finalize(self, comm.free, self.full).atexit = False
        self.segment = segment(self.full, comm)

    @property
    def held_bytes(self) -> int:
        return self.segment.numel() * self.segment.element_size() if self.is_cast else 0

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> None:
        del shard, async_op

    def free(self) -> None:
        pass

    def write(self, shard: torch.Tensor) -> None:
        """Put this rank's values in place."""
        if shard.data_ptr() != self.segment.data_ptr():
            self.segment.copy_(shard)
