"""Tensors that modules register or write to while they read a state dict.

They stay out of the model until all ranks load, and out of the state dict.
"""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.state.shown import StandIn
from hpcfsdp.state.sources import is_extra_state

Place = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass(eq=False)
class Incoming:
    """A tensor that a module is to hold, at one place or several.

    Attributes:
        source: the tensor itself, in memory of its own; or a ``DTensor`` or ``Rank0Tensor`` of the state dict.
        is_here: whether it is the former; ranks make the latter whole together.
        device, dtype: of the tensor in the module.
        requires_grad: that of a parameter, None for a buffer.
    """

    source: Any
    is_here: bool
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool | None = None


@dataclass(frozen=True)
class New:
    """A tensor that a module holds since it has begun to read.

    Attributes:
        tensor: the one that is there now.
        made: the one that was there when torch began to load into it; None if the module has put it there afterwards.
        is_param, is_persistent: how it is registered.
    """

    place: Place
    tensor: torch.Tensor
    made: torch.Tensor | None
    is_param: bool
    is_persistent: bool

    def put(self, tensor: torch.Tensor) -> None:
        """Have the module hold `tensor` there."""
        module, name = self.place
        if name in module._parameters or name in module._buffers:
            setattr(module, name, tensor)
        elif self.is_param:
            module.register_parameter(name, tensor)  # type: ignore[arg-type]
        else:
            module.register_buffer(name, tensor, persistent=self.is_persistent)


class Registries:
    """The tensors that the modules of a model hold before they read a state dict."""

    def __init__(self, root: nn.Module) -> None:
        self._before = {module: (dict(module._parameters), dict(module._buffers)) for module in root.modules()}
        self.made: dict[Place, torch.Tensor] = {}
        """Registered by hooks before loading: torch loads into them."""

    @contextlib.contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """A context in which a module loads its own part, after hooks of its own."""
        key, hooks = object(), module._load_state_dict_pre_hooks
        hooks[key] = lambda *_: self.made.update(self._new(module))  # type: ignore[index]
        try:
            yield
        finally:
            hooks.pop(key, None)  # type: ignore[call-overload]

    def remove_new(self, kept: Container[Place]) -> list[New]:
        """Have modules hold what they held before, but at the places `kept`. Returns the tensors that were new."""
        found = []
        for module, (params, buffers) in self._before.items():
            for place, now in self._new(module):
                name = place[1]
                if place in kept:
                    continue
                is_param, is_persistent = name in module._parameters, name not in module._non_persistent_buffers_set
                found.append(New(place, now, self.made.get(place), is_param, is_persistent))
                registry, before = (module._parameters, params) if is_param else (module._buffers, buffers)
                if name in before:
                    registry[name] = before[name]
                else:
                    del registry[name]
                    module._non_persistent_buffers_set.discard(name)
        return found

    def _new(self, module: nn.Module) -> list[tuple[Place, torch.Tensor]]:
        params, buffers = self._before.get(module, ({}, {}))
        return [
            ((module, name), now)
            for registry, before in ((module._parameters, params), (module._buffers, buffers))
            for name, now in registry.items()
            if now is not None and now is not before.get(name)
        ]


class LentTensors:
    """Copies of the tensors that are given to a module with a loading method of its own.

    Modules assign what they are given. Such a method may go on to write to its parameters, which would be the caller's
    tensors.
    """

    def __init__(self, module: nn.Module, given: dict[str, Any], prefix: str) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if getattr(module._load_from_state_dict, "__func__", None) is _compat.load_from_state_dict:
            return
        for key, value in given.items():
            own = "." not in key[len(prefix) :] and isinstance(value, torch.Tensor) and not is_extra_state(key)
            if own and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
                given[key] = value.clone()
                self._copies.append((value, given[key]))

    def original_of(self, now: torch.Tensor) -> torch.Tensor:
        """The caller's tensor, if `now` is a copy that was not written to: it needs no memory. Else `now`."""
        if not isinstance(now, StandIn):
            for value, copy in self._copies:
                is_copy = now.data_ptr() == copy.data_ptr() and now.stride() == copy.stride()
                if is_copy and now.dtype == value.dtype and torch.equal(now, value):
                    return value
        return now


def restore(registry: dict[str, Any], held: dict[str, Any]) -> None:
    """Have a module's parameters or buffers be those that it has `held`, and no others."""
    for name in [name for name in registry if name not in held]:
        del registry[name]
    for name, tensor in held.items():
        if registry.get(name) is not tensor:
            registry[name] = tensor
