"""Runs of a tensor's elements as boxes of its dimensions, which is how HDF5 selects elements. Pure."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TypeAlias

import h5py

Bounds: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""First element and end along each dimension."""


def boxes_of(shape: tuple[int, ...], runs: Iterable[tuple[int, int]]) -> list[Bounds]:
    """Few boxes that hold these elements; passing through them one after the other is the order of the runs.

    Args:
        shape: of the tensor, of at least one dimension and one element.
        runs: (first element, end), in row-major order, ascending and not overlapping.
    """
    found: list[Bounds] = []
    for begin, end in runs:
        for box in _boxes_of_run(shape, begin, end):
            found.append(box)
            # A box that is completed may join the one before it in turn: a row, then a plane of rows.
            while len(found) > 1 and (joined := _joined(found[-2], found[-1])) is not None:
                found[-2:] = [joined]
    return _settled(found)


def _settled(boxes: list[Bounds]) -> list[Bounds]:
    """Join neighbours until none is left that can be."""
    while True:
        found: list[Bounds] = []
        for box in boxes:
            joined = _joined(found[-1], box) if found else None
            if joined is None:
                found.append(box)
            else:
                found[-1] = joined
        if len(found) == len(boxes):
            return found
        boxes = found


def _boxes_of_run(shape: tuple[int, ...], begin: int, end: int) -> list[Bounds]:
    """At most twice as many boxes as there are dimensions, less one."""
    if begin == end:
        return []
    if len(shape) == 1:
        return [((begin,), (end,))]
    inner = math.prod(shape[1:])
    (first, head), (last, tail) = divmod(begin, inner), divmod(end, inner)
    if first == last:
        return _in_row(shape, first, head, tail)
    found: list[Bounds] = []
    if head:
        found += _in_row(shape, first, head, inner)
        first += 1
    if first < last:
        found.append(((first, *(0 for _ in shape[1:])), (last, *shape[1:])))
    if tail:
        found += _in_row(shape, last, 0, tail)
    return found


def _in_row(shape: tuple[int, ...], row: int, begin: int, end: int) -> list[Bounds]:
    return [((row, *low), (row + 1, *high)) for low, high in _boxes_of_run(shape[1:], begin, end)]


def _joined(left: Bounds, right: Bounds) -> Bounds | None:
    """Both as one box, if passing through it passes through the left one first and then the right one."""
    for dim, (end, begin) in enumerate(zip(left[1], right[0], strict=True)):
        behind = slice(dim + 1, None)
        if end == begin and left[0][behind] == right[0][behind] and left[1][behind] == right[1][behind]:
            return (left[0], right[1]) if left[0][:dim] == right[0][:dim] else None
        if left[1][dim] - left[0][dim] != 1 or left[0][dim] != right[0][dim] or right[1][dim] != left[1][dim]:
            return None
    return None


def numel_of(box: Bounds) -> int:
    """Elements of a box."""
    return math.prod(end - begin for begin, end in zip(*box, strict=True))


def select(space: h5py.h5s.SpaceID, boxes: Iterable[Bounds]) -> None:
    """Select the boxes, and nothing else, of a data space of as many dimensions."""
    space.select_none()
    for begins, ends in boxes:
        sizes = tuple(end - begin for begin, end in zip(begins, ends, strict=True))
        space.select_hyperslab(begins, (1,) * len(begins), None, sizes, op=h5py.h5s.SELECT_OR)
