"""The record of one forward call of a unit, for its backward."""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from torch import nn

from hpcfsdp import _compat
from hpcfsdp.params.gradient import FlatGrad

Leaf = tuple[FlatGrad, int]
"""A leaf: the gradient of its flat parameter, and its index there."""


@dataclass(eq=False)
class Call:
    """Lives as long as the graph that the call made: hooks on its outputs hold it, those on its inputs do not.

    Attributes:
        inputs: nodes through which gradients leave the call towards earlier modules.
        has_backward: whether its outputs may get gradients.
        is_open: whether its inputs cannot show when its backward is complete.
        accumulators: nodes that add to the gradients of the unit's leaves.
        versions: ``FlatParam.versions`` at the forward, by the unit's gradients.
        inputs_pending: how many of `inputs` have not had their gradient in this backward.
        ends_at_inputs: whether gradients leave it in this backward; a module may detach its inputs.
        backward: the root's number of the last backward through the call; several may go through one graph.
    """

    inputs: list[Any] = field(default_factory=list)
    has_backward: bool = False
    is_open: bool = False
    accumulators: list[tuple[Leaf, Any]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    inputs_pending: int = 0
    ends_at_inputs: bool = False
    backward: int = 0


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
