"""Histograms, norms per layer and curves of a checkpoint: the numbers, and plots of them."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfsdp.checkpoint.files import reason
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.checkpoint.inspect.names import match_names
from hpcfsdp.checkpoint.inspect.numbers import decoded, json_number
from hpcfsdp.checkpoint.inspect.stats import absolute, file_statistics
from hpcfsdp.checkpoint.inspect.walk import Advance, ignore, read_pieces
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointError, HpcfsdpError, nearest
from hpcfsdp.terminal import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure

BINS = 100
MOST_PANELS = 48
_SCREEN = 40
"""Bars for which there is room at the usual height of a picture."""


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
    """One histogram of all elements of some tensors; not collective. Reads them twice, a block at a time.

    `advance` is called with the number of bytes of each read. Raises CheckpointCorruptError for damage.
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
    """The Euclidean norm of all elements of each layer, by name, in the order of the file.

    A layer is a module with parameters of its own: "blocks.0.mlp" of "model/blocks.0.mlp.weight". Optimizer state
    counts by key: "exp_avg of blocks.0.mlp". Raises CheckpointCorruptError for damage.
    """
    norms: dict[str, float] = {}
    for spec, facts in file_statistics(index, reader, paths, advance):
        layer = layer_of(spec.path)
        norms[layer] = math.hypot(norms.get(layer, 0.0), facts.norm)
    return norms


def layer_of(path: str) -> str:
    """The name of a tensor's layer, see ``layer_norms``; pure."""
    if path.startswith(f"{schema.OPTIM_STATE}/"):
        name, _, key = path.removeprefix(f"{schema.OPTIM_STATE}/").rpartition("/")
        return f"{key} of {name.rpartition('.')[0] or name}"
    name = path.removeprefix(f"{schema.MODEL}/")
    return name.rpartition(".")[0] or name


def curves(index: CheckpointIndex, patterns: Iterable[str] = ()) -> dict[str, tuple[np.ndarray, np.ndarray]]:
    """Metrics of a file that match the patterns: steps (int64) and values (float64) by name; pure.

    Without patterns those with "loss" in their names. Raises CheckpointError if a pattern matches none.
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


def draw_histograms(title: str, histograms: Sequence[Histogram]) -> Figure:
    """A figure with a panel for each, counts on a logarithmic scale.

    Raises CheckpointError for over ``MOST_PANELS``.
    """
    if len(histograms) > MOST_PANELS:
        raise CheckpointError(
            f"{len(histograms)} tensors match, a picture has room for {MOST_PANELS} histograms: give narrower patterns"
        )
    columns = min(4, len(histograms))
    rows = -(-len(histograms) // columns)
    figure = _figure(title, max(7.0, 3.2 * columns), max(4.5, 2.6 * rows))
    for place, found in enumerate(histograms):
        axes = figure.add_subplot(rows, columns, place + 1)
        axes.stairs(found.counts, found.edges, fill=True)
        if found.counts.any():
            axes.set_yscale("log")
            axes.set_ylim(bottom=0.5)
        missing = [f"{count} {kind}" for count, kind in ((found.nan, "NaN"), (found.inf, "infinite")) if count]
        title = f"{found.name} ({', '.join(missing)})" if missing else found.name
        axes.set_title(shown(title), fontsize="small", parse_math=False)
        axes.set_ylabel("elements" if place % columns == 0 else "")
    return figure


def draw_norms(title: str, norms: Mapping[str, float]) -> Figure:
    """A figure with a bar for each layer, the first one at the top."""
    figure = _figure(title, 8.0, max(4.5, 7.0 * min(len(norms), 10 * _SCREEN) / _SCREEN))
    axes = figure.add_subplot()
    axes.barh(range(len(norms)), list(norms.values()))
    if len(norms) <= 10 * _SCREEN:
        axes.set_yticks(range(len(norms)), list(map(shown, norms)), fontsize="x-small", parse_math=False)
    else:
        axes.set_ylabel("layer")
    axes.set_ylim(max(len(norms), 1) - 0.5, -0.5)
    axes.set_xlabel("norm")
    return figure


def draw_curves(title: str, found: Mapping[str, tuple[np.ndarray, np.ndarray]]) -> Figure:
    """A figure with a line for each metric over the steps."""
    figure = _figure(title, 8.0, 4.5)
    axes = figure.add_subplot()
    lines = [axes.plot(*curve, label=name, marker="." if len(curve[0]) < 2 else "")[0] for name, curve in found.items()]
    axes.set_xlabel("step")
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.grid(alpha=0.3)
    if len(found) == 1:
        axes.set_ylabel(shown(next(iter(found))), parse_math=False)
    elif found:
        # A space in front: matplotlib leaves out names that begin with an underscore.
        for text in axes.legend(lines, [f" {shown(name)}" for name in found]).get_texts():
            text.set_parse_math(False)
    return figure


def write_figure(figure: Figure, path: str | os.PathLike[str]) -> Path:
    """Writes a figure in the format of the name's suffix: png, pdf, svg. Raises CheckpointError where that fails."""
    path = Path(path)
    formats = figure.canvas.get_supported_filetypes()
    if path.suffix[1:].lower() not in formats:
        endings = ", ".join(f".{name}" for name in sorted(formats))
        raise CheckpointError(f"{path}: unknown image format; the name has to end with one of {endings}")
    try:
        figure.savefig(path)
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from error
    return path


def _figure(title: str, width: float, height: float) -> Figure:
    """An empty figure, sizes in inches, without a window system; raises HpcfsdpError without matplotlib."""
    try:
        from matplotlib.figure import Figure
    except ImportError as error:
        raise HpcfsdpError(
            f"matplotlib, with which pictures are drawn, cannot be loaded ({error}): pip install 'hpcfsdp[plot]'"
        ) from None
    figure = Figure(figsize=(width, height), dpi=120, layout="constrained")
    figure.suptitle(shown(title), parse_math=False)
    return figure


def as_numbers(found: Any) -> Iterator[dict[str, Any]]:
    """The data of a plot for JSON: an object for each histogram, layer or metric."""
    if isinstance(found, Mapping):
        for name, value in found.items():
            if isinstance(value, tuple):
                yield {"name": name, "steps": value[0].tolist(), "values": [json_number(v) for v in value[1].tolist()]}
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
