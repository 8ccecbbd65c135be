"""Memory behind a tensor, taken and given back while the tensor and its views stay."""

from __future__ import annotations

from collections.abc import Sequence
from math import prod

import torch

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
