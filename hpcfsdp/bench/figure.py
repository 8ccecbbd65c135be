"""Figures of benchmarks: all ratios of a run, and costs of one rank over world sizes. They need matplotlib."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.bench.tables import MIB, Ratio
from hpcfsdp.output.figure_file import new_figure, write_figure

_ROW_INCHES = 0.22
_MARKERS = "osD^vx+*"
_BETTER, _WORSE = "#0072b2", "#d55e00"


def draw_ratios(found: Sequence[tuple[str, Ratio]], path: Path, title: str) -> None:
    """Draw (part, ratio) pairs into `path`, in the format of its name. Where higher is better, the ratio is inverted.

    Raises:
        HpcfsdpError: matplotlib is not installed, or the file cannot be written.
    """
    figure = new_figure(9.0, 1.2 + _ROW_INCHES * len(found))
    axes = figure.add_subplot()
    for row, (_, ratio) in enumerate(found):
        value, low, high = _as_cost(ratio)
        colour = _BETTER if value <= 1 else _WORSE
        axes.plot([low, high], [row, row], color=colour, linewidth=1.2, alpha=0.6)
        axes.plot([value], [row], marker="o" if value <= 1 else "D", color=colour, markersize=5)
        axes.annotate(f"{value:.2f}", (high, row), (6, 0), textcoords="offset points", va="center", fontsize=7)
    axes.set_yticks(range(len(found)), [f"{part} | {ratio.name}" for part, ratio in found], fontsize=7)
    axes.set_ylim(len(found) - 0.5, -0.5)
    axes.set_xscale("log", base=2)
    axes.xaxis.set_major_formatter(lambda value, _place: f"{value:g}")
    axes.axvline(1.0, color="black", linewidth=0.8)
    axes.grid(axis="x", linewidth=0.3)
    figure.supxlabel(
        "cost of hpcfsdp / that of its peer: left of 1 hpcfsdp is better. Mark: median, line: all rounds", fontsize=8
    )
    axes.set_title(title, fontsize=8, loc="left", wrap=True)
    write_figure(figure, path)


def draw_scale(found: Sequence[Mapping[str, Any]], path: Path, title: str) -> None:
    """Draw time, memory and received objects of each phase over world sizes, on logarithmic axes.

    Args:
        found: the JSON of ``scale.table``.

    Raises:
        HpcfsdpError: as ``draw_ratios``.
    """
    kinds = (
        ("seconds", 1.0, "time (s)"),
        ("peak_bytes", MIB, "peak of metadata (MiB)"),
        ("gathered_bytes", MIB, "objects received (MiB)"),
    )
    figure = new_figure(11.0, 4.2)
    sizes = list(dict.fromkeys(one["ranks"] for one in found))
    phases = list(dict.fromkeys(phase for one in found for phase in one["costs"]))
    panels = figure.subplots(1, len(kinds))
    for axes, (kind, unit, label) in zip(panels, kinds, strict=True):
        for place, phase in enumerate(phases):
            costs = [(one["ranks"], one["costs"][phase][kind]) for one in found if phase in one["costs"]]
            most = [max(cost for ranks, cost in costs if ranks == size) / unit for size in sizes]
            style = {"marker": _MARKERS[place % len(_MARKERS)], "color": f"C{place % 10}"}
            axes.plot(sizes, most, label=phase, linewidth=1, markersize=4, **style)
        axes.set_xscale("log", base=2)
        axes.set_yscale("log")
        axes.set_xticks(sizes, [f"{ranks:,}" for ranks in sizes], fontsize=7, rotation=45)
        axes.set_xlabel("ranks")
        axes.set_title(label, fontsize=9)
        axes.grid(linewidth=0.3)
    handles, labels = panels[0].get_legend_handles_labels()
    figure.legend(handles, labels, loc="outside lower center", ncols=4, fontsize=7)
    figure.suptitle(title, fontsize=8)
    write_figure(figure, path)


def _as_cost(ratio: Ratio) -> tuple[float, float, float]:
    """Median, lowest and highest, where lower is better."""
    if ratio.better == "lower":
        return ratio.value, ratio.low, ratio.high
    return 1 / ratio.value, 1 / ratio.high, 1 / ratio.low
