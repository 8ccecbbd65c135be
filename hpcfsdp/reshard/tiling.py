"""Whether blocks, or hyperslabs, make up tensors: each element in one of them, none in two. Pure.

Blocks are compared with the whole by their corners. The function that counts the blocks with an element is a sum of
products of steps, and is known from where it steps up or down: at each corner of a block. Blocks tile a tensor when
these steps add up to those of the tensor. That takes sorting the corners once, whatever the order of the blocks. Of
steps that are left over, the first in row-major order is the first element that is in no block, or in several.

A hyperslab is `count` runs of `numel` elements; each begins `stride` elements after the one before it. A few bytes of a
file can describe millions of runs, so hyperslabs are treated as rectangles rather than run by run: where those of a
range have one stride, its elements are a matrix with that many columns, which they have to tile. Time and memory grow
with the number of hyperslabs. Irregular ones are divided into up to ``MOST_PARTS`` parts.
"""

import itertools
from collections.abc import Sequence
from typing import Any, NamedTuple

import numpy as np

MOST_PARTS = 1 << 22  # the most parts that irregular hyperslabs of one range are divided into: about 400 MiB
MOST_ELEMENTS = 1 << 60  # sums of places, and of corners, are exact in int64
Blocks = Sequence[Any]  # objects with the `offsets` and the `sizes` of a block in each dimension


class TilingFault(NamedTuple):
    """The first element, in row-major order, that is not in exactly one block."""

    element: tuple[int, ...]  # its place in the tensor
    blocks: tuple[int, ...]  # the numbers of the first two blocks that it is in; none if it is in no block


class TilingError(ValueError):
    """Hyperslabs are too irregular to be checked: those of one `tensor`, or of several (None)."""

    def __init__(self, tensor: int | None = None) -> None:
        super().__init__(f"its runs are interleaved in more than {MOST_PARTS} parts")
        self.tensor = tensor


def find_outside(shape: Sequence[int], blocks: Blocks) -> int | None:
    """Return the number of the first block of other dimensions than the tensor, or not within it; None if all are."""
    dims = len(shape)
    for number, block in enumerate(blocks):
        if len(block.offsets) != dims or len(block.sizes) != dims:
            return number
        for offset, size, extent in zip(block.offsets, block.sizes, shape):  # noqa: B905 (n x dims of them)
            if offset < 0 or size < 0 or offset + size > extent:
                return number
    return None


