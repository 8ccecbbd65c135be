"""Whether blocks make up a tensor: each element in one of them, none in two.

The blocks are compared with the whole by their corners. The function that counts the blocks with an element is a sum of
products of steps, and is known from where it steps, and by how much: at each corner of a block, up or down.
Blocks tile a tensor when these steps add up to those of the tensor. That takes sorting the corners once, whatever the
order of the blocks and the way in which they are cut; and of steps that are left over, the first in row-major order is
the first element that is in no block, or in several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Block(Protocol):
    """The begin and the size of a block in each dimension."""

    @property
    def offsets(self) -> Sequence[int]: ...

    @property
    def sizes(self) -> Sequence[int]: ...


@dataclass(frozen=True)
class Fault:
    """The first element, in row-major order, that is not in exactly one block.

    Attributes:
        element: its place in the tensor.
        blocks: the numbers of the first two blocks that it is in; none if it is in no block.
    """

    element: tuple[int, ...]
    blocks: tuple[int, ...]

    @property
    def is_gap(self) -> bool:
        return not self.blocks


def find_outside(shape: Sequence[int], blocks: Sequence[Block]) -> int | None:
    """The number of the first block that has other dimensions than the tensor, or is not within it; None if all are."""
    dims = len(shape)
    for number, block in enumerate(blocks):
        if len(block.offsets) != dims or len(block.sizes) != dims:
            return number
        for offset, size, extent in zip(block.offsets, block.sizes, shape):  # noqa: B905 (n x dims of them)
            if offset < 0 or size < 0 or offset + size > extent:
                return number
    return None


def find_fault(shape: Sequence[int], blocks: Sequence[Block]) -> Fault | None:
    """The first gap or overlap of blocks within a tensor; None if they tile it.

    Time and memory grow with the corners of the blocks, sorted: ``n log n``. Blocks without elements are ignored.
    """
    begins = np.array([block.offsets for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    sizes = np.array([block.sizes for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    return first_fault(np.array(shape, dtype=np.int64), begins, begins + sizes)


def first_fault(extents: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> Fault | None:
    """The same of arrays, int64: the sizes of the tensor, and the corners of blocks, (blocks, dimensions)."""
    held = (ends > begins).all(axis=1)
    if not (extents > 0).all():
        return None
    # A dimension that nothing is cut along has no corners of its own.
    cut = np.flatnonzero((begins[held] != 0).any(axis=0) | (ends[held] != extents).any(axis=0))
    lows = np.concatenate([begins[held][:, cut], np.zeros((1, len(cut)), dtype=np.int64)])
    highs = np.concatenate([ends[held][:, cut], extents[None, cut]])
    signs = np.concatenate([np.ones(held.sum(), dtype=np.int64), [-1]])
    sides = list(itertools.product((False, True), repeat=len(cut)))
    corners = np.concatenate([np.where(np.array(side, dtype=bool), highs, lows) for side in sides])
    uneven = uneven_corners(corners, np.concatenate([signs * (-1) ** sum(side) for side in sides]))
    if not len(uneven):
        return None
    element = np.zeros(len(extents), dtype=np.int64)
    element[cut] = uneven[0]
    holding = np.flatnonzero(((begins <= element) & (element < ends)).all(axis=1))
    return Fault(tuple(element.tolist()), tuple(holding[:2].tolist()))


def uneven_corners(corners: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """The different corners, in row-major order, at which the steps do not add up to zero.

    Args:
        corners: (corners, dimensions), those of the whole among them with the opposite steps.
        steps: up or down, 1-D.
    """
    if corners.shape[1]:
        order = np.lexsort(corners.T[::-1])
        corners, steps = corners[order], steps[order]
    starts = np.flatnonzero(np.append(True, (corners[1:] != corners[:-1]).any(axis=1)))
    return corners[starts[np.add.reduceat(steps, starts) != 0]]
