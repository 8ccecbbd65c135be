"""The records of a run as JSON lines: figures by step, which a resumed run replaces, and events, which stay.

In a job of a scheduler each record has the number of times that the job was requeued, as "restart".
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import numbers
import os
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp import env
from hpcfsdp.text import safe_files
from hpcfsdp.text.json_input import Tail, lines, records, step_of

log = logging.getLogger("hpcfsdp.observe")


class _JsonLinesFile:
    """Appends records to a file. For one rank alone, from any thread.

    A file that cannot be written ends no training: the first error is logged, and records are lost until it can.
    """

    def __init__(self, path: Path) -> None:
        """Open the file. Raises OSError if the folder cannot be made."""
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._restarts = path, env.restarts()
        self._fd = -1
        self._lock = threading.Lock()
        self._has_failed = False
        with self._lock, self._logged():
            self._fd = safe_files.open_to_append(path)

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record; see ``finite`` for values that JSON lacks."""
        try:
            line = json.dumps({**finite(record)[0], **self._restarts}, allow_nan=False).encode() + b"\n"
        except (ValueError, RecursionError) as error:
            log.error("a record for %s is lost: %s", self._path, error)
            return
        with self._lock, self._logged():
            if self._fd < 0 or os.fstat(self._fd).st_nlink == 0:  # could not be opened, or was removed
                self._close()
                self._path.parent.mkdir(parents=True, exist_ok=True)
                self._fd = safe_files.open_to_append(self._path)
            line = b"\n" + line if safe_files.is_torn(self._fd) else line
            while line:
                line = line[os.write(self._fd, line) :]

    def close(self) -> None:
        with self._lock, self._logged():
            self._close()

    @contextlib.contextmanager
    def _logged(self) -> Iterator[None]:
        try:
            yield
        except OSError as error:
            if not self._has_failed:
                log.error("%s cannot be written, records are lost: %s", self._path, error.strerror)
            self._has_failed = True

    def _close(self) -> None:
        fd, self._fd = self._fd, -1
        if fd >= 0:
            os.close(fd)


class MetricsFile(_JsonLinesFile):
    """A JSONL file of records that have a "step"."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open the file, and drop records of steps after `resume_step`, from a run that ended later."""
        try:
            if os.path.lexists(path):
                found = ((line, step_of(record)) for line, record in lines(path))
                kept = [line.rstrip(b"\n") + b"\n" for line, step in found if step is not None and step <= resume_step]
                safe_files.replace(path, b"".join(kept))
        except OSError as error:
            log.error("%s keeps its records of steps after %d: %s", path, resume_step, error.strerror)
        super().__init__(path)


class EventsFile(_JsonLinesFile):
    """A JSONL file of events, to which every run in the folder appends."""

    def write_event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """Append an event with the present date. See ``finite`` for values that JSON lacks."""
        self.write({"date": utc_now(), "kind": kind, "step": step, **facts})


def read_records(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of JSON lines that are sound; empty without a file that can be read."""
    try:
        return list(records(path))
    except OSError as error:
        log.error("%s cannot be read: %s", path, error.strerror)
        return []


def last_step(found: Sequence[Mapping[str, Any]]) -> int:
    """Return the highest step of records; 0 without one."""
    return max((step for record in found if (step := step_of(record)) is not None), default=0)


def append_end(path: Path, step: int, outcome: str, message: str) -> None:
    """Add the event of an end to a file of events that another rank writes, unless an end is its last event."""
    with contextlib.suppress(OSError):  # the error itself is what the program raises
        events, _ = Tail(path).poll()
        if events and events[-1].get("kind") == "end":
            return  # thousands of ranks may have the same error
        file = EventsFile(path)
        file.write_event("end", step, {"outcome": outcome, "message": message})
        file.close()


def finite(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """Return the values for JSON, and floats that it has no number for, null there, as text by name.

    Other numbers become int or float, and what JSON has no value for becomes text.
    """
    others = {name: str(value) for name, value in values.items() if isinstance(value, float)}
    kept = {name: _plain(value) for name, value in values.items()}
    return kept, {name: text for name, text in others.items() if kept[name] is None}


def utc_now() -> str:
    """Return the date and time, ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _plain(value: Any) -> Any:
    if value is None or isinstance(value, (str, bool, int)):
        return value
    if isinstance(value, Mapping):
        return {str(name): _plain(inner) for name, inner in value.items()}
    if isinstance(value, (list, tuple)):
        return [_plain(inner) for inner in value]
    try:
        number = int(value) if isinstance(value, numbers.Integral) else float(value)
    except Exception:  # of any class of the program's
        return str(value)
    return number if math.isfinite(number) else None
