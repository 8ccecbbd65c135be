"""Memory behind a tensor, taken and given back while the tensor and its views stay."""

from __future__ import annotations

import torch

from hpcfsdp.errors import EngineError


def alloc_storage(tensor: torch.Tensor, numel: int) -> bool:
    """Give the storage of `tensor` room for `numel` elements. The content is not defined.

    Returns:
        Whether memory was allocated; False where it was there already.

    Raises:
        EngineError: the storage holds another number of elements.
    """
    storage, wanted = tensor.untyped_storage(), numel * tensor.element_size()
    held = storage.size()
    if held == wanted:
        return False
    if held != 0:
        raise EngineError(f"the storage holds {held} bytes where {wanted} are to be allocated: free it first")
    storage.resize_(wanted)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Give the memory behind `tensor` back, for all tensors that view it. Sizes and strides of the tensors stay.

    Returns:
        Whether memory was freed; False where there was none.

    Raises:
        EngineError: `tensor` is not all that lives in the storage.
    """
    storage = tensor.untyped_storage()
    held = storage.size()
    if held == 0:
        return False
    if tensor.storage_offset() != 0 or tensor.numel() * tensor.element_size() != held:
        raise EngineError(
            f"the tensor is not the sole occupant of its storage: it starts at element {tensor.storage_offset()} and "
            f"has shape {tuple(tensor.shape)} of {tensor.dtype}, the storage holds {held} bytes"
        )
    storage.resize_(0)
    return True
