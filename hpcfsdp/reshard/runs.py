"""Distributions of tensors as runs, and the moves from one distribution to another. Pure.

A run is consecutive elements of one tensor, in row-major order, without a gap in memory. A flat parameter's shard, a
chunk of rows, a box in the middle of a matrix and a whole tensor are all lists of runs, so one plan moves values
between any two of them.
"""

from __future__ import annotations

import itertools
import math
from bisect import bisect_right
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from hpcfsdp.params.layout import Box, Run


class Move(NamedTuple):
    """Elements of one tensor that go from one memory to another."""

    index: int
    source: int
    """First element within the memory they come from."""
    target: int
    """First element within the memory they go to."""
    numel: int


def cut_runs(index: int, frame: Box, box: Box, offset: int = 0) -> Iterator[Run]:
    """The runs that two blocks of a tensor have in common, in row-major order.

    Args:
        frame: starts are counted in this block, as if it were the tensor.
        box: contiguous in memory of its own, from `offset` on.
    """
    begins = [max(a, b) for a, b in zip(frame.offsets, box.offsets, strict=True)]
    ends = [min(o + s, p + t) for o, s, p, t in zip(*frame, *box, strict=True)]
    sizes = [end - begin for begin, end in zip(begins, ends, strict=True)]
    if any(size <= 0 for size in sizes):
        return
    inner = len(sizes)  # dimensions from here on are whole in both
    while inner and sizes[inner - 1] == frame.sizes[inner - 1] == box.sizes[inner - 1]:
        inner -= 1
    inner = max(0, inner - 1)  # of the innermost one that is not, a run has some
    numel = math.prod(sizes[inner:])
    in_frame, in_box = _row_major(frame.sizes), _row_major(box.sizes)
    start = sum((begin - at) * step for begin, at, step in zip(begins, frame.offsets, in_frame, strict=True))
    offset += sum((begin - at) * step for begin, at, step in zip(begins, box.offsets, in_box, strict=True))
    for place in itertools.product(*map(range, sizes[:inner])):
        there = sum(p * step for p, step in zip(place, in_frame, strict=False))
        here = sum(p * step for p, step in zip(place, in_box, strict=False))
        yield Run(index, start + there, numel, offset + here)


def _row_major(shape: Sequence[int]) -> list[int]:
    return [math.prod(shape[dim + 1 :]) for dim in range(len(shape))]


def intersect(sources: Sequence[Run], targets: Sequence[Run]) -> list[Move]:
    """The moves from `sources` to `targets`, in the order of tensors and elements.

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
                moves.append(Move(source.index, *at, numel))
        if (source.index, source.start + source.numel) <= (target.index, target.start + target.numel):
            i += 1
        else:
            j += 1
    return moves


def _first_to_reach(runs: Sequence[Run], run: Run) -> int:
    """The place of the last run that begins no later than `run` does: those before it end earlier."""
    return max(0, bisect_right(runs, run[:2], key=lambda other: other[:2]) - 1)
