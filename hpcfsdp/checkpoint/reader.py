"""The index of a checkpoint file, checked before it is believed, and verified reads of runs of its tensors.

Needs numpy and h5py alone. No byte of a file is ever executed.
"""

from __future__ import annotations

import contextlib
import math
import os
import stat
from collections.abc import Hashable, Iterable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint.extra import join_arrays
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.image import Stretches
from hpcfsdp.checkpoint.format.schema import CheckpointInfo, Digest, TensorSpec
from hpcfsdp.checkpoint.format.seal import Seal, packed_bytes, read_regions, read_seal
from hpcfsdp.checkpoint.format.tiling import TilingError, byte_stretches, first_untiled
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError


@dataclass(frozen=True)
class PartFile:
    """A file beside the checkpoint that holds elements of tensors: its name, bytes, and the digest of its seal."""

    name: str
    nbytes: int
    digest: int


@dataclass(frozen=True)
class CheckpointIndex:
    """Everything of a checkpoint but the tensors' elements.

    Attributes:
        tensors: by path in the file ("model/<fqn>", "optim/state/<fqn>/<key>"), in file order.
        links: further path of a (tied) tensor -> its path.
        extents: the table of runs, sorted by tensor and start.
        param_groups, scalars: of the optimizer; None where none was saved.
        rng: states of random number generators by kind, one row for each rank that wrote.
        module_states: what modules keep beside tensors (``get_extra_state``), by name: ``values.plain`` of it.
        metrics: numbers that training has noted, by name: steps (int64) and values (float64), both 1-D.
        seal: of the file; None for one of format 0.1.
        parts: files beside this one in which elements of tensors stand; number n in `extents` is the one at n - 1.
        state_dict: where the entries of the state dict stand that ``torch.distributed.checkpoint`` has saved, see
            ``dcp.names.Entry``; None for a file that it did not write.
    """

    info: CheckpointInfo
    tensors: dict[str, TensorSpec]
    links: dict[str, str]
    extents: np.ndarray
    param_groups: list[dict[str, Any]] | None
    scalars: dict[str, Any] | None
    rng: dict[str, np.ndarray]
    first_rows: dict[str, tuple[int, int]] = field(repr=False)
    """First row and end of each tensor's runs in `extents`."""
    metrics: dict[str, tuple[np.ndarray, np.ndarray]] = field(default_factory=dict)
    module_states: dict[str, Any] = field(default_factory=dict)
    seal: Seal | None = None
    parts: tuple[PartFile, ...] = ()
    state_dict: list[dict[str, Any]] | None = None

    @property
    def keeps_module_states(self) -> bool:
        """Whether a state that is not in `module_states` is one that no module had."""
        return self.seal is not None and self.state_dict is None and bool(self.rng)

    def resolve(self, path: str) -> TensorSpec:
        """The tensor under a path or a further path of it.

        Raises:
            KeyError: there is none.
        """
        return self.tensors[self.links.get(path, path)]

    def rows_of(self, path: str) -> np.ndarray:
        """The rows of `extents` of a tensor, by a path or a further path of it."""
        first, end = self.first_rows[self.links.get(path, path)]
        return self.extents[first:end]


