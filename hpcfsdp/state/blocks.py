"""Blocks of parameters that are cut over ranks which are parallel over tensors, on top of being sharded.

What a rank has of such a parameter is a run of its block. Values are moved between these runs and blocks of any other
kind (chunks of a ``DTensor``, shards, stretches of a file) over all ranks that have parts of the parameter. Each block
is a tensor of its own for the plan of the moves, so that a run stays a run, however the whole has been cut.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hpcfsdp.api.groups import Groups
from hpcfsdp.flat.layout import FlatLayout, ShardExtent
from hpcfsdp.state.tensors import LocalPiece, StateTensor
from hpcfsdp.tensor.move import MovePlan, batches, move
from hpcfsdp.tensor.runs import Box, Run, cut_runs, own_runs, run_boxes, shard_runs, whole_box

BoxesOf = Sequence[Mapping[int, Sequence[Box]]]
"""By rank of the holders, and by slot, what a rank has of the whole parameter, one block after the other in memory."""

_BATCH_NUMEL = 1 << 20
_STRETCH_NUMEL = 1 << 14
"""What a rank writes at least of a tensor: many small extents cost more than they spread."""


@dataclass(frozen=True)
class Blocks:
    """The parameters of a layout as they are cut and sharded over all holders.

    Attributes:
        layout: that of this rank.
        whole_shard: whether memory is the whole shard, or of each slot its own run.
    """

    groups: Groups
    layout: FlatLayout
    whole_shard: bool

    @cached_property
    def size(self) -> int:
        """How many ranks are parallel over tensors."""
        assert self.groups.tensor is not None
        return self.groups.tensor.comm.size

    @cached_property
    def _layouts(self) -> list[FlatLayout]:
        return [self.layout.of_tensor_rank(rank) for rank in range(self.size)]

    def frames(self, index: int) -> list[Box]:
        """The block of each of the ranks that are parallel over tensors."""
        slot = self.layout.slots[index]
        return [whole_box(slot.shape)] * self.size if slot.block is None else list(slot.block.boxes)

    def _number(self, index: int, tensor_rank: int) -> int:
        """What a block is called in plans: after the first rank that has it."""
        frames = self.frames(index)
        return index * self.size + frames.index(frames[tensor_rank])

    def shard_runs(self, rank: int, chosen: Mapping[int, object], *, once: bool) -> list[Run]:
        """What one of the holders has of `chosen` slots, by the numbers of their blocks.

        Args:
            once: of what several of them have, only the first.
        """
        place, tensor_rank = self.groups.holders().places[rank]
        layout = self._layouts[tensor_rank]
        if once and place >= layout.num_shards:  # nothing is sharded: the others have the same
            return []
        shard_rank = min(place, layout.num_shards - 1)
        runs = []
        for run in (shard_runs if self.whole_shard else own_runs)(layout, shard_rank):
            if run.index in chosen:
                number = self._number(run.index, tensor_rank)
                if not once or number == run.index * self.size + tensor_rank:
                    runs.append(run._replace(index=number))
        return runs

    def box_runs(self, boxes: Mapping[int, Sequence[Box]]) -> list[Run]:
        """The runs of blocks of any kind, by the numbers of the blocks that they are parts of."""
        runs = []
        for index, held in boxes.items():
            frames = self.frames(index)
            for number, frame in enumerate(frames):
                if frames.index(frame) == number and frame.numel:
                    offset = 0
                    for box in held:
                        runs += cut_runs(index * self.size + number, frame, box, offset)
                        offset += box.numel
        return sorted(runs)

    def by_number(self, tensors: Mapping[int, torch.Tensor | None]) -> dict[int, torch.Tensor | None]:
        """Memory by the numbers of blocks."""
        return {index * self.size + t: tensor for index, tensor in tensors.items() for t in range(self.size)}


def gather_blocks(
    blocks: Blocks,
    shards: Mapping[int, torch.Tensor],
    boxes: BoxesOf,
    targets: Mapping[int, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Collective over the holders. Bring what they have of parameters into blocks of any kind.

    Args:
        shards: by slot, the memory of this rank's runs.
        boxes: which blocks each rank is to get.
        targets: by slot, 1-D, the memory of this rank's blocks.
        dtype: in which values travel.
    """
    comm, rank = blocks.groups.holders().comm, blocks.groups.holders().comm.rank
    plan = MovePlan.make(
        rank,
        comm.size,
        lambda other: blocks.shard_runs(other, shards, once=True),
        lambda other: blocks.box_runs(boxes[other]),
    )
    source, target = blocks.by_number(shards), blocks.by_number(targets)
    for part in plan.parts(_batches(blocks)):
        move(comm, part, source, target, dtype)


