"""Users' hooks on accumulated gradients, deferred until the gradients are reduced.

When autograd accumulates a gradient it is that of this rank alone, and the leaf is unsharded. Hooks that step an
optimizer need the shard and its reduced gradient, as they would find the parameter of a plain module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hpcfsdp import _compat


class OwnHook(functools.partial):
    """A hook of the engine, which autograd calls when it has accumulated the gradient of a leaf."""


class _Deferred:
    """Takes the place of a user's hook, which runs later."""

    def __init__(self, hook: Callable[[nn.Parameter], Any]) -> None:
        self.hook = hook

    def __call__(self, _leaf: nn.Parameter) -> None:
        pass


def defer_hooks(leaf: nn.Parameter, detached: set[nn.Parameter]) -> bool:
    """Not collective. Defer hooks of ``register_post_accumulate_grad_hook``, and optimizers in backward.

    Handles of hooks stay valid.

    Args:
        detached: leaves with optimizers that autograd no longer steps; added to.

    Returns:
        Whether the leaf got another accumulator.
    """
    hooks = _compat.hooks_after_accumulation(leaf)
    for key, hook in hooks.items() if hooks else ():
        if not isinstance(hook, (OwnHook, _Deferred)):
            hooks[key] = _Deferred(hook)  # under the same key, by which the user's handle removes it
    if not hasattr(leaf, _compat.STEPPED_IN_BACKWARD) or leaf in detached:
        return False
    _compat.forget_accumulator(leaf)  # which steps the optimizer
    detached.add(leaf)
    return True


def run_hooks(param: nn.Parameter) -> None:
    """Call the deferred hooks of a parameter, at rest, with its reduced gradient."""
    hooks = _compat.hooks_after_accumulation(param)
    for hook in list(hooks.values()) if hooks else ():
        if param.grad is not None and not isinstance(hook, OwnHook):
            (hook.hook if isinstance(hook, _Deferred) else hook)(param)
    optimizers = getattr(param, _compat.STEPPED_IN_BACKWARD, ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None
