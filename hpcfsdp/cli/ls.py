"""``hpcfsdp ls PATH [PATTERN...]``: checkpoints in a folder, or tensors in a file. Needs neither MPI nor torch."""

from __future__ import annotations

import os
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.checkpoint.inspect.names import matching
from hpcfsdp.cli.folders import checkpoints_in, size_of
from hpcfsdp.cli.reporting import Parser, print_result, readable_bytes, readable_shape
from hpcfsdp.errors import CheckpointError, UsageError


def main(arguments: Sequence[str]) -> int:
    """List, and return the exit code: that of the first damaged file if there is one."""
    parser = Parser("ls", "List the checkpoints in a folder (also that of a run), or the tensors in a checkpoint.")
    parser.add_argument("path", metavar="PATH", type=Path)
    parser.add_patterns("in a checkpoint: ")
    options = parser.parse_intermixed_args(arguments)
    # Not Path.is_dir, which raises where a parent folder may not be searched: opening the file gives a better error.
    if not os.path.isdir(options.path):
        return _list_file(options.path, options.patterns, options.json)
    if options.patterns:
        raise UsageError(f"{options.path}: is a folder, and patterns match tensors in a file")
    return _list_folder(options.path, options.json)


def _list_folder(folder: Path, as_json: bool) -> int:
    entries: list[dict[str, Any]] = []
    exit_code = 0
    for path in checkpoints_in(folder):
        nbytes = size_of(path)
        if nbytes is None:  # removed since, for instance by a training that keeps a few
            continue
        entry: dict[str, Any] = {"file": str(path), "bytes": nbytes}
        try:
            index = open_index(path)
        except CheckpointError as error:
            if size_of(path) is None:
                continue
            exit_code = exit_code or error.exit_code
            entry["error"] = str(error).removeprefix(f"{path}: ")
        else:
            info = index.info
            entry |= {"step": info.step, "ranks": info.world_size, "date": info.date, "tensors": len(index.tensors)}
        entries.append(entry)
    columns = ("step", "file", "size", "tensors", "ranks", "date")
    rows = [
        ("?", e["file"], readable_bytes(e["bytes"]), "", "", e["error"])
        if "error" in e
        else (e["step"], e["file"], readable_bytes(e["bytes"]), e["tensors"], e["ranks"], e["date"])
        for e in entries
    ]
    print_result(as_json, entries, columns, rows, right=("step", "size", "tensors", "ranks"))
    return exit_code


def _list_file(path: Path, patterns: Sequence[str], as_json: bool) -> int:
    index = open_index(path)
    specs = [(name, index.resolve(name)) for name in matching(index, patterns)]
    value = [
        {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
        | ({"same_as": spec.path} if name != spec.path else {})
        for name, spec in specs
    ]
    sizes = [readable_bytes(spec.nbytes) if name == spec.path else f"= {spec.path}" for name, spec in specs]
    rows = [
        (name, readable_shape(spec.shape), spec.dtype, size) for (name, spec), size in zip(specs, sizes, strict=True)
    ]
    print_result(as_json, value, ("name", "shape", "dtype", "size"), rows, right=("size",))
    return 0
