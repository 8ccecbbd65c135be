"""Verified reads of runs of a checkpoint's tensors. Needs numpy and h5py alone."""

import contextlib
import itertools
from collections import namedtuple
from collections.abc import Hashable, Iterable, Iterator, Sequence
from typing import TypeVar

import numpy as np
import xxhash

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import naming_damage, open_file, read_file_footer
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

_KEPT_BYTES = 64 << 20  # most bytes of rows that a reader keeps, to give parts of them, unless one alone has more
_OPEN_PARTS = 64  # most parts of a checkpoint that are open at a time: it may have one for each of a thousand nodes
_AT_ONCE_BYTES = 1 << 20
"""Most bytes of several rows that are read in one go to be checked: they stay in the cache of a core until they are."""

_CHUNK_BYTES = 256 << 10
"""Bytes that are read, and added to a checksum, at a time: they are in the cache of a core when it is computed."""

_FEW_ROWS = 64  # so many rows of a tensor are looked through one by one: numpy would take longer
_ROWS_AT_ONCE = 4096  # rows that are Python tuples at a time, which take seven times as much memory
_LONG_RUN_BYTES = 64 << 10
_SPAN_BYTES = 8 << 20

_RUNS_BYTES = 16 << 20  # most bytes of a range that is read for several runs in it
_GAP_BYTES = 1 << 20  # reading a gap of so many bytes between two runs costs about as much as beginning another read


T = TypeVar("T")

_Extent = namedtuple("_Extent", schema.EXTENT_DTYPE.names)
"""A row of the table of extents. To read a field of a numpy row costs far more."""


