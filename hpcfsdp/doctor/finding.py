"""One line of the report."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from hpcfsdp.errors import LaunchError

Level = Literal["ok", "note", "warning", "problem"]
LEVELS: tuple[Level, ...] = ("ok", "note", "warning", "problem")


@dataclass(frozen=True)
class Finding:
    """Something that was looked at.

    Attributes:
        area: what it is about, in one word.
        level: "ok", "note" (good to know), "warning" (slow, or will break one day), "problem" (breaks a training).
        what: what was found.
        hint: what to do about it; may be empty.
    """

    area: str
    level: Level
    what: str
    hint: str = ""


def exit_code(findings: Iterable[Finding]) -> int:
    """That of an environment that does not fit, if there is a problem."""
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
