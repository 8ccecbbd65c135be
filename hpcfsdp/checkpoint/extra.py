"""User values next to the tensors: JSON, with arrays as datasets of their own."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.errors import CheckpointError

_ARRAY_KEY = "__array__"
_ITEMS_KEY = "__items__"


def split_arrays(value: Any, path: str = "", first: int = 0) -> tuple[Any, dict[str, np.ndarray]]:
    """JSON-ready `value` with references in place of arrays and tensors, and the arrays by name, numbered from `first`.

    Raises CheckpointError, with the place in `value`, for anything but JSON and numeric arrays.
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
        if hasattr(item, "resolve_conj"):  # a tensor, recognized without importing torch
            item = array_of(item, f"extra{place}:")
        if not isinstance(item, np.ndarray) or item.dtype.kind not in "biufc":
            raise CheckpointError(
                f"extra{place} is a {type(item).__name__}: numbers, strings, lists, dicts, arrays and tensors can be "
                "saved"
            )
        name = str(first + len(arrays))
        arrays[name] = item
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


def array_of(tensor: Any, holder: str, hint: str = "") -> np.ndarray:
    """A torch tensor as an array; raises CheckpointError, beginning with `holder`, where numpy cannot hold it."""
    try:
        return tensor.detach().resolve_conj().resolve_neg().cpu().numpy()
    except (TypeError, NotImplementedError, RuntimeError) as error:
        raise CheckpointError(f"{holder} a tensor of {tensor.dtype} on {tensor.device}: {error}{hint}") from None
