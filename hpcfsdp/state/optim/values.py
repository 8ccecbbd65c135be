"""Small values of optimizer state: compared, hashed, copied, and made fit to be sent."""

from __future__ import annotations

import copy
import hashlib
import io
import pickle
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from hpcfsdp.errors import StateDictError

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
"""Types whose values are equal if their texts are; values of subclasses may be anything."""


FLAGS = {"capturable", "differentiable", "foreach", "fused"}
"""Hyper-parameters that say how and where an optimizer computes, and not what: a loaded state does not change them."""


def place_steps(groups: Iterable[Mapping[str, Any]], states: Mapping[Any, dict[str, Any]]) -> None:
    """Move counts of steps to where flags of their groups want them: torch moves them to a device, and not back."""
    for group in groups:
        for key in group["params"] if {"capturable", "fused"} & group.keys() else ():
            step = states.get(key, {}).get("step")
            if isinstance(step, torch.Tensor):
                is_on_device = group.get("capturable") or group.get("fused")
                states[key]["step"] = step.to(getattr(key, "device", step.device) if is_on_device else "cpu")


def digest(value: Any) -> bytes:
    """Return 16 bytes, the same for equal values. Values of a user's own class are equal if they are pickled alike.

    Raises:
        Exception: whatever such a class raises.
    """
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=16).digest()


def _plain(value: Any) -> Any:
    """Return a value in a form whose text is the same for equal values; pickles of equal values may differ."""
    if type(value) in _PLAIN:
        return value
    if isinstance(value, Mapping):
        return sorted(((repr(key), _plain(inner)) for key, inner in value.items()), key=lambda pair: pair[0])
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    text = io.BytesIO()
    _CanonicalPickler(text).dump(value)
    return text.getvalue()


class _CanonicalPickler(pickle.Pickler):
    """Pickles equal tensors alike, and equal arrays, on any device and in any memory layout."""

    def reducer_override(self, value: Any) -> Any:
        if type(value) in _TENSORS:  # they are small, see `check_nested`
            return tuple, ([str(value.layout), str(value.dtype), tuple(value.shape), _elements(value)],)
        if type(value) is np.ndarray and not value.dtype.hasobject:
            return tuple, ([str(value.dtype), value.shape, value.tobytes()],)
        return NotImplemented


_TENSORS = (torch.Tensor, torch.nn.Parameter)


def _elements(tensor: torch.Tensor) -> Any:
    if tensor.is_meta:
        return None
    if tensor.is_nested:
        return [_elements(part) for part in tensor.unbind()]
    if tensor.is_quantized:
        return tensor.dequantize().tolist()
    if tensor.layout is torch.strided:
        return tensor.tolist()
    tensor = tensor.detach().to_sparse().coalesce()
    return tensor.indices().tolist(), tensor.values().tolist()


def _is_dense(value: Any) -> bool:
    """Return whether a value is a tensor of torch's own class whose elements can be compared one by one."""
    return (
        type(value) in _TENSORS
        and value.layout is torch.strided
        and not (value.is_meta or value.is_nested or value.is_quantized)
    )


def same(one: Any, other: Any) -> bool:
    """Return whether two values of any kind are equal; not-a-number equals itself.

    Where a class has no equality, or one that does not say yes or no, the content counts.
    """
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if _is_dense(one) and _is_dense(other):
        return type(one) is type(other) and one.dtype == other.dtype and _same_values(one.cpu(), other.cpu())
    verdict = _verdict(one, other)
    return _same_content(one, other) if verdict is None else verdict


def _verdict(one: Any, other: Any) -> bool | None:
    """Return whether values are equal by the operators of their classes; None where these give no answer."""
    if any(isinstance(value, (torch.Tensor, np.ndarray)) for value in (one, other)):
        return None  # they compare element by element
    try:
        equal = bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
    except Exception:  # whatever a class of a user's own raises
        return None
    return None if not equal and type(one).__eq__ is object.__eq__ else equal


def _same_content(one: Any, other: Any) -> bool:
    if type(one) is not type(other):
        return False
    try:
        return digest(one) == digest(other)
    except Exception:  # a value of a user's own class that cannot be pickled
        return one is other


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


class Unpicklable(str):
    """Stands for a value that cannot be sent to other ranks."""


def picklable(value: Any) -> Any:
    """Return a value in a form for other ranks: one that cannot be pickled, or unpickled, as the name of its type.

    Tensors in it are copied to host memory: unpickled, they would be put on the device that they were on.
    """
    if type(value) in _PLAIN:  # a subclass may be one that cannot be pickled
        return value
    try:
        if next(tensors_in(value), None) is not None:
            value = on_host(value)
        pickle.loads(pickle.dumps(value))
    except Exception:  # whatever a class of a user's own raises
        return Unpicklable(f"<{type(value).__qualname__}, which cannot be pickled>")
    return value


def on_host(value: Any) -> Any:
    """Return a value with all tensors in it, in lists, tuples and dicts too, in host memory; meta tensors stay."""
    if isinstance(value, torch.Tensor):
        return value.detach() if value.is_meta else value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return {key: on_host(inner) for key, inner in value.items()} if type(value) is dict else value


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """Return the tensors in lists, tuples, sets and dicts, however deep, or the value itself if it is one."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from tensors_in(inner)


_NESTED_NUMEL = 1 << 16


def check_nested(fqn: str, state: Mapping[str, Any]) -> None:
    """Refuse values with large tensors in them, as histories of gradients: they are neither gathered nor divided."""
    for name, value in state.items():
        if isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
            continue
        numel = sum(tensor.numel() for tensor in tensors_in(value))
        if numel > _NESTED_NUMEL:
            raise StateDictError(
                f"optimizer state {name!r} of {fqn!r} is a {type(value).__name__} of tensors with {numel} elements: "
                "it is unknown which of them belong to which element of the parameter"
            )


def deep_copy(what: str, value: Any) -> Any:
    """Return a copy of any value.

    Args:
        what: it is, for the error.
    """
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever a class of a user's own raises
        raise StateDictError(
            f"optimizer state {what} is a {type(value).__name__}, which cannot be copied: {error}"
        ) from error
