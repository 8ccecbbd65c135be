"""A finding of the doctor: one line of its report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcfsdp.errors import LaunchError

Level = Literal["ok", "note", "warning", "problem"]


@dataclass(frozen=True)
class Finding:
    """The result of one check.

    Attributes:
        area: the subject, in one word.
        level: "ok", "note" (good to know), "warning" (slow, or will break one day), "problem" (breaks a training).
        what: the facts.
        hint: the remedy; may be empty.
    """

    area: str
    level: Level
    what: str
    hint: str = ""


def ok(area: str, what: str) -> Finding:
    return Finding(area, "ok", what)


def note(area: str, what: str, hint: str = "") -> Finding:
    return Finding(area, "note", what, hint)


def warning(area: str, what: str, hint: str) -> Finding:
    return Finding(area, "warning", what, hint)


def problem(area: str, what: str, hint: str) -> Finding:
    return Finding(area, "problem", what, hint)


def exit_code(findings: Iterable[Finding]) -> int:
    """The exit code of the command: 3 if there is a problem, else 0."""
    return LaunchError.exit_code if any(finding.level == "problem" for finding in findings) else 0


def summary(findings: Iterable[Finding]) -> str:
    """The last line of the report."""
    levels = [finding.level for finding in findings]
    parts = [_count(levels.count(level), level) for level in ("problem", "warning", "note") if level in levels]
    if "problem" in levels:
        return f"{', '.join(parts)}: a training would break here"
    return f"{', '.join(parts) or 'all fine'}: ready to train"


def _count(number: int, level: str) -> str:
    return f"{number} {level}" + ("s" if number > 1 else "")
