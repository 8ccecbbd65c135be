"""Boxes of tensors (rows and columns from here to there) as runs of a row-major file. Pure."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.plan import BLOCK_DTYPE
from hpcfsdp.flat.layout import Box


class Levels(NamedTuple):
    """A box as nested repetitions of one run.

    Attributes:
        start: the first element, counted in the whole tensor.
        numel: of each run.
        repeated: (how often, how many elements later each time), outermost first.
    """

    start: int
    numel: int
    repeated: list[tuple[int, int]]

    def starts(self, depth: int) -> np.ndarray:
        """Where the repetitions of the `depth` outermost levels begin, int64, 1-D, in the order of the box."""
        found = np.array([self.start], np.int64)
        for count, stride in self.repeated[:depth]:
            found = (found[:, None] + np.arange(count, dtype=np.int64) * stride).reshape(-1)
        return found


def fits(box: Box, shape: Sequence[int]) -> bool:
    """Whether a box lies inside of a tensor of this shape."""
    return len(box.offsets) == len(box.sizes) == len(shape) and all(
        begin >= 0 and size >= 0 and begin + size <= whole
        for begin, size, whole in zip(box.offsets, box.sizes, shape, strict=True)
    )


def levels_of(shape: Sequence[int], box: Box) -> Levels:
    """The fewest levels that a box with elements has in a tensor of a shape."""
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


def box_blocks(shape: Sequence[int], box: Box, itemsize: int, block_bytes: int = schema.BLOCK_BYTES) -> np.ndarray:
    """The blocks that hold a box, in the order of its elements; tensor and rank are 0.

    A block has at most `block_bytes` bytes, and so has the stretch of the file in which its runs lie.

    Returns:
        Of ``BLOCK_DTYPE``; each is `count` times `numel` elements of the box, one after the other.
    """
    if not box.numel:
        return np.empty(0, BLOCK_DTYPE)
    levels = levels_of(shape, box)
    most = max(1, block_bytes // itemsize)
    if levels.numel > most or not levels.repeated:
        starts = levels.starts(len(levels.repeated))
        cuts = np.arange(0, levels.numel, most)
        blocks = np.empty(len(starts) * len(cuts), BLOCK_DTYPE)
        blocks["start"] = (starts[:, None] + cuts).reshape(-1)
        blocks["numel"] = np.tile(np.minimum(most, levels.numel - cuts), len(starts))
        blocks["count"], blocks["stride"] = 1, blocks["numel"]
    else:
        count, stride = levels.repeated[-1]
        starts = levels.starts(len(levels.repeated) - 1)
        cuts = np.arange(0, count, max(1, most // stride))  # the same for boxes beside each other
        blocks = np.empty(len(starts) * len(cuts), BLOCK_DTYPE)
        blocks["start"] = (starts[:, None] + cuts * stride).reshape(-1)
        blocks["count"] = np.tile(np.diff(cuts, append=count), len(starts))
        blocks["numel"] = levels.numel
        blocks["stride"] = np.where(blocks["count"] > 1, stride, levels.numel)
    blocks["tensor"] = blocks["rank"] = 0
    return blocks
