"""Memory that the ranks of a node share, with two versions of a state; it stays when ranks that wrote it have died.

A slot has what one rank saves of one version. Its number is written last: a rank that dies before leaves no version.
Who reads a slot has exchanged messages with its node since, so it needs no lock.
"""

from __future__ import annotations

import contextlib
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.launch.topology import Topology
from hpcfsdp.params.granularity import round_up
from hpcfsdp.world import before_finalize

LINE_BYTES = 64
"""Everything in a slot begins at multiples of so many bytes, which makes copies faster."""

_PREFIX_BYTES = 16  # of packed values: their length and checksum


class Values(NamedTuple):
    """What a rank saves of a version besides elements of tensors."""

    step: int
    attributes: dict[str, Any]  # of the root group, see ``root_attributes``
    small: dict[str, Any] | None  # small datasets, from rank 0
    states: dict[str, np.ndarray]  # of the rank's random number generators, by kind


def pack(values: Values) -> bytes:
    """Return the bytes of values, with their length and checksum."""
    data = pickle.dumps(tuple(values), protocol=pickle.HIGHEST_PROTOCOL)
    return np.array([len(data), schema.checksum(data)], np.uint64).tobytes() + data


def unpack(packed: bytes) -> tuple[Values, bytes]:
    """Undo ``pack``; return what follows, too. Raise ValueError if the values do not have their checksum."""
    nbytes, checksum = np.frombuffer(packed[:_PREFIX_BYTES], np.uint64).tolist()
    end = _PREFIX_BYTES + nbytes
    data = packed[_PREFIX_BYTES:end]
    if len(data) < nbytes or schema.checksum(data) != checksum:
        raise ValueError("its values do not have their checksum")
    return Values(*pickle.loads(data)), packed[end:]


class SlotSize(NamedTuple):
    """The sizes of a slot."""

    rank: int  # whose state it holds
    room: int  # bytes for packed values
    blocks: int
    data: int  # bytes of blocks

    @property
    def nbytes(self) -> int:
        return 2 * LINE_BYTES + self.room + round_up(8 * self.blocks, LINE_BYTES) + self.data


class Slot:
    """One version of one rank's blocks, in shared memory: its number, packed values, places of blocks, and bytes."""

    def __init__(self, memory: torch.Tensor, size: SlotSize) -> None:
        """`memory` is uint8, 1-D, of ``size.nbytes`` bytes, zero at first."""
        self.size = size
        begin = LINE_BYTES + size.room
        end = begin + 8 * size.blocks
        self._numbers = memory[:LINE_BYTES].numpy().view(np.int64)  # the version, 0 for none, and the step
        self._values = memory[LINE_BYTES:begin].numpy()
        self._memory, self._begin = memory, round_up(end, LINE_BYTES)
        self.places = memory[begin:end].numpy().view(np.int64)
        """The first byte in `data` of each block, in the order of the plan."""
        self.data = memory[self._begin :]

    @property
    def version(self) -> int:
        """The version that is in it, whole; 0 for none."""
        return int(self._numbers[0])

    @property
    def step(self) -> int:
        return int(self._numbers[1])

    def begin(self) -> None:
        """Make the slot hold no version: it is about to be written."""
        self._numbers[0] = 0

    def end(self, version: int, step: int) -> None:
        """Make the slot hold a version, which has been written."""
        self._numbers[1] = step
        self._numbers[0] = version

    def put_values(self, packed: bytes) -> bool:
        """Store packed values; return whether there is room for them."""
        if len(packed) > len(self._values):
            return False
        self._values[: len(packed)] = np.frombuffer(packed, np.uint8)
        return True

    def packed_values(self) -> bytes | None:
        """Return the packed values; None if they are damaged."""
        packed = self._values.tobytes()
        try:
            _, left = unpack(packed)
        except ValueError:
            return None
        return packed[: len(packed) - len(left)]

    def message(self, nbytes: int) -> torch.Tensor:
        """Return the bytes of values, places, and the first `nbytes` bytes of blocks, as one rank sends them."""
        return self._memory[LINE_BYTES : self._begin + nbytes]


@dataclass(eq=False)
class Window:
    """The slots on this node of a state with one plan."""

    generation: int  # later windows of a directory have higher ones, on all ranks
    token: str  # the same on all ranks of the window, and of no other
    plan: SavePlan
    slots: dict[tuple[int, int], tuple[Slot, Slot]]  # by the rank that writes them, and the one whose state they hold
    nbytes: int  # of this rank's slots
    settle: Callable[[], None] = lambda: None
    """Not collective. Note what has arrived of a version that is under way."""

    @classmethod
    def over(
        cls,
        generation: int,
        token: str,
        plan: SavePlan,
        regions: Mapping[int, torch.Tensor],
        sizes: Sequence[Sequence[SlotSize]],
        rank: int,
    ) -> Window:
        """Return the window over `regions`, memory by rank of this node; `sizes` are those of slots, by rank."""
        slots = {}
        for holder, memory in regions.items():
            end = 0
            for size in sizes[holder]:
                pair = [memory[begin : begin + size.nbytes] for begin in (end, end + size.nbytes)]
                slots[holder, size.rank] = Slot(pair[0], size), Slot(pair[1], size)
                end += 2 * size.nbytes
        return cls(generation, token, plan, slots, region_bytes(sizes[rank]))

    def slot(self, holder: int, rank: int, version: int) -> Slot:
        """Return the slot that is, or will be, the one of a version."""
        return self.slots[holder, rank][version % 2]

    def find(self, rank: int, version: int, step: int) -> Slot | None:
        """Return a slot on this node with the version of a rank, None without one."""
        slots = (pair[version % 2] for (_, of), pair in self.slots.items() if of == rank)
        return next((slot for slot in slots if (slot.version, slot.step) == (version, step)), None)


def region_bytes(sizes: Sequence[SlotSize]) -> int:
    """Return the bytes of a rank's slots, two of each size."""
    return sum(2 * size.nbytes for size in sizes)


def partners(topology: Topology, rank: int) -> tuple[int | None, tuple[int, ...]]:
    """Return the rank of the next node that has a copy for `rank`, None on a single node; and those it has one for."""
    home, count = topology.node_rank(rank), topology.num_nodes
    if count == 1:
        return None, ()
    before = topology.nodes[(home - 1) % count]
    kept = tuple(other for other in before if topology.proxy(other, home) == rank)
    return topology.proxy(rank, (home + 1) % count), kept


_windows: dict[Path, list[Window]] = {}
"""By folder of checkpoints, oldest first; they outlive managers, communicators and the world."""


def of(directory: Path) -> list[Window]:
    """Not collective. Return the windows of a folder, which the caller may change."""
    return _windows.setdefault(directory, [])


def drop(directory: Path | None = None) -> None:
    """Not collective. Forget the versions in memory of a folder, or of all."""
    for each in list(_windows) if directory is None else [directory]:
        _windows.pop(each, None)


def keep(directory: Path, token: str) -> None:
    """Not collective. Forget the versions of a folder but those in one window."""
    of(directory)[:] = [window for window in of(directory) if window.token == token]


def held_bytes() -> int:
    """Not collective. Return the bytes that versions in memory take on this rank."""
    return sum(window.nbytes for windows in _windows.values() for window in windows)


def _settle() -> None:
    """Note what has arrived, before all that is under way ends."""
    for window in (window for windows in _windows.values() for window in windows):
        with contextlib.suppress(Exception):  # of any kind: its ranks may have been lost
            window.settle()


before_finalize(_settle, _settle, drop)
