"""Reads the folder of a run: numbers by step, events, checkpoints, warnings, hang reports, configuration.

Everything may be missing but records or events. A damaged line is counted, and never fatal.
"""

from __future__ import annotations

import contextlib
import math
import os
import time
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.errors import HpcfsdpError, UsageError, needs_extra
from hpcfsdp.hang import report as hang_report
from hpcfsdp.launch.lock import training_in
from hpcfsdp.report.run_checkpoints import SavedCheckpoint, find_checkpoints
from hpcfsdp.report.run_events import Event, read_events
from hpcfsdp.report.run_logs import LogNotes, read_logs
from hpcfsdp.report.series import Series, SeriesBuilder
from hpcfsdp.text import safe_files
from hpcfsdp.text.json_input import Tally, number, records, step_of, text

METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "config.yaml"
_LARGEST_CONFIG = 1 << 18
_LARGEST_HANG = 1 << 16
_MOST_HANGS = 5


@dataclass(frozen=True)
class HeldOut:
    """An evaluation on held-out data: its step, and its numbers by name."""

    step: int
    values: Mapping[str, float]


@dataclass(frozen=True)
class HangReport:
    """A report about ranks that wait for each other: the file, when it was written, its head, and its text."""

    path: Path
    seconds: float
    head: str
    text: str


