"""Warnings and errors that the ranks of a run have logged: the same one of several ranks once."""

from __future__ import annotations

import math
import os
import re
from collections.abc import Iterable
from dataclasses import dataclass, field
from pathlib import Path

from hpcfsdp.text import json_input, safe_files
from hpcfsdp.text.json_input import number, seconds_of, text

LAST_BYTES = 1 << 20
"""How much of the end of each rank's file is read."""
MOST_FILES = 512
MOST_NOTES = 40
LEVELS = ("CRITICAL", "ERROR", "WARNING")


@dataclass
class LogNote:
    """A warning or an error.

    Attributes:
        first, last: seconds since the epoch; NaN where unknown.
        ranks: that have logged it.
        count: how often, over all ranks.
        traceback: of an error, or "".
    """

    level: str
    topic: str
    message: str
    first: float
    last: float
    ranks: set[int] = field(default_factory=set)
    count: int = 0
    traceback: str = ""


@dataclass(frozen=True)
class LogNotes:
    """The warnings and errors of all ranks.

    Attributes:
        notes: the latest ``MOST_NOTES`` different ones, the latest last.
        counts: lines by level, of all levels.
        different: how many different warnings and errors there are.
        incomplete: why some lines are not counted, or "".
    """

    notes: tuple[LogNote, ...] = ()
    counts: dict[str, int] = field(default_factory=dict)
    different: int = 0
    damaged: int = 0
    incomplete: str = ""


def read_logs(folder: Path) -> LogNotes:
    """Read ``rank-*.jsonl`` of a folder, the last ``LAST_BYTES`` of each; nothing without a folder.

    Raises:
        OSError: a file cannot be read.
    """
    files = sorted(folder.glob("rank-*.jsonl")) if folder.is_dir() else []
    found: dict[tuple[str, str, str], LogNote] = {}
    counts: dict[str, int] = {}
    damaged, cut = 0, 0
    for path in files[:MOST_FILES]:
        lines, whole = _last_lines(path)
        cut += not whole
        for line in lines:
            record = json_input.parse(line, dict)
            if record is None:
                damaged += 1
                continue
            level = text(record.get("level"), 20) or "INFO"
            counts[level] = counts.get(level, 0) + 1
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
    """The last complete lines of a file, and whether these are all."""
    with safe_files.open_to_read(path) as file:
        size = os.fstat(file.fileno()).st_size
        whole = size <= LAST_BYTES
        if not whole:
            file.seek(size - LAST_BYTES)
            file.readline()
        content = file.read(LAST_BYTES)
    return [line for line in content.split(b"\n")[:-1] if line.strip()], whole


def readable_ranks(ranks: Iterable[int]) -> str:
    """{0, 1, 2, 5} -> "0-2, 5"."""
    parts: list[list[int]] = []
    for rank in sorted(ranks):
        if parts and rank == parts[-1][-1] + 1:
            parts[-1][1:] = [rank]
        else:
            parts.append([rank])
    return ", ".join("-".join(map(str, part)) for part in parts)
