"""Columns exchanged for rows: ranks with short runs of a tensor send them to each other, and write whole rows.

A rank that has columns of a matrix would write a short run for each row, into places next to those of other ranks.
File systems need a call for each run, and let one rank write at a time.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.save_plan import BLOCK_DTYPE, SavePlan, box_blocks
from hpcfsdp.comm import Communicator
from hpcfsdp.flat.layout import Box
from hpcfsdp.reshard.boxes import chunk_box

_SHORT_RUN_BYTES = 64 << 10
"""Runs of so many bytes are written from where they are: a call for each hardly counts."""

_ROUND_BYTES = 64 << 20
"""Most bytes of rows that a rank has in memory at a time, unless its rows of one tensor are more."""


class Part(NamedTuple):
    """What a rank has of a tensor. `tensor` is a number in the plan, `item` one among what the rank saves."""

    tensor: int
    rank: int
    item: int
    box: Box


class Piece(NamedTuple):
    """Elements that one rank sends to another, or to itself.

    Attributes:
        peer: the other rank.
        place: of the sender its item, of the receiver the number of the rows in the round.
        within: the elements, counted from the first one of the item or of the rows.
    """

    peer: int
    place: int
    within: Box


class Rows(NamedTuple):
    """Rows of a tensor that one rank writes."""

    tensor: int
    box: Box


@dataclass(frozen=True)
class Round:
    """What a rank does in one exchange. The pieces for, and of, each peer are in the same order on both."""

    sent: tuple[Piece, ...]
    received: tuple[Piece, ...]
    rows: tuple[Rows, ...]


def columns_of(plan: SavePlan) -> set[int]:
    """The tensors that lie on several ranks in short runs, by their numbers in a plan."""
    blocks = plan.blocks
    nbytes = blocks["numel"].astype(np.int64) * plan.itemsizes[blocks["tensor"]]
    short = blocks["tensor"][(blocks["count"] > 1) & (nbytes < _SHORT_RUN_BYTES)]
    num_ranks = np.bincount(np.unique(blocks[["tensor", "rank"]])["tensor"])
    return {tensor for tensor in np.unique(short).tolist() if num_ranks[tensor] > 1}


def plan_rounds(plan: SavePlan, parts: Iterable[Part]) -> tuple[SavePlan, list[tuple[Round, ...]]]:
    """A plan in which ranks write rows of tensors, and the rounds of each rank before. Pure.

    The ranks that have parts of a tensor divide its rows equally. All ranks have equally many rounds. In the new plan
    a rank's blocks of rows follow its other blocks, in the order of its rounds.

    Args:
        parts: of the tensors to exchange, which they tile.
    """
    rounds: list[list[_Growing]] = []
    blocks: list[np.ndarray] = []
    held = _ROUND_BYTES + 1
    found: dict[int, list[Part]] = {}
    for part in parts:
        found.setdefault(part.tensor, []).append(part)
    for tensor, of_tensor in sorted(found.items()):
        spec, ranks = plan.specs[tensor], sorted({part.rank for part in of_tensor})
        boxes = [chunk_box(spec.shape, len(ranks), number) for number in range(len(ranks))]
        step = boxes[0].sizes[0] * spec.nbytes // spec.shape[0]
        if held + step > _ROUND_BYTES:
            rounds.append([_Growing() for _ in range(plan.num_ranks)])
            held = 0
        held += step
        now, places = rounds[-1], {}
        for rank, box in zip(ranks, boxes, strict=True):
            if box is not None:
                places[rank] = len(now[rank].rows)
                now[rank].rows.append(Rows(tensor, box))
                blocks.append(box_blocks(spec.shape, box, spec.itemsize))
                blocks[-1]["tensor"], blocks[-1]["rank"] = tensor, rank
        for part in of_tensor:
            begin, end = part.box.offsets[0], part.box.offsets[0] + part.box.sizes[0]
            chunk = boxes[0].sizes[0]
            for number in range(begin // chunk, -(-end // chunk)) if part.box.numel else ():
                first, stop = max(begin, number * chunk), min(end, (number + 1) * chunk)
                to = ranks[number]
                sizes = (stop - first, *part.box.sizes[1:])
                sent = Box((first - begin, *(0 for _ in sizes[1:])), sizes)
                arrived = Box((first - number * chunk, *part.box.offsets[1:]), sizes)
                now[part.rank].sent.append(Piece(to, part.item, sent))
                now[to].received.append(Piece(part.rank, places[to], arrived))
    kept = plan.blocks[~np.isin(plan.blocks["tensor"], list(found))]
    made = SavePlan(plan.specs, np.concatenate([kept, *blocks]).astype(BLOCK_DTYPE), plan.links, plan.num_ranks)
    return made, [tuple(of_round[rank].done() for of_round in rounds) for rank in range(plan.num_ranks)]


class _Growing:
    """A ``Round`` in the making."""

    def __init__(self) -> None:
        self.sent: list[Piece] = []
        self.received: list[Piece] = []
        self.rows: list[Rows] = []

    def done(self) -> Round:
        return Round(tuple(self.sent), tuple(self.received), tuple(self.rows))


def exchange(
    comm: Communicator,
    round_: Round,
    specs: Sequence[TensorSpec],
    values_of: Callable[[int], np.ndarray],
    agree: Callable[[], AbstractContextManager[None]],
) -> list[np.ndarray]:
    """Collective over `comm`. The rows of a round, each as an array of the shape of its box.

    Args:
        specs: of the tensors of the round's rows.
        values_of: the values of an item, of the shape of its box, as ``schema.numpy_dtype`` has them.
        agree: makes a context after which all ranks raise what one has raised.
    """
    with agree():
        sources: list[list[np.ndarray]] = [[] for _ in range(comm.size)]
        for item, pieces in itertools.groupby(round_.sent, lambda piece: piece.place):
            values = values_of(item)
            for piece in pieces:
                sources[piece.peer].append(values[piece.within.slices])
        sent, places = zip(*map(_message, sources), strict=True)
        for place, source in zip(itertools.chain(*places), itertools.chain(*sources), strict=True):
            place[...] = source
        sources.clear()
        rows = [
            np.empty(box.sizes, schema.numpy_dtype(spec.dtype))
            for (_, box), spec in zip(round_.rows, specs, strict=True)
        ]
        targets: list[list[np.ndarray]] = [[] for _ in range(comm.size)]
        for peer, number, within in round_.received:
            targets[peer].append(rows[number][within.slices])
        received, places = zip(*map(_message, targets), strict=True)
    comm.all_to_all(received, sent)
    for target, place in zip(itertools.chain(*targets), itertools.chain(*places), strict=True):
        target[...] = place
    return rows


def _message(arrays: Sequence[np.ndarray]) -> tuple[torch.Tensor, list[np.ndarray]]:
    """Memory for a message of arrays like these, uint8, 1-D, and the place of each in it."""
    ends = list(itertools.accumulate((array.nbytes for array in arrays), initial=0))
    message = torch.empty(ends[-1], dtype=torch.uint8)
    data = message.numpy()
    return message, [
        data[begin:end].view(array.dtype).reshape(array.shape)
        for (begin, end), array in zip(itertools.pairwise(ends), arrays, strict=True)
    ]
