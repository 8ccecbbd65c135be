"""All of a checkpoint file but the tensors' bytes, made by HDF5 in memory. Pure: no file is touched.

HDF5 lays the file out, and what it would have written is kept. The writer puts it on the disk when the tensors are
there: until then there is no file that HDF5 could mistake for one.

Laying thousands of tensors out takes long, and from one save of a training to the next they are the same. So it is done
in two steps: first a base, with the tensors and room for the attributes, and then in a copy of it the values. The last
bases are kept for the saves that follow.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.image import SparseImage
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.seal import Seal, make_seal, packed_bytes
from hpcfsdp.errors import CheckpointError
from hpcfsdp.flat.layout import Box
from hpcfsdp.reshard.boxes import joined_boxes

_LIBVER = {"v108": h5py.h5f.LIBVER_V18, "v110": h5py.h5f.LIBVER_V110}

_KEPT = 2
"""Bases, of some hundred bytes for each tensor. Two: a model may be saved with its optimizer, and elsewhere without."""


@dataclass(frozen=True)
class Source:
    """Where a part of a tensor is found that stands in another file.

    Attributes:
        file: its name, beside this one. It holds a 1-D dataset under the path that the tensor has here.
        runs: (first element, end) of the tensor, ascending: that dataset has them one after the other.
    """

    file: str
    runs: tuple[tuple[int, int], ...]


@dataclass(frozen=True)
class Skeleton:
    """The bytes of a file around those of its tensors.

    Attributes:
        offsets: by tensor, where its bytes begin; 0 for one without elements, or that stands in other files.
        regions: (first byte, bytes), ascending: all that is no tensor and not the table of extents or files.
        table: where the table of extents begins.
        data_end: where HDF5's part of the file ends.
        files: where the table of other files begins; 0 without such.
    """

    offsets: tuple[int, ...]
    regions: tuple[tuple[int, bytes], ...]
    table: int
    data_end: int
    files: int = 0

    @property
    def nbytes(self) -> int:
        """Of the whole file."""
        return self.data_end + packed_bytes(len(self.regions) + 1 + bool(self.files))

    def sealed(self, rows: np.ndarray, files: np.ndarray | None = None) -> tuple[list[tuple[int, bytes]], Seal]:
        """With the tables that are known last: (first byte, bytes) of all regions, and the seal that ends the file.

        Args:
            rows: the table of extents.
            files: that of other files, where there are some.
        """
        tables = [(self.table, rows.tobytes())]
        if files is not None:
            tables.append((self.files, files.tobytes()))
        regions = sorted([*self.regions, *tables])
        return regions, make_seal(regions, self.data_end)


def build_skeleton(
    specs: Iterable[TensorSpec],
    links: Iterable[tuple[str, str]],
    num_extents: int,
    attributes: Mapping[str, Any],
    small: Mapping[str, np.ndarray | bytes],
    *,
    sources: Mapping[int, Sequence[Source]] | None = None,
    file_names: Sequence[str] = (),
) -> Skeleton:
    """Have HDF5 lay a file out.

    Args:
        links: (alias, path of the tensor).
        num_extents: rows of the table of extents.
        attributes: of the root group: numbers and strings.
        small: further datasets by path: arrays, or ASCII text as bytes. They are put behind the tensors: `offsets` and
            the place of the table are those of a file without them, for values that are known last.
        sources: of the tensors (by their place in `specs`) whose elements stand in other files, all of them. They
            become virtual datasets.
        file_names: rows of the table of other files.
    """
    values = {"format": schema.FORMAT, "format_version": schema.FORMAT_VERSION, **attributes}
    marks = {name: np.asarray(np.bytes_(value) if isinstance(value, str) else value) for name, value in values.items()}
    # Files beside this one have new names with each save: such a base is of no use to the next.
    base_of = _base_of.__wrapped__ if sources else _base_of
    base = base_of(
        tuple(specs),
        tuple(links),
        num_extents,
        tuple((name, mark.dtype, mark.shape) for name, mark in marks.items()),
        tuple((index, tuple(found)) for index, found in (sources or {}).items()),
        len(file_names),
        max((len(name.encode()) for name in file_names), default=0),
    )
    image = base.image.copy()
    with _opened(image, "r+") as file:
        for name, mark in marks.items():
            file.attrs.modify(name, mark)  # in place: an attribute that is made anew moves others
        _create_groups(file, set(base.groups), small)
        for path, value in small.items():
            _write(file, path, np.bytes_(value) if isinstance(value, bytes) else np.asarray(value))
        _mark_metrics(file, small)
    return Skeleton(base.offsets, tuple(_regions(image, base.elsewhere)), base.table, image.nbytes, base.files)


@dataclass(frozen=True)
class _Base:
    """A file without the values that change from save to save. It is shared: nobody may write to it.

    Attributes:
        image: the file, with zeros for the values of attributes.
        offsets, table, files: as ``Skeleton`` has them.
        elsewhere: (first byte, number of bytes) of what is no region, ascending.
        groups: those there are.
    """

    image: SparseImage
    offsets: tuple[int, ...]
    table: int
    files: int
    elsewhere: tuple[tuple[int, int], ...]
    groups: frozenset[str]


@functools.lru_cache(maxsize=_KEPT)
def _base_of(
    specs: tuple[TensorSpec, ...],
    links: tuple[tuple[str, str], ...],
    num_extents: int,
    marks: tuple[tuple[str, np.dtype, tuple[int, ...]], ...],
    sources: tuple[tuple[int, tuple[Source, ...]], ...],
    num_files: int,
    longest_name: int,
) -> _Base:
    """Have HDF5 lay out what is the same as long as these are.

    Args:
        marks: attributes of the root group: name, dtype and shape.
        num_files, longest_name: of other files, and the bytes of a name.
    """
    image, sources_of = SparseImage(), dict(sources)
    with _opened(image, "w") as file:
        for name, dtype, shape in marks:
            file.attrs[name] = np.zeros(shape, dtype)
        file.attrs["committed"] = np.uint8(1)  # for readers that know HDF5 alone: it comes to the disk with the seal
        _create_model_group(file)
        tables = _tables(specs, links)
        groups = {"", schema.MODEL}
        _create_groups(file, groups, [*(spec.path for spec in specs), *(path for path, _ in links), *tables])
        for index, spec in enumerate(specs):
            _create_tensor(file, spec, sources_of.get(index, ()))
        for path, path_in_file in links:
            file[path] = file[path_in_file]
        for name, value in tables.items():
            _write(file, name, value)
        row, file_row = schema.EXTENT_DTYPE, schema.file_table_dtype(longest_name)
        kind, file_kind = h5py.h5t.py_create(row), h5py.h5t.py_create(file_row)
        table = _create(file, schema.EXTENTS, kind, (num_extents,))
        names = _create(file, schema.FILES, file_kind, (num_files,)) if num_files else None
        file.flush()  # before storage is given out, so that all of HDF5's own lies in front of it
        table_offset = _allocate(table, kind, (num_extents,), row)
        files_offset = 0 if names is None else _allocate(names, file_kind, (num_files,), file_row)
        offsets = [0] * len(specs)
        here = [index for index in range(len(specs)) if index not in sources_of]
        for index in sorted(here, key=lambda i: specs[i].nbytes >= schema.ALIGNED_FROM_BYTES):
            dtype, shape = specs[index].dtype, specs[index].shape
            # Opened once more: HDF5 keeps 13 KiB for each dataset that stays open.
            tensor = h5py.h5d.open(file.id, specs[index].path.encode())
            offsets[index] = _allocate(tensor, _type_of(dtype), shape, schema.numpy_dtype(dtype))
    elsewhere = [(offsets[index], specs[index].nbytes) for index in here]
    elsewhere.append((table_offset, num_extents * row.itemsize))
    elsewhere.append((files_offset, num_files * file_row.itemsize))
    elsewhere = sorted(place for place in elsewhere if place[1])
    return _Base(image, tuple(offsets), table_offset, files_offset, tuple(elsewhere), frozenset(groups))


def _opened(image: SparseImage, mode: str) -> h5py.File:
    """With property lists made here: older versions of h5py have the root group tell the time."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(*(_LIBVER[version] for version in schema.LIBVER))
    access.set_alignment(schema.ALIGNED_FROM_BYTES, schema.ALIGNMENT_BYTES)
    if mode == "r+":
        return h5py.File(h5py.h5f.open(b"skeleton", h5py.h5f.ACC_RDWR, access))
    layout = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    layout.set_obj_track_times(False)
    return h5py.File(h5py.h5f.create(b"skeleton", h5py.h5f.ACC_TRUNC, layout, access))


