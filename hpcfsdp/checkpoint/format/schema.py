"""The places of everything in a checkpoint file, and the types of tensors. Needs numpy and h5py alone.

The layout is specified in docs/reference/checkpoint-format.md.
"""

import contextlib
import functools
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

import h5py
import numpy as np
import xxhash

from hpcfsdp.errors import CheckpointError

FORMAT = "hpcfsdp"
PART_FORMAT = "hpcfsdp-part"
FORMAT_VERSION = "1.1"
ABOUT = (
    "A checkpoint of a PyTorch model, written by hpcfsdp. Every tensor is a dataset under its own name and with its "
    "whole shape: the model's in /model, the optimizer's state in /optim/state. Read one in Python: "
    "h5py.File(FILE)['model/NAME'][()]. With the package hpcfsdp: hpcfsdp show FILE. "
    "The format is described in docs/reference/checkpoint-format.md of hpcfsdp."
)
"""An attribute for the stranger who has only the file. Its name comes first in the alphabet, where h5dump begins."""
ABOUT_PART = (
    "A part of a checkpoint of hpcfsdp: the elements of tensors that one node wrote. Open the file that the attribute "
    "checkpoint names, next to this one: it shows every tensor whole."
)

MODEL = "model"
OPTIM_STATE = "optim/state"
PARAM_GROUPS = "optim/param_groups"
GROUP_TYPES = "optim/param_group_types"
OPTIM_SCALARS = "optim/scalars"
EXTRA_VALUES = "extra/values"
EXTRA_ARRAYS = "extra/arrays"
EXTRA_TYPES = "extra/types"
MODULE_STATES = "extra/modules"
DATA = "extra/data"
RNG = "extra/rng"
CONFIG = "meta/config"
STATE_DICT = "meta/state_dict"
METRICS = "metrics"
METRIC_PARTS = ("step", "value")
METRIC_ATTRIBUTES = {"NX_class": "NXdata", "axes": METRIC_PARTS[0], "signal": METRIC_PARTS[1]}
FILES = "meta/files"
TENSORS = "meta/tensors"
SHAPES = "meta/shapes"
LINKS = "meta/links"
EXTENTS = "meta/extents"

# Every byte of the file outside of tensors: HDF5 puts checksums on the metadata of this format range, and strings of
# fixed length live inside of it. With newer or older ranges, or variable-length strings, single flipped bits go unseen.
LIBVER = ("v108", "v110")

ALIGNED_FROM_BYTES = 1 << 16
"""Datasets of at least this size are aligned. Smaller ones are adjacent, so that one call reads or writes many."""

ALIGNMENT_BYTES = 1 << 12
"""What aligned datasets start at a multiple of: a page. With more there are holes between them, and a file with a hole
of some hundred KiB every few MiB has taken up to twice as long to read from a disk (ext4, Linux 6.18)."""

BLOCK_BYTES = 4 << 20
"""Most bytes under one checksum. A reader that needs a part of an extent reads it whole, to verify it."""

EXTENT_DTYPE = np.dtype(
    [(name, "<u4") for name in ("tensor", "rank", "file", "count")]
    + [(name, "<u8") for name in ("start", "numel", "stride", "byte_offset", "checksum")]
)
"""A row of meta/extents: a hyperslab of a tensor, seen 1-D, under one checksum, the xxh3-64 of its bytes.

The tensor is an index in meta/tensors, the file 0 for this one or else one more than an index in meta/files. From
element `start` on there are `count` runs of `numel` elements; each begins `stride` elements after the one
before it. The first is at `byte_offset` of the file.
"""


def row_spans(rows: np.ndarray) -> np.ndarray:
    """Return the elements from the first to the last of each row, int64."""
    counts, strides, numels = (rows[name].astype(np.int64) for name in ("count", "stride", "numel"))
    return (counts - 1) * strides + numels


TABLES = {
    TENSORS: ("path", "dtype", "first_dim", "ndim"),  # torch's name of the dtype, range of sizes in meta/shapes
    LINKS: ("path", "tensor"),  # an alias of a tensor, and its index in meta/tensors
    FILES: ("name", "nbytes", "digest"),  # a file next to this one, and the digest of its footer
}


def table_dtype(table: str, longest: int) -> np.dtype:
    """Return the dtype of a table's rows; `longest` are the bytes of the longest path or name."""
    text = {"path": f"S{max(1, longest)}", "name": f"S{max(1, longest)}", "dtype": "S16"}
    return np.dtype([(field, text.get(field, "<u8")) for field in TABLES[table]])


WITHOUT_NUMPY = {"bfloat16", *(f"float8_{kind}" for kind in ("e4m3fn", "e5m2", "e4m3fnuz", "e5m2fnuz", "e8m0fnu"))}
"""torch's names of dtypes that numpy does not have."""

_KINDS = ("f8", "f4", "f2", "i8", "i4", "i2", "i1", "u8", "u4", "u2", "u1", "c8", "c16")
_NUMPY_DTYPES = {np.dtype(kind).name: np.dtype(f"<{kind}") for kind in _KINDS}
_NUMPY_DTYPES |= dict.fromkeys(("bool", *WITHOUT_NUMPY), np.dtype("u1")) | {"bfloat16": np.dtype("<u2")}
"""torch's name of a dtype -> the numpy dtype that has its bytes."""

