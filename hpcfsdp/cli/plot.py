"""``hpcfsdp plot FILE --kind KIND [PATTERN...]``: pictures of a checkpoint. Needs neither MPI nor torch."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.inspect import plots
from hpcfsdp.checkpoint.inspect.names import tensors_matching
from hpcfsdp.checkpoint.inspect.walk import nbytes_of
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.cli.reporting import Parser, print_json, print_line
from hpcfsdp.errors import UsageError
from hpcfsdp.observe.progress_bar import byte_progress

_KIND_HELP = (
    "histogram: of all elements of the model together, or of each tensor that a pattern matches; norms: of each layer "
    "of the model, or of tensors that patterns match; loss: curves of metrics with loss in their names, or of those "
    "that patterns match"
)


def main(arguments: Sequence[str]) -> int:
    """Draw, print the path of the picture or its numbers, and return the exit code."""
    parser = Parser("plot", "Draw the tensors or curves of a checkpoint. Tensors are checked against their checksums.")
    parser.add_argument("file", metavar="FILE", type=Path)
    parser.add_patterns()
    parser.add_argument("--kind", choices=tuple(_KINDS), required=True, help=_KIND_HELP)
    parser.add_argument(
        "--out",
        metavar="PNG",
        type=Path,
        help="the picture (also .pdf or .svg); an existing file is replaced; default: <name of the file>-<kind>.png in "
        "the working directory, but none with --json, which prints the numbers",
    )
    options = parser.parse_intermixed_args(arguments)
    index = open_index(options.file)
    numbers, draw = _KINDS[options.kind]
    found = numbers(index, options)
    picture = options.out or (None if options.json else Path(f"{options.file.stem}-{options.kind}.png"))
    if picture is not None:
        plots.write_figure(draw(options.file.name, found), picture)
    if options.json:
        print_json(list(plots.as_numbers(found)))
    else:
        print_line(picture)
    return 0


def _histograms(index: CheckpointIndex, options: argparse.Namespace) -> list[plots.Histogram]:
    paths = _paths(index, options)
    if options.patterns:
        groups = {path: [path] for path in paths}
        if len(groups) > plots.MOST_PANELS and not (options.json and options.out is None):
            raise UsageError(
                f"{index.info.path}: {len(groups)} tensors match, and a picture has room for {plots.MOST_PANELS} "
                "histograms: give narrower patterns, or --json"
            )
    else:
        groups = {f"{len(paths)} tensors of the model": paths}
    with BlockReader(index) as reader, byte_progress("histogram", 2 * nbytes_of(index, paths)) as advance:
        return [plots.histogram(index, reader, name, group, advance=advance) for name, group in groups.items()]


def _norms(index: CheckpointIndex, options: argparse.Namespace) -> dict[str, float]:
    paths = _paths(index, options)
    with BlockReader(index) as reader, byte_progress("norms", nbytes_of(index, paths)) as advance:
        return plots.layer_norms(index, reader, paths, advance)


def _paths(index: CheckpointIndex, options: argparse.Namespace) -> list[str]:
    paths = tensors_matching(index, options.patterns)
    return paths if options.patterns else [path for path in paths if path.startswith(f"{schema.MODEL}/")]


_KINDS: dict[str, tuple[Callable[[CheckpointIndex, argparse.Namespace], Any], Callable[[str, Any], Any]]] = {
    "histogram": (_histograms, plots.draw_histograms),
    "norms": (_norms, plots.draw_norms),
    "loss": (lambda index, options: plots.curves(index, options.patterns), plots.draw_curves),
}
