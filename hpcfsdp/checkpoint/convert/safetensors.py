"""Headers of safetensors files, made and checked, and such files as the source of an import.

The library has tensors in memory; here a file is written, and read, piece by piece. A file has the header's
length in 8 bytes; the header, a JSON object padded with spaces; the bytes of all tensors without gaps.
"""

import contextlib
import json
import math
import struct
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.convert.source import ImportSource, Stored
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import MemoryBudget, naming_errors, open_file, read_bytes
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.small_values import check_optimizer
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

SUFFIX = ".safetensors"
INDEX_SUFFIX = ".safetensors.index.json"
WHOLE_NAME = "model.safetensors"
INDEX_NAME = "model.safetensors.index.json"
"""What transformers' ``from_pretrained`` looks for in a folder, the first before the second."""

STEP_KEY = "hpcfsdp.step"
GROUPS_KEY = "hpcfsdp.optim.param_groups"
SCALARS_KEY = "hpcfsdp.optim.scalars"
"""What our own metadata are called in a safetensors file, besides "format" and the tied names."""

MAX_HEADER_BYTES = 100_000_000
"""What the library takes."""

_LENGTH = struct.Struct("<Q")
_METADATA = "__metadata__"

_CODES = (
    {"float64": "F64", "float32": "F32", "float16": "F16", "bfloat16": "BF16", "bool": "BOOL", "complex64": "C64"}
    | {f"{kind}{bits}": f"{code}{bits}" for kind, code in (("int", "I"), ("uint", "U")) for bits in (64, 32, 16, 8)}
    | {"float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0"}
    | {"float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ"}
)
_DTYPES = {code: dtype for dtype, code in _CODES.items()}


@dataclass(frozen=True, slots=True)
class TensorEntry:
    """A tensor in a file, with torch's name of its dtype, and where its bytes begin."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int

    @property
    def nbytes(self) -> int:
        return math.prod(self.shape) * schema.numpy_dtype(self.dtype).itemsize


def pack(tensors: Sequence[tuple[str, TensorSpec]], metadata: Mapping[str, str]) -> tuple[bytes, list[TensorEntry]]:
    """Return the first bytes of a file, and the tensors in the order in which they follow.

    Raise CheckpointError for a dtype or name that the format does not support, or too large a header.
    """
    header: dict[str, Any] = {_METADATA: dict(metadata)}
    entries, end = [], 0
    # Wide elements come first, which aligns every tensor to its element size.
    for name, spec in sorted(tensors, key=lambda item: -item[1].itemsize):
        if spec.dtype not in _CODES:
            raise CheckpointError(
                f"{name!r} has dtype {spec.dtype}, which safetensors does not support: leave it out with --names, or "
                "export to pt or dcp"
            )
        if name in header:
            raise CheckpointError(f"{name!r} cannot be the name of a tensor in a safetensors file")
        begin, end = end, end + spec.nbytes
        entries.append((name, spec, begin))
        header[name] = {"dtype": _CODES[spec.dtype], "shape": list(spec.shape), "data_offsets": [begin, end]}
    text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    if len(text) > MAX_HEADER_BYTES:
        raise CheckpointError(
            f"the header would have {len(text)} bytes, readers take {MAX_HEADER_BYTES}: use --shard-bytes"
        )
    head = _LENGTH.pack(len(text)) + text
    return head, [TensorEntry(name, spec.dtype, spec.shape, len(head) + begin) for name, spec, begin in entries]


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
        entries.append(_entry(*header.popitem(), begin))
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


def split(tensors: Sequence[tuple[str, TensorSpec]], shard_bytes: int) -> list[list[tuple[str, TensorSpec]]]:
    """Return the tensors by file: in order, each file with at most `shard_bytes`, or one tensor."""
    shards: list[list[tuple[str, TensorSpec]]] = []
    filled = 0
    for name, spec in tensors:
        if not shards or filled + spec.nbytes > shard_bytes:
            shards.append([])
            filled = 0
        shards[-1].append((name, spec))
        filled += spec.nbytes
    return shards


def index_of(weight_map: Mapping[str, str], total_bytes: int) -> bytes:
    """Return the index of a split model, as transformers reads it. `weight_map` maps tensor names to file names."""
    index = {"metadata": {"total_size": total_bytes}, "weight_map": weight_map}
    return (json.dumps(index, indent=2, ensure_ascii=False) + "\n").encode()


_OPTIM = f"{schema.OPTIM_STATE}/"


@contextlib.contextmanager
def open_safetensors(path: Path, *, optimizer: bool = True) -> Iterator[ImportSource]:
    """Open a file ``*.safetensors``, a folder of them, or the files of an index; leave the optimizer out, if asked."""
    places: dict[str, tuple[int, TensorEntry]] = {}
    metadata: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for part, expected in _parts(path).items():
            fd = stack.enter_context(open_file(part))
            entries, own = _header(fd, part)
            names = {entry.name for entry in entries}
            if expected is not None and names != expected:
                missing, other = sorted(expected - names), sorted(names - expected)
                lacks, omits = "lacks {!r}, which the index lists", "holds {!r}, which the index omits"
                problem = lacks.format(missing[0]) if missing else omits.format(other[0])
                raise CheckpointCorruptError(f"{part}: {problem}")
            twice = next((entry.name for entry in entries if entry.name in places), None)
            if twice is not None:
                raise CheckpointCorruptError(f"{part}: {twice!r} is in another file too")
            places |= {entry.name: (fd, entry) for entry in entries}
            metadata |= own
        of_optim = (_OPTIM,) if GROUPS_KEY in metadata else ()
        by_path = {name if name.startswith(of_optim) else f"{schema.MODEL}/{name}": places[name] for name in places}

        def read(spec: TensorSpec, start: int, numel: int) -> np.ndarray:
            fd, entry = by_path[spec.path]
            elements = np.empty(numel, schema.numpy_dtype(spec.dtype))
            view = memoryview(elements.view(np.uint8))
            if disk.read(fd, view, entry.begin + start * spec.itemsize) < view.nbytes:
                raise CheckpointCorruptError(f"{path}: became shorter while it was being read")
            return elements

        tensors = {name: Stored(entry.shape, entry.dtype) for name, (_, entry) in by_path.items()}
        source = _with_metadata(path, ImportSource(tensors, read), metadata)
        if not optimizer:
            source.tensors = {name: each for name, each in source.tensors.items() if not name.startswith(_OPTIM)}
            source.groups = source.scalars = None
        yield source


def _parts(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, each with the tensors that an index lists for it."""
    if path.is_dir():
        indices, wholes = (sorted(path.glob(f"*{end}")) for end in (INDEX_SUFFIX, SUFFIX))
        if path / WHOLE_NAME in wholes:
            return {path / WHOLE_NAME: None}
        if len(indices) == 1:
            return _listed(indices[0])
        if len(wholes) == 1 and not indices:
            return {wholes[0]: None}
        found = ", ".join(file.name for file in (indices or wholes)) or "none"
        raise CheckpointError(f"{path}: one safetensors file or one index is needed, there are: {found}")
    if path.name.endswith(".json"):
        return _listed(path)
    return {path: None}


