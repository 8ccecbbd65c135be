"""Converts values that are no tensors of a model to JSON and arrays, and back."""

from __future__ import annotations

import copy
from typing import Any

import numpy as np
import torch

from hpcfsdp.checkpoint.extra import array_of
from hpcfsdp.errors import CheckpointError

Place = tuple[int, ...]
"""Positions in lists and dicts, from outside inwards."""

Types = tuple[tuple[Place, str], ...]
"""Places in a value, and the types there: "tuple", "tensor" or "bytes". Inner places come before outer ones."""


def to_plain(name: str, value: Any) -> tuple[Any, Types]:
    """A value with lists for tuples and arrays for tensors and bytes, and the places of these types.

    Raises CheckpointError for other types; `name` of the entry is for its message.
    """
    types: list[tuple[Place, str]] = []

    def visit(item: Any, path: Place) -> Any:
        kind = next((kind for kind, types_of in _KINDS.items() if type(item) in types_of), None)
        if isinstance(item, dict) and all(isinstance(key, (str, int, float, bool, type(None))) for key in item):
            return {key: visit(entry, (*path, place)) for place, (key, entry) in enumerate(item.items())}
        if isinstance(item, (list, tuple)) and (kind or type(item) is list):
            item = [visit(entry, (*path, place)) for place, entry in enumerate(item)]
        elif isinstance(item, torch.Tensor) and kind:
            item = array_of(item, f"the state dict's {name!r} holds, in a tuple,", "; put it into a list or a dict")
        elif isinstance(item, (bytes, bytearray)):
            item = np.frombuffer(bytes(item), np.uint8)
        elif isinstance(item, np.generic) and item.dtype.kind in "biuf" and item.dtype.itemsize <= 8:
            item = item.item()
        elif not _is_plain(item):
            raise CheckpointError(
                f"the state dict's {name!r} {'is' if not path else 'holds'} a {type(item).__name__}, and nothing is "
                "pickled into a checkpoint: keep numbers, strings, lists, tuples, dicts, bytes, arrays or tensors in "
                "its place, or leave it out of the state dict"
            )
        if kind:
            types.append((path, kind))
        return item

    return visit(value, ()), tuple(types)


_KINDS = {
    "tuple": (tuple, torch.Size),
    "tensor": (torch.Tensor, torch.nn.Parameter),
    "bytes": (bytes, bytearray),
}


def _is_plain(item: Any) -> bool:
    if isinstance(item, np.ndarray):
        return item.dtype.kind in "biufc"
    return type(item) in (type(None), bool, int, float, str)


def from_plain(value: Any, types: Types) -> Any:
    """Undoes ``to_plain``."""
    value = copy.deepcopy(value)
    for path, kind in types:
        if not path:
            value = _MAKERS[kind](value)
            continue
        *outer, last = path
        inside = value
        for place in outer:
            inside = list(inside.values())[place] if isinstance(inside, dict) else inside[place]
        key = list(inside)[last] if isinstance(inside, dict) else last
        inside[key] = _MAKERS[kind](inside[key])
    return value


_MAKERS = {
    "tuple": tuple,
    "tensor": lambda array: torch.from_numpy(np.array(array)),
    "bytes": lambda array: np.asarray(array, np.uint8).tobytes(),
}
