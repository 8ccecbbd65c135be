"""Tensors that one rank owns whole: how ranks share them, which rank owns which, and their values moved there and back.

All but the exchange is pure, for any number of imagined ranks.
"""

import abc
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np
import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.params.layout import Box, FlatLayout
from hpcfsdp.reshard.boxes import run_boxes
from hpcfsdp.reshard.redistribute import Finish, Views, all_of, batches, exchange

Boxes = Sequence[Box]


class RanksByDim(NamedTuple):
    """Ranks along three dimensions."""

    ranks: np.ndarray  # int64, replicas x shards x tensor-parallel ranks
    places: np.ndarray  # int64, by rank its place in `ranks`

    @classmethod
    def of(cls, ranks: np.ndarray) -> "RanksByDim":
        places = np.zeros((ranks.size, 3), np.int64)
        places[ranks.reshape(-1)] = np.stack(np.unravel_index(np.arange(ranks.size), ranks.shape), 1)
        return cls(ranks, places)


class Sharding(abc.ABC):
    """The boxes of one tensor on ranks."""

    shape: tuple[int, ...]  # of the whole
    view: tuple[int, ...]  # the shape that boxes are counted in: `shape`, or one dimension with all elements

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @abc.abstractmethod
    def boxes(self, rank: int) -> Boxes:
        """Return the boxes of a rank; none for one without elements."""

    @abc.abstractmethod
    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Return ranks with elements, and how many they have, int64 both."""

    @abc.abstractmethod
    def sends(self, rank: int, owner: int) -> bool:
        """Return whether `rank`, which has elements, sends them to `owner`. Of ranks with copies one sends."""

    @abc.abstractmethod
    def senders(self, owner: int) -> Iterator[tuple[int, Boxes]]:
        """Return the ranks that send, and what; together, and with the owner's own, all elements once."""

    @abc.abstractmethod
    def copies(self) -> Iterator[tuple[int, Boxes]]:
        """Return all ranks with elements, and what they have."""

    def is_whole_on(self, rank: int) -> bool:
        """Return whether a rank has all elements."""
        return sum(box.numel for box in self.boxes(rank)) == self.numel


