"""Histograms, norms per layer and curves of a checkpoint: the numbers, and pictures of them with matplotlib."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.names import match_names
from hpcfsdp.checkpoint.inspect.stats import (
    Advance,
    absolute,
    decoded,
    file_statistics,
    ignore,
    json_number,
    read_pieces,
)
from hpcfsdp.errors import CheckpointError, nearest
from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BINS = 100


@dataclass(frozen=True)
class Histogram:
    """A histogram of the finite elements of tensors, of complex ones by absolute value.

    Attributes:
        edges: of the bins, float64, one more than `counts`.
        counts: elements in each bin, int64. A bin includes its lower edge, the last one also its upper edge.
        nan, inf: elements in no bin.
    """

    name: str
    edges: np.ndarray
    counts: np.ndarray
    nan: int
    inf: int


def histogram(
    index: CheckpointIndex,
    reader: BlockReader,
    name: str,
    paths: Sequence[str],
    *,
    bins: int = BINS,
    advance: Advance = ignore,
) -> Histogram:
    """Return one histogram of all elements of some tensors; not collective. Read them twice, a block at a time.

    `advance` is called with the number of bytes of each read. Raise CheckpointCorruptError for damage.
    """
    found = [facts for _, facts in file_statistics(index, reader, paths, advance)]
    low = min((facts.min for facts in found if facts.min is not None), default=0)
    high = max((facts.max for facts in found if facts.max is not None), default=0)
    edges = _edges(float(low), float(high), bins)
    counts = np.zeros(bins, np.int64)
    for path in paths:
        for block in read_pieces(index, reader, path, advance):
            counts += _counts(decoded(block, index.resolve(path).dtype), edges)
    return Histogram(name, edges, counts, sum(facts.nan for facts in found), sum(facts.inf for facts in found))


_LARGEST = float(np.finfo(np.float64).max)


def _edges(low: float, high: float, bins: int) -> np.ndarray:
    low, high = (min(float(value), _LARGEST) for value in (low, high))  # of complex numbers they can be infinite
    room, spacing = 0.0, math.ulp(max(abs(low), abs(high)))
    if low == high:
        room = max(0.5, abs(low) / 2)
    elif high / 2 - low / 2 < bins * spacing:
        room = 2 * bins * spacing  # there are not as many floats between them
    low, high = max(low - room, -_LARGEST), min(high + room, _LARGEST)
    # Not linspace: of the largest floats it takes the difference, which there is not.
    share = np.arange(bins + 1) / bins
    return np.maximum.accumulate(np.clip(low * (1 - share) + high * share, low, high))  # rounding, by the last bit


def _counts(values: np.ndarray, edges: np.ndarray) -> np.ndarray:
    values = values[np.isfinite(values)]
    wide = np.minimum(absolute(values), _LARGEST) if np.iscomplexobj(values) else values.astype(np.float64)
    bins = len(edges) - 1
    with np.errstate(over="ignore", divide="ignore"):  # of a width, or a density, beyond all floats
        width = edges[-1] - edges[0]
        density = bins / width
    if math.isfinite(density) and math.isfinite(width):
        place = np.minimum(((wide - edges[0]) * density).astype(np.int64), bins - 1)
        place -= wide < edges[place]  # rounding, by one at most: the edges decide
        place += (wide >= edges[place + 1]) & (place < bins - 1)
    else:
        place = np.clip(np.searchsorted(edges, wide, side="right") - 1, 0, bins - 1)
    return np.bincount(place, minlength=bins)


def layer_norms(
    index: CheckpointIndex, reader: BlockReader, paths: Iterable[str], advance: Advance = ignore
) -> dict[str, float]:
    """Return the Euclidean norm of all elements of each layer, by name, in the order of the file.

    A layer is a module with parameters of its own: "blocks.0.mlp" of "model/blocks.0.mlp.weight". Optimizer state
    counts by key: "exp_avg of blocks.0.mlp". Raise CheckpointCorruptError for damage.
    """
    norms: dict[str, float] = {}
    for spec, facts in file_statistics(index, reader, paths, advance):
        layer = layer_of(spec.path)
        norms[layer] = math.hypot(norms.get(layer, 0.0), facts.norm)
    return norms


def layer_of(path: str) -> str:
    """Return the name of a tensor's layer, see ``layer_norms``; pure."""
    if path.startswith(f"{schema.OPTIM_STATE}/"):
        name, _, key = path.removeprefix(f"{schema.OPTIM_STATE}/").rpartition("/")
        return f"{key} of {name.rpartition('.')[0] or name}"
    name = path.removeprefix(f"{schema.MODEL}/")
    return name.rpartition(".")[0] or name


def curves(index: CheckpointIndex, patterns: Iterable[str] = ()) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Return metrics of a file that match the patterns: steps (int64) and values (float64) by name; pure.

    Without patterns those with "loss" in their names. Raise CheckpointError if a pattern matches none.
    """
    if not index.metrics:
        raise CheckpointError(f"{index.info.path}: holds no metrics to draw: give them to save as metrics=")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for pattern in list(patterns) or ["*loss*"]:
        matched = match_names(pattern, index.metrics)
        if not matched:
            raise CheckpointError(
                f"{index.info.path}: no metric matches {pattern!r}{nearest(pattern, index.metrics)}; there are "
                f"{', '.join(index.metrics)}"
            )
        found |= {name: curve for name, curve in index.metrics.items() if name in matched}
    return found


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Return an exponential moving average, float64, of the same length; pure. Values that are not finite do not count.

    Args:
        weight: of the average so far, 0 to below 1; corrected for having begun at zero.
    """
    found, total, share = np.empty(len(values)), 0.0, 0.0
    for place, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total, share = weight * total + (1 - weight) * value, weight * share + 1 - weight
        found[place] = total / share if share else math.nan
    return found