def scatter_blocks(
    blocks: Blocks,
    shards: Mapping[int, torch.Tensor],
    boxes: BoxesOf,
    sources: Mapping[int, torch.Tensor],
    dtype: torch.dtype,
) -> None:
    """Collective over the holders. The way back; `boxes` have each element of the parameters once."""
    comm, rank = blocks.groups.holders().comm, blocks.groups.holders().comm.rank
    plan = MovePlan.make(
        rank,
        comm.size,
        lambda other: blocks.box_runs(boxes[other]),
        lambda other: blocks.shard_runs(other, shards, once=False),
    )
    source, target = blocks.by_number(sources), blocks.by_number(shards)
    for part in plan.parts(_batches(blocks)):
        move(comm, part, source, target, dtype)


class FileForm:
    """Parameters, or what is laid out like them, in stretches of the whole, as a file has them.

    Attributes:
        memory: by slot, this rank's stretch, 1-D.
    """

    def __init__(self, blocks: Blocks, shards: Mapping[int, torch.Tensor], *, are_read_by_others: bool = False) -> None:
        """Not collective, once the holders are known. Plan it, and take the memory.

        Args:
            shards: by slot, the memory of this rank's runs, all of one dtype.
            are_read_by_others: they stand in memory that ranks of a node share: nothing may be received there.
        """
        self._blocks, self._shards, self._are_read_by_others = blocks, shards, are_read_by_others
        holders = blocks.groups.holders()
        self._rank, size = holders.comm.rank, holders.comm.size
        self._stretches = {i: _stretches(math.prod(blocks.layout.slots[i].whole_shape), size) for i in shards}
        self.memory = {i: shard.new_empty(self._stretches[i][self._rank][1]) for i, shard in shards.items()}

    def state_tensor(self, index: int, name: str, aliases: tuple[str, ...] = ()) -> StateTensor:
        """A slot under a name, in stretches that lie in `memory`."""
        shape, extents = self._blocks.layout.slots[index].whole_shape, self._extents(index, name)
        return StateTensor(name, shape, self._dtype, extents, self._pieces(index), aliases, self)

    def _extents(self, index: int, name: str) -> tuple[ShardExtent, ...]:
        """The stretches of a slot, by the ranks that write them."""
        writers = self._blocks.groups.team().block_writers
        stretches = zip(writers, self._stretches[index], strict=True)
        return tuple(ShardExtent(name, writer, start, numel, 0) for writer, (start, numel) in stretches if numel)

    def _pieces(self, index: int) -> tuple[LocalPiece, ...]:
        """This rank's stretch of a slot."""
        start, numel = self._stretches[index][self._rank]
        return (LocalPiece(start, self.memory[index]),) if numel else ()

    def gather(self) -> None:
        """Collective over the holders. Fill `memory` from the shards."""
        gather_blocks(self._blocks, self._shards, self._boxes(), self.memory, self._dtype)

    def scatter(self) -> None:
        """Collective over the holders. Fill the shards from `memory`."""
        shards = self._shards
        if self._are_read_by_others:
            copies = {shard.data_ptr(): shard.clone() for shard in shards.values()}
            shards = {index: copies[shard.data_ptr()] for index, shard in shards.items()}
        scatter_blocks(self._blocks, shards, self._boxes(), self.memory, self._dtype)
        if self._are_read_by_others:
            for shard in {shard.data_ptr(): shard for shard in self._shards.values()}.values():
                shard.copy_(copies[shard.data_ptr()])

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._shards.values())).dtype

    def _boxes(self) -> BoxesOf:
        shapes = {index: self._blocks.layout.slots[index].whole_shape for index in self._shards}
        size = self._blocks.groups.holders().comm.size
        return [{i: run_boxes(shapes[i], *self._stretches[i][rank]) for i in shapes} for rank in range(size)]


def _stretches(numel: int, size: int) -> list[tuple[int, int]]:
    """(first element, number) of each rank's part of a tensor, in equal parts unless they would be small."""
    step = max(-(-numel // size), _STRETCH_NUMEL)
    return [(min(rank * step, numel), max(0, min(step, numel - rank * step))) for rank in range(size)]


def _batches(blocks: Blocks) -> list[range]:
    sizes = [math.prod(slot.whole_shape) for slot in blocks.layout.slots]  # the same on all ranks
    return [range(group.start * blocks.size, group.stop * blocks.size) for group in batches(sizes, _BATCH_NUMEL)]
