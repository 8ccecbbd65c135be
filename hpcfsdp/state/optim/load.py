"""The state of a whole model's optimizer as this rank's optimizer loads it: checked on all ranks, then scattered."""

from __future__ import annotations

import logging
import warnings
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator, assert_same, raise_together
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, SimpleProfiler, profile
from hpcfsdp.state.optim.compare import (
    RankState,
    StateInfo,
    allgather_state_info,
    check_same_groups,
    convert_all_state_info,
    describe,
)
from hpcfsdp.state.optim.flatten import (
    StatePlan,
    elementwise_names,
    flatten_optim_state,
    plan_flat_state,
    plan_orig_state,
    shard_orig_param_state,
)
from hpcfsdp.state.optim.keys import (
    FSDPParamInfo,
    OptimInput,
    OptimStateKey,
    ParamKey,
    check_is_state_dict,
    check_known,
    get_aliases,
    get_fqn_to_fsdp_param_info,
    get_param_to_fqns,
    listed_optim_input,
    map_param_key_to_optim_keys,
    resolve_param_keys,
    sorted_items,
)
from hpcfsdp.state.optim.rekey import rekey_sharded_optim_state_dict
from hpcfsdp.state.optim.save import check_at_rest, form_of
from hpcfsdp.state.optim.scatter import broadcast_processed_state, broadcast_state
from hpcfsdp.state.optim.values import deep_copy, picklable
from hpcfsdp.state.ranks import ranks_of_model
from hpcfsdp.state.settings import optim_settings_of
from hpcfsdp.state.transfer import Rank0Tensor, check_blocks
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.tensor.sharded import check_readable, local_blocks, properties_of
from hpcfsdp.tensor.whole import fill_block, whole_of

log = logging.getLogger("hpcfsdp.optim")

_DISTRIBUTED = (ShardedTensor, DTensor)


