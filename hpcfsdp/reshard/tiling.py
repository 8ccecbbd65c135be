"""Whether blocks make up a tensor: each element in one of them, none in two.

The blocks are compared with the whole by their corners. The function that counts in how many blocks an element lies is
a sum of products of steps, and is known from where it steps, and by how much: at each corner of a block, up or down.
Blocks tile a tensor when these steps add up to those of the tensor. That takes sorting the corners once, whatever the
order of the blocks and the way in which they are cut; and of steps that are left over, the first in row-major order is
the first element that lies in no block, or in several.
"""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

import numpy as np


class Block(Protocol):
    """Where a block begins in each dimension, and how far it goes."""

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
    """The first gap or overlap of blocks that lie within a tensor; None if they tile it.

    Time and memory grow with the corners of the blocks, sorted: ``n log n``. Blocks without elements are nowhere.
    """
    begins = np.array([block.offsets for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    ends = begins + np.array([block.sizes for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    extents = np.array(shape, dtype=np.int64)
    held = (ends > begins).all(axis=1)
    if not (extents > 0).all():
        return None
    # A dimension that nothing is cut along has no corners of its own.
    cut = [
        dim for dim in range(len(shape)) if (begins[held, dim] != 0).any() or (ends[held, dim] != extents[dim]).any()
    ]
    first = _first_step(
        np.concatenate([begins[held][:, cut], np.zeros((1, len(cut)), dtype=np.int64)]),
        np.concatenate([ends[held][:, cut], extents[None, cut]]),
        np.concatenate([np.ones(held.sum(), dtype=np.int64), [-1]]),
    )
    if first is None:
        return None
    element = np.zeros(len(shape), dtype=np.int64)
    element[cut] = first
    holding = np.flatnonzero(((begins <= element) & (element < ends)).all(axis=1))
    return Fault(tuple(element.tolist()), tuple(holding[:2].tolist()))


def _first_step(begins: np.ndarray, ends: np.ndarray, signs: np.ndarray) -> np.ndarray | None:
    """Where the weighted sum of blocks first differs from zero, in row-major order.

    Args:
        begins, ends: (blocks, dimensions).
        signs: the weight of each block.
    """
    dims = begins.shape[1]
    if dims == 0:
        return None if signs.sum() == 0 else np.zeros(0, dtype=np.int64)
    sides = list(itertools.product((False, True), repeat=dims))
    corners = np.concatenate([np.where(np.array(side), ends, begins) for side in sides])
    steps = np.concatenate([signs * (-1) ** sum(side) for side in sides])
    order = np.lexsort(corners.T[::-1])
    corners, steps = corners[order], steps[order]
    starts = np.flatnonzero(np.concatenate([[True], (corners[1:] != corners[:-1]).any(axis=1)]))
    left = np.flatnonzero(np.add.reduceat(steps, starts))
    return corners[starts[left[0]]] if len(left) else None
