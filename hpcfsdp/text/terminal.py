"""Text for people: escaped, quantities in words, and sets of ranks.

Names and values in files, in the environment and in the output of programs can contain escape sequences, control
characters, marks that change the direction of writing, or halves of surrogate pairs. None of these reaches a terminal
or a log: errors of hpcfsdp, its log lines, and the output of its commands pass through here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable
from typing import Any

_STYLES = re.compile(r"(\x1b\[[0-9;]*m)")
"""Escape sequences that set colours."""


def shown(value: Any) -> str:
    """Return a value in one line. Characters that cannot be printed become Python's escapes (``\\x1b``, ``\\n``)."""
    text = str(value)
    if text.isprintable():
        return text
    return "".join(char if char.isprintable() else char.encode("unicode_escape").decode() for char in text)


def shown_lines(text: str) -> str:
    """Return text as ``shown`` does, but line ends and tabs stay."""
    if text.isprintable():
        return text
    return "".join(part if part in ("\n", "\t") else shown(part) for part in re.split(r"([\n\t])", text))


def shown_message(text: str) -> str:
    """Return text as ``shown_lines`` does, later lines indented, so that none of them looks like another message."""
    first, *rest = shown_lines(text).split("\n")
    return "\n".join([first, *(line if line[:1] in ("", " ", "\t") else f"  {line}" for line in rest)])


def shown_styled(text: str) -> str:
    """Return text as ``shown_lines`` does, but colours stay."""
    return "".join(part if place % 2 else shown_lines(part) for place, part in enumerate(_STYLES.split(text)))


def readable_bytes(count: float) -> str:
    """Return 1536 as "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        value /= 1024
    return f"{value:.1f} TiB"


def readable_duration(seconds: float) -> str:
    """Return 3725.0 as "1 h 2 min", with two units at most."""
    if seconds < 0.9995:
        return f"{seconds * 1e3:.3g} ms"
    if seconds < 59.95:
        return f"{seconds:.3g} s"
    whole = round(seconds)
    for size, unit, smaller, of_smaller in ((86400, "d", 3600, "h"), (3600, "h", 60, "min"), (60, "min", 1, "s")):
        if whole >= size:
            rest = whole % size // smaller
            return f"{whole // size} {unit} {rest} {of_smaller}" if rest else f"{whole // size} {unit}"
    return f"{whole} s"


def readable_count(value: float) -> str:
    """Return 1234567.0 as "1.23 M", with three digits beyond a thousand."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def readable_share(share: float) -> str:
    """Return 0.123 as "12%", and small shares with one more digit."""
    return f"{share * 100:.0f}%" if abs(share) >= 0.0995 or share == 0 else f"{share * 100:.1f}%"


def counted(count: int, noun: str) -> str:
    """Return (1, "step") as "1 step", and (2000, "step") as "2,000 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"


def spans(numbers: Iterable[int]) -> str:
    """Return {0, 1, 2, 8} as "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def members(text: str) -> set[int]:
    """Return the numbers that ``spans`` wrote."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def ranks(numbers: Iterable[int]) -> str:
    """Return {3} as "rank 3", and {0, 1, 4} as "ranks 0-1, 4"."""
    numbers = list(numbers)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers).replace(',', ', ')}"
