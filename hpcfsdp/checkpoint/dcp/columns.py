"""Exchange columns for rows: ranks with short runs of a tensor send them to each other, and write whole rows.

A rank that has columns of a matrix would write a short run for each row, into places next to those of other ranks.
File systems need a call for each run, and let one rank write at a time.
"""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch

from hpcfsdp import _compat
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import SavePlan, box_blocks
from hpcfsdp.comm import Communicator
from hpcfsdp.params.layout import Box

_SHORT_RUN_BYTES = 64 << 10
"""Runs of so many bytes are written from where they are: a call for each hardly counts."""

_LEAST_BYTES = 1 << 20
"""Of the rows that one rank writes: fewer ranks write rows of a small tensor."""

_MOST_WRITERS = 16
"""Ranks that a part is divided among, on average over the parts of a tensor. Further ones would all send to all others
in small messages, which take the coordinator long to plan: such a tensor is not exchanged."""

_ROUND_BYTES = 16 << 20
"""Most bytes of rows that a rank has in memory at a time, unless its rows of one tensor are more."""


class ItemBox(NamedTuple):
    """What a rank has of a tensor. `tensor` is a number in the plan, `item` one among what the rank saves."""

    tensor: int
    rank: int
    item: int
    box: Box


class SentBox(NamedTuple):
    """Elements that one rank sends to another, or to itself: of the sender's item, or the receiver's rows in the round.

    The first dimension of `within`, counted from the first element of these, stands for all that no part cuts.
    """

    peer: int
    place: int
    within: Box


class RowRange(NamedTuple):
    """Consecutive elements of a tensor that one rank writes, from `start` on, as an array of these sizes."""

    tensor: int
    start: int
    sizes: tuple[int, ...]


@dataclass(frozen=True)
class ExchangeRound:
    """What a rank does in one exchange. The pieces for, and of, each peer are in the same order on both."""

    sent: tuple[SentBox, ...] = ()
    received: tuple[SentBox, ...] = ()
    rows: tuple[RowRange, ...] = ()

    def __reduce__(self) -> tuple[Any, ...]:
        """As numbers: a rank may get tens of thousands of pieces, which would take pickle longer than the exchange."""
        sides = [[_packed(peer, place, *box) for peer, place, box in side] for side in (self.sent, self.received)]
        rows = [_packed(*each) for each in self.rows]
        return _unpacked, tuple(np.fromiter(itertools.chain(*part), np.int64) for part in (*sides, rows))


def _packed(one: int, other: int, *tuples: tuple[int, ...]) -> list[int]:
    return [one, other, len(tuples[0]), *itertools.chain(*tuples)]


def _unpacked(sent: np.ndarray, received: np.ndarray, rows: np.ndarray) -> ExchangeRound:
    def parts(packed: np.ndarray, count: int) -> Iterator[tuple[int, int, list[tuple[int, ...]]]]:
        numbers, at = packed.tolist(), 0
        while at < len(numbers):
            one, other, ndim = numbers[at : at + 3]
            ends = [at + 3 + ndim * n for n in range(count + 1)]
            yield one, other, [tuple(numbers[begin:end]) for begin, end in itertools.pairwise(ends)]
            at = ends[-1]

    sides = [tuple(SentBox(peer, place, Box(*box)) for peer, place, box in parts(side, 2)) for side in (sent, received)]
    return ExchangeRound(*sides, tuple(RowRange(tensor, start, sizes) for tensor, start, [sizes] in parts(rows, 1)))


def columns_of(plan: SavePlan) -> set[int]:
    """Return the tensors that several ranks have in short runs, by their numbers in a plan."""
    blocks, num_tensors = plan.blocks, len(plan.specs)
    numels = blocks["numel"].astype(np.int64) * blocks["count"]
    nbytes = np.bincount(blocks["tensor"], numels * plan.itemsizes[blocks["tensor"]], num_tensors)
    runs = np.bincount(blocks["tensor"], blocks["count"], num_tensors)
    ranks = np.bincount(np.unique(blocks[["tensor", "rank"]])["tensor"], minlength=num_tensors)
    return set(np.flatnonzero((ranks > 1) & (runs > ranks) & (nbytes < runs * _SHORT_RUN_BYTES)).tolist())