def find_fault(shape: Sequence[int], blocks: Blocks) -> TilingFault | None:
    """Return the first gap or overlap of blocks within a tensor; None if they tile it.

    Time and memory grow with the corners of the blocks, sorted: ``n log n``. Blocks without elements are ignored.
    """
    begins = np.array([block.offsets for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    sizes = np.array([block.sizes for block in blocks], dtype=np.int64).reshape(len(blocks), len(shape))
    return first_fault(np.array(shape, dtype=np.int64), begins, begins + sizes)


def first_fault(extents: np.ndarray, begins: np.ndarray, ends: np.ndarray) -> TilingFault | None:
    """Return the same of arrays, int64: the sizes of the tensor, and the corners of blocks, (blocks, dimensions)."""
    held = (ends > begins).all(axis=1)
    if not (extents > 0).all():
        return None
    # A dimension that is whole in all blocks has no corners of its own.
    dims = np.flatnonzero((begins[held] != 0).any(axis=0) | (ends[held] != extents).any(axis=0))
    lows = np.concatenate([begins[held][:, dims], np.zeros((1, len(dims)), dtype=np.int64)])
    highs = np.concatenate([ends[held][:, dims], extents[None, dims]])
    signs = np.concatenate([np.ones(held.sum(), dtype=np.int64), [-1]])
    sides = list(itertools.product((False, True), repeat=len(dims)))
    corners = np.concatenate([np.where(np.array(side, dtype=bool), highs, lows) for side in sides])
    uneven = uneven_corners(corners, np.concatenate([signs * (-1) ** sum(side) for side in sides]))
    if not len(uneven):
        return None
    element = np.zeros(len(extents), dtype=np.int64)
    element[dims] = uneven[0]
    holding = np.flatnonzero(((begins <= element) & (element < ends)).all(axis=1))
    return TilingFault(tuple(element.tolist()), tuple(holding[:2].tolist()))


def uneven_corners(corners: np.ndarray, steps: np.ndarray) -> np.ndarray:
    """Return the different corners, in row-major order, at which the steps up and down do not add up to zero."""
    if corners.shape[1]:
        order = np.lexsort(corners.T[::-1])
        corners, steps = corners[order], steps[order]
    starts = np.flatnonzero(np.append(True, (corners[1:] != corners[:-1]).any(axis=1)))
    return corners[starts[np.add.reduceat(steps, starts) != 0]]


def first_untiled(slabs: np.ndarray, numels: Sequence[int]) -> int | None:
    """Return the first tensor that slabs do not tile, each element once; None if there is none.

    Slabs have the fields `tensor`, `count`, `start`, `numel` and `stride`, in any order; tensors less than
    ``MOST_ELEMENTS`` in all. Raises a ``TilingError`` if they are too irregular, a ``ValueError`` for too many elements
    or no such tensor.
    """
    sizes = [int(numel) for numel in numels]
    if sum(sizes) >= MOST_ELEMENTS:
        raise ValueError(f"{sum(sizes)} elements are more than any file has")
    if len(slabs) and int(slabs["tensor"].max()) >= len(sizes):
        raise ValueError(f"there is no tensor {int(slabs['tensor'].max())}, only {len(sizes)}")
    bases = np.cumsum([0, *sizes], dtype=np.int64)
    tensors = slabs["tensor"].astype(np.int64)
    outside = _outside(slabs, np.array(sizes, np.int64)[tensors]) if len(slabs) else np.zeros(0, bool)
    worst = int(tensors[outside].min()) if outside.any() else len(sizes)
    slabs, tensors = slabs[tensors < worst], tensors[tensors < worst]
    # All tensors one after the other are one line, which the slabs have to tile; no slab reaches beyond its tensor.
    place = _first_unfit(_Slabs.of(slabs, bases[tensors]), int(bases[worst]), bases)
    if place is not None:
        return int(np.searchsorted(bases, place, side="right")) - 1
    return worst if worst < len(sizes) else None


def byte_ranges(
    begins: np.ndarray, numels: np.ndarray, counts: np.ndarray, strides: np.ndarray, owners: np.ndarray
) -> tuple[np.ndarray, np.ndarray]:
    """Return the bytes of a file that slabs occupy: first bytes and ends of ranges, by first byte, int64.

    Ranges overlap where slabs do. Interleaved slabs without gaps become one range; else each run is one. All arguments
    are int64, in bytes. Slabs with the same owner have no byte in common: they tile one tensor, with all its elements
    in order. Raises a ``TilingError`` if they are too irregular.
    """
    order = np.argsort(begins, kind="stable")
    slabs = _Slabs(begins[order], numels[order], counts[order], strides[order])
    owners = owners[order]
    firsts = _cluster_firsts(slabs)
    if not len(firsts):
        return np.empty(0, np.int64), np.empty(0, np.int64)
    lows, highs = slabs.begins[firsts], np.maximum.reduceat(slabs.ends, firsts)
    filled = np.add.reduceat(slabs.numels * slabs.counts, firsts) == highs - lows
    filled &= np.minimum.reduceat(owners, firsts) == np.maximum.reduceat(owners, firsts)
    odd = np.repeat(~filled, np.diff(firsts, append=len(owners)))
    if int(slabs.counts[odd].sum()) > MOST_PARTS:
        raise TilingError
    runs = slabs.pick(odd).expanded()
    begins, ends = np.append(lows[filled], runs.begins), np.append(highs[filled], runs.ends)
    order = np.argsort(begins, kind="stable")
    return begins[order], ends[order]


class _Slabs(NamedTuple):
    """Hyperslabs on one line, ascending by their first elements; all int64, and none reaches beyond int64."""

    begins: np.ndarray
    numels: np.ndarray
    counts: np.ndarray
    strides: np.ndarray

    @classmethod
    def of(cls, slabs: np.ndarray, bases: np.ndarray) -> "_Slabs":
        """Return slabs inside of their tensors, which begin at `bases`. Runs that touch each other become one."""
        begins, numels, counts, strides = (
            slabs[name].astype(np.int64) for name in ("start", "numel", "count", "stride")
        )
        begins += bases
        touching = (strides == numels) | (counts == 1)
        numels = np.where(touching, numels * counts, numels)
        counts = np.where(touching, 1, counts)
        found = cls(begins, numels, counts, np.where(touching, numels, strides))
        return found if np.all(begins[1:] >= begins[:-1]) else found.pick(np.argsort(begins, kind="stable"))

    @property
    def ends(self) -> np.ndarray:
        """The end of the last run of each hyperslab."""
        return self.begins + (self.counts - 1) * self.strides + self.numels

    def pick(self, which: np.ndarray) -> "_Slabs":
        return _Slabs(*(column[which] for column in self))

    def expanded(self) -> "_Slabs":
        """Return each run as a hyperslab, in the order of the slabs."""
        counts = self.counts
        which = np.repeat(np.arange(len(counts)), counts)
        within = np.arange(len(which)) - np.repeat(np.cumsum(counts) - counts, counts)
        begins, numels = self.begins[which] + within * self.strides[which], self.numels[which]
        return _Slabs(begins, numels, np.ones(len(which), np.int64), numels)


def _outside(slabs: np.ndarray, numels: np.ndarray) -> np.ndarray:
    """Find slabs without elements, with overlapping runs, or that reach beyond their tensors of `numels` elements."""
    start, numel, stride = slabs["start"], slabs["numel"], slabs["stride"]
    whole, count = numels.astype(np.uint64), slabs["count"].astype(np.uint64)
    bad = (count < 1) | (numel < 1) | (numel > whole) | (start > whole - np.minimum(numel, whole))
    left = np.where(bad, np.uint64(0), whole - start - numel)  # behind the first run
    more = ~bad & (count > 1)
    bad |= more & ((stride < numel) | (count - np.uint64(1) > left // np.maximum(stride, np.uint64(1))))
    return bad


def _cluster_firsts(slabs: _Slabs) -> np.ndarray:
    """Return the first hyperslab of each cluster of overlapping or interleaved slabs."""
    if not len(slabs.begins):
        return np.empty(0, np.int64)
    before = np.maximum.accumulate(slabs.ends)[:-1]
    return np.flatnonzero(np.append(True, slabs.begins[1:] >= before))


def _first_unfit(slabs: _Slabs, length: int, bases: np.ndarray) -> int | None:
    """Return a place in the first tensor that is not covered exactly once, on the line up to `length`, if any."""
    firsts = _cluster_firsts(slabs)
    if not len(firsts):
        return 0 if length else None
    lows, highs = slabs.begins[firsts], np.maximum.reduceat(slabs.ends, firsts)
    before = np.append(0, highs[:-1])
    found = before[lows != before][:1].tolist()
    if highs[-1] != length:
        found.append(int(highs[-1]))
    sizes = np.diff(firsts, append=len(slabs.begins))
    within = np.flatnonzero((sizes > 1) | (slabs.counts[firsts] > 1))
    if len(within):
        of = np.repeat(np.arange(len(within)), sizes[within])
        inside = slabs.pick(np.repeat(np.isin(np.arange(len(firsts)), within), sizes))
        inside = inside._replace(begins=inside.begins - lows[within][of])
        found += _first_bad(inside, of, highs[within] - lows[within], lows[within], bases)
    return min(found, default=None)


def _first_bad(slabs: _Slabs, of: np.ndarray, lengths: np.ndarray, lows: np.ndarray, bases: np.ndarray) -> list[int]:
    """Return the begin of the first cluster that its slabs do not tile, in a list; an empty list if there is none.

    Slabs count from the first element of their cluster, which `of` numbers in order; clusters begin at `lows`.
    """
    bad = _untiled(slabs, of, lengths)
    if bad is not None:
        return lows[bad][:1].tolist()
    if len(lengths) == 1:
        raise TilingError(int(np.searchsorted(bases, lows[0], side="right")) - 1)
    half = len(lengths) // 2
    middle = int(np.searchsorted(of, half))
    first = _first_bad(slabs.pick(slice(middle)), of[:middle], lengths[:half], lows[:half], bases)
    rest = slabs.pick(slice(middle, None)), of[middle:] - half, lengths[half:], lows[half:], bases
    return first or _first_bad(*rest)


def _untiled(slabs: _Slabs, of: np.ndarray, lengths: np.ndarray) -> np.ndarray | None:
    """Return a mask of the clusters that their slabs do not tile; None if that takes too many parts."""
    widths = _widths(slabs, of, lengths)
    odd = (slabs.counts > 1) & (slabs.strides != widths[of])
    if int(slabs.counts[odd].sum()) > MOST_PARTS + 4 * len(of):
        return None
    of = np.append(of[~odd], np.repeat(of[odd], slabs.counts[odd]))
    slabs = _Slabs(*map(np.append, slabs.pick(~odd), slabs.pick(odd).expanded()))
    # Each cluster is a matrix, and its slabs are rectangles in it; all of the matrix counts with the opposite sign.
    number, once = np.arange(len(lengths)), np.ones_like(lengths)
    wholes = _Slabs(np.zeros_like(lengths), lengths, once, lengths)
    signs = np.append(np.ones(len(of), np.int64), -once)
    of, slabs = np.append(of, number), _Slabs(*map(np.append, slabs, wholes))
    which, top, bottom, left, right = _rectangles(slabs, widths[of])
    of, signs = of[which], signs[which]
    # A corner is one number. Each line of a matrix, and one after the last, has one place more for the ends.
    spans = widths + 1
    bases = np.cumsum((-(-lengths // widths) + 1) * spans)
    bases = np.append(0, bases[:-1])
    corners = np.concatenate(
        [bases[of] + row * spans[of] + column for row in (top, bottom) for column in (left, right)]
    )
    uneven = uneven_corners(corners[:, None], np.concatenate([signs, -signs, -signs, signs]))[:, 0]
    bad = np.zeros(len(lengths), bool)
    bad[np.searchsorted(bases, uneven, side="right") - 1] = True
    return bad


def _widths(slabs: _Slabs, of: np.ndarray, lengths: np.ndarray) -> np.ndarray:
    """Return the stride that most runs of a cluster have; its length where slabs have one run each."""
    widths = lengths.copy()
    several = np.flatnonzero(slabs.counts > 1)
    order = several[np.lexsort((slabs.strides[several], of[several]))]
    if not len(order):
        return widths
    clusters, strides = of[order], slabs.strides[order]
    firsts = np.flatnonzero((np.diff(clusters, prepend=-1) != 0) | (np.diff(strides, prepend=0) != 0))
    runs = np.add.reduceat(slabs.counts[order], firsts)
    best = np.lexsort((runs, clusters[firsts]))  # the last of each cluster has most
    widths[clusters[firsts][best]] = strides[firsts][best]
    return widths


def _rectangles(slabs: _Slabs, width: np.ndarray) -> tuple[np.ndarray, ...]:
    """Return for each rectangle of a slab in a matrix its number, first row, end of rows, first and end of columns."""
    which = np.arange(len(width))
    row, column = slabs.begins // width, slabs.begins % width
    head = np.minimum(slabs.numels, width - column)
    full, tail = np.divmod(slabs.numels - head, width)  # a run of one that goes on over whole rows, and into the next
    after = row + 1 + full
    zero = np.zeros_like(width)
    has_full, has_tail = full > 0, tail > 0
    head_parts = which, row, row + slabs.counts, column, column + head
    full_parts = (part[has_full] for part in (which, row + 1, after, zero, width))
    tail_parts = (part[has_tail] for part in (which, after, after + slabs.counts, zero, tail))
    return tuple(map(np.concatenate, zip(head_parts, full_parts, tail_parts, strict=True)))
