"""Named tensors of a model or optimizer: the ranks that own their elements, and this rank's memory of them.

``LocalShards`` are tensors that are laid out like a flat parameter: its parameters, or their optimizer state. Every
sink reads them and every source fills them: ``gather`` and ``scatter`` for state dicts, ``in_file`` for files.
"""

from __future__ import annotations

import abc
import itertools
import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

import numpy as np
import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import local_of
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import run_boxes
from hpcfsdp.reshard.redistribute import ShardedBlocks
from hpcfsdp.reshard.sharded_tensors import fill_block, full_tensor, is_sharded, properties_of
from hpcfsdp.units.unit_mesh import Dim, UnitMesh

_LEAST_NUMEL = 1 << 14
"""Elements that a rank writes at least of a tensor: many small extents cost more than they spread."""

_WHOLE_STATE = "_hpcfsdp_whole_state"
"""The attribute of a tensor that ``mark_whole_state`` sets."""


@dataclass(frozen=True)
class LocalPiece:
    """A run of a tensor's elements, in row-major order, that this rank keeps in memory."""

    start: int  # first element within the whole tensor
    tensor: torch.Tensor  # any shape; its elements in row-major order are the run

    @property
    def numel(self) -> int:
        return self.tensor.numel()

    def flat(self) -> torch.Tensor:
        """Return the elements, 1-D; the memory itself unless they are in another order there."""
        memory = self.tensor.detach().resolve_conj().resolve_neg().contiguous()
        return memory.as_strided((memory.numel(),), (1,))  # view(-1) keeps any stride of a single element

    @torch.no_grad()
    def fill(self, values: torch.Tensor) -> None:
        """Overwrite the memory with `values`, 1-D, of as many elements and the same dtype."""
        self.tensor.detach().copy_(values.view(self.tensor.shape))


@dataclass(frozen=True, eq=False)
class Runs:
    """The runs of a tensor's elements, in row-major order, and the ranks that store them. Arrays: there may be many."""

    edges: np.ndarray  # int64, one more than runs: the first element of each, then the number of all elements
    ranks: np.ndarray  # int64, runs x copies: the ranks that store each run, any of which may write it

    @classmethod
    def of(cls, edges: Sequence[int], ranks: Sequence[Sequence[int]]) -> Runs:
        """Make them of plain numbers. A tensor without elements has no run."""
        copies = len(ranks[0]) if len(ranks) else 1
        return cls(np.asarray(edges, np.int64), np.asarray(ranks, np.int64).reshape(-1, copies))


NO_RUNS = Runs.of((0,), ())


class GatherBuffer(abc.ABC):
    """Tensors in which others are gathered for a file, by number. They have memory from ``alloc`` until ``free``."""

    memory: dict[int, torch.Tensor]

    def alloc(self) -> None:
        """Not collective. Allocate the memory, unless it is there."""
        for tensor in self.memory.values():
            if not all(tensor.stride()):
                tensor.data = tensor.new_empty(tensor.shape)

    def free(self) -> None:
        """Not collective. Free it."""
        for tensor in self.memory.values():
            forget_memory(tensor)

    @abc.abstractmethod
    def gather(self) -> None:
        """Allocate the memory, and fill it. Collective over the ranks of the tensors."""

    @abc.abstractmethod
    def scatter(self) -> None:
        """Fill the tensors that were gathered from the memory. Collective over their ranks."""


def forget_memory(tensor: torch.Tensor) -> None:
    """Drop a tensor's memory, which others may go on to use; its shape stays.

    Unlike ``free_storage`` it does not check who owns the memory: NumPy may have seen it.
    """
    tensor.data = tensor.new_empty(()).expand(tensor.shape)


