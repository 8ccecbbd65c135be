"""The page of a run: one HTML file that needs nothing else, and no JavaScript."""

from __future__ import annotations

import os
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp._version import __version__
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.errors import HpcfsdpError, needs_extra
from hpcfsdp.report.drawing import Figure
from hpcfsdp.report.page_tables import (
    checkpoint_tables,
    date_of,
    environment,
    held_out_table,
    log_table,
    number_table,
    start_table,
    tiles_of,
)
from hpcfsdp.report.problems import Problem
from hpcfsdp.report.run_folder import Run, flat_config
from hpcfsdp.report.summary import STATUS, Summary, segments
from hpcfsdp.text import safe_files
from hpcfsdp.text.terminal import shown, shown_lines

SEVERITIES = {"bad": "Problem", "warning": "Warning", "note": "Note"}
_HERE = Path(__file__).parent


def render(run: Run, summary: Summary, problems: Sequence[Problem], figures: Sequence[Figure], made_s: float) -> str:
    """The page as text.

    Args:
        made_s: now, seconds since the epoch.
    """
    with needs_extra("cli", "the page of a run"):  # --json needs none
        import jinja2
        from markupsafe import Markup

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
    checkpoints, older = checkpoint_tables(run)
    sources = " and ".join(f"{tally.sound:,} lines of {name}" for name, tally in run.tallies.items() if tally.sound)
    sections = [
        ("findings", "Findings", True),
        ("figures", "Figures", True),
        ("starts", "Starts and ends", bool(segments(run))),
        ("checkpoints", "Checkpoints", True),
        ("held-out", "Held-out data", bool(run.held_out)),
        ("log", "Warnings and errors", True),
        ("hangs", "Hang reports", bool(run.hangs)),
        ("configuration", "Configuration", bool(run.config or run.config_text)),
        ("environment", "Environment", bool(environment(run))),
    ]
    done, total = summary.step, summary.total_steps
    return templates.get_template("page.html.jinja").render(
        version=__version__,
        css=Markup((_HERE / "page.css").read_text()),
        name=name_of(run.folder),
        status=summary.status,
        status_text=STATUS[summary.status],
        place=os.path.abspath(run.folder),
        message=summary.message if summary.status in ("stopped", "running") else "",
        progress=None if done is None or not total else round(100 * min(done / total, 1)),
        tiles=tiles_of(summary),
        sections=[(anchor, title) for anchor, title, there in sections if there],
        problems=problems,
        severities=SEVERITIES,
        figures=[_Drawn(one.name, one.title, one.caption, Markup(one.svg)) for one in figures],
        key=_key(run),
        numbers=number_table(run.series),
        starts=start_table(run),
        checkpoints=checkpoints,
        older_checkpoints=older,
        held_out=held_out_table(run),
        log=log_table(run),
        log_note=_log_note(run),
        tracebacks=[
            {"title": f"Traceback: {note.message[:100]}", "text": note.traceback}
            for note in reversed(run.notes.notes)
            if note.traceback
        ],
        hangs=[
            {"title": f"{hang.path.name}, {date_of(hang.seconds)}", "head": hang.head, "text": hang.text}
            for hang in reversed(run.hangs)
        ],
        config=flat_config(run.config) if run.config else [],
        config_text=run.config_text,
        environment=environment(run),
        made=f"Made by hpcfsdp {__version__} on {date_of(made_s)} UTC from {sources}.",
    )


@dataclass(frozen=True)
class _Drawn:
    name: str
    title: str
    caption: str
    svg: Any


def name_of(folder: Path) -> str:
    """What a run is called: its folder."""
    return shown(os.path.basename(os.path.abspath(folder)) or folder)


def _key(run: Run) -> str:
    parts = []
    if len(segments(run)) > 1:
        parts.append("Vertical dashes: restarts.")
    if run.checkpoints:
        parts.append("Ticks on the axis: checkpoints.")
    return " ".join(parts)


def _log_note(run: Run) -> str:
    notes = run.notes
    parts = []
    if notes.different > len(notes.notes):
        parts.append(f"The latest {len(notes.notes)} of {notes.different} different ones.")
    if notes.incomplete:
        parts.append(f"{notes.incomplete[0].upper()}{notes.incomplete[1:]}.")
    if notes.damaged:
        parts.append(f"{notes.damaged} damaged line(s) are left out.")
    return " ".join(parts)


def write_page(text: str, path: Path) -> None:
    """Write the page at once: who opens the file meanwhile sees the old one or the new one.

    Raises:
        HpcfsdpError: it cannot be written.
    """
    try:
        safe_files.replace(path, text.encode(errors="backslashreplace"))
    except OSError as error:
        raise HpcfsdpError(
            f"{path}: cannot be written: {reason(error)}; --out FILE writes the report elsewhere"
        ) from error


def page_of(run: Run, summary: Summary, problems: Sequence[Problem]) -> str:
    """The page of a run, now; see ``render``."""
    from hpcfsdp.report.figures import figures_of  # matplotlib takes half a second, and --json needs none

    return render(run, summary, problems, figures_of(run), time.time())
