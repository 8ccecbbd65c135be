"""The records of a run as JSON lines: figures by step, which a resumed run replaces, and events, which stay.

In a job of a scheduler each record has the number of times that the job was requeued, as "restart".
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import os
import threading
import time
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hpcfsdp import env

log = logging.getLogger("hpcfsdp.observe")


class _Lines:
    """Appends records to a file. For one rank alone, from any thread.

    A file that cannot be written any more ends no training: the first error is logged, and later records are lost.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self._path, self._restarts = path, env.restarts()
        self._file = open(path, "a", buffering=1)  # noqa: SIM115 - closed by close()
        self._lock = threading.Lock()
        self._has_failed = False

    def write(self, record: Mapping[str, Any]) -> None:
        """Append one record."""
        line = json.dumps({**record, **self._restarts}, allow_nan=False) + "\n"
        with self._lock:
            try:
                if os.fstat(self._file.fileno()).st_nlink == 0:  # removed: write to a new file
                    self._path.parent.mkdir(parents=True, exist_ok=True)
                    self._file.close()
                    self._file = open(self._path, "a", buffering=1)  # noqa: SIM115 - closed by close()
                self._file.write(line)
            except OSError as error:
                if not self._has_failed:
                    log.error("%s cannot be written, records are lost: %s", self._path, error.strerror)
                self._has_failed = True

    def close(self) -> None:
        try:
            self._file.close()
        except OSError as error:  # what was still to be written
            log.error("%s cannot be written: %s", self._path, error.strerror)


class MetricsFile(_Lines):
    """A JSONL file of records that have a "step"."""

    def __init__(self, path: Path, *, resume_step: int = 0) -> None:
        """Open the file, and drop records of steps after `resume_step`, from a run that ended later."""
        if path.exists():
            kept = [line for line in path.read_text(errors="replace").splitlines() if _step(line) <= resume_step]
            draft = path.with_name(f".{path.name}.partial")
            draft.write_text("".join(f"{line}\n" for line in kept))
            os.replace(draft, path)
        super().__init__(path)


class EventsFile(_Lines):
    """A JSONL file of events, to which every run in the folder appends."""

    def write_event(self, kind: str, step: int, facts: Mapping[str, Any]) -> None:
        """Append an event with the present date. Numbers in `facts` that are not finite become null."""
        self.write({"date": utc_now(), "kind": kind, "step": step, **finite(facts)[0]})


def read_records(path: Path) -> list[dict[str, Any]]:
    """The records of a file of JSON lines, without lines that are incomplete; empty without the file."""
    try:
        lines = path.read_text(errors="replace").splitlines()
    except FileNotFoundError:
        return []
    found = []
    for line in lines:
        try:
            record = json.loads(line)
        except ValueError:
            continue
        if isinstance(record, dict):
            found.append(record)
    return found


def last_step(records: Sequence[Mapping[str, Any]]) -> int:
    """The highest step of records; 0 without one."""
    steps = (record.get("step") for record in records)
    return max((step for step in steps if isinstance(step, int)), default=0)


def append_end(path: Path, step: int, message: str) -> None:
    """Add the event of an error to a file of events that another rank writes, unless an end is its last event."""
    with contextlib.suppress(OSError):  # the error itself is what the program raises
        events = read_records(path)
        if events and events[-1].get("kind") == "end":
            return  # thousands of ranks may have the same error
        file = EventsFile(path)
        file.write_event("end", step, {"outcome": "error", "message": message})
        file.close()


def finite(values: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, str]]:
    """The same values with null for floats that JSON has no number for, and these as text by name."""
    kept, others = dict(values), {}
    for name, value in values.items():
        if isinstance(value, float) and not math.isfinite(value):
            kept[name], others[name] = None, str(value)
    return kept, others


def utc_now() -> str:
    """The date and time, ISO 8601 in UTC."""
    return time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())


def _step(line: str) -> float:
    try:
        return float(json.loads(line)["step"])
    except (ValueError, KeyError, TypeError):
        return float("inf")  # an incomplete line
