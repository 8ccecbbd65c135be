"""The figures of a run's page: which there are, and what each shows."""

from __future__ import annotations

import itertools
import math
from collections import Counter
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Any

import numpy as np

from hpcfsdp.report.drawing import (
    COLOURS,
    DASHES,
    INK,
    MUTED,
    Figure,
    Marks,
    canvas,
    legend,
    step_axis,
    style,
    value_axis,
    write,
)
from hpcfsdp.report.run_folder import RunFolder
from hpcfsdp.report.series import averaged, thinned
from hpcfsdp.report.summary import rate_column, segments
from hpcfsdp.text.terminal import readable_bytes, readable_count, readable_duration, readable_share, shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MOST_OTHERS = 6  # figures of numbers that only the run's own program knows
MEDIANS = 60  # points of a line of medians
MOST_RANKS = 8  # bars of ranks that were the slowest
PARTS = ("parameters", "gradients", "optimizer", "gathered", "checkpoints")


def figures_of(run: RunFolder) -> list[Figure]:
    """Return all figures for which the run has numbers. Raises HpcfsdpError without matplotlib."""
    with style():
        _, *parts = segments(run) or [None]
        restarts = [part.start.step or 0 for part in parts if part.start is not None]
        restarts = restarts or [part.first for part in parts if part.first is not None]
        checkpoints = sorted({one.step for one in run.checkpoints})
        marks = Marks(np.array(restarts, np.int64), np.array(checkpoints, np.int64), run.series.not_finite)
        draws = _loss, _single_curves, _times, _communication, _spread, _slowest, _memory, _progress, _others
        return [figure for draw in draws for figure in draw(run, marks)]


def _summary(what: str, steps: np.ndarray, values: np.ndarray, words: Callable[[float], str] = readable_count) -> str:
    """Return a sentence for readers who do not see the curve."""
    low, high = int(np.argmin(values)), int(np.argmax(values))
    return (
        f"{what} over steps {int(steps[0])} to {int(steps[-1])}: first {words(float(values[0]))}, last "
        f"{words(float(values[-1]))}, lowest {words(float(values[low]))} in step {int(steps[low])}, highest "
        f"{words(float(values[high]))} in step {int(steps[high])}."
    )


def _log_scale(values: np.ndarray) -> bool:
    """Return whether a linear axis would hide most of the curve."""
    return bool(len(values)) and values.min() > 0 and values.max() > 30 * np.median(values)


