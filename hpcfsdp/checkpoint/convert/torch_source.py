"""Read torch's formats: files of ``torch.save``, folders of ``torch.distributed.checkpoint``. Execute nothing."""

import contextlib
import functools
import io
import os
import pickle
import warnings
import zipfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import MetadataIndex, TensorStorageMetadata

from hpcfsdp.checkpoint.convert.pickles import check_pickle, first_line, read_metadata
from hpcfsdp.checkpoint.convert.source import OPTIM_KEYS, ImportSource, Stored, alike, sort_out
from hpcfsdp.checkpoint.convert.torch_output import METADATA_NAME
from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import MemoryBudget, naming_errors, open_file
from hpcfsdp.checkpoint.format.schema import MOST_LEVELS
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

_MEND = (
    "it holds more than tensors, numbers, strings and containers, and hpcfsdp executes no code from a file: if you "
    "trust it, load it with torch.load(..., weights_only=False) and torch.save only its state dicts"
)


def open_pt(path: Path, *, optimizer: bool = True) -> ImportSource:
    """Open a file of ``torch.save``; its tensors stay in the file until they are read.

    A file of the format before torch 1.6 is read whole. Raise CheckpointError for content that only executing it could
    read, CheckpointCorruptError for damage. Without `optimizer`, its state is left out.
    """
    with open_file(path) as fd, naming_errors(path), _damage_of(path, ", or not a file of torch.save"):
        budget = MemoryBudget.of_file(fd)
        is_zip = zipfile.is_zipfile(path)
        if not is_zip and os.pread(fd, 1, 0) != pickle.PROTO:
            raise ValueError("neither zip archive nor pickle")
        with os.fdopen(os.dup(fd), "rb") as stream:
            check_torch_file(stream, budget, disk.allocated(fd))
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # torch will change the class of storages
            tree = torch.load(path, map_location="cpu", weights_only=True, mmap=is_zip)
    with naming_errors(path):
        return sort_out(_stored(tree, "", budget), optimizer=optimizer)


def check_torch_file(stream: Any, budget: MemoryBudget, nbytes: int) -> None:
    """Raise as ``check_pickle`` if a ``torch.save`` file at the stream's beginning would grow far beyond its size."""
    if not zipfile.is_zipfile(stream):  # of torch before 1.6: five pickles, the last with the names of storages
        budget.claim(nbytes)
        stream.seek(0)
        for _ in range(5):
            check_pickle(stream, nbytes)
        return
    with zipfile.ZipFile(stream) as archive:
        entries = archive.infolist()
        if any(entry.compress_type != zipfile.ZIP_STORED for entry in entries):
            raise ValueError("it is compressed, which no file of torch.save is")
        pickled = [entry for entry in entries if entry.filename.endswith("/data.pkl")]
        if len(pickled) != 1:
            raise ValueError(f"it has {len(pickled)} entries data.pkl")
        budget.claim(pickled[0].file_size)
        check_pickle(io.BytesIO(archive.read(pickled[0])), nbytes)


def open_dcp(path: Path, *, optimizer: bool = True) -> ImportSource:
    """Open a folder of ``torch.distributed.checkpoint``, as ``open_pt``. A tensor and a piece of it are in memory."""
    reader = _Reader(path)
    tree: dict[Any, Any] = {}
    with naming_errors(path):
        metadata = reader.read_metadata()
        mappings = metadata.planner_data if isinstance(metadata.planner_data, Mapping) else {}
        for key, described in metadata.state_dict_metadata.items():
            place = tuple(mappings.get(key, (key,)))
            if not optimizer and len(place) > 1 and place[0] in OPTIM_KEYS:
                continue
            if isinstance(described, TensorStorageMetadata):
                dtype = str(described.properties.dtype).removeprefix("torch.")
                fetch = functools.partial(reader.read_tensor, key, described)
                value: Any = Stored(tuple(described.size), dtype, fetch)
            else:
                value = reader.load(key)
            _put(tree, place, value)
        return sort_out(_with_lists(tree), optimizer=optimizer)


def _stored(value: Any, place: str, budget: MemoryBudget, level: int = 0) -> Any:
    """Dicts and lists with ``Stored`` for tensors. `budget` bounds expanded tensors."""
    if isinstance(value, torch.Tensor):
        return _stored_tensor(value, place, budget)
    if level > MOST_LEVELS:
        raise CheckpointError(f"lists and dicts are nested more than {MOST_LEVELS} levels deep")
    if isinstance(value, Mapping):
        entries = {key: _stored(entry, f"{place}[{key!r}]", budget, level + 1) for key, entry in value.items()}
        return alike(value, entries)
    if isinstance(value, (list, tuple)):
        return alike(value, [_stored(entry, f"{place}[{at}]", budget, level + 1) for at, entry in enumerate(value)])
    return value


def _stored_tensor(tensor: torch.Tensor, place: str, budget: MemoryBudget) -> Stored:
    dtype = str(tensor.dtype).removeprefix("torch.")
    if tensor.layout is not torch.strided or tensor.is_quantized or tensor.device.type != "cpu":
        kind = "quantized" if tensor.is_quantized else f"{tensor.layout}, on {tensor.device}"
        raise CheckpointError(f"{place} is a tensor of {dtype} ({kind}); only dense tensors are supported")
    tensor = tensor.detach()
    if tensor.nbytes > tensor.untyped_storage().nbytes():
        try:
            budget.claim(tensor.nbytes)
        except ValueError as error:
            raise CheckpointError(f"{place} is expanded to {tensor.nbytes} bytes: {error}") from None
    identity = None
    if tensor.numel():
        identity = tensor.data_ptr(), tensor.shape, tensor.stride(), dtype, tensor.is_conj(), tensor.is_neg()
    return Stored(tuple(tensor.shape), dtype, lambda: tensor.resolve_conj().resolve_neg().contiguous(), identity)


