"""Quantities in words, for people. Pure."""

from __future__ import annotations

import math


def readable_bytes(count: float) -> str:
    """1536 -> "1.5 KiB"."""
    value = float(count)
    for unit in ("B", "KiB", "MiB", "GiB"):
        if value < 1024:
            return f"{value:.1f} {unit}" if unit != "B" else f"{count:.0f} B"
        value /= 1024
    return f"{value:.1f} TiB"


def readable_duration(seconds: float) -> str:
    """3725.0 -> "1 h 2 min"; two units at most."""
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
    """1234567.0 -> "1.23 M"; three digits beyond a thousand."""
    if not math.isfinite(value):
        return str(value)
    for size, unit in ((1e15, "P"), (1e12, "T"), (1e9, "G"), (1e6, "M")):
        if abs(value) >= 0.9995 * size:
            return f"{value / size:.3g} {unit}"
    return f"{value:,.0f}" if abs(value) >= 1000 else f"{value:.4g}"


def readable_share(share: float) -> str:
    """0.123 -> "12%"; small shares with one more digit."""
    return f"{share * 100:.0f}%" if abs(share) >= 0.0995 or share == 0 else f"{share * 100:.1f}%"


def counted(count: int, noun: str) -> str:
    """(1, "step") -> "1 step", (2000, "step") -> "2,000 steps"."""
    return f"{count:,} {noun}" if count == 1 else f"{count:,} {noun}s"
