"""Load a version from memory: ranks read what is on their node, and ask others for the rest."""

from __future__ import annotations

import contextlib
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, TypeAlias

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.catalog import checkpoint_path
from hpcfsdp.checkpoint.format.footer import Footer
from hpcfsdp.checkpoint.format.index import CheckpointIndex, make_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.loading.loader import IndexOfRank0, Opened, Piece
from hpcfsdp.checkpoint.loading.match import FileNames
from hpcfsdp.checkpoint.memory import windows
from hpcfsdp.checkpoint.memory.windows import Slot
from hpcfsdp.checkpoint.saving.plan import SavePlan
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointCorruptError
from hpcfsdp.state.model import hold_shards, model_tensors
from hpcfsdp.state.tensors import LocalPiece

_PORTION_BYTES = 32 << 20  # of rows that a rank asks others for at a time, unless one piece needs more


_Row: TypeAlias = tuple[int, int]
"""A row of the table of extents: the rank that saved it, and its place among the blocks of that rank."""


class Held(NamedTuple):
    """A version that this process can read, or a part of it."""

    generation: int  # of the window
    number: int  # in it
    token: str
    step: int
    num_ranks: int  # that have saved it
    ranks: tuple[int, ...]  # those whose slots are on this node


def held(directory: Path) -> list[Held]:
    """Not collective. Return what this process can read of the versions of a folder."""
    found = []
    for window in windows.of(directory):
        with contextlib.suppress(Exception):  # of any kind: its ranks may have been lost
            window.settle()
        parts: dict[tuple[int, int], set[int]] = {}
        for slot in (slot for pair in window.slots.values() for slot in pair):
            if slot.version and slot.packed_values() is not None:
                parts.setdefault((slot.version, slot.step), set()).add(slot.size.rank)
        for (number, step), ranks in parts.items():
            of_all = window.plan.num_ranks
            found.append(Held(window.generation, number, window.token, step, of_all, tuple(sorted(ranks))))
    return found


def newest(everyone: Sequence[Sequence[Held]]) -> Held | None:
    """Return the last version of which ranks together have all parts, None without one. Its `ranks` are all.

    `everyone` is by rank what each holds.
    """
    parts: dict[tuple[int, int, str, int], set[int]] = {}
    facts = {}
    for one in (one for found in everyone for one in found):
        key = one.generation, one.number, one.token, one.step
        parts.setdefault(key, set()).update(one.ranks)
        facts[key] = one
    whole = [key for key, ranks in parts.items() if len(ranks) == facts[key].num_ranks]
    return facts[max(whole)]._replace(ranks=tuple(range(facts[max(whole)].num_ranks))) if whole else None