DTYPE_ATTRIBUTE = "torch_dtype"  # on datasets whose HDF5 type does not determine torch's dtype


@dataclass(frozen=True)
class TensorSpec:
    """A tensor in the file: path from the root, shape, torch's name of its dtype."""

    path: str
    shape: tuple[int, ...]
    dtype: str

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)

    @property
    def itemsize(self) -> int:
        return _NUMPY_DTYPES[self.dtype].itemsize

    @property
    def nbytes(self) -> int:
        return self.numel * self.itemsize


Elements = Callable[[TensorSpec, int, int], np.ndarray]
"""Of a tensor, a first element and a number of elements: those elements, 1-D, of any dtype with these bytes."""


@dataclass(frozen=True)
class CheckpointInfo:
    """Description of a checkpoint, and the values that were saved next to model and optimizer."""

    path: Path
    step: int
    world_size: int
    date: str
    """When it was written, ISO 8601, UTC."""
    software_version: str
    format_version: str
    extra: dict[str, Any] = field(default_factory=dict)
    """What was given to ``save`` as `extra`; arrays and tensors come back as numpy arrays."""
    config: dict[str, Any] | None = None
    """The configuration of the run that wrote it."""
    data: dict[str, Any] | None = None
    """The place in the data: the state of what was given to ``save`` as `data`."""
    missing: tuple[str, ...] = ()
    """Tensors of the model that ``load(strict=False)`` has not found in the file, and left as they were."""
    unexpected: tuple[str, ...] = ()
    """Tensors in the file that ``load(strict=False)`` has not found in the model."""
    source: Literal["file", "memory"] = "file"
    """Where it was: in memory, `path` is where the file of this step is, or would be."""

    @property
    def place(self) -> tuple[int, int] | None:
        """The epoch, and the samples of it that had been read; None where the file does not say."""
        epoch, samples = ((self.data or {}).get(name) for name in ("epoch", "samples"))
        return (epoch, samples) if type(epoch) is int and type(samples) is int else None


def supported(dtype: str) -> bool:
    """Return whether tensors of this dtype (torch's name) can be written."""
    return dtype in _NUMPY_DTYPES


def numpy_dtype(dtype: str) -> np.dtype:
    """Return the numpy dtype that holds the bytes of torch's `dtype`; bfloat16 as 16-bit words."""
    return _NUMPY_DTYPES[dtype]


@functools.cache
def hdf5_type(dtype: str) -> h5py.h5t.TypeID:
    """Return the HDF5 type that a tensor of torch's `dtype` is written as."""
    if dtype != "bfloat16":
        return h5py.h5t.py_create(numpy_dtype(dtype), logical=True)
    kind = h5py.h5t.IEEE_F32LE.copy()  # bfloat16 is its upper half: thus every HDF5 tool shows right values
    kind.set_fields(15, 7, 8, 0, 7)
    kind.set_size(2)
    kind.set_ebias(127)
    return kind


_MOST_ATTRIBUTE_BYTES = 1 << 12


def attribute(holder: h5py.Group | h5py.Dataset, name: str) -> Any:
    """Return an attribute that is one number or a short text; None for anything else."""
    if not h5py.h5a.exists(holder.id, name.encode()):
        return None
    found = h5py.h5a.open(holder.id, name.encode())
    kind = found.get_type()
    plain = kind.get_class() in (h5py.h5t.INTEGER, h5py.h5t.FLOAT, h5py.h5t.STRING)
    if not plain or (isinstance(kind, h5py.h5t.TypeStringID) and kind.is_variable_str()):
        return None
    is_one = found.get_space().get_simple_extent_type() == h5py.h5s.SCALAR
    return holder.attrs[name] if is_one and kind.get_size() <= _MOST_ATTRIBUTE_BYTES else None


def needs_mark(dtype: str) -> bool:
    """Return whether the HDF5 type alone does not identify torch's dtype."""
    return dtype == "bool" or dtype in WITHOUT_NUMPY


MOST_DIMENSIONS = 32  # that a tensor may have: those of HDF5
MOST_LEVELS = 200  # of lists and objects in each other, in JSON. Readers go into them level by level.
TOO_DEEP = f"lists and dicts are in each other over more than {MOST_LEVELS} levels: flatten them"


def to_json(value: Any) -> bytes:
    """Return JSON as ASCII bytes; raise TypeError for other values, CheckpointError for over ``MOST_LEVELS`` levels."""
    with contextlib.suppress(RecursionError):
        text = json.dumps(value, separators=(",", ":")).encode("ascii")
        if not _is_deep(value):
            return text
    raise CheckpointError(TOO_DEEP)


def from_json(text: bytes) -> Any:
    """Undo ``to_json``; raise ValueError for other bytes, or more than ``MOST_LEVELS`` levels."""
    with contextlib.suppress(RecursionError):
        value = json.loads(bytes(text).decode("ascii"))
        if not _is_deep(value):
            return value
    raise ValueError(f"lists and objects are in each other over more than {MOST_LEVELS} levels")


def _is_deep(value: Any) -> bool:
    level = [value]
    for _ in range(MOST_LEVELS + 1):
        level = [item for item in level if isinstance(item, (dict, list, tuple))]
        if not level:
            return False
        level = [item for box in level for item in (box.values() if isinstance(box, dict) else box)]
    return True


checksum: Callable[[Any], int] = xxhash.xxh3_64_intdigest
"""Of a buffer, as in meta/extents."""
