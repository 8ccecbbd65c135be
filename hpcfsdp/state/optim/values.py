"""Values of optimizer state: those of a first step; small ones compared, hashed, copied, and made fit to be sent."""

import collections
import copy
import hashlib
import inspect
import io
import pickle
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcfsdp.errors import StateDictError
from hpcfsdp.units.own import unit_fqn

_PLAIN = (bool, int, float, complex, str, bytes, type(None), torch.dtype)
"""Types whose values are equal if their texts are; values of subclasses may be anything."""


FLAGS = {"capturable", "differentiable", "foreach", "fused"}
"""Hyper-parameters that say how and where an optimizer computes, and not what: a loaded state does not change them."""

_WITHOUT_DECAY = {"weight_decay": 0, "lambd": 0}
"""Hyper-parameters with which a step looks at the values of parameters."""

_BEFORE_STEP = {"step": 0, "mu_product": 1}
"""State that a step of torch's optimizers changes even if gradients are zero."""


def needs_closure(step: Callable[..., Any]) -> bool:
    """Return whether a ``step`` of an optimizer does not work without a closure."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@torch.no_grad()
def states_of_first_step(optimizer: torch.optim.Optimizer, chosen: Container[Any] | None = None) -> dict[Any, Any]:
    """Not collective. Return the state that an optimizer creates in its first step, with its first values.

    Copies of the parameters take a step with gradients of zero, and no hooks are called. As in training, a rank does
    not step an original parameter that it holds nothing of. Nothing for an optimizer that steps with a closure alone.

    Args:
        chosen: the parameters that get gradients; None: all.
    """
    step = inspect.unwrap(type(optimizer).step)  # without hooks, and without what schedulers put around it
    if needs_closure(step):
        return {}
    attributes, groups, state = dict(vars(optimizer)), optimizer.param_groups, optimizer.state
    params: dict[nn.Parameter, Any] = {}
    for param in (param for group in groups for param in group["params"]):
        copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)  # with the same marks:
        vars(copy).update({name: value for name, value in vars(param).items() if name not in vars(copy)})
        is_stepped = param in chosen if chosen is not None else param.numel() or unit_fqn(param) is None
        if param.requires_grad and is_stepped:
            grad = torch.zeros_like(copy)
            copy.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
        params[copy] = param
    copies = iter(params)
    try:
        optimizer.param_groups = [
            {**group, **_WITHOUT_DECAY, "params": [next(copies) for _ in group["params"]]} for group in groups
        ]
        optimizer.state = collections.defaultdict(dict)
        step(optimizer)
        made = optimizer.state
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups, optimizer.state = groups, state  # of one that holds another they are no attributes
    for found in made.values():
        for key in found.keys() & _BEFORE_STEP.keys():
            if isinstance(found[key], torch.Tensor):
                found[key].fill_(_BEFORE_STEP[key])
            elif isinstance(found[key], (int, float)):
                found[key] = type(found[key])(_BEFORE_STEP[key])
    return {param: made[copy] for copy, param in params.items() if made.get(copy)}


def place_steps(groups: Iterable[Mapping[str, Any]], states: Mapping[Any, dict[str, Any]]) -> None:
    """Move counts of steps to where flags of their groups want them: torch moves them to a device, and not back."""
    for group in groups:
        for key in group["params"] if {"capturable", "fused"} & group.keys() else ():
            step = states.get(key, {}).get("step")
            if isinstance(step, torch.Tensor):
                is_on_device = group.get("capturable") or group.get("fused")
                states[key]["step"] = step.to(getattr(key, "device", step.device) if is_on_device else "cpu")


def digest(value: Any) -> bytes:
    """Return 16 bytes, the same for equal values. Values of a user's own class are equal if they are pickled alike."""
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
    is_strided = type(value) in _TENSORS and value.layout is torch.strided
    return is_strided and not (value.is_meta or value.is_nested or value.is_quantized)


def same(one: Any, other: Any) -> bool:
    """Return whether two values are equal, by content where a class has no equality; not-a-number equals itself."""
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    if _is_dense(one) and _is_dense(other):
        if type(one) is not type(other) or (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        one, other = one.cpu(), other.cpu()
        return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124
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
    try:
        return type(one) is type(other) and digest(one) == digest(other)
    except Exception:  # a value of a user's own class that cannot be pickled
        return one is other


class Unpicklable(str):
    """Stands for a value that cannot be sent to other ranks."""


def picklable(value: Any) -> Any:
    """Return a value for other ranks, tensors on the host; one that cannot be pickled as the name of its type."""
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
    """Return a copy of any value; the error says `what` cannot be copied."""
    try:
        return copy.deepcopy(value)
    except Exception as error:  # whatever a class of a user's own raises
        raise StateDictError(
            f"optimizer state {what} is a {type(value).__name__}, which cannot be copied: {error}"
        ) from error
