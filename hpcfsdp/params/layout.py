"""The index of a flat parameter: where each element of each parameter is stored, and on which rank.

A layout is an immutable value, made from names and shapes alone, for any number of ranks. The flat buffer has one
dimension::

    | weight (row-major) | gap | bias | gap | ... | padding |
    | shard of rank 0        | shard of rank 1    | ...      |

Every parameter starts at an aligned element, and every rank's shard has the same number of elements. Gaps between
parameters and padding at the end are zero. Parameters may lie in another order than that of the slots, so that no shard
ends within a block of one, see ``granularity``.
"""

import dataclasses
import hashlib
import math
from bisect import bisect_right
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfsdp.params.granularity import Granularity, block_numel, check_granularity, place_blocks, round_up

ALIGNMENT_BYTES = 16
"""Of each parameter and each shard in the flat buffer, in each dtype, for vector instructions and GPU loads."""
_CACHED_SHARDS = 1024
"""Up to so many shards ``param_edges`` are cached for the next save; with more they take many megabytes."""


class Box(NamedTuple):
    """A block of a tensor: its offset and size in each dimension."""

    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def numel(self) -> int:
        return math.prod(self.sizes)

    @property
    def slices(self) -> tuple[slice, ...]:
        """The index of the block in the tensor."""
        return tuple(slice(begin, begin + size) for begin, size in zip(*self, strict=True))


@dataclass(frozen=True)
class TensorBlock:
    """The blocks of a parameter on its tensor-parallel ranks, and the one of this rank."""

    shape: tuple[int, ...]  # of the whole
    boxes: tuple[Box, ...]  # by tensor-parallel rank; equal ones for replicas
    rank: int  # this tensor-parallel rank
    placements: tuple[Any, ...]  # torch's, in the dimensions of the mesh of these ranks

    @property
    def box(self) -> Box:
        return self.boxes[self.rank]

    @cached_property
    def stride(self) -> tuple[int, ...]:
        """Of the whole, where it is contiguous."""
        return contiguous_strides(self.shape)

    @cached_property
    def is_whole(self) -> bool:
        """Whether each rank has the whole parameter."""
        return all(box.sizes == self.shape for box in self.boxes)

    @property
    def largest_numel(self) -> int:
        """Elements of the largest block; the same on all ranks."""
        return max(box.numel for box in self.boxes)

    @property
    def owners(self) -> tuple[int, ...]:
        """For each distinct block the first rank that has it, in ascending order."""
        first: dict[Box, int] = {}
        for rank, box in enumerate(self.boxes):
            if box.numel:
                first.setdefault(box, rank)
        return tuple(first.values())


@dataclass(frozen=True)
class ParamSlot:
    """The place of one parameter, or of this rank's block of it, in the flat buffer."""

    fqn: str  # fully qualified name, without the names of wrappers
    shape: tuple[int, ...]  # of the block if there is one
    offset: int  # first element in the flat buffer
    aliases: tuple[str, ...] = ()  # other names of the same (tied) parameter
    block: TensorBlock | None = None  # None for a whole parameter
    granularity: Granularity = 1  # what of it stays on one rank

    @property
    def is_cut(self) -> bool:
        """Whether tensor-parallel ranks have different parts of it."""
        return self.block is not None and not self.block.is_whole

    @property
    def whole_shape(self) -> tuple[int, ...]:
        """The shape of the parameter, all blocks together."""
        return self.shape if self.block is None else self.block.shape

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def end(self) -> int:
        return self.offset + self.numel


class Run(NamedTuple):
    """Consecutive elements of one tensor, consecutive in memory too."""

    index: int  # of the tensor
    start: int  # first element within the tensor, in row-major order
    numel: int
    offset: int  # first element within the memory that holds the run