class FlatSharding(Sharding):
    """A parameter of a flat parameter, in runs of elements. Tensor-parallel ranks may have runs of other blocks.

    Of copies, those of the owner's own replica are sent, and of its own tensor-parallel rank where that has the block.
    """

    def __init__(self, layout: FlatLayout, index: int, ranks_by_dim: RanksByDim) -> None:
        """Take a slot of the layout of any tensor-parallel rank. If there is but one, a block counts as the whole."""
        slot, (self._ranks, self._places) = layout.slots[index], ranks_by_dim
        self._fqn, self._index, self._layout = slot.fqn, index, layout
        self._has_blocks = self._ranks.shape[2] > 1
        self._is_cut = self._has_blocks and slot.is_cut
        self.shape = slot.whole_shape if self._has_blocks else slot.shape
        self.view = self.shape if self._is_cut else (self.numel,)

    @cached_property
    def _firsts(self) -> list[int]:
        """The first tensor-parallel rank with the same block, by tensor-parallel rank."""
        block, size = self._layout.slots[self._index].block, self._ranks.shape[2]
        if block is None or not self._has_blocks:
            return [0] * size
        return [block.boxes.index(box) for box in block.boxes]

    def _layout_of(self, tensor: int) -> FlatLayout:
        return self._layout.of_tensor_rank(tensor) if self._has_blocks else self._layout

    def _boxes_of(self, tensor: int, start: int, numel: int) -> Boxes:
        if not self._is_cut:
            return [Box((start,), (numel,))]
        block = self._layout.slots[self._index].block
        assert block is not None
        offsets, sizes = block.boxes[tensor]
        return [
            Box(tuple(map(sum, zip(offsets, box.offsets, strict=True))), box.sizes)
            for box in run_boxes(sizes, start, numel)
        ]

    def boxes(self, rank: int) -> Boxes:
        _, shard, tensor = self._places[rank].tolist()
        run = self._layout_of(tensor).param_run(self._fqn, shard)
        return [] if run is None else self._boxes_of(tensor, run.start, run.numel)

    def _runs(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """Yield for each tensor-parallel rank the ranks with runs, replicas x runs, and the edges of the runs."""
        for tensor in range(self._ranks.shape[2]):
            first, edges = self._layout_of(tensor).param_edges(self._fqn)
            yield tensor, self._ranks[:, first : first + len(edges) - 1, tensor], edges

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        found = [(ranks.reshape(-1), np.tile(np.diff(edges), len(ranks))) for _, ranks, edges in self._runs()]
        return np.concatenate([ranks for ranks, _ in found]), np.concatenate([numels for _, numels in found])

    def _sender(self, owner: int, block: int) -> int:
        """Return the tensor-parallel rank that sends a block."""
        tensor = int(self._places[owner][2])
        return tensor if self._firsts[tensor] == block else block

    def sends(self, rank: int, owner: int) -> bool:
        replica, _, tensor = self._places[rank].tolist()
        of_owner = int(self._places[owner][0])
        return rank != owner and replica == of_owner and tensor == self._sender(owner, self._firsts[tensor])

    def senders(self, owner: int) -> Iterator[tuple[int, Boxes]]:
        replica = int(self._places[owner][0])
        chosen = {self._sender(owner, block) for block in set(self._firsts)}
        for tensor, ranks, edges in self._runs():
            if tensor in chosen:
                for rank, start, end in zip(ranks[replica].tolist(), edges.tolist(), edges[1:].tolist(), strict=False):
                    if rank != owner:
                        yield rank, self._boxes_of(tensor, start, end - start)

    def copies(self) -> Iterator[tuple[int, Boxes]]:
        for tensor, ranks, edges in self._runs():
            starts = edges.tolist()
            for start, end, alike in zip(starts, starts[1:], ranks.T.tolist(), strict=False):
                boxes = self._boxes_of(tensor, start, end - start)
                yield from ((rank, boxes) for rank in alike)


class BlockSharding(Sharding):
    """A tensor of which each rank has a box, as a ``DTensor``. Of copies, the owner's is sent, or that at its place."""

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Box]) -> None:
        """Take the boxes by rank, of ranks with elements."""
        self.shape = self.view = tuple(shape)
        self._boxes = boxes

    @cached_property
    def _ranks_of(self) -> dict[Box, list[int]]:
        found: dict[Box, list[int]] = {}
        for rank, box in sorted(self._boxes.items()):
            found.setdefault(box, []).append(rank)
        return found

    def boxes(self, rank: int) -> Boxes:
        return [self._boxes[rank]] if rank in self._boxes else []

    @cached_property
    def _shares(self) -> np.ndarray:
        return np.array([(rank, box.numel) for rank, box in self._boxes.items()], np.int64).reshape(-1, 2)

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        return self._shares[:, 0], self._shares[:, 1]

    def _sender(self, box: Box, owner: int) -> int:
        alike = self._ranks_of[box]
        if owner in alike:
            return owner
        own = self._ranks_of.get(self._boxes.get(owner, box), [])
        place = own.index(owner) if owner in own else 0
        return alike[place % len(alike)]

    def sends(self, rank: int, owner: int) -> bool:
        return rank != owner and self._sender(self._boxes[rank], owner) == rank

    def senders(self, owner: int) -> Iterator[tuple[int, Boxes]]:
        found = ((self._sender(box, owner), [box]) for box in self._ranks_of)
        return (pair for pair in found if pair[0] != owner)

    def copies(self) -> Iterator[tuple[int, Boxes]]:
        return ((rank, [box]) for rank, box in self._boxes.items())


SLACK = 0.05  # share of the mean load by which a rank may exceed it with tensors that it has most of already


def choose_owners(shardings: Sequence[Sharding], costs: Sequence[float], size: int, move_cost: float) -> list[int]:
    """Return the owners of tensors among `size` ranks: each has its `costs` there, each element that moves `move_cost`.

    First each tensor, the most expensive ones before, stays with the rank that has most of it, unless that rank would
    have more than its share of the cost. The rest go one by one to the rank that is done first.
    """
    owners, loads = [0] * len(shardings), np.zeros(size)
    limit = (1 + SLACK) * sum(costs) / size
    left = []
    for index in sorted(range(len(shardings)), key=lambda index: -costs[index]):  # sorted() is stable
        ranks, numels = shardings[index].shares()
        most = int(ranks[numels.argmax()]) if len(ranks) else 0
        if loads[most] + costs[index] <= limit:
            owners[index] = most
            loads[most] += costs[index]
        else:
            left.append((index, ranks, numels))
    for index, ranks, numels in left:
        idle = int(loads.argmin())
        candidates, has = np.append(ranks, idle), np.append(numels, numels[ranks == idle].sum())
        ends = loads[candidates] + costs[index] + move_cost * (shardings[index].numel - has)
        best = int(candidates[np.lexsort((candidates, ends))[0]])
        owners[index] = best
        loads[best] += costs[index] + move_cost * float(shardings[index].numel - has[candidates == best][0])
    return owners


BATCH_NUMEL = 1 << 22
"""Elements for each rank that travel together: a few large messages, and little memory beside the tensors."""

TensorOf = Callable[[int], torch.Tensor]  # the memory of a tensor by its number