def plan_rounds(plan: SavePlan, parts: Iterable[ItemBox]) -> tuple[SavePlan, list[tuple[ExchangeRound, ...]]]:
    """Return a plan in which ranks write rows of tensors, which `parts` tile, and the rounds of each rank before.

    Ranks that have parts of a tensor divide its rows equally. All ranks have equally many rounds. In the new plan a
    rank's blocks of rows follow its other blocks, in the order of its rounds.
    """
    of_tensors: dict[int, list[ItemBox]] = {}
    for part in parts:
        of_tensors.setdefault(part.tensor, []).append(part)
    rounds: list[_Growing] = []
    last, held = [-1] * plan.num_ranks, [0] * plan.num_ranks  # by rank: its last round, and bytes of rows in it
    exchanged, blocks = [], list[np.ndarray]()
    for tensor, of_tensor in sorted(of_tensors.items()):
        cut = _Cut.of(plan.specs[tensor], of_tensor, tensor)
        if cut is None:
            continue
        exchanged.append(tensor)
        nbytes = cut.chunk * cut.row_numel * plan.specs[tensor].itemsize
        number = max(0, *(last[rank] for rank in cut.ranks))
        if any(last[rank] == number and held[rank] + nbytes > _ROUND_BYTES for rank in cut.ranks):
            number += 1
        for rank in cut.ranks:
            held[rank] = nbytes + (held[rank] if last[rank] == number else 0)
            last[rank] = number
        rounds += [defaultdict(lambda: ([], [], [])) for _ in range(number + 1 - len(rounds))]
        blocks += cut.add_to(rounds[number], tensor, of_tensor)
    kept = plan.blocks[~np.isin(plan.blocks["tensor"], exchanged)]
    # A rank's tensors are in the order of its rounds: both ascend.
    made = SavePlan(plan.specs, np.concatenate([kept, *blocks]), plan.links, plan.num_ranks)
    nothing = ExchangeRound()
    return made, [
        tuple(ExchangeRound(*map(tuple, now[rank])) if rank in now else nothing for now in rounds)
        for rank in range(plan.num_ranks)
    ]


_Growing: TypeAlias = defaultdict[int, tuple[list[SentBox], list[SentBox], list[RowRange]]]
"""Of one round, by rank what its ``ExchangeRound`` will have."""


