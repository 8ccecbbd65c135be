"""Types of arguments that several verbs have: each reads the text of one, or raises an error that argparse shows."""

from __future__ import annotations

import argparse
import contextlib
import math
import re
from collections.abc import Callable

_PREFIXES = " KMGT"


def positive(text: str) -> int:
    """A whole number above 0."""
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a positive whole number")
    return count


def number_in(low: float, above: float, what: str) -> Callable[[str], float]:
    """The type of numbers from `low` to below `above`; `what` says it in the message."""

    def read(text: str) -> float:
        value = math.nan
        with contextlib.suppress(ValueError):
            value = float(text)
        if not low <= value < above:
            raise argparse.ArgumentTypeError(f"{text} is not {what}")
        return value

    return read


def size_in_bytes(text: str) -> int:
    """ "80GiB", "1.5GB" or "4096" as bytes."""
    found = re.fullmatch(r"(\d+(?:\.\d+)?)\s*([KMGT]i?)?B?", text)
    prefix = (found[2] or "") if found else ""
    unit = (1024 if prefix.endswith("i") else 1000) ** _PREFIXES.index(prefix[:1] or " ")
    size = int(float(found[1]) * unit) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is not a size, such as 1GiB or 256MiB")
    return size
