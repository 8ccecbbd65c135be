"""One backward of a unit: its leaves in autograd's graph, the calls that it goes through, and what is still to come."""

from __future__ import annotations

import functools
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError
from hpcfsdp.params.gradient import ShardedGrad
from hpcfsdp.params.sharded_params import ShardedParams

Leaf = tuple[ShardedGrad, int]  # the gradient of its flat parameter, and its index there


@dataclass(eq=False)
class ForwardCall:
    """The record of one forward of a unit, for its backward.

    Lives as long as the graph that the call made: hooks on its outputs hold it, those on its inputs do not.
    """

    inputs: list[Any] = field(default_factory=list)  # nodes through which gradients leave towards earlier modules
    has_backward: bool = False  # whether its outputs may get gradients
    is_open: bool = False  # whether its inputs cannot show when its backward is complete
    accumulators: list[tuple[Leaf, Any]] = field(default_factory=list)  # nodes that add to gradients of leaves
    versions: list[list[int]] = field(default_factory=list)  # of parameters at the forward, by the unit's gradients
    inputs_pending: int = 0  # how many of `inputs` have not had their gradient in this backward
    ends_at_inputs: bool = False  # whether gradients leave it in this backward; a module may detach its inputs
    backward: int = 0  # the root's number of the last backward through it; several may go through one graph


class BackwardAccount:
    """The account of one backward of a unit: which gradients are still to come.

    Autograd reports when a leaf or an input of a call has got a gradient, and which nodes it will run. A leaf may get
    several gradients, and graphs of reentrant checkpoints are runs of autograd of their own, which show up late.
    """

    def __init__(self) -> None:
        self._calls: list[ForwardCall] = []
        self._counted: set[Any] = set()  # accumulators that will run, or have run
        self._outstanding: Counter[tuple[int, Leaf]] = Counter()  # gradients still to come, by run of autograd
        self._num_outstanding = 0
        self._incomplete: set[ShardedGrad] = set()  # gradients that are not complete before the unit is
        self._arrived: set[Leaf] = set()  # leaves that have had a gradient

    def begin_call(self, call: ForwardCall) -> None:
        """Count what the backward of a call will bring. It begins now."""
        self._calls.append(call)
        call.inputs_pending = sum(map(will_run, call.inputs))
        call.ends_at_inputs = call.inputs_pending > 0
        run = _compat.run_of_autograd()
        for leaf, node in call.accumulators:
            if node in self._counted:
                continue
            if will_run(node):
                self._counted.add(node)
                self._outstanding[run, leaf] += 1
                self._num_outstanding += 1
                leaf[0].outstanding += 1
            elif node is not None and leaf[0] not in self._incomplete:
                # It may be in the graph of a reentrant checkpoint, or this backward does not reach it.
                self._incomplete.add(leaf[0])
                leaf[0].outstanding += 1

    def ignore(self, nodes: Iterable[Any]) -> None:
        """Count these accumulators no more: they have run already."""
        self._counted.update(nodes)

    def arrive(self, leaf: Leaf) -> bool:
        """Note that a leaf has got a gradient. Return whether it was counted."""
        self._arrived.add(leaf)
        counted = _compat.run_of_autograd(), leaf
        if self._outstanding[counted] <= 0:
            return False
        self._outstanding[counted] -= 1
        self._num_outstanding -= 1
        leaf[0].outstanding -= 1
        return True

    def is_complete(self, leaves: Leaves, *, holds_units: bool, is_followed: bool) -> bool:
        """Return whether nothing can need the unit's parameters any more.

        They may be needed until the gradients of the inputs are computed, for instance frozen or detached weights. If
        no gradient leaves through the inputs, the backward ends when all leaves have theirs, or when the backward of
        another unit begins (`is_followed`: one that neither holds this one nor is inside), or that of the model ends:
        units inside may need the parameters of this one, and reentrant checkpoints hide leaves in graphs of their own.
        """
        if self._num_outstanding:
            return False
        ends_at_inputs = is_followed
        for call in self._calls:
            if (not is_followed) if call.is_open else call.inputs_pending > 0:
                return False
            ends_at_inputs |= call.ends_at_inputs
        if ends_at_inputs:
            return True
        return not holds_units and all(
            leaf.requires_grad and (grad, index) in self._arrived for grad, index, leaf in leaves.found
        )

    def close(self, grads: Iterable[ShardedGrad]) -> None:
        """Forget this backward of the unit with these gradients."""
        for counted in (self._calls, self._counted, self._outstanding, self._incomplete, self._arrived):
            counted.clear()
        self._num_outstanding = 0
        for grad in grads:
            grad.outstanding = 0


