"""The state of a run in a few facts: the head of the page, and what ``--json`` prints."""

from __future__ import annotations

import itertools
import math
import statistics
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfsdp.launch.lock import SILENT_S
from hpcfsdp.report.run_folder import RunEvent, RunFolder, total_steps
from hpcfsdp.report.series import Series
from hpcfsdp.text.json_input import number

RECENT = 50  # steps over which rates are taken: their median

STATUS = {name: name for name in ("running", "complete", "stopped", "failed", "hung")} | {"ended": "not running"}


@dataclass(frozen=True)
class Segment:
    """From one start of the run to its end, or to the next start."""

    first: int | None  # the first step that it trained; None where it trained none, or none that still counts
    last: int | None  # the last step that it trained
    start: RunEvent | None  # None where it left none
    end: RunEvent | None  # the same
    signals: tuple[RunEvent, ...] = ()


@dataclass(frozen=True)
class Summary:
    """Facts of a run; None where unknown."""

    status: str  # a key of ``STATUS``. "ended": it does not run, and has recorded no end.
    message: str  # why it ended, or ""
    step: int | None  # the last recorded step
    total_steps: int | None
    loss: float | None  # the last one
    best_loss: float | None  # the lowest one
    best_loss_step: int | None
    rate: float | None  # median over the last ``RECENT`` steps, in `rate_unit` a second
    rate_unit: str
    step_s: float | None  # median seconds of a step over the same steps
    trained_s: float | None  # the sum of all steps' times
    wall_s: float | None  # from the first start, or step, to the last sign of life
    eta_s: float | None  # until the last step of the configuration, of a run that goes on
    world_size: int | None
    num_nodes: int | None
    device: str
    parameters: int | None
    flop_utilisation: float | None  # median over the same steps, 0-1
    comm_share: float | None  # the same
    peak_bytes: float | None  # the largest of all steps and ranks
    held_out: dict[str, float] | None  # the numbers of the last evaluation on held-out data
    starts: int
    signals: int
    checkpoints: int
    last_checkpoint_step: int | None
    warnings: int
    errors: int


def recent_median(series: Series, name: str, count: int = RECENT) -> float | None:
    """Return the median of the last values of a column; None without one."""
    _, values = series.points(name)
    return float(np.median(values[-count:])) if len(values) else None


def rate_column(series: Series) -> tuple[str, str]:
    """Return the column of throughput, and its unit: tokens, else bytes."""
    name = next((name for name in ("tokens_per_s", "bytes_per_s") if series.has(name)), "")
    return name, "tokens/s" if name == "tokens_per_s" else "bytes/s"


def segments(run: RunFolder) -> list[Segment]:
    """Return the parts of a run, by its "start" events; without one by the number of restarts in its records."""
    found: list[Segment] = []
    series = run.series
    bounds = [place for place, event in enumerate(run.events) if event.kind == "start"]
    for place, following in itertools.pairwise([*bounds, len(run.events)]):
        start, *inside = run.events[place:following]
        # What follows dropped later steps when it resumed.
        last = math.inf if following == len(run.events) else run.events[following].step or 0
        steps = series.steps[(series.steps > (start.step or 0)) & (series.steps <= last)]
        found.append(
            Segment(
                first=int(steps[0]) if len(steps) else None,
                last=int(steps[-1]) if len(steps) else None,
                start=start,
                end=next((event for event in reversed(inside) if event.kind == "end"), None),
                signals=tuple(event for event in inside if event.kind == "signal"),
            )
        )
    if found or not len(series):
        return found
    restarts = np.nan_to_num(series.column("restart"), nan=0.0)
    bounds = [0, *(np.flatnonzero(np.diff(restarts)) + 1).tolist(), len(series)]
    return [
        Segment(int(series.steps[begin]), int(series.steps[end - 1]), None, None)
        for begin, end in itertools.pairwise(bounds)
    ]


