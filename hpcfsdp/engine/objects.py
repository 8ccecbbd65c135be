"""What a module is given and what it returns: tensors in objects of any type, replaced where they lie.

What a module is given may be written to by it, and is read by others when it is through: it has to stay the object
that it is. So lists, dicts and objects keep their identity here. Only what cannot be written to (tuples, sets, packed
sequences) is rebuilt, as ``containers`` does it.
"""

from __future__ import annotations

import dataclasses
import operator
import sys
import types
import warnings
import weakref
from argparse import Namespace
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, MutableMapping
from enum import Enum
from typing import Any

import numpy as np
import torch
from torch import nn
from torch.distributed import ProcessGroup
from torch.distributed.device_mesh import DeviceMesh
from torch.nn.utils.rnn import PackedSequence

from hpcfsdp import _compat
from hpcfsdp.engine.containers import rebuild

Hook = Callable[[torch.Tensor], None]

MOST_OBJECTS = 20_000
"""How many objects one visit looks into."""
MOST_ITEMS = 200_000
"""How many items and attributes of objects that are no containers, and of what they hold, it looks at."""
_MOST_DEPTH = 100

_ATOMS = (str, bytes, int, float, complex, type(None), torch.dtype, torch.device, torch.Size, Enum, np.ndarray)
_NO_OUTPUTS = (
    nn.Module,
    type,
    types.ModuleType,
    torch.optim.Optimizer,
    torch.autograd.graph.Node,
    ProcessGroup,
    DeviceMesh,
)
"""What is not looked into although it may lead to tensors: those are no arguments and no results."""
_REBUILT = (tuple, set, frozenset, PackedSequence)
_SILENT_MODULES = sys.stdlib_module_names | {"torch", "numpy", "mpi4py", "hpcfsdp"}
"""Where types come from that hold no tensors if their instances have no attributes."""
_OPEN_IN_STDLIB = (dict, list, deque, Mapping, types.SimpleNamespace, Namespace)

Cell = tuple[Callable[[Any, Any, Any], None], Any, Any, Any]
"""A place where an object keeps something: how to write it, the owner, the key, and what is there."""


