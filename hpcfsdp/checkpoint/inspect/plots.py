"""Histograms, norms per layer and curves of a checkpoint: the numbers."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.names import match_names
from hpcfsdp.checkpoint.inspect.numbers import decoded, json_number
from hpcfsdp.checkpoint.inspect.stats import absolute, file_statistics
from hpcfsdp.checkpoint.inspect.walk import Advance, ignore, read_pieces
from hpcfsdp.errors import CheckpointError, nearest

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


def smoothed(values: np.ndarray, weight: float) -> np.ndarray:
    """An exponential moving average, float64, of the same length; pure. Values that are not finite do not count.

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
    """The data of a plot for JSON: an object for each histogram, layer or metric, smoothed as well if asked for."""
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
