"""What users hang on parameters to be called when a gradient is there: here that is after it has been reduced.

Autograd adds to leaves what this rank alone has computed, while they show whole values. Hooks that step an optimizer
have to find the shard and the gradient of it, as they would find the parameter of a plain module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterable
from typing import Any

from torch import nn

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError

_STEPPED = "_in_backward_optimizers"
"""Where ``torch.distributed.optim._apply_optimizer_in_backward`` notes the optimizers of a parameter."""


class OwnHook(functools.partial):
    """A hook that autograd is to call when it has come to a leaf."""


class _Deferred:
    """A hook of the user's that autograd finds in its place, and that is called later."""

    def __init__(self, hook: Callable[[nn.Parameter], Any]) -> None:
        self.hook = hook

    def __call__(self, _leaf: nn.Parameter) -> None:
        pass


def defer_hooks(leaves: Iterable[nn.Parameter], detached: set[nn.Parameter]) -> bool:
    """Not collective. Keep hooks of ``register_post_accumulate_grad_hook``, and optimizers in backward, until later.

    Handles of hooks stay valid.

    Args:
        detached: parameters whose optimizers have been taken from autograd; added to.

    Returns:
        Whether the nodes that add to the gradients of leaves are others than before.
    """
    changed = False
    for leaf in leaves:
        hooks = leaf._post_accumulate_grad_hooks
        for key, hook in hooks.items() if hooks else ():
            if not isinstance(hook, (OwnHook, _Deferred)):
                hooks[key] = _Deferred(hook)  # under the same key: removing it is the handle's business
        if hasattr(leaf, _STEPPED) and leaf not in detached:
            _compat.forget_accumulator(leaf)  # which steps the optimizer
            detached.add(leaf)
            changed = True
    return changed


def check_flat_parameter(param: nn.Parameter, unit: str) -> None:
    """Refuse hooks on a flat parameter, which autograd never comes to.

    Raises:
        EngineError: with what to do.
    """
    if param._backward_hooks:
        raise EngineError(
            f"{unit}: register_hook was called on a flat parameter, which has no part in the graph: use "
            "register_post_accumulate_grad_hook, which is called with the reduced gradient of the shard, or wrap with "
            "use_orig_params=True"
        )


def run_hooks(params: Iterable[nn.Parameter]) -> None:
    """Call what waits for the gradients of these parameters, which are reduced and at rest."""
    for param in params:
        hooks = param._post_accumulate_grad_hooks
        for hook in list(hooks.values()) if hooks else ():
            if param.grad is not None and not isinstance(hook, OwnHook):
                (hook.hook if isinstance(hook, _Deferred) else hook)(param)
        optimizers = getattr(param, _STEPPED, ())
        if optimizers and param.grad is not None:
            for optimizer in optimizers:
                optimizer.step()
            param.grad = None
