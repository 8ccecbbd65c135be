"""The state of an optimizer as that of the whole model's optimizer: compared over ranks, then gathered."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import assert_same, raise_together
from hpcfsdp.output.profile import Phase, SimpleProfiler, profile
from hpcfsdp.reshard.whole import whole_of
from hpcfsdp.state.gather import gather, keeping_scratch
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.optim.compare import (
    StateInfo,
    allgather_state_info,
    check_same_groups,
    convert_all_state_info,
    differing_unsharded,
)
from hpcfsdp.state.optim.keys import (
    FSDPParamInfo,
    OptimInput,
    ParamKey,
    StepsWholeTensors,
    sorted_items,
    with_params,
)
from hpcfsdp.state.optim.local import FlatParamState, LocalOptimState
from hpcfsdp.state.settings import StateDictFormat, optim_format_of
from hpcfsdp.units.flat_unit import units_in

log = logging.getLogger("hpcfsdp.optim")

States = dict[str, dict[str, Any]]
"""The state of each parameter, by its name in the model."""


@torch.no_grad()
def optim_state_dict(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_state_dict: Mapping[str, Any] | None = None,
    form: StateDictFormat | None = None,
    *,
    optim_input: OptimInput = None,
    group: Any = None,
) -> dict[str, Any]:
    """Collective over all ranks of the model. The state dict of the optimizer of the whole model.

    All ranks compare what they have before any tensor moves. Then one flat parameter at a time is gathered.

    Args:
        optim: steps the parameters of the wrapped model.
        optim_state_dict: its state dict, on each rank its own; None to call ``optim.state_dict()`` here: all ranks then
            raise an error that its hooks raise on one.
        form: how tensors are shown; None as the model is set. Parameters of a ``NO_SHARD`` unit are whole in any form.
        optim_input: instead of `optim`: what it was built from.
        group: the ranks, where they are not those of the model.

    Returns:
        ``state`` by the names of the model's parameters, and ``param_groups`` with these names; new memory. Parameters
        without state are not in it. Empty on ranks that the form leaves out.

    Raises:
        StateDictError: on all ranks, if they do not fit together, or the state dict does not fit the optimizer or has a
            tensor without readable values.
        DisagreementError: ranks want different kinds of state dicts.
        EngineError: a unit is at work, or summoned.
    """
    ranks = ranks_of_model(model, group)
    with SimpleProfiler("optim_state_dict", log):
        with raise_together(ranks):
            for unit in units_in(model):
                unit.check_at_rest("optim_state_dict")
            form = optim_format_of(model) if form is None else form
        assert_same(ranks, form, "the kind of state dict, see state_dict_type,")
        if optim_state_dict is None and isinstance(optim, StepsWholeTensors):
            optim_state_dict = optim.state_dict()  # a collective
        with profile(Phase.PREPROCESSING), raise_together(ranks):
            if optim_state_dict is None and optim is not None:
                optim_state_dict = optim.state_dict()
            own = LocalOptimState(model, optim, optim_state_dict, optim_input)
            if form.rank0_only and ranks.rank == 0:
                own.check_is_first()
            message = own.to_message()
            packed = message.packed()
        gathered = allgather_state_info(ranks, packed)
        with raise_together(ranks):
            check_same_groups(gathered)
            merged = convert_all_state_info(gathered)
            own.check_is_known(merged, message.empty)
            differing = differing_unsharded(gathered)
            if not gathered.has_one_order:
                own.reorder_groups()
        if differing is not None and ranks.rank == 0:
            log.warning(
                "the optimizer's state of %s differs: it is not sharded, so each rank's state dict has its own values",
                differing,
            )
        with keeping_scratch():
            if differing is None and not form.sharded:  # else ranks may have other ones
                own.unsharded = {
                    name: {k: whole_of(v) if isinstance(v, DTensor) else v for k, v in sorted_items(state)}
                    for name, state in sorted_items(own.unsharded)  # a collective for each DTensor
                }
            return _gathered(own, merged, form, is_shown=not form.rank0_only or ranks.rank == 0)


def _gathered(
    own: LocalOptimState, merged: Mapping[str, StateInfo], form: StateDictFormat, *, is_shown: bool
) -> dict[str, Any]:
    """Collective over all ranks. The state dict, once ranks agree."""
    states: States = {}
    for info, state in own.flat_param_states(merged):
        if form.is_made_by(info.mesh):
            states.update(communicate_optim_state(info, state, form))
    if not is_shown:
        return {}
    states.update({name: _copied(state, form) for name, state in own.unsharded.items()})
    in_order = itertools.chain.from_iterable(own.fqns.values())  # of the model, as optimizers may have others
    found: dict[str, Any] = {"state": {name: states[name] for name in in_order if name in states}}
    for key, value in own.users.items():
        warnings.warn(
            f"optimizer state {key!r} belongs to no parameter of the model: this rank's value is copied unchanged",
            stacklevel=2,
        )
        found["state"].update(_copied({key: value}, form) if isinstance(value, torch.Tensor) else {key: value})
    if own.groups is not None:
        found["param_groups"] = unflatten_param_groups(own.groups, own.params, own.fqns)
    return found


def communicate_optim_state(info: FSDPParamInfo, state: FlatParamState, form: StateDictFormat) -> States:
    """Collective over a replica of the unit. The state of a flat parameter's parameters, by their names.

    Returns:
        New memory. Nothing on ranks that the form leaves out.
    """
    device = info.flat.parameter.device
    tensors: States = {}
    for (name, dtype), parts in state.shards.items():
        with profile(Phase.TENSOR_ALL_GATHER, parts.nbytes):
            values = gather(info.mesh, parts, dtype, device, form)
        for index in parts.present:
            tensors.setdefault(info.layout.slots[index].fqn, {})[name] = values[index]
    if not form.is_shown_by(info.mesh):
        return {}
    with profile(Phase.RESHARDING):
        parts_of = (state.whole, state.scalars, state.others)
        return {
            slot.fqn: dict(
                itertools.chain(
                    tensors.get(slot.fqn, {}).items(),
                    *(_copied(part.get(slot.fqn, {}), form).items() for part in parts_of),
                )
            )
            for slot in info.layout.slots
            if any(slot.fqn in part for part in (tensors, *parts_of))
        }


def unflatten_param_groups(
    param_groups: Sequence[Mapping[str, Any]],
    param_key_to_param: Mapping[ParamKey, nn.Parameter],
    param_to_fqns: Mapping[nn.Parameter, Sequence[str]],
) -> list[dict[str, Any]]:
    """An optimizer's groups with the names of the model's parameters; every other key is copied."""
    groups = []
    for group in param_groups:
        fqns = [fqn for key in group["params"] for fqn in param_to_fqns[param_key_to_param[key]]]
        groups.append(with_params(group, fqns, fqns))
    return groups


def _copied(state: Mapping[Any, Any], form: StateDictFormat) -> dict[Any, Any]:
    """State that needs no communication, as new memory. DTensors stay what they are."""
    return {
        name: value.detach().to(form.device(value.device), copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in sorted_items(state)
    }
