"""State of a whole model's optimizer as that of an optimizer which steps flat parameters, or runs of parameters.

First everything is looked at, without a message and without a change: ``plan_flat_state`` and ``plan_orig_state`` say
what an entry will be. Then tensors are filled, one flat parameter at a time.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.state.optim.compare import describe
from hpcfsdp.state.optim.keys import FSDPParamInfo
from hpcfsdp.state.optim.values import deep_copy, same
from hpcfsdp.state.transfer import LocalShards, scatter

TORCH_SCALARS = {"step", "mu_product", "eta", "mu"}
"""State that torch's optimizers have once for each parameter: it has no dimensions, whatever the parameter has."""


@dataclass
class StatePlan:
    """What the state of one entry of the optimizer will be.

    Attributes:
        tensors: by name, for each parameter of the entry the value in the state dict; of the parameter's shape.
        others: by name, scalars and all else, ready.
    """

    tensors: dict[str, list[Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)


def elementwise_names(states: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """The names of states that have a value for each element, as far as parameters with dimensions tell.

    Of a parameter without dimensions such a state has none either, and looks like a scalar.
    """
    found: set[str] = set()
    told: set[str] = set()
    for fqn, state in states.items():
        if not isinstance(state, Mapping) or not shapes.get(fqn):
            continue
        for name, value in state.items():
            described = describe(value)
            if described is not None:
                told.add(name)
                if described[0]:
                    found.add(name)
    unknown = {name for state in states.values() if isinstance(state, Mapping) for name in state} - told
    return found | {name for name in unknown if name not in TORCH_SCALARS}


def plan_flat_state(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], elementwise: set[str]
) -> StatePlan | None:
    """What the state of a flat parameter will be; None if none of its parameters has any.

    Args:
        states: of the whole model's optimizer, by name.
        elementwise: see ``elementwise_names``.

    Raises:
        StateDictError: some parameters have state that others lack, or another kind of state, a scalar of another
            value, or a tensor of another shape than the parameter.
    """
    fqns = list(info.param_indices)
    present = [fqn for fqn in fqns if states.get(fqn)]
    if not present:
        return None
    for slot in info.layout.slots:  # before anything else: with state of another kind its names differ, too
        for name, value in states.get(slot.fqn, {}).items():
            described = describe(value)
            if described is not None and described[0]:
                _check_shape(slot.fqn, name, value, slot.whole_shape)
    absent = [fqn for fqn in fqns if not states.get(fqn)]
    if absent:
        raise StateDictError(
            f"there is state of {present[0]!r} ({', '.join(sorted(states[present[0]]))}) and none of {absent[0]!r}, "
            "which share one flat parameter here: wrap them in different units, or pass use_orig_params=True"
        )
    plan = StatePlan()
    for name in sorted({name for fqn in fqns for name in states[fqn]}):
        lacking = next((fqn for fqn in fqns if name not in states[fqn]), None)
        if lacking is not None:
            having = next(fqn for fqn in fqns if name in states[fqn])
            raise StateDictError(
                f"there is state {name!r} of {having!r} and none of {lacking!r}, which share one flat parameter here: "
                "wrap them in different units, or pass use_orig_params=True"
            )
        values = [states[fqn][name] for fqn in fqns]
        kinds = [_kind(info, index, name, value, elementwise) for index, value in enumerate(values)]
        if len(set(kinds)) > 1:
            odd = next(index for index, kind in enumerate(kinds) if kind != kinds[0])
            raise StateDictError(
                f"state {name!r} of {fqns[0]!r} is {_describe(values[0])}, of {fqns[odd]!r} {_describe(values[odd])}, "
                "which share one flat parameter here"
            )
        if kinds[0] == "tensor":
            _check_tensors(info, name, values)
            plan.tensors[name] = values
        elif kinds[0] == "scalar":
            plan.others[name] = flatten_zero_dim_tensor_optim_state(name, values, fqns)
        else:
            plan.others[name] = flatten_non_tensor_optim_state(name, values, fqns)
    return plan


def plan_orig_state(info: FSDPParamInfo, fqn: str, state: Mapping[str, Any], elementwise: set[str]) -> StatePlan | None:
    """What the state of a parameter will be that the optimizer steps by itself; None if it has none.

    Raises:
        StateDictError: a tensor has another shape than the parameter, or a value cannot be copied.
    """
    if not state:
        return None
    plan, index = StatePlan(), info.param_indices[fqn]
    for name in sorted(state):
        value = state[name]
        if _kind(info, index, name, value, elementwise) != "tensor":
            plan.others[name] = own_copy(f"{name!r} of {fqn!r}", value)
            continue
        if not info.shows_whole(fqn) or isinstance(value, (ShardedTensor, DTensor)):
            _check_shape(fqn, name, value, info.layout.slots[index].whole_shape)
        plan.tensors[name] = [value]
    return plan


def _kind(info: FSDPParamInfo, index: int, name: str, value: Any, elementwise: set[str]) -> str:
    described = describe(value)
    if described is None:
        return "value"
    if described[0]:
        return "tensor"
    # One number: of a parameter that is one itself it may be the state of its only element.
    return "tensor" if not info.layout.slots[index].shape and name in elementwise else "scalar"


def _describe(value: Any) -> str:
    described = describe(value)
    if described is None:
        return f"a {type(value).__name__} ({value!r})"
    return f"a {described[1]} tensor of shape {described[0]}"


def _check_tensors(info: FSDPParamInfo, name: str, values: Sequence[Any]) -> None:
    slots = info.layout.slots
    for slot, value in zip(slots, values, strict=True):
        _check_shape(slot.fqn, name, value, slot.whole_shape)
    dtypes = [describe(value)[1] for value in values]
    for slot, dtype in zip(slots, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise StateDictError(
                f"state {name!r} of {slots[0].fqn!r} is {dtypes[0]}, of {slot.fqn!r} {dtype}, which share one flat "
                "parameter here"
            )


def _check_shape(fqn: str, name: str, value: Any, shape: Sequence[int]) -> None:
    given = describe(value)[0]
    if given != tuple(shape):
        raise StateDictError(
            f"state {name!r} of {fqn!r} has shape {given}, and the parameter {tuple(shape)}: a sharded parameter needs "
            "state with one value for each of its elements"
        )


def flatten_zero_dim_tensor_optim_state(name: str, values: Sequence[torch.Tensor], fqns: Sequence[str]) -> torch.Tensor:
    """The scalar that all parameters of one flat parameter have, as a new tensor.

    Raises:
        StateDictError: they have different ones.
    """
    for fqn, value in zip(fqns, values, strict=True):
        if value.dtype != values[0].dtype or not same(value, values[0]):
            raise StateDictError(
                f"state {name!r} is {values[0].item()} ({values[0].dtype}) for {fqns[0]!r} and {value.item()} "
                f"({value.dtype}) for {fqn!r}, which share one flat parameter here: wrap them in different units, or "
                "pass use_orig_params=True"
            )
    return values[0].detach().clone()


def flatten_non_tensor_optim_state(name: str, values: Sequence[Any], fqns: Sequence[str]) -> Any:
    """The value that all parameters of one flat parameter have, copied.

    Raises:
        StateDictError: they have different ones, or it cannot be copied.
    """
    for fqn, value in zip(fqns, values, strict=True):
        if type(value) is not type(values[0]) or not same(value, values[0]):
            raise StateDictError(
                f"state {name!r} is {values[0]!r} for {fqns[0]!r} and {value!r} for {fqn!r}, which share one flat "
                "parameter here: wrap them in different units, or pass use_orig_params=True"
            )
    return deep_copy(f"{name!r} of {fqns[0]!r}", values[0])


def flatten_tensor_optim_state(info: FSDPParamInfo, values: Sequence[Any]) -> torch.Tensor:
    """Collective over the ranks of ``info.mesh`` unless all values are plain tensors. This rank's shard of a state.

    Args:
        values: for each parameter of the flat parameter, of its shape.

    Returns:
        1-D, ``layout.shard_numel`` elements, of the values' dtype, beside the parameter. Zero where no parameter is.
    """
    _, dtype = describe(values[0])
    shard = torch.empty(info.layout.shard_numel, dtype=dtype, device=info.flat.parameter.device)
    begin = info.comm.rank * info.layout.shard_numel
    for gap, end in info.layout.gaps():
        shard[max(gap - begin, 0) : max(end - begin, 0)].zero_()
    with profile(Phase.RESHARDING, shard.nbytes):
        scatter(info.mesh, LocalShards.of_shard(info.layout, shard), values)
    return shard


def flatten_optim_state(info: FSDPParamInfo, plan: StatePlan) -> dict[str, Any]:
    """Collective over the ranks of ``info.mesh`` unless all values are plain tensors. A flat parameter's state."""
    tensors = {name: flatten_tensor_optim_state(info, values) for name, values in plan.tensors.items()}
    return {**tensors, **plan.others}


def shard_orig_param_state(info: FSDPParamInfo, plans: Mapping[str, StatePlan]) -> dict[str, dict[str, Any]]:
    """Collective over the ranks of ``info.mesh`` unless all values are plain tensors. States of a unit's parameters.

    Args:
        plans: of those parameters of one flat parameter that have state, each stepped by itself.

    Returns:
        By parameter: tensors are 1-D and hold this rank's run, which may be empty; under ``NO_SHARD`` they are whole.
    """
    found: dict[str, dict[str, Any]] = {fqn: dict(plan.others) for fqn, plan in plans.items()}
    device, layout = info.flat.parameter.device, info.layout
    for name in sorted({name for plan in plans.values() for name in plan.tensors}):
        values: list[Any] = [None] * len(layout.slots)
        runs: list[torch.Tensor | None] = [None] * len(layout.slots)
        for fqn, plan in plans.items():
            if name not in plan.tensors:
                continue
            [value] = plan.tensors[name]
            if info.shows_whole(fqn) and not isinstance(value, (ShardedTensor, DTensor)):  # of any shape
                found[fqn][name] = value.detach().to(device, copy=True)
                continue
            index, extent = info.param_indices[fqn], layout.param_extent(fqn, info.comm.rank)
            values[index] = value
            runs[index] = torch.empty(extent.numel if extent else 0, dtype=describe(value)[1], device=device)
            found[fqn][name] = runs[index].view(layout.slots[index].shape) if info.keeps_shapes else runs[index]
        with profile(Phase.RESHARDING, sum(run.nbytes for run in runs if run is not None)):
            scatter(info.mesh, LocalShards.of_runs(layout, runs), values)
    return found


def own_copy(what: str, value: Any) -> Any:
    """A value of state as new memory, without what autograd knows of a tensor.

    Raises:
        StateDictError: see ``deep_copy``.
    """
    return value.detach().clone() if isinstance(value, torch.Tensor) else deep_copy(what, value)
