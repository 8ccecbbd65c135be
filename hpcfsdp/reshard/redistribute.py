"""Values of tensors redistributed over ranks.

A distribution is a list of runs for each rank, so one plan serves shards of flat parameters, chunks, blocks of a mesh
and ranges of a file. Tensor parallelism may divide a parameter into blocks before it is sharded: each block is a tensor
of its own in the plan, so a run stays a run, however the whole parameter is divided.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Callable, Collection, Container, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.params.layout import Box, FlatLayout, Run
from hpcfsdp.reshard.boxes import common_runs, whole_box

RunsOf = Callable[[int], Sequence[Run]]
"""The runs that a rank holds."""

BATCH_NUMEL = 1 << 20
"""Elements of small parameters that travel together: latency counts for less, and memory hardly."""

Flat = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""Memory by the index of moves, 1-D each; None, or no entry, for tensors without elements on this rank."""


class Transfer(NamedTuple):
    """Elements of one tensor that go from one memory to another."""

    index: int
    source: int
    """First element within the memory they come from."""
    target: int
    """First element within the memory they go to."""
    numel: int


@dataclass(frozen=True)
class RedistributePlan:
    """The moves that one rank takes part in. Made from distributions alone, without a message.

    Attributes:
        kept: from this rank's memory to its own.
        sent: by rank; a target offset is one in that rank's memory.
        received: by rank; a source offset is one in that rank's memory.
    """

    kept: list[Transfer]
    sent: list[list[Transfer]]
    received: list[list[Transfer]]

    @classmethod
    def make(cls, rank: int, size: int, sources: RunsOf, targets: RunsOf) -> RedistributePlan:
        """Plan for `rank` of `size`. Every element of `targets` is in `sources` once."""
        mine, wanted = sources(rank), targets(rank)
        sent: list[list[Transfer]] = [[] for _ in range(size)]
        received: list[list[Transfer]] = [[] for _ in range(size)]
        for other in range(size):
            if other != rank:
                sent[other] = intersect(mine, targets(other)) if mine else []
                received[other] = intersect(sources(other), wanted) if wanted else []
        return cls(intersect(mine, wanted), sent, received)

    def parts(self, groups: Iterable[range]) -> Iterator[RedistributePlan]:
        """Return this plan, one range of tensors after the other; ascending ranges that hold all of them."""
        stops, size, nothing = [group.stop for group in groups], len(self.sent), list[Transfer]()
        everything = [self.kept, *self.sent, *self.received]
        # Most ranks have no move in most groups: only moves that exist are listed.
        cuts: list[dict[int, list[Transfer]]] = [{} for _ in stops]
        for which, moves in enumerate(everything):
            for step in moves:
                cuts[bisect_right(stops, step.index)].setdefault(which, []).append(step)
        for cut in cuts:
            lists = [nothing] * len(everything)
            for which, moves in cut.items():
                lists[which] = moves
            yield RedistributePlan(lists[0], lists[1 : 1 + size], lists[1 + size :])


def intersect(sources: Sequence[Run], targets: Sequence[Run]) -> list[Transfer]:
    """Return the moves from `sources` to `targets`, in the order of tensors and elements.

    Both are in that order, and neither has an element twice. Takes time in proportion to the runs of both where they
    overlap.
    """
    if not sources or not targets:
        return []
    moves, i, j = [], _first_to_reach(sources, targets[0]), _first_to_reach(targets, sources[0])
    while i < len(sources) and j < len(targets):
        source, target = sources[i], targets[j]
        if source.index == target.index:
            begin = max(source.start, target.start)
            numel = min(source.start + source.numel, target.start + target.numel) - begin
            if numel > 0:
                at = source.offset + begin - source.start, target.offset + begin - target.start
                moves.append(Transfer(source.index, *at, numel))
        if (source.index, source.start + source.numel) <= (target.index, target.start + target.numel):
            i += 1
        else:
            j += 1
    return moves


def _first_to_reach(runs: Sequence[Run], run: Run) -> int:
    """Return the place of the last run that begins no later than `run` does: those before it end earlier."""
    return max(0, bisect_right(runs, run[:2], key=lambda other: other[:2]) - 1)


def batches(sizes: Sequence[int], limit: int | None = None) -> list[range]:
    """Return ranges of consecutive tensors of at most `limit` elements (``BATCH_NUMEL``), or of one larger tensor."""
    limit = BATCH_NUMEL if limit is None else limit
    found, begin, held = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and held + size > limit:
            found.append(range(begin, index))
            begin, held = index, 0
        held += size
    return [*found, range(begin, len(sizes))] if sizes else []


