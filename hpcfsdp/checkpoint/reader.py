"""The index of a checkpoint file, checked before it is believed, and verified reads of runs of its tensors.

Needs numpy and h5py alone. No byte of a file is ever executed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Hashable, Iterable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint import kinds
from hpcfsdp.checkpoint.access import Room, damage, hdf5_of, opened, seal_of
from hpcfsdp.checkpoint.dcp import names as dcp_names
from hpcfsdp.checkpoint.extents import check_extents, union
from hpcfsdp.checkpoint.files import Files, reason
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo, Digest, TensorSpec
from hpcfsdp.checkpoint.format.seal import Seal, packed_bytes
from hpcfsdp.checkpoint.small import (
    Values,
    check_kind,
    further_links,
    read_extra,
    read_json,
    read_links,
    read_metrics,
    read_parts,
    read_small,
    read_specs,
    required,
    text,
)
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
        links: alias of a (tied) tensor -> its path.
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
        """The tensor under a path or a alias of it.

        Raises:
            KeyError: there is none.
        """
        return self.tensors[self.links.get(path, path)]

    def rows_of(self, path: str) -> np.ndarray:
        """The rows of `extents` of a tensor, by a path or a alias of it."""
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


def read_index(files: Files, fd: int, path: Path) -> CheckpointIndex:
    """The index of an open file, see ``open_index``. HDF5 gets to see what has its checksum, and nothing else."""
    seal = seal_of(files, fd, path)
    try:
        with hdf5_of(files, fd, path, seal) as file:
            with damage(path):
                room = Room.of(files, fd)
            if seal is None:
                return _read_unsealed(path, file, files.size(fd), room)
            return _read_sealed(path, file, seal, room)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        what = error.args[0] if isinstance(error, KeyError) and error.args else str(error) or type(error).__name__
        raise CheckpointCorruptError(f"{path}: damaged, or not an HDF5 file ({what})") from error


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


def _read_sealed(path: Path, file: h5py.File, seal: Seal, room: Room) -> CheckpointIndex:
    check_kind(path, file)
    regions = [(begin, begin + nbytes) for begin, nbytes in seal.regions]
    values = Values(path, file, seal.file_bytes - packed_bytes(len(regions)), room)
    small = read_small(values)
    specs = read_specs(small[schema.TENSORS], small[schema.SHAPES])
    links = read_links(small[schema.LINKS], specs)
    rows = values.read(schema.EXTENTS, regions)
    if rows.ndim != 1 or rows.dtype != schema.EXTENT_DTYPE:
        raise ValueError(f"{schema.EXTENTS} is no table of extents")
    parts = tuple(PartFile(*part) for part in read_parts(values, regions))
    taken = union([*regions, *values.places])
    first_rows = check_extents(path, specs, rows, taken, seal.file_bytes, [part.nbytes for part in parts])
    return replace(_index(path, file, small, specs, links, rows, first_rows, seal), parts=parts)


def _read_unsealed(path: Path, file: h5py.File, size: int, room: Room) -> CheckpointIndex:
    """The index of a file of format 0.1: a digest over the small values, and no table of shapes."""
    version = check_kind(path, file)
    if not required(file, "committed", int):
        raise CheckpointCorruptError(f"{path}: was never finished: its writer stopped before the commit mark")
    if version != "0.1":
        raise CheckpointCorruptError(f"{path}: damaged: the seal that ends a file of format {version} is missing")
    values = Values(path, file, size, room)
    small = read_small(values)
    old = values.read(schema.EXTENTS)
    digest = Digest()
    for name in sorted(small):
        digest.add(name, small[name])
    digest.add(schema.EXTENTS, old)
    if digest.value() != required(file, "digest", np.uint64):
        raise CheckpointCorruptError(f"{path}: damaged: its tables or small values do not have their checksum")
    datasets = {name.decode(): values.get(name.decode()) for name in small[schema.TENSORS].tolist()}
    specs = {name: _spec_of(name, dataset) for name, dataset in datasets.items()}
    rows = np.zeros(len(old), schema.EXTENT_DTYPE)
    for name in old.dtype.names:
        rows[name] = old[name]
    rows["count"], rows["stride"] = 1, old["numel"]
    first_rows = check_extents(path, specs, rows, [], size, most_bytes=schema.OLD_BLOCK_BYTES)
    for name, (first, end) in first_rows.items():
        # Another tool may have written a tensor anew: the old bytes, which the table knows, can still be there.
        if end > first and datasets[name].id.get_offset() != rows["byte_offset"][first]:
            raise CheckpointCorruptError(f"{path}: {name} is not where it was written (rewritten by another tool?)")
    return _index(path, file, small, specs, further_links(file, list(specs)), rows, first_rows, None)


def _spec_of(name: str, dataset: Any) -> TensorSpec:
    if not isinstance(dataset, h5py.Dataset) or dataset.shape is None:
        raise ValueError(f"{name!r} is no dataset")
    return TensorSpec(name, dataset.shape, schema.torch_dtype(dataset))


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
    extra, config = read_extra(small, schema.EXTRA_VALUES), read_json(small, schema.CONFIG)
    groups, scalars, state_dict = (
        read_json(small, name) if name in small else None
        for name in (schema.PARAM_GROUPS, schema.OPTIM_SCALARS, schema.STATE_DICT)
    )
    states = read_extra(small, schema.MODULE_STATES) if schema.MODULE_STATES in small else {}
    kinds.check_object(config, schema.CONFIG)
    kinds.check_optimizer(groups, scalars, named=schema.STATE_DICT not in small)
    kinds.check_module_states(states)
    if schema.STATE_DICT in small:
        by_kind = {dcp_names.GROUP: groups, dcp_names.SCALAR: scalars, dcp_names.EXTRA: extra}
        kinds.check_entries(state_dict, {**specs, **links}, by_kind)
    info = CheckpointInfo(
        path=path,
        step=required(file, "step", int),
        world_size=required(file, "world_size", int),
        date=required(file, "date", text),
        software_version=required(file, "software_version", text),
        format_version=required(file, "format_version", text),
        extra=extra,
        config=config,
    )
    return CheckpointIndex(
        info=info,
        tensors=specs,
        links=links,
        extents=rows,
        param_groups=groups,
        scalars=scalars,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        first_rows=first_rows,
        metrics=read_metrics(small),
        module_states=states,
        seal=seal,
        state_dict=state_dict,
    )