def _create_model_group(file: h5py.File) -> None:
    """The one that has its tensors in their order."""
    order = h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED
    layout = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    layout.set_obj_track_times(False)
    layout.set_link_creation_order(order)
    layout.set_attr_creation_order(order)
    h5py.h5g.create(file.id, schema.MODEL.encode(), None, layout)


def _tables(specs: Sequence[TensorSpec], links: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    paths = [spec.path.encode() for spec in specs]
    tensors = np.zeros(len(specs), schema.tensor_table_dtype(max(map(len, paths), default=0)))
    tensors["path"], tensors["dtype"] = paths, [spec.dtype.encode() for spec in specs]
    tensors["ndim"] = [len(spec.shape) for spec in specs]
    tensors["first_dim"] = np.cumsum(tensors["ndim"]) - tensors["ndim"]
    sizes = np.array([size for spec in specs for size in spec.shape], "<u8")
    places = {spec.path: place for place, spec in enumerate(specs)}
    further = np.zeros(len(links), schema.link_table_dtype(max((len(path.encode()) for path, _ in links), default=0)))
    further["path"] = [path.encode() for path, _ in links]
    further["tensor"] = [places[of] for _, of in links]
    return {schema.TENSORS: tensors, schema.SHAPES: sizes, schema.LINKS: further}


def _mark_metrics(file: h5py.File, paths: Iterable[str]) -> None:
    """Say of the metrics among these datasets what they are, as NeXus has it: viewers draw the curve by themselves."""
    groups = (path.rpartition("/")[0] for path in paths)
    for group in dict.fromkeys(group for group in groups if group.rpartition("/")[0] == schema.METRICS):
        for name, value in schema.METRIC_ATTRIBUTES.items():
            file[group].attrs[name] = np.bytes_(value)


def _create_groups(file: h5py.File, known: set[str], paths: Iterable[str]) -> None:
    """The groups that these paths lie in, but `known` ones. Those that HDF5 makes by itself would tell the time."""
    layout = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    layout.set_obj_track_times(False)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    for path in paths:
        missing = []
        while (path := path.rpartition("/")[0]) not in known:
            missing.append(path)
        known.update(missing)
        for group in reversed(missing):
            h5py.h5g.create(file.id, group.encode(), links, layout)


def _create_tensor(file: h5py.File, spec: TensorSpec, sources: Sequence[Source]) -> None:
    if len(spec.shape) > schema.MOST_DIMENSIONS:
        raise CheckpointError(
            f"{spec.path} has {len(spec.shape)} dimensions; HDF5 has {schema.MOST_DIMENSIONS} at most: reshape it"
        )
    dataset = _create(file, spec.path, _type_of(spec.dtype), spec.shape, sources)
    if schema.needs_mark(spec.dtype):
        mark, kind, scalar = _mark(spec.dtype)
        h5py.h5a.create(dataset, schema.DTYPE_ATTRIBUTE.encode(), kind, scalar).write(mark, kind)


# Of thousands of tensors most are alike: what HDF5 needs to know of them is made once.


@functools.cache
def _type_of(dtype: str) -> h5py.h5t.TypeID:
    """That of a tensor's elements, by torch's name."""
    return schema.hdf5_type(dtype)


@functools.cache
def _mark(dtype: str) -> tuple[np.ndarray, h5py.h5t.TypeID, h5py.h5s.SpaceID]:
    """The value of the attribute that tells torch's dtype, its type, and its space."""
    mark = np.array(dtype.encode())
    return mark, h5py.h5t.py_create(mark.dtype, logical=True), h5py.h5s.create(h5py.h5s.SCALAR)


@functools.cache
def _contiguous() -> h5py.h5p.PropDCID:
    """How a dataset is laid out that is no virtual one."""
    return _layout()


def _layout() -> h5py.h5p.PropDCID:
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    return layout


@functools.cache
def _link() -> h5py.h5p.PropLCID:
    """How the name of a dataset is written."""
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    return link


@functools.cache
def _one() -> h5py.h5s.SpaceID:
    """The space of one element."""
    return h5py.h5s.create_simple((1,))


@functools.lru_cache(maxsize=64)
def _first(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    """The first element of datasets of a shape."""
    space = _space(shape)
    if shape:
        space.select_hyperslab((0,) * len(shape), (1,) * len(shape))
    return space


@functools.lru_cache(maxsize=64)
def _zero(dtype: np.dtype) -> np.ndarray:
    """One element."""
    return np.zeros(1, dtype)


def _write(file: h5py.File, path: str, value: np.ndarray) -> None:
    dataset = _create(file, path, h5py.h5t.py_create(value.dtype, logical=True), value.shape)
    if value.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(value).reshape(value.shape))


def _create(
    file: h5py.File, path: str, kind: h5py.h5t.TypeID, shape: tuple[int, ...], sources: Sequence[Source] = ()
) -> h5py.h5d.DatasetID:
    layout = _layout() if sources else _contiguous()
    for source in sources:
        _map(layout, path, shape, source)
    return h5py.h5d.create(file.id, path.encode(), kind, _space(shape), layout, _link())


def _space(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def _map(layout: h5py.h5p.PropDCID, path: str, shape: tuple[int, ...], source: Source) -> None:
    """Make a dataset a virtual one, of which these runs are found in another file."""
    length = sum(end - begin for begin, end in source.runs)
    here, there, done = h5py.h5s.create_simple(shape), h5py.h5s.create_simple((length,)), 0
    for box in joined_boxes(shape, source.runs):
        # A mapping for each box: HDF5 1.10 writes regular selections alone with numbers of 64 bits.
        select(here, [box])
        select(there, [Box((done,), (box.numel,))])
        layout.set_virtual(here, source.file.encode(), f"/{path}".encode(), there)
        done += box.numel


def select(space: h5py.h5s.SpaceID, boxes: Iterable[Box]) -> None:
    """Select the boxes, and nothing else, of a data space of as many dimensions."""
    space.select_none()
    for begins, sizes in boxes:
        space.select_hyperslab(begins, (1,) * len(begins), None, sizes, op=h5py.h5s.SELECT_OR)


def _allocate(dataset: h5py.h5d.DatasetID, kind: h5py.h5t.TypeID, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Give a dataset its storage, by writing one element: HDF5 has no other call for it. Where it is.

    Args:
        kind, shape: with which it was created.
        dtype: numpy's, with elements of that size. Nothing is converted: numpy has no bfloat16.
    """
    if 0 in shape:
        return 0
    dataset.write(_one(), _first(shape), _zero(dtype), kind)
    return dataset.get_offset()


def _regions(image: SparseImage, elsewhere: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """What the image holds outside of these (first byte, number of bytes), ascending, without zeros at either end."""
    found, end = [], 0
    for begin, nbytes in [*elsewhere, (image.nbytes, 0)]:
        for first, data in image.written(end, begin) if end < begin else ():
            rest = data.lstrip(b"\0")
            if rest:
                found.append((first + len(data) - len(rest), rest.rstrip(b"\0")))
        end = begin + nbytes
    return found
