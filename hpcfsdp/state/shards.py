"""A rank's shards of tensors that are laid out like a flat parameter: its parameters, or their optimizer state.

Every sink reads them and every source fills them: ``gather`` and ``scatter`` for state dicts, ``in_file`` for files.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hpcfsdp.params.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import run_boxes
from hpcfsdp.reshard.redistribute import ShardedBlocks
from hpcfsdp.state.tensors import GatherBuffer, LocalPiece, Runs, StateTensor, forget_memory
from hpcfsdp.units.unit_mesh import Dim, UnitMesh

_LEAST_NUMEL = 1 << 14
"""Elements that a rank writes at least of a tensor: many small extents cost more than they spread."""


@dataclass(frozen=True)
class LocalShards:
    """A rank's memory of tensors that are sharded as a layout says.

    Attributes:
        layout: of the slots that the tensors belong to.
        tensors: 1-D, one for each slot; None for slots that are left out, on all ranks alike.
        whole_shard: whether each of them is the whole shard, or this rank's run of its own parameter.
    """

    layout: FlatLayout
    tensors: Sequence[torch.Tensor | None]
    whole_shard: bool

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
        """Bytes of the memory."""
        return sum({id(tensor): tensor.nbytes for tensor in self.tensors if tensor is not None}.values())

    def runs(self, rank: int) -> list[Run]:
        """Return the runs of a rank, at their places in its tensors."""
        found = self.layout.runs(rank, apart=not self.whole_shard)
        return [run for run in found if self.tensors[run.index] is not None]

    def pieces(self, rank: int) -> dict[int, LocalPiece]:
        """Return the runs in this memory, which is that of `rank`, as views by slot."""
        return {
            run.index: LocalPiece(run.start, self.tensors[run.index][run.offset : run.offset + run.numel])
            for run in self.runs(rank)
        }

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
        """Return the slots as the ranks of `mesh` along `dims` share them. Collective over these ranks, the first time.

        Args:
            dims: a dimension of data; with "tensor", the blocks of all tensor-parallel ranks.
        """
        comm = mesh.comm(*dims)
        if "tensor" not in dims or mesh.tensor is None:
            places: Sequence[tuple[int, int]] = [(rank, 0) for rank in range(comm.size)]
            return ShardedBlocks(comm, places, 1, self.layout, self.whole_shard)
        places = mesh.places if mesh.dtensor_dim in dims else [(0, rank) for rank in range(comm.size)]
        return ShardedBlocks(comm, places, mesh.tensor.size, self.layout, self.whole_shard)

    def in_file(
        self, mesh: UnitMesh, names: Sequence[str], *, with_aliases: bool = False, are_read_by_others: bool = False
    ) -> list[StateTensor]:
        """Not collective. Return the slots that are not left out, as a file stores them.

        Args:
            mesh: the ranks that share the slots.
            names: of all slots.
            with_aliases: whether the slots' aliases are names, too.
            are_read_by_others: the ranks of a node share the memory.
        """
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
    """Parameters that tensor-parallel ranks divide, in ranges of the whole, as a file stores them.

    Attributes:
        memory: by slot, this rank's range, 1-D.
    """

    def __init__(self, shards: LocalShards, mesh: UnitMesh, *, are_read_by_others: bool) -> None:
        """
        Args:
            are_read_by_others: the ranks of a node share the memory of the shards: nothing may be received there.
        """
        self._shards, self._mesh, self._are_read_by_others = shards, mesh, are_read_by_others
        self._ranges: dict[int, list[tuple[int, int]]] = {}
        self.memory: dict[int, torch.Tensor] = {}

    @cached_property
    def _blocks(self) -> ShardedBlocks:
        return self._shards.over(self._mesh, self._mesh.dtensor_dim, "tensor")

    def add(self, index: int, name: str, aliases: tuple[str, ...]) -> StateTensor:
        """Not collective, once the ranks are known. Return a slot, of the same dtype as all others, in ranges."""
        shape, shard = self._shards.layout.slots[index].whole_shape, self._shards.tensors[index]
        self._ranges[index] = ranges = _equal_ranges(math.prod(shape), self._blocks.comm.size)
        start, numel = ranges[self._blocks.comm.rank]
        self.memory[index] = shard.new_empty(numel)
        forget_memory(self.memory[index])
        starts = [begin for begin, size in ranges if size]  # the first ranks have all
        runs = Runs(np.array([*starts, math.prod(shape)]), self._mesh.block_copies[: len(starts)])
        pieces = (LocalPiece(start, self.memory[index]),) if numel else ()
        return StateTensor(name, shape, shard.dtype, runs, pieces, aliases, self)

    def tensors(self) -> Iterable[torch.Tensor]:
        return self.memory.values()

    def gather(self) -> None:
        self.alloc()
        shards = self._cut_shards()
        self._blocks.gather(shards, self._boxes, self.memory, next(iter(shards.values())).dtype)

    def scatter(self) -> None:
        shards = targets = self._cut_shards()
        if self._are_read_by_others:
            copies = {shard.data_ptr(): shard.clone() for shard in shards.values()}
            targets = {index: copies[shard.data_ptr()] for index, shard in shards.items()}
        self._blocks.scatter(self.memory.get, self._boxes, targets, next(iter(shards.values())).dtype)
        if self._are_read_by_others:
            for shard in {shard.data_ptr(): shard for shard in shards.values()}.values():
                shard.copy_(copies[shard.data_ptr()])

    def _cut_shards(self) -> dict[int, torch.Tensor]:
        return {index: self._shards.tensors[index] for index in self._ranges}

    def _boxes(self, rank: int, index: int) -> Sequence[Box]:
        return run_boxes(self._shards.layout.slots[index].whole_shape, *self._ranges[index][rank])


def _equal_ranges(numel: int, size: int) -> list[tuple[int, int]]:
    """Return (first element, number) of each rank's range of a tensor: equal ranges, unless they would be small."""
    step = max(-(-numel // size), _LEAST_NUMEL)
    return [(min(rank * step, numel), max(0, min(step, numel - rank * step))) for rank in range(size)]
