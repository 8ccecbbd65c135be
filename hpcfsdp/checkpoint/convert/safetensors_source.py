"""Read safetensors: a file, or transformers' folder or index of files. Hold no tensor in memory."""

from __future__ import annotations

import contextlib
import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.convert import safetensors
from hpcfsdp.checkpoint.convert.export import GROUPS_KEY, SCALARS_KEY, STEP_KEY
from hpcfsdp.checkpoint.convert.safetensors import TensorEntry
from hpcfsdp.checkpoint.convert.source import ImportSource
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import MemoryBudget, naming_errors, open_file, read_bytes
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.small_values import check_optimizer
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

_OPTIM = f"{schema.OPTIM_STATE}/"


@contextlib.contextmanager
def open_safetensors(path: Path, *, optimizer: bool = True) -> Iterator[ImportSource]:
    """Open a file ``*.safetensors``, a folder of them, or the files of an index.

    Metadata describe tied tensors as ``safetensors.torch.save_model`` and ``export_checkpoint`` write them. Without
    `optimizer`, its state is left out.
    """
    places: dict[str, tuple[int, TensorEntry]] = {}
    metadata: dict[str, str] = {}
    with contextlib.ExitStack() as stack:
        for part, expected in _parts(path).items():
            fd = stack.enter_context(open_file(part))
            entries, own = _header(fd, part)
            _check_listed(part, {entry.name for entry in entries}, expected)
            twice = next((entry.name for entry in entries if entry.name in places), None)
            if twice is not None:
                raise CheckpointCorruptError(f"{part}: {twice!r} is in another file too")
            places |= {entry.name: (fd, entry) for entry in entries}
            metadata |= own
        by_path = {_path_of(name, metadata): place for name, place in places.items()}

        def read(spec: TensorSpec, start: int, numel: int) -> np.ndarray:
            fd, entry = by_path[spec.path]
            elements = np.empty(numel, schema.numpy_dtype(spec.dtype))
            view = memoryview(elements.view(np.uint8))
            if disk.read(fd, view, entry.begin + start * spec.itemsize) < view.nbytes:
                raise CheckpointCorruptError(f"{path}: became shorter while it was being read")
            return elements

        specs = [TensorSpec(name, entry.shape, entry.dtype) for name, (_, entry) in by_path.items()]
        source = _with_metadata(path, ImportSource(specs, read), metadata)
        if not optimizer:
            source.specs = [spec for spec in source.specs if not spec.path.startswith(_OPTIM)]
            source.groups = source.scalars = None
        yield source


def _parts(path: Path) -> dict[Path, set[str] | None]:
    """Return the files, each with the tensors that an index lists for it."""
    if path.is_dir():
        indices, wholes = (sorted(path.glob(f"*{end}")) for end in (safetensors.INDEX_SUFFIX, safetensors.SUFFIX))
        if path / safetensors.WHOLE_NAME in wholes:
            return {path / safetensors.WHOLE_NAME: None}
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
        if nbytes > safetensors.MAX_HEADER_BYTES:
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
            return safetensors.parse(disk.size(fd), read)
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged, or not a safetensors file: {error}") from None


def _check_listed(part: Path, found: set[str], expected: set[str] | None) -> None:
    if expected is None or found == expected:
        return
    missing, other = sorted(expected - found), sorted(found - expected)
    problem = (
        f"lacks {missing[0]!r}, which the index lists" if missing else f"holds {other[0]!r}, which the index omits"
    )
    raise CheckpointCorruptError(f"{part}: {problem}")


def _path_of(name: str, metadata: Mapping[str, str]) -> str:
    return name if GROUPS_KEY in metadata and name.startswith(_OPTIM) else f"{schema.MODEL}/{name}"


def _with_metadata(path: Path, source: ImportSource, metadata: Mapping[str, str]) -> ImportSource:
    known = {spec.path for spec in source.specs}
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
