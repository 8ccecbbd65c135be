"""State of flat parameters under the names, and in the shapes, of the model's parameters."""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn

from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.state.optim.compare import StateInfo
from hpcfsdp.state.optim.gather import ConsolidatedOptimState, communicate_optim_state, gather_all_orig_param_state
from hpcfsdp.state.optim.keys import FSDPParamInfo, ParamKey, sorted_items
from hpcfsdp.state.transfer import StateDictFormat

States = dict[str, dict[str, Any]]
"""The state of each parameter, by its name in the model."""


def unflatten_optim_state(info: FSDPParamInfo, flat_param_state: Mapping[str, Any], form: StateDictFormat) -> States:
    """Collective over a replica of the unit. The state of a flat parameter by the names of its parameters.

    Ranks that the form leaves out get nothing.
    """
    consolidated = communicate_optim_state(info, flat_param_state, form)
    if not form.is_shown_by(info.mesh):
        return {}
    with profile(Phase.RESHARDING):
        states = unflatten_communicated_optim_state(info, consolidated)
    return dict(zip(info.param_indices, states, strict=True))


def unflatten_communicated_optim_state(info: FSDPParamInfo, state: ConsolidatedOptimState) -> list[dict[str, Any]]:
    """The state of each parameter of a flat parameter, in the order of its slots; of scalars each has its own."""
    return [
        {
            **{name: values[index] for name, values in sorted_items(state.tensor_state)},
            **{name: value.clone() for name, value in sorted_items(state.zero_dim_tensor_state)},
            **{name: copy.deepcopy(value) for name, value in sorted_items(state.non_tensor_state)},
        }
        for index in range(len(info.layout.slots))
    ]


def unflatten_orig_param_states(found: Mapping[str, ConsolidatedOptimState]) -> States:
    """The state of parameters that are stepped one by one, from what was gathered of each."""
    return {
        fqn: {
            **{name: values[0] for name, values in sorted_items(state.tensor_state)},
            **dict(sorted_items(state.zero_dim_tensor_state)),
            **{name: copy.deepcopy(value) for name, value in sorted_items(state.non_tensor_state)},
        }
        for fqn, state in found.items()
    }


def convert_state_with_flat_params(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], merged: Mapping[str, StateInfo], form: StateDictFormat
) -> States:
    """Collective over a replica of the unit. The state of a flat parameter that the optimizer steps as one.

    Args:
        states: this rank's, by the name of the first parameter of each flat parameter.
        merged: the same of all ranks.
    """
    first = info.layout.slots[0].fqn
    return unflatten_optim_state(info, states[first], form) if first in merged else {}


def convert_state_with_orig_params(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], merged: Mapping[str, StateInfo], form: StateDictFormat
) -> States:
    """Collective over a replica of the unit. The state of a flat parameter whose parameters are stepped one by one.

    Args:
        states: this rank's, by the name of the parameter; it may lack those of which its shard holds nothing.
        merged: those of all ranks.
    """
    found = gather_all_orig_param_state(info, states, merged, form)
    if not form.is_shown_by(info.mesh):
        return {}
    with profile(Phase.RESHARDING):
        return unflatten_orig_param_states(found)


def unflatten_param_groups(
    param_groups: Sequence[Mapping[str, Any]],
    param_key_to_param: Mapping[ParamKey, nn.Parameter],
    param_to_fqns: Mapping[nn.Parameter, Sequence[str]],
) -> list[dict[str, Any]]:
    """An optimizer's groups with the names of the model's parameters; every other key is copied."""
    groups = []
    for group in param_groups:
        copied = {key: copy.deepcopy(value) for key, value in group.items() if key != "params"}
        fqns = [fqn for key in group["params"] for fqn in param_to_fqns[param_key_to_param[key]]]
        if "param_names" in copied:  # an optimizer that was built from names remembers them
            copied["param_names"] = list(fqns)
        groups.append({**copied, "params": fqns})
    return groups


def copied(state: Mapping[str, Any], form: StateDictFormat) -> dict[str, Any]:
    """The state of a parameter that is not sharded, as new memory. DTensors stay what they are."""
    return {
        name: value.detach().to(form.device(value.device), copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in sorted_items(state)
    }