class _Plan:
    """What goes where, checked on this rank, before anything is sent.

    Attributes:
        infos: the flat parameter of each sharded parameter, by name.
        dtensors: parameters that no unit has and that are DTensors, by name.
        keys: of the entries of this rank's optimizer, in its order.
        entries: of sharded parameters that have state, by the first name.
        unsharded: state of the others, by name; new memory but for tensors, see ``_loaded``.
        users: entries that belong to no parameter, likewise.
        groups: for this rank's optimizer; None if the state dict has none.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer | None,
        optim_state_dict: Mapping[str, Any],
        optim_input: OptimInput,
        *,
        is_named_optimizer: bool,
        strict: bool,
    ) -> None:
        optim_input = listed_optim_input(optim_input)
        self.infos = get_fqn_to_fsdp_param_info(model)
        fqns = get_param_to_fqns(model, self.infos)
        params = resolve_param_keys(model, optim, optim_input, is_named_optimizer=is_named_optimizer)
        self.keys = map_param_key_to_optim_keys(params, fqns, self.infos)
        self._aliases = get_aliases(model)
        known = {name for names in fqns.values() for name in names}
        given = self._by_name(optim_state_dict["state"])
        users = {key: value for key, value in given.items() if _is_users(key, value, given, known)}
        self.users = {key: _entry_but_tensors(repr(key), value) for key, value in users.items()}
        self.states = {key: value for key, value in given.items() if key not in users}
        check_known(self.states, known, "the optimizer's state dict")
        self.dtensors = {name: param for param, names in fqns.items() if isinstance(param, DTensor) for name in names}
        chunked = {name for param, names in fqns.items() if isinstance(param, _DISTRIBUTED) for name in names}
        self.states = {fqn: self._readable(fqn, state, fqn in chunked) for fqn, state in self.states.items()}
        self.entries: dict[str, StatePlan] = {}
        self.unsharded: dict[str, Mapping[str, Any]] = {}
        shapes = {slot.fqn: slot.whole_shape for info in self.infos.values() for slot in info.layout.slots}
        elementwise = elementwise_names(self.states, shapes)
        for key in self.keys:
            self._take(key, elementwise)
        self._check_nothing_is_lost(params, optim if strict else None)
        if optim is not None:
            self._check_shapes_held(params, optim)
        self.groups = None
        if "param_groups" in optim_state_dict:
            own = _own_groups(optim, optim_input, params)
            hypers = [_hyper(group) for group in optim.param_groups] if optim is not None else [{} for _ in own]
            self.groups = self._matched(optim_state_dict["param_groups"], own, hypers, known | set(self._aliases))

    def _name(self, key: Any) -> Any:
        """The first name of what a state dict calls `key`."""
        if not isinstance(key, str):
            return key
        clean = clean_fqn(key)
        return self._aliases.get(clean, clean)

    def _by_name(self, given: Mapping[Any, Any]) -> dict[Any, Any]:
        found = {self._name(key): value for key, value in given.items()}
        # Of tied parameters a state dict may hold each name: the first one counts.
        found.update({key: value for key, value in given.items() if self._name(key) == key})
        return found

    def _readable(self, fqn: str, state: Any, is_chunked: bool) -> dict[str, Any]:
        """The state of one parameter, with plain tensors in place of distributed ones that are loaded as they are.

        Args:
            is_chunked: the parameter is a distributed tensor itself, of which no unit knows: so is its state.

        Raises:
            StateDictError: it is no dict, has a tensor without values, or one of which this rank has to have all.
        """
        if not isinstance(state, Mapping):
            raise StateDictError(f"the state of {fqn!r} is a dict of names and values, not a {type(state).__name__}")
        found = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                check_readable(f"{fqn}/{name}", value)
            is_filled = fqn in self.infos and isinstance(value, _DISTRIBUTED) and properties_of(value)[0]
            if not isinstance(value, _DISTRIBUTED) or is_filled or is_chunked:
                found[name] = value
                continue
            found[name] = _whole_here(value)
            if found[name] is None:
                why = "has no dimensions" if fqn in self.infos else "is of a parameter that is not sharded here"
                raise StateDictError(
                    f"state {name!r} of {fqn!r} is a {type(value).__name__}, and {why}, so that each rank needs all of "
                    "it: load a full state dict, or put whole tensors in its place"
                )
        return found

    def _take(self, key: OptimStateKey, elementwise: set[str]) -> None:
        name = key.unflat_param_names[0]
        if not key.is_fsdp_managed:
            if self.states.get(name):
                self.unsharded[name] = {
                    state: _own_but_tensors(f"{state!r} of {name!r}", value)
                    for state, value in sorted_items(self.states[name])
                }
            return
        info = self.infos[name]
        if info.flat.use_orig_params:
            plan = plan_orig_state(info, name, self.states.get(name, {}), elementwise)
        else:
            plan = plan_flat_state(info, self.states, elementwise)
        if plan is not None:
            self.entries[name] = plan

    def _check_nothing_is_lost(
        self, params: Mapping[ParamKey, nn.Parameter], optim: torch.optim.Optimizer | None
    ) -> None:
        """Refuse state that has nowhere to go, and parameters that would lose what they have."""
        stepped = {name for key in self.keys for name in key.unflat_param_names}
        idle = [fqn for fqn, state in self.states.items() if state and fqn not in stepped]
        if idle:
            raise StateDictError(
                f"the state dict holds state of {idle[0]!r}"
                + (f" and {len(idle) - 1} other parameter(s)" if len(idle) > 1 else "")
                + ", which the optimizer does not step: leave it out, or add the parameter to the optimizer"
            )
        if not any(self.states.values()) and (optim is None or not any(optim.state.values())):
            return
        for key, own_key in self.keys.items():
            name = key.unflat_param_names[0]
            if name in self.entries or name in self.unsharded:
                if optim is not None:
                    _check_same_names(name, self.states[name], optim.state.get(params[own_key], {}))
                continue
            if not params[own_key].requires_grad:
                continue
            if optim is not None and optim.state.get(params[own_key]):
                raise StateDictError(
                    f"the state dict holds no state of {name!r}, of which the optimizer has some ("
                    f"{', '.join(sorted(map(str, optim.state[params[own_key]])))}): it would start anew while others "
                    "go on"
                )
            log.info("the state dict holds no state of %r: the optimizer will make it anew", name)

    def _check_shapes_held(self, params: Mapping[ParamKey, nn.Parameter], optim: torch.optim.Optimizer) -> None:
        """Refuse state of whole parameters in other shapes than the optimizer has it.

        It may be of any shape there, which only an optimizer knows that has such state already. Of sharded parameters
        it has that of the parameter, see ``plan_flat_state``.
        """
        for key, own_key in self.keys.items():
            name = key.unflat_param_names[0]
            if name in self.unsharded or (name in self.entries and self.infos[name].shows_whole(name)):
                for state, held in optim.state.get(params[own_key], {}).items():
                    here, given = describe(held), describe(self.states[name].get(state))
                    if here is not None and given is not None and here[0] != given[0]:
                        raise StateDictError(
                            f"state {state!r} of {name!r} has shape {given[0]}, and that of the optimizer {here[0]}: "
                            "it is the state of another model, or of another optimizer"
                        )

    def _matched(
        self,
        given: Sequence[Mapping[str, Any]],
        own: list[list[ParamKey]],
        hypers: list[dict[str, Any]],
        known: set[str],
    ) -> list[dict[str, Any]]:
        """The groups of the state dict in the order of the optimizer's, with the keys of its parameters.

        What a group of the state dict lacks, as one of an older version of torch may, stays as the optimizer has it.
        """
        names_of = {own_key: key.unflat_param_names for key, own_key in self.keys.items()}
        for group in given:
            check_known(map(self._name, group["params"]), known, "param_groups")
        left = [({self._name(key) for key in group["params"]}, group) for group in given]
        found = []
        for place, keys in enumerate(own):
            names = {name for key in keys for name in names_of[key]}
            match = next((index for index, (other, _) in enumerate(left) if other == names), None)
            if match is None:
                raise StateDictError(_no_such_group(place, names, [other for other, _ in left]))
            _, group = left.pop(match)
            found.append({**_merged(hypers[place], _hyper(group)), "params": list(keys)})
        if left:
            raise StateDictError(
                f"the state dict has {len(given)} parameter groups, the optimizer {len(own)}: there is none with "
                f"{', '.join(repr(name) for name in sorted(left[0][0])[:3]) or 'no parameters'}"
            )
        return found

    def distributed(self) -> list[tuple[str, ShardedTensor | DTensor, FSDPParamInfo]]:
        """The distributed tensors in the state dict, with what they are to fill; the same on all ranks."""
        return [
            (fqn, value, self.infos[first])
            for first, plan in self.entries.items()
            for values in plan.tensors.values()
            for fqn, value in zip([first] if len(values) == 1 else self.infos[first].param_indices, values, strict=True)
            if isinstance(value, _DISTRIBUTED)
        ]

    def to_message(self) -> RankState:
        """What other ranks are to know."""
        sharded = set(self.infos)
        names_of = {own_key: key.unflat_param_names for key, own_key in self.keys.items()}
        groups = [
            (
                [name for key in group["params"] for name in names_of[key] if name in sharded],
                {key: picklable(value) for key, value in group.items() if key != "params"},
            )
            for group in self.groups or ()
        ]
        states = {fqn: StateInfo.of(state) for fqn, state in self.states.items() if fqn in sharded}
        return RankState(groups, states, names=list(self.infos), with_shapes=True)


def _hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in group.items() if key != "params"}


def _merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Hyper-parameters of a group as they will be; copies, tensors where the optimizer has its own."""
    found = {key: deep_copy(f"{key!r} of a parameter group", value) for key, value in {**own, **given}.items()}
    for key, value in found.items():
        if isinstance(value, torch.Tensor) and isinstance(own.get(key), torch.Tensor):
            found[key] = value.to(own[key].device)
    if "param_names" in found:  # an optimizer that was built from names has names of its own parameters
        found.pop("param_names")
        if "param_names" in own:
            found["param_names"] = list(own["param_names"])
    return found


