"""The plan of a save, kept for the next save of the same model and optimizer, with where its blocks are in memory."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

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
    """Blocks that are copied together: places among this rank's of the plan, and first bytes in the copy."""

    places: Sequence[int]
    begins: Sequence[int]


Pieces: TypeAlias = Iterable[tuple[CopiedBlocks, torch.Tensor]]
"""What to copy: bytes, uint8, 1-D. They are asked for when their turn comes: they may be a copy."""


def in_groups(pieces: Pieces, most: int) -> Iterator[list[tuple[CopiedBlocks, torch.Tensor]]]:
    """Yield pieces in groups of at most `most` bytes, or of one."""
    # To wake the writer for each of thousands of small blocks takes longer than to copy them.
    group, nbytes = [], 0
    for piece in pieces:
        if group and nbytes + piece[1].numel() > most:
            yield group
            group, nbytes = [], 0
        group.append(piece)
        nbytes += piece[1].numel()
    if group:
        yield group


class _Range(NamedTuple):
    """Blocks, and the tensor, the first byte and the number of bytes of their copy."""

    blocks: CopiedBlocks
    tensor: int
    begin: int
    nbytes: int


class _Scalars(NamedTuple):
    """Blocks of one element each, and the tensors without dimensions, of one dtype in host memory, that have them."""

    blocks: CopiedBlocks
    tensors: tuple[int, ...]
    chosen: torch.Tensor  # which block is of which: a flat parameter's step is that of each of its parameters


@dataclass(frozen=True, eq=False)
class BlockSources:
    """The places of a rank's blocks in a list of tensors, and the bytes of each copy."""

    ranges: tuple[_Range, ...]
    scalars: tuple[_Scalars, ...]
    sizes: tuple[int, ...]

    @classmethod
    def find(
        cls, plan: SavePlan, blocks: np.ndarray, named: Sequence[StateTensor], tensors: Sequence[torch.Tensor]
    ) -> BlockSources | None:
        """None unless each of `blocks`, by their places in the plan, lies in one of `tensors`, none of which overlap.

        `named` are the plan's tensors. Places in ``CopiedBlocks`` are those among `blocks`.
        """
        order = sorted((number for number, t in enumerate(tensors) if t.numel()), key=lambda n: tensors[n].data_ptr())
        begins = np.array([tensors[number].data_ptr() for number in order], np.int64)
        ends = begins + np.array([tensors[number].nbytes for number in order], np.int64)
        addresses = _addresses_of(plan, blocks, named)
        if addresses is None or np.any(ends[:-1] > begins[1:]):
            return None
        sizes = plan.block_bytes(blocks)
        found = np.searchsorted(begins, addresses, side="right") - 1
        if np.any(found < 0) or np.any(addresses + sizes > ends[found]):
            return None
        return cls._joined(np.array(order, np.int64)[found], addresses - begins[found], sizes, tensors)

    @classmethod
    def _joined(
        cls, of: np.ndarray, begins: np.ndarray, sizes: np.ndarray, tensors: Sequence[torch.Tensor]
    ) -> BlockSources:
        """Join blocks that follow each other in one tensor."""
        joined: list[tuple[int, int, list[int]]] = []  # tensor, first byte and places
        numbers: dict[torch.dtype, list[int]] = {}
        end = 0
        for place, (number, begin, size) in enumerate(zip(of.tolist(), begins.tolist(), sizes.tolist(), strict=True)):
            if tensors[number].dim() == 0 and tensors[number].device.type == "cpu":
                numbers.setdefault(tensors[number].dtype, []).append(place)
                continue
            tensor, first, found = joined[-1] if joined else (-1, 0, [])
            if number == tensor and 0 <= begin - end <= _GAP_BYTES and begin + size - first <= schema.BLOCK_BYTES:
                found.append(place)
            else:
                joined.append((number, begin, [place]))
            end = begin + size
        ranges, scalars = [], []
        for tensor, first, found in joined:
            blocks = CopiedBlocks(tuple(found), tuple((begins[found] - first).tolist()))
            ranges.append(_Range(blocks, tensor, first, int(begins[found[-1]] + sizes[found[-1]]) - first))
        for found in numbers.values():
            which, chosen = np.unique(of[found], return_inverse=True)
            blocks = CopiedBlocks(tuple(found), tuple((np.arange(len(found)) * sizes[found[0]]).tolist()))
            scalars.append(_Scalars(blocks, tuple(which.tolist()), torch.from_numpy(chosen)))
        nbytes = [each.nbytes for each in ranges] + [int(sizes[found].sum()) for found in numbers.values()]
        return cls(tuple(ranges), tuple(scalars), tuple(nbytes))

    def pieces(self, tensors: Sequence[torch.Tensor]) -> Iterator[tuple[CopiedBlocks, torch.Tensor]]:
        """Yield what to copy, as bytes, uint8, 1-D, from tensors like those in which the blocks were found."""
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


def _addresses_of(plan: SavePlan, blocks: np.ndarray, named: Sequence[StateTensor]) -> np.ndarray | None:
    """Return the address of each of the blocks; None if one has none, as it is not in its order in memory."""
    own = plan.blocks[blocks]
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
    """A plan that has been checked, and compared over ranks."""

    facts: tuple[Any, ...]  # the key of the save, and those of the inventory: equal ones lead to an equal plan
    plan: SavePlan
    fingerprint: str
    sources: BlockSources  # of this rank's blocks, in the tensors of the inventory
    chosen: frozenset[str] | None  # names of the tensors to save; None: all
    params: tuple[tuple[str, ...], ...] | None  # by group of the optimizer, names; None without an optimizer
    has_states: bool  # whether modules have extra state


@dataclass(frozen=True, eq=False)
class RecalledPlan:
    """A known plan, and the tensors that its blocks are in now."""

    known: KnownPlan
    tensors: Sequence[torch.Tensor]


class KeptPlan:
    """Keep the plan of the last save of a model. Not collective.

    The plan is a function of facts that are taken anew for each save and compared by value. So a plan that no longer
    fits is not recalled, and tensors that have moved are found where they are. It keeps no memory of the model.
    """

    def __init__(self) -> None:
        self._known: KnownPlan | None = None

    def recall(self, model: nn.Module, optimizer: torch.optim.Optimizer | None, key: Any) -> RecalledPlan | None:
        """Return the kept plan, if it is that of this save: `key` is all it depends on besides model and optimizer."""
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
        """Keep a plan, of tensors `named`, in place of another, and `more` of ``KnownPlan``; None if it cannot."""
        self._known = None
        found = take_inventory(model, optimizer)
        sources = None if found is None else BlockSources.find(plan, plan.blocks_of(rank), named, found.tensors)
        if found is None or sources is None:
            return None
        self._known = KnownPlan((key, found.facts), plan=plan, sources=sources, **more)
        return RecalledPlan(self._known, found.tensors)
