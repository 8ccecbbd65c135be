"""One unit: its parameters are gathered before use and freed after it, its gradients reduced when complete.

The methods stand in the order of a step: ``pre_forward, post_forward, pre_backward, post_backward``. The root calls
them. docs/developers/step.md lists what happens on which event.
"""

from __future__ import annotations

import functools
import weakref
from collections import Counter
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from hpcfsdp import _compat, timeline
from hpcfsdp.engine.backward import Call, Leaf, OwnHook, defer_hooks, run_hooks
from hpcfsdp.engine.context import Context, Values
from hpcfsdp.engine.nested import Arguments, Hook, InPlace, needs_hook, tensors_in
from hpcfsdp.errors import EngineError
from hpcfsdp.params.gradient import FlatGrad, ReduceOptions
from hpcfsdp.params.sharded_params import ShardedParams

BeforeBackward = Callable[["Unit", Call], None]
HOOK_KEY = "hpcfsdp"
"""Of the engine's hook among those of a module; torch's keys are numbers."""


class TrainingState(Enum):
    """The state of a unit."""

    IDLE = "idle"
    """Between steps, or between its forward and its backward: sharded."""
    FORWARD = "forward"
    """Its forward runs: unsharded."""
    BACKWARD = "backward"
    """Its backward runs: unsharded."""
    RECOMPUTE = "recompute"
    """Its forward runs again within its backward (activation checkpointing): stays unsharded."""
    SUMMON = "summon_full_params"
    """Its parameters are whole for the user."""


TRANSITIONS = {
    TrainingState.IDLE: {TrainingState.FORWARD, TrainingState.BACKWARD, TrainingState.SUMMON},
    TrainingState.FORWARD: {TrainingState.IDLE},
    TrainingState.BACKWARD: {TrainingState.IDLE, TrainingState.RECOMPUTE},
    TrainingState.RECOMPUTE: {TrainingState.BACKWARD},
    TrainingState.SUMMON: {TrainingState.IDLE},
}


class ComputedView(Protocol):
    """A tensor that replaces a leaf in the modules while they compute."""

    def show(self) -> None:
        """Make it of the leaf's gathered values, and have modules hold it."""

    def hide(self) -> None:
        """Have modules hold the leaf."""


