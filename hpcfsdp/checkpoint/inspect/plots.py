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
from hpcfsdp.checkpoint.inspect import stats
from hpcfsdp.checkpoint.inspect.names import match_names
from hpcfsdp.checkpoint.inspect.stats import Advance, decoded, ignore, json_number
from hpcfsdp.errors import CheckpointError, nearest
from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


BINS = 100


@dataclass(frozen=True)
class Histogram:
    """A histogram of the finite elements of tensors, of complex ones by absolute value."""

    name: str
    edges: np.ndarray  # of the bins, float64, one more than `counts`
    counts: np.ndarray  # elements in each bin, int64. A bin includes its lower edge, the last one also its upper edge.
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
    """Return one histogram of all elements of some tensors, which are read twice; raise CheckpointCorruptError."""
    found = [facts for _, facts in stats.file_statistics(index, reader, paths, advance)]
    low = min((facts.min for facts in found if facts.min is not None), default=0)
    high = max((facts.max for facts in found if facts.max is not None), default=0)
    edges = _edges(float(low), float(high), bins)
    counts = np.zeros(bins, np.int64)
    for path in paths:
        for block in stats.read_pieces(index, reader, path, advance):
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
    wide = np.minimum(stats.absolute(values), _LARGEST) if np.iscomplexobj(values) else values.astype(np.float64)
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
    for spec, facts in stats.file_statistics(index, reader, paths, advance):
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
    """Return metrics that match the patterns ("*loss*"): steps, values by name; raise CheckpointError without any."""
    if not index.metrics:
        raise CheckpointError(f"{index.info.path}: holds no metrics to draw: give them to save as metrics=")
    found: dict[str, tuple[np.ndarray, np.ndarray]] = {}
    for pattern in list(patterns) or ["*loss*"]:
        matched = match_names(pattern, index.metrics)
        if not matched:
            what = f"no metric matches {pattern!r}{nearest(pattern, index.metrics)}; there are"
            raise CheckpointError(f"{index.info.path}: {what} {', '.join(index.metrics)}")
        found |= {name: curve for name, curve in index.metrics.items() if name in matched}
    return found


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """Return the exponential moving average of the finite values, corrected for having begun at zero, float64; pure."""
    found, total, share = np.empty(len(values)), 0.0, 0.0
    for place, value in enumerate(values.tolist()):
        if math.isfinite(value):
            total, share = weight * total + (1 - weight) * value, weight * share + 1 - weight
        found[place] = total / share if share else math.nan
    return found


def as_numbers(found: Any, smoothing: float = 0.0) -> Iterator[dict[str, Any]]:
    """Yield the data of a plot for JSON: an object for each histogram, layer or metric, also smoothed if asked for."""
    if not isinstance(found, Mapping):
        yield from (vars(one) | {"edges": one.edges.tolist(), "counts": one.counts.tolist()} for one in found)
        return
    for name, value in found.items():
        if isinstance(value, tuple):
            drawn = {"values": value[1]} | ({"smoothed": smoothed(value[1], smoothing)} if smoothing else {})
            numbers = {key: list(map(json_number, each.tolist())) for key, each in drawn.items()}
            yield {"name": name, "steps": value[0].tolist(), **numbers}
        else:
            yield {"name": name, "norm": json_number(value)}


MOST_PANELS = 48
_SCREEN = 40  # bars for which there is room at the usual height of a picture


def draw_histograms(files: Mapping[str, Sequence[Histogram]]) -> Figure:
    """Return a figure with a panel for each name; raise CheckpointError for over ``MOST_PANELS``."""
    names = list(dict.fromkeys(found.name for histograms in files.values() for found in histograms))
    if len(names) > MOST_PANELS:
        what = f"{len(names)} tensors match, a picture has room for {MOST_PANELS} histograms: give narrower patterns"
        raise CheckpointError(what)
    columns = min(4, len(names))
    rows = -(-len(names) // columns)
    figure = _figure(files, max(7.0, 3.2 * columns), max(4.5, 2.6 * rows))
    for place, name in enumerate(names):
        axes = figure.add_subplot(rows, columns, place + 1)
        here = {file: one for file, histograms in files.items() for one in histograms if one.name == name}
        for one in here.values():
            axes.stairs(one.counts, one.edges, fill=len(here) == 1)
        if any(one.counts.any() for one in here.values()):
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5)
        kinds = {"NaN": [one.nan for one in here.values()], "infinite": [one.inf for one in here.values()]}
        missing = [f"{sum(counts)} {kind}" for kind, counts in kinds.items() if any(counts)]
        title = f"{name} ({', '.join(missing)})" if missing else name
        axes.set_title(shown(title), fontsize="small", parse_math=False)
        axes.set_ylabel("elements" if place % columns == 0 else "")
        axes.set_xlabel("value" if place + columns >= len(names) else "")
        if place == 0:
            _label(axes, axes.patches, list(here))
    return figure


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
    """Return a figure with a line for each metric of each file over the steps; if ``smoothed``, faint ones behind."""
    figure = _figure(files, 8.0, 4.5)
    axes = figure.add_subplot()
    lines, labels = [], []
    for file, curves in files.items():
        for name, (steps, values) in curves.items():
            style: dict[str, Any] = {"marker": "." if len(steps) < 2 else ""}
            if smoothing:
                (faint,) = axes.plot(steps, values, alpha=0.25, **style)
                values, style["color"] = smoothed(values, smoothing), faint.get_color()
            lines += axes.plot(steps, values, label=name, **style)
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
