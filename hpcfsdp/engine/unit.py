"""One unit: its parameters are gathered before use and freed after it, its gradients reduced when complete.

The methods stand in the order of a step: ``pre_forward, post_forward, pre_backward, post_backward``. The root calls
them. docs/developers/step.md lists what happens on which event.
"""

import functools
import weakref
from collections.abc import Callable, Sequence
from enum import Enum
from typing import Any, Protocol

import torch
from torch.utils.hooks import RemovableHandle

from hpcfsdp import _compat, timeline
from hpcfsdp.engine.backward import BackwardAccount, ForwardCall, Leaves, will_run
from hpcfsdp.engine.context import Context, UnshardedParams
from hpcfsdp.engine.nested import Arguments, Hook, InPlace, needs_hook, tensors_in
from hpcfsdp.errors import EngineError
from hpcfsdp.params.gradient import ReduceOptions, ShardedGrad
from hpcfsdp.params.sharded_params import ShardedParams

BeforeBackward = Callable[["Unit", ForwardCall], None]
HOOK_KEY = "hpcfsdp"  # of the engine's hook among those of a module; torch's keys are numbers


class TrainingState(Enum):
    """The state of a unit."""

    IDLE = "idle"  # between steps, or between its forward and its backward: sharded
    FORWARD = "forward"  # its forward runs: unsharded
    BACKWARD = "backward"  # its backward runs: unsharded
    RECOMPUTE = "recompute"  # its forward runs again within its backward (activation checkpointing): stays unsharded
    SUMMON = "summon_full_params"  # its parameters are whole for the user


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
        """Make it of the leaf's unsharded data, and have modules hold it."""

    def hide(self) -> None:
        """Have modules hold the leaf."""


