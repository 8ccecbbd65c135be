"""The tables and tiles of a run's page: numbers in words. Pure."""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfsdp.report.run_checkpoints import SavedCheckpoint
from hpcfsdp.report.run_folder import Run
from hpcfsdp.report.run_logs import readable_ranks
from hpcfsdp.report.series import Series
from hpcfsdp.report.summary import Segment, Summary, rate_column, segments
from hpcfsdp.text.json_input import text
from hpcfsdp.text.terminal import counted, readable_bytes, readable_count, readable_duration, readable_share

NEWEST = 10
"""Checkpoints that are shown at once; the others can be opened."""
MOST_ROWS = 400
SAMPLES = 25
"""Rows of the table of numbers by step."""


@dataclass(frozen=True)
class Table:
    """A table of text.

    Attributes:
        columns: their names, and kinds: "number", "date", "nowrap", "prose" or "".
    """

    label: str
    columns: Sequence[tuple[str, str]]
    rows: Sequence[Sequence[str]]

    @property
    def is_prose(self) -> bool:
        """Whether a phone shows each row as a list: its text has no room beside other columns."""
        return any(kind == "prose" for _, kind in self.columns)


@dataclass(frozen=True)
class Tile:
    """One fact of the page's head, with a remark below."""

    name: str
    value: str
    more: str = ""