@torch.no_grad()
def redistribute(comm: Communicator, plan: RedistributePlan, source: Flat, target: Flat, dtype: torch.dtype) -> None:
    """Collective over `comm`. Bring values from `source` to `target` on all ranks as planned.

    A single run of the right dtype and device is sent from, or received in, its place. All else is copied through
    temporary memory.

    Args:
        source: of any dtype, contiguous or not.
        target: of `dtype` where it is received in place; any other is converted to.
        dtype: in which values travel, the same on all ranks.
    """
    for index, begin, to, numel in plan.kept:
        target[index][to : to + numel].copy_(source[index][begin : begin + numel])
    if comm.size == 1:
        return
    nothing = torch.empty(0, dtype=dtype, device=comm.device)
    outputs = [_receive_buffer(target, moves, comm, dtype, nothing) for moves in plan.received]
    comm.all_to_all(outputs, [_packed(source, moves, comm, dtype, nothing) for moves in plan.sent])
    for moves, arrived in zip(plan.received, outputs, strict=True):
        _unpack(target, moves, arrived)


def _packed(
    source: Flat, moves: list[Transfer], comm: Communicator, dtype: torch.dtype, nothing: torch.Tensor
) -> torch.Tensor:
    if not moves:
        return nothing
    if len(moves) == 1:
        index, begin, _, numel = moves[0]
        return source[index][begin : begin + numel].to(comm.device, dtype).contiguous()
    packed, at = torch.empty(sum(m.numel for m in moves), dtype=dtype, device=comm.device), 0
    for index, begin, _, numel in moves:
        packed[at : at + numel].copy_(source[index][begin : begin + numel])
        at += numel
    return packed


def _receive_buffer(
    target: Flat, moves: list[Transfer], comm: Communicator, dtype: torch.dtype, nothing: torch.Tensor
) -> torch.Tensor:
    """Return the memory to receive in: the place of a single run, if it fits."""
    if not moves:
        return nothing
    index, _, begin, numel = moves[0]
    if len(moves) == 1 and target[index].device == comm.device and target[index].dtype == dtype:
        return target[index][begin : begin + numel]
    return torch.empty(sum(m.numel for m in moves), dtype=dtype, device=comm.device)


def _unpack(target: Flat, moves: list[Transfer], arrived: torch.Tensor) -> None:
    at = 0
    for index, _, begin, numel in moves:
        place, values = target[index][begin : begin + numel], arrived[at : at + numel]
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
        at += numel


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
        plan = RedistributePlan.make(
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
        plan = RedistributePlan.make(
            rank,
            self.comm.size,
            lambda other: mine if other == rank else self._box_runs(other, boxes, asked),
            lambda other: wanted if other == rank else self._shard_runs(other, shards, once=False, among=given),
        )
        self._move(plan, source, self._by_number(shards), dtype)

    def _move(
        self,
        plan: RedistributePlan,
        source: Callable[[int], torch.Tensor | None],
        targets: Mapping[int, torch.Tensor],
        dtype: torch.dtype,
    ) -> None:
        sizes = [math.prod(slot.whole_shape) for slot in self.layout.slots]  # the same on all ranks
        groups = (range(each.start * self.num_blocks, each.stop * self.num_blocks) for each in batches(sizes))
        for part in plan.parts(groups):
            numbers = {step.index for steps in (part.kept, *part.sent) for step in steps}
            memory = {index: source(index) for index in {number // self.num_blocks for number in numbers}}
            redistribute(
                self.comm, part, {number: memory[number // self.num_blocks] for number in numbers}, targets, dtype
            )

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
        """Return the numbers of the different blocks of `chosen` slots that have elements."""
        return [
            number
            for index in chosen
            for block, number in enumerate(self._block_numbers[index])
            if number == index * self.num_blocks + block and self._frames[index][block].numel
        ]

    def _shard_runs(
        self, rank: int, chosen: Collection[int], *, once: bool, among: Container[int] | None = None
    ) -> list[Run]:
        """Return the runs in a rank's shard of `chosen` slots, by the numbers of their blocks.

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
        """Return the runs in a rank's boxes of the blocks with these numbers."""
        runs = []
        for number in numbers:
            index, block = divmod(number, self.num_blocks)
            frame, offset = self._frames[index][block], 0
            for box in boxes(rank, index):
                runs += common_runs(number, frame, box, offset)
                offset += box.numel
        return sorted(runs)

    def _by_number(self, tensors: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return memory by the numbers of blocks."""
        return {
            index * self.num_blocks + block: tensor
            for index, tensor in tensors.items()
            for block in range(self.num_blocks)
        }
