"""User values beside the tensors: JSON, with arrays taken out and kept as datasets."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.errors import CheckpointError

_ARRAY_KEY = "__array__"
_ITEMS_KEY = "__items__"


def split_arrays(value: Any, path: str = "", first: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """JSON-ready `value`, in which arrays and tensors are replaced by references, and those arrays by name.

    Args:
        path: of `value`, for messages.
        first: number that is the name of the first array.

    Raises:
        CheckpointError: something that is neither JSON nor numeric array, by its place in `value`.
    """
    arrays: dict[str, np.ndarray] = {}

    def visit(item: Any, place: str) -> Any:
        if item is None or isinstance(item, (bool, int, float, str)):
            return item
        if isinstance(item, np.generic) and item.dtype.kind in "biuf" and item.dtype.itemsize <= 8:
            return item.item()
        if isinstance(item, dict):
            bad = [key for key in item if not isinstance(key, (str, int, float, bool, type(None)))]
            if bad:
                raise CheckpointError(f"extra{place}: key {bad[0]!r} cannot be saved; use strings or numbers as keys")
            entries = {key: visit(entry, f"{place}[{key!r}]") for key, entry in item.items()}
            if all(isinstance(key, str) and key not in (_ARRAY_KEY, _ITEMS_KEY) for key in entries):
                return entries
            return {_ITEMS_KEY: [list(pair) for pair in entries.items()]}  # JSON would make strings of the keys
        if isinstance(item, (list, tuple)):
            return [visit(entry, f"{place}[{index}]") for index, entry in enumerate(item)]
        array = _as_array(item, place)
        if array is None:
            raise CheckpointError(
                f"extra{place} is a {type(item).__name__}: numbers, strings, lists, dicts, arrays and tensors can be "
                "saved"
            )
        name = str(first + len(arrays))
        arrays[name] = array
        return {_ARRAY_KEY: name}

    return visit(value, path), arrays


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
    """What is in a value that ``split_arrays`` gave, in short texts, by its place, as "extra['data'][0]". Pure.

    Args:
        name: of the value.
        arrays: that were taken out of it.
    """
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


def _as_array(item: Any, place: str) -> np.ndarray | None:
    if hasattr(item, "resolve_conj"):  # a tensor, told without importing torch
        try:
            item = item.detach().resolve_conj().resolve_neg().cpu().numpy()
        except (TypeError, NotImplementedError, RuntimeError) as error:
            raise CheckpointError(f"extra{place}: a tensor of {item.dtype} on {item.device}: {error}") from None
    if isinstance(item, np.ndarray) and item.dtype.kind in "biufc":
        return item
    return None
