"""What a step of a model does, as plain values: its units, and the events of a forward with its backward.

``meta_trace.trace`` makes it on the meta device. Nothing in it depends on ranks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from enum import Enum
from functools import cached_property

import torch


@dataclass(frozen=True)
class Param:
    """A parameter of a unit."""

    fqn: str  # its name in the unit
    shape: tuple[int, ...]  # of the whole parameter
    dtype: torch.dtype  # that the module was built with, of the shards
    trained: bool = True  # whether it gets gradients

    @cached_property
    def numel(self) -> int:
        return math.prod(self.shape)


@dataclass(frozen=True)
class PlannedUnit:
    """Parameters that are gathered together."""

    name: str  # of the module in the model; "" for the root
    kind: str  # the class of the module
    params: tuple[Param, ...]  # its own, without those of units inside

    @cached_property
    def numel(self) -> int:
        """Elements of all of them."""
        return sum(param.numel for param in self.params)


class EventKind(Enum):
    """What an event is about."""

    FORWARD = "forward"  # the forward of a unit begins
    FORWARD_END = "end of the forward"
    BACKWARD = "backward"  # the first gradient reaches an output of a unit
    GRADIENT = "gradient"  # a parameter of a unit has its gradient
    BACKWARD_END = "end of the backward"  # all parameters and inputs of a unit have their gradients


@dataclass(frozen=True)
class StepEvent:
    """An event of a step, and what the modules compute from there to the next one."""

    kind: EventKind
    unit: int  # its index
    param: int = 0  # index of the parameter, for ``EventKind.GRADIENT``
    high: int = 0  # the largest number of bytes above that at the event that tensors take until the next one
    net: int = 0  # bytes that have been added at the next one, negative where more are freed
    flops: int = 0  # floating-point operations


@dataclass(frozen=True)
class TracedStep:
    """A model and its step on one rank."""

    name: str  # for tables
    units: tuple[PlannedUnit, ...]  # the root last
    # of one forward with its backward; empty where the inputs of the model are not known
    events: tuple[StepEvent, ...] = ()
    buffer_bytes: int = 0  # of buffers of the modules
    tokens: int = 0  # that one rank computes with in one forward; 0 where this is not known
    # units that hold other units; their gradients are reduced at the end of the backward
    outer: frozenset[int] = frozenset()
    checkpointed: bool = False  # whether units compute their forward again in the backward, and save their inputs alone
    truths: int = 0  # truth values of tensors that the step asked for, and that counted as true

    @cached_property
    def numel(self) -> int:
        """Elements of all parameters."""
        return sum(unit.numel for unit in self.units)

    @cached_property
    def saved_bytes(self) -> int:
        """Bytes of tensors when the forward of the outermost unit ends: what autograd keeps, and the output."""
        live = 0
        for event in self.events:
            if event.kind is EventKind.BACKWARD:
                break
            if event.kind is EventKind.FORWARD_END and event.unit == len(self.units) - 1:
                return live
            live += event.net
        return live

    @cached_property
    def flops(self) -> int:
        """Floating-point operations of the forward and the backward of one rank."""
        return sum(event.flops for event in self.events)


def without_activations(units: Sequence[PlannedUnit], name: str) -> TracedStep:
    """Return a step of parameters alone, each unit after the other, for models whose inputs are not known."""
    last = len(units) - 1
    grads = [
        [StepEvent(EventKind.GRADIENT, index, place) for place, param in enumerate(unit.params) if param.trained]
        for index, unit in enumerate(units)
    ]
    events = [StepEvent(EventKind.FORWARD, last)]
    for unit in range(last):
        events += [StepEvent(EventKind.FORWARD, unit), StepEvent(EventKind.FORWARD_END, unit)]
    events += [StepEvent(EventKind.FORWARD_END, last), StepEvent(EventKind.BACKWARD, last)]
    for unit in reversed(range(last)):
        events += [StepEvent(EventKind.BACKWARD, unit), *grads[unit][::-1], StepEvent(EventKind.BACKWARD_END, unit)]
    events += [*grads[last], StepEvent(EventKind.BACKWARD_END, last)]
    return TracedStep(name, tuple(units), tuple(events), outer=frozenset({last}))
