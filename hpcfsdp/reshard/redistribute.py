"""Values of tensors redistributed over ranks.

A distribution is a list of runs for each rank, so one plan serves shards of flat parameters, chunks, blocks of a mesh
and ranges of a file. Tensor parallelism may divide a parameter into blocks before it is sharded: each block is a tensor
of its own in the plan, so a run stays a run, however the whole parameter is divided.
"""

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

RunsOf = Callable[[int], Sequence[Run]]  # the runs that a rank holds
BoxesOf = Callable[[int, int], Sequence[Box]]  # those of a parameter, one after the other in memory, by rank and slot
BATCH_NUMEL = 1 << 20  # elements of small parameters that travel together: latency counts for less, and memory hardly
Flat = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""Memory by the index of transfers, 1-D each; None, or no entry, for tensors without elements on this rank."""
Views = dict[int, list[torch.Tensor]]  # by the rank that they are sent to, or received from
Finish = Callable[[], None]  # completes what has begun
Memory = Mapping[int, torch.Tensor]  # by slot, 1-D
MemoryOf = Callable[[int], torch.Tensor | None]


class Transfer(NamedTuple):
    """Elements of one tensor that go from one memory to another."""

    index: int
    source: int  # first element within the memory they come from
    target: int  # first element within the memory they go to
    numel: int


@dataclass(frozen=True)
class RedistributePlan:
    """The transfers that one rank takes part in. Made from distributions alone, without a message."""

    kept: list[Transfer]  # from this rank's memory to its own
    sent: list[list[Transfer]]  # by rank; a target offset is one in that rank's memory
    received: list[list[Transfer]]  # by rank; a source offset is one in that rank's memory

    @classmethod
    def make(cls, rank: int, size: int, sources: RunsOf, targets: RunsOf) -> "RedistributePlan":
        """Plan for `rank` of `size`. Every element of `targets` is in `sources` once."""
        mine, wanted = sources(rank), targets(rank)
        sent: list[list[Transfer]] = [[] for _ in range(size)]
        received: list[list[Transfer]] = [[] for _ in range(size)]
        for other in range(size):
            if other != rank:
                sent[other] = intersect(mine, targets(other)) if mine else []
                received[other] = intersect(sources(other), wanted) if wanted else []
        return cls(intersect(mine, wanted), sent, received)

    def parts(self, groups: Iterable[range]) -> Iterator["RedistributePlan"]:
        """Return this plan, one range of tensors after the other; ascending ranges that hold all of them."""
        stops, size, nothing = [group.stop for group in groups], len(self.sent), list[Transfer]()
        everything = [self.kept, *self.sent, *self.received]
        # Most ranks have no transfer in most groups: only those that exist are listed.
        by_group: list[dict[int, list[Transfer]]] = [{} for _ in stops]
        for which, transfers in enumerate(everything):
            for each in transfers:
                by_group[bisect_right(stops, each.index)].setdefault(which, []).append(each)
        for group in by_group:
            lists = [group.get(which, nothing) for which in range(len(everything))]
            yield RedistributePlan(lists[0], lists[1 : 1 + size], lists[1 + size :])


def intersect(sources: Sequence[Run], targets: Sequence[Run]) -> list[Transfer]:
    """Return the transfers from `sources` to `targets`, both in the order of tensors and elements, none twice."""
    if not sources or not targets:
        return []
    found, i, j = [], _first_to_reach(sources, targets[0]), _first_to_reach(targets, sources[0])
    while i < len(sources) and j < len(targets):
        source, target = sources[i], targets[j]
        if source.index == target.index:
            begin = max(source.start, target.start)
            numel = min(source.start + source.numel, target.start + target.numel) - begin
            if numel > 0:
                at = source.offset + begin - source.start, target.offset + begin - target.start
                found.append(Transfer(source.index, *at, numel))
        if (source.index, source.start + source.numel) <= (target.index, target.start + target.numel):
            i += 1
        else:
            j += 1
    return found


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


def exchange(
    comm: Communicator, out: Views, into: Views, dtype: torch.dtype, *, in_place: bool = True, async_op: bool = False
) -> Finish:
    """Send and receive views by rank. Collective over `comm`.

    Values travel in `dtype`, the same on all ranks. A single contiguous view of that dtype is received in its place,
    unless nothing may be (`in_place`); all else is copied through temporary memory. With `async_op` the result is to be
    called once to complete the exchange; without it everything is done at the end.
    """
    if comm.size == 1:
        return all_of(())
    nothing = torch.empty(0, dtype=dtype, device=comm.device)
    inputs = [_packed(out[rank], comm, dtype) if out.get(rank) else nothing for rank in range(comm.size)]
    outputs = [nothing] * comm.size
    for rank, views in into.items():
        kind = views[0].dtype, views[0].device
        direct = in_place and len(views) == 1 and views[0].is_contiguous() and kind == (dtype, comm.device)
        numel = sum(view.numel() for view in views)
        outputs[rank] = views[0].view(-1) if direct else torch.empty(numel, dtype=dtype, device=comm.device)
    work = comm.all_to_all(outputs, inputs, async_op=async_op)

    @torch.no_grad()
    def finish() -> None:
        if work is not None:
            work.wait()
        inputs.clear()  # which had to stay until now
        for rank, views in into.items():
            values = outputs[rank]
            if views[0].data_ptr() != values.data_ptr():
                for view, part in zip(views, values.split([view.numel() for view in views]), strict=True):
                    view.copy_(part.view(view.shape))

    if async_op:
        return finish
    finish()
    return all_of(())


def all_of(finishes: Iterable[Finish]) -> Finish:
    """Join several calls, which begin now, so that they complete as one; of none, nothing is left to complete."""
    begun = list(finishes)

    def finish() -> None:
        for each in begun:
            each()

    return finish


def _packed(views: Sequence[torch.Tensor], comm: Communicator, dtype: torch.dtype) -> torch.Tensor:
    if len(views) == 1:
        return views[0].to(comm.device, dtype).contiguous().view(-1)
    packed = torch.empty(sum(view.numel() for view in views), dtype=dtype, device=comm.device)
    for view, part in zip(views, packed.split([view.numel() for view in views]), strict=True):
        part.view(view.shape).copy_(view)
    return packed


@torch.no_grad()
def redistribute(comm: Communicator, plan: RedistributePlan, source: Flat, target: Flat, dtype: torch.dtype) -> None:
    """Bring values from `source` to `target` on all ranks as planned, in `dtype`. Collective over `comm`."""
    for index, begin, to, numel in plan.kept:
        target[index][to : to + numel].copy_(source[index][begin : begin + numel])
    if comm.size == 1:
        return
    out = {rank: [source[t.index][t.source : t.source + t.numel] for t in sent] for rank, sent in enumerate(plan.sent)}
    into = {
        rank: [target[t.index][t.target : t.target + t.numel] for t in received]
        for rank, received in enumerate(plan.received)
        if received
    }
    exchange(comm, out, into, dtype)


@dataclass(frozen=True)
class ShardedBlocks:
    """The parameters of a layout, sharded over ranks that have each element at least once."""

    comm: Communicator
    places: Sequence[tuple[int, int]]  # for each rank of `comm`, its shard rank and its tensor-parallel rank
    num_blocks: int  # tensor-parallel ranks; 1 if all ranks of `comm` have shards of the same blocks
    layout: FlatLayout  # of this rank
    whole_shard: bool  # whether memory is the whole shard, or for each slot its own run

    @torch.no_grad()
    def gather(self, shards: Memory, boxes: BoxesOf, targets: Memory, dtype: torch.dtype) -> None:
        """Bring parameters from their shards into boxes. Collective over `comm`.

        By slot, the same ones on all ranks, `shards` is the memory of this rank's runs, and `targets` that of its
        boxes, 1-D. Values travel in `dtype`.
        """
        self._redistribute(shards, boxes, shards.get, targets, dtype, is_gather=True)

    @torch.no_grad()
    def scatter(self, source: MemoryOf, boxes: BoxesOf, shards: Memory, dtype: torch.dtype) -> None:
        """Bring parameters from boxes, which have each element once, into their shards. Collective over `comm`.

        `source` returns the memory of this rank's boxes of a slot, 1-D, batch by batch, as it may copy. Else as
        ``gather``.
        """
        self._redistribute(shards, boxes, source, shards, dtype, is_gather=False)

    def _redistribute(
        self, shards: Memory, boxes: BoxesOf, source: MemoryOf, targets: Memory, dtype: torch.dtype, *, is_gather: bool
    ) -> None:
        rank, num_blocks = self.comm.rank, self.num_blocks
        in_shards = self._shard_runs(rank, shards, once=is_gather)
        in_boxes = self._box_runs(rank, boxes, self._numbers(shards))
        # Of other ranks' runs, only those that meet this rank's: there are ranks x slots of them.
        held, boxed = sorted({run.index for run in in_shards}), {run.index for run in in_boxes}
        ends: list[RunsOf] = [
            lambda other: in_shards if other == rank else self._shard_runs(other, shards, once=is_gather, among=boxed),
            lambda other: in_boxes if other == rank else self._box_runs(other, boxes, held),
        ]
        plan = RedistributePlan.make(rank, self.comm.size, *(ends if is_gather else reversed(ends)))
        into = {i * num_blocks + block: tensor for i, tensor in targets.items() for block in range(num_blocks)}
        sizes = [math.prod(slot.whole_shape) for slot in self.layout.slots]  # the same on all ranks
        groups = (range(each.start * num_blocks, each.stop * num_blocks) for each in batches(sizes))
        for part in plan.parts(groups):
            numbers = {transfer.index for transfers in (part.kept, *part.sent) for transfer in transfers}
            memory = {index: source(index) for index in {number // num_blocks for number in numbers}}
            out = {number: memory[number // num_blocks] for number in numbers}
            redistribute(self.comm, part, out, into, dtype)

    @cached_property
    def _frames(self) -> list[Sequence[Box]]:
        """The blocks of the tensor-parallel ranks, by slot."""
        wholes = [[whole_box(slot.shape)] * self.num_blocks for slot in self.layout.slots]
        blocks = [slot.block for slot in self.layout.slots]
        if self.num_blocks == 1:
            return [whole if block is None else [block.box] for whole, block in zip(wholes, blocks, strict=True)]
        return [whole if block is None else block.boxes for whole, block in zip(wholes, blocks, strict=True)]

    @cached_property
    def _block_numbers(self) -> list[list[int]]:
        """The number of each tensor-parallel rank's block in plans, by slot: that of the first rank that has it."""
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
        """Return the runs in a rank's shard of `chosen` slots, `among` these numbers of blocks.

        Of runs that several ranks have, only those of the first if each counts `once`.
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