def _listed(path: Path) -> dict[Path, set[str] | None]:
    with open_file(path) as fd:
        nbytes = disk.size(fd)
        if nbytes > MAX_HEADER_BYTES:
            raise CheckpointCorruptError(f"{path}: is not an index of safetensors files: it has {nbytes} bytes")
        text = read_bytes(fd, path, 0, nbytes)
    try:
        weight_map = json.loads(text.decode())["weight_map"]
        parts: dict[Path, set[str]] = {}
        for name, file in weight_map.items():
            if Path(file).name != file:
                raise ValueError(f"{file!r} is not a file next to it")
            parts.setdefault(path.parent / file, set()).add(name)
    except (ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointCorruptError(f"{path}: is not an index of safetensors files: {error}") from None
    for part in parts:
        if not part.is_file():
            raise CheckpointCorruptError(f"{path}: names {part.name!r}, which is missing")
    return dict(parts)


def _header(fd: int, path: Path) -> tuple[list[TensorEntry], dict[str, str]]:
    budget = MemoryBudget.of_file(fd)

    def read(begin: int, nbytes: int) -> bytes:
        budget.claim(3 * nbytes)  # its text, and the decoded objects
        return bytes(read_bytes(fd, path, begin, nbytes))

    try:
        with naming_errors(path):
            return parse(disk.size(fd), read)
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged, or not a safetensors file: {error}") from None


def _with_metadata(path: Path, source: ImportSource, metadata: Mapping[str, str]) -> ImportSource:
    """Add what metadata describe; tied tensors as ``safetensors.torch.save_model`` and ``export_checkpoint`` do."""
    known = source.tensors.keys()
    rest: dict[str, Any] = {}
    try:
        for key, value in metadata.items():
            one, other = f"{schema.MODEL}/{key}", f"{schema.MODEL}/{value}"
            if key == STEP_KEY:
                source.step = int(value)
            elif key == GROUPS_KEY:
                source.groups = schema.from_json(value.encode())
            elif key == SCALARS_KEY:
                source.scalars = schema.from_json(value.encode())
            elif other in known and one not in known:
                source.links.append((one, other))
            elif key != "format":
                rest[key] = value
        key = GROUPS_KEY
        check_optimizer(source.groups, source.scalars, named=True)
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged: metadata {key!r}: {error}") from None
    if rest:
        source.extra["safetensors"] = rest
    return source
