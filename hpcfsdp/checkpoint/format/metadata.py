"""All of a checkpoint file except the tensors' bytes, made by HDF5 in memory. Pure: touch no file.

HDF5 lays the file out, and its output is kept. The writer puts it on the disk after the tensors: until then HDF5
could not mistake the file for a complete one.

The layout of thousands of tensors takes long, and is the same from one save to the next. So there are two steps:
a base, with the tensors and room for the attributes, and a copy of it with the values. The last bases are cached.
"""

import functools
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.footer import Footer, make_footer, packed_bytes
from hpcfsdp.checkpoint.format.image import SparseImage
from hpcfsdp.errors import CheckpointError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import joined_boxes

_LIBVER = {"v108": h5py.h5f.LIBVER_V18, "v110": h5py.h5f.LIBVER_V110}

_KEPT = 2
"""Bases, of some hundred bytes for each tensor. Two: a model may be saved with its optimizer, and elsewhere without."""


@dataclass(frozen=True)
class VirtualSource:
    """A part of a tensor that another file stores in a 1-D dataset, under the tensor's path."""

    file: str  # its name, next to this one
    runs: tuple[
        tuple[int, int], ...
    ]  # (first element, end) of the tensor, ascending, one after the other in the dataset


@dataclass(frozen=True)
class MetadataImage:
    """The bytes of a file around those of its tensors."""

    offsets: tuple[int, ...]  # by tensor, its first byte; 0 for one without elements, or in other files
    regions: tuple[tuple[int, bytes], ...]  # (first byte, bytes), ascending: all but tensors, table of extents, `files`
    table: int  # first byte of the table of extents
    data_end: int  # end of HDF5's part of the file
    files: int = 0  # first byte of the table of other files; 0 without it

    @property
    def nbytes(self) -> int:
        """Bytes of the whole file."""
        return self.data_end + packed_bytes(len(self.regions) + 1 + bool(self.files))

    def with_footer(self, rows: np.ndarray, files: np.ndarray | None = None) -> tuple[list[tuple[int, bytes]], Footer]:
        """Return all regions, (first byte, bytes), with the tables of extents and of other files, and the footer."""
        tables = [(self.table, rows)] if files is None else [(self.table, rows), (self.files, files)]
        regions = sorted([*self.regions, *((begin, table.tobytes()) for begin, table in tables)])
        return regions, make_footer(regions, self.data_end)


def build_metadata_image(
    specs: Iterable[schema.TensorSpec],
    links: Iterable[tuple[str, str]],
    num_extents: int,
    attributes: Mapping[str, Any],
    small: Mapping[str, np.ndarray | bytes],
    *,
    sources: Mapping[int, Sequence[VirtualSource]] | None = None,
    file_names: Sequence[str] = (),
) -> MetadataImage:
    """Have HDF5 lay a file out, with `links` (alias, path of the tensor), and `attributes` of the root group.

    `small` are further datasets by path: arrays, or ASCII text as bytes. They follow the tensors, so that the places of
    tensors and tables do not depend on them. `sources` are parts of tensors, by number, that other files store whole,
    for virtual datasets; `file_names` are the rows of the table of these files.
    """
    values = {"format": schema.FORMAT, "format_version": schema.FORMAT_VERSION, "about": schema.ABOUT, **attributes}
    marks = {name: np.asarray(np.bytes_(value) if isinstance(value, str) else value) for name, value in values.items()}
    # Other files have new names with each save, so that the next save could not use such a base.
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
        groups = (path.rpartition("/")[0] for path in small)
        for group in dict.fromkeys(group for group in groups if group.rpartition("/")[0] == schema.METRICS):
            for name, value in schema.METRIC_ATTRIBUTES.items():  # NeXus plots, which viewers draw by themselves
                file[group].attrs[name] = np.bytes_(value)
    return MetadataImage(base.offsets, tuple(_regions(image, base.elsewhere)), base.table, image.nbytes, base.files)


@dataclass(frozen=True)
class _Base:
    """A shared, read-only file with zeros for the values that change from save to save; see ``MetadataImage``."""

    image: SparseImage
    offsets: tuple[int, ...]
    table: int
    files: int
    elsewhere: tuple[tuple[int, int], ...]  # (first byte, number of bytes) outside of the regions, ascending
    groups: frozenset[str]


