"""``hpcfsdp diff A B [PATTERN...]``: the differences of two checkpoints. Needs neither MPI nor torch."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.inspect.diff import (
    ABSENT,
    ChangedTensor,
    Difference,
    Tolerance,
    array_difference,
    compare,
    to_compare,
)
from hpcfsdp.checkpoint.inspect.stats import json_number
from hpcfsdp.cli.arguments import Parser, number_in
from hpcfsdp.cli.printing import plain_value, print_json, print_table, readable_number, readable_shape, shortened
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, UsageError
from hpcfsdp.output.progress_bar import byte_progress

EXIT_DIFFERENT = 1
_LARGEST_SHOWN = 5
_TOLERANCE = number_in(0, math.inf, "a number of at least 0")

parser = Parser(
    "diff",
    "Compare B with A: tensors bit by bit, and all other values. The date, the number of ranks and the version of "
    "the writer are not compared. Exit code 0: they are the same; 1: they differ; 2: wrong usage, or a file that "
    "cannot be opened; 4: a file is damaged.",
    "hpcfsdp diff a.h5 b.h5 --summary            # the few lines that say most",
    "hpcfsdp diff a.h5 b.h5 'model/*'            # the model alone",
    "hpcfsdp diff a.h5 b.h5 --rtol 1e-5 --atol 1e-8",
)
add = parser.add_argument
add("a", metavar="A", type=Path)
add("b", metavar="B", type=Path)
parser.add_patterns("compare these alone: ")
add("--summary", action="store_true", help=f"counts, other values, and the {_LARGEST_SHOWN} largest differences")
add("--rtol", type=_TOLERANCE, default=0.0, metavar="R", help="floats are equal if |A-B| <= ATOL + R * |A|")
_ATOL = "absolute tolerance, for the same values as --rtol; default: 0"
add("--atol", type=_TOLERANCE, default=0.0, metavar="ATOL", help=_ATOL)


def main(arguments: Sequence[str]) -> int:
    """Compare and print; the exit code: 0 if nothing differs, else 1."""
    options = parser.parse_intermixed_args(arguments)
    try:
        a, b = open_index(options.a), open_index(options.b)
        with byte_progress("diff", to_compare(a, b, options.patterns)) as advance:
            found = compare(a, b, options.patterns, advance, Tolerance(options.rtol, options.atol))
    except CheckpointCorruptError:
        raise
    except CheckpointError as error:
        raise UsageError(str(error)).of_kind(error.kind) from error  # exit code 2 as of diff(1): 1 means a difference
    if options.json:
        value = _as_json(found)
        if options.summary:
            value |= {name: len(value[name]) for name in ("added", "removed", "reshaped", "retied", "changed")}
            value["largest"] = [_changed_as_json(tensor) for tensor in _largest(found)]
        print_json(value)
    elif not found.same:
        columns = ("what", "name", "difference")
        print_table(columns, _rows(found, options.summary), names=("name",), text=("difference",))
    return 0 if found.same else EXIT_DIFFERENT


def _as_json(found: Difference) -> dict[str, Any]:
    return {
        "same": found.same,
        "compared": found.compared,
        "added": list(found.added),
        "removed": list(found.removed),
        "reshaped": [
            {"name": path, "shapes": [list(a.shape), list(b.shape)], "dtypes": [a.dtype, b.dtype]}
            for path, a, b in found.reshaped
        ],
        "retied": [{"name": path, "tensors": [a, b]} for path, a, b in found.retied],
        "changed": [_changed_as_json(tensor) for tensor in found.changed],
        "values": [_value_as_json(*value) for value in found.values],
    }


def _changed_as_json(tensor: ChangedTensor) -> dict[str, Any]:
    return {"name": tensor.path, **_sizes(tensor), "where": list(tensor.where), "nan": tensor.nan}


def _sizes(inside: Any) -> dict[str, Any]:
    return {"elements": inside.numel, "different": inside.different, "largest": json_number(inside.largest)}


def _value_as_json(name: str, a: Any, b: Any) -> dict[str, Any]:
    entry = {"name": name} | {side: plain_value(value) for side, value in (("a", a), ("b", b)) if value is not ABSENT}
    inside = array_difference(a, b)
    return entry if inside is None else entry | _sizes(inside)


def _largest(found: Difference) -> list[ChangedTensor]:
    sizes = {tensor.path: math.inf if tensor.largest is None else tensor.largest for tensor in found.changed}
    return sorted(found.changed, key=lambda tensor: sizes[tensor.path], reverse=True)[:_LARGEST_SHOWN]


def _rows(found: Difference, summary: bool) -> Iterator[tuple[str, str, str]]:
    changed = len(found.changed)
    yield "summary", "tensors", f"{changed} of {found.compared} have other elements" if changed else "none changed"
    for name, number in (("added", found.added), ("removed", found.removed), ("reshaped", found.reshaped)):
        if number:
            yield "summary", name, f"{len(number)} tensors"
    if found.values:
        yield "summary", "values", f"{len(found.values)} differ"
    for name, one, other in found.values:
        inside = array_difference(one, other)
        yield "value", name, f"{_shown(one)} -> {_shown(other)}" if inside is None else _counted(inside)
    if summary:
        yield from (("largest", tensor.path, _changed_text(tensor)) for tensor in _largest(found))
        return
    yield from (("added", path, "") for path in found.added)
    yield from (("removed", path, "") for path in found.removed)
    for path, a, b in found.reshaped:
        yield "reshaped", path, f"{readable_shape(a.shape)} {a.dtype} -> {readable_shape(b.shape)} {b.dtype}"
    for path, one, other in found.retied:
        yield "retied", path, f"{one} -> {other}"
    for tensor in found.changed:
        yield "changed", tensor.path, _changed_text(tensor)


def _changed_text(tensor: ChangedTensor) -> str:
    nan = f", {tensor.nan} of them NaN" if tensor.nan else ""
    return _counted(tensor, f" at {list(tensor.where)}") + nan


def _counted(inside: Any, where: str = "") -> str:
    biggest = "" if inside.largest is None else f"largest {readable_number(inside.largest)}{where}, "
    return f"{biggest}{inside.different} of {inside.numel} elements"


def _shown(value: Any) -> str:
    if hasattr(value, "dtype") and value.ndim == 1:
        return f"{value.size} values"
    if hasattr(value, "dtype"):
        return f"array {readable_shape(value.shape)} {value.dtype}"
    return repr(value) if value is ABSENT else str(shortened(plain_value(value)))