class FullTensorBuffer(GatherBuffer):
    """A sharded ``DTensor``, whole on each rank."""

    def __init__(self, tensor: DTensor) -> None:
        self._tensor, self.memory = tensor, {0: local_of(tensor).detach().new_empty(tensor.shape)}
        self.free()

    def gather(self) -> None:
        self.alloc()
        self.memory[0].copy_(full_tensor(self._tensor))

    def scatter(self) -> None:
        fill_block(self._tensor, self.memory[0])


@dataclass(frozen=True)
class StateTensor:
    """A tensor by its global name and shape.

    Of tensors that every rank keeps whole, and that may differ, as buffers, rank 0's counts.
    """

    name: str  # fully qualified, without wrappers' names
    shape: tuple[int, ...]  # of the whole tensor
    dtype: torch.dtype
    runs: Runs  # over all ranks; every element exactly once
    pieces: tuple[LocalPiece, ...]  # this rank's memory
    aliases: tuple[str, ...] = ()  # other names of the same tensor
    # That `pieces` are a part of, unless they are the tensor's own: gathered before they are written, scattered after
    # they have been read.
    buffer: GatherBuffer | None = None
    must_agree: bool = False  # whether all ranks keep it whole, and rank 0's counts only if theirs are equal

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
    """A tensor that the first rank of the first replica alone has: it is None on others."""

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
    buffer = FullTensorBuffer(tensor)
    return replace(replicated(name, buffer.memory[0], aliases), buffer=buffer)


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


@dataclass(frozen=True)
class LocalShards:
    """A rank's memory of tensors that are sharded as a layout says."""

    layout: FlatLayout  # of the slots that the tensors belong to
    tensors: Sequence[torch.Tensor | None]  # 1-D, by slot; None for slots that are left out, on all ranks alike
    whole_shard: bool  # whether each of them is the whole shard, or this rank's run of its own parameter

    @classmethod
    def of_shard(cls, layout: FlatLayout, shard: torch.Tensor) -> LocalShards:
        """Return all slots in one tensor that is laid out like the shard."""
        return cls(layout, [shard] * len(layout.slots), whole_shard=True)

    @property
    def present(self) -> list[int]:
        """The slots that are not left out."""
        return [index for index, tensor in enumerate(self.tensors) if tensor is not None]

    @property
    def nbytes(self) -> int:
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors if tensor is not None}.values())

    def runs(self, rank: int) -> list[Run]:
        """Return the runs of a rank, at their places in its tensors."""
        found = self.layout.runs(rank, apart=not self.whole_shard)
        return [run for run in found if self.tensors[run.index] is not None]

    def memory_of(self, run: Run) -> torch.Tensor:
        """Return a run of this rank as a view."""
        return self.tensors[run.index][run.offset : run.offset + run.numel]

    def pieces(self, rank: int) -> dict[int, LocalPiece]:
        """Return the runs in this memory, which is that of `rank`, by slot."""
        return {run.index: LocalPiece(run.start, self.memory_of(run)) for run in self.runs(rank)}

    def assembled(self, rank: int, device: torch.device, dtype: torch.dtype) -> torch.Tensor:
        """Return one tensor laid out like the shard; what no slot owns may be anything."""
        if self.whole_shard:
            return self.tensors[self.present[0]].to(device, dtype).contiguous()
        shard = torch.empty(self.layout.shard_numel, dtype=dtype, device=device)
        for run in self.layout.runs(rank):
            if self.tensors[run.index] is not None:
                shard[run.offset : run.offset + run.numel].copy_(self.tensors[run.index])
        return shard

    def over(self, mesh: UnitMesh, *dims: Dim) -> ShardedBlocks:
        """Return the slots as ranks along `dims` share them, with "tensor" all blocks. Collective, the first time."""
        comm, num_blocks = mesh.comm(*dims), 1
        places: Sequence[tuple[int, int]] = [(rank, 0) for rank in range(comm.size)]
        if "tensor" in dims and mesh.tensor is not None:
            num_blocks = mesh.tensor.size
            places = mesh.places if mesh.dtensor_dim in dims else [(0, rank) for rank in range(comm.size)]
        return ShardedBlocks(comm, places, num_blocks, self.layout, self.whole_shard)

    def in_file(
        self, mesh: UnitMesh, names: Sequence[str], *, with_aliases: bool = False, are_read_by_others: bool = False
    ) -> list[StateTensor]:
        """Not collective. Return the present slots as a file stores them; `names` are those of all slots."""
        buffer = RangeBuffer(self, mesh, are_read_by_others=are_read_by_others)
        pieces = self.pieces(min(mesh.shard.rank, self.layout.num_shards - 1))
        found = []
        for index in self.present:
            slot, tensor = self.layout.slots[index], self.tensors[index]
            aliases = slot.aliases if with_aliases else ()
            if slot.is_cut:
                found.append(buffer.add(index, names[index], aliases))
                continue
            first, edges = self.layout.of_tensor_rank(0).param_edges(slot.fqn)
            runs = Runs(edges, mesh.copies[first : first + len(edges) - 1])
            own = (pieces[index],) if index in pieces else ()
            found.append(StateTensor(names[index], slot.shape, tensor.dtype, runs, own, aliases))
        return found