def date_of(seconds: float) -> str:
    """A date without a time zone, UTC; "" where unknown."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def tiles_of(summary: Summary) -> list[Tile]:
    """The facts of the head that are known."""
    found = []
    if summary.step is not None:
        total = f"of {summary.total_steps:,}" if summary.total_steps else ""
        left = f"{readable_duration(summary.eta_s)} to go" if summary.eta_s else ""
        found.append(Tile("Step", f"{summary.step:,}", ", ".join(filter(None, (total, left)))))
    if summary.loss is not None:
        lowest = f"lowest {summary.best_loss:.4g} in step {summary.best_loss_step:,}"
        found.append(Tile("Loss", f"{summary.loss:.4g}", lowest))
    if summary.held_out and "bits_per_byte" in summary.held_out:
        base = summary.held_out.get("unigram_bits_per_byte")
        found.append(
            Tile(
                "Held-out",
                f"{summary.held_out['bits_per_byte']:.3f}",
                "bits per byte" + (f"; unigrams {base:.3f}" if base else ""),
            )
        )
    if summary.rate is not None:
        use = summary.flop_utilisation
        more = summary.rate_unit + (f", {readable_share(use)} of peak" if use else "")
        found.append(Tile("Throughput", readable_count(summary.rate), more))
    if summary.step_s is not None:
        share = summary.comm_share
        waits = f"{readable_share(share)} waiting" if share is not None else ""
        found.append(Tile("Time of a step", readable_duration(summary.step_s), waits))
    if summary.peak_bytes is not None:
        found.append(Tile("Peak memory", readable_bytes(summary.peak_bytes), "largest rank"))
    if summary.wall_s or summary.trained_s:
        trained = f"{readable_duration(summary.trained_s)} in steps" if summary.trained_s else ""
        whole = summary.wall_s or summary.trained_s or 0.0
        found.append(Tile("Time", readable_duration(whole), trained if summary.wall_s else "in steps"))
    if summary.world_size:
        nodes = counted(summary.num_nodes, "node") if summary.num_nodes else ""
        where = ", ".join(filter(None, (nodes, summary.device)))
        found.append(Tile("Ranks", f"{summary.world_size:,}", where))
    if summary.parameters:
        found.append(Tile("Parameters", readable_count(summary.parameters)))
    last = summary.last_checkpoint_step
    found.append(Tile("Checkpoints", f"{summary.checkpoints:,}", "" if last is None else f"last in step {last:,}"))
    found.append(Tile("Starts", f"{summary.starts:,}", counted(summary.signals, "signal") if summary.signals else ""))
    return found


def start_table(run: Run) -> Table | None:
    """The starts of a run, and how each ended."""
    parts = segments(run)
    if not parts:
        return None
    columns = [("start", "number"), ("date", "date"), ("steps", "nowrap"), ("ranks", "number")]
    columns += [("job", ""), ("resumed from", ""), ("end", "prose")]
    rows = [_start_row(number, part, number == len(parts)) for number, part in enumerate(parts, 1)]
    return Table("Starts and ends", columns, rows[-MOST_ROWS:])


def _start_row(number: int, part: Segment, is_last: bool) -> list[str]:
    start = part.start
    steps = "" if part.first is None else f"{part.first:,}\N{EN DASH}{part.last:,}"
    size = start.number("world_size") if start else None
    end = ""
    if part.end is not None:
        end = ": ".join(filter(None, map(part.end.text, ("outcome", "message"))))
        end += f" ({date_of(part.end.seconds)})" if date_of(part.end.seconds) else ""
    elif start is not None and not is_last:
        end = "no record"
    signals = "; ".join(f"signal in step {event.step}: {event.text('reason')}" for event in part.signals)
    path = start.text("resumed_from") if start else ""
    return [
        str(number),
        date_of(start.seconds) if start else "",
        steps,
        "" if size is None else f"{size:.0f}",
        start.text("job") if start else "",
        path.rpartition("/")[2],
        "; ".join(filter(None, (signals, end))),
    ]


def checkpoint_tables(run: Run) -> tuple[Table | None, Table | None]:
    """The newest checkpoints, and older ones."""
    if not run.checkpoints:
        return None, None
    made = [("step", "number"), ("file", "nowrap"), ("size", "number"), ("written", "date")]
    made += [("took", "number"), ("held", "number"), ("state", "nowrap")]
    rows = [_checkpoint_row(one) for one in reversed(run.checkpoints)]
    older = rows[NEWEST : NEWEST + MOST_ROWS]
    label = f"{counted(len(rows) - NEWEST, 'older checkpoint')}"
    label += f", the newest {MOST_ROWS}" if len(rows) - NEWEST > MOST_ROWS else ""
    return Table("Checkpoints", made, rows[:NEWEST]), Table(label, made, older) if older else None


def _checkpoint_row(one: SavedCheckpoint) -> list[str]:
    state = "cannot be loaded" if one.fault else "here" if one.present else "not here"
    state += f", of {counted(one.world_size, 'rank')}" if one.world_size and not one.fault else ""
    return [
        f"{one.step:,}",
        one.path.rpartition("/")[2],
        "" if one.nbytes is None else readable_bytes(one.nbytes),
        date_of(one.seconds),
        "" if one.took_s is None else readable_duration(one.took_s),
        "" if one.held_s is None else readable_duration(one.held_s),
        state,
    ]


def held_out_table(run: Run) -> Table | None:
    """Evaluations on held-out data, the last ones."""
    if not run.held_out:
        return None
    names = list(dict.fromkeys(name for one in run.held_out for name in one.values))[:8]
    columns = [("step", "number"), *((name.replace("_", " "), "number") for name in names)]
    rows = [
        [f"{one.step:,}", *(_number(one.values.get(name)) for name in names)]
        for one in reversed(run.held_out[-NEWEST:])
    ]
    return Table("Held-out data", columns, rows)


def log_table(run: Run) -> Table | None:
    """Warnings and errors, the latest first."""
    if not run.notes.notes:
        return None
    columns = ("level", "nowrap"), ("last", "date"), ("times", "number"), ("ranks", ""), ("message", "prose")
    rows = [
        [
            note.level,
            date_of(note.last),
            f"{note.count:,}",
            readable_ranks(note.ranks),
            f"{note.topic}: {note.message}" if note.topic else note.message,
        ]
        for note in reversed(run.notes.notes)
    ]
    return Table("Warnings and errors", columns, rows)


def number_table(series: Series) -> Table | None:
    """Numbers of some steps, equally far apart, the last one among them."""
    if not len(series):
        return None
    rate, unit = rate_column(series)
    wanted: list[tuple[str, str, Any]] = [
        ("loss", "loss", _number),
        ("grad_norm", "gradient norm", _number),
        ("lr", "lr", _number),
        ("seconds", "time", readable_duration),
        (rate, unit, readable_count),
        ("comm_share", "communication", readable_share),
        ("memory.peak_bytes", "peak memory", readable_bytes),
        *((name, name, _number) for name in series.others[:6]),
    ]
    wanted = [one for one in wanted if series.has(one[0])]
    places = np.unique(np.linspace(0, len(series) - 1, min(SAMPLES, len(series))).round().astype(int))
    values = [series.column(name) for name, _, _ in wanted]
    rows = [
        [
            f"{int(series.steps[place]):,}",
            *(
                words(float(column[place])) if math.isfinite(column[place]) else ""
                for column, (_, _, words) in zip(values, wanted, strict=True)
            ),
        ]
        for place in places
    ]
    label = f"Numbers of {len(rows)} steps" if len(rows) < len(series) else "Numbers of all steps"
    return Table(label, [("step", "number"), *((name, "number") for _, name, _ in wanted)], rows)


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.5g}"


def environment(run: Run) -> list[tuple[str, str]]:
    """Where the run was started last: names and values."""
    start = next(iter(reversed(run.events_of("start"))), None)
    if start is None:
        return []
    facts = start.facts
    found = [
        ("device", start.text("device")),
        ("ranks", start.text("world_size")),
        ("nodes", start.text("num_nodes")),
        ("hosts", _listed(facts.get("hosts"), ", ")),
        ("topology", start.text("topology")),
        ("command", _listed(facts.get("command"), " ")),
        ("job", start.text("job")),
        ("parameters", _whole(start.number("parameters"))),
        ("floating-point operations of a token", _operations(start.number("flops_per_token"))),
        ("peak rate of a rank", _operations(start.number("peak_flops"), "/s")),
    ]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        found += [(text(name, 60), text(value, 200)) for name, value in list(versions.items())[:40]]
    return [(name, value) for name, value in found if value]


def _listed(value: Any, separator: str) -> str:
    return separator.join(text(part, 300) for part in value[:200]) if isinstance(value, list) else text(value)


def _whole(value: float | None) -> str:
    return "" if value is None else f"{value:,.0f}"


def _operations(value: float | None, rate: str = "") -> str:
    return "" if not value else f"{readable_count(value)}FLOP{rate}"
