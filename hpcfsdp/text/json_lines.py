"""Files of JSON lines that another process may be writing: damaged lines are counted, an incomplete last line waits."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any, BinaryIO

from hpcfsdp.text import json_shapes, safe_files

LONGEST_LINE = 1 << 20
"""Bytes of a line that is read as one; what is longer is damaged."""


@dataclass
class Tally:
    """Lines of a file so far.

    Attributes:
        sound, damaged: lines that are JSON objects, and others; empty lines are neither.
        first_damaged: the number of the first damaged line, from 1; 0 without one.
    """

    sound: int = 0
    damaged: int = 0
    first_damaged: int = 0


def records(path: Path, tally: Tally | None = None) -> Iterator[dict[str, Any]]:
    """The objects of a file's lines; none where there is no file. Counts lines in `tally`.

    Raises:
        OSError: the file cannot be read, see ``safe_files.open_to_read``.
    """
    return (record for _, record in lines(path, tally))


def lines(path: Path, tally: Tally | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """As ``records``, each with the bytes of its line."""
    try:
        file = safe_files.open_to_read(path)
    except FileNotFoundError:
        return
    tally = tally or Tally()
    with file:
        number = 0
        for line, complete in _lines(file):
            number += 1
            if not line.strip():
                continue
            record = json_shapes.parse(line, dict)
            if record is not None:
                tally.sound += 1
                yield line, record
            elif complete:
                tally.damaged += 1
                tally.first_damaged = tally.first_damaged or number


def _lines(file: BinaryIO) -> Iterator[tuple[bytes, bool]]:
    """Lines, and whether they are complete: the last one may be written right now. Of a longer line its beginning."""
    while line := file.readline(LONGEST_LINE):
        rest = line
        while rest and not rest.endswith(b"\n"):
            rest = file.readline(LONGEST_LINE)
        yield line, rest.endswith(b"\n") or len(line) == LONGEST_LINE


class Tail:
    """Follows a file: each ``poll`` gives what has been added since the last one.

    A file that is replaced, or shorter than before, is read again: a run that resumes rewrites its metrics. Files on
    other nodes may be followed: the file is opened anew each time, so that clients of NFS ask the server.
    """

    def __init__(self, path: Path, last_bytes: int = 1 << 20) -> None:
        """Touches no disk.

        Args:
            last_bytes: how much of the end of a longer file the first ``poll`` reads.
        """
        self._path, self._last_bytes = path, last_bytes
        self._known: tuple[int, int] | None = None
        self._place = 0
        self._rest = b""

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """New objects, and whether the file has begun anew, so that earlier ones no longer count.

        Raises:
            OSError: the file is there and cannot be read.
        """
        with contextlib.ExitStack() as stack:
            try:
                file = stack.enter_context(safe_files.open_to_read(self._path))
            except FileNotFoundError:
                gone, self._known = self._known is not None, None
                self._place, self._rest = 0, b""
                return [], gone
            status = os.fstat(file.fileno())
            identity = status.st_dev, status.st_ino
            anew = identity != self._known or status.st_size < self._place
            if anew:
                self._known, self._rest = identity, b""
                self._place = max(0, status.st_size - self._last_bytes)
                if self._place:  # not the rest of a line that begins earlier
                    file.seek(self._place - 1)
                    file.readline()
                    self._place = file.tell()
            file.seek(self._place)
            added = file.read(1 << 26)  # what follows comes with the next poll
            self._place += len(added)
        *lines, self._rest = (self._rest + added).split(b"\n")
        if len(self._rest) > LONGEST_LINE:
            self._rest = b""
        return [record for line in lines if (record := json_shapes.parse(line, dict)) is not None], anew


def number(value: Any) -> float:
    """A JSON value as float64; NaN for null, for text, and for what is not finite."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return math.nan
    try:
        found = float(value)
    except OverflowError:
        return math.nan
    return found if math.isfinite(found) else math.nan


def step_of(record: Mapping[str, Any]) -> int | None:
    """The step of a record; None where it has no sensible one."""
    step = number(record.get("step"))
    return int(step) if 0 <= step < 1 << 53 and step == int(step) else None


def seconds_of(date: Any) -> float:
    """An ISO 8601 date as seconds since the epoch; NaN for anything else. Without a time zone it is UTC."""
    if not isinstance(date, str):
        return math.nan
    try:
        found = datetime.fromisoformat(date.replace("Z", "+00:00"))  # before Python 3.11 no Z
    except ValueError:
        return math.nan
    try:
        return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    except (OverflowError, ValueError):
        return math.nan


def text(value: Any, most: int = 2000) -> str:
    """A JSON value as text of at most `most` characters; "" for null."""
    found = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return found if len(found) <= most else found[: most - 1] + "…"