@dataclass(frozen=True)
class _Cut:
    """A tensor in chunks of rows, one for each of some ranks."""

    spec: TensorSpec
    lead: int  # leading dimensions that no part cuts, which count as one, at least 1
    rows: int
    chunk: int  # rows of each rank but for the last one
    ranks: list[int]
    writers: list[int]

    @classmethod
    def of(cls, spec: TensorSpec, parts: Sequence[ItemBox], turn: int) -> _Cut | None:
        """None if parts would have to be divided among too many ranks. In `turn` another rank writes a small tensor."""
        shape, ranks = spec.shape, sorted({part.rank for part in parts})
        cut = [any(part.box.sizes[dim] != size for part in parts) for dim, size in enumerate(shape)]
        lead = max(1, cut.index(True))
        rows = math.prod(shape[:lead])
        count = min(len(ranks), max(1, spec.nbytes // _LEAST_BYTES), rows)
        chunk = -(-rows // count)
        count = -(-rows // chunk)
        writers = [ranks[(n * len(ranks) // count + turn) % len(ranks)] for n in range(count)]
        made = cls(spec, lead, rows, chunk, ranks, writers)
        num_pieces = sum(len(made._chunks_of(made._flat(part.box))) for part in parts)
        return made if num_pieces <= _MOST_WRITERS * len(parts) else None

    @property
    def row_numel(self) -> int:
        return math.prod(self.spec.shape[self.lead :])

    def add_to(self, now: _Growing, tensor: int, parts: Iterable[ItemBox]) -> list[np.ndarray]:
        """Add rows and pieces to a round; return the blocks of the rows."""
        places, blocks = [], []
        for number, rank in enumerate(self.writers):
            begin, end = number * self.chunk, min((number + 1) * self.chunk, self.rows)
            rows = RowRange(tensor, begin * self.row_numel, (end - begin, *self.spec.shape[self.lead :]))
            places.append(len(now[rank][2]))
            now[rank][2].append(rows)
            blocks.append(rows_blocks(self.spec, rows))
            blocks[-1]["tensor"], blocks[-1]["rank"] = tensor, rank
        for part in parts:
            box = self._flat(part.box)
            for number in self._chunks_of(box):
                base = number * self.chunk
                first, end = max(box.offsets[0], base), min(box.offsets[0] + box.sizes[0], base + self.chunk)
                sizes, to = (end - first, *box.sizes[1:]), self.writers[number]
                sent = Box((first - box.offsets[0], *(0 for _ in sizes[1:])), sizes)
                arrived = Box((first - base, *box.offsets[1:]), sizes)
                now[part.rank][0].append(SentBox(to, part.item, sent))
                now[to][1].append(SentBox(part.rank, places[number], arrived))
        return blocks

    def _flat(self, box: Box) -> Box:
        """With one leading dimension."""
        offsets, sizes = box
        first = offsets[0] if self.lead == 1 else 0  # several are cut by no part
        return Box((first, *offsets[self.lead :]), (math.prod(sizes[: self.lead]), *sizes[self.lead :]))

    def _chunks_of(self, box: Box) -> range:
        """Return the chunks with elements of a box."""
        end = box.offsets[0] + box.sizes[0]
        return range(box.offsets[0] // self.chunk, -(-end // self.chunk)) if box.numel else range(0)


def rows_blocks(spec: TensorSpec, rows: RowRange) -> np.ndarray:
    """Return the blocks of rows, of ``BLOCK_DTYPE``; tensor and rank are 0."""
    return box_blocks((spec.numel,), Box((rows.start,), (math.prod(rows.sizes),)), spec.itemsize)


class ColumnExchange:
    """Rounds of one save. Their memory is used again: new pages would take as long as the exchange itself."""

    def __init__(self, comm: Communicator) -> None:
        self._comm = comm
        self._memory: dict[str, torch.Tensor] = {}

    def rows_of(
        self,
        round_: ExchangeRound,
        specs: Sequence[TensorSpec],
        values_of: Callable[[int], np.ndarray],
        agree: Callable[[], AbstractContextManager[None]],
    ) -> list[np.ndarray]:
        """Return the rows of a round, each as an array of its sizes, until the next round. Collective over `comm`.

        Values of an item have the shape of its box. In a context of `agree` all ranks raise what one raises.
        """
        size, rank = self._comm.size, self._comm.rank
        with agree():
            kinds = [schema.numpy_dtype(spec.dtype) for spec in specs]
            rows = self._arrays("rows", [(each.sizes, k) for each, k in zip(round_.rows, kinds, strict=True)])
            targets: list[list[np.ndarray]] = [[] for _ in range(size)]
            for peer, number, within in round_.received:
                targets[peer].append(rows[number][within.slices])
            sources: list[list[np.ndarray]] = [[] for _ in range(size)]
            for item, pieces in itertools.groupby(round_.sent, lambda piece: piece.place):
                values = values_of(item)
                for piece in pieces:
                    behind = values.shape[values.ndim + 1 - len(piece.within.sizes) :]
                    sources[piece.peer].append(values.reshape(-1, *behind)[piece.within.slices])
            _copy(sources[rank], targets[rank])  # what stays here is no message
            sources[rank], targets[rank] = [], []
            sent, places = self._messages("sent", sources)
            _copy(itertools.chain(*sources), places)
            sources.clear()
            received, places = self._messages("received", targets)
        self._comm.all_to_all(received, sent)
        _copy(places, itertools.chain(*targets))
        return rows

    def _messages(
        self, name: str, of_peers: Sequence[Sequence[np.ndarray]]
    ) -> tuple[list[torch.Tensor], list[np.ndarray]]:
        """Return memory for a message of each peer's arrays, uint8, 1-D, and the place of each array in it."""
        places = self._arrays(name, [(array.shape, array.dtype) for of_peer in of_peers for array in of_peer])
        sizes = [sum(array.nbytes for array in of_peer) for of_peer in of_peers]
        return list(self._memory[name][: sum(sizes)].split(sizes)), places

    @_compat.outside_of_modes
    def _arrays(self, name: str, kinds: Sequence[tuple[tuple[int, ...], np.dtype]]) -> list[np.ndarray]:
        """Arrays of these shapes and dtypes, one after the other in the memory `name`."""
        sizes = [math.prod(shape) * dtype.itemsize for shape, dtype in kinds]
        if name not in self._memory or self._memory[name].numel() < sum(sizes):
            self._memory.pop(name, None)  # not both at a time
            self._memory[name] = torch.empty(sum(sizes), dtype=torch.uint8)
        parts = self._memory[name][: sum(sizes)].split(sizes) if sizes else ()
        return [part.numpy().view(dtype).reshape(shape) for part, (shape, dtype) in zip(parts, kinds, strict=True)]


def _copy(sources: Iterable[np.ndarray], targets: Iterable[np.ndarray]) -> None:
    for source, target in zip(sources, targets, strict=True):
        target[...] = source
