"""Arguments and results of modules: tensors in objects of any type, replaced in place.

A module may write to its arguments, and its caller reads them afterwards. So lists, dicts and other objects keep their
identity here. Only immutable containers (tuples, sets, packed sequences) are rebuilt, as in ``containers``.
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
"""Objects that one visit enters."""
MOST_ITEMS = 200_000
"""Items and attributes that one visit reads in objects that are no containers, and below them."""
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
"""Types that are not entered: their tensors are neither arguments nor results."""
_REBUILT = (tuple, set, frozenset, PackedSequence)
_SILENT_MODULES = sys.stdlib_module_names | {"torch", "numpy", "mpi4py", "hpcfsdp"}
"""Modules of types that hold no tensors if their instances have no attributes."""
_OPEN_IN_STDLIB = (dict, list, deque, Mapping, types.SimpleNamespace, Namespace)

Cell = tuple[Callable[[Any, Any, Any], None], Any, Any, Any]
"""An item or attribute of an object: how to write it, the owner, the key, and the value."""


class Visit:
    """Replaces each tensor that can be reached from a value by the result of `fn`.

    `fn` is called with a tensor, and whether it is within an object that is no container; for one tensor possibly
    several times.

    Attributes:
        holders: the outermost mutable objects; the module may leave tensors in these.
        opaque: types of objects that cannot be searched.
    """

    def __init__(self, fn: Callable[[torch.Tensor, bool], torch.Tensor]) -> None:
        self.holders: list[Any] = []
        self.opaque: dict[type, None] = {}
        self._fn = fn
        self._seen: dict[int, Any] = {}
        self._depth = 0
        self._within = 0  # objects that are no containers
        self._items = 0

    def __call__(self, value: Any) -> Any:
        """`value` with its tensors replaced: the same object, unless it is a tensor or immutable."""
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
    """The tensors that replace a module's arguments while it runs.

    Each tensor that requires a gradient is replaced by a view that only this call uses. The gradient of the view is
    complete when the backward of the call is, even if others use the tensor. Mutable objects hold the views while the
    module runs, and their own tensors before and after: the module and others may keep them and write to them.

    Args:
        unit: its name, for messages.
        dtype: floating-point tensors are cast to it, except for those in objects of unknown types.
        hook: for the gradients of the views; None for no views.
    """

    def __init__(self, unit: str, dtype: torch.dtype | None, hook: Hook | None) -> None:
        self._unit = unit
        self._dtype = dtype
        self._hook = hook
        self._views: list[tuple[torch.Tensor, Any]] = []
        self._given: dict[tuple[int, bool], torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}  # by the id of the replacement
        self._nodes: dict[int, Any] = {}  # the grad_fn of each original, by its id
        self._holders: list[Any] = []

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call the module with. ``restore`` must follow."""
        visit = Visit(self._replace)
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
        """After the module has run: put the original tensors back into mutable objects.

        Returns:
            Tensors in these objects that require gradients, and that the module has stored or changed there.
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

    def computed(
        self, outputs: Any, written: Iterable[torch.Tensor], lend: Callable[[torch.Tensor], torch.Tensor]
    ) -> tuple[Any, Iterable[torch.Tensor]]:
        """Find the tensors that the module has computed, in its outputs and in its arguments.

        Args:
            written: the result of ``restore``.
            lend: returns what to return in place of a computed tensor.

        Returns:
            The outputs, with a view in place of each input that the module returns, and all tensors found.
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

        visit = Visit(seen)
        outputs = visit(outputs)
        warn_of_opaque(visit.opaque, self._unit)
        return outputs, found.values()

    def nodes(self) -> tuple[list[Any], bool]:
        """The nodes of the views, and whether an in-place operation has replaced one of them in the graph."""
        nodes = [node for _, node in self._views]
        return nodes, any(view.grad_fn is not node for view, node in self._views)

    def _is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether the tensor is an argument that the module has not changed."""
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
    """Whether a computed tensor may get a gradient."""
    return tensor.requires_grad and not tensor.is_leaf


def warn_of_opaque(kinds: dict[type, None], unit: str) -> None:
    """Warn once about each type that cannot be searched for tensors, in arguments or results of a unit."""
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
    """Whether to search instances of a type (open), pass over them (silent), or warn about them (opaque)."""
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
    """Whether torch's FSDP searches it too, and casts the tensors in it."""
    return isinstance(value, (list, Mapping)) or dataclasses.is_dataclass(value)


def _cells(value: Any) -> Iterator[Cell]:
    """The items and attributes of an object."""
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
    """Those that Python classes have declared; those of C types must not be written to."""
    known = _SLOTS.get(kind)
    if known is None:
        declared = (member for base in kind.__mro__ if "__slots__" in vars(base) for member in vars(base).values())
        known = _SLOTS[kind] = tuple(member for member in declared if isinstance(member, types.MemberDescriptorType))
    return known
