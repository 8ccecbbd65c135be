"""``HDF5Reader``: ``torch.distributed.checkpoint.load`` reads an HDF5 file; each rank reads what it needs."""

import dataclasses
import io
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint import metadata as torch_metadata
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from hpcfsdp.checkpoint.format import entry_names as names
from hpcfsdp.checkpoint.format.entry_names import EntryRequest, StateEntry
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.plain_values import from_plain
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec, numpy_dtype
from hpcfsdp.checkpoint.saving.state_reads import await_reads
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import levels_of

AT_ONCE = 64 << 20
"""About as many bytes of a box are in memory at a time, besides the tensor that they are for."""


class HDF5Reader(StorageReader):
    """Read a state dict from one HDF5 file: ``dcp.load(state, storage_reader=HDF5Reader(path))``.

    The file may be one that ``HDF5Writer`` or ``hpcfsdp.checkpoint.save`` has written, on any number of ranks. Every
    rank reads what it needs and compares it with its checksums. Nothing of the file is unpickled.
    """

    def __init__(self, path: str | os.PathLike[str] | None = None, *, verify: bool = True) -> None:
        """Not collective, touch no disk.

        Args:
            path: the file to read, which all ranks must see. None: pass the path to ``dcp.load`` as `checkpoint_id`.
            verify: compare the bytes with their checksums.
        """
        self._path, self._verify = path, verify
        self._opened: tuple[CheckpointIndex, EntryRequest] | None = None
        self._failure: CheckpointError | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` is the path of an existing file."""
        return os.path.isfile(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start again, with `checkpoint_id` as the path if given; not collective."""
        self._opened = self._failure = None
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def read_metadata(self) -> Metadata:
        """Describe the file's content, each tensor as one chunk; not collective."""
        # ``dcp.load`` continues after an error of this method. So the next use raises it.
        self._opened = self._failure = None
        try:
            if self._path is None:
                raise CheckpointError("no path: give one to HDF5Reader, or as checkpoint_id to torch's load")
            index = open_index(Path(os.path.abspath(os.path.expanduser(self._path))))
            if index.state_dict is not None:
                entries = [StateEntry.from_json(entry) for entry in index.state_dict]
            else:
                tensors = [*index.tensors, *index.links]
                entries = names.native_entries(tensors, index.param_groups, index.scalars, index.extra)
        except CheckpointError as error:
            self._failure = error
            return Metadata(_Unreadable(error))
        request = EntryRequest(entries, lambda one, other: _describe(index, one) == _describe(index, other))
        self._opened = index, request
        paths = {name: entry.path for name, entry in request.entries.items()}
        return Metadata(_FileDescription(request, index), paths)

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise CheckpointError if the file could not be read, see ``open_index``. Not collective."""
        if self._failure is not None:
            raise self._failure

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        """Add this rank's file to the plan; raise CheckpointMismatchError if the names are not those of the file."""
        index, _ = self._settled(plan)
        return dataclasses.replace(plan, storage_data=(str(index.info.path), index.footer.digest))

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        """Raise CheckpointMismatchError if ranks have opened different files. On the coordinator alone."""
        for rank, plan in enumerate(plans):
            if plan.storage_data[1] != plans[0].storage_data[1]:
                raise CheckpointMismatchError(
                    f"rank 0 reads {plans[0].storage_data[0]}, rank {rank} {plan.storage_data[0]}, which is another "
                    "checkpoint, or was replaced in between: let all ranks read the same file"
                )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        """Read this rank's items, or raise CheckpointError; not collective."""
        index, entries = self._settled(plan)
        found = [(entries[item.storage_index.fqn], item) for item in plan.items]
        # In the order of the file, the values that are no tensors before it.
        rows = {path: first for path, (first, _) in index.first_rows.items()}
        found.sort(
            key=lambda pair: (rows.get(index.links.get(pair[0].dataset, pair[0].dataset), -1), pair[1].storage_offsets)
        )
        await_reads()  # the planner may give an optimizer's own memory
        with BlockReader(index, verify=self._verify) as reader:
            for entry, item in found:
                if item.type == LoadItemType.BYTE_IO:  # which a planner passes to torch.load; it was never on a disk
                    stream = io.BytesIO()
                    torch.save(value_of(index, entry), stream)
                    stream.seek(0)
                    planner.load_bytes(item, stream)
                else:
                    _read_tensor(reader, index.resolve(entry.dataset), item, planner)
        future: Future[None] = Future()
        future.set_result(None)
        return future

    def _settled(self, plan: LoadPlan) -> tuple[CheckpointIndex, dict[str, StateEntry]]:
        """Return the opened file, and the entry of each name of a plan."""
        if self._opened is None:
            self.read_metadata()
        if self._failure is not None:
            raise self._failure
        assert self._opened is not None
        index, request = self._opened
        wanted = [item.storage_index.fqn for item in plan.items]
        try:
            entries = request.settled(wanted)
        except CheckpointMismatchError as error:
            raise CheckpointMismatchError(f"{index.info.path}: {error}") from None
        for name in wanted:
            if name not in entries:
                raise CheckpointMismatchError(f"{index.info.path}: holds no {name!r}")
        return index, entries


def value_of(index: CheckpointIndex, entry: StateEntry) -> Any:
    """Return the value of an entry without tensor."""
    if entry.kind == names.SCALAR:
        return from_plain((index.scalars or {})[str(entry.place[0])], entry.types)
    values = index.param_groups if entry.kind == names.GROUP else index.extra
    return from_plain(names.get_at(values, entry.place), entry.types)


class _FileDescription(dict[str, Any]):
    """torch's description of the file's content. It also finds entries under other names, see ``EntryRequest``."""

    def __init__(self, request: EntryRequest, index: CheckpointIndex) -> None:
        super().__init__({name: _describe(index, entry) for name, entry in request.entries.items()})
        self._request, self._file = request, index

    def __contains__(self, name: object) -> bool:
        return isinstance(name, str) and self._request.find(name) is not None

    def __getitem__(self, name: str) -> TensorStorageMetadata | BytesStorageMetadata:
        found: TensorStorageMetadata | BytesStorageMetadata | None = self.get(name)
        if found is None:
            raise KeyError(name)
        return found

    def get(self, name: str, default: Any = None) -> Any:
        entry = self._request.find(name)
        return default if entry is None else _describe(self._file, entry)


class _Unreadable(dict[str, Any]):
    """In place of a description of an unreadable file: raises the file's error."""

    def __init__(self, error: CheckpointError) -> None:
        super().__init__()
        self._error = error

    def _raise(self, *_: object) -> Any:
        raise self._error

    __iter__ = __len__ = __contains__ = __getitem__ = keys = values = items = get = _raise


def _describe(index: CheckpointIndex, entry: StateEntry) -> TensorStorageMetadata | BytesStorageMetadata:
    if entry.kind != names.TENSOR:
        return BytesStorageMetadata()
    spec = index.resolve(entry.dataset)
    size = torch.Size(spec.shape)
    whole = torch_metadata.ChunkStorageMetadata(offsets=torch.Size([0] * len(size)), sizes=size)
    return TensorStorageMetadata(torch_metadata.TensorProperties(dtype=getattr(torch, spec.dtype)), size, [whole])


def _read_tensor(reader: BlockReader, spec: TensorSpec, item: ReadItem, planner: LoadPlanner) -> None:
    target = planner.resolve_tensor(item).detach()
    box = Box(tuple(item.storage_offsets), tuple(item.lengths))
    if tuple(target.shape) != box.sizes:
        raise CheckpointMismatchError(
            f"{reader.path}: the planner gives a tensor of shape {list(target.shape)} for a block of shape "
            f"{list(box.sizes)} of {spec.path}"
        )
    length = box.sizes[0] if box.sizes else 1
    step = max(1, AT_ONCE // max(1, box.numel // max(1, length) * spec.itemsize))
    for first in range(0, length, step):
        part, there = box, target
        if box.sizes:
            there = target[first : first + step]
            part = Box((box.offsets[0] + first, *box.offsets[1:]), tuple(there.shape))
        values = torch.from_numpy(read_box(reader, spec, part)).view(getattr(torch, spec.dtype))
        there.copy_(values.view(part.sizes))
    planner.commit_tensor(item, target)


def read_box(reader: BlockReader, spec: TensorSpec, box: Box) -> np.ndarray:
    """Read a box of a tensor, 1-D, in ``schema.numpy_dtype`` of its dtype; raise as ``BlockReader.read``."""
    output = np.empty(box.numel, numpy_dtype(spec.dtype))
    if box.numel:
        levels = levels_of(spec.shape, box)
        reader.read_runs(spec.path, levels.starts(len(levels.repeated)), output)
    return output