def _put(tree: dict[Any, Any], path: tuple[Any, ...], value: Any) -> None:
    for part in path[:-1]:
        tree = tree.setdefault(part, {})
        if not isinstance(tree, dict):
            break
    if not isinstance(tree, dict) or path[-1] in tree:
        raise CheckpointCorruptError(f"{'.'.join(map(str, path))!r} has the same place as another entry")
    tree[path[-1]] = value


def _with_lists(value: Any) -> Any:
    """Turn dicts whose keys are 0 to n-1 back into lists."""
    if not isinstance(value, dict):
        return value
    entries = {key: _with_lists(entry) for key, entry in value.items()}
    if entries and all(type(key) is int for key in entries) and sorted(entries) == list(range(len(entries))):
        return [entries[place] for place in range(len(entries))]
    return entries


class _Reader(dcp.FileSystemReader):
    """torch's reader with a restricted unpickler of metadata."""

    def __init__(self, path: Path) -> None:
        super().__init__(path)
        self._folder = path
        self._metadata: Any = None

    def read_metadata(self, *_args: Any, **_kwargs: Any) -> Any:
        if self._metadata is None:
            self._metadata = read_metadata(self._folder)
        return self._metadata

    def read_tensor(self, key: str, described: TensorStorageMetadata) -> torch.Tensor:
        """Return a whole tensor."""
        is_whole = [tuple(chunk.sizes) for chunk in described.chunks] == [tuple(described.size)]
        found = self._read_whole(key, described) if is_whole else None
        return self.load(key, torch.empty(described.size, dtype=described.properties.dtype)) if found is None else found

    def _read_whole(self, key: str, described: TensorStorageMetadata) -> torch.Tensor | None:
        """Read a tensor that was saved in one piece, which torch holds twice; None if it is compressed or not dense."""
        info = self.read_metadata().storage_data.get(MetadataIndex(key, described.chunks[0].offsets))
        if info is None or getattr(info, "transform_descriptors", None):
            return None
        with _damage_of(self._folder, f": {key!r}"), (self._folder / info.relative_path).open("rb") as stream:
            piece = _Slice(stream, info.offset, info.length)
            check_torch_file(piece, MemoryBudget(info.length), info.length)
            piece.seek(0)
            tensor = torch.load(piece, map_location="cpu", weights_only=True)
            if not isinstance(tensor, torch.Tensor) or tensor.layout is not torch.strided:
                return None
            if (tensor.shape, tensor.dtype) != (described.size, described.properties.dtype):
                raise ValueError(f"is a {tensor.dtype} of {list(tensor.shape)}, and another for {METADATA_NAME}")
        return tensor.detach().resolve_conj().resolve_neg().contiguous()

    def load(self, key: str, target: torch.Tensor | None = None) -> Any:
        """Read a tensor into `target`, or a value that is no tensor; return it."""
        state = {key: target}
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", UserWarning)  # about loading in one process
            try:
                planner = _RestrictedPlanner(flatten_state_dict=False, flatten_sharded_tensors=False)
                dcp.load(state, storage_reader=self, planner=planner, no_dist=True)
            except CheckpointException as error:
                first = next(iter(error.failures.values()))[0]
                if isinstance(first, (CheckpointError, OSError)):
                    raise first from None
                raise CheckpointCorruptError(f"{self._folder}: damaged: {key!r}: {first_line(first)}") from error
        return state[key]


@contextlib.contextmanager
def _damage_of(where: Path | str, what: str = "") -> Iterator[None]:
    """Turn errors of reading into CheckpointError: damaged bytes lead torch to any kind of error."""
    try:
        yield
    except (CheckpointError, OSError):
        raise
    except pickle.UnpicklingError as error:  # torch's reason comes after a mark and before its advice
        mark = "WeightsUnpickler error: "
        lines = [line.strip() for line in str(error).splitlines()]
        first = next((line for line in lines if line.startswith(mark)), first_line(error))
        refused = first.removeprefix(mark).split(". Please")[0]
        raise CheckpointError(f"{where}: {_MEND} ({refused})") from None
    except Exception as error:
        raise CheckpointCorruptError(f"{where}: damaged{what}: {first_line(error)}") from error


class _Slice(io.RawIOBase):
    """A range of a file as a file object."""

    def __init__(self, stream: io.BufferedReader, begin: int, nbytes: int) -> None:
        super().__init__()
        self._stream, self._begin, self._nbytes, self._place = stream, begin, nbytes, 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._place, os.SEEK_END: self._nbytes}[whence]
        if base + offset < 0:
            raise ValueError(f"place {base + offset} of a file")
        self._place = base + offset
        return self._place

    def readinto(self, buffer: Any) -> int:
        view = memoryview(buffer).cast("B")
        self._stream.seek(self._begin + self._place)
        got = self._stream.readinto(view[: max(0, self._nbytes - self._place)])
        self._place += got
        return got


class _RestrictedPlanner(dcp.DefaultLoadPlanner):
    """torch's planner with a restricted unpickler of values."""

    def load_bytes(self, read_item: Any, value: Any) -> None:
        key = read_item.dest_index.fqn
        nbytes = value.getbuffer().nbytes
        budget = MemoryBudget(nbytes)
        with _damage_of(repr(key)):
            check_torch_file(value, budget, nbytes)
            value.seek(0)
            self.state_dict[key] = torch.load(value, map_location="cpu", weights_only=True)
            _stored(self.state_dict[key], repr(key), budget)
