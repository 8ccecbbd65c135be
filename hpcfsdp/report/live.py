"""A view of a run that goes on: reads what is new of its files, and puts it in a few lines. No collective, no locks."""

from __future__ import annotations

import contextlib
import dataclasses
import math
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format.catalog import latest, step_of as step_of_file
from hpcfsdp.launch.lock import training_in
from hpcfsdp.report.run_folder import (
    CONFIG,
    EVENTS,
    LEVELS,
    METRICS,
    RunEvent,
    RunFolder,
    SavedCheckpoint,
    checkpoints_of,
    read_config,
    read_hangs,
    silent_s_of,
)
from hpcfsdp.report.series import SeriesBuilder
from hpcfsdp.report.summary import STATUS, Summary, summarize
from hpcfsdp.text.json_input import Tail, text
from hpcfsdp.text.terminal import readable_bytes, readable_count, readable_duration, readable_share, shown

LAST_RECORDS = 2000
LAST_WARNINGS = 3
MOST_LOGS = 16
"""Logs of the first ranks that are followed: a file system has better things to do than to show a thousand files."""


class Follower:
    """The run in a folder, as far as it has come. The folder may appear later."""

    def __init__(self, folder: Path) -> None:
        """Touches no disk."""
        self.folder = folder
        self._metrics = Tail(folder / METRICS)
        self._events = Tail(folder / EVENTS)
        self._logs: dict[Path, Tail] = {}
        self._records: deque[dict[str, Any]] = deque(maxlen=LAST_RECORDS)
        self._seen: list[RunEvent] = []
        self.warnings: deque[str] = deque(maxlen=LAST_WARNINGS)
        """The last warnings and errors of ranks, with date and rank."""

    def poll(self) -> bool:
        """Read what is new, and return whether there was anything. Raises OSError for a file that cannot be read."""
        records, rewritten = self._metrics.poll()
        if rewritten:  # by a run that resumes, without the steps that it trains again
            self._records.clear()
        self._records.extend(record for record in records if record.get("kind", "train") == "train")
        events, anew = self._events.poll()
        if anew:
            self._seen.clear()
        self._seen.extend(map(RunEvent.of, events))
        return any((records, events, self._poll_logs(), rewritten, anew))

    def _poll_logs(self) -> bool:
        found = []
        for rank in range(MOST_LOGS):
            path = self.folder / "logs" / f"rank-{rank:04d}.jsonl"
            if path not in self._logs:
                if not path.exists():
                    break
                self._logs[path] = Tail(path, 1 << 16)
            for record in self._logs[path].poll()[0]:
                if record.get("level") in LEVELS:
                    date, place = text(record.get("date"), 30), text(record.get("rank"), 10)
                    found.append(f"{date} rank {place}: {text(record.get('message'), 400)}")
        self.warnings.extend(sorted(found))  # by date
        return bool(found)

    @property
    def has_begun(self) -> bool:
        """Whether there is any record or event."""
        return bool(self._records or self._seen)

    def run(self) -> RunFolder:
        """Return the run so far, with the last ``LAST_RECORDS`` steps at most, and the checkpoints of its events."""
        builder = SeriesBuilder()
        for record in self._records:
            builder.add(record)
        holder = training_in(self.folder)
        config, config_text = read_config(self.folder / CONFIG)
        found = tuple(checkpoints_of(self._seen).values())
        path = None if found else latest(self.folder / "checkpoints")
        with contextlib.suppress(FileNotFoundError):  # removed since
            if path is not None:
                found = (SavedCheckpoint(step_of_file(path), str(path), path.stat().st_mtime, present=True),)
        return RunFolder(
            folder=self.folder,
            series=builder.build(),
            events=tuple(self._seen),
            checkpoints=found,
            hangs=read_hangs(self.folder / "hang"),
            holder="" if holder is None else str(holder),
            silent_s=silent_s_of(self.folder),
            config=config,
            config_text=config_text,
        )


BLOCKS = "▁▂▃▄▅▆▇█"
ASCII_BLOCKS = "_.-~=+*#"
_LATEST = 10  # steps over which rates are taken: a view of now
_QUIET_S = 60.0  # without a new step for so long, and for ten steps' time, a view shows the silence


@dataclass(frozen=True)
class View:
    """A running job, now; None where unknown."""

    run: RunFolder  # as far as the view has seen it
    summary: Summary  # of these steps
    straggler: str  # the rank with the longest time in the last step, in words, or ""
    checkpoint_s: float | None  # seconds since the last checkpoint was written
    warnings: tuple[str, ...]  # the latest, in words

    @property
    def has_ended(self) -> bool:
        """Whether the run has recorded its end."""
        return self.summary.status in ("complete", "stopped", "failed", "hung")

    def as_json(self) -> dict[str, object]:
        """Return the facts for programs."""
        hidden = ("best_loss", "best_loss_step", "trained_s", "wall_s", "held_out", "warnings", "errors", "starts")
        facts = {name: value for name, value in dataclasses.asdict(self.summary).items() if name not in hidden}
        return {
            **facts,
            "loss": None if self.run.series.ends_not_finite else facts["loss"],
            "straggler": self.straggler,
            "checkpoint_age_s": self.checkpoint_s,
            "silent_s": self.run.silent_s,
            "warnings": list(self.warnings),
        }