def as_numbers(found: Any, smoothing: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the data of a plot for JSON: an object for each histogram, layer or metric, also smoothed if asked for."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            if isinstance(value, tuple):
                entry = {"name": name, "steps": value[0].tolist(), "values": list(map(json_number, value[1].tolist()))}
                yield entry | (
                    {"smoothed": list(map(json_number, smoothed(value[1], smoothing).tolist()))} if smoothing else {}
                )
            else:
                yield {"name": name, "norm": json_number(value)}
        return
    for one in found:
        yield {
            "name": one.name,
            "edges": one.edges.tolist(),
            "counts": one.counts.tolist(),
            "nan": one.nan,
            "inf": one.inf,
        }


MOST_PANELS = 48
_SCREEN = 40
"""Bars for which there is room at the usual height of a picture."""


def draw_histograms(files: Mapping[str, Sequence[Histogram]]) -> Figure:
    """Return a figure with a panel for each name, counts on a logarithmic scale, with an outline for each of several
    files.

    Raise CheckpointError for over ``MOST_PANELS``.
    """
    names = list(dict.fromkeys(found.name for histograms in files.values() for found in histograms))
    if len(names) > MOST_PANELS:
        raise CheckpointError(
            f"{len(names)} tensors match, a picture has room for {MOST_PANELS} histograms: give narrower patterns"
        )
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = _figure(files, max(7.0, 3.2 * columns), max(4.5, 2.6 * rows))
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        here = {file: one for file, histograms in files.items() for one in histograms if one.name == name}
        _draw_panel(axes, name, here)
        axes.set_ylabel("elements" if place % columns == 0 else "")
        axes.set_xlabel("value" if place + columns >= len(names) else "")
        if place == 0:
            _label(axes, axes.patches, list(here))
    return figure


def _draw_panel(axes: Axes, name: str, found: Mapping[str, Histogram]) -> None:
    for one in found.values():
        axes.stairs(one.counts, one.edges, fill=len(found) == 1)
    if any(one.counts.any() for one in found.values()):
        axes.set_yscale("log")
        axes.set_ylim(bottom=0.5)
    numbers = {
        kind: sum(getattr(one, key) for one in found.values()) for kind, key in (("NaN", "nan"), ("infinite", "inf"))
    }
    missing = [f"{count} {kind}" for kind, count in numbers.items() if count]
    title = f"{name} ({', '.join(missing)})" if missing else name
    axes.set_title(shown(title), fontsize="small", parse_math=False)


def draw_norms(files: Mapping[str, Mapping[str, float]]) -> Figure:
    """Return a figure with a bar for each layer, the first at the top; thin ones, side by side, for several files."""
    names = list(dict.fromkeys(name for norms in files.values() for name in norms))
    figure = _figure(files, 8.0, max(4.5, 7.0 * min(len(names), 10 * _SCREEN) / _SCREEN))
    axes = figure.add_subplot()
    thickness = 0.8 / len(files)
    drawn = []
    for number, norms in enumerate(files.values()):
        places = [names.index(name) + (number - (len(files) - 1) / 2) * thickness for name in norms]
        drawn.append(axes.barh(places, list(norms.values()), height=thickness))
    if len(names) <= 10 * _SCREEN:
        axes.set_yticks(range(len(names)), list(map(shown, names)), fontsize="x-small", parse_math=False)
    else:
        axes.set_ylabel("layer")
    axes.set_ylim(max(len(names), 1) - 0.5, -0.5)
    axes.set_xlabel("norm")
    _label(axes, drawn, list(files))
    return figure


def draw_curves(files: Mapping[str, Mapping[str, tuple[np.ndarray, np.ndarray]]], smoothing: float = 0.0) -> Figure:
    """Return a figure with a line for each metric of each file over the steps.

    Args:
        smoothing: see ``plots.smoothed``. With more than 0 the values themselves are drawn faintly behind.
    """
    figure = _figure(files, 8.0, 4.5)
    axes = figure.add_subplot()
    lines, labels = [], []
    for file, curves in files.items():
        for name, (steps, values) in curves.items():
            marker = "." if len(steps) < 2 else ""
            if smoothing:
                (faint,) = axes.plot(steps, values, marker=marker, alpha=0.25)
                lines += axes.plot(
                    steps, smoothed(values, smoothing), marker=marker, label=name, color=faint.get_color()
                )
            else:
                lines += axes.plot(steps, values, marker=marker, label=name)
            labels.append(name if len(files) == 1 else f"{file}: {name}")
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    names = {name for curves in files.values() for name in curves}
    if len(names) == 1:
        axes.set_ylabel(shown(*names), parse_math=False)
    _label(axes, lines, labels)
    return figure


def _label(axes: Axes, drawn: Sequence[Any], labels: Sequence[str]) -> None:
    """Add a legend where there are several labels."""
    if len(labels) < 2:
        return
    # A space in front: matplotlib leaves out names that begin with an underscore.
    for text in axes.legend(drawn, [f" {shown(label)}" for label in labels], fontsize="small").get_texts():
        text.set_parse_math(False)


def _figure(files: Mapping[str, Any], width: float, height: float) -> Figure:
    """Return an empty figure under the names of files, sizes in inches; raise HpcfsdpError without matplotlib."""
    figure = new_figure(width, height)
    figure.suptitle(shown(", ".join(files)), parse_math=False)
    return figure
