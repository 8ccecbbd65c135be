"""Checks before an optimizer steps: it steps the shards, and computes on them what it computes on whole tensors."""

import collections
import copy
import functools
import inspect
import itertools
import math
import warnings
import weakref
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.optim.optimizer import register_optimizer_step_pre_hook

from hpcfsdp import _compat
from hpcfsdp.engine.root import Root
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import flat_params
from hpcfsdp.params.granularity import block_numel
from hpcfsdp.units import own
from hpcfsdp.units.clip import look_for_local_clipping

Split = Callable[[torch.Tensor], list[list[torch.Tensor]]]  # the tensors of each rank, of all elements in a row

# Parts fill the registers of a CPU: then an element is rounded alike wherever it is.


def _whole(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    return [[flat[:128].unflatten(0, (16, 8)), flat[128:]]]


def whole_runs(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    """Each tensor is on one rank, without its shape."""
    return [[flat[:128]], [flat[128:]]]


def cut_runs(flat: torch.Tensor) -> list[list[torch.Tensor]]:
    """Ranks have parts of tensors."""
    return [[flat[:64]], [flat[64:128], flat[128:]]]


_STEPS = 12
_SAME = 1e-9  # relative to the largest change of an element
_MOST_GROUPS = 8
_PLAIN = (int, float, str, tuple, type(None))
_FLAGS = dict.fromkeys(("foreach", "fused", "capturable", "differentiable"), False)


def check_on_shards(optimizer: torch.optim.Optimizer, split: Split) -> None:
    """Not collective. Refuse an optimizer that computes something else on shards, which ranks hold as by `split`."""
    for group in _kinds_of_groups(optimizer):
        if _differs(optimizer, group, split):
            name = type(optimizer).__name__
            remedy = "shard the model with hpcfsdp.fully_shard, whose DTensors know all parts, or use NO_SHARD"
            if not _differs(optimizer, group, lambda flat: [[whole] for whole in _whole(flat)[0]]):
                remedy = f"use hpcfsdp.optim.WholeTensors(model, model.parameters(), {name}, ...)"
                remedy += ', or granularity="whole"' * (not _differs(optimizer, group, whole_runs))
                remedy += ", with use_orig_params=True"
            raise EngineError(
                f"the {name} does not step each element by itself: on the shards of flat parameters that each rank "
                f"has, it computes other values than on whole tensors. Instead, {remedy}"
            )


def _kinds_of_groups(optimizer: torch.optim.Optimizer) -> Iterator[dict[str, Any]]:
    """Yield the options of groups, those that differ in names and rates alone once."""
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
            except Exception:  # whatever it raises: its own first step will raise it
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
    """Return what each rank comes to: the values of its elements by step, and at the end the numbers in its groups."""
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
    """Return a sum over elements, whose gradients it sets; without `place`, at right angles to the parameters."""
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


_roots: weakref.WeakValueDictionary[int, Root] = weakref.WeakValueDictionary()
_numbers = itertools.count()
_checked: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[int, int]] = weakref.WeakKeyDictionary()


@functools.cache
def watch_optimizers() -> None:
    """Check each optimizer of this process before its first step. Further calls do nothing."""
    register_optimizer_step_pre_hook(_check)


def watch_root(root: Root) -> None:
    """Reshard units of `root` before an optimizer steps, if a forward has left them unsharded."""
    _roots[next(_numbers)] = root


def _check(optimizer: torch.optim.Optimizer, _args: Any, _kwargs: Any) -> None:
    params = {param for group in optimizer.param_groups for param in group["params"]}
    for _, root in sorted(_roots.items()):  # in the same order on all ranks
        root.before_step(params)
        if root.holds_grads:
            root.refuse_held(f"a step of {type(optimizer).__name__}", params)
    look_for_local_clipping(optimizer)
    known = sum(len(group["params"]) for group in optimizer.param_groups), own.num_replaced
    if _checked.get(optimizer) == known:
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            if (fqn := own.hidden_fqn(param)) is None:
                continue
            if own.is_replaced(param):
                raise EngineError(
                    f"the {type(optimizer).__name__} steps {fqn!r}, but the module has been assigned another "
                    "parameter since: build the optimizer after that, or change the parameter in place"
                )
            # A DTensor is shown within summon_full_params alone.
            hint = (
                "outside of summon_full_params"
                if isinstance(param, DTensor)
                else "or wrap it with use_orig_params=True"
            )
            raise EngineError(
                f"the {type(optimizer).__name__} steps {fqn!r}, which was sharded after the optimizer was built and "
                f"gets no gradient: build the optimizer from model.parameters() after wrapping the model, {hint}"
            )
    _warn_of_decay(optimizer)
    splits: set[Split] = set()  # how ranks hold what is of flat parameters and sharded
    for flat in list(flat_params):  # a closure may be the first to call the model, so there may be no root
        if flat.comm.size > 1 and not params.isdisjoint(flat.stepped):
            slots = flat.layout.slots if flat.use_orig_params else ()
            whole = [not slot.is_cut and block_numel(slot.granularity, slot.shape) >= slot.numel for slot in slots]
            splits.add(whole_runs if whole and all(whole) else cut_runs)
    for each in dict.fromkeys((optimizer, *_compat.calling_optimizers())) if splits else ():  # some step by another
        for split in sorted(splits, key=lambda split: split.__name__):  # on all ranks alike
            check_on_shards(each, split)
    _checked[optimizer] = known


def _warn_of_decay(optimizer: torch.optim.Optimizer) -> None:
    """Warn if groups were made by the number of dimensions of shards: then no sharded matrix decays."""
    decayed = [p for group in optimizer.param_groups if group.get("weight_decay") for p in group["params"]]
    others = [p for group in optimizer.param_groups if not group.get("weight_decay") for p in group["params"]]
    decays = any(group.get("weight_decay") for group in optimizer.param_groups)
    matrices = sum(param.dim() < 2 <= len(own.whole_shape(param) or ()) for param in others)
    if decays and matrices and all(param.dim() >= 2 for param in decayed):
        warnings.warn(
            f"the {type(optimizer).__name__} applies no weight decay to any sharded matrix ({matrices} of them have "
            "1-D shards here): choose its groups by the whole shapes in hpcfsdp.param_info(model), or with "
            "hpcfsdp.param_groups(model, weight_decay=...)",
            stacklevel=5,
        )
