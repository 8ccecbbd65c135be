"""User values next to the tensors: JSON, with arrays as datasets of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema

_ARRAY_KEY = "__array__"
_ITEMS_KEY = "__items__"


def split_arrays(value: Any, first: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """JSON-ready `value` with references in place of arrays, and the arrays by name, numbered from `first`.

    Args:
        value: as ``plain_values.to_plain`` gives it.
    """
    arrays: dict[str, np.ndarray] = {}

    def visit(item: Any) -> Any:
        if isinstance(item, dict):
            entries = {key: visit(entry) for key, entry in item.items()}
            if all(isinstance(key, str) and key not in (_ARRAY_KEY, _ITEMS_KEY) for key in entries):
                return entries
            return {_ITEMS_KEY: [list(pair) for pair in entries.items()]}  # JSON would make strings of the keys
        if isinstance(item, (list, tuple)):
            return [visit(entry) for entry in item]
        if not isinstance(item, np.ndarray):
            return item
        name = str(first + len(arrays))
        arrays[name] = item
        return {_ARRAY_KEY: name}

    return visit(value), arrays


def join_arrays(value: Any, arrays: dict[str, np.ndarray]) -> Any:
    """Undo ``split_arrays``."""
    if isinstance(value, dict):
        if set(value) == {_ARRAY_KEY}:
            return arrays[value[_ARRAY_KEY]]
        if set(value) == {_ITEMS_KEY}:
            return {key: join_arrays(entry, arrays) for key, entry in value[_ITEMS_KEY]}
        return {key: join_arrays(entry, arrays) for key, entry in value.items()}
    if isinstance(value, list):
        return [join_arrays(entry, arrays) for entry in value]
    return value


def leaves_of(name: str, value: Any, arrays: Mapping[str, np.ndarray]) -> dict[str, str]:
    """Short descriptions of all leaves of a value from ``split_arrays``, by place ("extra['data'][0]"). Pure."""
    found: dict[str, str] = {}

    def visit(item: Any, place: str) -> None:
        if isinstance(item, dict) and set(item) == {_ARRAY_KEY}:
            array = arrays[item[_ARRAY_KEY]]
            digest = schema.checksum(np.ascontiguousarray(array).reshape(-1).view(np.uint8))
            found[place] = f"an array {list(array.shape)} of {array.dtype}, checksum {digest:016x}"
        elif isinstance(item, dict) and item:
            for key, entry in item.items():
                visit(entry, f"{place}[{key!r}]")
        elif isinstance(item, (list, tuple)) and item:
            for index, entry in enumerate(item):
                visit(entry, f"{place}[{index}]")
        else:
            found[place] = repr(item)

    visit(value, name)
    return found
