"""Many HDF5 files as one set of samples: the rows of their datasets."""

from __future__ import annotations

import glob
import itertools
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from torch.utils.data import Dataset

from hpcfsdp.comm import Communicator, communicator_for, of_rank_0, raise_together
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.data.fields import ChunkCache, FieldReader, HDF5File, Memory, Stored, UnreadableRow, stored
from hpcfsdp.data.order import Blocks
from hpcfsdp.errors import DataError, UsageError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.world import current_world

_OPEN_FILES = 64
_ENDINGS = (".h5", ".hdf5")

Paths = str | os.PathLike[str] | Iterable[str | os.PathLike[str]]


class HDF5Dataset(Dataset[Any]):
    """The rows of datasets in HDF5 files, as one set. A sample has a row of each field.

    Numbers become tensors, bfloat16 among them; rows of variable length become tensors of their own lengths, and
    strings ``str``. Files are opened when they are first read, in each process anew, so workers may be forked or
    spawned. Threads may read at the same time: what HDF5 stores as it is, or with gzip, is read and decoded outside
    of h5py's lock.

    With ``ResumableSampler`` each rank reads whole chunks, once: what a step needs of a chunk is kept until all of it
    has been used. That are about as many chunks as the rank has samples in a batch.

    Attributes:
        files: their paths, in the order of the samples.
        blocks: which samples are stored together, for the sampler.
    """

    @public_call("HDF5Dataset")
    def __init__(
        self,
        paths: Paths,
        fields: str | Sequence[str] | Mapping[str, str],
        *,
        block: int | None = None,
        cache_bytes: int = 1 << 30,
        together: bool = True,
    ) -> None:
        """Look at all files. Collective over all ranks after ``hpcfsdp.init``, which divide the files among them.

        Args:
            paths: files, folders (of which their \\*.h5 and \\*.hdf5), and patterns such as "run-\\*.h5"; sorted within
                a folder and a pattern.
            fields: names of datasets in each file, whose first dimension counts samples: samples are dicts by these
                names, or by others (``{"x": "inputs/pressure"}``). One name: samples are its rows, no dicts.
            block: samples that are shuffled together, by default those of a chunk, or of 1 MiB.
            cache_bytes: the most memory for decoded chunks.
            together: False for a set that only this rank makes.

        Raises:
            UsageError: an argument is wrong.
            DataError: a file is missing, truncated or damaged, lacks a field, has no samples, or samples of another
                shape or dtype than the first file. All ranks raise it, about the first such file.
        """
        self._is_one = isinstance(fields, str)
        self._names = dict(fields) if isinstance(fields, Mapping) else _named(fields)
        if not self._names:
            raise UsageError("fields names no dataset: give names of datasets in the files")
        if block is not None and (not isinstance(block, int) or block < 1):
            raise UsageError(f"block must be a number of samples, at least 1, not {block!r}")
        comm = _of_job(together)
        self.files: tuple[str, ...] = of_rank_0(comm, lambda: _found(paths))
        with raise_together(comm) as exchange:
            # Errors are not raised here: of those of all ranks that about the first file counts.
            exchange.mine = [_look(path, self._names) for path in self.files[comm.rank :: comm.size]]
        looks = [exchange.everyone[number % comm.size][number // comm.size] for number in range(len(self.files))]
        first = _same(self.files, self._names, looks)
        self._fields = {key: each.field for key, each in first.items()}
        lengths = np.array([next(iter(look.values())).rows for look in looks], np.int64)
        self._ends = np.cumsum(lengths)
        if not self._ends[-1]:
            raise DataError(f"{self.files[0]}: there are no samples in it, nor in the others").on_all_ranks()
        largest = max(first.values(), key=lambda each: each.field.nbytes)
        self.blocks = Blocks(lengths, block or largest.together)
        self._cache_bytes = cache_bytes
        self._start()

    def __len__(self) -> int:
        """Return the number of samples of all files."""
        return int(self._ends[-1])

    def __getitem__(self, index: int) -> Any:
        """Return one sample.

        Raises:
            IndexError: there is no such sample.
            DataError: it cannot be read.
        """
        return self.__getitems__([index])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """Return samples, as ``DataLoader`` asks for those of a batch."""
        batch = self._read(indices)
        columns = [list(column) for column in batch.values()]
        if self._is_one:
            return columns[0]
        return [dict(zip(batch, row, strict=True)) for row in zip(*columns, strict=True)]

    def batch(self, indices: Sequence[int]) -> Any:
        """Return samples as one tensor for each field, with the samples as first dimension; lists where they differ.

        It is what a ``DataLoader`` collates, read without a copy.
        """
        batch = self._read(indices)
        return next(iter(batch.values())) if self._is_one else batch

    def close(self) -> None:
        """Close all files and free memory; both come again when samples are read."""
        self._start()

    def _places(self, indices: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
        """Return the files of samples, and the rows in them."""
        wanted, length = np.asarray(indices, np.int64).reshape(-1), len(self)
        outside = (wanted >= length) | (wanted < -length)
        if outside.any():
            beyond = wanted[outside][0]
            raise IndexError(f"there is no sample {beyond}: the set has {length}, from 0 to {length - 1}")
        wanted = np.where(wanted < 0, wanted + length, wanted)
        files = np.searchsorted(self._ends, wanted, side="right")
        return files, wanted - self._ends[files] + self.blocks.lengths[files]

    def _read(self, indices: Sequence[int]) -> dict[str, Any]:
        files, rows = self._places(indices)
        outputs = {key: field.empty(len(rows), self._memory[key]) for key, field in self._fields.items()}
        of_file: dict[int, list[tuple[int, int]]] = {}  # rows, and their places in the batch
        for place, (number, row) in enumerate(zip(files.tolist(), rows.tolist(), strict=True)):
            of_file.setdefault(number, []).append((row, place))
        todo = [(number, key, found) for number, found in of_file.items() for key in outputs]
        # What other threads decode just now is read last: thus threads decode different chunks.
        for wait in (False, True):
            later = []
            for number, key, found in todo:
                try:
                    left = self._opened(number)[key].read(found, outputs[key], wait)
                except UnreadableRow as error:
                    what = f"sample {int(indices[error.place])} (row {error.row})"
                    raise DataError(f"{self.files[number]}: {what} cannot be read: {error.__cause__}") from error
                later += [(number, key, left)] if left else []
            todo = later
        return {key: output.values for key, output in outputs.items()}

    def _opened(self, number: int) -> dict[str, FieldReader]:
        if self._process != os.getpid():  # after a fork: locks and HDF5's descriptors are the parent's
            self._start()
        with self._lock:
            if number in self._readers:
                self._readers.move_to_end(number)
                return self._readers[number]
        # Outside of the lock: other threads read on meanwhile. Of two that open the same file the first one's counts.
        file = HDF5File(self.files[number])
        named = self._names.items()
        readers = {key: FieldReader(file, name, self._cache, (number, name)) for key, name in named}
        for key, reader in readers.items():
            if reader.field != self._fields[key]:
                raise DataError(f"{file.path}: field {self._names[key]!r} has changed since the set was made")
        with self._lock:
            readers = self._readers.setdefault(number, readers)
            if len(self._readers) > _OPEN_FILES:
                self._readers.popitem(last=False)
        return readers

    def _start(self) -> None:
        self._process = os.getpid()
        self._lock = threading.RLock()
        self._cache, self._memory = ChunkCache(self._cache_bytes), {key: Memory() for key in self._fields}
        self._readers: OrderedDict[int, dict[str, FieldReader]] = OrderedDict()

    def __getstate__(self) -> dict[str, Any]:
        """Leave out what belongs to this process."""
        own = ("_process", "_lock", "_cache", "_memory", "_readers")
        return {name: value for name, value in vars(self).items() if name not in own}

    def __setstate__(self, state: dict[str, Any]) -> None:
        vars(self).update(state)
        self._start()


def _named(fields: str | Sequence[str]) -> dict[str, str]:
    names = [fields] if isinstance(fields, str) else list(fields)
    if not all(isinstance(name, str) for name in names) or len(set(names)) < len(names):
        raise UsageError(f"fields are different names of datasets, not {fields!r}")
    return {name: name for name in names}


def _of_job(together: bool) -> Communicator:
    return communicator_for(None, required=False) if together and current_world() is not None else FakeCommunicator()


def _found(paths: Paths) -> tuple[str, ...]:
    """Return all files; raise DataError where there is none."""
    given = [paths] if isinstance(paths, (str, os.PathLike)) else list(paths)
    found = list(itertools.chain.from_iterable(map(_files_of, given)))
    if not found:
        raise DataError("there are no files to read: paths is empty")
    twice = sorted(path for path in set(found) if found.count(path) > 1) if len(set(found)) < len(found) else []
    if twice:
        raise DataError(f"{twice[0]}: is named twice, so its samples would count twice")
    return tuple(found)


def _files_of(given: str | os.PathLike[str]) -> Iterator[str]:
    path = os.path.abspath(os.path.expanduser(given))
    if os.path.isdir(path):
        found = sorted(str(each) for each in Path(path).iterdir() if each.suffix in _ENDINGS)
        what = f"no file in it ends with {' or '.join(_ENDINGS)}"
    elif glob.has_magic(path) and not os.path.exists(path):
        found, what = sorted(glob.glob(path, recursive=True)), "no file matches"
    else:
        found, what = [path], ""
    if not found:
        raise DataError(f"{given}: {what}")
    yield from found


_Look = dict[str, Stored] | str
"""Of a file: its fields by their keys in samples, or what is wrong with it."""


def _look(path: str, names: Mapping[str, str]) -> _Look:
    try:
        file = HDF5File(path)
        found = {key: stored(file, name) for key, name in names.items()}
    except DataError as error:
        return str(error)
    (key, first), *others = found.items()
    other = next(((k, each) for k, each in others if each.rows != first.rows), None)
    if other is not None:
        rows = f"{first.rows} samples of {names[key]!r} and {other[1].rows} of {names[other[0]]!r}"
        return f"{path}: has {rows}: fields must have as many rows"
    return found


def _same(files: Sequence[str], names: Mapping[str, str], looks: Sequence[_Look]) -> dict[str, Stored]:
    """Return the fields of the first file with samples. Raise the first problem of a file, the same on all ranks."""
    first, of_file = None, ""
    for path, look in zip(files, looks, strict=True):
        if isinstance(look, str):
            raise DataError(look).on_all_ranks()
        if first is None or not next(iter(first.values())).rows:
            first, of_file = look, path
        for key, each in look.items():
            if each.field != first[key].field:
                what = f"{path}: field {names[key]!r} has {each.field}, in {of_file} {first[key].field}"
                raise DataError(f"{what}: leave the file out, or convert it").on_all_ranks()
    assert first is not None
    return first
