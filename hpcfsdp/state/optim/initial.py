"""The state that an optimizer has before its first step, found without a change of the optimizer or its parameters."""

from __future__ import annotations

import collections
import contextlib
import inspect
from collections.abc import Callable, Container, Iterator
from typing import Any

import torch
from torch import nn

from hpcfsdp.comm import raise_together
from hpcfsdp.state.model import communicator_of, ranks_of_model
from hpcfsdp.state.optim.keys import StepsWholeTensors
from hpcfsdp.units.flat_unit import units_in
from hpcfsdp.units.own import unit_fqn

_WITHOUT_DECAY = {"weight_decay": 0, "lambd": 0}
"""Hyper-parameters with which a step looks at the values of parameters."""

_BEFORE_STEP = {"step": 0, "mu_product": 1}
"""State that a step of torch's optimizers changes even if gradients are zero."""


@contextlib.contextmanager
def initial_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which an optimizer that has no state on any rank has that of its first step.

    Collective over all ranks of a model with units, and of an optimizer of whole tensors. After it the optimizer is as
    it was, or as it has been loaded.
    """
    whole = isinstance(optimizer, StepsWholeTensors)
    ranks = ranks_of_model(model) if units_in(model) else communicator_of(model) if whole else None
    has_begun = any(optimizer.state.values())
    if any(ranks.all_gather_object(has_begun)) if ranks is not None else has_begun:
        yield
        return
    if isinstance(optimizer, StepsWholeTensors):
        made = optimizer.initial_state()
    else:
        with contextlib.nullcontext() if ranks is None else raise_together(ranks):
            made = states_of_first_step(optimizer)
    before = optimizer.state
    shown = optimizer.state = collections.defaultdict(dict, made)
    try:
        yield
    finally:
        if optimizer.state is shown:
            optimizer.state = before


def needs_closure(step: Callable[..., Any]) -> bool:
    """Return whether a ``step`` of an optimizer does not work without a closure."""
    closure = inspect.signature(step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


@torch.no_grad()
def states_of_first_step(optimizer: torch.optim.Optimizer, chosen: Container[Any] | None = None) -> dict[Any, Any]:
    """Not collective. Return the state that an optimizer creates in its first step, with its first values.

    Copies of the parameters take a step with gradients of zero, and no hooks are called. As in training, a rank does
    not step an original parameter that it holds nothing of. Nothing for an optimizer that steps with a closure alone.

    Args:
        chosen: the parameters that get gradients; None: all.
    """
    step = inspect.unwrap(type(optimizer).step)  # without hooks, and without what schedulers put around it
    if needs_closure(step):
        return {}
    attributes, groups, state = dict(vars(optimizer)), optimizer.param_groups, optimizer.state
    params: dict[nn.Parameter, Any] = {}
    for param in (param for group in groups for param in group["params"]):
        copy = nn.Parameter(param.detach().clone(), requires_grad=param.requires_grad)  # with the same marks:
        vars(copy).update({name: value for name, value in vars(param).items() if name not in vars(copy)})
        is_stepped = param in chosen if chosen is not None else param.numel() or unit_fqn(param) is None
        if param.requires_grad and is_stepped:
            grad = torch.zeros_like(copy)
            copy.grad = grad.to_sparse() if isinstance(optimizer, torch.optim.SparseAdam) else grad
        params[copy] = param
    copies = iter(params)
    try:
        optimizer.param_groups = [
            {**group, **_WITHOUT_DECAY, "params": [next(copies) for _ in group["params"]]} for group in groups
        ]
        optimizer.state = collections.defaultdict(dict)
        step(optimizer)
        made = optimizer.state
    finally:
        vars(optimizer).clear()
        vars(optimizer).update(attributes)
        optimizer.param_groups, optimizer.state = groups, state  # of one that holds another they are no attributes
    for found in made.values():
        for key in found.keys() & _BEFORE_STEP.keys():
            if isinstance(found[key], torch.Tensor):
                found[key].fill_(_BEFORE_STEP[key])
            elif isinstance(found[key], (int, float)):
                found[key] = type(found[key])(_BEFORE_STEP[key])
    return {param: made[copy] for copy, param in params.items() if made.get(copy)}