class BlockReader:
    """Read runs of tensors and verify their checksums. A context manager."""

    def __init__(self, index: CheckpointIndex, *, verify: bool = True) -> None:
        """Not collective. Without `verify`, it reads only the requested bytes and compares no checksums."""
        self._index, self._verify = index, verify
        self.path = index.info.path
        self._stack = contextlib.ExitStack()
        # Rows that were requested in part, by file and place in it: a caller that reads a tensor in small parts comes
        # back for the next one, and interleaved rows are needed together.
        self._rows: dict[tuple[int, int], np.ndarray] = {}
        self._kept_bytes = 0  # of them
        self._scratch = np.empty(0, np.uint8)
        self._parts: dict[int, tuple[int, contextlib.ExitStack]] = {}  # descriptor, and a stack that closes it

    def __enter__(self) -> "BlockReader":
        """Open the file; raise CheckpointReplacedError if it is another one by now."""
        self._fd = self._stack.enter_context(open_file(self.path, self._index.footer))
        return self

    def __exit__(self, *_: object) -> None:
        while self._parts:
            self._parts.popitem()[1][1].close()
        self._stack.close()

    def check_part(self, number: int) -> None:
        """Open a part and check that it was written with the checkpoint. `number` is as in the table of extents.

        Raise CheckpointCorruptError if it is missing, damaged, or of another checkpoint, CheckpointError if it cannot
        be opened, CheckpointReplacedError if the checkpoint has been replaced.
        """
        if number in self._parts:
            return
        part = self._index.parts[number - 1]
        path, master = self._index.folder / part.name, self.path.name
        try:
            with contextlib.ExitStack() as stack:
                fd = stack.enter_context(open_file(path))
                if (size := disk.size(fd)) < part.nbytes:
                    what = f"truncated: {master} knows it with {part.nbytes} bytes, not {size}"
                    raise CheckpointCorruptError(f"{path}: {what}")
                footer = read_file_footer(fd, path)
                if footer is None or (size, footer.digest) != (part.nbytes, part.digest):
                    raise CheckpointCorruptError(f"{path}: damaged, or not the part that {master} was written with")
                self._parts[number] = fd, stack.pop_all()
            if len(self._parts) > _OPEN_PARTS:
                self._parts.pop(next(iter(self._parts)))[1].close()
        except CheckpointError as error:
            with open_file(self.path, self._index.footer):
                pass  # it has not been replaced
            if path.exists():
                raise
            what = f"{part.name}, which has a part of its tensors, is not next to it"
            raise CheckpointCorruptError(f"{self.path}: {what}") from error

    def read(self, path: str, start: int, numel: int) -> np.ndarray:
        """Return elements `start` to `start + numel` of a tensor, 1-D, in ``schema.numpy_dtype`` of its dtype.

        Raise ValueError for elements outside of the tensor, CheckpointCorruptError for a wrong checksum.
        """
        output = np.empty(numel, dtype=schema.numpy_dtype(self._index.resolve(path).dtype))
        self.read_all([(path, start, output)])
        return output

    def read_all(self, wanted: Iterable[tuple[str, int, np.ndarray]]) -> None:
        """As ``read`` for each path and start, into 1-D contiguous memory of that dtype."""
        # All rows are looked up before the first is read: data that flows through the caches drives all else out.
        found = [(self._overlapping(path, start, len(output)), start, output) for path, start, output in wanted]
        for (spec, rows), start, output in found:
            for row in rows:
                self._read_extent(spec, row, start, output)

    def read_runs(self, path: str, starts: np.ndarray, output: np.ndarray) -> None:
        """As ``read_all``, for runs of one length from each of `starts` on, ascending. Close runs share a read."""
        if not len(output):
            return
        numel = len(output) // len(starts)
        apart = (starts[1:] - starts[:-1] - numel) * output.itemsize > _GAP_BYTES
        edges = [0, *(np.flatnonzero(apart) + 1).tolist(), len(starts)]
        reach = _RUNS_BYTES // output.itemsize - numel  # from the start of the first run to that of the last
        for first, end in itertools.pairwise(edges):
            while first < end:
                stop = first + int(np.searchsorted(starts[first:end], starts[first] + reach, side="right"))
                stop = max(stop, first + 1)
                begin, target = int(starts[first]), output[first * numel : stop * numel]
                if stop - first == 1:
                    self.read_all([(path, begin, target)])
                else:
                    values = self.read(path, begin, int(starts[stop - 1]) + numel - begin)
                    runs = np.lib.stride_tricks.sliding_window_view(values, numel)
                    target.reshape(-1, numel)[:] = runs[starts[first:stop] - begin]
                first = stop

    def check_rows(self, places: np.ndarray) -> None:
        """Verify rows of the table of extents, by their places in it, best in the file's order; raise as ``read``."""
        specs = list(self._index.tensors.values())
        parts = (places[begin : begin + _ROWS_AT_ONCE] for begin in range(0, len(places), _ROWS_AT_ONCE))
        rows = (_Extent._make(row) for part in parts for row in self._index.extents[part].tolist())
        for group in _group_rows((specs[row.tensor], row) for row in rows):
            spec, row = group[0]
            if row.count > 1:
                self._compare(spec, row, schema.checksum(self._runs(spec, row)))
                continue
            sizes = [row.numel * spec.itemsize for spec, row in group]
            room = sum(sizes) if len(group) > 1 else min(_CHUNK_BYTES, *sizes)
            if len(self._scratch) < room:
                self._scratch = np.empty(max(room, _CHUNK_BYTES), np.uint8)
            if len(group) == 1:
                self._read_checked(spec, row, self._scratch[:room])
                continue
            self._fill(spec, row, self._scratch[:room])
            end = 0
            for (spec, row), nbytes in zip(group, sizes, strict=True):
                self._compare(spec, row, schema.checksum(self._scratch[end : end + nbytes]))
                end += nbytes

    def portions(self, pieces: Sequence[T]) -> Iterator[Sequence[T]]:
        """Yield pieces of tensors, in groups that can be read as soon as they are there: at once, for a file."""
        yield pieces

    def place(self) -> Hashable:
        """Return a value that is equal on two processes only if they share the file's pages in memory."""
        with naming_damage(self.path):
            return disk.place(self._fd)

    def _overlapping(self, path: str, start: int, numel: int) -> tuple[schema.TensorSpec, list[_Extent]]:
        """Return a tensor, and the rows with some of these elements."""
        spec, end = self._index.resolve(path), start + numel
        if not 0 <= start <= end <= spec.numel:
            raise ValueError(f"{path} has {spec.numel} elements, asked for {start} to {end}")
        rows = self._index.rows_of(spec.path)
        if not numel:
            return spec, []
        if len(rows) > _FEW_ROWS:
            rows = rows[: np.searchsorted(rows["start"], np.uint64(end))]
            rows = rows[rows["start"].astype(np.int64) + schema.row_spans(rows) > start]
        found = map(_Extent._make, rows.tolist())
        return spec, [r for r in found if r.start < end and r.start + (r.count - 1) * r.stride + r.numel > start]

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """Yield all elements of a tensor in row-major order, in blocks."""
        spec = self._index.resolve(path)
        for start in range(0, spec.numel, step := max(1, schema.BLOCK_BYTES // spec.itemsize)):
            yield self.read(path, start, min(step, spec.numel - start))

    def _read_extent(self, spec: schema.TensorSpec, row: _Extent, start: int, output: np.ndarray) -> None:
        """Copy the elements of a row that are within the output to it."""
        first, numel = row.start, row.numel
        end = start + len(output)
        if row.count == 1:
            low, high = max(start, first), min(end, first + numel)
            target = output[low - start : high - start]
            if not self._verify:
                self._fill(spec, row, target, (low - first) * spec.itemsize)
                return
            if len(target) == numel:
                self._read_checked(spec, row, target)
            else:
                target[:] = self._whole(spec, row)[0][low - first : high - first]
            return
        for place, run in enumerate(self._whole(spec, row)):
            begin = first + place * row.stride
            low, high = max(start, begin), min(end, begin + numel)
            if low < high:
                output[low - start : high - start] = run[low - begin : high - begin]

    def _whole(self, spec: schema.TensorSpec, row: _Extent) -> np.ndarray:
        """Return all elements of a row, count x numel, verified."""
        place = row.file, row.byte_offset
        if place not in self._rows:
            runs = self._runs(spec, row)
            if self._verify:
                self._compare(spec, row, schema.checksum(runs))
            while self._rows and self._kept_bytes + runs.nbytes > _KEPT_BYTES:
                self._kept_bytes -= self._rows.pop(next(iter(self._rows))).nbytes
            self._rows[place] = runs
            self._kept_bytes += runs.nbytes
        return self._rows[place]

    def _runs(self, spec: schema.TensorSpec, row: _Extent) -> np.ndarray:
        """Read all elements of a row, count x numel."""
        numel, count, stride = row.numel, row.count, row.stride
        runs = np.empty((count, numel), schema.numpy_dtype(spec.dtype))
        # Long runs are read one by one, short ones together with the gaps between them.
        at_once = 1 if numel * spec.itemsize >= _LONG_RUN_BYTES else max(1, _SPAN_BYTES // (stride * spec.itemsize))
        for first in range(0, count, at_once):
            some = runs[first : first + at_once]
            span = np.empty((len(some) - 1) * stride + numel, runs.dtype)
            self._fill(spec, row, span, first * stride * spec.itemsize)
            strides = stride * spec.itemsize, spec.itemsize
            some[:] = np.lib.stride_tricks.as_strided(span, some.shape, strides)
        return runs

    def _read_checked(self, spec: schema.TensorSpec, row: _Extent, target: np.ndarray) -> None:
        """Read a row of a single run, all of it or one chunk after the other as `target` has room, and verify it."""
        found, nbytes, data = xxhash.xxh3_64(), row.numel * spec.itemsize, memoryview(target).cast("B")
        for away in range(0, nbytes, _CHUNK_BYTES):
            first = away if len(data) == nbytes else 0
            chunk = data[first : first + min(_CHUNK_BYTES, nbytes - away)]
            self._fill(spec, row, chunk, away)
            found.update(chunk)
        self._compare(spec, row, found.intdigest())

    def _fill(self, spec: schema.TensorSpec, row: _Extent, target: np.ndarray | memoryview, away: int = 0) -> None:
        """Read a row's bytes, from `away` bytes behind its first element on."""
        if row.file:
            self.check_part(row.file)
        fd = self._parts[row.file][0] if row.file else self._fd
        try:
            got = disk.read(fd, memoryview(target).cast("B"), row.byte_offset + away)
        except OSError as error:
            raise CheckpointError(f"{self.path}: cannot read {spec.path}: {disk.reason(error)}") from error
        if got < target.nbytes:
            raise CheckpointCorruptError(f"{self.path}: ends in the middle of {spec.path}")

    def _compare(self, spec: schema.TensorSpec, row: _Extent, found: int) -> None:
        """Raise unless the checksum of a row's bytes is the one in the table."""
        if found != row.checksum:
            of = f" of {self._index.parts[row.file - 1].name}" if row.file else ""
            more = f", and {row.count - 1} more of as many every {row.stride}," if row.count > 1 else ""
            raise CheckpointCorruptError(
                f"{self.path}: damaged: elements {row.start} to {row.start + row.numel}{more} of {spec.path} (written "
                f"by rank {row.rank}, bytes from {row.byte_offset}{of}) do not have their checksum"
            )


def _group_rows(rows: Iterable[tuple[schema.TensorSpec, _Extent]]) -> Iterator[list[tuple[schema.TensorSpec, _Extent]]]:
    """Group rows that can be read at once: rows of a single run that are adjacent in a file."""
    group: list[tuple[schema.TensorSpec, _Extent]] = []
    expected, nbytes = None, 0
    for spec, row in rows:
        size = row.numel * spec.itemsize
        place = (row.file, row.byte_offset) if row.count == 1 else None
        if group and (place is None or place != expected or nbytes + size > _AT_ONCE_BYTES):
            yield group
            group, nbytes = [], 0
        group.append((spec, row))
        nbytes += size
        expected = None if place is None else (place[0], place[1] + size)
    if group:
        yield group
