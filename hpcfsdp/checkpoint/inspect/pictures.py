"""Pictures of the numbers in ``plots``, of one checkpoint or of several on top of each other. Needs matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfsdp.checkpoint.inspect.plots import Histogram, smoothed
from hpcfsdp.errors import CheckpointError
from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

MOST_PANELS = 48
_SCREEN = 40
"""Bars for which there is room at the usual height of a picture."""


def draw_histograms(files: Mapping[str, Sequence[Histogram]]) -> Figure:
    """A figure with a panel for each name, counts on a logarithmic scale, with an outline for each of several files.

    Raises CheckpointError for over ``MOST_PANELS``.
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
    """A figure with a bar for each layer, the first one at the top; thinner ones, side by side, for several files."""
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
    """A figure with a line for each metric of each file over the steps.

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
    """Adds a legend where there are several labels."""
    if len(labels) < 2:
        return
    # A space in front: matplotlib leaves out names that begin with an underscore.
    for text in axes.legend(drawn, [f" {shown(label)}" for label in labels], fontsize="small").get_texts():
        text.set_parse_math(False)


def _figure(files: Mapping[str, Any], width: float, height: float) -> Figure:
    """An empty figure with the names of files above it, sizes in inches; raises HpcfsdpError without matplotlib."""
    figure = new_figure(width, height)
    figure.suptitle(shown(", ".join(files)), parse_math=False)
    return figure
