"""The copies of a rank's blocks out of its memory: a few large ones serve many small blocks."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.state.tensors import StateTensor

_GAP_BYTES = 4096
"""The longest gap between two blocks, as layouts leave to align parameters, that is copied with them."""


class Blocks(NamedTuple):
    """Blocks that are copied together.

    Attributes:
        places: among this rank's blocks of the plan.
        begins: the first byte of each in the copy.
    """

    places: Sequence[int]
    begins: Sequence[int]


class _Range(NamedTuple):
    """Blocks, and the tensor, the first byte and the number of bytes of their copy."""

    blocks: Blocks
    tensor: int
    begin: int
    nbytes: int


class _Scalars(NamedTuple):
    """Blocks of one element each, the tensors without dimensions that have them, and which block is of which tensor.

    All of one dtype, in host memory. Many blocks may be of one tensor: a flat parameter's step is that of each of its
    parameters.
    """

    blocks: Blocks
    tensors: tuple[int, ...]
    chosen: torch.Tensor


@dataclass(frozen=True, eq=False)
class Sources:
    """The places of a rank's blocks in a list of tensors.

    Attributes:
        sizes: bytes of each copy.
    """

    ranges: tuple[_Range, ...]
    scalars: tuple[_Scalars, ...]
    sizes: tuple[int, ...]

    @classmethod
    def find(
        cls, plan: SavePlan, rank: int, named: Sequence[StateTensor], tensors: Sequence[torch.Tensor]
    ) -> Sources | None:
        """None unless each block of the rank lies in exactly one of the tensors, and these do not overlap.

        Args:
            named: the plan's tensors, in its order.
            tensors: contiguous, detached.
        """
        begins, order = _begins_of(tensors)
        addresses = _addresses_of(plan, rank, named)
        if begins is None or addresses is None:
            return None
        own = plan.blocks[plan.blocks_of(rank)]
        sizes = own["numel"].astype(np.int64) * plan.itemsizes[own["tensor"]]
        found = np.searchsorted(begins, addresses, side="right") - 1
        ends = begins + np.array([tensors[number].nbytes for number in order], np.int64)
        if np.any(found < 0) or np.any(addresses + sizes > ends[found]):
            return None
        return cls._joined(np.array(order, np.int64)[found], addresses - begins[found], sizes, tensors)

    @classmethod
    def _joined(cls, of: np.ndarray, begins: np.ndarray, sizes: np.ndarray, tensors: Sequence[torch.Tensor]) -> Sources:
        """Joins blocks that follow each other in one tensor."""
        ranges: list[_Range] = []
        numbers: dict[torch.dtype, list[int]] = {}
        places: list[int] = []
        tensor, first, end = -1, 0, 0

        def close() -> None:
            if places:
                blocks = Blocks(tuple(places), tuple(int(begins[place]) - first for place in places))
                ranges.append(_Range(blocks, tensor, first, end - first))
                places.clear()

        for place, (number, begin, size) in enumerate(zip(of.tolist(), begins.tolist(), sizes.tolist(), strict=True)):
            if tensors[number].dim() == 0 and tensors[number].device.type == "cpu":
                numbers.setdefault(tensors[number].dtype, []).append(place)
                continue
            follows = number == tensor and 0 <= begin - end <= _GAP_BYTES
            if not follows or begin + size - first > schema.BLOCK_BYTES:
                close()
                tensor, first = number, begin
            places.append(place)
            end = begin + size
        close()
        scalars = tuple(_scalars(found, of, sizes) for found in numbers.values())
        of_scalars = (int(sizes[list(each.blocks.places)].sum()) for each in scalars)
        return cls(tuple(ranges), scalars, (*(each.nbytes for each in ranges), *of_scalars))

    def pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[Blocks, torch.Tensor]]:
        """What to copy, as bytes: uint8, 1-D, on the tensor's device.

        Args:
            tensors: like those in which the blocks were found: as many, of the same shapes and dtypes.
        """
        number, memory = -1, None
        for blocks, tensor, begin, nbytes in self.ranges:
            if tensor != number:
                whole = tensors[tensor]
                # Not view(-1), which leaves one element with a stride that cannot be seen as bytes.
                number, memory = tensor, whole.as_strided((whole.numel(),), (1,)).view(torch.uint8)
            yield blocks, memory.narrow(0, begin, nbytes)
        for blocks, places, chosen in self.scalars:
            values = torch.stack([tensors[place] for place in places])
            yield blocks, values[chosen].view(torch.uint8)


def _scalars(places: list[int], of: np.ndarray, sizes: np.ndarray) -> _Scalars:
    which, chosen = np.unique(of[places], return_inverse=True)
    begins = np.arange(len(places)) * sizes[places[0]]
    return _Scalars(Blocks(tuple(places), tuple(begins.tolist())), tuple(which.tolist()), torch.from_numpy(chosen))


def _begins_of(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray | None, list[int]]:
    """First addresses, ascending, and the numbers of their tensors; None if two overlap. Without empty ones."""
    order = sorted((number for number, t in enumerate(tensors) if t.numel()), key=lambda n: tensors[n].data_ptr())
    begins = np.array([tensors[number].data_ptr() for number in order], np.int64)
    ends = begins + np.array([tensors[number].nbytes for number in order], np.int64)
    return (None if np.any(ends[:-1] > begins[1:]) else begins), order


def _addresses_of(plan: SavePlan, rank: int, named: Sequence[StateTensor]) -> np.ndarray | None:
    """The address of each of a rank's blocks; None if one has none, as it is not in its order in memory."""
    own = plan.blocks[plan.blocks_of(rank)]
    found = np.empty(len(own), np.int64)
    for place, (number, start) in enumerate(zip(own["tensor"].tolist(), own["start"].tolist(), strict=True)):
        tensor = named[number]
        memory = tensor.piece_of(start).tensor
        if tensor.buffer is not None or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
            return None
        found[place] = memory.data_ptr() + (start - tensor.piece_of(start).start) * memory.element_size()
    return found
