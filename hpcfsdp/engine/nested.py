"""Tensors in the arguments and results of modules: found, replaced, cast and moved, in nested values of any type.

There are two ways to replace a tensor. ``apply_to_tensors`` copies the containers around it. ``InPlace`` writes to
them: a module may write to its arguments, and its caller reads them afterwards, so lists, dicts and other objects keep
their identity there, and only immutable containers are copied.
"""

import contextlib
import copy
import dataclasses
import functools
import operator
import sys
import types
import warnings
import weakref
from argparse import Namespace
from collections import OrderedDict, deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.autograd.graph import Node
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

from hpcfsdp import _compat, accelerator

Hook = Callable[[torch.Tensor], None]

MOST_OBJECTS = 20_000  # that one walk enters
MOST_ITEMS = 200_000  # items and attributes that it reads in objects that are no containers, and below them
_MOST_DEPTH = 100

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, Enum, np.ndarray)
_NO_OUTPUTS = (nn.Module, type, types.ModuleType, torch.optim.Optimizer, Node, ProcessGroup, DeviceMesh)
"""Types that are not entered: their tensors are neither arguments nor results."""
_COPIED = (tuple, set, frozenset, PackedSequence)  # containers that cannot be written to, or not in place of one item
_NOT_COPIED = (*_ATOMS, nn.Module, type)
_SILENT_MODULES = sys.stdlib_module_names | {"torch", "numpy", "mpi4py", "hpcfsdp"}
"""Modules of types that hold no tensors if their instances have no attributes."""
_OPEN_IN_STDLIB = (dict, list, deque, Mapping, types.SimpleNamespace, Namespace)

Cell = tuple[Callable[[Any, Any, Any], None], Any, Any, Any]
"""An item or attribute of an object: how to write it, given the next two (mostly owner and key), and the value."""
_Copy = Callable[[Any, list[Any], list[Any]], Any]
"""Makes a copy of a container, given it, its items, and those that replace them."""


def pack_kwargs(*args: Any, **kwargs: Any) -> tuple[tuple[Any, ...], tuple[str, ...]]:
    """Return all values of a call, those of keywords last, and the keywords. ``unpack_kwargs`` is the inverse."""
    return (*args, *kwargs.values()), tuple(kwargs)


