"""The page of a run: one HTML file that needs nothing else, and no JavaScript."""

from __future__ import annotations

import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from hpcfsdp._version import __version__
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.errors import HpcfsdpError, needs_extra
from hpcfsdp.report.problems import Problem
from hpcfsdp.report.run_folder import RunFolder, SavedCheckpoint, flat_config
from hpcfsdp.report.series import Series
from hpcfsdp.report.summary import STATUS, Summary, rate_column, segments
from hpcfsdp.text import safe_files
from hpcfsdp.text.json_input import text
from hpcfsdp.text.terminal import (
    counted,
    readable_bytes,
    readable_count,
    readable_duration,
    readable_share,
    shown,
    shown_lines,
    spans,
)

NEWEST = 10  # checkpoints that are shown at once; the others can be opened
MOST_ROWS = 400
SAMPLES = 25  # rows of the table of numbers by step
_HERE = Path(__file__).parent


@dataclass(frozen=True)
class PageTable:
    """A table of text."""

    label: str
    columns: Sequence[tuple[str, str]]  # their names, and kinds: "number", "date", "nowrap", "prose" or ""
    rows: Sequence[Sequence[str]]

    @property
    def is_prose(self) -> bool:
        """Whether a phone shows each row as a list: its text has no room beside other columns."""
        return any(kind == "prose" for _, kind in self.columns)


def date_of(seconds: float) -> str:
    """Return a date without a time zone, UTC; "" where unknown."""
    try:
        return time.strftime("%Y-%m-%d %H:%M:%S", time.gmtime(seconds))
    except (ValueError, OverflowError, OSError):
        return ""


def start_table(run: RunFolder) -> PageTable:
    """Return the starts of a run, and how each ended."""
    parts, rows = segments(run), []
    for number, part in enumerate(parts, 1):
        start, end = part.start, ""
        if part.end is not None:
            end = ": ".join(filter(None, map(part.end.text, ("outcome", "message"))))
            end += f" ({date_of(part.end.seconds)})" if date_of(part.end.seconds) else ""
        elif start is not None and number < len(parts):
            end = "no record"
        signals = "; ".join(f"signal in step {event.step}: {event.text('reason')}" for event in part.signals)
        size = start.number("world_size") if start else None
        rows.append(
            [
                str(number),
                date_of(start.seconds) if start else "",
                "" if part.first is None else f"{part.first:,}\N{EN DASH}{part.last:,}",
                "" if size is None else f"{size:.0f}",
                start.text("job") if start else "",
                start.text("resumed_from").rpartition("/")[2] if start else "",
                "; ".join(filter(None, (signals, end))),
            ]
        )
    columns = [("start", "number"), ("date", "date"), ("steps", "nowrap"), ("ranks", "number")]
    columns += [("job", ""), ("resumed from", ""), ("end", "prose")]
    return PageTable("Starts and ends", columns, rows[-MOST_ROWS:])


def checkpoint_tables(run: RunFolder) -> tuple[PageTable, PageTable]:
    """Return the newest checkpoints, and older ones."""
    made = [("step", "number"), ("file", "nowrap"), ("size", "number"), ("written", "date")]
    made += [("took", "number"), ("held", "number"), ("data", "nowrap"), ("state", "nowrap")]
    rows = [_checkpoint_row(one) for one in reversed(run.checkpoints)]
    label = f"{counted(len(rows) - NEWEST, 'older checkpoint')}"
    label += f", the newest {MOST_ROWS}" if len(rows) - NEWEST > MOST_ROWS else ""
    return PageTable("Checkpoints", made, rows[:NEWEST]), PageTable(label, made, rows[NEWEST : NEWEST + MOST_ROWS])


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
        "" if one.place is None else f"epoch {one.place[0]}, {counted(one.place[1], 'sample')}",
        state,
    ]


def held_out_table(run: RunFolder) -> PageTable:
    """Return evaluations on held-out data, the last ones."""
    names = list(dict.fromkeys(name for one in run.held_out for name in one.values))[:8]
    columns = [("step", "number"), *((name.replace("_", " "), "number") for name in names)]
    last = reversed(run.held_out[-NEWEST:])
    rows = [[f"{one.step:,}", *(_number(one.values.get(name)) for name in names)] for one in last]
    return PageTable("Held-out data", columns, rows)


def log_table(run: RunFolder) -> PageTable:
    """Return warnings and errors, the latest first."""
    columns = ("level", "nowrap"), ("last", "date"), ("times", "number"), ("ranks", ""), ("message", "prose")
    rows = [
        [
            note.level,
            date_of(note.last),
            f"{note.count:,}",
            spans(note.ranks).replace(",", ", "),
            f"{note.topic}: {note.message}" if note.topic else note.message,
        ]
        for note in reversed(run.notes.notes)
    ]
    return PageTable("Warnings and errors", columns, rows)