def view_of(run: RunFolder, warnings: Sequence[str], now_s: float) -> View:
    """Return the view of a run with its latest `warnings`, `now_s` seconds since the epoch."""
    series = run.series
    written = max((one.seconds for one in run.checkpoints if math.isfinite(one.seconds)), default=None)
    rank, behind = series.last("straggler.rank"), series.last("straggler.behind_s")
    straggler = ""
    if rank is not None and behind is not None:
        host = shown(series.hosts.get(int(rank), ""))
        straggler = f"rank {int(rank)}{host and f' on {host}'}, {readable_duration(behind)} behind the mean"
    return View(
        run,
        summarize(run, recent=_LATEST),
        straggler,
        checkpoint_s=None if written is None else max(now_s - written, 0.0),
        warnings=tuple(map(shown, warnings)),
    )


def sparkline(values: np.ndarray, width: int, blocks: str = BLOCKS) -> str:
    """Return a curve of at most `width` characters: the mean of equal parts; values that are not finite are an x."""
    parts = np.array_split(values, min(width, len(values))) if len(values) else []
    known = [part[np.isfinite(part)] for part in parts]
    means = [float(part.mean()) if len(part) else math.nan for part in known]
    finite = [mean for mean in means if math.isfinite(mean)]
    low, high = min(finite, default=0.0), max(finite, default=0.0)
    scale = (len(blocks) - 1) / (high - low) if high > low else 0.0
    return "".join(blocks[round((mean - low) * scale)] if math.isfinite(mean) else "x" for mean in means)


def bar(share: float, width: int, blocks: str = BLOCKS) -> str:
    """Return a bar of `width` characters."""
    full = round(width * min(max(share, 0.0), 1.0))
    filled, empty = ("█", "░") if blocks is BLOCKS else ("#", "-")
    return filled * full + empty * (width - full)


def rows_of(view: View, width: int, blocks: str = BLOCKS) -> list[tuple[str, str]]:
    """Return labels and texts, one row each; texts of at most `width` columns but for warnings."""
    facts, series = view.summary, view.run.series
    found = [("status", _status(view))]
    if facts.step is not None:
        row = f"{facts.step:,}"
        if facts.total_steps:
            share = facts.step / facts.total_steps
            left = f", {readable_duration(facts.eta_s)} to go" if facts.eta_s else ""
            full = bar(share, min(24, width - 40), blocks)
            row += f" of {facts.total_steps:,}  {full} {readable_share(share)}{left}"
        found.append(("step", row))
    if facts.loss is not None or series.ends_not_finite:
        text = "not finite" if series.ends_not_finite or facts.loss is None else f"{facts.loss:.4g}"
        found.append(("loss", f"{text:9} {sparkline(series.column('loss'), width - 10, blocks)}"))
    use = "" if facts.flop_utilisation is None else f", {readable_share(facts.flop_utilisation)} of peak"
    waits = "" if facts.comm_share is None else f", {readable_share(facts.comm_share)} waiting for others"
    age = "" if view.checkpoint_s is None else f", {readable_duration(view.checkpoint_s)} ago"
    last, peak = facts.last_checkpoint_step, facts.peak_bytes
    found += [
        (facts.rate_unit, "" if facts.rate is None else f"{readable_count(facts.rate)}{use}"),
        ("a step", "" if facts.step_s is None else f"{readable_duration(facts.step_s)}{waits}"),
        ("slowest", view.straggler),
        ("memory", "" if peak is None else f"{readable_bytes(peak)}, the largest peak over ranks"),
        ("checkpoint", "" if last is None else f"step {last:,}{age}"),
        *(("warning", text) for text in view.warnings),
    ]
    return [(label, text) for label, text in found if text or label == "warning"]


def _status(view: View) -> str:
    facts = view.summary
    where = f", {facts.world_size} ranks" if facts.world_size else ""
    where += f" on {facts.num_nodes} nodes" if facts.num_nodes else ""
    silent_s = view.run.silent_s
    quiet = not view.has_ended and silent_s > max(_QUIET_S, 10 * (facts.step_s or 0.0))
    silent = f", nothing new for {readable_duration(silent_s)}" if quiet else ""
    message = f": {shown(facts.message)}" if facts.message and view.has_ended else ""
    return f"{STATUS[facts.status]}{message}{where}{silent}"


def line_of(view: View) -> str:
    """Return one line, for a log."""
    facts = view.summary
    total = f"/{facts.total_steps}" if facts.total_steps else ""
    loss = "" if facts.loss is None else f"loss {facts.loss:.4{'f' if abs(facts.loss) >= 0.001 else 'g'}}"
    parts = [
        STATUS[facts.status],
        "" if facts.step is None else f"step {facts.step}{total}",
        "loss not finite" if view.run.series.ends_not_finite else loss,
        "" if facts.rate is None else f"{facts.rate:.0f} {facts.rate_unit}",
        "" if facts.comm_share is None else f"waiting {readable_share(facts.comm_share)}",
        "" if facts.peak_bytes is None else f"memory {readable_bytes(facts.peak_bytes)}",
        "" if facts.last_checkpoint_step is None else f"checkpoint {facts.last_checkpoint_step}",
        f"{readable_duration(facts.eta_s)} to go" if facts.eta_s else "",
        shown(facts.message) if facts.message and view.has_ended else "",
    ]
    return ", ".join(filter(None, parts))
