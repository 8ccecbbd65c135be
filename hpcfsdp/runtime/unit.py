"""One unit: parameters that are gathered before use, freed after it, and whose gradients are reduced when complete.

The methods stand in the order of a step: ``pre_forward, post_forward, pre_backward, post_backward``. What happens on
which event is told in docs/architecture.md, "The life of a step".
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils.hooks import RemovableHandle

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.runtime.hooks import UnknownContainerError, tensors_in
from hpcfsdp.runtime.state import TRANSITIONS, Phase


class _Call:
    """One forward call of a unit, as far as its backward has to know.

    Lives as long as the graph that the call made: the hooks on its outputs hold it, those on its inputs do not.
    """

    def __init__(self) -> None:
        self.inputs_pending = 0
        """Inputs that still wait for their gradient in the backward that is running."""
        self._handles: list[RemovableHandle] = []

    def watch(self, tensor: torch.Tensor, hook: Callable[[torch.Tensor], None]) -> None:
        """Have `hook` called with the gradient of an input."""
        self._handles.append(tensor.register_hook(hook))

    def begin_backward(self) -> None:
        """All inputs wait again: one graph may be run through several times (``retain_graph``)."""
        self.inputs_pending = len(self._handles)

    def __del__(self) -> None:
        # An input that is a leaf outlives the graph, and would collect a hook for each step.
        for handle in self._handles:
            handle.remove()


class Unit:
    """Flat parameters that live and die together, and the module calls that need them.

    Attributes:
        name: of the wrapped module within the root, for messages.
        flats: one for each dtype and ``requires_grad`` among the parameters; empty if children own all of them.
        phase: what the unit is doing; changed by ``_enter`` alone.
        engine: shared with all units under the same root; set when the root is first called.
    """

    def __init__(self, name: str, flats: Sequence[FlatParam]) -> None:
        self.name = name
        self.flats = tuple(flats)
        self.phase = Phase.IDLE
        self.engine: Engine | None = None
        self._trained = tuple(flat for flat in self.flats if flat.requires_grad)
        self._num_leaves = sum(len(flat.leaves) for flat in self._trained)
        self._leaves_pending = 0
        self._calls: list[_Call] = []  # those whose backward has begun
        for flat in self._trained:
            for index, leaf in enumerate(flat.leaves):
                leaf.register_post_accumulate_grad_hook(_leaf_hook(self, flat, index))

    def pre_forward(self, args: Any, kwargs: Any) -> _Call:
        """Collective. Gather the parameters; from here on the module may compute."""
        self._check_unchanged()
        self._enter(Phase.RECOMPUTE if self.phase is Phase.BACKWARD else Phase.FORWARD)
        call = _Call()
        try:
            self.unshard()
            if self.flats and torch.is_grad_enabled():
                self._watch_inputs(call, (args, kwargs))
        except BaseException:
            self.leave_forward()
            raise
        return call

    def post_forward(self, call: _Call, outputs: Any) -> None:
        """Ask to be told when gradients reach the outputs, and free the parameters."""
        try:
            if self.flats:
                self._watch_outputs(call, outputs)
        finally:
            self.leave_forward()

    def leave_forward(self) -> None:
        """End the forward, also one that an exception broke off."""
        if self.phase is Phase.RECOMPUTE:
            self._enter(Phase.BACKWARD)
        else:
            self._enter(Phase.IDLE)
            self.reshard()

    def pre_backward(self, call: _Call) -> None:
        """Collective when it is the first for this unit. Gather the parameters before gradients flow through."""
        if self.phase is Phase.FORWARD:
            raise EngineError(f"{self.name}: backward ran through the unit while its forward was still running")
        assert self.engine is not None
        if not self.engine.in_backward:
            self.engine.in_backward = True
            _compat.call_after_backward(self._finish_backward)
        if self.phase is Phase.IDLE:
            self._enter(Phase.BACKWARD)
            self._leaves_pending = self._num_leaves
            self._calls.clear()
            for flat in self._trained:
                flat.alloc_grad()
        self.unshard()
        if not any(known is call for known in self._calls):
            call.begin_backward()
            self._calls.append(call)

    def post_backward(self) -> None:
        """Collective. Reduce the gradients and free the parameters: nothing more flows through this unit."""
        self._reduce_grads()
        self._enter(Phase.IDLE)
        self._calls.clear()
        self.reshard()

    def unshard(self) -> None:
        """Collective. Gather all flat parameters of the unit."""
        for flat in self.flats:
            flat.unshard()

    def reshard(self) -> None:
        """Free what ``unshard`` gathered."""
        for flat in self.flats:
            flat.reshard()

    def reset(self) -> None:
        """Back to rest after a forward or backward that was broken off by an exception."""
        self.phase = Phase.IDLE
        self._calls.clear()
        for flat in self.flats:
            flat.drop_grad()
        self.reshard()

    def _enter(self, phase: Phase) -> None:
        if phase not in TRANSITIONS[self.phase]:
            raise EngineError(
                f"{self.name}: cannot go from {self.phase.value} to {phase.value}; a unit may be called several times "
                "in a step, but not from inside of its own forward"
            )
        self.phase = phase

    def _check_unchanged(self) -> None:
        for flat in self.flats:
            if flat.parameter.requires_grad != flat.requires_grad:
                raise EngineError(
                    f"{self.name}: requires_grad of its parameters was set to {flat.parameter.requires_grad} after "
                    "wrapping, which the original parameters do not hear: freeze or unfreeze before wrapping"
                )

    def _watch_inputs(self, call: _Call, inputs: Any) -> None:
        hook = _input_hook(self, call)
        for tensor in tensors_in(inputs, strict=False):
            if tensor.requires_grad:
                call.watch(tensor, hook)

    def _watch_outputs(self, call: _Call, outputs: Any) -> None:
        try:
            found = list(tensors_in(outputs, strict=torch.is_grad_enabled()))
        except UnknownContainerError as error:
            raise EngineError(
                f"{self.name}: its forward returns an object of type {error}, in which gradients cannot be followed; "
                "return tensors in tuples, lists, dicts or dataclasses, or register the type with torch.utils._pytree"
            ) from None
        for tensor in found:
            if any(flat.owns_memory_of(tensor) for flat in self.flats):
                raise EngineError(
                    f"{self.name}: its forward returns a view of one of its own parameters (shape "
                    f"{tuple(tensor.shape)}), whose memory is freed when the unit is left; return a clone"
                )
            if tensor.requires_grad and torch.is_grad_enabled():
                tensor.register_hook(_output_hook(self, call))

    def _input_done(self, call: _Call) -> None:
        call.inputs_pending -= 1
        self._finish_when_complete()

    def _leaf_done(self, flat: FlatParam, index: int) -> None:
        if self.phase is not Phase.BACKWARD:
            raise EngineError(
                f"{self.name}: a gradient of {flat.layout.slots[index].fqn!r} arrived while the unit was in "
                f"{self.phase.value}; parameters of a unit may be used only through a call of the unit"
            )
        # With reentrant checkpointing a parameter that is used several times gets its gradient in several parts.
        if flat.take_grad(index) and self._leaves_pending > 0:
            self._leaves_pending -= 1
            if self._leaves_pending == 0:
                self._reduce_grads()
        self._finish_when_complete()

    def _reduce_grads(self) -> None:
        for flat in self._trained:
            flat.reduce_grad()

    def _finish_when_complete(self) -> None:
        # Parameters may be needed until the gradients of the inputs are done, not only those of the parameters: think
        # of frozen weights, or of a weight that is used detached.
        waiting = self._leaves_pending > 0 or any(call.inputs_pending > 0 for call in self._calls)
        if self.phase is Phase.BACKWARD and not waiting:
            self.post_backward()

    def _finish_backward(self) -> None:
        """Called once at the end of the backward pass: complete the units in which some parameter took no part."""
        assert self.engine is not None
        self.engine.in_backward = False
        for unit in self.engine.units:
            if unit.phase is Phase.BACKWARD:
                unit.post_backward()


def _output_hook(unit: Unit, call: _Call) -> Callable[[torch.Tensor], None]:
    def before_backward(_grad: torch.Tensor) -> None:
        unit.pre_backward(call)

    return before_backward


def _input_hook(unit: Unit, call: _Call) -> Callable[[torch.Tensor], None]:
    weak_unit, weak_call = weakref.ref(unit), weakref.ref(call)

    def input_done(_grad: torch.Tensor) -> None:
        unit, call = weak_unit(), weak_call()
        if unit is not None and call is not None:
            unit._input_done(call)

    return input_done


def _leaf_hook(unit: Unit, flat: FlatParam, index: int) -> Callable[[torch.Tensor], None]:
    # The leaf belongs to the flat parameter and that to the unit: a strong reference back would keep all of them.
    weak_unit, weak_flat = weakref.ref(unit), weakref.ref(flat)

    def gradient_ready(_leaf: torch.Tensor) -> None:
        unit, flat = weak_unit(), weak_flat()
        if unit is not None and flat is not None:
            unit._leaf_done(flat, index)

    return gradient_ready


@dataclass
class Engine:
    """What all units under one root share.

    Attributes:
        units: in the order in which the modules were registered, the root first.
        in_backward: whether a backward pass has begun and its end has been asked for.
    """

    units: list[Unit] = field(default_factory=list)
    in_backward: bool = False

    def recover(self) -> None:
        """Bring all units back to rest if a backward pass was broken off by an exception."""
        if self.in_backward and not _compat.in_backward():
            self.in_backward = False
            for unit in self.units:
                unit.reset()
