"""One dataset of an HDF5 file as a field of samples: what its rows are, and how they are read."""

from __future__ import annotations

import logging
import math
import os
import sys
import threading
import weakref
import zlib
from collections import OrderedDict, deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import h5py
import numpy as np
import torch

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.errors import DataError

log = logging.getLogger("hpcfsdp.data")

BLOCK_BYTES = 1 << 20
"""Of samples that are stored without chunks: enough for a disk to read at its speed."""

_DEFLATE, _SHUFFLE = 1, 2  # HDF5's numbers of filters
_KEPT = 15  # batches of one field whose memory may be used again
_PLACES = 4096  # of blocks that are remembered for each file and field
_KINDS = "fiubc"  # of numpy's dtypes that tensors have


@dataclass(frozen=True)
class Field:
    """What the samples of all files have in common.

    Attributes:
        kind: "numbers", "ragged" (1-D of different lengths) or "text".
        dtype: torch's name.
        shape: of a sample.
    """

    kind: str
    dtype: str
    shape: tuple[int, ...]

    def __str__(self) -> str:
        return f"{self.kind} of dtype {self.dtype} and shape {self.shape}" if self.kind == "numbers" else self.kind

    @property
    def nbytes(self) -> int:
        """Bytes of a sample; a guess where they differ."""
        return math.prod(self.shape) * schema.numpy_dtype(self.dtype).itemsize if self.kind == "numbers" else 256

    def empty(self, count: int, memory: Memory) -> Output:
        """Return room for `count` samples."""
        if self.kind != "numbers":
            return Output([None] * count, None)
        if not count * self.nbytes:
            values = torch.empty((count, *self.shape), dtype=getattr(torch, self.dtype))
            return Output(values, np.empty((count, self.nbytes), np.uint8))
        found = memory.take(count * self.nbytes)
        values = torch.from_numpy(found).view(getattr(torch, self.dtype)).view(count, *self.shape)
        return Output(values, found.reshape(count, self.nbytes))


@dataclass(frozen=True)
class Output:
    """Samples of one field, and the same memory as rows of bytes."""

    values: torch.Tensor | list[Any]
    memory: np.ndarray | None


def _references(arrays: list[np.ndarray], place: int) -> int:
    return sys.getrefcount(arrays[place])


_OF_NOBODY = _references([np.empty(1)], 0)
"""The count of an array that only the list has."""


class Memory:
    """Memory of batches, which is used again when no tensor has it any more: new pages cost as much as a read."""

    def __init__(self) -> None:
        self._lock, self._known = threading.Lock(), list[np.ndarray]()

    def take(self, nbytes: int) -> np.ndarray:
        """Return so many bytes that nobody uses."""
        with self._lock:
            for place in range(len(self._known)):
                # A tensor keeps the array, and so do all that share its memory.
                if self._known[place].nbytes == nbytes and _references(self._known, place) == _OF_NOBODY:
                    return self._known[place]
            made = np.empty(nbytes, np.uint8)
            self._known = [*self._known[-_KEPT:], made]
            return made


@dataclass(frozen=True)
class Stored:
    """A field in one file: `rows` samples, of which `together` are stored after each other."""

    field: Field
    rows: int
    together: int


class HDF5File:
    """An open file, until nobody has it any more."""

    def __init__(self, path: str) -> None:
        """Raise DataError where it cannot be opened."""
        try:
            self.fd = disk.open_to_read(Path(path))  # a regular file: a pipe would wait for its writer
            self.close = weakref.finalize(self, os.close, self.fd)
            self.file = h5py.File(path, "r")
        except OSError as error:
            raise DataError(f"{path}: {_reason(error)}") from None
        self.path = path

    def dataset(self, name: str) -> h5py.Dataset:
        """Return a dataset; raise DataError without it."""
        try:
            found = self.file.get(name)
        except (KeyError, OSError, RuntimeError) as error:  # a link to a file that is missing, damage
            raise DataError(f"{self.path}: field {name!r} cannot be opened: {error}") from None
        if not isinstance(found, h5py.Dataset):
            there = sorted(key for key in self.file if isinstance(self.file.get(key), h5py.Dataset))
            what = "is no dataset" if found is not None else "is missing"
            raise DataError(f"{self.path}: field {name!r} {what}; in the file are {', '.join(there) or 'groups alone'}")
        return found


def _reason(error: OSError) -> str:
    if error.strerror and "HDF5" not in str(error):
        return error.strerror
    text = str(error)
    if "truncated" in text:
        return f"is truncated, was the copy complete? (HDF5: {text})"
    return f"is no HDF5 file, or a damaged one (HDF5: {text})"