@functools.lru_cache(maxsize=_KEPT)
def _base_of(
    specs: tuple[schema.TensorSpec, ...],
    links: tuple[tuple[str, str], ...],
    num_extents: int,
    marks: tuple[tuple[str, np.dtype, tuple[int, ...]], ...],
    sources: tuple[tuple[int, tuple[VirtualSource, ...]], ...],
    num_files: int,
    longest_name: int,
) -> _Base:
    """Lay out what depends on these arguments alone; `marks` are the root group's attributes: name, dtype, shape."""
    image, sources_of = SparseImage(), dict(sources)
    with _opened(image, "w") as file:
        for name, dtype, shape in marks:
            file.attrs[name] = np.zeros(shape, dtype)
        file.attrs["committed"] = np.uint8(1)  # for readers that know HDF5 alone: it comes to the disk with the footer
        order = h5py.h5p.CRT_ORDER_TRACKED | h5py.h5p.CRT_ORDER_INDEXED  # the model's group keeps its tensors' order
        layout = _group_layout()
        layout.set_link_creation_order(order)
        layout.set_attr_creation_order(order)
        h5py.h5g.create(file.id, schema.MODEL.encode(), None, layout)
        tables = _tables(specs, links)
        groups = {"", schema.MODEL}
        _create_groups(file, groups, [*(spec.path for spec in specs), *(path for path, _ in links), *tables])
        for index, spec in enumerate(specs):
            _create_tensor(file, spec, sources_of.get(index, ()))
        for path, path_in_file in links:
            file[path] = file[path_in_file]
        for name, value in tables.items():
            _write(file, name, value)
        row, file_row = schema.EXTENT_DTYPE, schema.table_dtype(schema.FILES, longest_name)
        kind, file_kind = h5py.h5t.py_create(row), h5py.h5t.py_create(file_row)
        table = _create(file, schema.EXTENTS, kind, (num_extents,))
        names = _create(file, schema.FILES, file_kind, (num_files,)) if num_files else None
        file.flush()  # before storage is allocated, so that HDF5's metadata precede it
        table_offset = _allocate(table, kind, (num_extents,), row)
        files_offset = 0 if names is None else _allocate(names, file_kind, (num_files,), file_row)
        offsets = [0] * len(specs)
        here = [index for index in range(len(specs)) if index not in sources_of]
        for index in sorted(here, key=lambda i: specs[i].nbytes >= schema.ALIGNED_FROM_BYTES):
            dtype, shape = specs[index].dtype, specs[index].shape
            # Opened once more: HDF5 keeps 13 KiB for each dataset that stays open.
            tensor = h5py.h5d.open(file.id, specs[index].path.encode())
            offsets[index] = _allocate(tensor, schema.hdf5_type(dtype), shape, schema.numpy_dtype(dtype))
    elsewhere = [(offsets[index], specs[index].nbytes) for index in here]
    elsewhere += [(table_offset, num_extents * row.itemsize), (files_offset, num_files * file_row.itemsize)]
    elsewhere = sorted(place for place in elsewhere if place[1])
    return _Base(image, tuple(offsets), table_offset, files_offset, tuple(elsewhere), frozenset(groups))


def _opened(image: SparseImage, mode: str) -> h5py.File:
    """Open the image with property lists made here: older versions of h5py record times in the root group."""
    access = h5py.h5p.create(h5py.h5p.FILE_ACCESS)
    access.set_fileobj_driver(h5py.h5fd.fileobj_driver, image)
    access.set_fclose_degree(h5py.h5f.CLOSE_STRONG)
    access.set_libver_bounds(*(_LIBVER[version] for version in schema.LIBVER))
    access.set_alignment(schema.ALIGNED_FROM_BYTES, schema.ALIGNMENT_BYTES)
    if mode == "r+":
        return h5py.File(h5py.h5f.open(b"image", h5py.h5f.ACC_RDWR, access))
    layout = h5py.h5p.create(h5py.h5p.FILE_CREATE)
    layout.set_obj_track_times(False)
    return h5py.File(h5py.h5f.create(b"image", h5py.h5f.ACC_TRUNC, layout, access))


def _group_layout() -> h5py.h5p.PropGCID:
    layout = h5py.h5p.create(h5py.h5p.GROUP_CREATE)
    layout.set_obj_track_times(False)
    return layout


def _tables(specs: Sequence[schema.TensorSpec], links: Sequence[tuple[str, str]]) -> dict[str, np.ndarray]:
    paths = [spec.path.encode() for spec in specs]
    tensors = np.zeros(len(specs), schema.table_dtype(schema.TENSORS, max(map(len, paths), default=0)))
    tensors["path"], tensors["dtype"] = paths, [spec.dtype.encode() for spec in specs]
    tensors["ndim"] = [len(spec.shape) for spec in specs]
    tensors["first_dim"] = np.cumsum(tensors["ndim"]) - tensors["ndim"]
    sizes = np.array([size for spec in specs for size in spec.shape], "<u8")
    places = {spec.path: place for place, spec in enumerate(specs)}
    paths = [path.encode() for path, _ in links]
    aliases = np.zeros(len(links), schema.table_dtype(schema.LINKS, max(map(len, paths), default=0)))
    aliases["path"] = paths
    aliases["tensor"] = [places[of] for _, of in links]
    return {schema.TENSORS: tensors, schema.SHAPES: sizes, schema.LINKS: aliases}


