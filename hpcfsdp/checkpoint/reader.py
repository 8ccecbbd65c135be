"""Verified reads of runs of a checkpoint's tensors. Needs numpy and h5py alone."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator
from pathlib import Path

import numpy as np

from hpcfsdp.checkpoint.access import damage, opened, seal_of
from hpcfsdp.checkpoint.files import Files, reason
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.index import CheckpointIndex, PartFile
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError

_KEPT_BYTES = 64 << 20
"""Most bytes of rows that a reader keeps, to give parts of them, unless one alone has more."""

_OPEN_PARTS = 64
"""Most files beside a checkpoint that are open at a time: it may have one for each of a thousand nodes."""

_AT_ONCE_BYTES = 2 << 20
"""Most bytes of several rows that are read in one go to be checked: they stay in the cache of a core until they are."""

_LONG_RUN_BYTES = 64 << 10
_SPAN_BYTES = 8 << 20


class BlockReader:
    """Reads runs of tensors from a checkpoint's bytes, each checked against its checksum. A context manager."""

    def __init__(self, index: CheckpointIndex, files: Files | None = None, *, verify: bool = True) -> None:
        """Not collective.

        Args:
            verify: compare what is read with its checksum; otherwise only what is asked for is read.
        """
        self._index, self._files, self._verify = index, files or Files(), verify
        self._path = index.info.path
        self._stack = contextlib.ExitStack()
        # Rows of which only a part was asked for, by file and place in it: who reads a tensor in small parts comes back
        # for the next one, and rows whose runs alternate are needed together.
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._kept_bytes = 0  # of them
        self._scratch = np.empty(0, np.uint8)
        self._parts: dict[int, tuple[int, contextlib.ExitStack]] = {}  # descriptor, and what closes it

    def __enter__(self) -> BlockReader:
        """Open the file.

        Raises:
            CheckpointReplacedError: it is another one by now.
        """
        with contextlib.ExitStack() as stack:
            self._fd = stack.enter_context(opened(self._files, self._path))
            if seal_of(self._files, self._fd, self._path) != self._index.seal:
                raise CheckpointReplacedError(f"{self._path}: has been replaced since it was opened: open it again")
            self._stack = stack.pop_all()
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self._close_oldest_part()
        self._stack.close()

    def check_part(self, number: int) -> None:
        """Open a file beside the checkpoint, if it is not, and see that it is the one that was written with it.

        Args:
            number: as in the table of extents, from 1 on.

        Raises:
            CheckpointError: it cannot be opened.
            CheckpointCorruptError: it is not there, damaged, or of another checkpoint.
            CheckpointReplacedError: there is another checkpoint by now.
        """
        if number not in self._parts:
            part = self._index.parts[number - 1]
            path = Path(os.path.realpath(self._path)).parent / part.name
            try:
                with contextlib.ExitStack() as stack:
                    fd = stack.enter_context(opened(self._files, path))
                    _check_part(self._path, part, path, self._files, fd)
                    self._parts[number] = fd, stack.pop_all()
                if len(self._parts) > _OPEN_PARTS:
                    self._close_oldest_part()
            except CheckpointError as error:
                self._check_not_replaced()
                if path.exists():
                    raise
                raise CheckpointCorruptError(
                    f"{self._path}: {part.name}, which has a part of its tensors, is not beside it"
                ) from error

    def _close_oldest_part(self) -> None:
        _, stack = self._parts.pop(next(iter(self._parts)))
        stack.close()

    def _check_not_replaced(self) -> None:
        with opened(self._files, self._path) as fd:
            if seal_of(self._files, fd, self._path) != self._index.seal:
                raise CheckpointReplacedError(f"{self._path}: has been replaced since it was opened: open it again")

    def read(self, path: str, start: int, numel: int) -> np.ndarray:
        """Elements `start` to `start + numel` of a tensor, 1-D, in ``schema.numpy_dtype`` of its dtype.

        Raises:
            ValueError: the tensor has no such elements.
            CheckpointCorruptError: the bytes are not those that were written.
        """
        output = np.empty(numel, dtype=schema.numpy_dtype(self._index.resolve(path).dtype))
        self.read_into(path, start, output)
        return output

    def read_into(self, path: str, start: int, output: np.ndarray) -> None:
        """As ``read``, into memory that is there: 1-D, contiguous, of that dtype, as long as it is."""
        spec, rows = self._overlapping(path, start, len(output))
        for row in rows:
            self._read_row(spec, row, start, output)

    def check_rows(self, places: np.ndarray) -> None:
        """Compare rows of the table of extents with their checksums, and keep none of them; raises as ``read`` does.

        Args:
            places: of the rows in the table. Rows that follow each other in the file are best next to each other here.
        """
        specs = list(self._index.tensors.values())
        rows = self._index.extents[places]
        for group in _together((specs[tensor], row) for tensor, row in zip(rows["tensor"].tolist(), rows, strict=True)):
            spec, row = group[0]
            if int(row["count"]) > 1:
                self._check(spec, row, self._runs(spec, row))
                continue
            sizes = [int(row["numel"]) * spec.itemsize for spec, row in group]
            if len(self._scratch) < sum(sizes):
                self._scratch = np.empty(sum(sizes), np.uint8)
            self._fill(spec, row, self._scratch[: sum(sizes)])
            end = 0
            for (spec, row), nbytes in zip(group, sizes, strict=True):
                self._check(spec, row, self._scratch[end : end + nbytes])
                end += nbytes

    def place(self) -> Hashable:
        """What is the same for two processes only if one system keeps the file in its memory for both.

        Raises:
            CheckpointError: the system does not tell.
        """
        with damage(self._path):
            return self._files.place(self._fd)

    def _overlapping(self, path: str, start: int, numel: int) -> tuple[TensorSpec, np.ndarray]:
        """A tensor, and the rows that have some of these elements."""
        spec = self._index.resolve(path)
        if not 0 <= start <= start + numel <= spec.numel:
            raise ValueError(f"{path} has {spec.numel} elements, asked for {start} to {start + numel}")
        rows = self._index.rows_of(spec.path)
        if not numel:
            return spec, rows[:0]
        if len(rows) > 1:
            rows = rows[: np.searchsorted(rows["start"], np.uint64(start + numel))]
            ends = rows["start"] + (rows["count"] - np.uint64(1)) * rows["stride"] + rows["numel"]
            rows = rows[ends > start]
        return spec, rows

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """All elements of a tensor, run by run, in row-major order, as ``read`` gives them."""
        spec = self._index.resolve(path)
        for start in range(0, spec.numel, step := max(1, schema.BLOCK_BYTES // spec.itemsize)):
            yield self.read(path, start, min(step, spec.numel - start))

    def _read_row(self, spec: TensorSpec, row: np.void, start: int, output: np.ndarray) -> None:
        """Bring what a row has of the elements from `start` on into the output."""
        first, numel, count, stride = (int(row[name]) for name in ("start", "numel", "count", "stride"))
        end = start + len(output)
        if count == 1:
            low, high = max(start, first), min(end, first + numel)
            target = output[low - start : high - start]
            if not self._verify:
                self._fill(spec, row, target, (low - first) * spec.itemsize)
                return
            if len(target) == numel:
                self._fill(spec, row, target)
                self._check(spec, row, target)
            else:
                target[:] = self._whole(spec, row)[0][low - first : high - first]
            return
        for place, run in enumerate(self._whole(spec, row)):
            begin = first + place * stride
            low, high = max(start, begin), min(end, begin + numel)
            if low < high:
                output[low - start : high - start] = run[low - begin : high - begin]

    def _whole(self, spec: TensorSpec, row: np.void) -> np.ndarray:
        """All elements of a row, count x numel, checked."""
        place = int(row["file"]), int(row["byte_offset"])
        if place not in self._rows:
            runs = self._runs(spec, row)
            if self._verify:
                self._check(spec, row, runs)
            while self._rows and self._kept_bytes + runs.nbytes > _KEPT_BYTES:
                self._kept_bytes -= self._rows.pop(next(iter(self._rows))).nbytes
            self._rows[place] = runs
            self._kept_bytes += runs.nbytes
        return self._rows[place]

    def _runs(self, spec: TensorSpec, row: np.void) -> np.ndarray:
        """All elements of a row, count x numel, as they are in the file."""
        numel, count, stride = (int(row[name]) for name in ("numel", "count", "stride"))
        runs = np.empty((count, numel), schema.numpy_dtype(spec.dtype))
        # Runs that are long are read by themselves, short ones together with what lies between them.
        at_once = 1 if numel * spec.itemsize >= _LONG_RUN_BYTES else max(1, _SPAN_BYTES // (stride * spec.itemsize))
        for first in range(0, count, at_once):
            some = runs[first : first + at_once]
            span = np.empty((len(some) - 1) * stride + numel, runs.dtype)
            self._fill(spec, row, span, first * stride * spec.itemsize)
            strides = stride * spec.itemsize, spec.itemsize
            some[:] = np.lib.stride_tricks.as_strided(span, some.shape, strides)
        return runs

    def _fill(self, spec: TensorSpec, row: np.void, target: np.ndarray, away: int = 0) -> None:
        """Read what a row has from `away` bytes behind its first element on."""
        number = int(row["file"])
        if number:
            self.check_part(number)
        try:
            fd = self._parts[number][0] if number else self._fd
            got = self._files.read(fd, memoryview(target).cast("B"), int(row["byte_offset"]) + away)
        except OSError as error:
            raise CheckpointError(f"{self._path}: cannot read {spec.path}: {reason(error)}") from error
        if got < target.nbytes:
            raise CheckpointCorruptError(f"{self._path}: ends in the middle of {spec.path}")

    def _check(self, spec: TensorSpec, row: np.void, data: np.ndarray) -> None:
        if schema.checksum(data) != int(row["checksum"]):
            number = int(row["file"])
            of = f" of {self._index.parts[number - 1].name}" if number else ""
            raise CheckpointCorruptError(
                f"{self._path}: damaged: {_describe(row)} of {spec.path} (written by rank {int(row['rank'])}, bytes "
                f"from {int(row['byte_offset'])}{of}) do not have their checksum"
            )


def _together(rows: Iterable[tuple[TensorSpec, np.void]]) -> Iterator[list[tuple[TensorSpec, np.void]]]:
    """Rows that can be read in one go: of single runs, which follow each other in a file."""
    group: list[tuple[TensorSpec, np.void]] = []
    expected, nbytes = None, 0
    for spec, row in rows:
        size = int(row["numel"]) * spec.itemsize
        place = (int(row["file"]), int(row["byte_offset"])) if int(row["count"]) == 1 else None
        if group and (place is None or place != expected or nbytes + size > _AT_ONCE_BYTES):
            yield group
            group, nbytes = [], 0
        group.append((spec, row))
        nbytes += size
        expected = None if place is None else (place[0], place[1] + size)
    if group:
        yield group


def _check_part(master: Path, part: PartFile, path: Path, files: Files, fd: int) -> None:
    """Raise unless an open file is the part that a checkpoint was written with."""
    size = files.size(fd)
    if size < part.nbytes:
        raise CheckpointCorruptError(f"{path}: truncated: {master.name} knows it with {part.nbytes} bytes, not {size}")
    seal = seal_of(files, fd, path)
    if seal is None or (size, seal.digest) != (part.nbytes, part.digest):
        raise CheckpointCorruptError(f"{path}: damaged, or not the part that {master.name} was written with")


def _describe(row: np.void) -> str:
    start, numel, count, stride = (int(row[name]) for name in ("start", "numel", "count", "stride"))
    more = f", and {count - 1} more of as many every {stride}," if count > 1 else ""
    return f"elements {start} to {start + numel}{more}"
