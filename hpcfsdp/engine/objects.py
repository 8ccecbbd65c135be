"""Tensors in arguments and results of modules, replaced where they lie: in objects of any type, caches above all.

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
from collections.abc import Callable, Iterator, Mapping, MutableMapping
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
        if isinstance(value, _REBUILT):
            return rebuild(self, value)
        kind = type(value)
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
