"""Sets of numbers (ranks, cores) as people write them: 0-3,8."""

from __future__ import annotations

from collections.abc import Iterable


def spans(numbers: Iterable[int]) -> str:
    """{0, 1, 2, 8} -> "0-2,8"."""
    runs: list[list[int]] = []
    for number in sorted(set(numbers)):
        if runs and number == runs[-1][1] + 1:
            runs[-1][1] = number
        else:
            runs.append([number, number])
    return ",".join(str(first) if first == last else f"{first}-{last}" for first, last in runs)


def members(text: str) -> set[int]:
    """The numbers that ``spans`` wrote."""
    found: set[int] = set()
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found |= set(range(int(first), int(last or first) + 1))
    return found


def ranks(numbers: Iterable[int]) -> str:
    """{3} -> "rank 3", {0, 1} -> "ranks 0-1"."""
    numbers = list(numbers)
    return f"{'rank' if len(numbers) == 1 else 'ranks'} {spans(numbers)}"
