"""JSON that others have written: values of an expected shape, and files of lines that may still be growing."""

from __future__ import annotations

import contextlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from datetime import datetime, timezone
from pathlib import Path
from typing import Any

from hpcfsdp.text import safe_files

Shape = Any
"""A type; None; a tuple of shapes, any of which will do; a list of one shape for any number of values, or of several
for as many; or a dict of shapes, for exactly these names."""

LONGEST_LINE = 1 << 20
"""Bytes of a line that is read as one; what is longer is damaged."""


def parse(text: bytes, shape: Shape) -> Any:
    """Return the value of a text, None unless it has the shape. Integers have 64 bits at most."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number of thousands of digits, lists of many levels
        return None
    return found if fits(found, shape) else None


def fits(value: Any, shape: Shape) -> bool:
    """Return whether a value of JSON has a shape."""
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, dict):
        return isinstance(value, dict) and value.keys() == shape.keys() and all(fits(value[n], shape[n]) for n in shape)
    if isinstance(shape, list):
        shapes = shape * len(value) if len(shape) == 1 and isinstance(value, list) else shape
        return isinstance(value, list) and len(value) == len(shapes) and all(map(fits, value, shapes))
    if shape is None:
        return value is None
    return type(value) is shape and (shape is not int or -1 << 63 <= value < 1 << 63)


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
    """Yield the objects of a file's lines, none where there is no file. Count lines in `tally`.

    Raise OSError as ``safe_files.open_to_read``, but for a missing file.
    """
    return (record for _, record in lines(path, tally))


def lines(path: Path, tally: Tally | None = None) -> Iterator[tuple[bytes, dict[str, Any]]]:
    """Yield what ``records`` does, each object with the bytes of its line."""
    try:
        file = safe_files.open_to_read(path)
    except FileNotFoundError:
        return
    tally = tally or Tally()
    with file:
        number = 0
        while line := file.readline(LONGEST_LINE):
            number += 1
            rest = line
            while rest and not rest.endswith(b"\n"):  # of a longer line
                rest = file.readline(LONGEST_LINE)
            if not line.strip():
                continue
            record = parse(line, dict)
            if record is not None:
                tally.sound += 1
                yield line, record
            elif rest.endswith(b"\n") or len(line) == LONGEST_LINE:  # otherwise it may be written right now
                tally.damaged += 1
                tally.first_damaged = tally.first_damaged or number


class Tail:
    """Follows a file: each ``poll`` gives what has been added since the last one.

    A file that is replaced, or shorter than before, is read again: a run that resumes rewrites its metrics. Files on
    other nodes may be followed: the file is opened anew each time, so that clients of NFS ask the server.
    """

    def __init__(self, path: Path, last_bytes: int = 1 << 20) -> None:
        """Touch no disk. The first ``poll`` reads the last `last_bytes` of a longer file."""
        self._path, self._last_bytes = path, last_bytes
        self._known: tuple[int, int] | None = None
        self._place = 0
        self._rest = b""

    def poll(self) -> tuple[list[dict[str, Any]], bool]:
        """Return new objects, and whether the file has begun anew, so that earlier ones no longer count.

        Raise OSError if the file is there and cannot be read.
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
        return [record for line in lines if (record := parse(line, dict)) is not None], anew


def number(value: Any) -> float:
    """Return a JSON value as float64; NaN for null, for text, and for what is not finite."""
    with contextlib.suppress(OverflowError):
        if isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value):
            return float(value)
    return math.nan


def step_of(record: Mapping[str, Any]) -> int | None:
    """Return the step of a record, None where it has no sensible one."""
    step = number(record.get("step"))
    return int(step) if 0 <= step < 1 << 53 and step == int(step) else None


def seconds_of(date: Any) -> float:
    """Return the seconds from the epoch to an ISO 8601 date, in UTC unless it says otherwise; NaN for anything else."""
    with contextlib.suppress(OverflowError, ValueError):
        if isinstance(date, str):
            found = datetime.fromisoformat(date.replace("Z", "+00:00"))  # before Python 3.11 no Z
            return (found if found.tzinfo else found.replace(tzinfo=timezone.utc)).timestamp()
    return math.nan


def text(value: Any, most: int = 2000) -> str:
    """Return a JSON value as text of at most `most` characters; "" for null."""
    found = "" if value is None else value if isinstance(value, str) else json.dumps(value, default=str)
    return found if len(found) <= most else found[: most - 1] + "…"