class OwnerExchange:
    """What this rank sends and receives between shards and owners. Planned without a message."""

    def __init__(self, comm: Communicator, shardings: Sequence[Sharding], owners: Sequence[int]) -> None:
        """Take the ranks, by which `shardings` and the `owners` of tensors number them."""
        self.comm, self.shardings, self.owners = comm, shardings, owners
        rank = comm.rank
        self._own = [sharding.boxes(rank) for sharding in shardings]
        self._has = {index for index, boxes in enumerate(self._own) if boxes}
        self._senders: dict[int, list[tuple[int, Boxes]]] = {}
        self._copies: dict[int, list[tuple[int, Boxes]]] = {}
        self._sends: set[int] = set()
        for index, (sharding, owner) in enumerate(zip(shardings, owners, strict=True)):
            if owner == rank:
                self._senders[index] = list(sharding.senders(rank))
                self._copies[index] = [pair for pair in sharding.copies() if pair[0] != rank]
            elif index in self._has and sharding.sends(rank, owner):
                self._sends.add(index)

    def numel_here(self, index: int) -> int:
        """Return elements of a tensor in this rank's shard."""
        return sum(box.numel for box in self._own[index])

    def owns(self, index: int) -> bool:
        return self.owners[index] == self.comm.rank

    def stays(self, index: int) -> bool:
        """Return whether no element of a tensor moves, the same on all ranks."""
        owner = self.owners[index]
        return self.shardings[index].is_whole_on(owner) and len(self.shardings[index].shares()[0]) <= 1

    @torch.no_grad()
    def gather(
        self, chosen: Sequence[int], shard: TensorOf, whole: TensorOf, dtype: torch.dtype, *, async_op: bool = False
    ) -> Finish:
        """Bring `chosen` tensors from their shards to their owners. Collective over `comm`. Return what completes it.

        Their numbers are ascending, and the same on all ranks. `shard` returns this rank's elements of a tensor, if it
        has some, in `dtype`, in which they travel: 1-D, box after box, or of the shape of its only box. `whole` returns
        contiguous memory for a tensor that it owns, which may be that of the shard. Without `async_op` all is done at
        the end; with it the result is to be called once.
        """
        return self._exchange(chosen, shard, whole, dtype, is_gather=True, async_op=async_op)

    @torch.no_grad()
    def scatter(
        self, chosen: Sequence[int], whole: TensorOf, shard: TensorOf, dtype: torch.dtype, *, async_op: bool = False
    ) -> Finish:
        """Bring tensors from their owners into all shards. Collective over `comm`. The rest as for ``gather``."""
        return self._exchange(chosen, shard, whole, dtype, is_gather=False, async_op=async_op)

    def _exchange(
        self,
        chosen: Sequence[int],
        shard: TensorOf,
        whole: TensorOf,
        dtype: torch.dtype,
        *,
        is_gather: bool,
        async_op: bool,
    ) -> Finish:
        finishes = []
        for group in batches([self.shardings[index].numel for index in chosen], BATCH_NUMEL * self.comm.size):
            part = chosen[group.start : group.stop]
            of_shards, of_owners = self._views_by_rank(part, shard, whole, is_gather)
            for view, own in self._kept(part, shard, whole):
                target, source = (view, own) if is_gather else (own, view)
                target.copy_(source)
            ends = (of_shards, of_owners) if is_gather else (of_owners, of_shards)
            # Shards may be in memory that ranks share: no message is received there.
            finishes.append(exchange(self.comm, *ends, dtype, in_place=is_gather, async_op=async_op))
        return all_of(finishes)

    def _views_by_rank(
        self, part: Sequence[int], shard: TensorOf, whole: TensorOf, is_gather: bool
    ) -> tuple[Views, Views]:
        """Return views of this rank's shards by the owner, and of the tensors that it owns by the other rank."""
        of_shards: Views = {}
        of_owners: Views = {}
        peers, taking_part = (self._senders, self._sends) if is_gather else (self._copies, self._has)
        for index in part:
            if self.owns(index):
                for rank, boxes in peers[index]:
                    of_owners.setdefault(rank, []).extend(self._views(index, whole(index), boxes))
            elif index in taking_part:
                of_shards.setdefault(self.owners[index], []).extend(self._own_views(index, shard(index)))
        return of_shards, of_owners

    def _views(self, index: int, whole: torch.Tensor, boxes: Boxes) -> list[torch.Tensor]:
        seen = whole.detach().view(self.shardings[index].view)
        return [seen[box.slices] for box in boxes]

    def _own_views(self, index: int, shard: torch.Tensor) -> list[torch.Tensor]:
        boxes = self._own[index]
        if len(boxes) == 1:
            return [shard.view(boxes[0].sizes)]
        parts = shard.view(-1).split([box.numel for box in boxes])
        return [part.view(box.sizes) for part, box in zip(parts, boxes, strict=True)]

    def _kept(
        self, part: Sequence[int], shard: TensorOf, whole: TensorOf
    ) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
        """Return views of tensors that this rank owns, and of its shards, for the same elements in different memory."""
        for index in part:
            if self.owns(index) and index in self._has:
                views = self._views(index, whole(index), self._own[index])
                for view, own in zip(views, self._own_views(index, shard(index)), strict=True):
                    if view.data_ptr() != own.data_ptr():
                        yield view, own