class Unit:
    """Flat parameters that are gathered and freed together, and the calls of the module that needs them.

    Attributes:
        name: of the wrapped module within the root, unique under the root.
        views: replace leaves in modules that compute.
        registries: of hooks before forward, of the modules that hold parameters. At rest they contain `hook_at_rest`,
            which refuses calls of modules that would compute with shards.
        flats: one for each dtype and ``requires_grad`` among the parameters; empty if units inside own all of them.
        grads: of the flat parameters that may get gradients.
        inside: other units that the module holds.
        training_state: changed by ``_enter`` alone.
        values: of the flat parameters, while they are gathered.
        owes_grads: whether gradients of a forward have not been reduced yet.
        num_calls: forwards that expect a backward.
        context: shared with all units under the same root, None until that is first called.
        input_dtype: floating-point inputs are cast to it; None to leave them.
        reshard_after_forward: whether the values are freed between forward and backward.
        reshard_after_backward: whether they are freed after a backward.
        unshards_in_backward: whether a backward needs the values.
        is_kept: whether the program has asked for the values, and not given them back.
        prefetch_forward: gather the next unit of a forward.
        prefetch_backward: gather the next unit of a backward, "pre" or "post" this one's gradients.
        prefetched: by kind ("forward", "backward") the units to gather instead of the next one.
    """

    def __init__(
        self,
        name: str,
        sharded_params: Sequence[ShardedParams],
        views: Sequence[ComputedView] = (),
    ) -> None:
        self.name = name
        self.views = tuple(views)
        self.registries: list[dict[Any, Any]] = []
        self.hook_at_rest: Callable[..., Any] | None = None
        self.reshard_after_forward = self.reshard_after_backward = True
        self.unshards_in_backward = True
        self.is_kept = self._keeps_back = False
        self.inside: frozenset[Unit] = frozenset()
        self.input_dtype: torch.dtype | None = None
        self.prefetch_forward = False
        self.prefetch_backward: str | None = None
        self.prefetched: dict[str, Sequence[Unit]] = {}
        self.training_state = TrainingState.IDLE
        self.context: Context | None = None
        self._begin_model_backward: Callable[[], None] | None = None
        self.owes_grads = False
        self.num_calls = 0
        self._hooked: dict[nn.Parameter, RemovableHandle] = {}
        self._detached: set[nn.Parameter] = set()  # leaves with optimizers in backward, which are deferred
        self.reduce_options = ReduceOptions()
        self.hold(sharded_params)
        self._calls: list[Call] = []  # with a backward under way
        self._counted: set[Any] = set()  # accumulators that will run, or have run, in this backward
        # Gradients that each leaf is still to get, by run of autograd: reentrant checkpoints have their own.
        self._outstanding: Counter[tuple[int, Leaf]] = Counter()
        self._num_outstanding = 0
        self._held: set[FlatGrad] = set()  # gradients that are not complete before the unit is
        self._arrived: set[Leaf] = set()  # leaves that have had a gradient in this backward
        self._enqueues_at_the_end = False
        self._arguments: Arguments | None = None  # of the forward that is running

    def hold(self, sharded_params: Sequence[ShardedParams]) -> None:
        """Not collective, at rest, without a root. Own these flat parameters, and no others."""
        self.sharded_params = tuple(sharded_params)
        self.values = Values(self.sharded_params, self.name)
        self.grads = tuple(
            FlatGrad(flat, self.reduce_options) for flat in self.sharded_params if flat.is_differentiable
        )
        self.keeps_back = self._keeps_back
        for handle in self._hooked.values():
            handle.remove()
        self._hooked.clear()
        self._renews_accumulators = any(flat.changes_kind for flat in self.sharded_params)
        self.look_at_leaves()

    @property
    def keeps_back(self) -> bool:
        """Whether gradients wait for a later synchronisation, as within ``no_sync``."""
        return self._keeps_back

    @keeps_back.setter
    def keeps_back(self, keeps_back: bool) -> None:
        self._keeps_back = keeps_back
        for grad in self.grads:
            grad.keeps_back = keeps_back

    def look_at_leaves(self) -> None:
        """Not collective, at rest. Follow changes of ``ShardedParams.leaves``."""
        self._leaves = [(grad, index, leaf) for grad in self.grads for index, leaf in enumerate(grad.flat.leaves)]
        self._trained = [False] * len(self._leaves)  # their requires_grad when the unit was last called
        # A leaf keeps this node while a reference to it exists, and its own dtype and device stay.
        self._accumulators: list[tuple[Leaf, Any]] | None = None
        self._lists_leaves = False

    def list_leaves(self) -> None:
        """Not collective. The program is given the leaves that it steps, and may compute with them at rest.

        A leaf keeps the node that adds to its gradient, and that of a forward takes whole gradients only.
        """
        self._lists_leaves = True
        self._renew_accumulators()

    def _renew_accumulators(self) -> None:
        self._accumulators = None
        for grad, _, leaf in self._leaves:
            if not grad.flat.steps_leaves or grad.flat.is_unsharded or not leaf.requires_grad:
                continue
            if not _compat.has_hooks(_accumulator_of(leaf)):  # otherwise `_accumulators_now` refuses it
                _compat.forget_accumulator(leaf)

    def attach(self, context: Context, begin_backward: Callable[[], None] | None = None) -> None:
        """Not collective. Join the units under a root, whose backwards `begin_backward` begins."""
        self.context, self._begin_model_backward = context, begin_backward
        for index, grad in enumerate(self.grads):
            grad.name = f"{self.name}[{index}]" if index else self.name
            context.reductions.plan(grad, index)

    # The life of a step

    def begin_forward(self) -> None:
        """Not collective. Begin a call of the module. Refuses a call from inside of the unit's own forward."""
        self._enter(TrainingState.RECOMPUTE if self.training_state is TrainingState.BACKWARD else TrainingState.FORWARD)
        self.is_kept = False

    def pre_forward(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[Call, tuple[Any, ...], Any]:
        """Collective. Gather the parameters. Returns the call, and the arguments to call the module with."""
        call = Call()
        if self.sharded_params:
            self._gather_for_forward()
        hook = _weak_hook(Unit._input_done, self, call) if self.sharded_params and _compat.records_backward() else None
        if hook is not None or self.input_dtype is not None:
            self._arguments = Arguments(self.name, self.input_dtype, hook)
            args, kwargs = self._arguments.lend(args, kwargs)
        return call, args, kwargs

    def post_forward(self, call: Call, outputs: Any, before_backward: BeforeBackward) -> Any:
        """Not collective. Register hooks on the outputs, which call `before_backward` with this unit and `call`.

        Returns:
            The outputs; inputs and parameters of the unit among them are replaced by views.

        Raises:
            EngineError: an output views values that the end of the forward frees.
        """
        self.context.streams.proceed()
        arguments, self._arguments = self._arguments, None
        written = [] if arguments is None else arguments.restore()
        if self.sharded_params and not _compat.in_transform():
            if torch.is_grad_enabled():
                arguments = arguments or Arguments(self.name, None, None)  # the module has switched gradients on
                call.inputs, call.is_open = arguments.nodes()
                outputs, computed = arguments.computed(outputs, written, self._lend)
                hook = _output_hook(self, call, before_backward)
                for tensor in computed:
                    if needs_hook(tensor):
                        tensor.register_hook(hook)
                        call.has_backward = True
                if call.has_backward:
                    call.accumulators = self._accumulators_now()
                    call.versions = [grad.flat.versions for grad in self.grads]
            elif any(map(self._is_own, tensors_in(outputs))):
                outputs = InPlace(lambda tensor, _in_object: self._lend(tensor))(outputs)
            if torch.is_autocast_enabled(self.sharded_params[0].device.type) and torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()  # its casts of weights, which are freed too
        return outputs

    def end_forward(self, *, broken: bool) -> None:
        """Not collective. End a call of the module, `broken` by an exception or not; free the parameters.

        They stay where ``reshard_after_forward`` is False and a backward may follow, and where a transform of
        ``torch.func`` computes derivatives without the unit's hooks.
        """
        if self._arguments is not None:
            self._arguments.restore()
            self._arguments = None
        self.hide()
        if self.training_state is TrainingState.RECOMPUTE:
            self._enter(TrainingState.BACKWARD)
            self._show_in_backward()
        else:
            self._enter(TrainingState.IDLE)
            keeps = self.stays_unsharded if not torch.is_grad_enabled() else not self.reshard_after_forward
            if (broken or not (keeps or self.is_partly_called)) and not _compat.in_transform():
                self.reshard()

    def unbind(self) -> None:
        """Not collective. Have modules hold what they hold at rest, whether the values stay or not."""
        self.hide()
        for flat in self.sharded_params:
            flat.unbind()

    def lend(self, *, stays: bool) -> None:
        """Not collective, before a backward. Have modules register what they do at rest; leaves show the values.

        Args:
            stays: the backward has no hooks, so that leaves must not lose the values where they are the same objects.
        """

    @property
    def is_idle(self) -> bool:
        """Whether the unit is in no forward, no backward, and no ``summon_full_params``."""
        return self.training_state is TrainingState.IDLE

    @property
    def values_outlive_forward(self) -> bool:
        """Whether the program may compute with the values between a forward and its backward."""
        return not self.reshard_after_forward

    @property
    def is_trained(self) -> bool:
        """Whether a parameter required a gradient when the unit was last called; the same on all ranks."""
        return any(self._trained)

    @property
    def stays_unsharded(self) -> bool:
        """Whether the values stay where no backward needs them, until parameters change."""
        return False

    @property
    def is_partly_called(self) -> bool:
        """Whether the forward of the model may still call other modules of the unit."""
        return False

    def complete_forward(self) -> bool:
        """Not collective. The forward of the model is over. Returns whether to free what was kept for other calls."""
        return False

    def expect_backward(self, *, later: bool) -> None:
        """Not collective. A call has returned outputs that may get gradients, `later` than in a running backward."""
        self.owes_grads = True
        self.num_calls += later

    def restore_expected(self, owes_grads: bool, num_calls: int) -> None:
        """Not collective. Forget the calls since these values were read."""
        self.owes_grads, self.num_calls = owes_grads, num_calls

    def check_versions(self, call: Call) -> None:
        """Not collective. Refuse parameters changed since the forward, as torch does for saved tensors.

        Parameters that this backward does not reach may have changed, for instance by another optimizer.
        """
        for grad, before in zip(self.grads, call.versions, strict=True):
            now = grad.flat.versions
            if now == before or grad.flat.may_change_before_backward:
                continue
            for (own, index), node in call.accumulators:
                place = index if grad.flat.steps_each else 0
                if own is grad and now[place] != before[place] and _will_run(node):
                    raise EngineError(
                        f"{self.name}: {grad.flat.layout.slots[index].fqn!r} was changed between a forward and its "
                        "backward (by optimizer.step(), or in place in another way), so the gradients would be wrong: "
                        "run the backward before the step, or the forward again after it"
                    )

    def pre_backward(self, call: Call) -> None:
        """Collective if nothing else follows. Gradients reach a call: count the leaves that will get a gradient."""
        self._calls.append(call)
        call.inputs_pending = sum(map(_will_run, call.inputs))
        call.ends_at_inputs = call.inputs_pending > 0
        run = _compat.run_of_autograd()
        for leaf, node in call.accumulators:
            if node in self._counted:
                continue
            if _will_run(node):
                self._counted.add(node)
                self._outstanding[run, leaf] += 1
                self._num_outstanding += 1
                leaf[0].outstanding += 1
            elif node is not None and leaf[0] not in self._held:
                # It may be in the graph of a reentrant checkpoint, or this backward does not reach it.
                self._held.add(leaf[0])
                leaf[0].outstanding += 1
        self._finish_when_complete()

    def post_backward(self) -> None:
        """Collective. All gradients of the unit are complete: free its parameters, reduce what can be reduced."""
        context = self.context
        self.hide()
        self._enter(TrainingState.IDLE)
        self._forget_calls()
        if self.reshard_after_backward:
            self.reshard()
        context.reductions.advance()
        if self.prefetch_backward == "post":
            self._gather_ahead("backward")

    def end_before_another(self) -> None:
        """Collective. The backward of another unit begins, of an earlier forward: end this one's, unless it is known
        to go on.

        Autograd runs what a later forward has made before anything of an earlier one, so nothing of this unit is left.
        Other ranks may have seen that at the inputs, or by the last leaf, and reduce here.
        """
        self._finish_when_complete(is_followed=True)

    def enqueue_at_the_end(self) -> None:
        """The backward is over: enqueue gradients that would have delayed those of other units."""
        if self._enqueues_at_the_end:
            self._enqueues_at_the_end = False
            self._enqueue()

    def end_backward(self) -> None:
        """Not collective. The backward is over for all units, and has reduced gradients unless under ``no_sync``."""
        self.num_calls = 0
        self.owes_grads &= self.keeps_back

    def run_unused_backward(self) -> None:
        """Collective. Gather and reduce with the other ranks; this rank's backward does not reach the unit."""
        self.begin_backward()
        self.post_backward()

    def begin_summon(self) -> None:
        """Not collective. The leaves become the user's, for ``summon_full_params``."""
        self._enter(TrainingState.SUMMON)

    def end_summon(self) -> None:
        """Not collective. The leaves are at rest again."""
        self._accumulators = None
        self._enter(TrainingState.IDLE)

    def reset(self) -> None:
        """Back to rest after an exception in a backward."""
        self.hide()
        self.training_state = TrainingState.IDLE
        self._forget_calls()
        self.owes_grads, self.num_calls, self._enqueues_at_the_end = False, 0, False
        for grad in self.grads:
            grad.drop()
        self.reshard()

    def reshard(self) -> None:
        """Not collective. Free the values, also those that the program has asked for."""
        self.is_kept = False
        self.context.reshard(self.values)

    # Parts of it

    @_compat.outside_of_modes
    def _gather_for_forward(self) -> None:
        """Collective. Have modules hold the values."""
        context = self.context
        self._follow_leaves()
        if self._lists_leaves and torch.is_grad_enabled() and self.training_state is TrainingState.FORWARD:
            self._lists_leaves = False
            self._renew_accumulators()
        context.order.note(("forward", self.name))
        context.unshard(self.values)
        chosen = "forward" in self.prefetched and self.training_state is TrainingState.FORWARD
        if self.prefetch_forward or self.values.takes_messages or chosen:
            self._gather_ahead("forward")
        context.await_unshard(self.values)
        self.show()

    def _gather_ahead(self, kind: str) -> None:
        """Collective. Begin to gather units that come next: the program's, or the one of earlier passes."""
        if kind not in self.prefetched:
            self.context.gather_ahead(kind)
        for unit in self.prefetched.get(kind, ()):
            if unit.context is self.context:
                self.context.gather_in_advance(unit.values)

    def begin_backward(self) -> None:
        """Collective. Gather the parameters, and prepare for gradients."""
        context = self.context
        self._enter(TrainingState.BACKWARD)
        self.owes_grads = True
        context.order.note(("backward", self.name))
        for grad in self.grads:
            if grad.flat.steps_leaves:
                self._defer_hooks(grad.flat)
            grad.prepare()
        if self.inside or self.num_calls > 1:
            self._enqueues_at_the_end = True
        else:
            self._enqueue()
        if self.unshards_in_backward:
            context.unshard(self.values)
        if self.prefetch_backward == "pre":
            self._gather_ahead("backward")
        if self.unshards_in_backward:
            context.await_unshard(self.values)
            self._show_in_backward()

    def show(self) -> None:
        """Not collective. Have modules compute with the gathered values."""
        for view in self.views:
            view.show()
        for hooks in self.registries:
            hooks.pop(HOOK_KEY, None)

    def _show_in_backward(self) -> None:
        with torch.enable_grad():  # checkpoints inside may compute once more
            self.show()

    def hide(self) -> None:
        """Not collective. Have modules hold what they hold at rest."""
        for view in self.views:
            view.hide()
        for hooks in self.registries:
            hooks[HOOK_KEY] = self.hook_at_rest

    def _enqueue(self) -> None:
        for grad in reversed(self.grads):  # the last parameters get their gradients first
            if grad.flat.requires_grad or grad.has_waiting:
                self.context.reductions.enqueue(grad)

    def _enter(self, state: TrainingState) -> None:
        if state not in TRANSITIONS[self.training_state]:
            raise EngineError(
                f"{self.name}: cannot go from {self.training_state.value} to {state.value}; a unit may be called "
                "several times in a step, but not from inside of its own forward"
            )
        if timeline.recorder is not None:
            timeline.recorder.change_state(self.name, self.training_state.value, state.value)
        self.training_state = state

    def _forget_calls(self) -> None:
        self._calls.clear()
        self._counted.clear()
        self._outstanding.clear()
        self._num_outstanding = 0
        self._held.clear()
        self._arrived.clear()
        for grad in self.grads:
            grad.outstanding = 0

    def _follow_leaves(self) -> None:
        """Follow changes of ``requires_grad`` since the last call."""
        for flat in self.sharded_params:
            if flat.steps_leaves:
                if self._defer_hooks(flat):
                    self._accumulators = None
                continue
            flat.follow_requires_grad(self.name)
        for place, (grad, index, leaf) in enumerate(self._leaves):
            trained = leaf.requires_grad
            if trained is self._trained[place]:
                continue
            self._trained[place] = trained
            self._accumulators = None
            if trained and leaf not in self._hooked:
                done = functools.partial(Unit._leaf_done, index=index)
                hook = OwnHook(_weak_hook(done, self, grad))
                self._hooked[leaf] = leaf.register_post_accumulate_grad_hook(hook)

    def guard(self, registries: list[dict[Any, Any]], hook: Callable[..., Any]) -> None:
        """Not collective, at rest. Have modules call `hook` before a forward while the unit is at rest."""
        self.registries, self.hook_at_rest = registries, hook
        self.hide()

    def _has_hooks(self, param: nn.Parameter) -> bool:
        """Whether users' hooks or optimizers wait for the gradient of a parameter."""
        hooks = _compat.hooks_after_accumulation(param)
        own = param in self._hooked
        return bool(hooks and len(hooks) > own) or hasattr(param, _compat.STEPPED_IN_BACKWARD)

    def _defer_hooks(self, flat: ShardedParams) -> bool:
        """Defer users' hooks. Returns whether leaves got other accumulators."""
        changed = False
        for leaf in flat.leaves:
            changed |= self._has_hooks(leaf) and defer_hooks(leaf, self._detached)
        return changed

    def run_hooks(self) -> None:
        """Call users' hooks for the gradients that a backward has reduced."""
        for grad in self.grads:
            for param in grad.pop_updated():
                if self._has_hooks(param):
                    run_hooks(param)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Whether a tensor views values of the unit."""
        parts = (tensor,) if type(tensor) is torch.Tensor else _compat.inner_tensors(tensor)
        return any(flat.owns_memory_of(part) for flat in self.sharded_params for part in parts)

    def _lend(self, output: torch.Tensor) -> torch.Tensor:
        """An output of the forward for the program: it must not be a leaf, which may show other values later."""
        if not self._is_own(output):
            return output
        if not self.values_outlive_forward:
            raise EngineError(
                f"{self.name}: its forward returns a view of one of its own parameters (shape "
                f"{tuple(output.shape)}), whose memory is freed after the forward: return a clone"
            )
        if not torch.is_grad_enabled():
            return output.clone()  # no backward follows until which the values would stay
        return output.view_as(output) if output.is_leaf else output

    def _accumulators_now(self) -> list[tuple[Leaf, Any]]:
        """The nodes that add to the gradients of the leaves in the latest graph."""
        if self._accumulators is None or self._renews_accumulators:
            with torch.enable_grad():
                self._accumulators = [((grad, index), _accumulator_of(leaf)) for grad, index, leaf in self._leaves]
            for (grad, index), node in self._accumulators:
                slot = grad.flat.layout.slots[index]
                if node is not None and tuple(_compat.inputs_of_node(node)[0].shape) != slot.shape:
                    raise EngineError(
                        f"{self.name}: the AccumulateGrad node of {slot.fqn!r} was read while the parameter was "
                        "sharded, so it gets no whole gradients: use register_post_accumulate_grad_hook, which is "
                        "called with the reduced gradient of the shard, or read the node within the forward"
                    )
        return self._accumulators

    def _input_done(self, call: Call) -> None:
        call.inputs_pending -= 1
        self._finish_when_complete()

    def _leaf_done(self, grad: FlatGrad, index: int) -> None:
        if self.is_idle and grad.flat.is_unsharded and not grad.flat.steps_leaves:
            # The program has used it outside of a call. It waits on the leaf until the backward of the unit.
            self._begin_model_backward()
            self.owes_grads = True
            self._counted.update(node for leaf, node in self._accumulators_now() if leaf == (grad, index))
            return
        if self.is_idle and grad.adopt_from_leaf_at_rest(index):
            return
        if self.training_state is not TrainingState.BACKWARD:
            raise EngineError(
                f"{self.name}: a gradient of {grad.flat.layout.slots[index].fqn!r} arrived while the unit was in "
                f"{self.training_state.value}; use the parameters of a unit only by calling the unit, and do not "
                "change a view that a unit returns in place: write x = x + y instead of x += y"
            )
        if not self.context.reductions.move_from_leaf(grad, index) and not self._enqueues_at_the_end:
            raise EngineError(
                f"{self.name}: a gradient of {grad.flat.layout.slots[index].fqn!r} arrived after the gradients of "
                "the unit had been reduced: autograd reached the parameter in a way that hpcfsdp does not support; "
                "wrap a larger module"
            )
        self.context.streams.proceed()
        leaf = grad, index
        self._arrived.add(leaf)
        counted = _compat.run_of_autograd(), leaf
        if self._outstanding[counted] > 0:
            self._outstanding[counted] -= 1
            self._num_outstanding -= 1
            grad.outstanding -= 1
            if grad.outstanding == 0:
                self.context.reductions.advance()
            self._finish_when_complete()

    def _finish_when_complete(self, *, is_followed: bool = False) -> None:
        """End the unit's backward if nothing can need its parameters any more.

        They may be needed until the gradients of the inputs are computed, for instance frozen or detached weights. If
        no gradient leaves through the inputs, the backward ends when all leaves have theirs, or when the backward of
        another unit begins, or that of the model ends: units inside may need the parameters of this one, and reentrant
        checkpoints hide leaves in graphs of their own.

        Args:
            is_followed: the backward of a unit begins that neither holds this one nor is inside.
        """
        if self.training_state is not TrainingState.BACKWARD or self._num_outstanding:
            return
        if any(call.inputs_pending > 0 and not (is_followed and call.is_open) for call in self._calls):
            return
        if not is_followed and any(call.is_open for call in self._calls):
            return
        if not is_followed and not any(call.ends_at_inputs for call in self._calls):
            frozen = any(not leaf.requires_grad for _, _, leaf in self._leaves)
            hidden = any(
                leaf.requires_grad and (grad, index) not in self._arrived for grad, index, leaf in self._leaves
            )
            if self.inside or frozen or hidden:
                return
        self.post_backward()


def _accumulator_of(leaf: torch.Tensor) -> Any:
    """The graph's node that adds to the gradient of a leaf; None if it does not require one."""
    return leaf.view_as(leaf).grad_fn.next_functions[0][0] if leaf.requires_grad else None


def _will_run(node: Any) -> bool:
    """Whether the running backward will run a node of the graph."""
    try:
        return node is not None and _compat.will_run(node)
    except RuntimeError:  # a leaf passed to torch.autograd.grad: its gradient goes to the caller
        return False


def _output_hook(unit: Unit, call: Call, before_backward: BeforeBackward) -> Hook:
    def gradient_comes(_grad: torch.Tensor) -> None:
        if torch.is_grad_enabled():
            raise EngineError(
                f"{unit.name}: backward was called with create_graph=True, but second derivatives of sharded "
                "parameters are not supported: differentiate within the forward of one unit, or by torch.func.grad"
            )
        before_backward(unit, call)

    return gradient_comes


def _weak_hook(function: Callable[[Any, Any], None], first: Any, second: Any) -> Hook:
    """A hook that calls `function` with two objects as long as both live. It does not keep them alive."""
    # The unit holds its leaves: a strong reference from a leaf back to it would be a cycle.
    weak_first, weak_second = weakref.ref(first), weakref.ref(second)

    def hook(_tensor: torch.Tensor) -> None:
        first, second = weak_first(), weak_second()
        if first is not None and second is not None:
            function(first, second)

    return hook
