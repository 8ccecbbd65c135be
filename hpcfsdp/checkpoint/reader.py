"""The index of a checkpoint file, checked before it is believed, and verified reads of runs of its tensors.

Needs numpy and h5py alone. No byte of a file is ever executed.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint import schema
from hpcfsdp.checkpoint.extra import join_arrays
from hpcfsdp.checkpoint.schema import CheckpointInfo, Digest, TensorSpec
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError


@dataclass(frozen=True)
class CheckpointIndex:
    """Everything of a checkpoint but the tensors' elements.

    Attributes:
        tensors: by path in the file ("model/<fqn>", "optim/state/<fqn>/<key>"), in file order.
        links: further path of a (tied) tensor -> its path.
        extents: the table of runs, sorted by tensor and start.
        param_groups, scalars: of the optimizer; None where none was saved.
        rng: states of random number generators by kind, one row for each rank that wrote.
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

    def resolve(self, path: str) -> TensorSpec:
        """The tensor under a path or a further path of it.

        Raises:
            KeyError: there is none.
        """
        return self.tensors[self.links.get(path, path)]


def open_index(path: str | os.PathLike[str]) -> CheckpointIndex:
    """Read the index of a checkpoint; not collective.

    Raises:
        CheckpointError: there is no such file, it cannot be opened, or it is of a newer format.
        CheckpointCorruptError: it is no checkpoint, was never finished, or is damaged.
    """
    path = Path(path)
    if path.is_dir():
        raise CheckpointError(f"{path}: is a directory, not a checkpoint file")
    try:
        with open(path, "rb") as plain:
            size = os.fstat(plain.fileno()).st_size
    except OSError as error:
        raise CheckpointError(f"{path}: {os.strerror(error.errno or 0)}") from None
    try:
        with h5py.File(path, "r", locking=False) as file:
            return _read_index(path, file, size)
    except CheckpointError:
        raise
    except Exception as error:  # h5py raises half a dozen types on damaged files
        reason = str(error).strip("'\"")
        raise CheckpointCorruptError(f"{path}: damaged, or not an HDF5 file ({reason})") from error


class BlockReader:
    """Reads runs of tensors from a checkpoint's bytes, each checked against its checksum. A context manager."""

    def __init__(self, index: CheckpointIndex) -> None:
        self._index = index
        self._fd = -1

    def __enter__(self) -> BlockReader:
        try:
            self._fd = os.open(self._index.info.path, os.O_RDONLY)
        except OSError as error:
            raise CheckpointError(f"{self._index.info.path}: {error.strerror}") from None
        return self

    def __exit__(self, *_: object) -> None:
        os.close(self._fd)

    def read(self, path: str, start: int, numel: int) -> np.ndarray:
        """Elements `start` to `start + numel` of a tensor, 1-D, in ``schema.numpy_dtype`` of its dtype.

        Raises:
            ValueError: the tensor has no such elements.
            CheckpointCorruptError: the bytes are not those that were written.
        """
        spec = self._index.resolve(path)
        if not 0 <= start <= start + numel <= spec.numel:
            raise ValueError(f"{path} has {spec.numel} elements, asked for {start} to {start + numel}")
        first, end = self._index.first_rows[spec.path]
        rows = self._index.extents[first:end]
        output = np.empty(numel, dtype=schema.numpy_dtype(spec.dtype))
        begin = int(np.searchsorted(rows["start"], start, side="right")) - 1
        for row in rows[max(0, begin) :]:
            row_start, row_numel = int(row["start"]), int(row["numel"])
            if row_start >= start + numel:
                break
            low, high = max(start, row_start), min(start + numel, row_start + row_numel)
            block = self._read_block(spec, row)
            output[low - start : high - start] = block[low - row_start : high - row_start]
        return output

    def blocks(self, path: str) -> Iterator[np.ndarray]:
        """All elements of a tensor, run by run, in row-major order, as ``read`` gives them."""
        spec = self._index.resolve(path)
        first, end = self._index.first_rows[spec.path]
        for row in self._index.extents[first:end]:
            yield self._read_block(spec, row)

    def _read_block(self, spec: TensorSpec, row: np.void) -> np.ndarray:
        nbytes, at = int(row["numel"]) * spec.itemsize, int(row["byte_offset"])
        data = np.empty(nbytes, dtype=np.uint8)
        view = memoryview(data)
        while view:
            try:
                got = os.preadv(self._fd, [view], at)
            except OSError as error:
                raise CheckpointError(f"{self._index.info.path}: cannot read {spec.path}: {error.strerror}") from error
            if got == 0:
                raise CheckpointCorruptError(f"{self._index.info.path}: ends in the middle of {spec.path}")
            view, at = view[got:], at + got
        if schema.checksum(data) != int(row["checksum"]):
            raise CheckpointCorruptError(
                f"{self._index.info.path}: damaged: elements {int(row['start'])} to "
                f"{int(row['start']) + int(row['numel'])} of {spec.path} (written by rank {int(row['rank'])}, "
                f"bytes from {int(row['byte_offset'])}) do not have their checksum"
            )
        return data.view(schema.numpy_dtype(spec.dtype))


