"""The state of a whole model's optimizer as this rank's optimizer loads it: checked on all ranks, then scattered."""

import logging
import warnings
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import Communicator, assert_same, raise_together
from hpcfsdp.comm.communicator import Grid
from hpcfsdp.output.profile import Phase, SimpleProfiler, profile
from hpcfsdp.reshard.sharded_tensors import fill_block, full_tensor, is_distributed
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.optim.compare import allgather_state_info, check_same_groups, convert_all_state_info
from hpcfsdp.state.optim.keys import FSDPParamInfo, OptimInput, check_is_state_dict, rekey_sharded_optim_state_dict
from hpcfsdp.state.optim.load_plan import LoadPlan, StatePlan
from hpcfsdp.state.optim.values import on_host, place_steps
from hpcfsdp.state.rank0 import broadcast_tensor, broadcast_values, rank0_tensor
from hpcfsdp.state.settings import optim_format_of
from hpcfsdp.state.tensors import LocalShards, Rank0Tensor, mark_whole_state, shape_and_dtype
from hpcfsdp.state.transfer import check_blocks, scatter
from hpcfsdp.units.flat_unit import units_in

log = logging.getLogger("hpcfsdp.optim")


@dataclass
class NewState:
    """The state that the parameters of one flat parameter will have, with memory that is to be filled."""

    states: dict[str, dict[str, Any]]
    # The name of a state, memory for this rank's part of it, and the value in the state dict for each slot.
    shards: list[tuple[str, LocalShards, list[Any]]] = field(default_factory=list)
    # By entry and name, tensors of other shapes than the parameter, which a checkpoint fills.
    whole: dict[tuple[str, str], torch.Tensor] = field(default_factory=dict)


def allocate_optim_state(info: FSDPParamInfo, plans: Mapping[str, StatePlan]) -> NewState:
    """Not collective. Return memory for the state of one flat parameter; zero where no parameter is.

    Tensors are 1-D: this rank's shard, or its run of a parameter, which may be empty. Original parameters under
    ``NO_SHARD`` have theirs whole.
    """
    device, layout, is_flat = info.flat.parameter.device, info.layout, not info.flat.use_orig_params
    new = NewState({fqn: dict(plan.others) for fqn, plan in plans.items()})
    for name in sorted({name for plan in plans.values() for name in plan.tensors}):
        given: list[Any] = [None] * len(layout.slots)
        parts: list[torch.Tensor | None] = [None] * len(layout.slots)
        for fqn, values in ((fqn, plan.tensors[name]) for fqn, plan in plans.items() if name in plan.tensors):
            shape, dtype = shape_and_dtype(values[0])
            if is_flat:
                new.states[fqn][name] = shard = _empty_shard(info, dtype)
                given, parts = values, [shard] * len(layout.slots)
                continue
            is_plain = isinstance(values[0], torch.Tensor) and not is_distributed(values[0])
            index = info.param_indices[fqn]
            is_of_other_shape = info.has_state_of_any_shape(fqn) and shape != layout.slots[index].whole_shape
            if is_plain and (info.shows_whole(fqn) or (info.is_stepped_whole and is_of_other_shape)):
                own = values[0].detach().to(device, copy=True)
            elif is_of_other_shape:
                own = new.whole[fqn, name] = torch.empty(shape, dtype=dtype, device=device)
            else:
                run = layout.param_run(fqn, info.comm.rank)
                own = torch.empty(run.numel if run else 0, dtype=dtype, device=device)
                given[index], parts[index] = values[0], own
                own = own.view(layout.slots[index].shape) if info.keeps_shapes else own
            new.states[fqn][name] = mark_whole_state(own) if is_of_other_shape else own
        if any(part is not None for part in parts):
            new.shards.append((name, LocalShards(layout, parts, whole_shard=is_flat), given))
    return new


def _empty_shard(info: FSDPParamInfo, dtype: torch.dtype) -> torch.Tensor:
    shard = torch.empty(info.layout.shard_numel, dtype=dtype, device=info.flat.parameter.device)
    begin = info.comm.rank * info.layout.shard_numel
    for gap, end in info.layout.gaps():
        shard[max(gap - begin, 0) : max(end - begin, 0)].zero_()
    return shard


