"""The memory of tensors; and DTensors that no unit owns, as buffers: made whole, and filled from what is whole."""

from __future__ import annotations

import abc
from collections.abc import Iterable
from types import SimpleNamespace

import numpy as np
import torch
import xxhash
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.reshard.sharded_tensors import local_blocks


def forget_memory(tensor: torch.Tensor) -> None:
    """Drop a tensor's memory, which others may go on to use; its shape stays.

    Unlike ``free_storage`` it does not check who owns the memory: NumPy may have seen it.
    """
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


def take_memory(tensor: torch.Tensor) -> None:
    """Allocate the memory that ``forget_memory`` has dropped, unless it is there."""
    if not all(tensor.stride()):
        tensor.data = tensor.new_empty(tensor.shape)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Not collective. The memory of a contiguous tensor on the CPU: uint8, 1-D, not copied.

    ``Tensor.numpy`` would mark its storage for good: ``resize_`` of a buffer fails afterwards.
    """
    place = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}
    holder = SimpleNamespace(__array_interface__=place, tensor=tensor)  # which the array keeps
    return np.asarray(holder) if tensor.nbytes else np.empty(0, np.uint8)


def is_cut(tensor: torch.Tensor) -> bool:
    """Whether it is a ``DTensor`` with different parts on ranks, or with pending sums."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def whole_of(tensor: torch.Tensor) -> torch.Tensor:
    """Collective over the mesh of a ``DTensor`` that is cut. The whole tensor; any other one itself, as it is here."""
    return tensor.detach().full_tensor() if is_cut(tensor) else _compat.local_of(tensor).detach()


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Not collective. A checksum of a tensor's bits, 0 for one without plain memory."""
    if isinstance(tensor, DTensor) and not is_cut(tensor):  # if it is cut, ranks may hold different blocks
        tensor = tensor.to_local()
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return 0
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.device.type != "cpu" and data.numel() > 1 << 16:
        return int(data.sum(dtype=torch.int64))  # only a number leaves the device
    return xxhash.xxh3_64_intdigest(as_bytes(data.cpu()))


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


class Staging(abc.ABC):
    """Tensors in which others are gathered for a file; without memory before ``alloc``, and after ``free``."""

    @abc.abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Not collective. All of them."""

    def alloc(self) -> None:
        """Not collective. Allocate the memory, unless it is there."""
        for tensor in self.tensors():
            take_memory(tensor)

    def free(self) -> None:
        """Not collective. Free it."""
        for tensor in self.tensors():
            forget_memory(tensor)

    @abc.abstractmethod
    def gather(self) -> None:
        """Collective. Allocate the memory, and fill it."""

    @abc.abstractmethod
    def scatter(self) -> None:
        """Collective. Fill the tensors that were gathered from the memory."""


class WholeStaging(Staging):
    """A ``DTensor`` that is cut, whole on each rank in `memory`."""

    def __init__(self, tensor: DTensor) -> None:
        """Not collective."""
        self._tensor = tensor
        self.memory = _compat.local_of(tensor).detach().new_empty(tensor.shape)
        self.free()

    def tensors(self) -> Iterable[torch.Tensor]:
        return [self.memory]

    def gather(self) -> None:
        self.alloc()
        self.memory.copy_(whole_of(self._tensor))

    def scatter(self) -> None:
        fill_block(self._tensor, self.memory)
