"""The state of one entry of an optimizer, a flat parameter or an original one: checked and planned on this rank."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.reshard.sharded_tensors import is_distributed
from hpcfsdp.state.optim.keys import FSDPParamInfo
from hpcfsdp.state.optim.values import deep_copy, same
from hpcfsdp.state.tensors import TensorInfo, shape_and_dtype

TORCH_SCALARS = {"step", "mu_product", "eta", "mu"}
"""State that torch's optimizers have once for each parameter: it has no dimensions, whatever the parameter has."""


@dataclass
class StatePlan:
    """What the state of one entry of the optimizer will be.

    Attributes:
        tensors: by name, for each parameter of the entry the value in the state dict; of the parameter's shape.
        others: by name, scalars and all else, ready.
        unread: by name, scalars without values yet, for each parameter of the entry.
    """

    tensors: dict[str, list[Any]] = field(default_factory=dict)
    others: dict[str, Any] = field(default_factory=dict)
    unread: dict[str, list[TensorInfo]] = field(default_factory=dict)


def elementwise_names(states: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """The names of states with a value for each element, judged by parameters with dimensions.

    Of a parameter without dimensions such a state has none either, and looks like a scalar.
    """
    found: set[str] = set()
    known: set[str] = set()
    for fqn, state in states.items():
        if not isinstance(state, Mapping) or not shapes.get(fqn):
            continue
        for name, value in state.items():
            described = shape_and_dtype(value)
            if described is not None:
                known.add(name)
                if described[0]:
                    found.add(name)
    unknown = {name for state in states.values() if isinstance(state, Mapping) for name in state} - known
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
            described = shape_and_dtype(value)
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
        elif kinds[0] == "scalar" and isinstance(values[0], TensorInfo):
            plan.unread[name] = values
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
            if isinstance(value, TensorInfo):
                plan.unread[name] = [value]
            else:
                is_tensor = isinstance(value, torch.Tensor)
                own = value.detach().clone() if is_tensor else deep_copy(f"{name!r} of {fqn!r}", value)
                plan.others[name] = own
            continue
        if not info.has_state_of_any_shape(fqn) or is_distributed(value):
            _check_shape(fqn, name, value, info.layout.slots[index].whole_shape)
        plan.tensors[name] = [value]
    return plan


def _kind(info: FSDPParamInfo, index: int, name: str, value: Any, elementwise: set[str]) -> str:
    described = shape_and_dtype(value)
    if described is None:
        return "value"
    if described[0]:
        return "tensor"
    # One number: of a parameter that is one itself it may be the state of its only element.
    return "tensor" if not info.layout.slots[index].shape and name in elementwise else "scalar"


def _describe(value: Any) -> str:
    described = shape_and_dtype(value)
    if described is None:
        return f"a {type(value).__name__} ({value!r})"
    return f"a {described[1]} tensor of shape {described[0]}"


def _check_tensors(info: FSDPParamInfo, name: str, values: Sequence[Any]) -> None:
    slots = info.layout.slots
    for slot, value in zip(slots, values, strict=True):
        _check_shape(slot.fqn, name, value, slot.whole_shape)
    dtypes = [shape_and_dtype(value)[1] for value in values]
    for slot, dtype in zip(slots, dtypes, strict=True):
        if dtype != dtypes[0]:
            raise StateDictError(
                f"state {name!r} of {slots[0].fqn!r} is {dtypes[0]}, of {slot.fqn!r} {dtype}, which share one flat "
                "parameter here"
            )


def _check_shape(fqn: str, name: str, value: Any, shape: Sequence[int]) -> None:
    given = shape_and_dtype(value)[0]
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
