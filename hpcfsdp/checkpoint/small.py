"""What of a checkpoint is no element of a tensor: attributes, tables and small values, each checked before it is used.

HDF5 has parsed it by then. It would make many bytes of few, or read other files: what is not as this package writes it
is refused.
"""

from __future__ import annotations

import contextlib
import math
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint.access import Room
from hpcfsdp.checkpoint.extra import join_arrays
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

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


def text(value: Any) -> str:
    """The text of an attribute."""
    with contextlib.suppress(AttributeError):
        return value.decode()
    return str(value)


def required(file: h5py.File, name: str, kind: Callable[[Any], Any]) -> Any:
    """An attribute of the root group, as `kind` makes it.

    Raises:
        ValueError: there is none, or it is of another kind.
    """
    value = schema.attribute(file, name)
    try:
        if value is not None:
            return kind(value)
    except ValueError:
        pass
    raise ValueError(f"the attribute {name} is not there, or not what it should be")


def check_kind(path: Path, file: h5py.File) -> str:
    """The version of the format, if it is one that is known.

    Raises:
        CheckpointError: the file is of another version, or a part of a checkpoint.
        CheckpointCorruptError: it is no checkpoint.
    """
    kind = text(schema.attribute(file, "format"))
    if kind == schema.PART_FORMAT:
        whole = text(schema.attribute(file, "checkpoint"))
        raise CheckpointError(f"{path}: holds a part of the checkpoint {whole}, which is to be opened instead")
    if kind != schema.FORMAT:
        raise CheckpointCorruptError(f"{path}: an HDF5 file, but not an hpcfsdp checkpoint")
    version = required(file, "format_version", text)
    major, known = (int(each.split(".")[0]) for each in (version, schema.FORMAT_VERSION))
    if major < 0:
        raise ValueError(f"{version!r} is no version of a format")
    if major != known:
        raise CheckpointError(
            f"{path}: has format version {version}, this hpcfsdp reads {schema.FORMAT_VERSION}: use "
            f"{'a newer' if major > known else 'an older'} hpcfsdp"
        )
    return version


class Values:
    """Small datasets of a file that HDF5 may see.

    Attributes:
        places: (first byte, end) of those that were read.
    """

    def __init__(self, path: Path, file: h5py.File, end: int, room: Room) -> None:
        """
        Args:
            end: where HDF5's part of the file ends.
            room: memory that they may take.
        """
        self._path, self._file, self._end, self._room = path, file, end, room
        self.places: list[tuple[int, int]] = []

    def get(self, name: str) -> h5py.Group | h5py.Dataset | None:
        """A group or dataset; None if there is none.

        Raises:
            CheckpointCorruptError: it is somewhere else, and there is only a link to it.
        """
        found: Any = self._file
        for part in name.split("/"):
            link = found.get(part, getlink=True) if isinstance(found, h5py.Group) else None
            if link is None:
                return None
            if not isinstance(link, h5py.HardLink):
                raise self._damaged(name, "is reached by a link that is no hard one")
            found = found[part]
        return found

    def names(self, name: str) -> Iterable[str]:
        """The names in a group; none if there is no such group."""
        found = self.get(name)
        return found if isinstance(found, h5py.Group) else ()

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
        nbytes = math.prod(dataset.shape) * dataset.dtype.itemsize
        if nbytes and layout.get_layout() == h5py.h5d.CONTIGUOUS:
            self._check_place(name, nbytes, dataset.id.get_offset(), layout.get_external_count(), regions)
        try:
            self._room.take(nbytes)
        except ValueError as error:
            raise self._damaged(name, f"has {nbytes} bytes: {error}") from None
        value = dataset[...]
        return value.item() if value.dtype.kind == "S" and not value.shape else value

    def _check_place(
        self, name: str, nbytes: int, begin: int | None, num_external: int, regions: Iterable[tuple[int, int]] | None
    ) -> None:
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


def read_small(values: Values) -> dict[str, Any]:
    """All datasets but tensors and the table of extents, as ``skeleton.create`` was given them."""
    names = [name for name in _SINGLE if values.get(name) is not None]
    for group in (schema.EXTRA_ARRAYS, schema.RNG):
        names += [f"{group}/{name}" for name in values.names(group)]
    for name in values.names(schema.METRICS):
        names += [f"{schema.METRICS}/{name}/{part}" for part in schema.METRIC_PARTS]
    return {name: values.read(name) for name in names}


