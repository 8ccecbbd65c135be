"""The order of an epoch: which sample stands at each place, as a function of seed and epoch."""

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from hpcfsdp.data.permutation import Network, Permutation, keys_of

Order = Callable[[np.ndarray], np.ndarray]
"""Of places in an epoch, int64, 1-D: the numbers of the samples there."""


@dataclass(frozen=True)
class Blocks:
    """Samples that are stored together: `size` after each other in a file, the last ones of a file fewer.

    Attributes:
        lengths: the number of samples of each file, int64.
        size: samples of a block.
    """

    lengths: np.ndarray
    size: int
    _ends: np.ndarray = field(init=False, repr=False)
    _block_ends: np.ndarray = field(init=False, repr=False)

    def __post_init__(self) -> None:
        object.__setattr__(self, "_ends", np.cumsum(self.lengths))
        object.__setattr__(self, "_block_ends", np.cumsum(-(-self.lengths // self.size)))

    @property
    def count(self) -> int:
        """The number of blocks."""
        return int(self._block_ends[-1]) if len(self._block_ends) else 0

    def digest(self) -> int:
        """Return a number that other blocks do not have."""
        return int(keys_of(self.size, self.lengths.tobytes())[0] >> np.uint64(1))  # HDF5 and JSON have it as int64

    def find(self, blocks: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """Return the first sample, and the number of samples, of each block."""
        files = np.searchsorted(self._block_ends, blocks, side="right")
        ends = self._ends[files]
        before = self._block_ends[files] - -(-self.lengths[files] // self.size)
        first = ends - self.lengths[files] + (blocks - before) * self.size
        return first, np.minimum(self.size, ends - first)

    def short(self) -> tuple[np.ndarray, np.ndarray]:
        """Return the blocks with fewer samples, and how many each lacks."""
        lacking = -self.lengths % self.size
        return (self._block_ends - 1)[lacking > 0], lacking[lacking > 0]


def order_of(length: int, *, seed: int, epoch: int, blocks: Blocks | None, lanes: int) -> Order:
    """Return the shuffled order of an epoch.

    With `blocks`, samples at random are all of a block: batches of `lanes` samples take one from each of as many lanes,
    each of which goes through a part of the blocks, themselves at random, one block after the other. A rank has the
    same lanes in all batches, so it reads a block once, and no other rank reads it but where lanes meet.
    """
    if blocks is None or blocks.size == 1:
        return Permutation(length, keys_of(seed, epoch)[0])
    return _BlockOrder(length, seed, epoch, blocks, lanes)


class _BlockOrder:
    def __init__(self, length: int, seed: int, epoch: int, blocks: Blocks, lanes: int) -> None:
        keys = keys_of(seed, epoch, "blocks", count=2)
        self._blocks, self._key = blocks, keys[1]
        self._shuffled = Permutation(blocks.count, keys[0])
        self._network = Network(blocks.size)
        self._lanes, self._per_lane = lanes, length // lanes
        # Where blocks lack samples, in the row of shuffled blocks: what follows has moved forward.
        numbers, lacking = blocks.short()
        places = self._shuffled.inverse(numbers)
        by_place = np.argsort(places)
        self._lacking = np.concatenate(([0], np.cumsum(lacking[by_place])))
        self._ends_of_short = (places[by_place] + 1) * blocks.size - self._lacking[1:]

    def __call__(self, places: np.ndarray) -> np.ndarray:
        in_lanes = places < self._lanes * self._per_lane  # the rest, fewer than the lanes, stands at the end
        row = np.where(in_lanes, places % self._lanes * self._per_lane + places // self._lanes, places)
        row = row + self._lacking[np.searchsorted(self._ends_of_short, row, side="right")]
        place, within = row // self._blocks.size, row % self._blocks.size
        block = self._shuffled(place)
        first, lengths = self._blocks.find(block)
        keys = block.astype(np.uint64) * np.uint64(0x9E3779B97F4A7C15) + self._key
        found = self._network(within.astype(np.uint64), lengths.astype(np.uint64), keys)
        return first + found.astype(np.int64)
