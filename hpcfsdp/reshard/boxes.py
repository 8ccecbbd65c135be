"""Boxes and runs of a tensor's elements, and each as the other. Pure.

A box has an offset and a size in each dimension. A run is consecutive elements in row-major order, without a gap in
memory: a flat parameter's shard, a chunk of rows, a box in the middle of a matrix and a whole tensor are lists of runs.
"""

import itertools
import math
from collections.abc import Iterable, Iterator, Sequence
from typing import NamedTuple

import numpy as np

from hpcfsdp.params.layout import Box, Run, contiguous_strides


def whole_box(shape: Sequence[int]) -> Box:
    """Return all of a tensor."""
    return Box((0,) * len(shape), tuple(shape))


def chunk_box(shape: Sequence[int], num_chunks: int, chunk: int) -> Box | None:
    """Return the rows of a chunk along the first dimension, as ``torch.chunk`` and DTensor's ``Shard(0)`` cut.

    The last chunks have fewer rows, or none: None. A tensor without rows is the first chunk.
    """
    rows = -(-shape[0] // num_chunks)
    begin, end = min(chunk * rows, shape[0]), min((chunk + 1) * rows, shape[0])
    if begin == end and (chunk or shape[0]):
        return None
    return Box((begin, *(0 for _ in shape[1:])), (end - begin, *shape[1:]))


def run_boxes(shape: Sequence[int], start: int, numel: int) -> list[Box]:
    """Return the boxes of `numel` consecutive elements of a tensor from `start` on, in row-major order.

    At most two for each dimension: the rest of a row, then of a matrix, and so on, all whole ones, and back.
    """
    if not numel:
        return []
    if not shape:
        return [Box((), ())]
    step = math.prod(shape[1:])
    first, into = divmod(start, step)
    last, left = divmod(start + numel, step)
    if first == last:
        return [_within_row(first, box) for box in run_boxes(shape[1:], into, numel)]
    found = []
    if into:
        found += [_within_row(first, box) for box in run_boxes(shape[1:], into, step - into)]
        first += 1
    if last > first:
        found.append(Box((first, *(0 for _ in shape[1:])), (last - first, *shape[1:])))
    return found + [_within_row(last, box) for box in run_boxes(shape[1:], 0, left)]


def _within_row(row: int, box: Box) -> Box:
    return Box((row, *box.offsets), (1, *box.sizes))


def joined_boxes(shape: Sequence[int], runs: Iterable[tuple[int, int]]) -> list[Box]:
    """Return few boxes with the elements of runs (first element, end), ascending, not overlapping; in that order."""
    found: list[Box] = []
    for begin, end in runs:
        for box in run_boxes(shape, begin, end - begin):
            found.append(box)
            # A box that is completed may join the one before it in turn: a row, then a plane of rows.
            while len(found) > 1 and (joined := _joined(found[-2], found[-1])) is not None:
                found[-2:] = [joined]
    return found


def _joined(left: Box, right: Box) -> Box | None:
    """Return both as one box, if its elements are those of the left one, then of the right one."""
    for dim, (begin, size, after) in enumerate(zip(left.offsets, left.sizes, right.offsets, strict=True)):
        behind = slice(dim + 1, None)
        if begin + size == after and left.offsets[behind] == right.offsets[behind]:
            if left.sizes[behind] != right.sizes[behind]:
                return None
            return Box(left.offsets, (*left.sizes[:dim], size + right.sizes[dim], *left.sizes[behind]))
        if begin != after or size != 1 or right.sizes[dim] != 1:
            return None
    return None


class Levels(NamedTuple):
    """A box as nested repetitions of one run."""

    start: int  # the first element, counted in the whole tensor
    numel: int  # of each run
    repeated: list[tuple[int, int]]  # (how often, how many elements later each time), outermost first

    def starts(self, depth: int) -> np.ndarray:
        """Return where the repetitions of the `depth` outermost levels begin, int64, 1-D, in the order of the box."""
        found = np.array([self.start], np.int64)
        for count, stride in self.repeated[:depth]:
            found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return found


def levels_of(shape: Sequence[int], box: Box) -> Levels:
    """Return the fewest levels that a box with elements has in a tensor of a shape."""
    start, stride, repeated = 0, 1, []
    for whole, begin, size in zip(reversed(shape), reversed(box.offsets), reversed(box.sizes), strict=True):
        start += begin * stride
        if repeated and repeated[-1][0] * repeated[-1][1] == stride:  # goes on where the inner ones end
            repeated[-1] = repeated[-1][0] * size, repeated[-1][1]
        elif size > 1:
            repeated.append((size, stride))
        stride *= whole
    numel = repeated.pop(0)[0] if repeated and repeated[0][1] == 1 else 1
    return Levels(start, numel, repeated[::-1])


def common_runs(index: int, frame: Box, box: Box, offset: int = 0) -> Iterator[Run]:
    """Return the runs that two blocks of a tensor have in common, in row-major order.

    Starts are counted in the block `frame`, as if it were the tensor. The other block is contiguous from `offset` on.
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
    in_frame, in_box = contiguous_strides(frame.sizes), contiguous_strides(box.sizes)
    start = sum((begin - at) * step for begin, at, step in zip(begins, frame.offsets, in_frame, strict=True))
    offset += sum((begin - at) * step for begin, at, step in zip(begins, box.offsets, in_box, strict=True))
    for place in itertools.product(*map(range, sizes[:inner])):
        there = sum(p * step for p, step in zip(place, in_frame, strict=False))
        here = sum(p * step for p, step in zip(place, in_box, strict=False))
        yield Run(index, start + there, numel, offset + here)