class MemorySource:
    """A version in memory as a source for ``load_from``."""

    def __init__(self, directory: Path, version: Held, everyone: Sequence[Sequence[Held]], model: nn.Module) -> None:
        """Not collective. `everyone` is by rank what each holds, and the same on all ranks, as `version` is."""
        self.path, self._version, self._model = checkpoint_path(directory, version.step), version, model
        parts = [[one.ranks for one in found if one[:4] == version[:4]] for found in everyone]
        self._is_divided = any(found != [version.ranks] for found in parts)
        # By rank of the version, those of the model that can read its slot.
        self._holders = {
            of: [rank for rank, found in enumerate(parts) if found and of in found[0]] for of in version.ranks
        }
        self._window = next((window for window in windows.of(directory) if window.token == version.token), None)
        found = (
            {}
            if self._window is None
            else {of: self._window.find(of, version.number, version.step) for of in version.ranks}
        )
        self._slots = {of: slot for of, slot in found.items() if slot is not None}

    def open(self, comm: Communicator, stack: contextlib.ExitStack) -> Opened:
        """Open the version. Collective over `comm`, the ranks of the model."""
        plan = None if self._window is None else self._window.plan
        source = min(rank for holders in self._holders.values() for rank in holders)
        if source:  # rank 0 is new
            plan = comm.broadcast_object(plan, source)
        packed = self._gather_values(comm)
        shared = IndexOfRank0(comm, lambda: self._make_index(plan, packed))
        reader = stack.enter_context(MemoryReader(shared.index, comm, self._slots, self._holders, self._is_divided))
        if self._is_divided:
            with raise_together(comm):
                odd = self._of_other_shapes(shared.index)
            reader.keep(odd)
        return shared.opened(reader, [comm.rank])

    def _gather_values(self, comm: Communicator) -> Sequence[torch.Tensor]:
        """Return on rank 0 the packed values of the version's ranks, by the rank that has sent them. Collective."""
        own = [self._slots[of].packed_values() for of in self._sent_by(comm.rank)]
        mine = torch.from_numpy(np.frombuffer(bytearray(b"".join(each or b"" for each in own)), np.uint8))
        counts = torch.empty(comm.size, dtype=torch.int64)
        comm.all_gather_into_tensor(counts, torch.tensor([mine.numel()]))
        received = [torch.empty(count, dtype=torch.uint8) for count in counts.tolist()]
        comm.gather(None if comm.rank else received, mine, 0)
        return received

    def _sent_by(self, rank: int) -> list[int]:
        return [of for of, holders in self._holders.items() if holders[0] == rank]

    def _make_index(self, plan: SavePlan | None, packed: Sequence[torch.Tensor]) -> CheckpointIndex:
        """Return the index; in its rows ``byte_offset`` is the place of a block among those of its rank."""
        assert plan is not None
        values, size = {}, self._version.num_ranks
        try:
            for rank, data in enumerate(packed):
                left = data.numpy().tobytes()
                for of in self._sent_by(rank):
                    values[of], left = windows.unpack(left)
            small = dict(values[0].small or {})
            for kind in values[0].states:
                small[f"{schema.RNG}/{kind}"] = np.stack([values[of].states[kind] for of in range(size)])
            attributes = {**values[0].attributes, "format_version": schema.FORMAT_VERSION, "source": "memory"}
            attributes |= {"path": self.path, "step": self._version.step, "world_size": size}
            rows = np.zeros(len(plan.blocks), schema.EXTENT_DTYPE)
            for name in plan.blocks.dtype.names:
                rows[name] = plan.blocks[name]
            for of in range(size):
                own = plan.blocks_of(of)
                rows["byte_offset"][own] = np.arange(len(own))
            edges = np.searchsorted(rows["tensor"], np.arange(len(plan.specs) + 1)).tolist()
            return make_index(
                small,
                attributes,
                tensors={spec.path: spec for spec in plan.specs},
                links=dict(plan.links),
                extents=rows,
                first_rows={spec.path: (edges[at], edges[at + 1]) for at, spec in enumerate(plan.specs)},
                footer=Footer(0, (), 0),
            )
        except ValueError as error:
            raise CheckpointCorruptError(f"{self.path}: in memory: {error}") from error

    def _of_other_shapes(self, index: CheckpointIndex) -> list[Piece]:
        """Return tensors of the model that have another shape here, which are read before the others are matched."""
        hold_shards(self._model)
        tensors = model_tensors(self._model)
        names = FileNames(index, {name for tensor in tensors for name in (tensor.name, *tensor.aliases)})
        found = []
        for tensor in tensors:
            path = names.path_in(tensor)
            if path is not None and (spec := index.resolve(path)).shape != tuple(tensor.shape):
                found.append((path, LocalPiece(0, torch.empty(spec.numel, device="meta")), tensor.dtype))
        return found


