"""``hpcfsdp stats FILE [PATTERN...]``: statistics of each tensor. Needs neither MPI nor torch."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.names import tensors_matching
from hpcfsdp.checkpoint.inspect.stats import file_statistics, json_number, nbytes_of
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_result, readable_number, readable_shape
from hpcfsdp.output.progress_bar import byte_progress

_NUMBERS = ("min", "max", "mean", "norm", "nan", "inf")

parser = Parser(
    "stats",
    "Minimum, maximum, mean and norm of the finite elements of each tensor (of complex ones, minimum and maximum "
    "of the absolute values), and how many are NaN or infinite. Tensors are checked against their checksums.",
    "hpcfsdp stats my_model.h5                        # every tensor",
    "hpcfsdp stats my_model.h5 'layers.0.*' '*.bias'  # those whose names match",
    "hpcfsdp stats my_model.h5 --json                 # for programs",
)
parser.add_argument("file", metavar="FILE", type=Path)
parser.add_patterns()


def main(arguments: Sequence[str]) -> int:
    """Compute, print and return the exit code."""
    options = parser.parse_intermixed_args(arguments)
    index = open_index(options.file)
    paths = tensors_matching(index, options.patterns)
    with BlockReader(index) as reader, byte_progress("stats", nbytes_of(index, paths)) as advance:
        found = list(file_statistics(index, reader, paths, advance))
    value = [
        {"name": spec.path, "shape": list(spec.shape), "dtype": spec.dtype}
        | {name: json_number(getattr(facts, name)) for name in _NUMBERS}
        for spec, facts in found
    ]
    rows = [
        (spec.path, readable_shape(spec.shape), spec.dtype, *(readable_number(getattr(facts, n)) for n in _NUMBERS))
        for spec, facts in found
    ]
    print_result(options.json, value, ("name", "shape", "dtype", *_NUMBERS), rows, right=_NUMBERS, names=("name",))
    return 0
