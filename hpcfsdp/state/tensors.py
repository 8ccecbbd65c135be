"""One named tensor of a model or optimizer, the ranks that own its elements, and this rank's memory of it."""

from __future__ import annotations

import abc
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp._compat import local_of
from hpcfsdp.errors import CheckpointError
from hpcfsdp.reshard.sharded_tensors import fill_block, full_tensor, is_sharded, properties_of

_WHOLE_STATE = "_hpcfsdp_whole_state"
"""The attribute of a tensor that ``mark_whole_state`` sets."""


@dataclass(frozen=True)
class LocalPiece:
    """A run of a tensor's elements, in row-major order, that this rank keeps in memory.

    Attributes:
        start: first element within the whole tensor.
        tensor: the memory, any shape; its elements in row-major order are the run.
    """

    start: int
    tensor: torch.Tensor

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    def flat(self) -> torch.Tensor:
        """Return the elements, 1-D; the memory itself unless they are in another order there."""
        memory = self.tensor.detach()
        if memory.is_conj() or memory.is_neg():
            memory = memory.resolve_conj().resolve_neg()
        memory = memory.contiguous()
        return memory.as_strided((memory.numel(),), (1,))  # view(-1) keeps any stride of a single element

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Overwrite the memory with `values`, 1-D, of as many elements and the same dtype."""
        self.tensor.detach().copy_(values.view(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a tensor's elements, in row-major order, and the ranks that store them. Arrays: there may be many.

    Attributes:
        edges: int64, one more than runs: the first element of each, then the number of all elements.
        ranks: int64, runs x copies: the ranks that store each run, any of which may write it.
    """

    edges: np.ndarray
    ranks: np.ndarray

    @classmethod
    def of(cls, edges: Sequence[int], ranks: Sequence[Sequence[int]]) -> Runs:
        """Make them of plain numbers. A tensor without elements has no run."""
        copies = len(ranks[0]) if len(ranks) else 1
        return cls(np.asarray(edges, np.int64), np.asarray(ranks, np.int64).reshape(-1, copies))


NO_RUNS = Runs.of((0,), ())


class GatherBuffer(abc.ABC):
    """Tensors in which others are gathered for a file; without memory before ``alloc``, and after ``free``."""

    @abc.abstractmethod
    def tensors(self) -> Iterable[torch.Tensor]:
        """Not collective. Return all of them."""

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
        """Allocate the memory, and fill it. Collective over the ranks of the tensors."""

    @abc.abstractmethod
    def scatter(self) -> None:
        """Fill the tensors that were gathered from the memory. Collective over their ranks."""


class FullTensorBuffer(GatherBuffer):
    """A sharded ``DTensor``, whole on each rank in `memory`."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor = tensor
        self.memory = _compat.local_of(tensor).detach().new_empty(tensor.shape)
        self.free()

    def tensors(self) -> Iterable[torch.Tensor]:
        return [self.memory]

    def gather(self) -> None:
        self.alloc()
        self.memory.copy_(full_tensor(self._tensor))

    def scatter(self) -> None:
        fill_block(self._tensor, self.memory)


def forget_memory(tensor: torch.Tensor) -> None:
    """Drop a tensor's memory, which others may go on to use; its shape stays.

    Unlike ``free_storage`` it does not check who owns the memory: NumPy may have seen it.
    """
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


def take_memory(tensor: torch.Tensor) -> None:
    """Allocate the memory that ``forget_memory`` has dropped, unless it is there."""
    if not all(tensor.stride()):
        tensor.data = tensor.new_empty(tensor.shape)


@dataclass(frozen=True)
class StateTensor:
    """A tensor by its global name and shape.

    Attributes:
        name: fully qualified, without wrappers' names.
        shape, dtype: of the whole tensor.
        runs: over all ranks; every element exactly once. Of tensors that every rank keeps whole, and that may differ,
            as buffers, rank 0's counts.
        pieces: this rank's memory.
        aliases: other names of the same tensor.
        buffer: the buffer that `pieces` are a part of, None if they are the tensor's own: it is gathered before
            they are written, and scattered after they have been read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: Runs
    pieces: tuple[LocalPiece, ...]
    aliases: tuple[str, ...] = ()
    buffer: GatherBuffer | None = None

    def piece_of(self, start: int) -> LocalPiece:
        """Return the piece with an element. Raises a ``LookupError`` if this rank does not have it."""
        for piece in self.pieces:
            if piece.start <= start < piece.start + piece.numel:
                return piece
        raise LookupError(f"this rank does not have element {start} of {self.name}")


@dataclass(frozen=True)
class TensorInfo:
    """The shape and dtype of a tensor that is not here."""

    shape: tuple[int, ...]
    dtype: torch.dtype


@dataclass(frozen=True)
class Rank0Tensor(TensorInfo):
    """A tensor that rank 0 of a model alone has, which is the first rank of the first replica.

    Attributes:
        tensor: on that rank; None on others.
    """

    tensor: torch.Tensor | None = None


def shape_and_dtype(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Return those of a tensor, distributed or not, or of a ``TensorInfo``; None for any other value."""
    if isinstance(value, TensorInfo):
        return tuple(value.shape), value.dtype
    return properties_of(value) if isinstance(value, torch.Tensor) else None


def buffers_of(tensors: Iterable[StateTensor]) -> list[GatherBuffer]:
    """Return the buffers of tensors, in an order that is the same on all ranks."""
    return list(dict.fromkeys(tensor.buffer for tensor in tensors if tensor.buffer is not None))


def unsharded(name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
    """Describe a tensor that no unit shards: whole on all ranks, or a ``DTensor``, which is made whole for the file."""
    if not is_sharded(tensor):
        return replicated(name, local_of(tensor).detach(), aliases)
    form = FullTensorBuffer(tensor)
    return replace(replicated(name, form.memory, aliases), buffer=form)


def refuse_subclasses(tensors: Iterable[StateTensor]) -> None:
    """Refuse tensors that compute, and keep their values, in a way of their own, such as quantized ones."""
    for name, kind in ((each.name, type(piece.tensor)) for each in tensors for piece in each.pieces):
        if kind.__torch_dispatch__ is not torch.Tensor.__torch_dispatch__:
            raise CheckpointError(
                f"{name!r} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor that keeps its "
                "values in a way of its own, and a checkpoint holds plain numbers: convert it (dequantize, for "
                "instance), or choose other tensors by names="
            )


def replicated(name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
    """Describe a tensor that every rank keeps whole; rank 0 writes it."""
    runs = Runs.of((0, tensor.numel()), ((0,),)) if tensor.numel() else NO_RUNS
    return StateTensor(name, tuple(tensor.shape), tensor.dtype, runs, (LocalPiece(0, tensor),), aliases)


def mark_whole_state(tensor: torch.Tensor) -> torch.Tensor:
    """Mark optimizer state of a sharded parameter that has not one value for each element, and that ranks have whole.

    By its shape alone it could be the state of a run of the parameter. Returns the tensor.
    """
    setattr(tensor, _WHOLE_STATE, True)
    return tensor


def is_whole_state(value: object) -> bool:
    """Return whether ``mark_whole_state`` was called."""
    return getattr(value, _WHOLE_STATE, False)