def _whole_here(value: ShardedTensor | DTensor) -> torch.Tensor | None:
    """The values of a distributed tensor if this rank has all of them."""
    try:
        blocks = local_blocks(value)
    except ValueError:  # it is a sum over ranks, say
        return None
    whole, _ = properties_of(value)
    return next((block for box, block in blocks if tuple(box.sizes) == whole), None)


def _own_but_tensors(what: str, value: Any) -> Any:
    """A value of state as new memory, but for a tensor, which is copied or sent as it is loaded.

    What cannot be copied is an error while all ranks can still be told.

    Raises:
        StateDictError: see ``deep_copy``.
    """
    return value if isinstance(value, (torch.Tensor, Rank0Tensor)) else deep_copy(what, value)


def _entry_but_tensors(what: str, value: Any) -> Any:
    """The same of an entry that is no parameter's: a dict of such values, or anything else."""
    if not isinstance(value, Mapping):
        return _own_but_tensors(what, value)
    return {name: _own_but_tensors(f"{name!r} of {what}", inner) for name, inner in value.items()}


def _loaded(ranks: Communicator | Grid, value: Any) -> Any:
    """Collective over `ranks` where rank 0 alone has tensors. What ``_own_but_tensors`` gave, as new memory."""
    if isinstance(value, Rank0Tensor):
        return broadcast_state(ranks, value, ranks.device)
    return value.detach().clone() if isinstance(value, torch.Tensor) else value


