"""``hpcfsdp plot PATH... --kind KIND [PATTERN...]``: pictures of checkpoints. Needs neither MPI nor torch."""

from __future__ import annotations

import argparse
import contextlib
import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect import plots
from hpcfsdp.checkpoint.inspect.names import tensors_matching
from hpcfsdp.checkpoint.inspect.stats import nbytes_of
from hpcfsdp.cli.arguments import Parser, number_in, paths_and_patterns
from hpcfsdp.cli.folders import checkpoints_in
from hpcfsdp.cli.printing import print_json, print_line
from hpcfsdp.errors import CheckpointError, UsageError
from hpcfsdp.output.figure_file import write_figure
from hpcfsdp.output.progress_bar import byte_progress

_KIND_HELP = (
    "histogram: of all elements of the model together, or of each tensor that a pattern matches; norms: of each layer "
    "of the model, or of tensors that patterns match; loss: curves of metrics with loss in their names, or of those "
    "that patterns match"
)

parser = Parser(
    "plot",
    "Draw the tensors or curves of checkpoints, several on top of each other. Tensors are checked against their "
    "checksums. A folder stands for the newest checkpoint in it.",
    "hpcfsdp plot my_model.h5 --kind loss --smooth 0.9    # the curve, and its moving average",
    "hpcfsdp plot runs/one runs/two --kind loss           # two runs in one picture",
    "hpcfsdp plot my_model.h5 --kind norms --out norms.pdf",
    "hpcfsdp plot my_model.h5 --kind histogram '*.weight'",
)
add = parser.add_argument
add("path", metavar="PATH", type=Path, help="a checkpoint or a folder; may be repeated")
parser.add_patterns()
add("--kind", choices=("histogram", "norms", "loss"), required=True, help=_KIND_HELP)
_SMOOTH = "loss: draw an exponential moving average with this weight, 0 to below 1; default: 0"
add("--smooth", type=number_in(0, 1, "a weight of 0 to below 1"), default=0.0, metavar="W", help=_SMOOTH)
_OUT = (
    "the picture (also .pdf or .svg); an existing file is replaced; default: <name of the file>-<kind>.png in the "
    "working directory, but none with --json, which prints the numbers"
)
add("--out", metavar="PNG", type=Path, help=_OUT)


def main(arguments: Sequence[str]) -> int:
    """Draw, print the path of the picture or its numbers, and return the exit code."""
    options = parser.parse_intermixed_args(arguments)
    paths, options.patterns = paths_and_patterns(options.path, options.patterns)
    if options.smooth and options.kind != "loss":
        raise UsageError(f"plot: --smooth is for --kind loss, not for {options.kind}")
    numbers, draw = _KINDS[options.kind]
    files = [_file_of(path) for path in paths]
    found = dict(zip(_labels(files), (numbers(open_index(file), options) for file in files), strict=True))
    picture = options.out or (None if options.json else Path(f"{files[0].stem}-{options.kind}.png"))
    if picture is not None:
        more = {"smoothing": options.smooth} if options.smooth else {}
        write_figure(draw(found, **more), picture)
    if options.json:
        entries = [(file, entry) for file in found for entry in plots.as_numbers(found[file], options.smooth)]
        print_json([({"file": file} if len(found) > 1 else {}) | entry for file, entry in entries])
    else:
        print_line(picture)
    return 0


def _file_of(path: Path) -> Path:
    """Return the file itself, or the newest sound checkpoint of a folder."""
    if not os.path.isdir(path):  # not Path.is_dir, which raises where a parent folder may not be searched
        return path
    steps = {}
    for file in checkpoints_in(path):
        with contextlib.suppress(CheckpointError):
            steps[file] = open_index(file).info.step
    if not steps:
        raise CheckpointError(f"{path}: no checkpoint in it can be read: hpcfsdp verify {path} shows why")
    return max(steps, key=lambda file: steps[file])


def _labels(files: Sequence[Path]) -> list[str]:
    """Return names that distinguish the files: without their folders where these are not needed."""
    names = [file.name for file in files]
    labels = names if len(set(names)) == len(names) else [str(file) for file in files]
    return [label if labels.count(label) == 1 else f"{label} ({place + 1})" for place, label in enumerate(labels)]


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


_KINDS: dict[str, tuple[Callable[[CheckpointIndex, argparse.Namespace], Any], Callable[..., Any]]] = {
    "histogram": (_histograms, plots.draw_histograms),
    "norms": (_norms, plots.draw_norms),
    "loss": (lambda index, options: plots.curves(index, options.patterns), plots.draw_curves),
}