@dataclass(frozen=True)
class Layout:
    """The parameters of one dtype, in shards of one size."""

    slots: tuple[Any, ...]  # the places of the parameters
    dtype: torch.dtype
    num_shards: int
    shard_numel: int
    align: int  # each parameter and each shard begins at a multiple of so many elements

    @property
    def padded_numel(self) -> int:
        """Elements of all shards, with gaps and padding."""
        return self.shard_numel * self.num_shards

    def fingerprint(self) -> str:
        """Return a short text, equal for equal layouts."""
        return hashlib.blake2b(repr((self.slots, self.dtype, self.num_shards)).encode(), digest_size=8).hexdigest()


@dataclass(frozen=True)
class FlatLayout(Layout):
    """Parameters of one dtype, one after the other, cut into equal shards. Made by ``plan``."""

    slots: tuple[ParamSlot, ...]

    @classmethod
    def plan(
        cls,
        params: Iterable[tuple[str, Iterable[int], tuple[str, ...]]],
        dtype: torch.dtype,
        num_shards: int,
        blocks: Mapping[str, TensorBlock] | None = None,
        *,
        itemsize: int | None = None,
        granularity: Mapping[str, Granularity] | None = None,
    ) -> "FlatLayout":
        """Lay out parameters, in the given order unless blocks of them have to stay together.

        Of each are given the fully qualified name, the shape and the aliases, and by name the `blocks` of those whose
        shape is that of a block, and what of them stays on one rank where that is more than an element. Alignment
        counts with the `itemsize` in bytes where an element takes the fewest; by default that of `dtype`.
        """
        if num_shards < 1:
            raise ValueError(f"a layout needs at least one shard, not {num_shards}")
        align = alignment(itemsize or dtype.itemsize)
        slots: list[ParamSlot] = []
        offset, names = 0, set[str]()
        for fqn, shape, aliases in params:
            for name in (fqn, *aliases):
                if name in names:
                    raise ValueError(f"parameter name {name!r} is given twice")
                names.add(name)
            block, own = (blocks or {}).get(fqn), (granularity or {}).get(fqn, 1)
            for part in [tuple(shape)] if block is None else [box.sizes for box in block.boxes]:
                check_granularity(own, part, fqn)
            own = own if isinstance(own, str) else int(own)
            slots.append(ParamSlot(fqn, tuple(shape), offset, tuple(aliases), block, own))
            offset = round_up(slots[-1].end, align)
        used = slots[-1].end if slots else 0
        shard_numel = round_up(-(-used // num_shards), align)
        if num_shards > 1 and any(slot.granularity != 1 for slot in slots):
            items = tuple((slot.numel, block_numel(slot.granularity, slot.shape)) for slot in slots)
            offsets, shard_numel = place_blocks(items, num_shards, align)
            pairs = zip(slots, offsets, strict=True)
            slots = [dataclasses.replace(slot, offset=offset) for slot, offset in pairs]
        return cls(tuple(slots), dtype, num_shards, shard_numel, align)

    @cached_property
    def used_numel(self) -> int:
        """Elements up to the end of the last parameter."""
        return max((slot.end for slot in self.slots), default=0)

    @cached_property
    def _by_offset(self) -> Sequence[int]:
        """Indices of the slots in the order in which they lie in the buffer."""
        return sorted(range(len(self.slots)), key=lambda index: (self.slots[index].offset, self.slots[index].end))

    @cached_property
    def by_name(self) -> dict[str, ParamSlot]:
        """Slots by name, aliases too."""
        return {name: slot for slot in self.slots for name in (slot.fqn, *slot.aliases)}

    @cached_property
    def places(self) -> dict[str, int]:
        """Indices of slots by name, aliases too."""
        return {name: place for place, slot in enumerate(self.slots) for name in (slot.fqn, *slot.aliases)}

    def gaps(self) -> list[tuple[int, int]]:
        """Return (first element, end) of every gap and padding in the flat buffer."""
        found, end = [], 0
        for slot in (self.slots[index] for index in self._by_offset):
            if slot.offset > end:
                found.append((end, slot.offset))
            end = max(end, slot.end)
        if self.padded_numel > end:
            found.append((end, self.padded_numel))
        return found

    def param_edges(self, fqn: str) -> tuple[int, np.ndarray]:
        """Return the runs of the parameter `fqn` (or an alias) over all ranks, in row-major order.

        They are the first rank that has one, and a read-only int64 array ``[runs + 1]`` of their first elements, and of
        the number of elements.
        """
        if ("edges", fqn) in self._made:
            return self._made["edges", fqn]
        slot = self.by_name[fqn]
        if slot.numel == 0:
            return 0, np.zeros(1, np.int64)
        first, end = slot.offset // self.shard_numel, (slot.end - 1) // self.shard_numel + 1
        edges = np.arange(first, end + 1, dtype=np.int64) * self.shard_numel - slot.offset
        edges[0], edges[-1] = 0, slot.numel  # its first shard begins before it, its last ends behind it
        edges.flags.writeable = False
        if self.num_shards <= _CACHED_SHARDS:
            self._made["edges", fqn] = first, edges
        return first, edges

    def runs(self, shard_rank: int, *, apart: bool = False) -> list[Run]:
        """Return the runs of parameters on one rank, with ``Run.index`` that of the slot, ascending.

        They are in the rank's shard, or `apart` in memory of their own. Slots of other shards cost no time.
        """
        found, begin = [], shard_rank * self.shard_numel
        end = begin + self.shard_numel
        order = self._by_offset
        for place in range(bisect_right(order, begin, key=lambda index: self.slots[index].end), len(order)):
            index = order[place]
            slot = self.slots[index]
            if slot.offset >= end:
                break
            first, last = max(slot.offset, begin), min(slot.end, end)
            if first < last:
                found.append(Run(index, first - slot.offset, last - first, 0 if apart else first - begin))
        return sorted(found)

    def param_run(self, fqn: str, shard_rank: int) -> Run | None:
        """Return the run of the parameter `fqn` (or an alias) on one rank, None if there is none."""
        slot, begin = self.by_name[fqn], shard_rank * self.shard_numel
        first, last = max(slot.offset, begin), min(slot.end, begin + self.shard_numel)
        return Run(self.places[fqn], first - slot.offset, last - first, first - begin) if first < last else None

    def known_as(self, paths: tuple[str, ...], join: Callable[[str, str], str]) -> "FlatLayout":
        """Return the same layout with names below the first of `paths`, aliases below the others; `join` makes them."""
        if (paths, join) not in self._made:
            slots = []
            for slot in self.slots:
                fqn, *aliases = (join(path, name) for path in paths for name in (slot.fqn, *slot.aliases))
                slots.append(dataclasses.replace(slot, fqn=fqn, aliases=tuple(aliases)))
            self._made[paths, join] = dataclasses.replace(self, slots=tuple(slots))
        return self._made[paths, join]

    def of_tensor_rank(self, rank: int) -> "FlatLayout":
        """Return the layout of the blocks of another tensor-parallel rank."""
        if ("tensor rank", rank) not in self._made:
            if all(slot.block is None or slot.block.rank == rank for slot in self.slots):
                return self._made.setdefault(("tensor rank", rank), self)
            blocks = {s.fqn: dataclasses.replace(s.block, rank=rank) for s in self.slots if s.block is not None}
            params = [(s.fqn, blocks[s.fqn].box.sizes if s.block else s.shape, s.aliases) for s in self.slots]
            granularity = {slot.fqn: slot.granularity for slot in self.slots}
            itemsize = ALIGNMENT_BYTES // self.align
            self._made["tensor rank", rank] = FlatLayout.plan(
                params, self.dtype, self.num_shards, blocks, itemsize=itemsize, granularity=granularity
            )
        return self._made["tensor rank", rank]

    @cached_property
    def _made(self) -> dict[tuple[Any, Any], Any]:
        """What methods have made for their arguments, to be made once."""
        return {}


def contiguous_strides(shape: tuple[int, ...]) -> tuple[int, ...]:
    return tuple(math.prod(max(size, 1) for size in shape[dim + 1 :]) for dim in range(len(shape)))


def alignment(itemsize: int) -> int:
    """Return the elements of `itemsize` bytes to whose multiples parameters and shards are aligned."""
    return max(1, ALIGNMENT_BYTES // itemsize)
