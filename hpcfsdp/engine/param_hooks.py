"""What users hang on parameters to be called when a gradient is there: here that is after it has been reduced.

Autograd adds to leaves what this rank alone has computed, while they show whole values. Hooks that step an optimizer
have to find the shard and the gradient of it, as they would find the parameter of a plain module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

from torch import nn

from hpcfsdp import _compat


class OwnHook(functools.partial):
    """A hook of the engine, which autograd calls when it has come to a leaf."""


class _Deferred:
    """A hook of the user's that autograd finds in its place, and that runs later."""

    def __init__(self, hook: Callable[[nn.Parameter], Any]) -> None:
        self.hook = hook

    def __call__(self, _leaf: nn.Parameter) -> None:
        pass


def defer_hooks(leaf: nn.Parameter, detached: set[nn.Parameter]) -> bool:
    """Not collective. Keep hooks of ``register_post_accumulate_grad_hook``, and optimizers in backward, until later.

    Handles of hooks stay valid.

    Args:
        detached: leaves whose optimizers have been taken from autograd; added to.

    Returns:
        Whether another node adds to the gradient of the leaf than before.
    """
    hooks = _compat.hooks_after_accumulation(leaf)
    for key, hook in hooks.items() if hooks else ():
        if not isinstance(hook, (OwnHook, _Deferred)):
            hooks[key] = _Deferred(hook)  # under the same key: removing it is the handle's business
    if not hasattr(leaf, _compat.STEPPED_IN_BACKWARD) or leaf in detached:
        return False
    _compat.forget_accumulator(leaf)  # which steps the optimizer
    detached.add(leaf)
    return True


def run_hooks(param: nn.Parameter) -> None:
    """Call what waits for the gradient of a parameter, which is reduced and at rest."""
    hooks = _compat.hooks_after_accumulation(param)
    for hook in list(hooks.values()) if hooks else ():
        if param.grad is not None and not isinstance(hook, OwnHook):
            (hook.hook if isinstance(hook, _Deferred) else hook)(param)
    optimizers = getattr(param, _compat.STEPPED_IN_BACKWARD, ())
    if optimizers and param.grad is not None:
        for optimizer in optimizers:
            optimizer.step()
        param.grad = None
