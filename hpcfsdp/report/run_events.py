"""Lines of events.jsonl."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.text.json_input import Tally, number, records, seconds_of, step_of, text


@dataclass(frozen=True)
class Event:
    """A line of events.jsonl.

    Attributes:
        kind: "start", "checkpoint", "signal", "end", or another.
        seconds: when, seconds since the epoch; NaN where unknown.
        step: the last step that was done, or None.
        facts: the whole record.
    """

    kind: str
    seconds: float
    step: int | None
    facts: Mapping[str, Any]

    @classmethod
    def of(cls, record: Mapping[str, Any]) -> Event:
        """The event of a record."""
        return cls(text(record.get("kind")), seconds_of(record.get("date")), step_of(dict(record)), record)

    def text(self, name: str) -> str:
        """A fact as text, "" without it."""
        return text(self.facts.get(name))

    def number(self, name: str) -> float | None:
        """A fact as a number, None without it."""
        found = number(self.facts.get(name))
        return None if math.isnan(found) else found


def read_events(path: Path, tally: Tally) -> tuple[Event, ...]:
    """All events of a file, in its order; none without a file. Counts lines in `tally`.

    Raises:
        OSError: the file cannot be read.
    """
    return tuple(map(Event.of, records(path, tally)))
