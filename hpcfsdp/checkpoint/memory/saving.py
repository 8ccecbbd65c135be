"""Save versions in memory: each rank copies its blocks, and sends the copy to another node while training goes on.

Two slots take turns. A version is begun once all ranks have the one before whole, so one whole version always exists.
"""

from __future__ import annotations

import secrets
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from hpcfsdp import _compat
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.memory import windows
from hpcfsdp.checkpoint.memory.windows import LINE_BYTES, SlotSize, Values, Window
from hpcfsdp.checkpoint.saving.content import Collected
from hpcfsdp.checkpoint.saving.kept_plan import BlockSources, KnownPlan, Pieces, in_groups
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.checkpoint.saving.temporary import BlockWriter
from hpcfsdp.comm import raise_together
from hpcfsdp.comm.mpi.node_memory import memory_at
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.granularity import round_up
from hpcfsdp.state.tensors import GatherBuffer, StateTensor

if TYPE_CHECKING:
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator

_SLACK_BYTES = 1 << 14  # room for values that grow, beside a quarter of what they are


@dataclass(eq=False)
class _Part:
    """Blocks that this rank copies into one range of a slot."""

    rank: int  # whose blocks they are, and whose slot it is
    blocks: np.ndarray  # their places in the plan
    positions: np.ndarray  # their places among that rank's blocks
    sources: BlockSources | None = None  # None: they are found by the names of their tensors
    begin: int = 0  # of the range, among the slot's bytes of blocks
    room: int = 0
    end: int = 0  # of what has been copied
    places: np.ndarray = field(default_factory=lambda: np.empty(0, np.int64))  # of each block in the slot

    def measure(self, plan: SavePlan) -> None:
        """Set the bytes of the range."""
        sizes = plan.block_bytes(self.blocks).tolist() if self.sources is None else self.sources.sizes
        self.room = sum(round_up(size, LINE_BYTES) for size in sizes)

    def start(self) -> None:
        """Begin to fill the range."""
        self.end, self.places = self.begin, np.zeros(len(self.blocks), np.int64)

    def add(self, pieces: Pieces, data: torch.Tensor) -> list[tuple[torch.Tensor, torch.Tensor]] | None:
        """Give pieces their places in `data`; return what to copy where, None without room."""
        pairs = []
        for blocks, memory in pieces:
            nbytes = memory.numel()
            if self.end + nbytes > self.begin + self.room:
                return None
            self.places[list(blocks.places)] = self.end + np.asarray(blocks.begins)
            pairs.append((data.narrow(0, self.end, nbytes), memory))
            self.end += round_up(nbytes, LINE_BYTES)
        return pairs


@dataclass(eq=False)
class _Version:
    """A version that is under way on this rank: what is left to be sent and received of it."""

    number: int
    step: int
    receives: list[tuple[_Part, Any]] = field(default_factory=list)  # of ranks that have their copies here
    sends: list[Any] = field(default_factory=list)


