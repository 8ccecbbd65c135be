"""The plan of a save, kept for the next save of the same model and optimizer, with where its blocks are in memory."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.state.inventory import take_inventory
from hpcfsdp.state.tensors import StateTensor

_GAP_BYTES = 4096
"""The longest gap between two blocks, as layouts leave to align parameters, that is copied with them."""


class CopiedBlocks(NamedTuple):
    """Blocks that are copied together.

    Attributes:
        places: among this rank's blocks of the plan.
        begins: the first byte of each in the copy.
    """

    places: Sequence[int]
    begins: Sequence[int]


class _Range(NamedTuple):
    """Blocks, and the tensor, the first byte and the number of bytes of their copy."""

    blocks: CopiedBlocks
    tensor: int
    begin: int
    nbytes: int


class _Scalars(NamedTuple):
    """Blocks of one element each, the tensors without dimensions that have them, and which block is of which tensor.

    All of one dtype, in host memory. Many blocks may be of one tensor: a flat parameter's step is that of each of its
    parameters.
    """

    blocks: CopiedBlocks
    tensors: tuple[int, ...]
    chosen: torch.Tensor


@dataclass(frozen=True, eq=False)
class BlockSources:
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
    ) -> BlockSources | None:
        """None unless each block of the rank lies in exactly one of the tensors, and these do not overlap.

        Args:
            named: the plan's tensors, in its order.
            tensors: contiguous, detached.
        """
        begins, order = _begins_of(tensors)
        addresses = _addresses_of(plan, rank, named)
        if begins is None or addresses is None:
            return None
        sizes = plan.block_bytes(plan.blocks_of(rank))
        found = np.searchsorted(begins, addresses, side="right") - 1
        ends = begins + np.array([tensors[number].nbytes for number in order], np.int64)
        if np.any(found < 0) or np.any(addresses + sizes > ends[found]):
            return None
        return cls._joined(np.array(order, np.int64)[found], addresses - begins[found], sizes, tensors)

    @classmethod
    def _joined(
        cls, of: np.ndarray, begins: np.ndarray, sizes: np.ndarray, tensors: Sequence[torch.Tensor]
    ) -> BlockSources:
        """Join blocks that follow each other in one tensor."""
        ranges: list[_Range] = []
        numbers: dict[torch.dtype, list[int]] = {}
        places: list[int] = []
        tensor, first, end = -1, 0, 0

        def close() -> None:
            if places:
                blocks = CopiedBlocks(tuple(places), tuple(int(begins[place]) - first for place in places))
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

    def pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[CopiedBlocks, torch.Tensor]]:
        """Yield what to copy, as bytes: uint8, 1-D, on the tensor's device.

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
    return _Scalars(
        CopiedBlocks(tuple(places), tuple(begins.tolist())), tuple(which.tolist()), torch.from_numpy(chosen)
    )


def _begins_of(tensors: Sequence[torch.Tensor]) -> tuple[np.ndarray | None, list[int]]:
    """Return first addresses, ascending, and the numbers of their tensors; None if two overlap. Without empty ones."""
    order = sorted((number for number, t in enumerate(tensors) if t.numel()), key=lambda n: tensors[n].data_ptr())
    begins = np.array([tensors[number].data_ptr() for number in order], np.int64)
    ends = begins + np.array([tensors[number].nbytes for number in order], np.int64)
    return (None if np.any(ends[:-1] > begins[1:]) else begins), order


def _addresses_of(plan: SavePlan, rank: int, named: Sequence[StateTensor]) -> np.ndarray | None:
    """Return the address of each of a rank's blocks; None if one has none, as it is not in its order in memory."""
    own = plan.blocks[plan.blocks_of(rank)]
    found = np.empty(len(own), np.int64)
    for place, (number, start) in enumerate(zip(own["tensor"].tolist(), own["start"].tolist(), strict=True)):
        tensor = named[number]
        memory = tensor.piece_of(start).tensor
        if tensor.buffer is not None or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
            return None
        found[place] = memory.data_ptr() + (start - tensor.piece_of(start).start) * memory.element_size()
    return found


@dataclass(frozen=True, eq=False)
class KnownPlan:
    """What a save has found, and what it depends on.

    Attributes:
        facts: the key of the save, and those of the inventory: equal facts lead to an equal plan.
        plan: has been checked, and compared over ranks.
        fingerprint: of the plan.
        sources: of this rank's blocks in the tensors of the inventory.
        chosen: names of the tensors to save; None: all.
        params: by group of the optimizer, the names of its parameters; None without an optimizer.
        has_states: whether modules have extra state.
    """

    facts: tuple[Any, ...]
    plan: SavePlan
    fingerprint: str
    sources: BlockSources
    chosen: frozenset[str] | None
    params: tuple[tuple[str, ...], ...] | None
    has_states: bool


@dataclass(frozen=True, eq=False)
class RecalledPlan:
    """A known plan, and the tensors that its blocks are in now."""

    known: KnownPlan
    tensors: Sequence[torch.Tensor]

    def pieces(self) -> Iterator[tuple[CopiedBlocks, torch.Tensor]]:
        """See ``BlockSources.pieces``."""
        return self.known.sources.pieces(self.tensors)


class KeptPlan:
    """Keep the plan of the last save of a model. Not collective.

    The plan is a function of facts that are taken anew for each save and compared by value. So a plan that no longer
    fits is not recalled, and tensors that have moved are found where they are. It keeps no memory of the model.
    """

    def __init__(self) -> None:
        self._known: KnownPlan | None = None

    def recall(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, key: Any) -> RecalledPlan | None:
        """Return the kept plan, if it is that of this save.

        Args:
            key: all that the plan depends on, besides model and optimizer.
        """
        if self._known is None:
            return None
        try:
            found = take_inventory(model, optimizer)
        except HpcfsdpError:  # the general way raises it, on all ranks
            return None
        if found is None or (key, found.facts) != self._known.facts:
            return None
        return RecalledPlan(self._known, found.tensors)

    def keep(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer | None,
        key: Any,
        plan: SavePlan,
        rank: int,
        named: Sequence[StateTensor],
        **more: Any,
    ) -> RecalledPlan | None:
        """Keep a plan that has been made, compared and checked, in place of another; return None if it cannot.

        Args:
            key: see ``recall``.
            rank: this one.
            named: the plan's tensors, in its order.
            more: further attributes of ``KnownPlan``.
        """
        self._known = None
        found = take_inventory(model, optimizer)
        sources = None if found is None else BlockSources.find(plan, rank, named, found.tensors)
        if found is None or sources is None:
            return None
        self._known = KnownPlan((key, found.facts), plan=plan, sources=sources, **more)
        return RecalledPlan(self._known, found.tensors)
