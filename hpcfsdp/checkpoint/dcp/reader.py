"""``HDF5Reader``: ``torch.distributed.checkpoint.load`` reads an HDF5 file, each rank what it needs of it."""

from __future__ import annotations

import dataclasses
import io
import itertools
import os
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hpcfsdp.checkpoint.dcp import entry_names as names
from hpcfsdp.checkpoint.dcp.entry_names import Entry, Names, Request
from hpcfsdp.checkpoint.format.schema import TensorSpec, numpy_dtype
from hpcfsdp.checkpoint.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.plain_values import rebuilt
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError
from hpcfsdp.flat.layout import Box
from hpcfsdp.reshard.boxes import levels_of

AT_ONCE = 64 << 20
"""About as many bytes of a box are in memory at a time, besides the tensor that they are for."""

_GAP_BYTES = 1 << 16
"""What is read and thrown away rather than begin another read, where nothing has to be verified."""


class HDF5Reader(StorageReader):
    """Reads a state dict from one HDF5 file: ``dcp.load(state, storage_reader=HDF5Reader(path))``.

    The file may be one that ``HDF5Writer`` or ``hpcfsdp.checkpoint.save`` has written, on any number of ranks. Every
    rank reads what it needs and compares it with its checksums. Nothing of the file is unpickled.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        """Not collective, touches no disk.

        Args:
            path: of the file, which all ranks see. None: it is given to ``dcp.load`` as `checkpoint_id`.
            verify: compare what is read with its checksums.
        """
        self._path, self._verify = path, verify
        self._opened: tuple[CheckpointIndex, Request] | None = None
        self._failure: CheckpointError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Whether it is the path of a file that is there."""
        return os.path.isfile(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Begin anew; not collective.

        Args:
            checkpoint_id: the path of the file, in place of the one that was given before.
        """
        self._opened = self._failure = None
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """What the file holds, each tensor as one chunk; not collective.

        ``dcp.load`` goes on after an error of this method, with another message or none. What is wrong with the file is
        therefore said by the next one that needs it: ``set_up_storage_reader``, or whoever looks into the result.
        """
        self._opened = self._failure = None
        try:
            if self._path is None:
                raise CheckpointError("no path: give one to HDF5Reader, or as checkpoint_id to torch's load")
            index = open_index(Path(os.path.abspath(os.path.expanduser(self._path))))
            known = Names(_entries(index))
        except CheckpointError as error:
            self._failure = error
            return Metadata(_Unreadable(error))
        request = Request(known, lambda one, other: _describe(index, one) == _describe(index, other))
        self._opened = index, request
        return Metadata(_Found(known, request, index), {name: entry.path for name, entry in known.entries.items()})

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Not collective.

        Raises:
            CheckpointError: the file cannot be read; see ``open_index``.
        """
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Not collective. Has the plan say which file this rank reads.

        Raises:
            CheckpointMismatchError: the names that were asked for are not those of the file, nor all of them together
                the same under other outer keys.
        """
        index, _ = self._index()
        self._settled(plan)
        mark = index.seal.digest
        return dataclasses.replace(plan, storage_data=(str(index.info.path), mark))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """On the coordinator alone.

        Raises:
            CheckpointMismatchError: ranks have opened different files.
        """
        for rank, plan in enumerate(plans):
            if plan.storage_data[1] != plans[0].storage_data[1]:
                raise CheckpointMismatchError(
                    f"rank 0 reads {plans[0].storage_data[0]}, rank {rank} {plan.storage_data[0]}, which is another "
                    "checkpoint, or has been replaced in between: have all ranks read one file"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items; not collective.

        Raises:
            CheckpointError: they cannot be read.
            CheckpointCorruptError: they are not what was written.
            CheckpointReplacedError: the file is another one by now.
        """
        index, _ = self._index()
        entries = self._settled(plan)
        found = [(entries[item.storage_index.fqn], item) for item in plan.items]
        # In the order of the file, the values that are no tensors before it.
        rows = {path: first for path, (first, _) in index.first_rows.items()}
        found.sort(
            key=lambda pair: (rows.get(index.links.get(pair[0].dataset, pair[0].dataset), -1), pair[1].storage_offsets)
        )
        with BlockReader(index, verify=self._verify) as blocks:
            reader = BoxReader(index, blocks, verify=self._verify)
            for entry, item in found:
                if item.type == LoadItemType.BYTE_IO:
                    planner.load_bytes(item, _pickled(value_of(index, entry)))
                else:
                    _read_tensor(index, reader, entry, item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _settled(self, plan: LoadPlan) -> dict[str, Entry]:
        """The entry of each name of a plan."""
        index, request = self._index()
        wanted = [item.storage_index.fqn for item in plan.items]
        try:
            entries = request.settled(wanted)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{index.info.path}: {error}") from None
        for name in wanted:
            if name not in entries:
                raise CheckpointMismatchError(f"{index.info.path}: holds no {name!r}")
        return entries

    def _index(self) -> tuple[CheckpointIndex, Request]:
        if self._opened is None:
            self.read_metadata()
        if self._failure is not None:
            raise self._failure
        assert self._opened is not None
        return self._opened


def _entries(index: CheckpointIndex) -> list[Entry]:
    if index.state_dict is not None:
        return [Entry.from_json(entry) for entry in index.state_dict]
    return names.native_entries([*index.tensors, *index.links], index.param_groups, index.scalars, index.info.extra)


def value_of(index: CheckpointIndex, entry: Entry) -> Any:
    """The value of an entry that is no tensor."""
    if entry.kind == names.SCALAR:
        return rebuilt((index.scalars or {})[str(entry.place[0])], entry.types)
    return rebuilt(
        names.get(index.param_groups if entry.kind == names.GROUP else index.info.extra, entry.place), entry.types
    )


class _Found(dict):
    """torch's description of what a file holds. Entries are also found under other names, see ``Names``."""

    def __init__(self, known: Names, request: Request, index: CheckpointIndex) -> None:
        super().__init__({name: _describe(index, entry) for name, entry in known.entries.items()})
        self._request, self._file = request, index

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._request.find(name) is not None

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        entry = self._request.find(name)
        if entry is None:
            raise KeyError(name)
        return _describe(self._file, entry)

    def get(self, name: str, default: Any = None) -> Any:
        try:
            return self[name]
        except KeyError:
            return default


class _Unreadable(dict):
    """In place of what a file holds: raises what is wrong with it."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *_: object) -> Any:
        raise self._error

    __iter__ = __len__ = __contains__ = __getitem__ = keys = values = items = get = _raise


def _describe(index: CheckpointIndex, entry: Entry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.kind != names.TENSOR:
        return BytesStorageMetadata()
    spec = index.resolve(entry.dataset)
    size = torch.Size(spec.shape)
    whole = ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(TensorProperties(dtype=getattr(torch, spec.dtype)), size, [whole])


def _pickled(value: Any) -> io.BytesIO:
    """What planners expect: they hand it to ``torch.load``. It has never been on a disk."""
    stream = io.BytesIO()
    torch.save(value, stream)
    stream.seek(0)
    return stream


def _read_tensor(index: CheckpointIndex, reader: BoxReader, entry: Entry, item: ReadItem, planner: LoadPlanner) -> None:
    spec = index.resolve(entry.dataset)
    target = planner.resolve_tensor(item).detach()
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    if tuple(target.shape) != box.sizes:
        raise CheckpointMismatchError(
            f"{index.info.path}: the planner has memory of shape {list(target.shape)} for {list(box.sizes)} of "
            f"{spec.path}"
        )
    for part, narrowed in slabs(box, spec.itemsize):
        values = torch.from_numpy(reader.read(spec, part)).view(getattr(torch, spec.dtype))
        narrowed(target).copy_(values.view(part.sizes))
    planner.commit_tensor(item, target)


def slabs(box: Box, itemsize: int) -> Iterator[tuple[Box, Callable[[torch.Tensor], torch.Tensor]]]:
    """A box in parts of about ``AT_ONCE`` bytes, cut along its first dimension, and what narrows its tensor to each."""
    if not box.sizes:
        yield box, lambda tensor: tensor
        return
    length = box.sizes[0]
    step = max(1, AT_ONCE // max(1, box.numel // max(1, length) * itemsize))
    for first in range(0, length, step):
        size = min(step, length - first)
        part = Box((box.offsets[0] + first, *box.offsets[1:]), (size, *box.sizes[1:]))
        yield part, lambda tensor, first=first, size=size: tensor.narrow(0, first, size)


class BoxReader:
    """Reads boxes of tensors, no block of the file twice for a box."""

    def __init__(self, index: CheckpointIndex, blocks: BlockReader, *, verify: bool) -> None:
        """Not collective.

        Args:
            blocks: reads runs.
            verify: whether `blocks` reads whole blocks, to verify them.
        """
        self._index, self._blocks, self._verify = index, blocks, verify

    def read(self, spec: TensorSpec, box: Box) -> np.ndarray:
        """The elements of a box of a tensor, 1-D, in ``schema.numpy_dtype`` of its dtype.

        Raises:
            CheckpointCorruptError: they are not those that were written.
        """
        output = np.empty(box.numel, numpy_dtype(spec.dtype))
        if not box.numel:
            return output
        levels = levels_of(spec.shape, box)
        starts, numel = levels.starts(len(levels.repeated)), levels.numel
        if len(starts) == 1:
            return self._blocks.read(spec.path, levels.start, numel)
        for first, end in self._groups(spec, starts, numel):
            low = int(starts[first])
            stretch = self._blocks.read(spec.path, low, int(starts[end - 1]) + numel - low)
            runs = np.lib.stride_tricks.sliding_window_view(stretch, numel)
            output[first * numel : end * numel].reshape(-1, numel)[:] = runs[starts[first:end] - low]
        return output

    def _groups(self, spec: TensorSpec, starts: np.ndarray, numel: int) -> Iterator[tuple[int, int]]:
        """Runs, as (first, end), that are best read in one stretch: those that lie in the same blocks."""
        if self._verify:
            rows = np.sort(self._index.rows_of(spec.path), order="start")
            ends = (rows["start"] + (rows["count"] - np.uint64(1)) * rows["stride"] + rows["numel"]).astype(np.int64)
            begins = rows["start"].astype(np.int64)
            # Blocks that overlap, as strided ones do, count as one: they are read together.
            alone = begins >= np.concatenate(([0], np.maximum.accumulate(ends)[:-1]))
            clusters = np.cumsum(alone)
            first = clusters[np.searchsorted(begins, starts, side="right") - 1]
            last = clusters[np.searchsorted(begins, starts + numel - 1, side="right") - 1]
            apart = first[1:] > last[:-1]
        else:
            apart = (starts[1:] - starts[:-1] - numel) * spec.itemsize > _GAP_BYTES
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
        most = max(1, AT_ONCE // spec.itemsize)
        for first, end in itertools.pairwise(edges):
            while first < end:
                stop = int(np.searchsorted(starts[first:end], starts[first] + most, side="left")) + first
                yield first, max(stop, first + 1)
                first = max(stop, first + 1)
