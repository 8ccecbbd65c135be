"""Moves of parameters between their shards and boxes of any other cut: chunks, blocks of a mesh, ranges of a file.

Tensor parallelism may cut a parameter before it is sharded: a shard then holds a run of a block. Each block is a tensor
of its own in the plan of the moves, so a run stays a run, however the whole parameter is cut.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Container, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.params.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import whole_box
from hpcfsdp.reshard.move import MovePlan, batches, move
from hpcfsdp.reshard.runs import cut_runs

BoxesOf = Callable[[int, int], Sequence[Box]]
"""By rank and slot, the boxes of the whole parameter that the rank stores, one after the other in memory."""


@dataclass(frozen=True)
class ShardedBlocks:
    """The parameters of a layout, sharded over ranks that have each element at least once.

    Attributes:
        comm: the ranks.
        places: for each rank of `comm`, its shard rank and its tensor-parallel rank.
        num_blocks: tensor-parallel ranks; 1 if all ranks of `comm` have shards of the same blocks.
        layout: of this rank.
        whole_shard: whether memory is the whole shard, or for each slot its own run.
    """

    comm: Communicator
    places: Sequence[tuple[int, int]]
    num_blocks: int
    layout: FlatLayout
    whole_shard: bool

    @torch.no_grad()
    def gather(
        self,
        shards: Mapping[int, torch.Tensor],
        boxes: BoxesOf,
        targets: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Collective over `comm`. Bring parameters from their shards into boxes.

        Args:
            shards: by slot, the memory of this rank's runs; the same slots on all ranks.
            boxes: what each rank gets of these slots.
            targets: by slot, 1-D, the memory of this rank's boxes.
            dtype: in which values travel.
        """
        rank = self.comm.rank
        mine = self._shard_runs(rank, shards, once=True)
        wanted = self._box_runs(rank, boxes, self._numbers(shards))
        # Of other ranks' runs, only those that meet this rank's: there are ranks x slots of them.
        given, asked = sorted({run.index for run in mine}), {run.index for run in wanted}
        plan = MovePlan.make(
            rank,
            self.comm.size,
            lambda other: mine if other == rank else self._shard_runs(other, shards, once=True, among=asked),
            lambda other: wanted if other == rank else self._box_runs(other, boxes, given),
        )
        self._move(plan, shards.get, self._by_number(targets), dtype)

    @torch.no_grad()
    def scatter(
        self,
        source: Callable[[int], torch.Tensor | None],
        boxes: BoxesOf,
        shards: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        """Collective over `comm`. Bring parameters from boxes, which have each element once, into their shards.

        Args:
            source: the memory of this rank's boxes of a slot, 1-D; called batch by batch, as it may copy.
            boxes, shards, dtype: see ``gather``.
        """
        rank = self.comm.rank
        mine = self._box_runs(rank, boxes, self._numbers(shards))
        wanted = self._shard_runs(rank, shards, once=False)
        given, asked = {run.index for run in mine}, sorted({run.index for run in wanted})
        plan = MovePlan.make(
            rank,
            self.comm.size,
            lambda other: mine if other == rank else self._box_runs(other, boxes, asked),
            lambda other: wanted if other == rank else self._shard_runs(other, shards, once=False, among=given),
        )
        self._move(plan, source, self._by_number(shards), dtype)

    def _move(
        self,
        plan: MovePlan,
        source: Callable[[int], torch.Tensor | None],
        targets: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        sizes = [math.prod(slot.whole_shape) for slot in self.layout.slots]  # the same on all ranks
        groups = (range(each.start * self.num_blocks, each.stop * self.num_blocks) for each in batches(sizes))
        for part in plan.parts(groups):
            numbers = {step.index for steps in (part.kept, *part.sent) for step in steps}
            memory = {index: source(index) for index in {number // self.num_blocks for number in numbers}}
            move(self.comm, part, {number: memory[number // self.num_blocks] for number in numbers}, targets, dtype)

    @cached_property
    def _frames(self) -> list[Sequence[Box]]:
        """By slot, the blocks of the tensor-parallel ranks."""
        if self.num_blocks == 1:
            return [[whole_box(slot.shape) if slot.block is None else slot.block.box] for slot in self.layout.slots]
        return [
            [whole_box(slot.shape)] * self.num_blocks if slot.block is None else slot.block.boxes
            for slot in self.layout.slots
        ]

    @cached_property
    def _block_numbers(self) -> list[list[int]]:
        """By slot, the number of each tensor-parallel rank's block in plans: that of the first rank that has it."""
        size = self.num_blocks
        return [[index * size + boxes.index(box) for box in boxes] for index, boxes in enumerate(self._frames)]

    def _numbers(self, chosen: Iterable[int]) -> list[int]:
        """The numbers of the different blocks of `chosen` slots that have elements."""
        return [
            number
            for index in chosen
            for block, number in enumerate(self._block_numbers[index])
            if number == index * self.num_blocks + block and self._frames[index][block].numel
        ]

    def _shard_runs(
        self, rank: int, chosen: Collection[int], *, once: bool, among: Container[int] | None = None
    ) -> list[Run]:
        """The runs in a rank's shard of `chosen` slots, by the numbers of their blocks.

        Args:
            once: of runs that several ranks have, only those of the first.
            among: the numbers that count; None for all.
        """
        shard_rank, block = self.places[rank]
        layout = self.layout if self.num_blocks == 1 else self.layout.of_tensor_rank(block)
        if once and shard_rank >= layout.num_shards:  # nothing is sharded: the first rank has the same
            return []
        runs = []
        for run in layout.runs(min(shard_rank, layout.num_shards - 1), apart=not self.whole_shard):
            if run.index in chosen:
                number = self._block_numbers[run.index][block]
                is_first = number == run.index * self.num_blocks + block
                if (among is None or number in among) and (is_first or not once):
                    runs.append(run._replace(index=number))
        return runs

    def _box_runs(self, rank: int, boxes: BoxesOf, numbers: Iterable[int]) -> list[Run]:
        """The runs in a rank's boxes of the blocks with these numbers."""
        runs = []
        for number in numbers:
            index, block = divmod(number, self.num_blocks)
            frame, offset = self._frames[index][block], 0
            for box in boxes(rank, index):
                runs += cut_runs(number, frame, box, offset)
                offset += box.numel
        return sorted(runs)

    def _by_number(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Memory by the numbers of blocks."""
        return {
            index * self.num_blocks + block: tensor
            for index, tensor in tensors.items()
            for block in range(self.num_blocks)
        }