def flatten_optim_state(info: FSDPParamInfo, plans: Mapping[str, StatePlan]) -> dict[str, dict[str, Any]]:
    """Return a flat parameter's state. Collective over ``info.mesh``, unless all values are plain tensors."""
    new = allocate_optim_state(info, plans)
    for _, parts, values in new.shards:
        with profile(Phase.RESHARDING, parts.nbytes):
            scatter(info.mesh, parts, values)
    return new.states


def broadcast_processed_state(ranks: Communicator | Grid, optim_state_dict: Mapping[str, Any] | None) -> dict[str, Any]:
    """Return the state dict of rank 0, with a ``Rank0Tensor`` for each tensor with dimensions. Collective over `ranks`.

    That of other ranks is ignored. ``state`` and ``param_groups`` are sent, and nothing else.
    """
    return broadcast_values(ranks, lambda: _processed(optim_state_dict or {"state": {}}))


def _processed(optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    def stand_in(key: Any, name: Any, value: Any) -> Any:
        if not isinstance(value, torch.Tensor):  # tensors inside of a value are small
            return on_host(value)
        tensor = rank0_tensor(f"{key}/{name}", value)
        return tensor if tensor.shape else on_host(value)

    state = {
        key: {name: stand_in(key, name, value) for name, value in entry.items()}
        if isinstance(entry, Mapping)
        else stand_in(key, "", entry)
        for key, entry in optim_state_dict["state"].items()
    }
    found: dict[str, Any] = {"state": state}
    if "param_groups" in optim_state_dict:
        found["param_groups"] = on_host([dict(group) for group in optim_state_dict["param_groups"]])
    return found


def broadcast_state(ranks: Communicator | Grid, value: Any, device: torch.device) -> Any:
    """Return the tensor of a ``Rank0Tensor``, on `device`, collective over `ranks`; and any other value as it is."""
    return broadcast_tensor(ranks, value).to(device) if isinstance(value, Rank0Tensor) else value


def _loaded(ranks: Communicator | Grid, value: Any) -> Any:
    """Return state of the plan as new memory. Collective over `ranks` where rank 0 alone has tensors."""
    if isinstance(value, Rank0Tensor):
        return broadcast_state(ranks, value, ranks.device)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _placed_like(param: DTensor, value: Any) -> Any:
    """Return state of a parameter, placed as it is. Collective over the mesh of a ``DTensor`` placed otherwise."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
        return value
    placed = torch.zeros_like(param.detach(), dtype=value.dtype)
    fill_block(placed, full_tensor(value))
    return placed


@torch.no_grad()
def optim_state_dict_to_load(
    model: nn.Module,
    optim: torch.optim.Optimizer | None,
    optim_state_dict: Mapping[str, Any] | None,
    *,
    rank0_only: bool | None = False,
    is_named_optimizer: bool = False,
    strict: bool = True,
    optim_input: OptimInput = None,
    group: Any = None,
) -> dict[str, Any]:
    """Return the state dict that this rank's optimizer loads. Collective over all ranks of the model.

    All ranks check it, and compare what they have been given, before any tensor moves. Then one flat parameter at a
    time is filled. Neither the optimizer nor what was given is changed. Other arguments are those of
    ``StateDictMethods``.

    Args:
        optim_state_dict: of the whole model's optimizer, parameters by name; tensors whole, or distributed over the
            ranks that the model is sharded over.
        rank0_only: rank 0 alone has it, whole; that of other ranks is ignored. None: as the model is set.
        strict: parameters with state in the optimizer must have some in the state dict.

    Returns:
        ``state`` by the keys of this rank's optimizer, with tensors in the shapes of what it steps, and
        ``param_groups`` in its order, if there are any; new memory. Entries without parameters are copied.
    """
    ranks = ranks_of_model(model, group)
    with SimpleProfiler("optim_state_dict_to_load", log):
        with raise_together(ranks):
            for unit in units_in(model):
                unit.check_at_rest("optim_state_dict_to_load")
            if rank0_only is None:
                rank0_only = optim_format_of(model).rank0_only
            rank0_only = rank0_only and ranks.size > 1
        assert_same(ranks, (rank0_only, strict), "whether rank 0 alone has the state dict (rank0_only), or strict,")
        with raise_together(ranks):
            if not rank0_only or ranks.rank == 0:
                check_is_state_dict(optim_state_dict)
        if rank0_only:
            with profile(Phase.OBJECT_GATHER):
                optim_state_dict = broadcast_processed_state(ranks, optim_state_dict)
        with profile(Phase.PREPROCESSING), raise_together(ranks) as exchange:
            plan = LoadPlan(
                model, optim, optim_state_dict or {}, optim_input, is_named_optimizer=is_named_optimizer, strict=strict
            )
            for key in plan.users:
                warnings.warn(
                    f"optimizer state {key!r} belongs to no parameter of the model: it is copied unchanged",
                    stacklevel=4,
                )
            message = plan.to_message()
            exchange.mine = message.digests
        gathered = allgather_state_info(ranks, message, exchange.everyone)
        with raise_together(ranks):
            check_same_groups(gathered)
            convert_all_state_info(gathered)
        distributed = plan.distributed()
        for info in dict.fromkeys(info for _, _, info in distributed):
            # A collective the first time, which is to be over before a rank raises.
            info.mesh.ranks(info.mesh.dtensor_dim, "tensor")
        with raise_together(ranks):
            for name, value, info in distributed:
                check_blocks(name, value, info.mesh.ranks(info.mesh.dtensor_dim, "tensor"))
        infos = dict.fromkeys(plan.infos.values(), True)
        if rank0_only:
            in_parts = [info.mesh.is_first() and info.mesh.size() == ranks.size for info in infos]
            infos = dict(zip(infos, ranks.broadcast_object(in_parts), strict=True))
        return _scattered(plan, ranks, infos)


def _scattered(plan: LoadPlan, ranks: Communicator | Grid, infos: Mapping[FSDPParamInfo, bool]) -> dict[str, Any]:
    """Return the state dict, once ranks agree. Collective over all ranks, unless every rank has whole tensors.

    Of the flat parameters, `infos`, those are False for which rank 0, which alone has tensors, has to send them whole.
    """
    states: dict[str, dict[str, Any]] = {}
    for info, goes_in_parts in infos.items():
        mine = {fqn: plan.entries.pop(fqn) for fqn in info.param_indices if fqn in plan.entries}
        for fqn, entry in mine.items():
            if info.shows_whole(fqn) or not goes_in_parts:
                _broadcast(entry.tensors, entry.tensors, ranks, info)
            elif info.is_stepped_whole:
                shape = info.layout.slots[info.param_indices[fqn]].whole_shape
                others = [name for name, values in entry.tensors.items() if shape_and_dtype(values[0])[0] != shape]
                _broadcast(entry.tensors, others, ranks, info)
        states.update(flatten_optim_state(info, mine))
    for fqn, state in sorted(plan.unsharded.items()):  # ranks may step them in different orders
        loaded = {name: _loaded(ranks, value) for name, value in state.items()}
        if fqn in plan.dtensors:
            loaded = {name: _placed_like(plan.dtensors[fqn], value) for name, value in loaded.items()}
        states[fqn] = loaded
    found: dict[str, Any] = {"state": rekey_sharded_optim_state_dict(states, plan.keys)}
    for key, value in plan.users.items():
        if isinstance(value, Mapping):
            found["state"][key] = {name: _loaded(ranks, inner) for name, inner in value.items()}
        else:
            found["state"][key] = _loaded(ranks, value)
    if plan.groups is not None:
        found["param_groups"] = plan.groups
        place_steps(plan.groups, found["state"])
    return found


def _broadcast(
    tensors: dict[str, list[Any]], names: Iterable[str], ranks: Communicator | Grid, info: FSDPParamInfo
) -> None:
    """Send some of an entry to all ranks. Collective over `ranks`, where rank 0 alone has tensors."""
    for name in list(names):
        tensors[name] = [broadcast_state(ranks, value, info.flat.parameter.device) for value in tensors[name]]
