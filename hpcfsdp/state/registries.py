"""What modules register while they read a state dict: it stays out of the model until all ranks load."""

from __future__ import annotations

import contextlib
from collections.abc import Container, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

Place = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass(eq=False)
class Incoming:
    """A tensor that is to stand in a module, at one place or several.

    Attributes:
        source: the tensor itself, which nobody else has; or a ``DTensor`` or ``Rank0Tensor`` of the state dict.
        is_here: whether it is the former; ranks make the latter whole together.
        device, dtype: of what modules get.
        requires_grad: that of a parameter, None for a buffer.
    """

    source: Any
    is_here: bool
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool | None = None


@dataclass(frozen=True)
class New:
    """What a module holds since it has begun to read.

    Attributes:
        place: where.
        tensor: what it is now.
        made: what it was when torch began to load into it; None if the module has put it there afterwards.
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
    """What the modules of a model hold before they read a state dict."""

    def __init__(self, root: nn.Module) -> None:
        self._before = {module: (dict(module._parameters), dict(module._buffers)) for module in root.modules()}
        self.made: dict[Place, torch.Tensor] = {}
        """What hooks before loading have registered, into which torch loads."""

    @contextlib.contextmanager
    def watched(self, module: nn.Module) -> Iterator[None]:
        """A context in which a module loads its own part, after hooks of its own."""
        key, hooks = object(), module._load_state_dict_pre_hooks
        hooks[key] = lambda *_: self.made.update(self._new(module))  # type: ignore[index]
        try:
            yield
        finally:
            hooks.pop(key, None)  # type: ignore[call-overload]

    def taken_out(self, kept: Container[Place]) -> list[New]:
        """What is new but at the places `kept`; modules are without it from here on, and hold what they held before."""
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


def put_all_back(registry: dict[str, Any], held: dict[str, Any]) -> None:
    """Have a module's parameters or buffers be those that it has `held`, and no others."""
    for name in [name for name in registry if name not in held]:
        del registry[name]
    for name, tensor in held.items():
        if registry.get(name) is not tensor:
            registry[name] = tensor