def _create_groups(file: h5py.File, known: set[str], paths: Iterable[str]) -> None:
    """Make the parent groups of these paths, except `known` ones: those that HDF5 makes itself would record times."""
    layout = _group_layout()
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    for path in paths:
        missing = []
        while (path := path.rpartition("/")[0]) not in known:
            missing.append(path)
        known.update(missing)
        for group in reversed(missing):
            h5py.h5g.create(file.id, group.encode(), links, layout)


def _create_tensor(file: h5py.File, spec: schema.TensorSpec, sources: Sequence[VirtualSource]) -> None:
    if len(spec.shape) > schema.MOST_DIMENSIONS:
        what = f"{spec.path} has {len(spec.shape)} dimensions; HDF5 has {schema.MOST_DIMENSIONS} at most: reshape it"
        raise CheckpointError(what)
    dataset = _create(file, spec.path, schema.hdf5_type(spec.dtype), spec.shape, sources)
    if schema.needs_mark(spec.dtype):
        mark, kind, scalar = _mark(spec.dtype)
        h5py.h5a.create(dataset, schema.DTYPE_ATTRIBUTE.encode(), kind, scalar).write(mark, kind)


# Most of thousands of tensors are alike: HDF5's objects for them are made once.


@functools.cache
def _mark(dtype: str) -> tuple[np.ndarray, h5py.h5t.TypeID, h5py.h5s.SpaceID]:
    """Return the value, type and space of the attribute with torch's dtype."""
    mark = np.array(dtype.encode())
    return mark, h5py.h5t.py_create(mark.dtype, logical=True), h5py.h5s.create(h5py.h5s.SCALAR)


@functools.cache
def _contiguous() -> h5py.h5p.PropDCID:
    """Return the creation properties of a contiguous dataset."""
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_LATE)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    layout.set_obj_track_times(False)
    return layout


@functools.cache
def _link() -> h5py.h5p.PropLCID:
    """Return the creation properties of a dataset's link."""
    link = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    link.set_create_intermediate_group(True)
    link.set_char_encoding(h5py.h5t.CSET_UTF8)
    return link


@functools.lru_cache(maxsize=64)
def _first(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    """Return the first element of datasets of a shape."""
    space = _space(shape)
    if shape:
        space.select_hyperslab((0,) * len(shape), (1,) * len(shape))
    return space


def _write(file: h5py.File, path: str, value: np.ndarray) -> None:
    dataset = _create(file, path, h5py.h5t.py_create(value.dtype, logical=True), value.shape)
    if value.size:
        dataset.write(h5py.h5s.ALL, h5py.h5s.ALL, np.ascontiguousarray(value).reshape(value.shape))


def _create(
    file: h5py.File, path: str, kind: h5py.h5t.TypeID, shape: tuple[int, ...], sources: Sequence[VirtualSource] = ()
) -> h5py.h5d.DatasetID:
    layout = _contiguous().copy() if sources else _contiguous()
    for source in sources:  # maps runs of a virtual dataset to another file
        length = sum(end - begin for begin, end in source.runs)
        here, there, done = h5py.h5s.create_simple(shape), h5py.h5s.create_simple((length,)), 0
        for box in joined_boxes(shape, source.runs):
            # A mapping for each box: HDF5 1.10 writes regular selections alone with numbers of 64 bits.
            select(here, [box])
            select(there, [Box((done,), (box.numel,))])
            layout.set_virtual(here, source.file.encode(), f"/{path}".encode(), there)
            done += box.numel
    return h5py.h5d.create(file.id, path.encode(), kind, _space(shape), layout, _link())


def _space(shape: tuple[int, ...]) -> h5py.h5s.SpaceID:
    return h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)


def select(space: h5py.h5s.SpaceID, boxes: Iterable[Box]) -> None:
    """Select exactly these boxes of a data space."""
    space.select_none()
    for begins, sizes in boxes:
        space.select_hyperslab(begins, (1,) * len(begins), None, sizes, op=h5py.h5s.SELECT_OR)


def _allocate(dataset: h5py.h5d.DatasetID, kind: h5py.h5t.TypeID, shape: tuple[int, ...], dtype: np.dtype) -> int:
    """Allocate a dataset's storage by writing one element, for which HDF5 has no other call; return its first byte."""
    # Nothing is converted, only the sizes of `kind` and `dtype` are equal: numpy has no bfloat16.
    if 0 in shape:
        return 0
    dataset.write(_first((1,)), _first(shape), np.zeros(1, dtype), kind)
    return dataset.get_offset()


def _regions(image: SparseImage, elsewhere: Iterable[tuple[int, int]]) -> list[tuple[int, bytes]]:
    """Return the image outside of these (first byte, number of bytes), ascending, without zeros at both ends."""
    found, end = [], 0
    for begin, nbytes in [*elsewhere, (image.nbytes, 0)]:
        for first, data in image.written(end, begin) if end < begin else ():
            rest = data.lstrip(b"\0")
            if rest:
                found.append((first + len(data) - len(rest), rest.rstrip(b"\0")))
        end = begin + nbytes
    return found