def stored(file: HDF5File, name: str) -> Stored:
    """Return what a field is in a file; raise DataError where its rows cannot be samples."""
    dataset = file.dataset(name)
    if not dataset.shape:
        raise DataError(f"{file.path}: field {name!r} has no dimension of samples, its shape is {dataset.shape}")
    kind, dtype = _type_of(dataset)
    if kind is None:
        what = f"{file.path}: field {name!r} has HDF5 type {dtype}, which is no tensor"
        raise DataError(f"{what}: name fields of numbers, strings or 1-D rows of variable length")
    if kind != "numbers" and dataset.ndim > 1:
        raise DataError(f"{file.path}: field {name!r}: {kind} of shape {dataset.shape}, which must have one dimension")
    field = Field(kind, dtype, dataset.shape[1:])
    rows = dataset.chunks[0] if dataset.chunks else 1
    if not dataset.id.get_create_plist().get_nfilters():  # else a larger block would be decoded as a whole
        rows *= max(1, BLOCK_BYTES // max(1, rows * field.nbytes))
    return Stored(field, dataset.shape[0], min(rows, max(1, dataset.shape[0])))


def _type_of(dataset: h5py.Dataset) -> tuple[str | None, str]:
    """Return the kind of a field and torch's name of its dtype; None and HDF5's name of the type for others."""
    kind, marked = dataset.id.get_type(), dataset.attrs.get(schema.DTYPE_ATTRIBUTE)
    if isinstance(marked, bytes):
        marked = marked.decode(errors="replace")
    if isinstance(marked, str) and schema.supported(marked) and kind.get_size() == schema.numpy_dtype(marked).itemsize:
        return "numbers", marked
    if isinstance(kind, h5py.h5t.TypeFloatID) and kind.get_size() == 2 and kind.get_fields()[1:] == (7, 8, 0, 7):
        return "numbers", "bfloat16"
    if isinstance(kind, h5py.h5t.TypeStringID):
        return "text", "text"
    found = dataset.dtype
    if (base := h5py.check_vlen_dtype(found)) is not None and np.dtype(base).kind in _KINDS:
        return "ragged", np.dtype(base).name
    return ("numbers", found.name) if found.kind in _KINDS and schema.supported(found.name) else (None, str(found))


def _is_plain(dataset: h5py.Dataset) -> bool:
    """Return whether the file has the bytes of rows as memory has them, without a filter."""
    layout = dataset.id.get_create_plist()
    is_here = layout.get_layout() in (h5py.h5d.CONTIGUOUS, h5py.h5d.CHUNKED) and not layout.get_external_count()
    return is_here and not layout.get_nfilters()


_Key = tuple[tuple[int, str], int]
"""File and field, and the number of the chunk there."""


class ChunkCache:
    """Decoded chunks that several threads read, until each of their rows was taken, or the memory is used up."""

    def __init__(self, nbytes: int) -> None:
        self._room, self._lock = nbytes, threading.Lock()
        self._chunks: OrderedDict[_Key, _Chunk] = OrderedDict()
        self._gone: deque[_Key] = deque(maxlen=1024)
        self._warned = False

    def row(self, key: _Key, rows: int, row: int, load: Callable[[], Any], wait: bool) -> Any:
        """Return one row of the `rows` of a chunk, which `load` returns when the first of them is wanted.

        Return None, unless told to `wait`, while another thread loads the chunk.
        """
        with self._lock:
            chunk = self._chunks.get(key)
            if chunk is None:
                chunk = self._chunks[key] = _Chunk(rows)
                self._warn(key)
            self._chunks.move_to_end(key)
            if not wait and chunk.lock.locked():
                return None
            chunk.left -= 1
            if not chunk.left:
                self._drop(key)
        with chunk.lock:
            if chunk.values is None:
                try:
                    chunk.values = load()
                except BaseException:
                    with self._lock:
                        self._drop(key)
                    raise
                with self._lock:
                    if self._chunks.get(key) is chunk:
                        chunk.nbytes = getattr(chunk.values, "nbytes", 64 * rows)
                        self._room -= chunk.nbytes
                        self._make_room(key)
        return chunk.values[row]

    def _make_room(self, newest: _Key) -> None:
        while self._room < 0 and len(self._chunks) > 1:
            oldest = next(key for key in self._chunks if key != newest)
            self._drop(oldest)
            self._gone.append(oldest)

    def _drop(self, key: _Key) -> None:
        chunk = self._chunks.pop(key, None)
        self._room += chunk.nbytes if chunk is not None else 0

    def _warn(self, key: _Key) -> None:
        if key in self._gone and not self._warned:
            self._warned = True
            log.warning(
                "chunks are read again before all of their samples were used: %d are in use, more than cache_bytes "
                "holds; make it larger, or batches or chunks smaller",
                len(self._chunks),
            )


class _Chunk:
    def __init__(self, rows: int) -> None:
        self.left, self.nbytes, self.values, self.lock = rows, 0, None, threading.Lock()


class UnreadableRow(Exception):
    """A row that cannot be read, for the reason that is the cause."""

    def __init__(self, row: int, place: int) -> None:
        super().__init__(row, place)
        self.row, self.place = row, place


class FieldReader:
    """Reads samples of one field of one file. Threads may use it at the same time."""

    def __init__(self, file: HDF5File, name: str, cache: ChunkCache, key: tuple[int, str]) -> None:
        """`key` names file and field in the cache, which outlives readers."""
        self._file, self._cache, self._key = file, cache, key
        self._dataset = file.dataset(name)
        found = stored(file, name)
        self.field, self._together = found.field, found.together
        dataset, layout = self._dataset, self._dataset.id.get_create_plist()
        self._chunk_rows = dataset.chunks[0] if dataset.chunks else 0
        self._nbytes = self.field.nbytes
        self._per_block = self._chunk_rows or self._together
        filters = [layout.get_filter(number)[0] for number in range(layout.get_nfilters())]
        kind = dataset.id.get_type()
        # In memory as in the file: h5py converts the rest, such as numbers of the other byte order.
        is_native = self.field.kind == "numbers" and (
            kind.get_size() == 1 or getattr(kind, "get_order", lambda: None)() == h5py.h5t.ORDER_LE
        )
        whole_rows = not dataset.chunks or dataset.chunks[1:] == dataset.shape[1:]
        own = is_native and whole_rows and not file.file.userblock_size
        self._plain = own and _is_plain(dataset)
        self._filters = filters if own and filters and set(filters) <= {_DEFLATE, _SHUFFLE} else None
        self._places: OrderedDict[int, int | None] = OrderedDict()  # of blocks: their first byte; None: elsewhere
        self._lock = threading.Lock()

    def read(self, rows: list[tuple[int, int]], output: Output, wait: bool) -> list[tuple[int, int]]:
        """Read rows to their places in the output; return those that other threads decode, unless told to `wait`.

        Raise UnreadableRow where that fails.
        """
        values: Any = output.values if output.memory is None else output.memory
        if output.memory is not None and not output.memory.shape[1]:
            return []
        later = []
        for row, place in rows:
            try:
                if self._plain and output.memory is not None and (begin := self._place_of(row)) is not None:
                    if os.preadv(self._file.fd, [values[place]], begin) != values.shape[1]:
                        raise EOFError("the file has become shorter")
                elif (found := self._cached(row, wait)) is None:
                    later.append((row, place))
                else:
                    values[place] = found
            except Exception as error:  # h5py raises half a dozen types on damaged files
                raise UnreadableRow(row, place) from error
        return later

    def _place_of(self, row: int) -> int | None:
        """Return the first byte of a row in the file; None where HDF5 has to be asked."""
        block, within = divmod(row, self._per_block)
        begin = self._places.get(block, -1)
        if begin == -1:
            begin = self._find(block, self._per_block)
            with self._lock:
                self._places[block] = begin
                if len(self._places) > _PLACES:
                    self._places.popitem(last=False)
            if begin is not None:  # the other samples of the block come soon
                os.posix_fadvise(self._file.fd, begin, self._per_block * self._nbytes, os.POSIX_FADV_WILLNEED)
        return None if begin is None else begin + within * self._nbytes

    def _find(self, block: int, together: int) -> int | None:
        dataset = self._dataset
        if self._chunk_rows:
            found = dataset.id.get_chunk_info_by_coord((block * together,) + (0,) * (dataset.ndim - 1))
            return found.byte_offset
        begin = dataset.id.get_offset()
        return None if begin is None else begin + block * together * self._nbytes

    def _cached(self, row: int, wait: bool) -> Any:
        rows = (self._chunk_rows if self._filters is not None else 0) or self._together
        block = row // rows
        first, end = block * rows, min((block + 1) * rows, self._dataset.shape[0])
        load = self._decoded if self._filters is not None else self._through_h5py
        return self._cache.row((self._key, block), end - first, row - first, lambda: load(first, end), wait)

    def _decoded(self, first: int, end: int) -> Any:
        """Return the rows of a chunk as bytes. Only its place is asked of h5py, which all threads wait for."""
        dataset = self._dataset
        found = dataset.id.get_chunk_info_by_coord((first,) + (0,) * (dataset.ndim - 1))
        if found.byte_offset is None or found.filter_mask:  # of fill values, or with a filter left out
            return self._through_h5py(first, end)
        data: Any = os.pread(self._file.fd, found.size, found.byte_offset)
        itemsize = schema.numpy_dtype(self.field.dtype).itemsize
        for kind in reversed(self._filters or ()):
            if kind == _DEFLATE:
                data = zlib.decompress(data, bufsize=self._chunk_rows * self._nbytes)
            elif itemsize > 1:
                data = np.frombuffer(data, np.uint8).reshape(itemsize, -1).T.copy()
        return np.frombuffer(data, np.uint8).reshape(self._chunk_rows, self._nbytes)

    def _through_h5py(self, first: int, end: int) -> Any:
        dataset = self._dataset
        if self.field.kind == "text":
            return dataset.asstr(errors="replace")[first:end]
        if self.field.kind == "ragged":
            return [torch.from_numpy(np.array(row, schema.numpy_dtype(self.field.dtype))) for row in dataset[first:end]]
        rows = np.empty((end - first, *self.field.shape), schema.numpy_dtype(self.field.dtype))
        kind = dataset.id.get_type()
        memory = kind if kind.get_size() == 1 else schema.hdf5_type(self.field.dtype)
        space = dataset.id.get_space()
        space.select_hyperslab((first,) + (0,) * (dataset.ndim - 1), rows.shape)
        dataset.id.read(h5py.h5s.create_simple(rows.shape), space, rows, memory)
        return rows.view(np.uint8).reshape(end - first, self._nbytes)
