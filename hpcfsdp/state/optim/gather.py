"""State of one flat parameter brought together, once ranks agree on what they have."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.state.optim.compare import StateInfo, is_zero_dim_tensor
from hpcfsdp.state.optim.keys import FSDPParamInfo, sorted_items
from hpcfsdp.state.optim.values import Unpicklable
from hpcfsdp.state.transfer import LocalShards, StateDictFormat, gather


@dataclass
class ConsolidatedOptimState:
    """The state of one flat parameter, all ranks' together.

    Attributes:
        tensor_state: tensors with dimensions by name, for each parameter what a state dict shows of it; None where this
            rank shows nothing.
        zero_dim_tensor_state, non_tensor_state: this rank's, which are those of all ranks.
    """

    tensor_state: dict[str, list[Any]] = field(default_factory=dict)
    zero_dim_tensor_state: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_state: dict[str, Any] = field(default_factory=dict)


def communicate_optim_state(
    info: FSDPParamInfo, flat_param_state: Mapping[str, Any], form: StateDictFormat
) -> ConsolidatedOptimState:
    """Collective over a replica of the unit. The state of a flat parameter, of which each rank holds its shard.

    Args:
        flat_param_state: the optimizer's; of all ranks alike, but for the values of tensors with dimensions.
    """
    state = ConsolidatedOptimState()
    for name, value in sorted_items(flat_param_state):
        if is_zero_dim_tensor(value):
            state.zero_dim_tensor_state[name] = value.detach().to(form.device(value.device), copy=True)
        elif isinstance(value, torch.Tensor):
            parts = LocalShards.of_shard(info.layout, value.detach())
            with profile(Phase.TENSOR_ALL_GATHER, value.nbytes):
                state.tensor_state[name] = gather(info.mesh, parts, value.dtype, info.flat.parameter.device, form)
        else:
            state.non_tensor_state[name] = value
    return state


def check_state_shapes(info: FSDPParamInfo, fqn: str, state: Mapping[str, Any]) -> None:
    """Refuse state that has neither one value nor one for each element of what the optimizer steps.

    Args:
        fqn: of a parameter that is stepped by itself, or of the first one in a flat parameter.

    Raises:
        StateDictError: with both shapes.
    """
    if info.shows_whole(fqn):
        return
    shape = tuple(info.flat.parameter.shape)
    if info.keeps_shapes:
        shape = info.layout.by_name[fqn].shape
    elif info.flat.use_orig_params:
        extent = info.layout.param_extent(fqn, info.comm.rank)
        shape = (extent.numel if extent else 0,)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) != shape:
            raise StateDictError(
                f"optimizer state {name!r} of {fqn!r} has shape {tuple(value.shape)}, neither a scalar nor that of "
                f"what the optimizer steps, {shape}: it cannot be told which part of it belongs to which element"
            )


def allgather_orig_param_states(
    info: FSDPParamInfo,
    fqns: Iterable[str],
    name: str,
    dtype: torch.dtype,
    states: Mapping[str, Mapping[str, Any]],
    form: StateDictFormat,
) -> dict[str, Any]:
    """Collective over a replica of the unit. One state of several parameters of a flat parameter, stepped one by one.

    Args:
        fqns: the parameters, on all ranks alike.
        dtype: of the state.
        states: this rank's, by parameter; it may lack those of which its shard holds nothing.

    Returns:
        What the state dict shows, by parameter; None where this rank shows nothing.
    """
    nothing = torch.empty(0, dtype=dtype, device=info.flat.parameter.device)
    runs: list[torch.Tensor | None] = [None] * len(info.layout.slots)
    for fqn in fqns:
        value = states.get(fqn, {}).get(name)
        runs[info.param_indices[fqn]] = nothing if value is None else value.detach().reshape(-1)
    parts = LocalShards.of_runs(info.layout, runs)
    with profile(Phase.TENSOR_ALL_GATHER, sum(run.nbytes for run in runs if run is not None)):
        found = gather(info.mesh, parts, dtype, nothing.device, form)
    return {info.layout.slots[index].fqn: found[index] for index in parts.present}


def gather_all_orig_param_state(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], merged: Mapping[str, StateInfo], form: StateDictFormat
) -> dict[str, ConsolidatedOptimState]:
    """Collective over a replica of the unit. The states of the parameters of one flat parameter, stepped one by one.

    Args:
        states: this rank's, by parameter.
        merged: those of all ranks, as ``convert_all_state_info`` has found them.
    """
    found = {fqn: ConsolidatedOptimState() for fqn in info.param_indices if fqn in merged}
    wanted: dict[tuple[str, torch.dtype], list[str]] = {}
    for fqn, state in found.items():
        # What a rank that holds nothing of a parameter has for it, nobody has compared.
        held = states.get(fqn, {})
        own = {} if info.is_empty_on(fqn, info.comm.rank) else held
        device = form.device(info.flat.parameter.device)
        for name, scalar in merged[fqn].scalar_tensors.items():
            value = own.get(name, scalar)
            state.zero_dim_tensor_state[name] = value.detach().to(form.device(value.device), copy=True)
        for name, told in merged[fqn].non_tensors.items():
            state.non_tensor_state[name] = (held if isinstance(told, Unpicklable) else own).get(name, told)
        for name, described in merged[fqn].tensors.items():
            if info.shows_whole(fqn):  # nothing is sharded, so state may have any shape
                state.tensor_state[name] = [own[name].detach().to(device, copy=True)]
                continue
            wanted.setdefault((name, described.dtype), []).append(fqn)
    for (name, dtype), fqns in sorted(wanted.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        for fqn, value in allgather_orig_param_states(info, fqns, name, dtype, states, form).items():
            found[fqn].tensor_state[name] = [value]
    return found