class Visit:
    """Replaces each tensor that can be reached from a value by what `fn` makes of it.

    Attributes:
        holders: the outermost objects that can be written to; the module may leave tensors in these.
        opaque: types of objects that cannot be looked into.
    """

    def __init__(self, fn: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        """
        Args:
            fn: called with a tensor, and whether it lies in an object whose type is no container. It may come to one
                tensor several times.
        """
        self.holders: list[Any] = []
        self.opaque: dict[type, None] = {}
        self._fn = fn
        self._seen: dict[int, Any] = {}
        self._depth = 0
        self._within = 0  # objects that are no containers
        self._items = 0

    def __call__(self, value: Any) -> Any:
        """`value` with its tensors replaced: itself, unless it is a tensor or cannot be written to."""
        if isinstance(value, torch.Tensor):
            return self._fn(value, self._within > 0)
        if isinstance(value, _ATOMS):
            return value
        kind = type(value)
        if isinstance(value, _REBUILT):
            return self._tuple(value) if kind is tuple else rebuild(self, value)
        if id(value) in self._seen or not self._is_open(kind):
            return value
        if len(self._seen) >= MOST_OBJECTS or self._depth >= _MOST_DEPTH:
            self.opaque[kind] = None
            return value
        if self._depth == 0:
            self.holders.append(value)
        self._seen[id(value)] = value
        is_container = _is_container(value)
        self._depth += 1
        self._within += not is_container
        try:
            return self._inside(value)
        finally:
            self._depth -= 1
            self._within -= not is_container

    def _tuple(self, value: tuple[Any, ...]) -> tuple[Any, ...]:
        items = tuple(map(self, value))
        return value if all(map(operator.is_, items, value)) else items

    def _inside(self, value: Any) -> Any:
        found = False
        for write, owner, key, item in list(_cells(value)):
            found = True
            self._items += self._within > 0
            if self._items > MOST_ITEMS:
                self.opaque[type(value)] = None
                break
            new = self(item)
            if new is not item:
                write(owner, key, new)
        return value if found else rebuild(self, value)

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
    """What a module computes with in place of the tensors that it was called with, while it runs.

    Each tensor with a gradient to come is replaced by a view that only this call uses: its gradient is complete when
    the call is through, also where others use the tensor. Objects that can be written to show the views as long as the
    module runs, and their own tensors before and after: the module, and others, may keep them and write to them.
    """

    def __init__(self, unit: str, dtype: torch.dtype | None, hook: Hook | None) -> None:
        """
        Args:
            unit: its name, for messages.
            dtype: floating-point tensors are cast to it, except for those in objects of unknown types.
            hook: for the gradients of the views; None for no views.
        """
        self._unit = unit
        self._dtype = dtype
        self._hook = hook
        self._views: list[tuple[torch.Tensor, Any]] = []
        self._given: dict[tuple[int, bool], torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}  # by the id of what was given in place of each
        self._nodes: dict[int, Any] = {}  # what computed each original, by its id
        self._holders: list[Any] = []

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call the module with. ``restore`` has to follow."""
        visit = Visit(self._give)
        self._holders = visit.holders
        try:
            args, kwargs = visit(args), {name: visit(value) for name, value in kwargs.items()}
        except BaseException:
            self.restore()
            raise
        if self._hook is not None:
            warn_of_opaque(visit.opaque, self._unit)
        return args, kwargs

    def restore(self) -> list[torch.Tensor]:
        """The module has run. Give objects their own tensors back.

        Returns:
            Tensors that need gradients, and that the module has put into these objects, or changed there.
        """
        written: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, _in_object: bool) -> torch.Tensor:
            tensor = self._originals.get(id(tensor), tensor)
            if needs_hook(tensor) and not self._is_unchanged(tensor):
                written[id(tensor)] = tensor
            return tensor

        visit = Visit(keep)
        for holder in self._holders:
            visit(holder)
        self._holders = []
        return list(written.values())

    def computed(self, outputs: Any, written: Iterable[torch.Tensor]) -> tuple[Any, Iterable[torch.Tensor]]:
        """Find what the module has computed, in its outputs and in its arguments.

        Args:
            written: what ``restore`` has returned.

        Returns:
            The outputs, in which inputs that the module returns are views of their own, and all tensors found.
        """
        # The gradient of an input that the module returns would reach the input before the output's hook runs.
        passed_on: dict[int, torch.Tensor] = {}
        found = {id(tensor): tensor for tensor in written}

        def seen(tensor: torch.Tensor, in_object: bool) -> torch.Tensor:
            if id(tensor) in self._originals:
                view = passed_on.get(id(tensor))
                tensor = passed_on[id(tensor)] = tensor.view_as(tensor) if view is None else view
            elif self._is_unchanged(tensor):
                return tensor
            if not (in_object and isinstance(tensor, nn.Parameter)):
                found[id(tensor)] = tensor
            return tensor

        visit = Visit(seen)
        outputs = visit(outputs)
        warn_of_opaque(visit.opaque, self._unit)
        return outputs, found.values()

    def nodes(self) -> tuple[list[Any], bool]:
        """The nodes of the views, and whether an operation in place has taken one of them out of the graph."""
        nodes = [node for _, node in self._views]
        return nodes, any(view.grad_fn is not node for view, node in self._views)

    def _is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether the module was given a view of this tensor, and has not changed it."""
        return id(tensor) in self._nodes and self._nodes[id(tensor)] is tensor.grad_fn

    def _give(self, tensor: torch.Tensor, in_object: bool) -> torch.Tensor:
        if id(tensor) in self._originals:  # two ways lead to the place where it lies
            return tensor
        cast = self._dtype is not None and not in_object and tensor.is_floating_point()
        given = self._given.get((id(tensor), cast))  # what is passed twice stays one tensor
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
    """Whether a gradient may come to a tensor that some unit has computed."""
    return tensor.requires_grad and not tensor.is_leaf


def warn_of_opaque(kinds: dict[type, None], unit: str) -> None:
    """Warn once of each type whose instances cannot be looked into for tensors.

    Args:
        unit: the name of the unit that was given, or has returned, instances.
    """
    for kind in kinds:
        if kind not in _warned:
            _warned.add(kind)
            name = f"{kind.__module__}.{kind.__qualname__}"
            warnings.warn(
                f"{unit}: an object of type {name} goes into its forward or comes out of it, and cannot be looked into "
                f"for tensors. If it holds tensors that need gradients, register the type: "
                f"torch.utils._pytree.register_pytree_node({kind.__qualname__}, flatten, unflatten)",
                stacklevel=2,
            )


_OPEN, _SILENT, _OPAQUE = "open", "silent", "opaque"
_KINDS: weakref.WeakKeyDictionary[type, str] = weakref.WeakKeyDictionary()
_SLOTS: weakref.WeakKeyDictionary[type, tuple[Any, ...]] = weakref.WeakKeyDictionary()
_warned: weakref.WeakSet[type] = weakref.WeakSet()


def _classify(kind: type) -> str:
    """What to do with instances of a type: look into them, pass them in silence, or warn of them."""
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


def _is_container(value: Any) -> bool:
    """Whether torch's FSDP looks into it, too, and casts what it finds."""
    return isinstance(value, (list, Mapping)) or dataclasses.is_dataclass(value)


def _cells(value: Any) -> Iterator[Cell]:
    """Where an object keeps what it holds."""
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
        try:
            yield _set_slot, value, slot, slot.__get__(value, kind)
        except AttributeError:  # not set
            continue
    if isinstance(value, MutableMapping) and not isinstance(value, dict):
        for key, item in value.items():
            yield operator.setitem, value, key, item


def _set_slot(owner: Any, slot: types.MemberDescriptorType, item: Any) -> None:
    slot.__set__(owner, item)


def _slots_of(kind: type) -> tuple[types.MemberDescriptorType, ...]:
    """Those that classes written in Python have declared; what C has is not to be written to."""
    known = _SLOTS.get(kind)
    if known is None:
        declared = (member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values())
        known = _SLOTS[kind] = tuple(member for member in declared if isinstance(member, types.MemberDescriptorType))
    return known