@dataclass(frozen=True)
class Run:
    """What a run has left in its folder.

    Attributes:
        holder: the training that runs in the folder now, in words; "" without one.
        tallies: lines by file, of metrics and events.
        silent_s: seconds since records or events were written.
        config: the configuration, nested; None where there is none, or none that can be read.
        config_text: of its file, when `config` is None.
    """

    folder: Path
    series: Series
    held_out: tuple[HeldOut, ...]
    events: tuple[Event, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    notes: LogNotes
    hangs: tuple[HangReport, ...]
    holder: str
    tallies: Mapping[str, Tally]
    silent_s: float
    config: Mapping[str, Any] | None = None
    config_text: str = ""
    unreadable: tuple[str, ...] = field(default=())
    """Parts of the folder that could not be read, with the reason."""

    def events_of(self, kind: str) -> list[Event]:
        """Events of a kind, the first one first."""
        return [event for event in self.events if event.kind == kind]


def read_run(folder: Path) -> Run:
    """Read the folder of a run; not collective. Never reads tensors.

    Raises:
        UsageError: there is no such folder, or it is a file.
        HpcfsdpError: it cannot be read, or holds neither records nor events.
    """
    check_folder(folder)
    tallies = {name: Tally() for name in (METRICS, EVENTS)}
    try:
        series, held_out = _read_metrics(folder / METRICS, tallies[METRICS])
        events = read_events(folder / EVENTS, tallies[EVENTS])
    except OSError as error:
        raise HpcfsdpError(
            f"{error.filename or folder}: cannot be read: {reason(error)}; only who may read this file can make a "
            "report"
        ).of_kind("permission" if isinstance(error, PermissionError) else "unreadable") from error
    if not len(series) and not events:
        raise nothing_in(folder, tallies.values())
    failures: list[str] = []
    config, config_text = _guarded(failures, CONFIG, (None, ""), read_config, folder / CONFIG)
    holder = training_in(folder)
    return Run(
        folder=folder,
        series=series,
        held_out=held_out,
        events=events,
        checkpoints=_guarded(failures, "checkpoints", (), find_checkpoints, folder, events),
        notes=_guarded(failures, "logs", LogNotes(), read_logs, folder / "logs"),
        hangs=_guarded(failures, "hang", (), read_hangs, folder / "hang"),
        holder="" if holder is None else str(holder),
        tallies=tallies,
        silent_s=silent_s_of(folder),
        config=config,
        config_text=config_text,
        unreadable=tuple(failures),
    )


def check_folder(folder: Path) -> None:
    """Check that a folder is there; raises UsageError or HpcfsdpError, see ``read_run``."""
    try:
        os.stat(folder)
        if not os.path.isdir(folder):
            raise UsageError(f"{folder} is a file: give the folder of a run, in which there is {METRICS}")
        os.listdir(folder)
    except FileNotFoundError:
        raise UsageError(
            f"{folder}: there is no such folder: give the run_dir of a training, in which there is {METRICS}"
        ) from None
    except OSError as error:
        raise HpcfsdpError(
            f"{folder}: cannot be read: {reason(error)}; only who may read this folder can make a report"
        ).of_kind("permission" if isinstance(error, PermissionError) else "unreadable") from error


def nothing_in(folder: Path, tallies: Iterable[Tally] = ()) -> HpcfsdpError:
    """The error about a folder without any record or event, after its lines were read."""
    return HpcfsdpError(_what_is_in(folder, [tally for tally in tallies if tally.damaged])).of_kind("missing")


def _what_is_in(folder: Path, damaged: Sequence[Tally]) -> str:
    if damaged:
        return (
            f"{folder}: no record can be read: {sum(tally.damaged for tally in damaged)} line(s) of {METRICS} and "
            f"{EVENTS} are damaged, the first one is line {damaged[0].first_damaged}. A training that "
            "goes on in this folder writes new ones"
        )
    runs = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if runs:
        some = ", ".join(runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
        return f"{folder}: is not the folder of a run, but has folders of runs in it ({some}): give one of them"
    return (
        f"{folder}: no step has been recorded: {METRICS} and {EVENTS} are missing or empty. hpcfsdp train writes them "
        "after its first step into its run_dir"
    )


def _guarded(failures: list[str], what: str, instead: Any, function: Any, *arguments: Any) -> Any:
    """What a function returns; where the disk refuses, `instead`, and a note among the failures."""
    try:
        return function(*arguments)
    except OSError as error:
        failures.append(f"{what}: {reason(error)}")
        return instead


def _read_metrics(path: Path, tally: Tally) -> tuple[Series, tuple[HeldOut, ...]]:
    builder, held_out = SeriesBuilder(), {}
    for record in records(path, tally):
        kind = record.get("kind", "train")
        if kind == "held_out":
            step = step_of(record)
            if step is not None:
                values = {name: number(value) for name, value in record.items() if name not in ("step", "kind")}
                held_out[step] = HeldOut(step, {name: value for name, value in values.items() if not math.isnan(value)})
                continue
        elif kind != "train" or builder.add(record):
            continue
        tally.damaged += 1  # JSON, but no record of a step
        tally.sound -= 1
        tally.first_damaged = tally.first_damaged or tally.sound + tally.damaged
    return builder.build(), tuple(held_out[step] for step in sorted(held_out))


def silent_s_of(folder: Path) -> float:
    """Seconds since records or events were written in the folder of a run."""
    written = []
    for name in (METRICS, EVENTS):
        with contextlib.suppress(FileNotFoundError):
            written.append(os.stat(folder / name).st_mtime)
    return time.time() - max(written, default=0.0)


def read_config(path: Path) -> tuple[dict[str, Any] | None, str]:
    """The configuration of a run, and the text of its file where that is no configuration."""
    try:
        with safe_files.open_to_read(path) as file:
            content = file.read(_LARGEST_CONFIG).decode(errors="replace")
    except FileNotFoundError:
        return None, ""
    with needs_extra("cli", "a configuration"):
        import yaml
    try:
        # Of a few lists that name each other, all that follows would never end.
        has_aliases = any(isinstance(event, yaml.AliasEvent) for event in yaml.parse(content, yaml.SafeLoader))
        found = None if has_aliases else yaml.safe_load(content)
    except (yaml.YAMLError, RecursionError, ValueError):
        found = None
    return (found, "") if isinstance(found, dict) else (None, content)


def read_hangs(folder: Path) -> tuple[HangReport, ...]:
    """The latest reports about hangs in a folder; none without one."""
    if not folder.is_dir():
        return ()
    dated = sorted((path.stat().st_mtime, path) for path in folder.glob("*.txt"))
    found = []
    for seconds, path in dated[-_MOST_HANGS:]:
        with safe_files.open_to_read(path) as file:
            content = file.read(_LARGEST_HANG).decode(errors="replace")
        found.append(HangReport(path, seconds, hang_report.head(content), content))
    return tuple(found)


def total_steps(config: Mapping[str, Any] | None) -> int | None:
    """How many steps the configuration of ``hpcfsdp train`` asks for; None where it does not say."""
    train: Any = (config or {}).get("train")
    steps = number(train.get("steps")) if isinstance(train, dict) else number((config or {}).get("steps"))
    return int(steps) if steps > 0 else None


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, str]]:
    """Keys with dots, and values as text."""
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value and prefix.count(".") < 8:
            found += flat_config(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", text(value, 500)))
    return found