def open_index(path: str | os.PathLike[str], files: Files | None = None) -> CheckpointIndex:
    """Read the index of a checkpoint; not collective.

    Args:
        files: what operates on the disk, for tests that have it fail.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    files = files or Files()
    path = Path(path)
    with opened(files, path) as fd:
        return read_index(files, fd, path)


@contextlib.contextmanager
def opened(files: Files, path: Path) -> Iterator[int]:
    """The descriptor of a checkpoint file.

    Raises:
        CheckpointError: there is no such file, or it cannot be opened.
    """
    try:
        kind = path.stat().st_mode
        if stat.S_ISDIR(kind):
            raise CheckpointError(f"{path}: is a directory, not a checkpoint file")
        if not stat.S_ISREG(kind):  # to open a pipe would be to wait for one that writes into it
            raise CheckpointError(f"{path}: is not a regular file")
        fd = files.open_to_read(path)
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
    try:
        yield fd
    finally:
        files.close(fd)


def read_index(files: Files, fd: int, path: Path) -> CheckpointIndex:
    """The index of an open file, see ``open_index``. HDF5 gets to see what has its checksum, and nothing else."""

    seal = seal_of(files, fd, path)
    try:
        with hdf5_of(files, fd, path, seal) as file:
            if seal is None:
                return _read_unsealed(path, file, files.size(fd))
            return _read_sealed(path, file, seal)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        reason = str(error).strip("'\"")
        raise CheckpointCorruptError(f"{path}: damaged, or not an HDF5 file ({reason})") from error


@contextlib.contextmanager
def hdf5_of(files: Files, fd: int, path: Path, seal: Seal | None) -> Iterator[h5py.File]:
    """What HDF5 may see of an open file: of one with a seal the regions that it names, which are checked here.

    Raises:
        CheckpointError: it cannot be read.
        CheckpointCorruptError: the regions do not have their checksum.
    """
    if seal is None:
        with os.fdopen(os.dup(fd), "rb") as plain, h5py.File(plain, "r") as file:
            yield file
        return
    known = regions_of(files, fd, path, seal)
    with h5py.File(Stretches(seal.file_bytes, known), "r") as file:
        yield file


def regions_of(files: Files, fd: int, path: Path, seal: Seal) -> list[tuple[int, bytes]]:
    """The bytes of all regions of an open file: (first byte, bytes).

    Raises:
        CheckpointError: it cannot be read.
        CheckpointCorruptError: they do not have their checksum.
    """
    with _damage(path):
        return read_regions(seal, lambda begin, nbytes: bytes_of(files, fd, path, begin, nbytes))


def seal_of(files: Files, fd: int, path: Path) -> Seal | None:
    """The seal of an open file; None if it has none.

    Raises:
        CheckpointCorruptError: it is damaged.
    """
    with _damage(path):
        return read_seal(files.size(fd), lambda begin, nbytes: bytes_of(files, fd, path, begin, nbytes))


def bytes_of(files: Files, fd: int, path: Path, begin: int, nbytes: int) -> bytes:
    """Bytes of an open file.

    Raises:
        CheckpointError: they cannot be read.
        CheckpointCorruptError: the file ends before.
    """
    buffer = bytearray(nbytes)
    with _damage(path):
        if files.read(fd, memoryview(buffer), begin) < nbytes:
            raise CheckpointCorruptError(f"{path}: has become shorter while it was read")
    return bytes(buffer)


@contextlib.contextmanager
def _damage(path: Path) -> Iterator[None]:
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {os.strerror(error.errno or 0)}") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {error}") from None


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
        with _damage(self._path):
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
            raise CheckpointError(f"{self._path}: cannot read {spec.path}: {os.strerror(error.errno or 0)}") from error
        if got < target.nbytes:
            raise CheckpointCorruptError(f"{self._path}: ends in the middle of {spec.path}")

    def _check(self, spec: TensorSpec, row: np.void, data: np.ndarray) -> None:
        if schema.checksum(data) != int(row["checksum"]):
            number = int(row["file"])
            of = f" of {self._index.parts[number - 1].name}" if number else ""
            raise CheckpointCorruptError(
                f"{self._path}: damaged: {_said(row)} of {spec.path} (written by rank {int(row['rank'])}, bytes from "
                f"{int(row['byte_offset'])}{of}) do not have their checksum"
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


def _said(row: np.void) -> str:
    start, numel, count, stride = (int(row[name]) for name in ("start", "numel", "count", "stride"))
    more = f", and {count - 1} more of as many every {stride}," if count > 1 else ""
    return f"elements {start} to {start + numel}{more}"


def _read_sealed(path: Path, file: h5py.File, seal: Seal) -> CheckpointIndex:
    _check_kind(path, file)
    regions = [(begin, begin + nbytes) for begin, nbytes in seal.regions]
    values = _Values(path, file, seal.file_bytes - packed_bytes(len(regions)))
    small = _read_small(values)
    specs = _specs(small[schema.TENSORS], small[schema.SHAPES])
    paths = list(specs)
    links = {row["path"].decode(): paths[int(row["tensor"])] for row in small[schema.LINKS]}
    rows = values.read(schema.EXTENTS, regions)
    parts = _read_parts(path, values, regions)
    taken = _union([*regions, *values.places])
    first_rows = check_extents(path, specs, rows, taken, seal.file_bytes, [part.nbytes for part in parts])
    return replace(_index(path, file, small, specs, links, rows, first_rows, seal), parts=parts)


def _union(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges that hold what these do, ascending and apart."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def _read_parts(path: Path, values: _Values, regions: list[tuple[int, int]]) -> tuple[PartFile, ...]:
    if values.get(schema.FILES) is None:
        return ()
    parts = tuple(PartFile(name.decode(), *rest) for name, *rest in values.read(schema.FILES, regions).tolist())
    for part in parts:
        if part.name in ("", ".", "..") or "/" in part.name or not part.name.isprintable():
            raise CheckpointCorruptError(f"{path}: damaged: it names a part {part.name!r}, which is no name of a file")
    return parts


def _read_unsealed(path: Path, file: h5py.File, size: int) -> CheckpointIndex:
    """The index of a file of format 0.1: a digest over the small values, and no table of shapes."""
    version = _check_kind(path, file)
    if not file.attrs["committed"]:
        raise CheckpointCorruptError(f"{path}: was never finished: its writer stopped before the commit mark")
    if version != "0.1":
        raise CheckpointCorruptError(f"{path}: damaged: the seal that ends a file of format {version} is missing")
    values = _Values(path, file, size)
    small = _read_small(values)
    old = values.read(schema.EXTENTS)
    digest = Digest()
    for name in sorted(small):
        digest.add(name, small[name])
    digest.add(schema.EXTENTS, old)
    if digest.value() != file.attrs["digest"]:
        raise CheckpointCorruptError(f"{path}: damaged: its tables or small values do not have their checksum")
    names = [name.decode() for name in small[schema.TENSORS].tolist()]
    specs = {name: TensorSpec(name, file[name].shape, schema.torch_dtype(file[name])) for name in names}
    rows = np.zeros(len(old), schema.EXTENT_DTYPE)
    for name in old.dtype.names:
        rows[name] = old[name]
    rows["count"], rows["stride"] = 1, old["numel"]
    first_rows = check_extents(path, specs, rows, [], size)
    for name, (first, end) in first_rows.items():
        # Another tool may have written a tensor anew: the old bytes, which the table knows, can still be there.
        if end > first and file[name].id.get_offset() != rows["byte_offset"][first]:
            raise CheckpointCorruptError(f"{path}: {name} is not where it was written (rewritten by another tool?)")
    return _index(path, file, small, specs, _links(file, names), rows, first_rows, None)


def _index(
    path: Path,
    file: h5py.File,
    small: dict[str, Any],
    specs: dict[str, TensorSpec],
    links: dict[str, str],
    rows: np.ndarray,
    first_rows: dict[str, tuple[int, int]],
    seal: Seal | None,
) -> CheckpointIndex:
    info = CheckpointInfo(
        path=path,
        step=int(file.attrs["step"]),
        world_size=int(file.attrs["world_size"]),
        date=_text(file.attrs["date"]),
        software_version=_text(file.attrs["software_version"]),
        format_version=_text(file.attrs["format_version"]),
        extra=_read_extra(small, schema.EXTRA_VALUES),
        config=schema.from_json(small[schema.CONFIG]),
    )
    return CheckpointIndex(
        info=info,
        tensors=specs,
        links=links,
        extents=rows,
        param_groups=schema.from_json(small[schema.PARAM_GROUPS]) if schema.PARAM_GROUPS in small else None,
        scalars=schema.from_json(small[schema.OPTIM_SCALARS]) if schema.OPTIM_SCALARS in small else None,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        first_rows=first_rows,
        metrics=_read_metrics(small),
        module_states=_read_extra(small, schema.MODULE_STATES) if schema.MODULE_STATES in small else {},
        seal=seal,
        state_dict=schema.from_json(small[schema.STATE_DICT]) if schema.STATE_DICT in small else None,
    )


def _check_kind(path: Path, file: h5py.File) -> str:
    """The version of the format, if it is one that is known."""
    kind = _text(file.attrs.get("format", b""))
    if kind == schema.PART_FORMAT:
        whole = _text(file.attrs.get("checkpoint", b""))
        raise CheckpointError(f"{path}: holds a part of the checkpoint {whole}, which is to be opened instead")
    if kind != schema.FORMAT:
        raise CheckpointCorruptError(f"{path}: an HDF5 file, but not an hpcfsdp checkpoint")
    version = _text(file.attrs["format_version"])
    if int(version.split(".")[0]) > int(schema.FORMAT_VERSION.split(".")[0]):
        raise CheckpointError(
            f"{path}: has format version {version}, this hpcfsdp reads {schema.FORMAT_VERSION}: use a newer hpcfsdp"
        )
    return version


def _specs(tensors: np.ndarray, sizes: np.ndarray) -> dict[str, TensorSpec]:
    shape = sizes.tolist()
    found = {}
    for path, dtype, first, ndim in tensors.tolist():
        name = path.decode()
        found[name] = TensorSpec(name, tuple(shape[first : first + ndim]), dtype.decode())
        if not schema.supported(found[name].dtype) or len(found[name].shape) != ndim:
            raise ValueError(f"{name} has the dtype {dtype!r} and {ndim} dimensions, which are not known here")
    return found


def check_extents(
    path: Path,
    specs: dict[str, TensorSpec],
    rows: np.ndarray,
    regions: list[tuple[int, int]],
    size: int,
    part_sizes: Sequence[int] = (),
) -> dict[str, tuple[int, int]]:
    """Prove that the extents tile every tensor, lie inside of the file, and on nothing else; the rows of each tensor.

    Args:
        regions: (first byte, end) of what is no tensor.
        size: of the file.
        part_sizes: of the files beside it.

    Raises:
        CheckpointCorruptError: they do not.
    """
    paths = list(specs)
    of = rows["tensor"].astype(np.int64)
    if len(rows) and (of.max() >= len(paths) or np.any(np.diff(of) < 0)):
        raise CheckpointCorruptError(f"{path}: damaged: its table of extents is out of order")
    nbytes = sum(spec.nbytes for spec in specs.values())
    if nbytes >= _BEYOND_ANY_FILE or np.any(rows["byte_offset"] >= _BEYOND_ANY_FILE):
        raise CheckpointCorruptError(f"{path}: damaged: it has sizes or places beyond any file")
    try:
        untiled = first_untiled(rows, [spec.numel for spec in specs.values()])
    except TilingError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {paths[error.tensor]}: {error}") from None
    if untiled is not None:
        raise CheckpointCorruptError(f"{path}: damaged: the runs of {paths[untiled]} do not tile it")
    sizes = np.array([size, *part_sizes], np.int64)
    if len(rows) and rows["file"].max() >= len(sizes):
        raise CheckpointCorruptError(f"{path}: damaged: its table of extents has files that it does not name")
    _check_places(path, specs, rows, regions, sizes)
    edges = np.searchsorted(of, np.arange(len(paths) + 1)).tolist()
    return {name: (edges[index], edges[index + 1]) for index, name in enumerate(paths)}


_BEYOND_ANY_FILE = 1 << 61
"""Bytes. Sums of two of them are exact in int64."""


def _check_places(
    path: Path, specs: dict[str, TensorSpec], rows: np.ndarray, regions: list[tuple[int, int]], sizes: np.ndarray
) -> None:
    """Raise unless all elements, of tensors that the rows tile, lie in their files, and on nothing else."""
    paths, itemsizes = list(specs), np.array([spec.itemsize for spec in specs.values()], np.int64)
    spans = (rows["count"].astype(np.int64) - 1) * rows["stride"].astype(np.int64) + rows["numel"].astype(np.int64)
    ends = rows["byte_offset"].astype(np.int64) + spans * itemsizes[rows["tensor"]]
    beyond = np.flatnonzero(ends > sizes[rows["file"]])
    if len(beyond):
        tensor, file = paths[rows["tensor"][beyond[0]]], int(rows["file"][beyond[0]])
        where = f"part {file}'s" if file else "the file's"
        raise CheckpointCorruptError(f"{path}: truncated: {tensor} ends beyond {where} {sizes[file]} bytes")
    for file in np.unique(rows["file"]).tolist():
        try:
            begins, ends = elements_in(rows, itemsizes, file)
        except TilingError as error:
            raise CheckpointCorruptError(f"{path}: damaged: {error}") from None
        if not file:
            begins = np.append(begins, [begin for begin, _ in regions])
            ends = np.append(ends, [end for _, end in regions])
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], ends[order]
        if np.any(begins[1:] < ends[:-1]):
            raise CheckpointCorruptError(f"{path}: damaged: two things stand at one place of it")


def elements_in(rows: np.ndarray, itemsizes: np.ndarray, file: int) -> tuple[np.ndarray, np.ndarray]:
    """Which bytes of a file are elements: first bytes and ends of stretches, ascending; see ``byte_stretches``.

    Args:
        rows: of the table of extents, which tile the tensors.
        itemsizes: bytes of an element, by tensor.
        file: as in the table.
    """
    rows = rows[rows["file"] == file]
    tensors, sizes = rows["tensor"], itemsizes[rows["tensor"]]
    begins, counts = rows["byte_offset"].astype(np.int64), rows["count"].astype(np.int64)
    numels, strides = (rows[name].astype(np.int64) * sizes for name in ("numel", "stride"))
    # Elements of a tensor that all lie as in the tensor, from one byte on, cannot lie on each other.
    base = begins - rows["start"].astype(np.int64) * sizes
    order = np.lexsort((base, tensors))
    changes = (np.diff(tensors[order].astype(np.int64), prepend=-1) != 0) | (np.diff(base[order], prepend=-1) != 0)
    owners = np.empty(len(rows), np.int64)
    owners[order] = np.cumsum(changes)
    return byte_stretches(begins, numels, counts, strides, owners)


_SINGLE = (
    schema.PARAM_GROUPS,
    schema.OPTIM_SCALARS,
    schema.EXTRA_VALUES,
    schema.MODULE_STATES,
    schema.CONFIG,
    schema.STATE_DICT,
    schema.TENSORS,
    schema.SHAPES,
    schema.LINKS,
)


class _Values:
    """Small datasets of a file that HDF5 may see.

    Attributes:
        places: (first byte, end) of those that were read.
    """

    def __init__(self, path: Path, file: h5py.File, end: int) -> None:
        """
        Args:
            end: where HDF5's part of the file ends.
        """
        self._path, self._file, self._end = path, file, end
        self.places: list[tuple[int, int]] = []

    def get(self, name: str) -> h5py.Group | h5py.Dataset | None:
        """A group or dataset; None if there is none.

        Raises:
            CheckpointCorruptError: it is somewhere else, and there is only a link to it.
        """
        found: Any = self._file
        for part in name.split("/"):
            link = found.get(part, getlink=True)
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise self._damaged(name, "is reached by a link that is no hard one")
            found = found[part]
        return found

    def read(self, name: str, regions: Iterable[tuple[int, int]] | None = None) -> Any:
        """The value of a dataset.

        Args:
            regions: (first byte, end) of regions of which one has all of it. Zeros that begin or end a value are in
                none, so that this holds for tables alone.

        Raises:
            CheckpointCorruptError: its bytes do not stand in this file as they are. HDF5 would make many of few, or
                read other files.
        """
        dataset = self.get(name)
        if not isinstance(dataset, h5py.Dataset) or dataset.shape is None or dataset.dtype.hasobject:
            raise self._damaged(name, "is not there, or no array of numbers or text")
        layout = dataset.id.get_create_plist()
        if layout.get_layout() not in (h5py.h5d.CONTIGUOUS, h5py.h5d.COMPACT) or layout.get_nfilters():
            raise self._damaged(name, "is chunked, filtered or virtual")
        if layout.get_layout() == h5py.h5d.CONTIGUOUS:
            self._check_place(name, dataset, layout.get_external_count(), regions)
        value = dataset[...]
        return value.item() if value.dtype.kind == "S" and not value.shape else value

    def _check_place(
        self, name: str, dataset: h5py.Dataset, num_external: int, regions: Iterable[tuple[int, int]] | None
    ) -> None:
        nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
        if not nbytes:
            return
        begin = dataset.id.get_offset()
        if num_external or begin is None:
            raise self._damaged(name, f"has none of its {nbytes} bytes in the file")
        end = begin + nbytes
        if end > self._end:
            raise self._damaged(name, f"ends at byte {end}, behind the end of the data, {self._end}")
        if regions is not None and not any(first <= begin and end <= last for first, last in regions):
            raise self._damaged(name, "has bytes without a checksum")
        self.places.append((begin, end))

    def _damaged(self, name: str, what: str) -> CheckpointCorruptError:
        return CheckpointCorruptError(f"{self._path}: damaged: {name} {what}")


def _read_small(values: _Values) -> dict[str, Any]:
    """All datasets but tensors and the table of extents, as ``skeleton.create`` was given them."""
    names = [name for name in _SINGLE if values.get(name) is not None]
    for group in (schema.EXTRA_ARRAYS, schema.RNG):
        names += [f"{group}/{name}" for name in values.get(group) or ()]
    for name in values.get(schema.METRICS) or ():
        names += [f"{schema.METRICS}/{name}/{part}" for part in schema.METRIC_PARTS]
    return {name: values.read(name) for name in names}


def _read_extra(small: dict[str, Any], name: str) -> dict[str, Any]:
    prefix = f"{schema.EXTRA_ARRAYS}/"
    arrays = {name.removeprefix(prefix): value for name, value in small.items() if name.startswith(prefix)}
    return join_arrays(schema.from_json(small[name]), arrays)


def _read_metrics(small: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    paths = {path.rpartition("/")[0] for path in small if path.startswith(f"{schema.METRICS}/")}
    found = {}
    for path in sorted(paths):
        steps, values = (small[f"{path}/{part}"] for part in schema.METRIC_PARTS)
        if steps.ndim != 1 or steps.shape != values.shape:
            raise ValueError(f"{path} has {steps.shape} steps and {values.shape} values")
        found[path.removeprefix(f"{schema.METRICS}/")] = steps, values
    return found


def _links(file: h5py.File, names: list[str]) -> dict[str, str]:
    known = set(_paths_below(file[schema.MODEL], schema.MODEL))
    further = known.difference(names)
    if not further:
        return {}
    by_address = {h5py.h5o.get_info(file[name].id).addr: name for name in names if name in known}
    return {name: by_address[h5py.h5o.get_info(file[name].id).addr] for name in sorted(further)}


def _paths_below(group: h5py.Group, path: str) -> Iterator[str]:
    # Not h5py's visit: it passes over the further names of a dataset.
    for name, item in group.items():
        if isinstance(item, h5py.Group):
            yield from _paths_below(item, f"{path}/{name}")
        else:
            yield f"{path}/{name}"


def _text(value: Any) -> str:
    with contextlib.suppress(AttributeError):
        return value.decode()
    return str(value)