class MemoryReader(BlockReader):
    """Reads slots on this node, and what ranks of other nodes send."""

    def __init__(
        self,
        index: CheckpointIndex,
        comm: Communicator,
        slots: Mapping[int, Slot],
        holders: Mapping[int, Sequence[int]],
        is_divided: bool,
    ) -> None:
        """Not collective. `slots` are by rank of the version; `holders` the ranks of `comm` that have each of them."""
        super().__init__(index, verify=False)  # memory has no checksums of blocks
        self._comm, self._slots, self._holders, self._is_divided = comm, slots, holders, is_divided
        self._fetched: dict[_Row, torch.Tensor] = {}
        self._sizes: dict[int, list[int]] = {}  # bytes of each block, by rank of the version

    def __enter__(self) -> MemoryReader:
        return self

    def _fill(self, spec: schema.TensorSpec, row: Any, target: np.ndarray | memoryview, away: int = 0) -> None:
        output = memoryview(target).cast("B")
        memory = self._memory_of((row.rank, row.byte_offset), row.numel * spec.itemsize)
        output[:] = memoryview(memory.numpy())[away : away + output.nbytes]

    def _memory_of(self, row: _Row, nbytes: int) -> torch.Tensor:
        of, place = row
        if of not in self._slots:
            return self._fetched[row]
        slot = self._slots[of]
        return slot.data.narrow(0, int(slot.places[place]), nbytes)

    def portions(self, pieces: Sequence[Piece]) -> Iterator[Sequence[Piece]]:
        """Yield pieces of tensors, as the rows that they need have arrived. Collective over the ranks, if divided."""
        if not self._is_divided:
            yield pieces
            return
        portions = list(self._divide(pieces))
        count = torch.tensor([len(portions)])
        self._comm.all_reduce(count, "max")
        portions += [([], {})] * (int(count) - len(portions))
        for some, rows in portions:
            fetched = self._fetch(rows)
            self._fetched |= fetched
            yield some
            for row in fetched:
                del self._fetched[row]

    def keep(self, pieces: Sequence[Piece]) -> None:
        """Have what pieces need from now on. Collective over the ranks."""
        self._fetched |= self._fetch({row: size for each in pieces for row, size in self._missing(each).items()})

    def _divide(self, pieces: Iterable[Piece]) -> Iterator[tuple[list[Piece], dict[_Row, int]]]:
        """Yield pieces with the rows of other nodes that they need, and their bytes."""
        some: list[Piece] = []
        rows: dict[_Row, int] = {}
        for piece in (part for whole in pieces for part in _cut(whole)):
            missing = self._missing(piece)
            if some and sum(missing.values()) + sum(rows.values()) > _PORTION_BYTES:
                yield some, rows
                some, rows = [], {}
            some.append(piece)
            rows |= missing
        if some:
            yield some, rows

    def _missing(self, piece: Piece) -> dict[_Row, int]:
        path, memory, _ = piece
        spec, rows = self._overlapping(path, memory.start, memory.numel)
        return {(row.rank, row.byte_offset): row.numel * spec.itemsize for row in rows if row.rank not in self._slots}

    def _fetch(self, rows: Mapping[_Row, int]) -> dict[_Row, torch.Tensor]:
        """Return the bytes of rows of other nodes, given with their sizes. Collective over the ranks."""
        comm = self._comm
        wanted: list[list[_Row]] = [[] for _ in range(comm.size)]
        for row in rows:
            holders = self._holders[row[0]]
            wanted[holders[comm.rank % len(holders)]].append(row)
        requests = [torch.tensor(of_rank, dtype=torch.int64).view(-1) for of_rank in wanted]
        counts = [torch.empty(1, dtype=torch.int64) for _ in wanted]
        comm.all_to_all(counts, [torch.tensor([each.numel()]) for each in requests])
        asked = [torch.empty(int(count), dtype=torch.int64) for count in counts]
        comm.all_to_all(asked, requests)
        sent = [self._joined(each.view(-1, 2).tolist()) for each in asked]
        received = [torch.empty(sum(map(rows.__getitem__, each)), dtype=torch.uint8) for each in wanted]
        comm.all_to_all(received, sent)
        return {
            row: memory
            for of_rank, data in zip(wanted, received, strict=True)
            for row, memory in zip(of_rank, data.split([rows[row] for row in of_rank]), strict=True)
        }

    def _joined(self, rows: Sequence[Sequence[int]]) -> torch.Tensor:
        """Return the bytes of rows that are on this node."""
        parts = [torch.empty(0, dtype=torch.uint8)]
        for of, place in rows:
            parts.append(self._memory_of((of, place), self._sizes_of(of)[place]))
        return torch.cat(parts)

    def _sizes_of(self, rank: int) -> list[int]:
        if rank not in self._sizes:
            itemsizes = np.array([spec.itemsize for spec in self._index.tensors.values()], np.int64)
            rows = self._index.extents[self._index.extents["rank"] == rank]
            self._sizes[rank] = (rows["numel"].astype(np.int64) * itemsizes[rows["tensor"]]).tolist()
        return self._sizes[rank]


def _cut(piece: Piece) -> Iterator[Piece]:
    """Yield a piece in parts of at most ``_PORTION_BYTES``, if it is in its order in memory."""
    path, whole, dtype = piece
    tensor, most = whole.tensor, _PORTION_BYTES // dtype.itemsize
    if whole.numel <= most or not tensor.is_contiguous() or tensor.is_conj() or tensor.is_neg():
        yield piece
        return
    for begin, part in zip(range(0, whole.numel, most), whole.flat().split(most), strict=True):
        yield path, LocalPiece(whole.start + begin, part), dtype
