"""One named tensor of a model or optimizer, the ranks that own its elements, and this rank's memory of it."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Protocol

import torch

from hpcfsdp._compat import local_of
from hpcfsdp.flat.layout import ShardExtent
from hpcfsdp.tensor.whole import WholeForm, is_cut


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

    def slice(self, start: int, numel: int) -> torch.Tensor:
        """Elements of the whole tensor that lie in this piece, 1-D on the CPU; a copy only where needed."""
        begin = start - self.start
        return self.tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1)[begin : begin + numel].cpu()

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Overwrite the memory with `values`, 1-D, of as many elements and the same dtype."""
        self.tensor.detach().copy_(values.view(self.tensor.shape))


@dataclass(frozen=True)
class StateTensor:
    """A tensor by its global name and shape.

    Attributes:
        name: fully qualified, without wrappers' names.
        shape, dtype: of the whole tensor.
        extents: over all ranks, who writes which run; every element exactly once.
        pieces: what this rank keeps; a replicated tensor is kept whole by all ranks and written by one.
        aliases: further names of the same tensor.
        staged: what `pieces` are a part of, where they are not the tensor's own memory: it is gathered before they are
            written, and scattered after they have been read.
    """

    name: str
    shape: tuple[int, ...]
    dtype: torch.dtype
    extents: tuple[ShardExtent, ...]
    pieces: tuple[LocalPiece, ...]
    aliases: tuple[str, ...] = ()
    staged: Staged | None = None


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
    form = WholeForm(tensor)
    return replace(replicated(name, form.memory, aliases), staged=form)


def replicated(name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
    """A tensor that every rank keeps whole; rank 0 writes it."""
    whole = (ShardExtent(name, 0, 0, tensor.numel(), 0),) if tensor.numel() else ()
    return StateTensor(name, tuple(tensor.shape), tensor.dtype, whole, (LocalPiece(0, tensor),), aliases)
