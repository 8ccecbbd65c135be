"""Values of checkpoints for people and for JSON. Pure."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from hpcfsdp.cli.printing import Brief


def readable_shape(shape: Sequence[int]) -> str:
    """(2, 3) -> "2 x 3"; a scalar as "scalar"."""
    return " x ".join(map(str, shape)) if shape else "scalar"


def readable_number(value: Any) -> str:
    """Six digits of a float (four on a terminal), all of an integer, and nothing for None."""
    if value is None:
        return ""
    return str(value) if isinstance(value, int) else Brief(f"{value:.6g}", f"{value:.4g}")


def readable_date(date: str) -> str:
    """A date of a checkpoint, ISO 8601; on a terminal without seconds and time zone."""
    return Brief(date, date[:16].replace("T", " ") if date.endswith("+00:00") else date)


DATE = Brief("date", "date (UTC)")
"""The header of a column of dates."""


def plain_value(value: Any) -> Any:
    """A value of a checkpoint for JSON: arrays by their shape and dtype, NaN and infinity as text."""
    if isinstance(value, dict):
        return {plain_value(key): plain_value(entry) for key, entry in value.items()}
    if isinstance(value, (list, tuple)):
        return [plain_value(entry) for entry in value]
    if hasattr(value, "dtype"):
        return {"shape": list(value.shape), "dtype": str(value.dtype)}
    if isinstance(value, float) and not math.isfinite(value):
        return str(value)
    return value


_LONGEST_LIST = 8


def shortened(value: Any) -> Any:
    """A nested value for people: a list of more than 8 single values as text with its length, its first and its last.

    Lists of dicts or of lists keep their length.
    """
    if isinstance(value, dict):
        return {key: shortened(entry) for key, entry in value.items()}
    if not isinstance(value, (list, tuple)):
        return value
    if len(value) <= _LONGEST_LIST or any(isinstance(entry, (dict, list, tuple)) for entry in value):
        return [shortened(entry) for entry in value]
    return f"{len(value)} values from {value[0]} to {value[-1]}; all of them: --json"