class MemorySaver:
    """Saves versions of a model in windows of a folder."""

    def __init__(self, directory: Path) -> None:
        self._directory = directory
        self._comm: MpiCommunicator | None = None
        self._fingerprint = ""  # of the plan
        self._known: KnownPlan | None = None  # the plan in which the sources were found
        self._parts: list[_Part] = []  # what goes to the partner; what that has itself; what this rank has of others
        self._window: Window | None = None
        self._number = 0  # of the last version in the window
        self._version: _Version | None = None
        self.sent_bytes = 0  # by this rank, in all

    def needs_tensors(self, comm: MpiCommunicator, collected: Collected) -> bool:
        """Return whether content must be collected again, without a plan that was kept; the same on all ranks."""
        recalled = collected.recalled
        is_known = comm is self._comm and recalled is not None and recalled.known is self._known
        return not collected.tensors and not is_known

    @_compat.outside_of_modes
    @torch.no_grad()
    def save(self, comm: MpiCommunicator, collected: Collected, step: int, states: dict[str, np.ndarray]) -> None:
        """Begin a version, after ``finish`` on all ranks; then values may be changed. Collective over `comm`.

        `comm` must be the same object each time. Raise on all ranks if memory cannot be shared, or a copy fails.
        """
        content = collected.content
        small = None
        if comm.rank == 0:  # without what grows with the steps
            small = {path: value for path, value in content.small.items() if not path.startswith(f"{schema.METRICS}/")}
        packed = windows.pack(Values(step, dict(content.attributes), small, states))
        while True:
            version = _Version(self._number + 1, step)
            with raise_together(comm) as exchange:
                self._plan(comm, collected)
                exchange.mine = self._begin(collected, packed, version)
            if all(exchange.everyone):
                break
            self._make_window(comm, content.plan, len(packed))
        first, second, *others = self._parts
        collected.gather(comm, lambda buffer: self._copy(first, collected, buffer, version))
        own = self._slot(first, version)
        for part in (first, second):
            own.places[part.positions] = part.places
        own.end(version.number, step)
        self._number, self._version = version.number, version
        partner, _ = windows.partners(comm.topology, comm.rank)
        if partner is not None:
            message = own.message(first.room)
            version.sends.append(comm.send(message, partner, async_op=True))
            self.sent_bytes += message.numel()
        for part in others:
            message = self._slot(part, version).message(part.begin)
            version.receives.append((part, comm.recv(message, part.rank, async_op=True)[1]))
        if version.number == 1:
            # Not at the next version: windows before this one take as much memory again.
            with raise_together(comm):
                self.finish()
            windows.of(self._directory)[:] = [self._window]

    def advance(self) -> None:
        """Not collective. Note the copies of other ranks that have arrived."""
        version = self._version
        for part, work in list(version.receives) if version is not None else ():
            if work.is_completed() and not work.failed:
                slot = self._slot(part, version)
                slot.places[part.positions] = part.places  # the sender has others for what this rank has itself
                slot.end(version.number, version.step)
                version.receives.remove((part, work))

    def finish(self) -> None:
        """Not collective, but wait for partners: until this rank has all of the version that is under way.

        Raise CommunicationError for a lost partner.
        """
        if self._version is None:
            return
        try:
            for work in (*(work for _, work in self._version.receives), *self._version.sends):
                work.wait()
        finally:
            self.advance()  # what has arrived counts, whoever has been lost
        self._version = None

    def _slot(self, part: _Part, version: _Version) -> windows.Slot:
        assert self._window is not None and self._comm is not None
        return self._window.slot(self._comm.rank, part.rank, version.number)

    def _begin(self, collected: Collected, packed: bytes, version: _Version) -> bool:
        """Copy what needs no buffer; return whether there is a window with room for it."""
        if self._window is None:
            return False
        slots = [self._slot(part, version) for part in self._parts]
        for part, slot in zip(self._parts, slots, strict=True):
            slot.begin()
            part.start()
        return slots[0].put_values(packed) and all(self._copy(part, collected, None, version) for part in self._parts)

    def _copy(self, part: _Part, collected: Collected, buffer: GatherBuffer | None, version: _Version) -> bool:
        """Copy a part's pieces in a buffer, or in memory that is there; return whether there was room."""
        data = self._slot(part, version).data
        pieces = collected.pieces(part.blocks, part.sources)(buffer)
        # Only scalars are copied to be pieces of a plan that is known: all may be there at a time.
        for group in in_groups(pieces, BlockWriter.AT_ONCE) if part.sources is None else [pieces]:
            pairs = part.add(group, data)
            if pairs is None:
                return False
            for target, source in pairs:
                target.copy_(source)
        return True

    def _plan(self, comm: MpiCommunicator, collected: Collected) -> None:
        """Find the parts, for a plan or ranks other than before, and their sources."""
        plan, recalled, rank = collected.content.plan, collected.recalled, comm.rank
        fingerprint = plan.fingerprint() if collected.tensors else self._fingerprint
        if comm is not self._comm or fingerprint != self._fingerprint:
            self._comm, self._fingerprint, self._window, self._known = comm, fingerprint, None, None
            partner, others = windows.partners(comm.topology, rank)
            own = plan.blocks_of(rank)
            has_copy = held_by(plan, collected.tensors, own, partner)
            self._parts = [_Part(rank, own[which], np.flatnonzero(which)) for which in (~has_copy, has_copy)]
            for other in others:
                blocks = plan.blocks_of(other)
                which = held_by(plan, collected.tensors, blocks, rank)
                self._parts.append(_Part(other, blocks[which], np.flatnonzero(which)))
        known = None if recalled is None else recalled.known
        if known is None or known is not self._known:
            for part in self._parts:
                part.sources = None
                if recalled is not None:
                    part.sources = BlockSources.find(plan, part.blocks, collected.tensors, recalled.tensors)
                    if part.sources is None:  # those of this rank's own blocks were found, in the same tensors
                        raise CheckpointError(f"{self._directory}: blocks of rank {part.rank} are not in one piece")
            self._known = known

    def _make_window(self, comm: MpiCommunicator, plan: SavePlan, values_bytes: int) -> None:
        """Share memory for two versions of the parts, and values of this length. Collective over `comm`."""
        known = windows.of(self._directory)
        generation = max((window.generation for window in known), default=0)
        first, second, *others = self._parts
        with raise_together(comm) as exchange:
            for part in self._parts:
                part.measure(plan)
            first.begin, second.begin = 0, first.room
            room = round_up(values_bytes * 5 // 4 + _SLACK_BYTES, LINE_BYTES)
            exchange.mine = room, first.room, generation, secrets.token_hex(8)
        everyone = exchange.everyone
        sizes = [SlotSize(comm.rank, room, len(first.blocks) + len(second.blocks), first.room + second.room)]
        for part in others:
            room, part.begin, *_ = everyone[part.rank]
            sizes.append(SlotSize(part.rank, room, len(plan.blocks_of(part.rank)), part.begin + part.room))
        of_ranks = comm.all_gather_object(sizes)
        memory = comm.alloc(max(map(windows.region_bytes, of_ranks)), torch.uint8)
        shared = memory_at(memory)
        regions = {comm.rank: memory}
        if shared is not None:
            regions = dict(zip(comm.topology.node_of(comm.rank), shared.regions, strict=True))
        comm.free(memory)  # the slots keep it
        generation = 1 + max(one[2] for one in everyone)
        self._window = Window.over(generation, everyone[0][3], plan, regions, of_ranks, comm.rank)
        self._number = 0
        self._window.settle = self.advance
        known.append(self._window)


def held_by(plan: SavePlan, tensors: Sequence[StateTensor], blocks: np.ndarray, rank: int | None) -> np.ndarray:
    """Return for each block, by its place in the plan, whether `rank` has a replica of its elements.

    `tensors` are those of the plan. Where every rank keeps a tensor whole, that of the rank that saves it counts.
    """
    found = np.zeros(len(blocks), bool)
    if rank is None:
        return found
    of, starts = plan.blocks["tensor"][blocks], plan.blocks["start"][blocks].astype(np.int64)
    numbers, firsts = np.unique(of, return_index=True)
    for number, first, end in zip(numbers.tolist(), firsts, [*firsts[1:], len(blocks)], strict=True):
        tensor = tensors[number]
        if tensor.buffer is None and tensor.runs.ranks.shape[1] > 1:
            places = np.searchsorted(tensor.runs.edges, starts[first:end], side="right") - 1
            found[first:end] = (tensor.runs.ranks[places] == rank).any(axis=1)
    return found