def read_specs(tensors: np.ndarray, sizes: np.ndarray) -> dict[str, TensorSpec]:
    """The tensors of the two tables.

    Raises:
        ValueError: they are not as they are written.
    """
    if sizes.ndim != 1 or sizes.dtype.kind != "u":
        raise ValueError(f"{schema.SHAPES} is no list of sizes")
    shape = sizes.tolist()
    found: dict[str, TensorSpec] = {}
    for path, dtype, first, ndim in _rows(schema.TENSORS, tensors, ("path", "dtype", "first_dim", "ndim")):
        name = path.decode()
        if ndim > schema.MOST_DIMENSIONS:
            raise ValueError(f"{name!r} has {ndim} dimensions; a tensor has {schema.MOST_DIMENSIONS} at most")
        spec = TensorSpec(name, tuple(shape[first : first + ndim]), dtype.decode())
        if not schema.supported(spec.dtype) or len(spec.shape) != ndim:
            raise ValueError(f"{name!r} has the dtype {dtype!r} and {ndim} dimensions, which are not known here")
        if found.setdefault(name, spec) is not spec:
            raise ValueError(f"{schema.TENSORS} has {name!r} twice")
    return found


def read_links(links: np.ndarray, specs: dict[str, TensorSpec]) -> dict[str, str]:
    """Further path of a tensor -> its path.

    Raises:
        ValueError: there is no such tensor, or a path stands for two.
    """
    paths, found = list(specs), {}
    for path, tensor in _rows(schema.LINKS, links, ("path", "tensor")):
        name = path.decode()
        if name in specs or name in found or tensor >= len(paths):
            raise ValueError(f"{schema.LINKS} has {name!r} for tensor {tensor}, which cannot be")
        found[name] = paths[tensor]
    return found


def read_parts(values: Values, regions: Iterable[tuple[int, int]]) -> list[tuple[str, int, int]]:
    """Files beside this one: name, bytes, and the digest of the seal.

    Raises:
        ValueError: a name is none of a file in this folder.
    """
    if values.get(schema.FILES) is None:
        return []
    table = values.read(schema.FILES, regions)
    parts = [(name.decode(), *rest) for name, *rest in _rows(schema.FILES, table, ("name", "nbytes", "digest"))]
    for name, *_ in parts:
        if name in ("", ".", "..") or "/" in name or not name.isprintable():
            raise ValueError(f"it names a part {name!r}, which is no name of a file")
    return parts


def _rows(name: str, table: np.ndarray, fields: tuple[str, ...]) -> Iterator[tuple[Any, ...]]:
    """The rows of a table, of which only some are Python objects at a time."""
    kinds = {"path": "S", "dtype": "S", "name": "S"}
    if (
        table.ndim != 1
        or table.dtype.names != fields
        or any(table.dtype[field].kind != kinds.get(field, "u") for field in fields)
    ):
        raise ValueError(f"{name} is no table of {', '.join(fields)}")
    for first in range(0, len(table), 1 << 12):
        yield from table[first : first + (1 << 12)].tolist()


def read_json(small: dict[str, Any], name: str) -> Any:
    """The value of a dataset of JSON.

    Raises:
        ValueError: it is none; names the dataset.
    """
    found = small.get(name)
    if not isinstance(found, bytes):
        raise ValueError(f"{name} is no text")
    try:
        return schema.from_json(found)
    except ValueError as error:
        raise ValueError(f"{name}: {error}") from None


def read_extra(small: dict[str, Any], name: str) -> dict[str, Any]:
    """Values beside the tensors, with the arrays in them.

    Raises:
        ValueError: they are no values by name, or refer to an array that is not there.
    """
    prefix = f"{schema.EXTRA_ARRAYS}/"
    arrays = {path.removeprefix(prefix): value for path, value in small.items() if path.startswith(prefix)}
    try:
        found = join_arrays(read_json(small, name), arrays)
    except (KeyError, TypeError) as error:
        raise ValueError(f"{name} is not as it is written: {error}") from None
    if not isinstance(found, dict):
        raise ValueError(f"{name} is no object")
    return found


def read_metrics(small: dict[str, Any]) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Curves by name: steps, values.

    Raises:
        ValueError: they are no numbers, or not as many.
    """
    paths = {path.rpartition("/")[0] for path in small if path.startswith(f"{schema.METRICS}/")}
    found = {}
    for path in sorted(paths):
        steps, values = (np.asarray(small[f"{path}/{part}"]) for part in schema.METRIC_PARTS)
        if steps.ndim != 1 or steps.shape != values.shape or steps.dtype.kind not in "iu" or values.dtype.kind != "f":
            raise ValueError(
                f"{path!r} has {steps.shape} steps of {steps.dtype} and {values.shape} values of {values.dtype}"
            )
        found[path.removeprefix(f"{schema.METRICS}/")] = steps, values
    return found
