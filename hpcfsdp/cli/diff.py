"""``hpcfsdp diff A B [PATTERN...]``: the differences of two checkpoints. Needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.checkpoint.inspect.diff import ABSENT, Difference, compare, to_compare
from hpcfsdp.checkpoint.inspect.numbers import json_number
from hpcfsdp.cli.reporting import Parser, plain_value, print_json, print_table, readable_number, readable_shape
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, UsageError
from hpcfsdp.observe.progress_bar import byte_progress

EXIT_DIFFERENT = 1


def main(arguments: Sequence[str]) -> int:
    """Compare and print; the exit code: 0 if nothing differs, else 1.

    Raises:
        UsageError: a file cannot be read. As for diff(1) the exit code is 2: 1 means that the files differ.
    """
    parser = Parser(
        "diff",
        "Compare B with A: tensors bit by bit, and all other values. The date, the number of ranks and the version of "
        "the writer are not compared. Exit code 0: they are the same; 1: they differ; 2: wrong usage, or a file that "
        "cannot be opened; 4: a file is damaged.",
    )
    parser.add_argument("a", metavar="A", type=Path)
    parser.add_argument("b", metavar="B", type=Path)
    parser.add_patterns("compare these alone: ")
    options = parser.parse_intermixed_args(arguments)
    try:
        a, b = open_index(options.a), open_index(options.b)
        with byte_progress("diff", to_compare(a, b, options.patterns)) as advance:
            found = compare(a, b, options.patterns, advance)
    except CheckpointCorruptError:
        raise
    except CheckpointError as error:
        raise UsageError(str(error)) from error
    if options.json:
        print_json(_as_json(found))
    elif not found.same:
        print_table(("what", "name", "difference"), _rows(found))
    return 0 if found.same else EXIT_DIFFERENT


def _as_json(found: Difference) -> dict[str, Any]:
    return {
        "same": found.same,
        "added": list(found.added),
        "removed": list(found.removed),
        "reshaped": [
            {"name": path, "shapes": [list(a.shape), list(b.shape)], "dtypes": [a.dtype, b.dtype]}
            for path, a, b in found.reshaped
        ],
        "retied": [{"name": path, "tensors": [a, b]} for path, a, b in found.retied],
        "changed": [
            {
                "name": tensor.path,
                "elements": tensor.numel,
                "different": tensor.different,
                "largest": json_number(tensor.largest),
                "where": list(tensor.where),
                "nan": tensor.nan,
            }
            for tensor in found.changed
        ],
        "values": [
            {"name": name} | {side: plain_value(value) for side, value in (("a", a), ("b", b)) if value is not ABSENT}
            for name, a, b in found.values
        ],
    }


def _rows(found: Difference) -> Iterator[tuple[str, str, str]]:
    yield from (("added", path, "") for path in found.added)
    yield from (("removed", path, "") for path in found.removed)
    for path, a, b in found.reshaped:
        yield "reshaped", path, f"{readable_shape(a.shape)} {a.dtype} -> {readable_shape(b.shape)} {b.dtype}"
    for path, one, other in found.retied:
        yield "retied", path, f"{one} -> {other}"
    for tensor in found.changed:
        largest = (
            f"largest {readable_number(tensor.largest)} at {list(tensor.where)}, " if tensor.largest is not None else ""
        )
        nan = f", {tensor.nan} of them NaN" if tensor.nan else ""
        yield "changed", tensor.path, f"{largest}{tensor.different} of {tensor.numel} elements{nan}"
    for name, one, other in found.values:
        yield "value", name, f"{_shown(one)} -> {_shown(other)}"


def _shown(value: Any) -> str:
    return repr(value) if value is ABSENT else str(plain_value(value))