def summarize(run: RunFolder, recent: int = RECENT) -> Summary:
    """Return the facts of a run, with rates over so many `recent` steps."""
    series, parts = run.series, segments(run)
    start = next((part.start for part in reversed(parts) if part.start), None)
    facts: Any = start.facts if start else {}
    status, message = _status(run, parts)
    step = int(series.steps[-1]) if len(series) else None
    total = total_steps(run.config)
    rate_name, rate_unit = rate_column(series)
    step_s = recent_median(series, "seconds", recent)
    loss_steps, losses = series.points("loss")
    best = int(np.argmin(losses)) if len(losses) else None
    peaks = series.points("memory.peak_bytes")[1]
    seconds = series.points("seconds")[1]
    left = None if total is None or step is None or step_s is None else max(total - step, 0) * step_s
    counts = run.notes.counts
    dates = [event.seconds for event in run.events] + series.seconds.tolist()
    dates = [seconds for seconds in dates if math.isfinite(seconds)]
    sizes = (one.world_size for one in reversed(run.checkpoints) if one.world_size)
    return Summary(
        status=status,
        message=message,
        step=step,
        total_steps=total,
        loss=series.last("loss"),
        best_loss=None if best is None else float(losses[best]),
        best_loss_step=None if best is None else int(loss_steps[best]),
        rate=recent_median(series, rate_name, recent) if rate_name else None,
        rate_unit=rate_unit,
        step_s=step_s,
        trained_s=float(seconds.sum()) if len(seconds) else None,
        wall_s=max(dates) - min(dates) if len(dates) > 1 else None,
        eta_s=left if status == "running" else None,
        world_size=_whole(facts.get("world_size")) or next(sizes, None),
        num_nodes=_whole(facts.get("num_nodes")),
        device=start.text("device") if start else "",
        parameters=_whole(facts.get("parameters")),
        flop_utilisation=recent_median(series, "flop_utilisation", recent),
        comm_share=recent_median(series, "comm_share", recent),
        peak_bytes=float(peaks.max()) if len(peaks) else None,
        held_out=dict(run.held_out[-1].values) if run.held_out else None,
        starts=len(parts),
        signals=len(run.events_of("signal")),
        checkpoints=len(run.checkpoints),
        last_checkpoint_step=max((one.step for one in run.checkpoints), default=None),
        warnings=counts.get("WARNING", 0),
        errors=counts.get("ERROR", 0) + counts.get("CRITICAL", 0),
    )


def _status(run: RunFolder, parts: list[Segment]) -> tuple[str, str]:
    step_s = recent_median(run.series, "seconds") or 0.0
    has_lock = run.config is not None  # it belongs to hpcfsdp train, which locks its folder
    end = parts[-1].end if parts else None
    writes = not has_lock and end is None and run.silent_s < max(SILENT_S, 10 * step_s)
    if run.holder or writes:  # a holder also where the last run has ended, and another one starts
        return "running", run.holder
    known = run.series.seconds[np.isfinite(run.series.seconds)]
    last_record = float(known[-1]) if len(known) else math.inf
    if end is not None:
        has_hung = any(hang.seconds >= last_record for hang in run.hangs)
        outcomes = {"complete": "complete", "error": "hung" if has_hung else "failed", "lost": "failed"}
        return outcomes.get(end.text("outcome"), "stopped"), end.text("message")
    if run.hangs and run.hangs[-1].seconds >= last_record:
        return "hung", run.hangs[-1].head.partition("\n")[0]
    total = total_steps(run.config)
    is_complete = total is not None and len(run.series) and run.series.steps[-1] >= total
    return "complete" if is_complete else "ended", ""


def _whole(value: Any) -> int | None:
    found = number(value)
    return None if math.isnan(found) else int(found)


def save_interval(run: RunFolder) -> int | None:
    """Return the usual number of steps from one checkpoint to the next; None where there are fewer than three."""
    steps = sorted({one.step for one in run.checkpoints})
    gaps = [after - before for before, after in itertools.pairwise(steps)]
    return int(statistics.median_high(gaps)) if len(gaps) > 1 else None