def _loss(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    steps, losses = series.points("loss")
    if not len(steps):
        return
    figure, axes = canvas()
    lines = _with_median(axes, steps, losses)
    labels = ["each step", "median"][: len(lines)]
    caption = "Thin: each step, of long runs the lowest and highest in turn; thick: medians."
    caption = caption if len(lines) > 1 else "Of each step."
    bits = [(one.step, one.values["bits_per_byte"]) for one in run.held_out if "bits_per_byte" in one.values]
    if bits:
        at, values = thinned(np.array([step for step, _ in bits]), np.array([value for _, value in bits]), MEDIANS)
        (line,) = axes.plot(at, values * math.log(2), "D", color=COLOURS[1], markersize=5, linestyle="none")
        lines, labels = [*lines, line], [*labels, "held-out"]
    if _log_scale(losses):
        axes.set_yscale("log")
    value_axis(axes)
    step_axis(axes, marks)
    legend(figure, lines, labels)
    caption += " Diamonds: held-out data, in nats per byte." if bits else ""
    caption += " Crosses at the top: not finite." if len(marks.not_finite) else ""
    yield write("loss", "Loss", caption, _summary("Loss", steps, losses), figure)


def _single_curves(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    rate, unit = rate_column(series)
    use = "The model's arithmetic, of the devices' peak rate."
    for name, title, caption, kind, from_zero in (
        ("grad_norm", "Gradient norm", "Before clipping. Spikes often come before a loss that rises.", "", False),
        ("lr", "Learning rate", "Of the first parameter group.", "", True),
        (rate, "Throughput", f"{unit.capitalize()}, all ranks together.", "count", True),
        ("flop_utilisation", "Use of the devices", use, "share", True),
    ):
        yield from _curve(name, title, caption, series.points(name), marks, kind, from_zero)


def _curve(
    name: str,
    title: str,
    caption: str,
    points: tuple[np.ndarray, np.ndarray],
    marks: Marks,
    kind: str = "",
    from_zero: bool = False,
) -> Iterator[Figure]:
    """Yield a figure of one curve, with its medians if it is of some `kind`; none without points."""
    steps, values = points
    if not len(steps):
        return
    figure, axes = canvas()
    if kind:
        _with_median(axes, steps, values)
    else:
        axes.plot(*thinned(steps, values), color=COLOURS[0], marker="" if len(steps) > 60 else ".")
        if _log_scale(values):
            axes.set_yscale("log")
    value_axis(axes, kind or "count", from_zero=from_zero)
    step_axis(axes, marks)
    words = readable_share if kind == "share" else readable_count
    yield write(name, title, caption, _summary(title, steps, values, words), figure)


def _with_median(axes: Axes, steps: np.ndarray, values: np.ndarray) -> list[Any]:
    """Return a curve, with a broad line of medians where it is long: the lines."""
    if len(steps) <= 2 * MEDIANS:
        return axes.plot(*thinned(steps, values), color=COLOURS[0], marker="." if len(steps) < MEDIANS else "")
    parts = np.array_split(np.arange(len(steps)), MEDIANS)
    middles, medians = [steps[part].mean() for part in parts], [np.median(values[part]) for part in parts]
    return [
        *axes.plot(*thinned(steps, values), color=COLOURS[0], linewidth=0.7, alpha=0.4),
        *axes.plot(middles, medians, color=COLOURS[0], linewidth=2.0),
    ]


def _times(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    steps, seconds = series.points("seconds")
    if not len(steps):
        return
    figure, axes = canvas()
    busy = series.column("busy_s_mean")
    both = np.isfinite(series.column("seconds")) & np.isfinite(busy)
    if both.any():
        whole = series.column("seconds")[both]
        parts = np.stack([np.minimum(busy[both], whole), np.maximum(whole - busy[both], 0.0)], axis=1)
        at, means = averaged(series.steps[both], parts)
        areas = axes.stackplot(at, means.T, colors=[COLOURS[0], COLOURS[3]], linewidth=0)
        axes.plot(at, means.sum(axis=1), color=INK, linewidth=1.0)
        legend(figure, areas, ["computes", "waits for communication"])
        caption = "Mean over ranks, of long runs also over steps: what a rank computes, and what it waits."
    else:
        _with_median(axes, steps, seconds)
        caption = "Seconds of each step; thick: medians."
    axes.set_ylabel("seconds")
    value_axis(axes, from_zero=True)
    step_axis(axes, marks)
    text = _summary("Time of a step", steps, seconds, readable_duration)
    yield write("step-time", "Time of a step", caption, text, figure)


def _communication(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    steps, shares = series.points("comm_share")
    if not len(steps):
        return
    figure, axes = canvas()
    lines = []
    for number, name in enumerate(("comm_share", "comm_share_max")):
        at, values = series.points(name)
        if len(at):
            at, values = averaged(at, values)
            lines += axes.plot(at, values, color=COLOURS[number], linestyle=DASHES[number])
    legend(figure, lines, ["mean over ranks", "largest"][: len(lines)])
    value_axis(axes, "share", from_zero=True)
    step_axis(axes, marks)
    caption = "Share of a step in which ranks wait for communication, or for a slower rank."
    text = _summary("Communication share", steps, shares, readable_share)
    yield write("communication", "Communication share", caption, text, figure)


def _spread(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    mean, largest = series.column("busy_s_mean"), series.column("busy_s_max")
    known = np.isfinite(mean) & np.isfinite(largest) & (mean > 0)
    points = series.steps[known], np.maximum(largest[known] / mean[known] - 1, 0.0)
    caption = "How much longer the slowest rank computes than the mean of all ranks; thick: medians."
    yield from _curve("spread", "Spread over ranks", caption, points, marks, "share", from_zero=True)


def _slowest(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    ranks = series.points("straggler.rank")[1].astype(int)
    if not len(ranks):
        return
    counted = Counter(ranks.tolist()).most_common(MOST_RANKS)
    behind, column = series.column("straggler.behind_s"), series.column("straggler.rank")
    names, shares, texts = [], [], []
    for rank, times in counted:
        host = series.hosts.get(rank, "")
        here = behind[column == rank]
        late = float(np.nanmedian(here)) if np.isfinite(here).any() else math.nan
        names.append(f"rank {rank}" + (f", {shown(host)[:14]}" if host else ""))
        shares.append(times / len(ranks))
        texts.append(readable_share(shares[-1]) + (f", {readable_duration(late)}" if math.isfinite(late) else ""))
    figure, axes = canvas()
    axes.barh(range(len(names)), shares, color=COLOURS[0], height=0.62)
    axes.set_yticks(range(len(names)), names, parse_math=False)
    axes.set_ylim(max(len(names), 4) - 0.4, -0.6)
    axes.set_xlim(0, min(1.0, max(shares) * 1.05) * 1.45)
    for place, (share, text) in enumerate(zip(shares, texts, strict=True)):
        axes.text(share + 0.015 * axes.get_xlim()[1], place, text, va="center", fontsize=10, parse_math=False)
    axes.grid(False)
    axes.set_xticks([])
    axes.spines[["left", "bottom"]].set_visible(False)
    axes.tick_params(axis="y", length=0)
    caption = "How often each rank was the slowest, and by how much it was then behind the mean (median)."
    text = "Slowest ranks: " + "; ".join(f"{name}: {text}" for name, text in zip(names, texts, strict=True)) + "."
    yield write("slowest", "Slowest ranks", caption, text, figure)


def _memory(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    steps, peaks = series.points("memory.peak_bytes")
    parts = [(name, series.column(f"memory.{name}_bytes")) for name in PARTS]
    _, capacity = series.points("memory.capacity_bytes")
    if len(capacity):  # of a device: checkpoints are in host memory
        parts.pop()
    parts = [(name, values) for name, values in parts if np.isfinite(values).any()]
    if not len(steps) and not parts:
        return
    figure, axes = canvas()
    handles: list[Any] = []
    labels: list[str] = []
    if parts:
        known = np.any([np.isfinite(values) for _, values in parts], axis=0)
        stack = np.nan_to_num(np.stack([values[known] for _, values in parts], axis=1))
        at, means = averaged(series.steps[known], stack)
        handles += axes.stackplot(at, means.T, colors=[COLOURS[place] for place in (0, 2, 4, 3, 1)], linewidth=0)
        labels += [name for name, _ in parts]
    if len(steps):
        handles += axes.plot(*thinned(steps, peaks), color=INK, linewidth=1.6)
        labels.append("peak")
    if len(capacity):
        handles.append(axes.axhline(capacity[-1], color=COLOURS[1], linestyle=DASHES[1]))
        labels.append("capacity")
    value_axis(axes, "bytes", from_zero=True)
    step_axis(axes, marks)
    legend(figure, handles, labels)
    caption = "Line: the largest peak over ranks. Areas: what rank 0 holds."
    caption = caption if parts else "The largest peak over ranks."
    text = _summary("Peak memory", steps, peaks, readable_bytes) if len(steps) else "Memory of rank 0 by its parts."
    yield write("memory", "Memory", caption, text, figure)


def _progress(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    series = run.series
    known = np.isfinite(series.seconds)
    if known.sum() < 2:
        return
    begun = min([series.seconds[known].min(), *(event.seconds for event in run.events if math.isfinite(event.seconds))])
    span = float(series.seconds[known].max() - begun)
    size, unit = next(
        (pair for pair in ((86400.0, "days"), (3600.0, "hours"), (60.0, "minutes")) if span > 2 * pair[0]),
        (1.0, "seconds"),
    )
    times, steps = (series.seconds[known] - begun) / size, series.steps[known]
    figure, axes = canvas()
    bounds = [0, *np.searchsorted(steps, marks.restarts, side="right").tolist(), len(steps)]
    for first, end in itertools.pairwise(bounds):
        if end > first:
            axes.plot(*averaged(times[first:end], steps[first:end].astype(float)), color=COLOURS[0], linewidth=2.0)
    handles, labels = [], []
    for kind, shape, colour, label in (
        ("start", "^", INK, "start"),
        ("checkpoint", "|", MUTED, "checkpoint"),
        ("signal", "X", COLOURS[1], "signal"),
        ("end", "s", INK, "end"),
    ):
        points = [(event.seconds, event.step or 0) for event in run.events_of(kind) if math.isfinite(event.seconds)]
        if points:
            points = points[:: -(-len(points) // MEDIANS)]  # enough to see how often
            at = [((seconds - begun) / size, step) for seconds, step in points]
            handles += axes.plot(*zip(*at, strict=True), shape, color=colour, markersize=7, linestyle="none")
            labels.append(label)
    step_axis(axes, label=f"{unit} since the first start")
    axes.set_ylabel("step")
    value_axis(axes, from_zero=True)
    legend(figure, handles, labels)
    caption = "Steps over wall-clock time: gaps are waits in the queue, a line that begins lower repeats steps."
    text = f"Progress over {readable_duration(span)}: steps {int(steps[0])} to {int(steps[-1])}, "
    text += f"{len(run.events_of('start')) or 1} start(s)."
    yield write("progress", "Progress", caption, text, figure)


def _others(run: RunFolder, marks: Marks) -> Iterator[Figure]:
    caption = "A number of this run's own program."
    for place, name in enumerate(run.series.others[:MOST_OTHERS]):
        yield from _curve(f"other-{place}", shown(name)[:60], caption, run.series.points(name), marks)
