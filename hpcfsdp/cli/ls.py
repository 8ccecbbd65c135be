"""``hpcfsdp ls PATH... [PATTERN...]``: checkpoints in folders, or tensors in files. Needs neither MPI nor torch."""

from __future__ import annotations

import contextlib
import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.catalog import step_of
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.inspect.names import matching
from hpcfsdp.checkpoint.inspect.stats import json_number
from hpcfsdp.cli.arguments import Parser, paths_and_patterns
from hpcfsdp.cli.failure import as_json
from hpcfsdp.cli.folders import checkpoints_in, size_of
from hpcfsdp.cli.printing import DATE, Brief, print_result, readable_date, readable_number, readable_shape
from hpcfsdp.errors import CheckpointError, UsageError
from hpcfsdp.text.terminal import readable_bytes

parser = Parser(
    "ls",
    "List the checkpoints in folders (also that of a run), whatever their names, or the tensors in a checkpoint. "
    "Several files are listed as checkpoints; with patterns, as tensors.",
    "hpcfsdp ls runs/quickstart                    # the checkpoints of a run",
    "hpcfsdp ls my_model.h5                        # the tensors in a file of any name",
    "hpcfsdp ls my_model.h5 'layers.0.*' '*.bias'  # those whose names match",
    "hpcfsdp ls --long runs/quickstart             # and how far in the data each one is",
    "hpcfsdp ls best.h5 runs/quickstart --json     # several files and folders, for programs",
)
parser.add_argument("path", metavar="PATH", type=Path, help="a checkpoint or a folder; may be repeated")
parser.add_argument("--long", action="store_true", help="of checkpoints also the place in the data: epoch and samples")
parser.add_patterns("in checkpoints: ")


def main(arguments: Sequence[str]) -> int:
    """List, and return the exit code: that of the first damaged file if there is one."""
    options = parser.parse_intermixed_args(arguments)
    paths, patterns = paths_and_patterns(options.path, options.patterns)
    # Not Path.is_dir, which raises where a parent folder may not be searched: opening the file gives a better error.
    folders = [path for path in paths if os.path.isdir(path)]
    if patterns and folders:
        raise UsageError(f"{folders[0]}: is a folder, and patterns match tensors in a file")
    if patterns or (len(paths) == 1 and not folders):
        return _list_tensors(paths, patterns, options.json)
    return _list_checkpoints(paths, options.json, options.long)


def _list_checkpoints(paths: Sequence[Path], json: bool, long: bool) -> int:
    entries: list[dict[str, Any]] = []
    for path in paths:
        is_folder = os.path.isdir(path)
        found = [entry for file in (checkpoints_in(path) if is_folder else [path]) for entry in _entry(file, is_folder)]
        entries += sorted(found, key=_step_and_name)
    columns = ("step", "file", "size", "tensors", "ranks", "loss", DATE, "note")
    rows = list(map(_row, entries))
    right = ("step", "size", "tensors", "ranks", "loss", "epoch", "samples")
    if long:
        columns = (*columns[:-1], "epoch", "samples", columns[-1])
        places = ([entry.get(name, "") for name in ("epoch", "samples")] for entry in entries)
        rows = [(*row[:-1], *place, row[-1]) for row, place in zip(rows, places, strict=True)]
    print_result(json, entries, columns, rows, right=right, names=("file",), text=("note",))
    return next((entry["error"]["exit_code"] for entry in entries if "error" in entry), 0)


def _entry(path: Path, is_listed: bool) -> Iterator[dict[str, Any]]:
    """Yield the facts of a checkpoint, or its error; none of a listed file that has been removed since."""
    entry: dict[str, Any] = {"file": str(path), "bytes": size_of(path)}
    try:
        index = open_index(path)
    except CheckpointError as error:
        if is_listed and size_of(path) is None:  # for instance by a training that keeps a few
            return
        what = as_json(error, [path])
        entry["error"] = what | {"message": what["message"].removeprefix(f"{path}: ")}
    else:
        info = index.info
        entry |= {"step": info.step, "ranks": info.world_size, "date": info.date, "tensors": len(index.tensors)}
        entry |= {} if info.place is None else dict(zip(("epoch", "samples"), info.place, strict=True))
        # The last value of the metric "loss", or of the first with "loss" in its name.
        for name in sorted((name for name in index.metrics if "loss" in name), key=lambda name: name != "loss"):
            steps, values = index.metrics[name]
            if len(steps):
                entry |= {"loss": json_number(values[-1]), "loss_name": name, "loss_step": int(steps[-1])}
                break
    yield entry


def _step_and_name(entry: dict[str, Any]) -> tuple[float, str]:
    """Orders checkpoints by their step, or by that in the name of a damaged one."""
    step = entry.get("step", math.inf)
    if "step" not in entry:
        with contextlib.suppress(ValueError):
            step = step_of(Path(entry["file"]))
    return step, entry["file"]


def _row(entry: dict[str, Any]) -> tuple[Any, ...]:
    size = "" if entry["bytes"] is None else readable_bytes(entry["bytes"])
    if "error" in entry:
        return "?", entry["file"], size, "", "", "", "", entry["error"]["message"]
    loss, step = entry.get("loss"), entry.get("loss_step")
    note = "" if step in (None, entry["step"]) else f"{entry['loss_name']} of step {step}"
    loss = loss if isinstance(loss, str) else readable_number(loss)
    date = readable_date(entry["date"])
    return entry["step"], entry["file"], size, entry["tensors"], entry["ranks"], loss, date, note


def _list_tensors(paths: Sequence[Path], patterns: Sequence[str], json: bool) -> int:
    several = len(paths) > 1
    value, rows = [], []
    for path in paths:
        index = open_index(path)
        for name in matching(index, patterns):
            spec = index.resolve(name)
            entry = {"name": name, "shape": list(spec.shape), "dtype": spec.dtype, "bytes": spec.nbytes}
            is_alias = name != spec.path
            entry = ({"file": str(path)} if several else {}) | entry
            value.append(entry | ({"same_as": spec.path} if is_alias else {}))
            size = Brief(f"= {spec.path}", "tied") if is_alias else readable_bytes(spec.nbytes)
            shown = Brief(name, f"{name} = {spec.path}") if is_alias else name
            row = (shown, readable_shape(spec.shape), spec.dtype, size)
            rows.append((path, *row) if several else row)
    columns = ("name", "shape", "dtype", "size")
    columns = ("file", *columns) if several else columns
    print_result(json, value, columns, rows, right=("size",), names=("file", "name"))
    return 0
