"""Whether an optimizer computes on shards what it computes on whole tensors, found by trials on small tensors.

An optimizer of the same class and options trains two small tensors, and others train parts of them, one for each rank
of a pair. Values, or numbers in groups, that come out otherwise show that it looks across elements, or at shapes.
"""

from __future__ import annotations

import collections
import copy
import functools
import inspect
import math
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError

Split = Callable[[torch.Tensor], list[list[torch.Tensor]]]
"""The tensors of each rank, of all elements in a row."""

# Parts fill the registers of a CPU: then an element is rounded alike wherever it is.


def _whole(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[flat[:128].unflatten(0, (16, 8)), flat[128:]]]


def _owned(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[flat[:128].unflatten(0, (16, 8))], [flat[128:]]]


def whole_runs(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    """Each tensor is on one rank, without its shape."""
    return [[flat[:128]], [flat[128:]]]


def cut_runs(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    """Ranks have parts of tensors."""
    return [[flat[:64]], [flat[64:128], flat[128:]]]


_STEPS = 12
_SAME = 1e-9
"""Relative to the largest change of an element."""
_MOST_GROUPS = 8
_PLAIN = (int, float, str, tuple, type(None))
_FLAGS = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)


def check_on_shards(optimizer: torch.optim.Optimizer, split: Split) -> None:
    """Not collective. Refuse an optimizer that computes something else on shards. What cannot be tried passes.

    Args:
        split: how ranks hold what it steps.

    Raises:
        EngineError: it does; names what computes the same.
    """
    for group in _kinds_of_groups(optimizer):
        if _differs(optimizer, group, split):
            name = type(optimizer).__name__
            remedy = "shard the model with hpcfsdp.fully_shard, whose DTensors know all parts, or use NO_SHARD"
            if not _differs(optimizer, group, _owned):
                remedy = f"use hpcfsdp.optim.WholeTensors(model, model.parameters(), {name}, ...)"
                remedy += ', or granularity="whole"' * (not _differs(optimizer, group, whole_runs))
                remedy += ", with use_orig_params=True"
            raise EngineError(
                f"the {name} does not step each element by itself: on the shards of flat parameters that each rank "
                f"has, it computes other values than on whole tensors. Instead, {remedy}"
            )


def _kinds_of_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """The options of groups, those that differ in names and rates alone once."""
    seen: list[str] = []
    for group in optimizer.param_groups:
        options = {key: value for key, value in group.items() if key not in ("params", "param_names")}
        alike = repr({**options, "lr": 0, "initial_lr": 0, "name": ""})
        if alike not in seen[:_MOST_GROUPS]:
            seen.append(alike)
            if options.get("lr") is not None:  # a warm-up may begin with 0
                options["lr"] = float(options.get("initial_lr") or options["lr"]) or 0.01
            yield options | {key: value for key, value in _FLAGS.items() if key in options}


@_compat.outside_of_modes
@torch.no_grad()
def _differs(optimizer: torch.optim.Optimizer, group: dict[str, Any], split: Split) -> bool:
    for step in _STEP_BY:
        with warnings.catch_warnings(), torch.random.fork_rng(devices=[]):
            warnings.simplefilter("ignore")
            before = torch.get_rng_state()
            try:
                [(whole, numbers)] = _train(optimizer, group, _whole, step)
                parts = _train(optimizer, group, split, step)
            except Exception:  # whatever it raises: its own first step will tell
                continue
            if not torch.equal(torch.get_rng_state(), before):  # random, so nothing can be said
                return False
        moved = (whole - _start()[:, None]).abs().amax(0)
        for (values, others), mine in zip(parts, split(whole), strict=True):
            expected = torch.cat([each.reshape(-1, _STEPS) for each in mine])
            differs = ((values - expected).abs() > _SAME * moved).any()  # what has diverged compares as False
            if differs or not torch.allclose(others, numbers, rtol=_SAME, atol=0, equal_nan=True):
                return True
        return False
    return False


def _start() -> torch.Tensor:
    return torch.arange(192, dtype=torch.float64).sin()


def _train(
    optimizer: torch.optim.Optimizer, group: dict[str, Any], split: Split, step: Callable[..., Any]
) -> list[tuple[torch.Tensor, torch.Tensor]]:
    """What each rank comes to: the values of its elements by step, and at the end the numbers in its groups."""
    found = []
    slopes = 0.5 + torch.arange(192, dtype=torch.float64) % 5
    for start, slope in zip(split(_start()), split(slopes), strict=True):
        params = [nn.Parameter(values.clone()) for values in start]
        made = _make(optimizer, [{**copy.deepcopy(group), "params": params}])
        by_step = []
        for number in range(_STEPS):
            closure = functools.partial(_loss, params, slope, None if number % 2 else math.cos(number))
            closure()
            step(made, closure)
            by_step.append(torch.cat([param.detach().flatten() for param in params]))
        options = [value for each in made.param_groups for value in each.values()]
        numbers = [value for value in options if isinstance(value, (int, float)) or getattr(value, "ndim", None) == 0]
        found.append((torch.stack(by_step, 1), torch.tensor([float(value) for value in numbers], dtype=torch.float64)))
    return found


def _loss(params: list[nn.Parameter], slopes: list[torch.Tensor], place: float | None) -> torch.Tensor:
    """A sum over elements, whose gradients it sets; without `place` gradients at right angles to the parameters."""
    loss = torch.zeros((), dtype=torch.float64)
    for param, slope in zip(params, slopes, strict=True):
        pairs = param.detach().unflatten(-1, (-1, 2))
        turned = torch.stack((pairs[..., 1], -pairs[..., 0]), -1).flatten(-2)  # AdamP looks at the angle
        param.grad = turned if place is None else slope * (param.detach() - slope * place)
        loss += param.grad.square().div(2 * slope).sum()
    return loss


def _make(optimizer: Any, groups: list[dict[str, Any]]) -> Any:
    """Another optimizer of the class, with the options of the constructor that the first one has kept."""
    kind = type(optimizer)
    known = {**vars(optimizer), **getattr(optimizer, "defaults", {}), **_FLAGS}
    first, *names = inspect.signature(kind).parameters
    given = {name: known[name] for name in names if name in known}
    given = {name: type(each) if isinstance(each, torch.optim.Optimizer) else each for name, each in given.items()}
    steps_by = known.get(first)
    try:
        return kind(_make(steps_by, groups) if isinstance(steps_by, torch.optim.Optimizer) else groups, **given)
    except TypeError:  # it has not kept an option that it needs
        of_all = vars(torch.optim.SGD([torch.zeros(0)]))
        if not all(isinstance(value, _PLAIN) for name, value in vars(optimizer).items() if name not in of_all):
            raise
        made = object.__new__(kind)
        made.__dict__ |= vars(optimizer) | {"param_groups": groups, "state": collections.defaultdict(dict)}
        return made


_STEP_BY: tuple[Callable[[Any, Callable[[], Any]], Any], ...] = (
    lambda made, closure: (made.first_step(), closure(), made.second_step()),
    lambda made, _: inspect.unwrap(type(made).step)(made),  # without hooks
    lambda made, closure: inspect.unwrap(type(made).step)(made, closure),
)
"""Ways to step. The first, of optimizers that look at two places (SAM), calls no closure."""
