"""How one tensor is cut over ranks, for a rank that is to own all of it. Pure: for any number of imagined ranks.

A rank has boxes of the tensor, one after the other in memory, which other ranks may have, too.
"""

from __future__ import annotations

import abc
import math
from collections.abc import Iterator, Mapping, Sequence
from functools import cached_property
from typing import NamedTuple

import numpy as np

from hpcfsdp.params.layout import Box, FlatLayout
from hpcfsdp.reshard.boxes import run_boxes

Boxes = Sequence[Box]


class Lattice(NamedTuple):
    """Ranks along three dimensions.

    Attributes:
        ranks: int64, replicas x shards x tensor-parallel ranks.
        places: int64, by rank its place in `ranks`.
    """

    ranks: np.ndarray
    places: np.ndarray

    @classmethod
    def of(cls, ranks: np.ndarray) -> Lattice:
        places = np.zeros((ranks.size, 3), np.int64)
        places[ranks.reshape(-1)] = np.stack(np.unravel_index(np.arange(ranks.size), ranks.shape), 1)
        return cls(ranks, places)


class Cut(abc.ABC):
    """The boxes of one tensor on ranks.

    Attributes:
        shape: of the whole.
        view: the shape that boxes are counted in: `shape`, or one dimension with all elements.
    """

    shape: tuple[int, ...]
    view: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @abc.abstractmethod
    def boxes(self, rank: int) -> Boxes:
        """The boxes of a rank; none for one without elements."""

    @abc.abstractmethod
    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        """Ranks with elements, and how many they have, int64 both."""

    @abc.abstractmethod
    def sends(self, rank: int, owner: int) -> bool:
        """Whether `rank`, which has elements, sends them where `owner` is to have all. Of copies one rank sends."""

    @abc.abstractmethod
    def senders(self, owner: int) -> Iterator[tuple[int, Boxes]]:
        """The ranks that send, and what; together, and with the owner's own, all elements once."""

    @abc.abstractmethod
    def copies(self) -> Iterator[tuple[int, Boxes]]:
        """All ranks with elements, and what they have."""

    def is_whole_on(self, rank: int) -> bool:
        """Whether a rank has all elements."""
        return sum(box.numel for box in self.boxes(rank)) == self.numel


class FlatCut(Cut):
    """A parameter of a flat parameter, in runs of elements. Tensor-parallel ranks may have runs of other blocks.

    Of copies, those of the owner's own replica are sent, and of its own tensor-parallel rank where that has the block.
    """

    def __init__(self, layout: FlatLayout, index: int, lattice: Lattice) -> None:
        """
        Args:
            layout: of any tensor-parallel rank.
            index: of the slot.
            lattice: the ranks. With one tensor-parallel rank a block of the layout counts as the whole.
        """
        slot, (self._ranks, self._places) = layout.slots[index], lattice
        self._fqn, self._index, self._layout = slot.fqn, index, layout
        self._has_blocks = self._ranks.shape[2] > 1
        self._is_cut = self._has_blocks and slot.is_cut
        self.shape = slot.whole_shape if self._has_blocks else slot.shape
        self.view = self.shape if self._is_cut else (self.numel,)

    @cached_property
    def _firsts(self) -> list[int]:
        """By tensor-parallel rank the first one with the same block."""
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

    def _lines(self) -> Iterator[tuple[int, np.ndarray, np.ndarray]]:
        """For each tensor-parallel rank the ranks with runs, replicas x runs, and the edges of the runs."""
        for tensor in range(self._ranks.shape[2]):
            first, edges = self._layout_of(tensor).param_edges(self._fqn)
            yield tensor, self._ranks[:, first : first + len(edges) - 1, tensor], edges

    def shares(self) -> tuple[np.ndarray, np.ndarray]:
        found = [(ranks.reshape(-1), np.tile(np.diff(edges), len(ranks))) for _, ranks, edges in self._lines()]
        return np.concatenate([ranks for ranks, _ in found]), np.concatenate([numels for _, numels in found])

    def _line(self, owner: int, block: int) -> int:
        """The tensor-parallel rank that sends a block."""
        tensor = int(self._places[owner][2])
        return tensor if self._firsts[tensor] == block else block

    def sends(self, rank: int, owner: int) -> bool:
        replica, _, tensor = self._places[rank].tolist()
        of_owner = int(self._places[owner][0])
        return rank != owner and replica == of_owner and tensor == self._line(owner, self._firsts[tensor])

    def senders(self, owner: int) -> Iterator[tuple[int, Boxes]]:
        replica = int(self._places[owner][0])
        chosen = {self._line(owner, block) for block in set(self._firsts)}
        for tensor, ranks, edges in self._lines():
            if tensor in chosen:
                for rank, start, end in zip(ranks[replica].tolist(), edges.tolist(), edges[1:].tolist(), strict=False):
                    if rank != owner:
                        yield rank, self._boxes_of(tensor, start, end - start)

    def copies(self) -> Iterator[tuple[int, Boxes]]:
        for tensor, ranks, edges in self._lines():
            starts = edges.tolist()
            for start, end, alike in zip(starts, starts[1:], ranks.T.tolist(), strict=False):
                boxes = self._boxes_of(tensor, start, end - start)
                yield from ((rank, boxes) for rank in alike)


class BlockCut(Cut):
    """A tensor of which each rank has a box, as a ``DTensor``.

    Of copies, the owner's own is sent, or the one at its place among the copies.
    """

    def __init__(self, shape: Sequence[int], boxes: Mapping[int, Box]) -> None:
        """
        Args:
            boxes: by rank, for ranks with elements.
        """
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
        pairs = [(rank, box.numel) for rank, box in self._boxes.items()]
        return np.array(pairs, np.int64).reshape(-1, 2)

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
        for box in self._ranks_of:
            rank = self._sender(box, owner)
            if rank != owner:
                yield rank, [box]

    def copies(self) -> Iterator[tuple[int, Boxes]]:
        for rank, box in self._boxes.items():
            yield rank, [box]
