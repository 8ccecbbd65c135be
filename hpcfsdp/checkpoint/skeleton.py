"""The HDF5 side of writing: all of a file but the tensors' bytes, and the mark that makes it a checkpoint.

HDF5 is open on one rank alone, before and after the data is written, never during: a writer that dies leaves a file
without the mark, not one with half of its metadata.
"""

from __future__ import annotations

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import h5py
import numpy as np

from hpcfsdp.checkpoint import schema
from hpcfsdp.checkpoint.plan import SavePlan
from hpcfsdp.checkpoint.schema import Digest


class _KeptErrors(io.FileIO):
    """A file whose writes always seem to succeed; the first error is raised when it is closed.

    HDF5 2.0 crashes when it cannot flush its metadata, say on a full disk.
    """

    error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        done = 0
        try:
            while self.error is None and done < len(view):
                done += super().write(view[done:]) or 0
        except OSError as error:
            self.error = error
        return len(view)

    def truncate(self, size: int | None = None) -> int:
        try:
            return super().truncate(size) if self.error is None else 0
        except OSError as error:
            self.error = error
            return 0

    def close(self) -> None:
        super().close()
        error, self.error = self.error, None
        if error is not None:
            raise error


def create(
    path: Path, plan: SavePlan, attributes: Mapping[str, Any], small: Mapping[str, np.ndarray | bytes]
) -> list[int]:
    """Write a new file with room for all tensors, and everything small, but without the mark of a checkpoint.

    Args:
        attributes: of the root group: numbers and strings.
        small: further datasets by path: arrays, or ASCII text as bytes.

    Returns:
        The byte offset in the file of each tensor of the plan, 0 for one without elements.
    """
    layout = {
        "libver": schema.LIBVER,
        "alignment_threshold": schema.ALIGNMENT_BYTES,
        "alignment_interval": schema.ALIGNMENT_BYTES,
        "meta_block_size": min(4 << 20, max(2048, 512 * len(plan.specs))),
    }
    with _KeptErrors(path, "x+") as raw, h5py.File(raw, "w", **layout) as file:
        for name, value in {"format": schema.FORMAT, "format_version": schema.FORMAT_VERSION, **attributes}.items():
            file.attrs[name] = np.bytes_(value) if isinstance(value, str) else value
        file.attrs["committed"] = np.uint8(0)
        file.create_group(schema.MODEL, track_order=True)
        offsets = [_create_tensor(file, spec) for spec in plan.specs]
        for further, path_in_file in plan.links:
            file[further] = file[path_in_file]
        for name, value in _with_names(plan, small).items():
            file.create_dataset(name, data=np.bytes_(value) if isinstance(value, bytes) else value)
        _create(file, schema.EXTENTS, h5py.h5t.py_create(schema.EXTENT_DTYPE), (len(plan.blocks),))
    return offsets


def commit(path: Path, plan: SavePlan, rows: np.ndarray, small: Mapping[str, np.ndarray | bytes]) -> None:
    """Write the table of extents and the mark: from here on the file is a checkpoint."""
    digest = Digest()
    for name, value in sorted(_with_names(plan, small).items()):
        digest.add(name, value)
    digest.add(schema.EXTENTS, rows)
    with _KeptErrors(path, "r+") as raw, h5py.File(raw, "r+", libver=schema.LIBVER) as file:
        file[schema.EXTENTS][...] = rows
        file.attrs["digest"] = digest.value()
        file.attrs["committed"] = np.uint8(1)


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