def _read_index(path: Path, file: h5py.File, size: int) -> CheckpointIndex:
    if _text(file.attrs.get("format", b"")) != schema.FORMAT:
        raise CheckpointCorruptError(f"{path}: an HDF5 file, but not an hpcfsdp checkpoint")
    version = _text(file.attrs["format_version"])
    if version.split(".")[0] != schema.FORMAT_VERSION.split(".")[0]:
        raise CheckpointError(
            f"{path}: has format version {version}, this hpcfsdp reads {schema.FORMAT_VERSION}: use a newer hpcfsdp"
        )
    if not file.attrs["committed"]:
        raise CheckpointCorruptError(f"{path}: was never finished: its writer stopped before the commit mark")
    small = _read_small(file)
    rows = file[schema.EXTENTS][...]
    digest = Digest()
    for name in sorted(small):
        digest.add(name, small[name])
    digest.add(schema.EXTENTS, rows)
    if digest.value() != file.attrs["digest"]:
        raise CheckpointCorruptError(f"{path}: damaged: its tables or small values do not have their checksum")

    names = [name.decode() for name in small[schema.TENSORS].tolist()]
    specs, offsets = {}, np.zeros(len(names), dtype=np.uint64)
    for index, name in enumerate(names):
        dataset = file[name]
        specs[name] = TensorSpec(name, dataset.shape, schema.torch_dtype(dataset))
        offset = dataset.id.get_offset()
        if offset is None and specs[name].nbytes:
            raise CheckpointCorruptError(
                f"{path}: {name} is not stored as one run of bytes (rewritten by another tool?)"
            )
        offsets[index] = offset or 0
    info = CheckpointInfo(
        path=path,
        step=int(file.attrs["step"]),
        world_size=int(file.attrs["world_size"]),
        date=_text(file.attrs["date"]),
        software_version=_text(file.attrs["software_version"]),
        format_version=version,
        extra=_read_extra(small),
        config=schema.from_json(small[schema.CONFIG]),
    )
    return CheckpointIndex(
        info=info,
        tensors=specs,
        links=_links(file, names),
        extents=rows,
        param_groups=schema.from_json(small[schema.PARAM_GROUPS]) if schema.PARAM_GROUPS in small else None,
        scalars=schema.from_json(small[schema.OPTIM_SCALARS]) if schema.OPTIM_SCALARS in small else None,
        rng={name.rsplit("/", 1)[1]: value for name, value in small.items() if name.startswith(f"{schema.RNG}/")},
        first_rows=_check_extents(path, list(specs.values()), offsets, rows, size),
    )


def _read_small(file: h5py.File) -> dict[str, Any]:
    """All datasets but tensors and the table of extents, as ``skeleton.create`` was given them."""
    found: dict[str, Any] = {}
    for name in (schema.PARAM_GROUPS, schema.OPTIM_SCALARS, schema.EXTRA_VALUES, schema.CONFIG, schema.TENSORS):
        if name in file:
            found[name] = file[name][()]
    for group in (schema.EXTRA_ARRAYS, schema.RNG):
        for name in file.get(group, ()):
            found[f"{group}/{name}"] = file[group][name][...]
    return {name: bytes(value) if isinstance(value, bytes) else value for name, value in found.items()}


def _read_extra(small: dict[str, Any]) -> dict[str, Any]:
    prefix = f"{schema.EXTRA_ARRAYS}/"
    arrays = {name.removeprefix(prefix): value for name, value in small.items() if name.startswith(prefix)}
    return join_arrays(schema.from_json(small[schema.EXTRA_VALUES]), arrays)


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


def _check_extents(
    path: Path, specs: list[TensorSpec], offsets: np.ndarray, rows: np.ndarray, size: int
) -> dict[str, tuple[int, int]]:
    """Prove that the runs tile every tensor and lie inside of the file; the rows of each tensor."""
    bounds: dict[str, tuple[int, int]] = {}
    if len(rows) and (int(rows["tensor"].max()) >= len(specs) or np.any(np.diff(rows["tensor"].astype(np.int64)) < 0)):
        raise CheckpointCorruptError(f"{path}: damaged: its table of extents is out of order")
    edges = np.searchsorted(rows["tensor"], np.arange(len(specs) + 1))
    for index, spec in enumerate(specs):
        first, end = int(edges[index]), int(edges[index + 1])
        own = rows[first:end]
        ends = np.concatenate([np.zeros(1, np.uint64), own["start"] + own["numel"]])
        tiled = np.array_equal(ends[:-1], own["start"]) and int(ends[-1]) == spec.numel
        in_place = np.array_equal(own["byte_offset"], offsets[index] + own["start"] * np.uint64(spec.itemsize))
        if not (tiled and in_place):
            raise CheckpointCorruptError(f"{path}: damaged: the runs of {spec.path} do not tile it")
        if int(offsets[index]) + spec.nbytes > size:
            raise CheckpointCorruptError(f"{path}: truncated: {spec.path} ends beyond the file's {size} bytes")
        bounds[spec.path] = (first, end)
    return bounds


def _text(value: Any) -> str:
    with contextlib.suppress(AttributeError):
        return value.decode()
    return str(value)
