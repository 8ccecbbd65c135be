"""Blocks of parameters that are cut over ranks which are parallel over tensors, on top of being sharded.

What a rank has of such a parameter is a run of its block. Values are moved between these runs and blocks of any other
kind (chunks of a ``DTensor``, shards, stretches of a file) over all ranks that have parts of the parameter. Each block
is a tensor of its own for the plan of the moves, so that a run stays a run, however the whole has been cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.flat.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import run_boxes, whole_box
from hpcfsdp.reshard.move import MovePlan, batches, move
from hpcfsdp.reshard.runs import cut_runs
from hpcfsdp.sharded.unit_mesh import UnitMesh
from hpcfsdp.state.tensors import LocalPiece, Runs, StateTensor
from hpcfsdp.tensor.whole import forget_memory, take_memory

BoxesOf = Callable[[int, int], Sequence[Box]]
"""Of a rank of the holders, and a slot: what it has of the whole parameter, one block after the other in memory."""

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

    mesh: UnitMesh
    layout: FlatLayout
    whole_shard: bool

    @cached_property
    def size(self) -> int:
        """How many ranks are parallel over tensors."""
        return self.mesh.size("tensor")

    @property
    def comm(self) -> Communicator:
        """Collective over them, the first time. All holders: the ranks that have each element once."""
        return self.mesh.comm(self.mesh.dtensor_dim, "tensor")

    @cached_property
    def _frames(self) -> list[Sequence[Box]]:
        """By slot, the block of each of the ranks that are parallel over tensors."""
        slots = self.layout.slots
        return [[whole_box(s.shape)] * self.size if s.block is None else s.block.boxes for s in slots]

    @cached_property
    def _numbers(self) -> list[list[int]]:
        """By slot, what the block of each of these ranks is called in plans: after the first rank that has it."""
        return [[index * self.size + boxes.index(box) for box in boxes] for index, boxes in enumerate(self._frames)]

    def shard_runs(
        self, rank: int, chosen: Collection[int], *, once: bool, among: Container[int] | None = None
    ) -> list[Run]:
        """What one of the holders has of `chosen` slots, by the numbers of their blocks.

        Args:
            once: of what several of them have, only the first.
            among: numbers of blocks that count; None for all.
        """
        place, tensor_rank = self.mesh.places[rank]
        layout = self.layout.of_tensor_rank(tensor_rank)
        if once and place >= layout.num_shards:  # nothing is sharded: the others have the same
            return []
        shard_rank = min(place, layout.num_shards - 1)
        runs = []
        for run in layout.runs(shard_rank, apart=not self.whole_shard):
            if run.index in chosen:
                number = self._numbers[run.index][tensor_rank]
                if among is not None and number not in among:
                    continue
                if not once or number == run.index * self.size + tensor_rank:
                    runs.append(run._replace(index=number))
        return runs

    def box_runs(self, rank: int, boxes: BoxesOf, among: Iterable[int]) -> list[Run]:
        """The runs of what a rank has of blocks, in blocks of any kind of its own.

        Args:
            among: the numbers of the blocks.
        """
        runs = []
        for number in among:
            index, tensor_rank = divmod(number, self.size)
            frame, offset = self._frames[index][tensor_rank], 0
            for box in boxes(rank, index):
                runs += cut_runs(number, frame, box, offset)
                offset += box.numel
        return sorted(runs)

    def numbers(self, chosen: Iterable[int]) -> list[int]:
        """Those of the different blocks of `chosen` slots, without those that have no elements."""
        return [
            number
            for index in chosen
            for tensor_rank, number in enumerate(self._numbers[index])
            if number == index * self.size + tensor_rank and self._frames[index][tensor_rank].numel
        ]

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
        boxes: which blocks each rank is to get of the slots of `shards`.
        targets: by slot, 1-D, the memory of this rank's blocks.
        dtype: in which values travel.
    """
    comm, rank = blocks.comm, blocks.comm.rank
    mine = blocks.shard_runs(rank, shards, once=True)
    wanted = blocks.box_runs(rank, boxes, blocks.numbers(shards))
    # Of what others have or want, only what has to do with this rank: there are ranks x slots of it.
    given, asked = sorted({run.index for run in mine}), {run.index for run in wanted}
    plan = MovePlan.make(
        rank,
        comm.size,
        lambda other: mine if other == rank else blocks.shard_runs(other, shards, once=True, among=asked),
        lambda other: wanted if other == rank else blocks.box_runs(other, boxes, given),
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
    comm, rank = blocks.comm, blocks.comm.rank
    mine = blocks.box_runs(rank, boxes, blocks.numbers(shards))
    wanted = blocks.shard_runs(rank, shards, once=False)
    given, asked = {run.index for run in mine}, sorted({run.index for run in wanted})
    plan = MovePlan.make(
        rank,
        comm.size,
        lambda other: mine if other == rank else blocks.box_runs(other, boxes, asked),
        lambda other: wanted if other == rank else blocks.shard_runs(other, shards, once=False, among=given),
    )
    source, target = blocks.by_number(sources), blocks.by_number(shards)
    for part in plan.parts(_batches(blocks)):
        move(comm, part, source, target, dtype)


class FileStaging:
    """Parameters, or what is laid out like them, in stretches of the whole, as a file has them.

    Attributes:
        memory: by slot, this rank's stretch, 1-D; without memory before ``alloc``, and after ``free``.
    """

    def __init__(self, blocks: Blocks, *, are_read_by_others: bool = False) -> None:
        """Not collective.

        Args:
            are_read_by_others: shards stand in memory that ranks of a node share: nothing may be received there.
        """
        self._blocks, self._are_read_by_others = blocks, are_read_by_others
        self._shards: dict[int, torch.Tensor] = {}
        self._stretches: dict[int, list[tuple[int, int]]] = {}
        self.memory: dict[int, torch.Tensor] = {}

    def add(self, index: int, shard: torch.Tensor) -> None:
        """Not collective, once the holders are known. Take memory for a slot.

        Args:
            shard: the memory of this rank's runs, 1-D, of the same dtype for all slots.
        """
        comm = self._blocks.comm
        stretches = _stretches(math.prod(self._blocks.layout.slots[index].whole_shape), comm.size)
        self._shards[index], self._stretches[index] = shard, stretches
        self.memory[index] = shard.new_empty(stretches[comm.rank][1])
        forget_memory(self.memory[index])

    def state_tensor(self, index: int, name: str, aliases: tuple[str, ...] = ()) -> StateTensor:
        """A slot under a name, in stretches that lie in `memory`."""
        shape = self._blocks.layout.slots[index].whole_shape
        return StateTensor(name, shape, self._dtype, self._runs(index), self._pieces(index), aliases, self)

    def _runs(self, index: int) -> Runs:
        """The stretches of a slot, by the ranks that have them."""
        copies = self._blocks.mesh.block_copies
        starts = [start for start, numel in self._stretches[index] if numel]  # the first ranks have all
        edges = [*starts, math.prod(self._blocks.layout.slots[index].whole_shape)]
        return Runs(np.array(edges), copies[: len(starts)])

    def _pieces(self, index: int) -> tuple[LocalPiece, ...]:
        """This rank's stretch of a slot."""
        start, numel = self._stretches[index][self._blocks.comm.rank]
        return (LocalPiece(start, self.memory[index]),) if numel else ()

    def alloc(self) -> None:
        """Not collective. Take the memory, if it is not there."""
        for tensor in self.memory.values():
            take_memory(tensor)

    def free(self) -> None:
        """Not collective. Give it back."""
        for tensor in self.memory.values():
            forget_memory(tensor)

    def gather(self) -> None:
        """Collective over the holders. Take the memory, and fill it from the shards."""
        self.alloc()
        gather_blocks(self._blocks, self._shards, self._boxes, self.memory, self._dtype)

    def scatter(self) -> None:
        """Collective over the holders. Fill the shards from `memory`."""
        shards = self._shards
        if self._are_read_by_others:
            copies = {shard.data_ptr(): shard.clone() for shard in shards.values()}
            shards = {index: copies[shard.data_ptr()] for index, shard in shards.items()}
        scatter_blocks(self._blocks, shards, self._boxes, self.memory, self._dtype)
        if self._are_read_by_others:
            for shard in {shard.data_ptr(): shard for shard in self._shards.values()}.values():
                shard.copy_(copies[shard.data_ptr()])

    @property
    def _dtype(self) -> torch.dtype:
        return next(iter(self._shards.values())).dtype

    def _boxes(self, rank: int, index: int) -> Sequence[Box]:
        return run_boxes(self._blocks.layout.slots[index].whole_shape, *self._stretches[index][rank])


def _stretches(numel: int, size: int) -> list[tuple[int, int]]:
    """(first element, number) of each rank's part of a tensor, in equal parts unless they would be small."""
    step = max(-(-numel // size), _STRETCH_NUMEL)
    return [(min(rank * step, numel), max(0, min(step, numel - rank * step))) for rank in range(size)]


def _batches(blocks: Blocks) -> list[range]:
    sizes = [math.prod(slot.whole_shape) for slot in blocks.layout.slots]  # the same on all ranks
    return [range(group.start * blocks.size, group.stop * blocks.size) for group in batches(sizes, _BATCH_NUMEL)]
