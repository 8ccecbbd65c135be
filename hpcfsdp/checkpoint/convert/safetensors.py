"""Make and check headers of safetensors files. Pure; needs neither torch nor the library.

The library writes tensors from memory; here a file is written, and read, piece by piece. A file has the header's
length in 8 bytes; the header, a JSON object padded with spaces; the bytes of all tensors without gaps.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.errors import CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
"""What transformers' ``from_pretrained`` looks for in a folder, the first before the second."""

MAX_HEADER_BYTES = 100_000_000
"""What the library takes."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

_CODES = {
    "float64": "F64",
    "float32": "F32",
    "float16": "F16",
    "bfloat16": "BF16",
    "int64": "I64",
    "int32": "I32",
    "int16": "I16",
    "int8": "I8",
    "uint64": "U64",
    "uint32": "U32",
    "uint16": "U16",
    "uint8": "U8",
    "bool": "BOOL",
    "float8_e4m3fn": "F8_E4M3",
    "float8_e5m2": "F8_E5M2",
    "float8_e4m3fnuz": "F8_E4M3FNUZ",
    "float8_e5m2fnuz": "F8_E5M2FNUZ",
    "float8_e8m0fnu": "F8_E8M0",
    "complex64": "C64",
}
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file: its name, torch's name of its dtype, its shape, and where its bytes begin in the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * schema.numpy_dtype(self.dtype).itemsize


def pack(
    tensors: Sequence[tuple[str, schema.TensorSpec]], metadata: Mapping[str, str]
) -> tuple[bytes, list[TensorEntry]]:
    """Return the first bytes of a file, and the tensors in the order in which they follow.

    Wide elements come first, which aligns every tensor to its element size. Raise CheckpointError for a dtype or name
    that the format does not support, or too large a header.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    order = sorted(tensors, key=lambda item: -item[1].itemsize)
    end = 0
    for name, spec in order:
        if spec.dtype not in _CODES:
            raise CheckpointError(
                f"{name!r} has dtype {spec.dtype}, which safetensors does not support: leave it out with --names, or "
                "export to pt or dcp"
            )
        if name in header:
            raise CheckpointError(f"{name!r} cannot be the name of a tensor in a safetensors file")
        offsets = [end, end + spec.nbytes]
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": offsets}
        end += spec.nbytes
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header would have {len(text)} bytes, readers take {MAX_HEADER_BYTES}: use --shard-bytes"
        )
    begin = _LENGTH.size + len(text)
    entries = [
        TensorEntry(name, spec.dtype, spec.shape, begin + header[name]["data_offsets"][0]) for name, spec in order
    ]
    return _LENGTH.pack(len(text)) + text, entries


def parse(nbytes: int, read: Callable[[int, int], bytes]) -> tuple[list[TensorEntry], dict[str, str]]:
    """Return the tensors of a file in the order of their bytes, and its metadata. `read` takes an offset and a length.

    Raise ValueError for damage, CheckpointError for a dtype that checkpoints do not support.
    """
    if nbytes < _LENGTH.size:
        raise ValueError("it is too short to be a safetensors file")
    (length,) = _LENGTH.unpack(read(0, _LENGTH.size))
    if length > min(nbytes - _LENGTH.size, MAX_HEADER_BYTES):
        raise ValueError(f"its header would have {length} bytes")
    try:
        header = json.loads(read(_LENGTH.size, length).decode(), object_pairs_hook=_without_doubles)
    except RecursionError:
        raise ValueError("its header is nested too deeply") from None
    if not isinstance(header, dict):
        raise ValueError("its header is no JSON object")
    metadata = header.pop(_METADATA, {})
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        raise ValueError("its metadata are not strings by name")
    begin = _LENGTH.size + length
    entries = []
    while header:  # which takes more memory than the entries: some models have 100,000 tensors
        name, value = header.popitem()
        entries.append(_entry(name, value, begin))
    entries.reverse()
    entries.sort(key=lambda entry: (entry.begin, entry.nbytes))
    end = begin
    for entry in entries:
        if entry.begin != end:
            raise ValueError(f"there is a gap or an overlap before {entry.name!r}")
        end += entry.nbytes
    if end != nbytes:
        raise ValueError(f"its tensors end at byte {end}, the file at {nbytes}")
    return entries, metadata


def _without_doubles(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise ValueError("its header has one name twice")
    return found


def _entry(name: str, value: Any, begin: int) -> TensorEntry:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise ValueError(f"{name!r} is not described as a tensor")
    code, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not (isinstance(code, str) and _are_sizes(shape) and _are_sizes(offsets) and len(offsets) == 2):
        raise ValueError(f"{name!r} has the shape {shape!r} and the dtype {code!r} at {offsets!r}")
    if code not in _DTYPES:
        raise CheckpointError(f"{name!r} has dtype {code}, which checkpoints do not support")
    entry = TensorEntry(name, _DTYPES[code], tuple(shape), begin + offsets[0])
    if offsets[1] - offsets[0] != entry.nbytes:
        raise ValueError(f"{name!r} of shape {shape} and dtype {code} has {offsets[1] - offsets[0]} bytes")
    return entry


def _are_sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(size) is int and 0 <= size < 1 << 63 for size in value)


def split(tensors: Sequence[tuple[str, schema.TensorSpec]], shard_bytes: int) -> list[list[int]]:
    """Return numbers of the tensors by file: in order, each file with at most `shard_bytes`, or one tensor."""
    shards: list[list[int]] = []
    filled = 0
    for place, (_, spec) in enumerate(tensors):
        if not shards or filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append(place)
        filled += spec.nbytes
    return shards


def index_of(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """Return the index of a split model, as transformers reads it. `weight_map` maps tensor names to file names."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": dict(weight_map)}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()
