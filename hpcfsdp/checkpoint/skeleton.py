"""The HDF5 side of writing: all of a file but the tensors' bytes, and the mark that makes it a checkpoint.

HDF5 is open on one rank alone, before and after the data is written, never during: a writer that dies leaves a file
without the mark, not one with half of its metadata.
"""

from __future__ import annotations

import errno
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint import schema
from hpcfsdp.checkpoint.plan import SavePlan
from hpcfsdp.checkpoint.schema import Digest


def metadata_bytes(plan: SavePlan, small: Mapping[str, np.ndarray | bytes]) -> int:
    """A bound on what a file holds beside the tensors' elements."""
    tables = schema.EXTENT_DTYPE.itemsize * len(plan.blocks) + sum(len(spec.path) for spec in plan.specs)
    values = sum(len(value) if isinstance(value, bytes) else value.nbytes for value in small.values())
    return (256 << 10) + (2 << 10) * len(plan.specs) + tables + values


def create(
    path: Path, plan: SavePlan, attributes: Mapping[str, Any], small: Mapping[str, np.ndarray | bytes]
) -> tuple[list[int], int]:
    """Write a new file with room for all tensors, and everything small, but without the mark of a checkpoint.

    Args:
        attributes: of the root group: numbers and strings.
        small: further datasets by path: arrays, or ASCII text as bytes.

    Returns:
        The byte offset in the file of each tensor of the plan (0 for one without elements), and that of the table.
    """
    _reserve(path, metadata_bytes(plan, small), plan.nbytes)
    with h5py.File(
        path,
        "w",
        libver=schema.LIBVER,
        locking=False,
        alignment_threshold=schema.ALIGNMENT_BYTES,
        alignment_interval=schema.ALIGNMENT_BYTES,
        meta_block_size=min(4 << 20, max(2048, 512 * len(plan.specs))),
    ) as file:
        for name, value in {"format": schema.FORMAT, "format_version": schema.FORMAT_VERSION, **attributes}.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
        file.attrs["digest"], file.attrs["committed"] = np.uint64(0), np.uint8(0)
        file.create_group(schema.MODEL, track_order=True)
        offsets = [_create_tensor(file, spec) for spec in plan.specs]
        for further, path_in_file in plan.links:
            file[further] = file[path_in_file]
        for name, value in _with_names(plan, small).items():
            file.create_dataset(name, data=np.bytes_(value) if isinstance(value, bytes) else value)
        table = _create(file, schema.EXTENTS, h5py.h5t.py_create(schema.EXTENT_DTYPE), (len(plan.blocks),))
        return offsets, table.get_offset() or 0


def commit(path: Path, plan: SavePlan, rows: np.ndarray, small: Mapping[str, np.ndarray | bytes]) -> None:
    """Set the mark, once everything else is in the file: from here on it is a checkpoint."""
    digest = Digest()
    for name, value in sorted(_with_names(plan, small).items()):
        digest.add(name, value)
    digest.add(schema.EXTENTS, rows)
    with h5py.File(path, "r+", libver=schema.LIBVER, locking=False) as file:
        # In place: HDF5 then overwrites bytes that are on disk already, and needs no new room.
        file.attrs.modify("digest", digest.value())
        file.attrs.modify("committed", np.uint8(1))


def _reserve(path: Path, head_bytes: int, data_bytes: int) -> None:
    """Create the file and prove that there is room, by the means of the operating system.

    HDF5 2.0 crashes the process when it cannot flush its metadata; what fails has to fail before HDF5 has the file.
    """
    fd = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o666)
    try:
        try:
            os.posix_fallocate(fd, 0, head_bytes)
        except OSError as error:
            if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):  # a file system that cannot tell
                raise
        os.ftruncate(fd, head_bytes + data_bytes)
    finally:
        os.close(fd)


def _with_names(plan: SavePlan, small: Mapping[str, np.ndarray | bytes]) -> dict[str, np.ndarray | bytes]:
    names = np.array([spec.path.encode() for spec in plan.specs], dtype=np.bytes_)
    return {**small, schema.TENSORS: names}


def _create_tensor(file: h5py.File, spec: schema.TensorSpec) -> int:
    dataset = _create(file, spec.path, schema.hdf5_type(spec.dtype), spec.shape)
    if schema.needs_mark(spec.dtype):
        h5py.Dataset(dataset).attrs[schema.DTYPE_ATTRIBUTE] = np.bytes_(spec.dtype)
    return dataset.get_offset() or 0


def _create(file: h5py.File, path: str, kind: h5py.h5t.TypeID, shape: tuple[int, ...]) -> h5py.h5d.DatasetID:
    layout = h5py.h5p.create(h5py.h5p.DATASET_CREATE)
    layout.set_layout(h5py.h5d.CONTIGUOUS)
    layout.set_alloc_time(h5py.h5d.ALLOC_TIME_EARLY)
    layout.set_fill_time(h5py.h5d.FILL_TIME_NEVER)
    links = h5py.h5p.create(h5py.h5p.LINK_CREATE)
    links.set_create_intermediate_group(True)
    links.set_char_encoding(h5py.h5t.CSET_UTF8)
    space = h5py.h5s.create_simple(shape) if shape else h5py.h5s.create(h5py.h5s.SCALAR)
    return h5py.h5d.create(file.id, path.encode(), kind, space, layout, links)