def number_table(series: Series) -> PageTable:
    """Return numbers of some steps, equally far apart, the last one among them."""
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
    values = [(series.column(name).tolist(), words) for name, _, words in wanted]
    rows = []
    for place in np.unique(np.linspace(0, len(series) - 1, min(SAMPLES, len(series))).round().astype(int)):
        cells = (words(column[place]) if math.isfinite(column[place]) else "" for column, words in values)
        rows.append([f"{int(series.steps[place]):,}", *cells])
    label = f"Numbers of {len(rows)} steps" if len(rows) < len(series) else "Numbers of all steps"
    return PageTable(label, [("step", "number"), *((name, "number") for _, name, _ in wanted)], rows)


def _number(value: float | None) -> str:
    return "" if value is None or not math.isfinite(value) else f"{value:.5g}"


def environment(run: RunFolder) -> list[tuple[str, str]]:
    """Return where the run was started last: names and values."""
    start = next(iter(reversed(run.events_of("start"))), None)
    if start is None:
        return []
    facts, parameters = start.facts, start.number("parameters")
    found = [
        ("device", start.text("device")),
        ("ranks", start.text("world_size")),
        ("nodes", start.text("num_nodes")),
        ("hosts", _listed(facts.get("hosts"), ", ")),
        ("topology", start.text("topology")),
        ("command", _listed(facts.get("command"), " ")),
        ("job", start.text("job")),
        ("parameters", "" if parameters is None else f"{parameters:,.0f}"),
        ("floating-point operations of a token", _operations(start.number("flops_per_token"))),
        ("peak rate of a rank", _operations(start.number("peak_flops"), "/s")),
    ]
    versions = facts.get("versions")
    if isinstance(versions, dict):
        found += [(text(name, 60), text(value, 200)) for name, value in list(versions.items())[:40]]
    return [(name, value) for name, value in found if value]


def _listed(value: Any, separator: str) -> str:
    return separator.join(text(part, 300) for part in value[:200]) if isinstance(value, list) else text(value)


def _operations(value: float | None, rate: str = "") -> str:
    return "" if not value else f"{readable_count(value)}FLOP{rate}"


def page_of(run: RunFolder, summary: Summary, problems: Sequence[Problem]) -> str:
    """Return the page as text, with the date of now."""
    with needs_extra("cli", "the page of a run"):  # --json needs none
        import jinja2
        from markupsafe import Markup

    from hpcfsdp.report.figures import figures_of  # matplotlib takes half a second, and --json needs none

    def printable(value: Any) -> Any:
        return value if isinstance(value, Markup) or not isinstance(value, str) else shown_lines(value)

    templates = jinja2.Environment(
        loader=jinja2.FileSystemLoader(_HERE),
        autoescape=True,
        undefined=jinja2.StrictUndefined,
        finalize=printable,
        trim_blocks=True,
    )
    templates.filters["printable"] = printable
    templates.globals.update(date_of=date_of, size=readable_bytes, number=readable_count, counted=counted)
    templates.globals.update(duration=readable_duration, share=readable_share)
    checkpoints, older = checkpoint_tables(run)
    sources = " and ".join(f"{tally.sound:,} lines of {name}" for name, tally in run.tallies.items() if tally.sound)
    return templates.get_template("page.html.jinja").render(
        version=__version__,
        css=Markup((_HERE / "page.css").read_text()),
        run=run,
        summary=summary,
        name=shown(os.path.basename(os.path.abspath(run.folder)) or run.folder),
        status_text=STATUS[summary.status],
        place=os.path.abspath(run.folder),
        problems=problems,
        figures=[replace(one, svg=Markup(one.svg)) for one in figures_of(run)],
        numbers=number_table(run.series),
        starts=start_table(run),
        checkpoints=checkpoints,
        older_checkpoints=older,
        held_out=held_out_table(run),
        log=log_table(run),
        config=flat_config(run.config) if run.config else [],
        environment=environment(run),
        made=f"Made by hpcfsdp {__version__} on {date_of(time.time())} UTC from {sources}.",
    )


def write_page(text: str, path: Path) -> None:
    """Write the page at once: who opens the file meanwhile sees the old one or the new one."""
    try:
        safe_files.replace(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise HpcfsdpError(
            f"{path}: cannot be written: {reason(error)}; --out FILE writes the report elsewhere"
        ) from error