def unpack_kwargs(flat_args: tuple[Any, ...], kwarg_keys: tuple[str, ...]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the positional and keyword arguments that ``pack_kwargs`` was called with, from its result."""
    begin = len(flat_args) - len(kwarg_keys)
    if begin < 0:
        raise ValueError(f"{len(kwarg_keys)} keywords for {len(flat_args)} values: each keyword needs a value")
    return tuple(flat_args[:begin]), dict(zip(kwarg_keys, flat_args[begin:], strict=True))


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a value that ``apply_to_tensors`` would replace, in order."""
    found: list[torch.Tensor] = []
    apply_to_tensors(lambda tensor: found.append(tensor) or tensor, value)
    return found


def apply_to_tensors(fn: Callable[[torch.Tensor], Any], container: Any) -> Any:
    """Return `container` with each tensor in it replaced by the result of `fn`.

    Enters tuples, lists, sets and mappings with their subclasses, dataclasses, the data of packed sequences, and types
    registered with ``torch.utils._pytree``. All other objects, modules too, and the keys of mappings stay as they are.

    A container in which nothing was replaced is returned itself. Otherwise it is a copy of the same type, with the same
    order, attributes and default factory, made without running constructors, ``__post_init__`` or ``__setitem__`` of
    the type. Attributes that mirror a replaced item hold the new one, and cached properties are dropped.
    """
    if isinstance(container, torch.Tensor):
        return fn(container)
    # A partial, and no closure that names itself: that circle would hold what `fn` holds until the next collection.
    return _copied(functools.partial(apply_to_tensors, fn), container)


def cast_forward_inputs(
    dtype: torch.dtype | None, args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Return the arguments of a forward with floating-point tensors in `dtype`, if there is one, differentiably."""
    if dtype is None:
        return args, kwargs
    return apply_to_tensors(lambda tensor: tensor.to(dtype) if tensor.is_floating_point() else tensor, (args, kwargs))


def recursive_to(
    inputs: Any, target_device: torch.device | str, use_side_stream_for_tensor_copies: bool = False
) -> Any:
    """Return `inputs` with all tensors on `target_device`. Containers are treated as in ``apply_to_tensors``.

    On a side stream, and from pinned memory, copies to an accelerator overlap with the work that is enqueued. The
    current stream waits for them; the host does not. The CPU has none.
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
    """Apply ``recursive_to`` to the arguments of a call. `kwargs` of None are none."""
    return recursive_to((inputs, kwargs or {}), target_device, use_side_stream_for_tensor_copies)


@functools.cache
def _side_stream(device: torch.device) -> torch.Stream:
    return accelerator.new_stream(device)


class InPlace:
    """A walk that replaces each tensor that can be reached from a value by the result of `fn`, where it lies.

    `fn` is called with a tensor, and whether it is within an object that is no container; for one tensor possibly
    several times.
    """

    def __init__(self, fn: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        self.holders: list[Any] = []  # the outermost mutable objects; the module may leave tensors in these
        self.opaque: dict[type, None] = {}  # types of objects that cannot be searched
        self._fn = fn
        self._seen: dict[int, Any] = {}
        self._depth = 0
        self._within = 0  # objects that are no containers
        self._items = 0

    def __call__(self, value: Any) -> Any:
        """Return `value` with its tensors replaced: the same object, unless it is a tensor or immutable."""
        if isinstance(value, torch.Tensor):
            return self._fn(value, self._within > 0)
        if isinstance(value, _ATOMS):
            return value
        if isinstance(value, _COPIED):
            return _copied(self, value)
        kind = type(value)
        if id(value) in self._seen or not self._is_open(kind):
            return value
        if len(self._seen) >= MOST_OBJECTS or self._depth >= _MOST_DEPTH:
            self.opaque[kind] = None
            return value
        if self._depth == 0:
            self.holders.append(value)
        self._seen[id(value)] = value
        # torch's FSDP searches containers too, and casts the tensors in them.
        is_container = isinstance(value, (list, Mapping)) or dataclasses.is_dataclass(value)
        self._depth += 1
        self._within += not is_container
        try:
            cells = list(_cells(value))
            for write, owner, key, item in cells:
                self._items += self._within > 0
                if self._items > MOST_ITEMS:
                    self.opaque[kind] = None
                    break
                new = self(item)
                if new is not item:
                    write(owner, key, new)
            return value if cells else _copied(self, value)
        finally:
            self._depth -= 1
            self._within -= not is_container

    def _is_open(self, kind: type) -> bool:
        known = _KINDS.get(kind)
        if known is None:
            known = _KINDS[kind] = _classify(kind)
        if known is _OPAQUE:
            if _compat.is_registered(kind):  # since it was first seen
                return True
            self.opaque[kind] = None
        return known is _OPEN


class Arguments:
    """The tensors that replace a module's arguments while it runs.

    Each tensor that requires a gradient is replaced by a view that only this call uses. The gradient of the view is
    complete when the backward of the call is, even if others use the tensor. Mutable objects hold the views while the
    module runs, and their own tensors before and after: the module and others may keep them and write to them.
    """

    def __init__(self, unit: str, dtype: torch.dtype | None = None, hook: Hook | None = None) -> None:
        """Replace nothing yet. `unit`: its name, for messages."""
        self._unit = unit
        self._dtype = dtype  # floating-point tensors are cast to it, but for those in objects of unknown types
        self._hook = hook  # for the gradients of the views; None for no views
        self._views: list[tuple[torch.Tensor, Any]] = []  # with their grad_fn
        self._given: dict[tuple[int, bool], torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}  # by the id of the replacement
        self._nodes: dict[int, Any] = {}  # the grad_fn of each original, by its id
        self._holders: list[Any] = []

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the arguments to call the module with. ``restore`` must follow."""
        walk = InPlace(self._replace)
        self._holders = walk.holders
        try:
            args, kwargs = walk(args), {name: walk(value) for name, value in kwargs.items()}
        except BaseException:
            self.restore()
            raise
        if self._hook is not None:
            warn_of_opaque(walk.opaque, self._unit)
        return args, kwargs

    def restore(self) -> list[torch.Tensor]:
        """Put the original tensors back into mutable objects. Return computed ones there, which may get gradients."""
        if not self._holders:
            return []
        written: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, _in_object: bool) -> torch.Tensor:
            tensor = self._originals.get(id(tensor), tensor)
            if needs_hook(tensor) and not self._is_unchanged(tensor):
                written[id(tensor)] = tensor
            return tensor

        walk, holders, self._holders = InPlace(keep), self._holders, []
        for holder in holders:
            walk(holder)
        return list(written.values())

    def computed(
        self, outputs: Any, written: Iterable[torch.Tensor], lend: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Any, Iterable[torch.Tensor]]:
        """Return the outputs, and what the module has computed, there or in its arguments: `written` as by ``restore``.

        In the outputs are views in place of inputs, and what `lend` returns in place of computed tensors.
        """
        # Without the view the gradient of such an input would reach it before the output's hook runs.
        passed_on: dict[int, torch.Tensor] = {}
        found = {id(tensor): lend(tensor) for tensor in written}

        def seen(tensor: torch.Tensor, in_object: bool) -> torch.Tensor:
            if id(tensor) in self._originals:
                view = passed_on.get(id(tensor))
                tensor = passed_on[id(tensor)] = tensor.view_as(tensor) if view is None else view
            elif self._is_unchanged(tensor):
                return tensor
            if not (in_object and isinstance(tensor, nn.Parameter)):
                tensor = lend(tensor)
                found[id(tensor)] = tensor
            return tensor

        walk = InPlace(seen)
        outputs = walk(outputs)
        warn_of_opaque(walk.opaque, self._unit)
        return outputs, found.values()

    def nodes(self) -> tuple[list[Any], bool]:
        """Return the nodes of the views, and whether an in-place operation has replaced one of them in the graph."""
        nodes = [node for _, node in self._views]
        return nodes, any(view.grad_fn is not node for view, node in self._views)

    def _is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Return whether the tensor is an argument that the module has not changed."""
        return id(tensor) in self._nodes and self._nodes[id(tensor)] is tensor.grad_fn

    def _replace(self, tensor: torch.Tensor, in_object: bool) -> torch.Tensor:
        if id(tensor) in self._originals:  # its holder was reached twice
            return tensor
        cast = self._dtype is not None and not in_object and tensor.is_floating_point()
        given = self._given.get((id(tensor), cast))  # an argument passed twice stays one tensor
        if given is not None:
            return given
        given = tensor.to(self._dtype) if cast else tensor
        if self._hook is not None and given.requires_grad:
            given = given.view_as(given)
            given.register_hook(self._hook)
            self._views.append((given, given.grad_fn))
        if given is not tensor:
            self._given[id(tensor), cast] = given
            self._originals[id(given)] = tensor
            self._nodes[id(tensor)] = tensor.grad_fn
        return given


def needs_hook(tensor: torch.Tensor) -> bool:
    """Return whether a computed tensor may get a gradient."""
    return tensor.requires_grad and not tensor.is_leaf


def warn_of_opaque(kinds: dict[type, None], unit: str) -> None:
    """Warn once about each of `kinds` that cannot be searched for tensors, in arguments or results of a unit."""
    for kind in kinds:
        if kind not in _warned:
            _warned.add(kind)
            name = f"{kind.__module__}.{kind.__qualname__}"
            warnings.warn(
                f"{unit}: its forward takes or returns an object of type {name}, which hpcfsdp cannot search for "
                "tensors. If it holds tensors that require gradients, register the type: "
                f"torch.utils._pytree.register_pytree_node({kind.__qualname__}, flatten, unflatten)",
                stacklevel=2,
            )


_OPEN, _SILENT, _OPAQUE = "open", "silent", "opaque"
_KINDS: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_SLOTS: weakref.WeakKeyDictionary[type, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def _classify(kind: type) -> str:
    """Return whether to search instances of a type (open), pass over them (silent), or warn about them (opaque)."""
    if issubclass(kind, _NO_OUTPUTS):
        return _SILENT
    if issubclass(kind, _OPEN_IN_STDLIB) or _compat.is_registered(kind):
        return _OPEN
    origin = kind.__module__.partition(".")[0]
    if origin in sys.stdlib_module_names or origin == "hpcfsdp":
        return _SILENT
    if kind.__dictoffset__ or _slots_of(kind):
        return _OPEN
    return _SILENT if origin in _SILENT_MODULES else _OPAQUE


def _cells(value: Any) -> Iterator[Cell]:
    """Yield the items and attributes of an object."""
    kind = type(value)
    if isinstance(value, dict):
        for key, item in dict.items(value):
            yield dict.__setitem__, value, key, item
    elif isinstance(value, (list, deque)):
        base = list if isinstance(value, list) else deque
        for index, item in enumerate(base.__iter__(value)):
            yield base.__setitem__, value, index, item
    if kind.__dictoffset__:
        attributes = object.__getattribute__(value, "__dict__")
        if attributes is not value and isinstance(attributes, dict):
            for key, item in attributes.items():
                yield dict.__setitem__, attributes, key, item
    for slot in _slots_of(kind):
        with contextlib.suppress(AttributeError):  # not set
            yield types.MemberDescriptorType.__set__, slot, value, slot.__get__(value, kind)
    if isinstance(value, MutableMapping) and not isinstance(value, dict):
        for key, item in value.items():
            yield operator.setitem, value, key, item


def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Return the slots that Python classes have declared; those of C types must not be written to."""
    known = _SLOTS.get(kind)
    if known is None:
        declared = (member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values())
        known = _SLOTS[kind] = tuple(member for member in declared if isinstance(member, types.MemberDescriptorType))
    return known


# Copies of containers with other items


def _copied(visit: Callable[[Any], Any], container: Any) -> Any:
    """Return a copy of `container` with the results of `visit` for its items; itself if none is another one."""
    if type(container) is tuple:
        mapped = tuple(map(visit, container))
        return container if all(map(operator.is_, mapped, container)) else mapped
    parts = None if isinstance(container, _NOT_COPIED) else _parts(container)
    if parts is None:
        return container
    items, make = parts
    mapped = list(map(visit, items))
    return container if all(map(operator.is_, mapped, items)) else make(container, items, mapped)


def _parts(value: Any) -> tuple[list[Any], _Copy] | None:
    """Return the items of a container, whatever a subclass has overridden, and the function to copy it with others."""
    for base, items_of, copy_with in _CONTAINERS:
        if isinstance(value, base):
            return list(items_of(value)), copy_with
    if dataclasses.is_dataclass(value):
        return [getattr(value, name) for name in _set_fields(value)], _copy_dataclass
    registered = _compat.flatten_one_level(value)
    return None if registered is None else (registered[0], lambda _value, _items, mapped: registered[1](mapped))


def _copy_packed(value: PackedSequence, _items: list[Any], mapped: list[Any]) -> Any:
    (data,), orders = mapped, [value.sorted_indices, value.unsorted_indices]
    if isinstance(data, torch.Tensor):  # the orders move with the data, the batch sizes stay on the CPU
        orders = [None if order is None else order.to(data.device) for order in orders]
    return type(value)(data, value.batch_sizes, *orders)


def _copy_immutable(value: Any, items: list[Any], mapped: list[Any]) -> Any:
    try:
        made = (tuple if isinstance(value, tuple) else frozenset).__new__(type(value), mapped)
    except TypeError:  # the named results of torch's operators, which have a constructor in C
        return type(value)(mapped)
    return _with_attributes(made, value, items, mapped)


def _copy_mutable(value: Any, items: list[Any], mapped: list[Any]) -> Any:
    base, fill = (list, list.extend) if isinstance(value, list) else (set, set.update)
    made = base.__new__(type(value))
    fill(made, mapped)
    return _with_attributes(made, value, items, mapped)


def _copy_dict(value: dict[Any, Any], items: list[Any], mapped: list[Any]) -> dict[Any, Any]:
    base = OrderedDict if isinstance(value, OrderedDict) else dict  # which have each its own order
    made = base.__new__(type(value))
    for key, item in zip(base.__iter__(value), mapped, strict=True):
        base.__setitem__(made, key, item)
    return _with_attributes(made, value, items, mapped)


def _copy_mapping(value: Mapping[Any, Any], items: list[Any], mapped: list[Any]) -> Any:
    changes = {key: new for key, old, new in zip(value, items, mapped, strict=True) if new is not old}
    if not isinstance(value, MutableMapping):
        return type(value)({**value, **changes})
    made = copy.copy(value)
    for key, new in changes.items():
        made[key] = new
    return made


def _set_fields(value: Any) -> list[str]:
    return [field.name for field in dataclasses.fields(value) if hasattr(value, field.name)]  # some may not be set yet


def _copy_dataclass(value: Any, items: list[Any], mapped: list[Any]) -> Any:
    made = _with_attributes(type(value).__new__(type(value)), value, items, mapped)
    for name, old, new in zip(_set_fields(value), items, mapped, strict=True):
        if new is not old:  # the attribute may be the class's default
            object.__setattr__(made, name, new)
    return made


def _with_attributes(made: Any, old: Any, items: list[Any], mapped: list[Any]) -> Any:
    """`made`, with the attributes and slots of `old`; those that are one of `items` become what replaces it."""
    replacements = {id(before): after for before, after in zip(items, mapped, strict=True) if after is not before}
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


_CONTAINERS: tuple[tuple[Any, Callable[[Any], Iterable[Any]], _Copy], ...] = (
    (PackedSequence, lambda value: [value.data], _copy_packed),
    (tuple, tuple.__iter__, _copy_immutable),
    (list, list.__iter__, _copy_mutable),
    (OrderedDict, OrderedDict.values, _copy_dict),
    (dict, dict.values, _copy_dict),
    (set, iter, _copy_mutable),
    (frozenset, iter, _copy_immutable),
    (Mapping, lambda value: value.values(), _copy_mapping),
)
