"""The index of parameters that ranks share by rows: torch's chunks along one dimension of each parameter.

Each rank has ``ceil(size / ranks)`` consecutive rows of a parameter, the last ranks fewer or none, as ``torch.chunk``
divides it. A layout is an immutable value, made from names and shapes alone. It describes two buffers::

    shards   | rank 0: rows of weight, gap, rows of bias, gap | rank 1: rows of weight, gap, ... | ...
    whole    | gap | weight | gap | bias | gap | ...

Ranks send and reduce `shards`, in which all ranks have segments of equal size. Modules compute with `whole`, in which
each parameter is contiguous, with room for a full chunk of every rank. Seen as a matrix with a row for each rank,
`shards` has columns for each parameter and each gap: one kernel of a device copies all of them.
"""

import math
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import NamedTuple

import torch

from hpcfsdp.params.layout import Layout, TensorBlock, alignment, contiguous_strides, round_up


class StridedView(NamedTuple):
    """A view of some elements of the buffer of all shards."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    offset: int

    def of(self, shards: torch.Tensor) -> torch.Tensor:
        """Return the view of a buffer, 1-D."""
        return shards.as_strided(self.shape, self.stride, shards.storage_offset() + self.offset)


class ShardedRows(NamedTuple):
    """Rows of one parameter, and their place in the buffer of all shards."""

    dim: int  # along which the parameter is cut
    begin: int
    count: int
    in_shards: StridedView  # with one dimension more than the parameter if they are the chunks of several ranks

    def of_param(self, whole: torch.Tensor) -> torch.Tensor:
        """Return the rows in a tensor of the parameter's shape, as a view."""
        if self.count != whole.shape[self.dim]:
            whole = whole.narrow(self.dim, self.begin, self.count)
        return whole.view(self.in_shards.shape)


@dataclass(frozen=True)
class DTensorSlot:
    """The place of one parameter, or of this rank's block of it, in both buffers."""

    fqn: str  # fully qualified name, without the names of wrappers
    shape: tuple[int, ...]  # of the block if there is one
    dim: int  # along which it is cut
    rows: int  # of a full chunk
    offset: int  # first element in a rank's shard
    start: int  # first element in the buffer `whole`
    aliases: tuple[str, ...] = ()  # other names of the same (tied) parameter
    block: TensorBlock | None = None  # None for a whole parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def chunk_numel(self) -> int:
        """Elements of a full chunk."""
        return math.prod(self.chunk_shape(self.rows))

    def chunk_shape(self, rows: int) -> tuple[int, ...]:
        """Return the shape of so many rows."""
        return (*self.shape[: self.dim], rows, *self.shape[self.dim + 1 :])

    def rows_of(self, rank: int) -> tuple[int, int]:
        """(first row, number) of a rank."""
        begin = min(rank * self.rows, self.shape[self.dim])
        return begin, min(self.rows, self.shape[self.dim] - begin)


@dataclass(frozen=True)
class DTensorLayout(Layout):
    """Parameters of one dtype, cut into rows. Made by ``plan``. `whole_numel`: elements of the buffer `whole`.

    The buffer ends with room for the widest gap of all ranks, which a copy of all columns has to put somewhere.
    """

    slots: tuple[DTensorSlot, ...]
    whole_numel: int

    @classmethod
    def plan(
        cls,
        params: Iterable[tuple[str, tuple[int, ...], int, tuple[str, ...], TensorBlock | None]],
        dtype: torch.dtype,
        num_shards: int,
        *,
        itemsize: int | None = None,
    ) -> "DTensorLayout":
        """Lay out parameters in the given order: name, shape, dimension to cut, aliases and block of each.

        Alignment counts with the `itemsize` in bytes where an element takes the fewest; by default that of `dtype`.
        """
        align = alignment(itemsize or dtype.itemsize)
        slots: list[DTensorSlot] = []
        # No parameter has the address of the memory that all of them are in: transports know shared memory by that.
        offset, start = 0, align
        for fqn, shape, dim, aliases, block in params:
            rows = -(-shape[dim] // num_shards)
            slot = DTensorSlot(fqn, tuple(shape), dim, rows, offset, start, tuple(aliases), block)
            slots.append(slot)
            offset = round_up(offset + slot.chunk_numel, align)
            start = round_up(start + num_shards * slot.chunk_numel, align)
        made = cls(tuple(slots), dtype, num_shards, offset, align, round_up(start, num_shards))
        return replace(made, whole_numel=made.whole_numel + made.gap_numel)

    def columns(self) -> list[tuple[int | None, int]]:
        """Return the columns of the buffer of all shards in order: the place of a slot, None for a gap; the width."""
        found: list[tuple[int | None, int]] = []
        ends = [slot.offset for slot in self.slots[1:]] + [self.shard_numel]
        for index, (slot, end) in enumerate(zip(self.slots, ends, strict=True)):
            found += [(index, slot.chunk_numel), (None, end - slot.offset - slot.chunk_numel)]
        return [(index, width) for index, width in found if width]

    @property
    def gap_numel(self) -> int:
        """Elements of the widest column that is a gap."""
        return self.num_shards * max((width for index, width in self.columns() if index is None), default=0)

    def rows(self, index: int) -> tuple[ShardedRows, ...]:
        """Return where one parameter is in the buffer of all shards: the full chunks, and the shorter one, if any."""
        slot, found = self.slots[index], []
        size = slot.shape[slot.dim]
        full = size // slot.rows if slot.rows else 0
        if full:
            strides = contiguous_strides(slot.chunk_shape(slot.rows))
            shape = (*slot.shape[: slot.dim], full, slot.rows, *slot.shape[slot.dim + 1 :])
            stride = (*strides[: slot.dim], self.shard_numel, *strides[slot.dim :])
            found.append(ShardedRows(slot.dim, 0, full * slot.rows, StridedView(shape, stride, slot.offset)))
        if full * slot.rows < size:
            rest = size - full * slot.rows
            shape = slot.chunk_shape(rest)
            view = StridedView(shape, contiguous_strides(shape), full * self.shard_numel + slot.offset)
            found.append(ShardedRows(slot.dim, full * slot.rows, rest, view))
        return tuple(found)

    def gaps(self) -> list[StridedView]:
        """Return all elements of the buffer of all shards that are no part of a parameter."""
        found = []  # (first shard, end of shards, first element in each, end of elements)
        ends = [slot.offset for slot in self.slots[1:]] + [self.shard_numel]
        for slot, end in zip(self.slots, ends, strict=True):
            behind = slot.offset + slot.chunk_numel
            found.append((0, self.num_shards, behind, end))
            if slot.chunk_numel:
                full, rest = divmod(slot.shape[slot.dim], slot.rows)
                short = full + bool(rest)  # the one after the last shard with rows, of which one may have fewer
                found.append((full, short, slot.offset + slot.chunk_numel // slot.rows * rest, behind))
                found.append((short, self.num_shards, slot.offset, behind))
        return [
            StridedView((end - first, behind - begin), (self.shard_numel, 1), first * self.shard_numel + begin)
            for first, end, begin, behind in found
            if first < end and begin < behind
        ]