def _placed_like(param: DTensor, value: Any) -> Any:
    """Collective over the mesh of a ``DTensor`` that is placed otherwise. State of a parameter, placed as it is."""
    if not isinstance(value, torch.Tensor) or value.shape != param.shape:
        return value
    if isinstance(value, DTensor) and (value.device_mesh, value.placements) == (param.device_mesh, param.placements):
        return value
    placed = torch.zeros_like(param.detach(), dtype=value.dtype)
    fill_block(placed, whole_of(value))
    return placed


def _check_same_names(fqn: str, given: Mapping[str, Any], held: Mapping[str, Any]) -> None:
    """Refuse state of a parameter that lacks what the optimizer remembers of it, which it would look for in vain."""
    lacking = sorted(str(name) for name in held if name not in given)
    if lacking:
        raise StateDictError(
            f"the state dict holds no {lacking[0]!r} of {fqn!r}, and has {sorted(map(str, given))}; the optimizer has "
            f"{sorted(map(str, held))}: it is the state of another optimizer, or of one with other options"
        )


def _is_users(key: Any, value: Any, given: Mapping[Any, Any], known: set[str]) -> bool:
    """Whether an entry of state belongs to no parameter at all, rather than to one of another model."""
    if key in known or not isinstance(value, Mapping):
        return key not in known
    of_params = {name for other in known & given.keys() if isinstance(given[other], Mapping) for name in given[other]}
    return bool(of_params) and not of_params & value.keys()


def _no_such_group(place: int, names: set[str], others: list[set[str]]) -> str:
    closest = max(others, key=lambda other: len(other & names), default=set())
    text = (
        f"parameter group {place} of the optimizer has {len(names)} parameter(s), and no group of the state dict has "
        "these"
    )
    for title, odd in (("in the optimizer only", names - closest), ("in the state dict only", closest - names)):
        if odd:
            text += f"; {title}: {', '.join(sorted(odd)[:3])}" + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
    return text + ": build the optimizer with the groups that were saved"


def _own_groups(
    optim: torch.optim.Optimizer | None, optim_input: OptimInput, params: Mapping[ParamKey, nn.Parameter]
) -> list[list[ParamKey]]:
    """The keys of the parameters in each group of this rank's optimizer."""
    by_param: dict[nn.Parameter, ParamKey] = {param: key for key, param in params.items()}
    if optim is not None:
        return [[by_param[param] for param in group["params"]] for group in optim.param_groups]
    groups = list(optim_input or ())
    if not groups or isinstance(groups[0], torch.Tensor):
        return [list(params)]
    params_of = (
        [group["params"]] if isinstance(group["params"], torch.Tensor) else group["params"] for group in groups
    )
    return [[by_param[param] for param in own] for own in params_of]


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
    """Collective over all ranks of the model. The state dict that this rank's optimizer loads.

    All ranks check it, and compare what they have been given, before any tensor moves. Then one flat parameter at a
    time is filled. Neither the optimizer nor what was given is changed.

    Args:
        optim: steps the parameters of the wrapped model.
        optim_state_dict: of the whole model's optimizer, parameters by name; tensors whole, or distributed over the
            ranks that the model is sharded over.
        rank0_only: rank 0 alone has it, whole; that of other ranks is ignored. None: as the model is set.
        is_named_optimizer: whether `optim` has names for keys.
        strict: parameters of which the optimizer has state must have some in the state dict.
        optim_input: instead of `optim`: what it was built from.
        group: the ranks, where they are not those of the model.

    Returns:
        ``state`` by the keys of this rank's optimizer, with tensors in the shapes of what it steps, and
        ``param_groups`` in its order, if there are any; new memory. Entries without parameters are copied.

    Raises:
        StateDictError: on all ranks, if it does not fit the model or the optimizer, or ranks do not fit together.
        DisagreementError: ranks have different `rank0_only` or `strict`.
        EngineError: a unit is at work, or summoned.
    """
    ranks = ranks_of_model(model, group)
    with SimpleProfiler("optim_state_dict_to_load", log):
        with raise_together(ranks):
            check_at_rest(model, "optim_state_dict_to_load")
            if rank0_only is None:
                rank0_only = form_of(optim_settings_of(model)).rank0_only
            rank0_only = rank0_only and ranks.size > 1
        assert_same(ranks, (rank0_only, strict), "whether rank 0 alone has the state dict (rank0_only), or strict,")
        with raise_together(ranks):
            if not rank0_only or ranks.rank == 0:
                check_is_state_dict(optim_state_dict)
        if rank0_only:
            with profile(Phase.OBJECT_GATHER):
                optim_state_dict = broadcast_processed_state(ranks, optim_state_dict)
        with profile(Phase.PREPROCESSING), raise_together(ranks):
            plan = _Plan(
                model, optim, optim_state_dict or {}, optim_input, is_named_optimizer=is_named_optimizer, strict=strict
            )
            for key in plan.users:
                warnings.warn(
                    f"optimizer state {key!r} belongs to no parameter of the model: it is copied", stacklevel=4
                )
            told = plan.to_message().packed()
        gathered = allgather_state_info(ranks, told)
        with raise_together(ranks):
            check_same_groups(gathered)
            convert_all_state_info(gathered)
        distributed = plan.distributed()
        for info in {id(info): info for _, _, info in distributed}.values():
            # A collective the first time, which is to be over before a rank raises.
            info.mesh.ranks(info.mesh.dtensor_dim, "tensor")
        with raise_together(ranks):
            for name, value, info in distributed:
                check_blocks(name, value, info.mesh.ranks(info.mesh.dtensor_dim, "tensor"))
        infos = list({id(info): info for info in plan.infos.values()}.values())
        goes_in_parts = [True] * len(infos)
        if rank0_only:
            goes_in_parts = ranks.broadcast_object([_is_first_of(ranks, info) for info in infos])
        return _scattered(plan, ranks, dict(zip(map(id, infos), goes_in_parts, strict=True)))


