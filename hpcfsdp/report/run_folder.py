"""Reads the folder of a run: numbers by step, events, checkpoints, warnings, hang reports, configuration.

Everything may be missing but records or events. A damaged line is counted, and never fatal.
"""

from __future__ import annotations

import contextlib
import math
import os
import re
import time
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.catalog import checkpoint_files, step_of as step_of_file
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.errors import CheckpointError, HpcfsdpError, UsageError, needs_extra
from hpcfsdp.hang import report as hang_report
from hpcfsdp.launch.lock import training_in
from hpcfsdp.report.series import Series, SeriesBuilder
from hpcfsdp.text import json_input, safe_files
from hpcfsdp.text.json_input import Tally, number, records, seconds_of, step_of, text

METRICS, EVENTS, CONFIG = "metrics.jsonl", "events.jsonl", "config.yaml"
MOST_OPENED = 10  # how many of the newest checkpoints are opened for their facts
LAST_BYTES = 1 << 20  # how much of the end of each rank's log is read
MOST_FILES = 512
MOST_NOTES = 40
LEVELS = ("CRITICAL", "ERROR", "WARNING")
_LARGEST_CONFIG = 1 << 18
_LARGEST_HANG = 1 << 16
_MOST_HANGS = 5


@dataclass(frozen=True)
class RunEvent:
    """A line of events.jsonl."""

    kind: str  # "start", "checkpoint", "signal", "end", or another
    seconds: float  # when, seconds since the epoch; NaN where unknown
    step: int | None  # the last step that was done, or None
    facts: Mapping[str, Any]  # the whole record

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> RunEvent:
        """Return the event of a record."""
        return cls(text(record.get("kind")), seconds_of(record.get("date")), step_of(record), record)

    def text(self, name: str) -> str:
        """Return a fact as text, "" without it."""
        return text(self.facts.get(name))

    def number(self, name: str) -> float | None:
        """Return a fact as a number, None without it."""
        found = number(self.facts.get(name))
        return None if math.isnan(found) else found


@dataclass(frozen=True)
class SavedCheckpoint:
    """A checkpoint that a run has written."""

    step: int
    path: str  # as the event has it, or in the run's folder
    seconds: float = math.nan  # when it was written, seconds since the epoch; NaN where unknown
    nbytes: int | None = None  # None where unknown
    took_s: float | None = None  # None where unknown
    held_s: float | None = None  # how long training was held for it; None where unknown
    asynchronous: bool | None = None
    present: bool = False  # whether the file is there
    world_size: int | None = None  # ranks that wrote it; None where the file was not opened
    place: tuple[int, int] | None = None  # the epoch and its samples that it was trained on; None where unknown
    fault: str = ""  # why it cannot be loaded, or "". Only the newest files are opened, and no tensors are read.


def find_checkpoints(folder: Path, events: Iterable[RunEvent]) -> tuple[SavedCheckpoint, ...]:
    """Return the checkpoints of a run by step; one file for each path, as in its last event."""
    found = checkpoints_of(events, folder)
    for path in checkpoint_files(folder / "checkpoints"):
        try:
            status = path.stat()
        except FileNotFoundError:  # removed since, by a training that keeps the last ones
            continue
        known = found.get(path.name, SavedCheckpoint(step_of_file(path), str(path), status.st_mtime))
        found[path.name] = replace(known, nbytes=known.nbytes or status.st_size, present=True, path=str(path))
    ordered = sorted(found.values(), key=lambda one: (one.step, 0.0 if math.isnan(one.seconds) else one.seconds))
    present = [place for place, one in enumerate(ordered) if one.present]
    for place in present[-MOST_OPENED:]:
        one = ordered[place]
        try:
            info = open_index(_where(folder, one.path)).info
        except CheckpointError as error:
            ordered[place] = replace(one, fault=str(error))
            continue
        written = seconds_of(info.date) if math.isnan(one.seconds) else one.seconds
        ordered[place] = replace(one, world_size=info.world_size, seconds=written, place=info.place)
    return tuple(ordered)


def checkpoints_of(events: Iterable[RunEvent], folder: Path | None = None) -> dict[str, SavedCheckpoint]:
    """Return the checkpoints of events by file name, which runs that moved keep: one for each, as in its last event.

    With the `folder` of the run, look whether each file is there.
    """
    found: dict[str, SavedCheckpoint] = {}
    for event in events:
        if event.kind == "checkpoint" and event.step is not None:
            nbytes, name = event.number("bytes"), event.text("path")
            found[os.path.basename(name) or f"step {event.step}"] = SavedCheckpoint(
                step=event.step,
                path=name,
                seconds=event.seconds,
                nbytes=None if nbytes is None else int(nbytes),
                took_s=event.number("seconds"),
                held_s=event.number("held_s"),
                asynchronous=event.facts.get("asynchronous"),
                present=folder is not None and bool(name) and _where(folder, name).is_file(),
            )
    return found


