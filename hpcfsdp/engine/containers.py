"""Tensors in the arguments and results of modules: mapped, cast and moved, in containers that stay what they are."""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import types
from collections import OrderedDict
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.nn.utils.rnn import PackedSequence

from hpcfsdp import _compat, accelerator

_Visit = Callable[[Any], Any]
_Rule = Callable[[_Visit, Any], Any]


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """All values of a call, those of keywords last, and the keywords. ``unpack_kwargs`` is the inverse."""
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(flat_args: tuple[Any, ...], kwarg_keys: tuple[str, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Positional and keyword arguments from the result of ``pack_kwargs``.

    Raises:
        ValueError: there are more keywords than values.
    """
    begin = len(flat_args) - len(kwarg_keys)
    if begin < 0:
        raise ValueError(f"{len(kwarg_keys)} keywords for {len(flat_args)} values: each keyword needs a value")
    return tuple(flat_args[:begin]), dict(zip(kwarg_keys, flat_args[begin:], strict=True))


def tensors_in(value: Any) -> Iterator[torch.Tensor]:
    """All tensors in nested tuples, lists, sets, mappings, dataclasses, packed sequences and pytree nodes.

    Passes over objects of other types, which ``objects.Visit`` enters.
    """
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, PackedSequence):
        yield value.data
    elif isinstance(value, Mapping):
        for item in value.values():
            yield from tensors_in(item)
    elif isinstance(value, (tuple, list, set, frozenset)):
        for item in value:
            yield from tensors_in(item)
    elif dataclasses.is_dataclass(value) and not isinstance(value, type):
        for entry in dataclasses.fields(value):
            yield from tensors_in(getattr(value, entry.name))
    else:
        yield from _compat.tensors_of(value) or ()


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """`container` with each tensor in it replaced by the result of `fn`.

    Enters the types of ``tensors_in``: tuples, lists, sets and mappings with their subclasses, dataclasses, the data of
    packed sequences, and types registered with ``torch.utils._pytree``. All other objects, modules too, and the keys of
    mappings stay as they are.

    A container in which nothing was replaced is returned itself. Otherwise it is a copy of the same type, with the same
    order, attributes and default factory, made without running constructors, ``__post_init__`` or ``__setitem__`` of
    the type. Attributes that mirror a replaced item hold the new one, and cached properties are dropped.
    """

    def visit(value: Any) -> Any:
        kind = type(value)
        rule = _RULES.get(kind) or _rule_for(kind)
        return fn(value) if rule is _tensor else rule(visit, value)

    return visit(container)


def rebuild(visit: Callable[[Any], Any], container: Any) -> Any:
    """``apply_to_tensors`` for one level: `visit` is called with each item of `container`."""
    kind = type(container)
    return (_RULES.get(kind) or _rule_for(kind))(visit, container)


def cast_forward_inputs(
    dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a forward with their floating-point tensors in `dtype`; with None as they are.

    Integer, bool and complex tensors stay. The cast is differentiable: an input that requires grad gets it in its own
    dtype. Containers are treated as in ``apply_to_tensors``.
    """
    if dtype is None:
        return args, kwargs

    def cast(tensor: torch.Tensor) -> torch.Tensor:
        return tensor.to(dtype) if tensor.is_floating_point() else tensor

    return apply_to_tensors(cast, args), apply_to_tensors(cast, kwargs)


def recursive_to(
    inputs: Any, target_device: torch.device | str, use_side_stream_for_tensor_copies: bool = False
) -> Any:
    """`inputs` with all tensors on `target_device`. Containers are treated as in ``apply_to_tensors``.

    Args:
        use_side_stream_for_tensor_copies: copy to an accelerator on a side stream, from pinned memory, so that the
            copies overlap with the work that is enqueued. The current stream waits for them; the host does not.
            Ignored on the CPU.
    """
    device = torch.device(target_device)
    if not accelerator.is_accelerator(device) or not use_side_stream_for_tensor_copies:
        return apply_to_tensors(lambda tensor: tensor.to(device), inputs)
    if device.index is None:  # those of tensors have one
        device = accelerator.current_device()
    stream, copies = _side_stream(device), []

    def copy_on_side(tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device == device:
            return tensor
        if tensor.layout is not torch.strided:  # its memory cannot be passed from stream to stream
            return tensor.to(device)
        # From pageable memory the host would wait for the copy. Pinning is not differentiable.
        if tensor.device.type == "cpu" and not tensor.requires_grad and not tensor.is_pinned():
            tensor = tensor.pin_memory()
        with accelerator.on(stream):
            copies.append(tensor.to(device, non_blocking=True))
        return copies[-1]

    moved = apply_to_tensors(copy_on_side, inputs)
    if copies:
        current = accelerator.current_stream(device)
        current.wait_stream(stream)
        for tensor in copies:
            tensor.record_stream(current)  # else its memory, when freed, could be written by the next copies at once
    return moved


def to_kwargs(
    inputs: tuple[Any, ...],
    kwargs: dict[str, Any] | None,
    target_device: torch.device | str,
    use_side_stream_for_tensor_copies: bool = False,
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """``recursive_to`` for the arguments of a call. `kwargs` of None are none."""
    return recursive_to((inputs, kwargs or {}), target_device, use_side_stream_for_tensor_copies)


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    return accelerator.new_stream(device)


# How to rebuild a container of each type. All return the value itself if no item was replaced.


def _tensor(visit: _Visit, value: torch.Tensor) -> Any:
    return visit(value)


def _leave(_visit: _Visit, value: Any) -> Any:
    return value


def _map_items(visit: _Visit, items: Sequence[Any]) -> list[Any] | None:
    """The mapped items; None if none was replaced."""
    mapped = None
    for index, item in enumerate(items):
        new = visit(item)
        if new is not item:
            if mapped is None:
                mapped = list(items)
            mapped[index] = new
    return mapped


def _tuple(visit: _Visit, value: tuple[Any, ...]) -> tuple[Any, ...]:
    mapped = _map_items(visit, value)
    return value if mapped is None else tuple(mapped)


def _list(visit: _Visit, value: list[Any]) -> list[Any]:
    mapped = _map_items(visit, value)
    return value if mapped is None else mapped


def _dict(visit: _Visit, value: dict[Any, Any]) -> dict[Any, Any]:
    changes = _map_values(visit, value.items())
    return {**value, **changes} if changes else value


def _map_values(visit: _Visit, pairs: Iterable[tuple[Any, Any]]) -> dict[Any, Any]:
    """The replaced values, by key."""
    changes = {}
    for key, item in pairs:
        new = visit(item)
        if new is not item:
            changes[key] = new
    return changes


def _packed_sequence(visit: _Visit, value: PackedSequence) -> Any:
    data = visit(value.data)
    if data is value.data:
        return value
    orders = [value.sorted_indices, value.unsorted_indices]
    if isinstance(data, torch.Tensor):  # the orders move with the data, the batch sizes stay on the CPU
        orders = [None if order is None else order.to(data.device) for order in orders]
    return type(value)(data, value.batch_sizes, *orders)


def _tuple_subclass(visit: _Visit, value: tuple[Any, ...]) -> tuple[Any, ...]:
    old = list(tuple.__iter__(value))
    mapped = _map_items(visit, old)
    if mapped is None:
        return value
    kind = type(value)
    try:
        made = tuple.__new__(kind, mapped)
    except TypeError:  # the named results of torch's operators, which have a constructor in C
        return kind(mapped)
    return _copy_attributes(made, value, _replacements(old, mapped))


def _list_subclass(visit: _Visit, value: list[Any]) -> list[Any]:
    old = list(list.__iter__(value))
    mapped = _map_items(visit, old)
    if mapped is None:
        return value
    made = list.__new__(type(value))
    list.extend(made, mapped)
    return _copy_attributes(made, value, _replacements(old, mapped))


def _set(visit: _Visit, value: set[Any] | frozenset[Any]) -> set[Any] | frozenset[Any]:
    old = list(value)
    mapped = _map_items(visit, old)
    if mapped is None:
        return value
    kind = type(value)
    if isinstance(value, frozenset):
        made = frozenset.__new__(kind, mapped)
    else:
        made = set.__new__(kind)
        set.update(made, mapped)
    return _copy_attributes(made, value, _replacements(old, mapped))


def _dict_subclass(visit: _Visit, value: dict[Any, Any]) -> dict[Any, Any]:
    base = OrderedDict if isinstance(value, OrderedDict) else dict
    changes = _map_values(visit, base.items(value))
    if not changes:
        return value
    made = base.__new__(type(value))
    for key, item in base.items(value):
        base.__setitem__(made, key, changes.get(key, item))
    replacements = {id(dict.__getitem__(value, key)): new for key, new in changes.items()}
    return _copy_attributes(made, value, replacements)


def _mutable_mapping(visit: _Visit, value: MutableMapping[Any, Any]) -> MutableMapping[Any, Any]:
    changes = _map_values(visit, value.items())
    if not changes:
        return value
    made = copy.copy(value)
    for key, new in changes.items():
        made[key] = new
    return made


def _mapping(visit: _Visit, value: Mapping[Any, Any]) -> Any:
    changes = _map_values(visit, value.items())
    return type(value)({**value, **changes}) if changes else value


def _dataclass(visit: _Visit, value: Any) -> Any:
    names = [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]  # some may not be set yet
    old = [getattr(value, name) for name in names]
    mapped = _map_items(visit, old)
    if mapped is None:
        return value
    made = _copy_attributes(type(value).__new__(type(value)), value, _replacements(old, mapped))
    for name, before, after in zip(names, old, mapped, strict=True):
        if after is not before:  # the attribute may be the class's default
            object.__setattr__(made, name, after)
    return made


def _registered(visit: _Visit, value: Any) -> Any:
    parts = _compat.flatten_one_level(value)
    if parts is None:
        return value
    children, rebuild = parts
    mapped = _map_items(visit, children)
    return value if mapped is None else rebuild(mapped)


def _replacements(old: Iterable[Any], mapped: Iterable[Any]) -> dict[int, Any]:
    return {id(before): after for before, after in zip(old, mapped, strict=True) if after is not before}


def _copy_attributes(made: Any, old: Any, replacements: dict[int, Any]) -> Any:
    """Copy attributes and slots of `old` to `made`, with `replacements` by the id of the replaced item."""
    kind = type(old)
    attributes = getattr(old, "__dict__", None)
    if attributes is old:  # a dict whose keys are its attributes
        made.__dict__ = made
    elif attributes:
        made.__dict__.update(
            (name, replacements.get(id(value), value))
            for name, value in attributes.items()
            if not isinstance(getattr(kind, name, None), functools.cached_property)  # it was computed from old values
        )
    for base in kind.__mro__:
        for slot in vars(base).values():
            if isinstance(slot, types.MemberDescriptorType):  # also the default factory of a defaultdict
                with contextlib.suppress(AttributeError):  # not set
                    value = slot.__get__(old, kind)
                    slot.__set__(made, replacements.get(id(value), value))
    return made


_RULES: dict[type, _Rule] = {
    torch.Tensor: _tensor,
    nn.Parameter: _tensor,
    tuple: _tuple,
    list: _list,
    dict: _dict,
    **dict.fromkeys((type(None), bool, int, float, complex, str, bytes, torch.Size, torch.dtype, torch.device), _leave),
}
"""For exact types. Others are looked up each time: a type may be registered with pytree later."""


def _rule_for(kind: type) -> _Rule:
    for base, rule in _RULES_OF_BASES:
        if issubclass(kind, base):
            return rule
    return _dataclass if dataclasses.is_dataclass(kind) else _registered


_RULES_OF_BASES: tuple[tuple[type, _Rule], ...] = (
    (torch.Tensor, _tensor),
    (PackedSequence, _packed_sequence),
    (tuple, _tuple_subclass),
    (list, _list_subclass),
    (dict, _dict_subclass),
    (set, _set),
    (frozenset, _set),
    ((nn.Module, type), _leave),
    (MutableMapping, _mutable_mapping),
    (Mapping, _mapping),
)
