"""``hpcfsdp stats FILE [PATTERN...]``: statistics of each tensor. Needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.checkpoint.inspect.names import tensors_matching
from hpcfsdp.checkpoint.inspect.numbers import json_number
from hpcfsdp.checkpoint.inspect.stats import Statistics, file_statistics
from hpcfsdp.checkpoint.inspect.walk import nbytes_of
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.cli.reporting import (
    PATTERN_HELP,
    Parser,
    print_json,
    print_table,
    readable_number,
    readable_shape,
)
from hpcfsdp.observe.progress_bar import byte_progress

_NUMBERS = ("min", "max", "mean", "norm", "nan", "inf")


def main(arguments: Sequence[str]) -> int:
    """Compute, print and return the exit code."""
    parser = Parser(
        "stats",
        "Minimum, maximum, mean and norm of the finite elements of each tensor (of complex ones, minimum and maximum "
        "of the absolute values), and how many are NaN or infinite. What is read is checked against its checksums.",
    )
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_argument("patterns", metavar="PATTERN", nargs="*", help=PATTERN_HELP)
    options = parser.parse_intermixed_args(arguments)
    index = open_index(options.file)
    paths = tensors_matching(index, options.patterns)
    with BlockReader(index) as reader, byte_progress("stats", nbytes_of(index, paths)) as advance:
        found = list(file_statistics(index, reader, paths, advance))
    if options.json:
        print_json([_as_json(spec, facts) for spec, facts in found])
        return 0
    rows = [
        (spec.path, readable_shape(spec.shape), spec.dtype, *(readable_number(getattr(facts, n)) for n in _NUMBERS))
        for spec, facts in found
    ]
    print_table(("name", "shape", "dtype", *_NUMBERS), rows, right=_NUMBERS)
    return 0


def _as_json(spec: TensorSpec, facts: Statistics) -> dict[str, Any]:
    numbers = {name: json_number(getattr(facts, name)) for name in _NUMBERS}
    return {"name": spec.path, "shape": list(spec.shape), "dtype": spec.dtype, **numbers}
