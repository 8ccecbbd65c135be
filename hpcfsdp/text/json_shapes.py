"""JSON that others may have written, read only if it has the shape that is expected."""

from __future__ import annotations

import json
from typing import Any

Shape = Any
"""A type; None; a tuple of shapes, any of which will do; a list of one shape for any number of values, or of several
for as many; or a dict of shapes, for exactly these names."""


def parse(text: bytes, shape: Shape) -> Any:
    """The value of a text; None unless it has the shape. Integers have 64 bits at most."""
    try:
        found = json.loads(text)
    except (ValueError, RecursionError):  # no JSON, no UTF-8, a number of thousands of digits, lists of many levels
        return None
    return found if fits(found, shape) else None


def fits(value: Any, shape: Shape) -> bool:
    """Whether a value of JSON has a shape."""
    if isinstance(shape, tuple):
        return any(fits(value, one) for one in shape)
    if isinstance(shape, dict):
        return isinstance(value, dict) and value.keys() == shape.keys() and all(fits(value[n], shape[n]) for n in shape)
    if isinstance(shape, list):
        shapes = shape * len(value) if len(shape) == 1 and isinstance(value, list) else shape
        return isinstance(value, list) and len(value) == len(shapes) and all(map(fits, value, shapes))
    if shape is None:
        return value is None
    return type(value) is shape and (shape is not int or -1 << 63 <= value < 1 << 63)