def _where(folder: Path, path: str) -> Path:
    """Return the file itself, or that of its name in the run's folder, which may have been copied."""
    here = folder / "checkpoints" / os.path.basename(path)
    return Path(path) if os.path.isfile(path) or not here.is_file() else here


@dataclass
class LogNote:
    """A warning or an error."""

    level: str
    topic: str
    message: str
    first: float  # seconds since the epoch; NaN where unknown
    last: float  # the same
    ranks: set[int] = field(default_factory=set)  # that have logged it
    count: int = 0  # how often, over all ranks
    traceback: str = ""  # of an error, or ""


@dataclass(frozen=True)
class LogNotes:
    """The warnings and errors of all ranks."""

    notes: tuple[LogNote, ...] = ()  # the latest ``MOST_NOTES`` different ones, the latest last
    counts: dict[str, int] = field(default_factory=dict)  # lines by level, of all levels
    different: int = 0  # how many different warnings and errors there are
    damaged: int = 0
    incomplete: str = ""  # why some lines are not counted, or ""


def read_logs(folder: Path) -> LogNotes:
    """Read ``rank-*.jsonl`` of a folder, the last ``LAST_BYTES`` of each; nothing without a folder."""
    files = sorted(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
    found: dict[tuple[str, str, str], LogNote] = {}
    counts: Counter[str] = Counter()
    damaged = cut = 0
    for path in files[:MOST_FILES]:
        lines, whole = _last_lines(path)
        cut += not whole
        for line in lines:
            record = json_input.parse(line, dict)
            if record is None:
                damaged += 1
                continue
            level = text(record.get("level"), 20) or "INFO"
            counts[level] += 1
            if level in LEVELS:
                _note(found, level, record)
    parts = [f"of {cut} long file(s) only the end was read"] if cut else []
    if len(files) > MOST_FILES:
        parts.append(f"only those of the first {MOST_FILES} of {len(files)} ranks were read")
    ordered = sorted(found.values(), key=lambda note: 0.0 if math.isnan(note.last) else note.last)
    return LogNotes(tuple(ordered[-MOST_NOTES:]), counts, len(found), damaged, ", and ".join(parts))


def _note(found: dict[tuple[str, str, str], LogNote], level: str, record: dict[str, object]) -> None:
    topic = text(record.get("topic"), 100).removeprefix("hpcfsdp").lstrip(".")
    message, seconds = text(record.get("message")), seconds_of(record.get("date"))
    # One warning at several steps, or of several processes, has other numbers in it.
    key = level, topic, re.sub(r"\d+(\.\d+)?", "#", message)
    note = found.setdefault(key, LogNote(level, topic, message, seconds, seconds))
    note.count += 1
    note.message, note.last = message, seconds
    note.traceback = text(record.get("traceback"), 4000) or note.traceback
    rank = number(record.get("rank"))
    if not math.isnan(rank):
        note.ranks.add(int(rank))


def _last_lines(path: Path) -> tuple[list[bytes], bool]:
    """Return the last complete lines of a file, and whether these are all."""
    with safe_files.open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size <= LAST_BYTES
        if not whole:
            file.seek(size - LAST_BYTES)
            file.readline()
        content = file.read(LAST_BYTES)
    return [line for line in content.split(b"\n")[:-1] if line.strip()], whole


@dataclass(frozen=True)
class Evaluation:
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
class RunFolder:
    """What a run has left in its folder."""

    folder: Path
    series: Series
    events: tuple[RunEvent, ...]
    checkpoints: tuple[SavedCheckpoint, ...]
    hangs: tuple[HangReport, ...]
    holder: str  # the training that runs in the folder now, in words; "" without one
    silent_s: float  # seconds since records or events were written
    held_out: tuple[Evaluation, ...] = ()
    notes: LogNotes = LogNotes()
    tallies: Mapping[str, Tally] = field(default_factory=dict)  # lines by file, of metrics and events
    # the configuration, nested; None where there is none, or none that can be read
    config: Mapping[str, Any] | None = None
    config_text: str = ""  # of its file, when `config` is None
    unreadable: tuple[str, ...] = ()  # parts of the folder that could not be read, with the reason

    def events_of(self, kind: str) -> list[RunEvent]:
        """Return the events of a kind, the first one first."""
        return [event for event in self.events if event.kind == kind]


def read_run(folder: Path) -> RunFolder:
    """Read the folder of a run; not collective. Never reads tensors."""
    check_folder(folder)
    tallies = {name: Tally() for name in (METRICS, EVENTS)}
    try:
        series, held_out = _read_metrics(folder / METRICS, tallies[METRICS])
        events = tuple(map(RunEvent.of, records(folder / EVENTS, tallies[EVENTS])))
    except OSError as error:
        raise _unreadable(error.filename or folder, error, "file") from error
    if not len(series) and not events:
        raise nothing_in(folder, tallies.values())
    failures: list[str] = []
    config, config_text = _guarded(failures, CONFIG, (None, ""), read_config, folder / CONFIG)
    holder = training_in(folder)
    return RunFolder(
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
    """Check that a folder is there. Raises UsageError or HpcfsdpError as ``read_run``."""
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
        raise _unreadable(folder, error, "folder") from error


def _unreadable(path: str | Path, error: OSError, kind: str) -> HpcfsdpError:
    return HpcfsdpError(
        f"{path}: cannot be read: {reason(error)}; only who may read this {kind} can make a report"
    ).of_kind("permission" if isinstance(error, PermissionError) else "unreadable")


def nothing_in(folder: Path, tallies: Iterable[Tally] = ()) -> HpcfsdpError:
    """Return the error about a folder without any record or event, after its lines were read."""
    damaged = [tally for tally in tallies if tally.damaged]
    runs = sorted(path.parent.name for path in folder.glob(f"*/{METRICS}"))
    if damaged:
        found = (
            f"no record can be read: {sum(tally.damaged for tally in damaged)} line(s) of {METRICS} and {EVENTS} are "
            f"damaged, the first one is line {damaged[0].first_damaged}. A training that goes on in this folder writes "
            "new ones"
        )
    elif runs:
        some = ", ".join(runs[:5]) + (f" and {len(runs) - 5} more" if len(runs) > 5 else "")
        found = f"is not the folder of a run, but has folders of runs in it ({some}): give one of them"
    else:
        found = (
            f"no step has been recorded: {METRICS} and {EVENTS} are missing or empty. hpcfsdp train writes them after "
            "its first step into its run_dir"
        )
    return HpcfsdpError(f"{folder}: {found}").of_kind("missing")


def _guarded(failures: list[str], what: str, instead: Any, function: Any, *arguments: Any) -> Any:
    """Return what a function returns; where the disk refuses, `instead`, and a note among the failures."""
    try:
        return function(*arguments)
    except OSError as error:
        failures.append(f"{what}: {reason(error)}")
        return instead


def _read_metrics(path: Path, tally: Tally) -> tuple[Series, tuple[Evaluation, ...]]:
    builder, held_out = SeriesBuilder(), {}
    for record in records(path, tally):
        kind = record.get("kind", "train")
        if kind == "held_out":
            step = step_of(record)
            if step is not None:
                values = {name: number(value) for name, value in record.items() if name not in ("step", "kind")}
                known = {name: value for name, value in values.items() if not math.isnan(value)}
                held_out[step] = Evaluation(step, known)
                continue
        elif kind != "train" or builder.add(record):
            continue
        tally.damaged += 1  # JSON, but no record of a step
        tally.sound -= 1
        tally.first_damaged = tally.first_damaged or tally.sound + tally.damaged
    return builder.build(), tuple(held_out[step] for step in sorted(held_out))


def silent_s_of(folder: Path) -> float:
    """Return seconds since records or events were written in the folder of a run."""
    written = []
    for name in (METRICS, EVENTS):
        with contextlib.suppress(FileNotFoundError):
            written.append(os.stat(folder / name).st_mtime)
    return time.time() - max(written, default=0.0)


def read_config(path: Path) -> tuple[dict[str, Any] | None, str]:
    """Return the configuration of a run, and the text of its file where that is no configuration."""
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
    """Return the latest reports about hangs in a folder; none without one."""
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
    """Return how many steps the configuration of ``hpcfsdp train`` asks for; None where it does not say."""
    train: Any = (config or {}).get("train")
    steps = number(train.get("steps")) if isinstance(train, dict) else number((config or {}).get("steps"))
    return int(steps) if steps > 0 else None


def flat_config(config: Mapping[str, Any], prefix: str = "") -> Sequence[tuple[str, str]]:
    """Return keys with dots, and values as text."""
    found: list[tuple[str, str]] = []
    for key, value in config.items():
        if isinstance(value, dict) and value and prefix.count(".") < 8:
            found += flat_config(value, f"{prefix}{key}.")
        else:
            found.append((f"{prefix}{key}", text(value, 500)))
    return found
