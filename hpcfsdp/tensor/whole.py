"""DTensors that no unit owns, as buffers and ignored parameters are: made whole, and filled from what is whole."""

from __future__ import annotations

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.tensor.sharded import local_blocks


def forget_memory(tensor: torch.Tensor) -> None:
    """Have a tensor keep its shape and nothing of its memory, which others may go on to use.

    Unlike ``free_storage`` it does not ask whose the memory is: NumPy may have seen it.
    """
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


def take_memory(tensor: torch.Tensor) -> None:
    """The way back from ``forget_memory``; nothing if the memory is there."""
    if not all(tensor.stride()):
        tensor.data = tensor.new_empty(tensor.shape)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor`` of which ranks have different parts, or sums that are pending."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Collective over the mesh of a ``DTensor`` that is cut. All of it; any other tensor itself, as it is here."""
    return tensor.detach().full_tensor() if is_cut(tensor) else _compat.local_of(tensor).detach()


@torch.no_grad()
def fill_block(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Not collective. Copy this rank's part of a tensor that it has whole into a ``DTensor``, or all of it.

    Raises:
        ValueError: the placements of `target` are no blocks of values.
    """
    if isinstance(target, DTensor):
        for box, block in local_blocks(target.detach()):
            block.copy_(whole[box.slices])
    else:
        target.detach().copy_(whole)


class WholeStaging:
    """A ``DTensor`` that is cut, whole on each rank for the time that it goes to a file, or comes from one.

    Attributes:
        memory: all of it; without memory before ``alloc``, and after ``free``.
    """

    def __init__(self, tensor: DTensor) -> None:
        """Not collective."""
        self._tensor = tensor
        self.memory = _compat.local_of(tensor).detach().new_empty(tensor.shape)
        self.free()

    def alloc(self) -> None:
        """Not collective. Take the memory, if it is not there."""
        take_memory(self.memory)

    def free(self) -> None:
        """Not collective. Give it back."""
        forget_memory(self.memory)

    def gather(self) -> None:
        """Collective over the mesh. Take the memory, and fill it."""
        self.alloc()
        self.memory.copy_(whole_of(self._tensor))

    def scatter(self) -> None:
        """Not collective. Fill the tensor from `memory`."""
        fill_block(self._tensor, self.memory)