class RangeBuffer(GatherBuffer):
    """Parameters that tensor-parallel ranks divide: by slot, this rank's range of the whole, 1-D, as in a file."""

    def __init__(self, shards: LocalShards, mesh: UnitMesh, *, are_read_by_others: bool) -> None:
        self._shards, self._mesh = shards, mesh
        self._are_read_by_others = are_read_by_others  # by the ranks of a node: nothing may be received in the shards
        self._ranges: dict[int, list[tuple[int, int]]] = {}  # by slot, first element and number for each rank
        self.memory = {}

    @cached_property
    def _blocks(self) -> ShardedBlocks:
        return self._shards.over(self._mesh, self._mesh.dtensor_dim, "tensor")

    def add(self, index: int, name: str, aliases: tuple[str, ...]) -> StateTensor:
        """Not collective, once the ranks are known. Return a slot, of the same dtype as all others, in ranges."""
        shape, shard = self._shards.layout.slots[index].whole_shape, self._shards.tensors[index]
        numel, size = math.prod(shape), self._blocks.comm.size
        step = max(-(-numel // size), _LEAST_NUMEL)
        starts = [min(rank * step, numel) for rank in range(size + 1)]  # the first ranks have all
        self._ranges[index] = ranges = [(begin, end - begin) for begin, end in itertools.pairwise(starts)]
        start, mine = ranges[self._blocks.comm.rank]
        self.memory[index] = shard.new_empty(mine)
        forget_memory(self.memory[index])
        edges = [*(begin for begin, filled in ranges if filled), numel]
        runs = Runs(np.array(edges), self._mesh.block_copies[: len(edges) - 1])
        pieces = (LocalPiece(start, self.memory[index]),) if mine else ()
        return StateTensor(name, shape, shard.dtype, runs, pieces, aliases, self)

    def gather(self) -> None:
        self.alloc()
        shards = self._cut_shards()
        self._blocks.gather(shards, self._boxes, self.memory, next(iter(shards.values())).dtype)

    def scatter(self) -> None:
        shards = self._cut_shards()
        shared = {shard.data_ptr(): shard for shard in shards.values()} if self._are_read_by_others else {}
        copies = {place: shard.clone() for place, shard in shared.items()}
        targets = {index: copies.get(shard.data_ptr(), shard) for index, shard in shards.items()}
        self._blocks.scatter(self.memory.get, self._boxes, targets, next(iter(shards.values())).dtype)
        for place, shard in shared.items():
            shard.copy_(copies[place])

    def _cut_shards(self) -> dict[int, torch.Tensor]:
        return {index: self._shards.tensors[index] for index in self._ranges}

    def _boxes(self, rank: int, index: int) -> Sequence[Box]:
        return run_boxes(self._shards.layout.slots[index].whole_shape, *self._ranges[index][rank])