class Leaves:
    """The leaves of a unit in autograd's graph: the nodes that add to their gradients, and the hooks on them."""

    def __init__(self) -> None:
        self.found: list[tuple[ShardedGrad, int, nn.Parameter]] = []  # each with its gradient, and its index there
        self.is_trained = False  # whether one required a gradient when the unit was last called; as on all ranks
        self._hooked: dict[nn.Parameter, RemovableHandle] = {}
        self._detached: set[nn.Parameter] = set()  # those with optimizers in backward, which are deferred

    def hold(self, grads: Sequence[ShardedGrad], sharded_params: Sequence[ShardedParams]) -> None:
        """Let these be the gradients of the unit, and these all of its parameters."""
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        self._grads, self._sharded_params = grads, sharded_params
        self._renews_accumulators = any(flat.changes_kind for flat in sharded_params)
        self.look()

    def look(self) -> None:
        """Follow changes of ``ShardedParams.leaves``, at rest."""
        self.found = [(grad, index, leaf) for grad in self._grads for index, leaf in enumerate(grad.params.leaves)]
        self._trained, self.is_trained = [False] * len(self.found), False
        # A leaf keeps this node while a reference to it exists, and its own dtype and device stay.
        self._accumulators: list[tuple[Leaf, Any]] | None = None
        self._are_listed = False

    def list(self) -> None:
        """Let the program have the leaves that it steps, at rest: it may compute with them.

        A leaf keeps the node that adds to its gradient, and that of a forward takes whole gradients only.
        """
        self._are_listed = True
        self._renew_accumulators()

    def take_back(self) -> None:
        """Begin a forward with gradients: the program has computed at rest what it wanted to, see ``list``."""
        if self._are_listed:
            self._are_listed = False
            self._renew_accumulators()

    def forget_accumulators(self) -> None:
        """Look for the nodes that add to gradients again."""
        self._accumulators = None

    def _renew_accumulators(self) -> None:
        self._accumulators = None
        for grad, _, leaf in self.found:
            if not grad.params.steps_leaves or grad.params.is_unsharded or not leaf.requires_grad:
                continue
            if not _compat.has_hooks(_accumulator_of(leaf)):  # otherwise `accumulators` refuses it
                _compat.forget_accumulator(leaf)

    def follow(self, unit: str, hook_for: Callable[[ShardedGrad, int], Callable[[torch.Tensor], None]]) -> None:
        """Follow changes of ``requires_grad`` since the last call, and users' hooks. `unit` is for messages."""
        for flat in self._sharded_params:
            if not flat.steps_leaves:
                flat.follow_requires_grad(unit)
            elif self.defer_hooks(flat):
                self._accumulators = None
        for place, (grad, index, leaf) in enumerate(self.found):
            trained = leaf.requires_grad
            if trained is self._trained[place]:
                continue
            self._trained[place] = trained
            self.is_trained = any(self._trained)
            self._accumulators = None
            if trained and leaf not in self._hooked:
                hook = _OwnHook(hook_for(grad, index))
                self._hooked[leaf] = leaf.register_post_accumulate_grad_hook(hook)

    def accumulators(self, unit: str) -> list[tuple[Leaf, Any]]:
        """Return the nodes that add to the gradients of leaves in the latest graph. `unit` is for messages."""
        if self._accumulators is None or self._renews_accumulators:
            with torch.enable_grad():
                self._accumulators = [((grad, index), _accumulator_of(leaf)) for grad, index, leaf in self.found]
            for (grad, index), node in self._accumulators:
                slot = grad.params.layout.slots[index]
                if node is not None and tuple(_compat.inputs_of_node(node)[0].shape) != slot.shape:
                    raise EngineError(
                        f"{unit}: the AccumulateGrad node of {slot.fqn!r} was read while the parameter was "
                        "sharded, so it gets no whole gradients: use register_post_accumulate_grad_hook, which is "
                        "called with the reduced gradient of the shard, or read the node within the forward"
                    )
        return self._accumulators

    # Users' hooks on accumulated gradients. When autograd accumulates a gradient it is that of this rank alone, and the
    # leaf is unsharded. Hooks that step an optimizer need the shard and its reduced gradient, as they would find the
    # parameter of a plain module.

    def defer_hooks(self, flat: ShardedParams) -> bool:
        """Defer hooks of ``register_post_accumulate_grad_hook``, and optimizers in backward, on the leaves of `flat`.

        Handles of hooks stay valid. Returns whether leaves got other accumulators.
        """
        changed = False
        for leaf in filter(self._has_hooks, flat.leaves):
            hooks = _compat.hooks_after_accumulation(leaf)
            for key, hook in hooks.items() if hooks else ():
                if not isinstance(hook, (_OwnHook, _DeferredHook)):
                    hooks[key] = _DeferredHook(hook)  # under the same key, by which the user's handle removes it
            if hasattr(leaf, _compat.STEPPED_IN_BACKWARD) and leaf not in self._detached:
                _compat.forget_accumulator(leaf)  # which steps the optimizer
                self._detached.add(leaf)
                changed = True
        return changed

    def run_hooks(self) -> None:
        """Call users' hooks for the gradients that a backward has reduced, at rest."""
        for grad in self._grads:
            for param in filter(self._has_hooks, grad.pop_updated()):
                hooks = _compat.hooks_after_accumulation(param)
                for hook in list(hooks.values()) if hooks else ():
                    if param.grad is not None and not isinstance(hook, _OwnHook):
                        (hook.hook if isinstance(hook, _DeferredHook) else hook)(param)
                optimizers = getattr(param, _compat.STEPPED_IN_BACKWARD, ())
                if optimizers and param.grad is not None:
                    for optimizer in optimizers:
                        optimizer.step()
                    param.grad = None

    def _has_hooks(self, param: nn.Parameter) -> bool:
        """Return whether users' hooks or optimizers wait for the gradient of a parameter."""
        hooks = _compat.hooks_after_accumulation(param)
        own = param in self._hooked
        return bool(hooks and len(hooks) > own) or hasattr(param, _compat.STEPPED_IN_BACKWARD)


class _OwnHook(functools.partial):
    """A hook of the engine, which autograd calls when it has accumulated the gradient of a leaf."""


@dataclass(eq=False)
class _DeferredHook:
    """Takes the place of a user's hook, which runs later."""

    hook: Callable[[nn.Parameter], Any]

    def __call__(self, _leaf: nn.Parameter) -> None:
        pass


def _accumulator_of(leaf: torch.Tensor) -> Any:
    """Return the graph's node that adds to the gradient of a leaf; None if it does not require one."""
    return leaf.view_as(leaf).grad_fn.next_functions[0][0] if leaf.requires_grad else None


def will_run(node: Any) -> bool:
    """Return whether the running backward will run a node of the graph."""
    try:
        return node is not None and _compat.will_run(node)
    except RuntimeError:  # a leaf passed to torch.autograd.grad: its gradient goes to the caller
        return False