class Unit:
    """Flat parameters that are gathered and freed together, and the calls of the module that needs them."""

    def __init__(self, name: str, sharded_params: Sequence[ShardedParams], views: Sequence[ComputedView] = ()) -> None:
        self.name = name  # of the wrapped module within the root, unique under the root
        self.views = tuple(views)  # replace leaves in modules that compute
        self.registries: list[dict[Any, Any]] = []  # see `guard`
        self.hook_at_rest: Callable[..., Any] | None = None
        self.reshard_after_forward = self.reshard_after_backward = True  # whether the parameters are freed then
        self.unshards_in_backward = True  # whether a backward needs the parameters
        self.is_kept = False  # whether the program has asked for the parameters, and not given them back
        self._keeps_back = False
        self.is_in_graph = False  # whether a graph of derivatives computes with the unsharded parameters
        self._graph_hooks: list[RemovableHandle] = []
        self.inside: frozenset[Unit] = frozenset()  # other units that the module holds
        self.input_dtype: torch.dtype | None = None  # floating-point inputs are cast to it; None to leave them
        self.prefetch_forward = False  # whether to gather the next unit of a forward
        self.prefetch_backward: str | None = None  # that of a backward, "pre" or "post" this one's gradients
        self.prefetched: dict[str, Sequence[Unit]] = {}  # instead of the next one, by kind ("forward", "backward")
        self.training_state = TrainingState.IDLE  # changed by `enter_state` alone
        self.context: Context | None = None  # of all units under the same root, None until that is first called
        self._begin_model_backward: Callable[[], None] | None = None
        self.owes_grads = False  # whether gradients of a forward have not been reduced yet
        self.num_calls = 0  # forwards that expect a backward
        self.reduce_options = ReduceOptions()
        self.leaves = Leaves()
        self.hold(sharded_params)
        self._account = BackwardAccount()
        self._enqueues_at_the_end = False
        self._arguments: Arguments | None = None  # of the forward that is running

    def hold(self, sharded_params: Sequence[ShardedParams]) -> None:
        """Own these, at rest without a root: one for each dtype and ``requires_grad``; none if units inside own all."""
        self.sharded_params = tuple(sharded_params)
        self.unsharded_params = UnshardedParams(self.sharded_params, self.name)
        self.grads = tuple(
            ShardedGrad(flat, self.reduce_options) for flat in self.sharded_params if flat.is_differentiable
        )
        self.keeps_back = self._keeps_back
        self.leaves.hold(self.grads, self.sharded_params)

    @property
    def keeps_back(self) -> bool:
        """Whether gradients wait for a later synchronisation, as within ``no_sync``."""
        return self._keeps_back

    @keeps_back.setter
    def keeps_back(self, keeps_back: bool) -> None:
        self._keeps_back = keeps_back
        for grad in self.grads:
            grad.keeps_back = keeps_back

    def attach(self, context: Context, begin_backward: Callable[[], None] | None = None) -> None:
        """Join the units under a root, whose backwards `begin_backward` begins."""
        self.context, self._begin_model_backward = context, begin_backward
        self.unsharded_params.name = self.name  # which it has since there is a root
        for index, grad in enumerate(self.grads):
            grad.name = f"{self.name}[{index}]" if index else self.name
            context.reductions.plan(grad, index)

    def guard(self, registries: list[dict[Any, Any]], hook: Callable[..., Any]) -> None:
        """Have modules call `hook` before a forward at rest. `registries` are those of such hooks, by module."""
        self.registries, self.hook_at_rest = registries, hook
        self.hide()

    # What it is, at any time

    @property
    def is_idle(self) -> bool:
        """Whether the unit is in no forward, no backward, and no ``summon_full_params``."""
        return self.training_state is TrainingState.IDLE

    @property
    def is_unsharded(self) -> bool:
        """Whether memory holds the unsharded parameters, all or a part, or modules compute with them."""
        params = self.unsharded_params
        return params.is_gathered or params.is_bound or params.has_keepers

    @property
    def values_outlive_forward(self) -> bool:
        """Whether the program may compute with the unsharded parameters between a forward and its backward."""
        return not self.reshard_after_forward

    @property
    def stays_unsharded(self) -> bool:
        """Whether the parameters stay gathered where no backward needs them, until they change."""
        return False

    @property
    def is_partly_called(self) -> bool:
        """Whether the forward of the model may still call other modules of the unit."""
        return False

    # The life of a step

    def begin_forward(self) -> None:
        """Begin a call of the module. Refuses a call from inside of the unit's own forward."""
        self.enter_state(
            TrainingState.RECOMPUTE if self.training_state is TrainingState.BACKWARD else TrainingState.FORWARD
        )
        self.is_kept = False

    def pre_forward(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[ForwardCall, tuple[Any, ...], dict[str, Any]]:
        """Gather the parameters. Collective over the unit's ranks. Return the record of the call, and its arguments."""
        call = ForwardCall()
        if self.sharded_params:
            self._gather_for_forward()
        hook = _weak_hook(Unit._input_done, self, call) if self.sharded_params and _compat.records_backward() else None
        if hook is not None or self.input_dtype is not None:
            self._arguments = Arguments(self.name, self.input_dtype, hook)
            args, kwargs = self._arguments.lend(args, kwargs)
        return call, args, kwargs

    def post_forward(self, call: ForwardCall, outputs: Any, before_backward: BeforeBackward) -> Any:
        """Register hooks on the outputs, which call `before_backward` with this unit and `call`. Return the outputs.

        Views replace inputs and parameters of the unit among them. Refuses views of what the end of the forward frees.
        """
        self.context.streams.proceed()
        arguments, self._arguments = self._arguments, None
        written = [] if arguments is None else arguments.restore()
        if self.sharded_params and not _compat.in_transform():
            if torch.is_grad_enabled():
                arguments = arguments or Arguments(self.name)  # the module has switched gradients on
                call.inputs, call.is_open = arguments.nodes()
                outputs, computed = arguments.computed(outputs, written, self._lend)
                hook = functools.partial(_gradient_comes, self, call, before_backward)
                for tensor in computed:
                    if needs_hook(tensor):
                        tensor.register_hook(hook)
                        call.has_backward = True
                if call.has_backward:
                    call.accumulators = self.leaves.accumulators(self.name)
                    call.versions = [grad.params.versions for grad in self.grads]
            elif any(map(self._is_own, tensors_in(outputs))):
                outputs = InPlace(lambda tensor, _in_object: self._lend(tensor))(outputs)
            if torch.is_autocast_enabled(self.sharded_params[0].device.type) and torch.is_autocast_cache_enabled():
                torch.clear_autocast_cache()  # its casts of weights, which are freed too
        return outputs

    def end_forward(self, *, broken: bool) -> None:
        """End a call of the module, `broken` by an exception or not; free the parameters.

        They stay if a backward may follow without ``reshard_after_forward``, and for transforms of ``torch.func``.
        """
        if self._arguments is not None:
            self._arguments.restore()
            self._arguments = None
        self.hide()
        if self.training_state is TrainingState.RECOMPUTE:
            self.enter_state(TrainingState.BACKWARD)
            self._show_in_backward()
        else:
            self.enter_state(TrainingState.IDLE)
            keeps = self.stays_unsharded if not torch.is_grad_enabled() else not self.reshard_after_forward
            keeps = keeps or self.is_in_graph or self.is_partly_called
            # The backward of a recomputation follows at once, also where the checkpoint has broken it off.
            recomputes = torch.is_grad_enabled() and _compat.in_backward()
            if (broken or not keeps) and not (recomputes or _compat.in_transform()):
                self._free(after_forward=not broken and torch.is_grad_enabled())

    def complete_forward(self) -> bool:
        """End the forward of the model. Return whether to free what was kept for other calls."""
        return False

    def unbind(self) -> None:
        """Have modules hold what they hold at rest, whether the parameters stay gathered or not."""
        self.hide()
        for flat in self.sharded_params:
            flat.unbind()

    def lend(self, *, stays: bool) -> None:
        """Have modules register what they do at rest, before a backward; leaves stay unsharded.

        If it `stays` so, the backward has no hooks: leaves stay unsharded also where they are what modules register.
        """

    def expect_backward(self, *, later: bool) -> None:
        """Note that a call has returned outputs that may get gradients, `later` than in a running backward."""
        self.owes_grads = True
        self.num_calls += later

    def check_versions(self, call: ForwardCall) -> None:
        """Refuse parameters that this backward reaches, and that have changed since the forward, as torch does."""
        for grad, before in zip(self.grads, call.versions, strict=True):
            now = grad.params.versions
            if now == before or grad.params.may_change_before_backward:
                continue
            for (own, index), node in call.accumulators:
                place = index if grad.params.steps_each else 0
                if own is grad and now[place] != before[place] and will_run(node):
                    raise EngineError(
                        f"{self.name}: {grad.params.layout.slots[index].fqn!r} was changed between a forward and its "
                        "backward (by optimizer.step(), or in place in another way), so the gradients would be wrong: "
                        "run the backward before the step, or the forward again after it"
                    )

    def join_graph(self) -> None:
        """Keep the parameters for a graph of derivatives, until the backward that follows, or a step.

        Collective over the unit's ranks.
        """
        if self.is_in_graph or not self.is_idle or not self.sharded_params:
            return
        self.is_in_graph = True
        self.context.unshard(self.unsharded_params)
        self.context.await_unshard(self.unsharded_params)
        self.lend(stays=True)
        # Before gradients come to leaves, those of earlier backwards have to be put aside.
        leaves = [leaf for flat in self.sharded_params for leaf in flat.leaves if leaf.requires_grad]
        hook = _weak_hook(lambda unit, _: unit._begin_from_graph(), self, self)
        self._graph_hooks = [leaf.register_hook(hook) for leaf in leaves]

    def _begin_from_graph(self) -> None:
        if torch.is_grad_enabled():
            raise EngineError(
                f"{self.name}: backward(create_graph=True) wants gradients of sharded parameters with a graph of their "
                "own, which ranks cannot reduce: call torch.autograd.grad(..., inputs, create_graph=True) for inputs "
                "of the model"
            )
        self._begin_model_backward()

    def _leave_graph(self) -> None:
        self.is_in_graph = False
        for handle in self._graph_hooks:
            handle.remove()
        self._graph_hooks = []

    def begin_backward(self, *, gathers: bool = True) -> None:
        """Gather the parameters if it `gathers`, and prepare for gradients. Collective over the unit's ranks."""
        context = self.context
        self.enter_state(TrainingState.BACKWARD)
        self.owes_grads = True
        context.order.note(("backward", self.name))
        for grad in self.grads:
            if grad.params.steps_leaves:
                self.leaves.defer_hooks(grad.params)
            grad.prepare()
        if self.inside or self.num_calls > 1 or self.is_in_graph:
            self._enqueues_at_the_end = True
        else:
            self._enqueue()
        if not gathers:
            return
        if self.unshards_in_backward:
            context.unshard(self.unsharded_params)
        if self.prefetch_backward == "pre":
            self._gather_ahead("backward")
        if self.unshards_in_backward:
            context.await_unshard(self.unsharded_params)
            self._show_in_backward()

    def pre_backward(self, call: ForwardCall) -> None:
        """Count the leaves that will get a gradient: the first one has reached an output of a call."""
        self._account.begin_call(call)
        self.finish_when_complete()

    def post_backward(self) -> None:
        """Free the parameters, and reduce what can be: all gradients are complete. Collective over all ranks."""
        context = self.context
        self.hide()
        self.enter_state(TrainingState.IDLE)
        self._account.close(self.grads)
        if self.reshard_after_backward:
            self._free()
        context.reductions.advance()
        if self.prefetch_backward == "post":
            self._gather_ahead("backward")

    def finish_when_complete(self, *, is_followed: bool = False) -> None:
        """End the backward if nothing can need the parameters any more, see ``BackwardAccount.is_complete``.

        It `is_followed` by that of an earlier forward: autograd runs what a later one has made before, so nothing is
        left. Other ranks may have seen that at the inputs, or by the last leaf, and reduce here. Collective over all
        ranks.
        """
        is_running = self.training_state is TrainingState.BACKWARD and not self.is_in_graph
        if is_running and self._account.is_complete(
            self.leaves, holds_units=bool(self.inside), is_followed=is_followed
        ):
            self.post_backward()

    def run_unused_backward(self, *, gathers: bool = True) -> None:
        """Reduce with the other ranks; this rank's backward does not reach the unit. Collective likewise.

        That of another rank may, unless it `gathers` nothing on any.
        """
        self.begin_backward(gathers=gathers)
        self.post_backward()

    def enqueue_at_the_end(self) -> None:
        """Enqueue gradients that would have delayed those of other units: the backward is over."""
        if self._enqueues_at_the_end:
            self._enqueues_at_the_end = False
            self._enqueue()

    def end_backward(self) -> None:
        """Expect no backward: it is over for all units, and has reduced gradients unless under ``no_sync``."""
        self.num_calls = 0
        self.owes_grads &= self.keeps_back
        if self.is_in_graph:
            self._leave_graph()

    def reset(self) -> None:
        """Come to rest after an exception in a backward."""
        self.training_state = TrainingState.IDLE
        self._account.close(self.grads)
        self.owes_grads, self.num_calls, self._enqueues_at_the_end = False, 0, False
        for grad in self.grads:
            grad.drop()
        self.reshard()

    def reshard(self) -> None:
        """Free the unsharded parameters, also those that the program has asked for."""
        self.hide()
        self._free()

    def show(self) -> None:
        """Have modules compute with the unsharded parameters."""
        for view in self.views:
            view.show()
        for hooks in self.registries:
            hooks.pop(HOOK_KEY, None)

    def hide(self) -> None:
        """Have modules hold what they hold at rest, but for the data of leaves."""
        for view in self.views:
            view.hide()
        for hooks in self.registries:
            hooks[HOOK_KEY] = self.hook_at_rest

    def enter_state(self, state: TrainingState) -> None:
        """Go to a state, if there is a way from the present one."""
        if state not in TRANSITIONS[self.training_state]:
            raise EngineError(
                f"{self.name}: cannot go from {self.training_state.value} to {state.value}; a unit may be called "
                "several times in a step, but not from inside of its own forward"
            )
        if timeline.recorder is not None:
            timeline.recorder.change_state(self.name, self.training_state.value, state.value)
        self.training_state = state

    # Parts of it

    @_compat.outside_of_modes
    def _gather_for_forward(self) -> None:
        """Have modules hold the unsharded parameters. Collective over the unit's ranks."""
        context = self.context
        is_first = self.training_state is TrainingState.FORWARD
        self.leaves.follow(self.name, self._leaf_hook)
        if is_first and torch.is_grad_enabled():
            self.leaves.take_back()
        context.order.note(("forward", self.name))
        context.unshard(self.unsharded_params)
        if self.prefetch_forward or self.unsharded_params.takes_messages or (is_first and "forward" in self.prefetched):
            self._gather_ahead("forward")
        context.await_unshard(self.unsharded_params)
        self.show()

    def _gather_ahead(self, kind: str) -> None:
        """Begin to gather units that come next: the program's choice, or the one of earlier iterations."""
        if kind not in self.prefetched:
            self.context.gather_ahead(kind)
        for unit in self.prefetched.get(kind, ()):
            if unit.context is self.context:
                self.context.gather_in_advance(unit.unsharded_params)

    def _show_in_backward(self) -> None:
        with torch.enable_grad():  # checkpoints inside may compute once more
            self.show()

    def _free(self, *, after_forward: bool = False) -> None:
        self.is_kept = False
        if self.is_in_graph:
            self._leave_graph()
        self.context.reshard(self.unsharded_params, after_forward=after_forward)

    def _enqueue(self) -> None:
        for grad in reversed(self.grads):  # the last parameters get their gradients first
            if grad.params.requires_grad or grad.has_waiting:
                self.context.reductions.enqueue(grad)

    def _is_own(self, tensor: torch.Tensor) -> bool:
        """Return whether a tensor views unsharded parameters of the unit."""
        parts = (tensor,) if type(tensor) is torch.Tensor else _compat.inner_tensors(tensor)
        return any(flat.owns_memory_of(part) for flat in self.sharded_params for part in parts)

    def _lend(self, output: torch.Tensor) -> torch.Tensor:
        """Return an output of the forward for the program: it must not be a leaf, which may show other data later."""
        if not self._is_own(output):
            return output
        if not self.values_outlive_forward:
            raise EngineError(
                f"{self.name}: its forward returns a view of one of its own parameters (shape "
                f"{tuple(output.shape)}), whose memory is freed after the forward: return a clone"
            )
        if not torch.is_grad_enabled():
            return output.clone()  # no backward follows until which the parameters would stay
        return output.view_as(output) if output.is_leaf else output

    def _leaf_hook(self, grad: ShardedGrad, index: int) -> Hook:
        return _weak_hook(functools.partial(Unit._leaf_done, index=index), self, grad)

    def _input_done(self, call: ForwardCall) -> None:
        call.inputs_pending -= 1
        self.finish_when_complete()

    def _leaf_done(self, grad: ShardedGrad, index: int) -> None:
        leaf = grad, index
        if self.is_idle and grad.params.is_unsharded and not grad.params.steps_leaves:
            # The program has used it outside of a call. It waits on the leaf until the backward of the unit.
            self._begin_model_backward()
            self.owes_grads = True
            self._account.ignore(node for own, node in self.leaves.accumulators(self.name) if own == leaf)
            return
        if self.is_idle and grad.adopt_from_leaf_at_rest(index):
            return
        if self.training_state is not TrainingState.BACKWARD:
            raise EngineError(
                f"{self.name}: a gradient of {grad.params.layout.slots[index].fqn!r} arrived while the unit was in "
                f"{self.training_state.value}; use the parameters of a unit only by calling the unit, and do not "
                "change a view that a unit returns in place: write x = x + y instead of x += y"
            )
        if not self.context.reductions.move_from_leaf(grad, index) and not self._enqueues_at_the_end:
            raise EngineError(
                f"{self.name}: a gradient of {grad.params.layout.slots[index].fqn!r} arrived after the gradients of "
                "the unit had been reduced: autograd reached the parameter in a way that hpcfsdp does not support; "
                "wrap a larger module"
            )
        self.context.streams.proceed()
        if self._account.arrive(leaf):
            # On a device the parameters are freed first, whose memory is more than that of what is not reduced yet.
            if grad.outstanding == 0 and not self.context.streams.overlap:
                self.context.reductions.advance()
            self.finish_when_complete()


def _gradient_comes(unit: Unit, call: ForwardCall, before_backward: BeforeBackward, _grad: torch.Tensor) -> None:
    before_backward(unit, call)


def _weak_hook(function: Callable[[Any, Any], None], first: Any, second: Any) -> Hook:
    """Return a hook that calls `function` with two objects as long as both live. It does not keep them alive."""
    # The unit holds its leaves: a strong reference from a leaf back to it would be a cycle.
    weak_first, weak_second = weakref.ref(first), weakref.ref(second)

    def hook(_tensor: torch.Tensor) -> None:
        first, second = weak_first(), weak_second()
        if first is not None and second is not None:
            function(first, second)

    return hook