def _scattered(plan: _Plan, ranks: Communicator | Grid, goes_in_parts: Mapping[int, bool]) -> dict[str, Any]:
    """Collective over all ranks, unless every rank has whole tensors. The state dict, once ranks agree.

    Args:
        goes_in_parts: by identity of a flat parameter's info, whether of a tensor that rank 0 alone has each rank can
            be sent its part, or has to be sent all.
    """
    states: dict[str, dict[str, Any]] = {}
    for info in {id(info): info for info in plan.infos.values()}.values():
        mine = {fqn: plan.entries.pop(fqn) for fqn in info.param_indices if fqn in plan.entries}
        for fqn, entry in mine.items():
            if info.shows_whole(fqn) or not goes_in_parts[id(info)]:
                _broadcast(entry, ranks, info)
        if info.flat.use_orig_params:
            states.update(shard_orig_param_state(info, mine))
        else:
            states.update({fqn: flatten_optim_state(info, entry) for fqn, entry in mine.items()})
    for fqn, state in sorted(plan.unsharded.items()):  # ranks may step them in different orders
        loaded = {name: _loaded(ranks, value) for name, value in state.items()}
        if fqn in plan.dtensors:
            loaded = {name: _placed_like(plan.dtensors[fqn], value) for name, value in loaded.items()}
        states[fqn] = loaded
    by_key = {key: states[key.unflat_param_names[0]] for key in plan.keys if key.unflat_param_names[0] in states}
    found: dict[str, Any] = {"state": rekey_sharded_optim_state_dict(by_key, plan.keys)}
    for key, value in plan.users.items():
        if isinstance(value, Mapping):
            found["state"][key] = {name: _loaded(ranks, inner) for name, inner in value.items()}
        else:
            found["state"][key] = _loaded(ranks, value)
    if plan.groups is not None:
        found["param_groups"] = plan.groups
    return found


def _is_first_of(ranks: Communicator | Grid, info: FSDPParamInfo) -> bool:
    """On rank 0: whether it is the first of the ranks that share a flat parameter, which are all of `ranks`."""
    return info.mesh.is_first() and info.mesh.size() == ranks.size


def _broadcast(entry: StatePlan, ranks: Communicator | Grid, info: FSDPParamInfo) -> None:
    """Collective over `ranks`, where rank 0 alone has tensors. Have all ranks have them."""
    for name, values in entry.tensors.items():
        entry.tensors[name] = [broadcast_state(ranks, value, info.flat.parameter.device) for value in values]
