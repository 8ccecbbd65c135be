"""One named tensor of a model or optimizer, the ranks that own its elements, and this rank's memory of it."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from hpcfsdp._compat import local_of
from hpcfsdp.tensor.sharded import properties_of
from hpcfsdp.tensor.whole import WholeStaging, is_cut


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
        """The elements, 1-D; the memory itself unless they lie in another order there."""
        memory = self.tensor.detach()
        if memory.is_conj() or memory.is_neg():
            memory = memory.resolve_conj().resolve_neg()
        return memory.contiguous().view(-1)

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Overwrite the memory with `values`, 1-D, of as many elements and the same dtype."""
        self.tensor.detach().copy_(values.view(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class Runs:
    """How the elements of a tensor, in row-major order, are divided over all ranks. Arrays, for there may be many.

    Attributes:
        edges: int64, one more than runs: the first element of each, then the number of all elements.
        holders: int64, runs x copies: the ranks that have each run, any of which may write it.
    """

    edges: np.ndarray
    holders: np.ndarray

    @classmethod
    def of(cls, edges: Sequence[int], holders: Sequence[Sequence[int]]) -> Runs:
        """From plain numbers. Without elements there is no run."""
        copies = len(holders[0]) if len(holders) else 1
        return cls(np.asarray(edges, np.int64), np.asarray(holders, np.int64).reshape(-1, copies))


NO_RUNS = Runs.of((0,), ())


@dataclass(frozen=True)
class StateTensor:
    """A tensor by its global name and shape.

    Attributes:
        name: fully qualified, without wrappers' names.
        shape, dtype: of the whole tensor.
        runs: over all ranks, who has which run, and may write it; every element exactly once. Of what training may let
            differ between ranks that keep it whole, as buffers, only rank 0's counts.
        pieces: what this rank keeps.
        aliases: further names of the same tensor.
        staged: what `pieces` are a part of, where they are not the tensor's own memory: it is gathered before they are
            written, and scattered after they have been read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    runs: Runs
    pieces: tuple[LocalPiece, ...]
    aliases: tuple[str, ...] = ()
    staged: Staged | None = None

    def piece_of(self, start: int) -> LocalPiece:
        """The piece in which an element lies.

        Raises:
            LookupError: this rank does not have it.
        """
        for piece in self.pieces:
            if piece.start <= start < piece.start + piece.numel:
                return piece
        raise LookupError(f"this rank does not have element {start} of {self.name}")


@dataclass(frozen=True)
class TensorInfo:
    """A tensor that is known by its shape and dtype, and is not here."""

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
    """Those of a tensor, of the whole where it is distributed, or of a ``TensorInfo``; None for what is no tensor."""
    if isinstance(value, TensorInfo):
        return tuple(value.shape), value.dtype
    return properties_of(value) if isinstance(value, torch.Tensor) else None


class Staged(Protocol):
    """Memory in which tensors are put together for a file; there is none before it is asked for."""

    def alloc(self) -> None:
        """Not collective. Take the memory, if it is not there."""

    def free(self) -> None:
        """Not collective. Give it back."""

    def gather(self) -> None:
        """Collective. Take the memory, and fill it from the tensors."""

    def scatter(self) -> None:
        """Collective. Fill the tensors from it."""


def staged_of(tensors: Iterable[StateTensor]) -> list[Staged]:
    """What has to be gathered or scattered for tensors, in an order that is the same on all ranks."""
    return list(dict.fromkeys(tensor.staged for tensor in tensors if tensor.staged is not None))


def unsharded(name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
    """A tensor that no unit shards: kept whole by all ranks, or a ``DTensor``, which is made whole for the file."""
    if not is_cut(tensor):
        return replicated(name, local_of(tensor).detach(), aliases)
    form = WholeStaging(tensor)
    return replace(replicated(name, form.memory, aliases), staged=form)


def replicated(name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
    """A tensor that every rank keeps whole; rank 0 writes it."""
    runs = Runs.of((0, tensor.numel()), ((0,),)) if tensor.numel() else NO_RUNS
    return StateTensor(name, tuple(tensor.shape), tensor.dtype, runs, (LocalPiece(0, tensor),), aliases)
