"""The state of an optimizer as that of the whole model's optimizer: compared over ranks, then gathered."""

from __future__ import annotations

import itertools
import logging
import warnings
from collections.abc import Collection, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import assert_same, raise_together
from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, SimpleProfiler, profile
from hpcfsdp.sharded import unshard
from hpcfsdp.sharded.unit import units_in
from hpcfsdp.state.optim.compare import (
    RankState,
    StateInfo,
    allgather_state_info,
    check_same_groups,
    convert_all_state_info,
    differing_unsharded,
)
from hpcfsdp.state.optim.gather import check_state_shapes
from hpcfsdp.state.optim.keys import (
    OptimInput,
    OptimStateKey,
    ParamKey,
    check_is_state_dict,
    describe,
    get_fqn_to_fsdp_param_info,
    get_param_to_fqns,
    is_named_optimizer,
    map_param_key_to_optim_keys,
    resolve_param_keys,
)
from hpcfsdp.state.optim.unflatten import (
    States,
    convert_state_with_flat_params,
    convert_state_with_orig_params,
    copied,
    unflatten_param_groups,
)
from hpcfsdp.state.optim.values import Unpicklable, check_nested, deep_copy, picklable
from hpcfsdp.state.ranks import ranks_of_model
from hpcfsdp.state.settings import optim_settings_of
from hpcfsdp.state.transfer import StateDictFormat, keeping_scratch
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.tensor.sharded import check_readable
from hpcfsdp.tensor.whole import whole_of

log = logging.getLogger("hpcfsdp.optim")


def form_of(settings: StateDictSettings) -> StateDictFormat:
    """How tensors are shown under a model's settings."""
    config = settings.optim_state_dict_config
    return StateDictFormat(
        sharded=settings.state_dict_type is not StateDictType.FULL_STATE_DICT,
        rank0_only=getattr(config, "rank0_only", False),
        offload_to_cpu=config.offload_to_cpu,
        dtensor=getattr(config, "_use_dtensor", False),
    )


class _Own:
    """What this rank has, by names that all ranks know.

    Attributes:
        infos: the flat parameter of each sharded parameter, by name.
        params: of the optimizer, by their keys; `fqns` are their names.
        states: of sharded parameters, by the first name.
        unsharded: of all others, by their name.
        users: entries that belong to no parameter.
        groups: the optimizer's; None if the state dict has none.
    """

    def __init__(
        self, model: nn.Module, optim: torch.optim.Optimizer | None, optim_state_dict: Any, optim_input: OptimInput
    ) -> None:
        check_is_state_dict(optim_state_dict)
        self.infos = get_fqn_to_fsdp_param_info(model)
        self.fqns = get_param_to_fqns(model, self.infos)
        named = is_named_optimizer(optim_state_dict)
        self.params: Mapping[ParamKey, nn.Parameter] = resolve_param_keys(
            model, optim, optim_input, is_named_optimizer=named
        )
        keys = map_param_key_to_optim_keys(self.params, self.fqns, self.infos)
        optim_state_dict = with_keys_of(self.params, optim_state_dict) if named else optim_state_dict
        given = optim_state_dict["state"]
        self.states: dict[str, Mapping[str, Any]] = {}
        self.unsharded: dict[str, Mapping[str, Any]] = {}
        for key, own_key in keys.items():
            state = given.get(own_key)
            if state is None:
                continue
            _check_is_mapping(state, key)
            if state:
                self._take(key, state)
        self.users = {key: _copied((key,), value) for key, value in given.items() if key not in self.params}
        self.groups = optim_state_dict.get("param_groups")
        for group in self.groups or ():
            for hyper, value in group.items():
                deep_copy(f"{hyper!r} of a parameter group", value)
        strangers = [key for key in self.users if isinstance(key, int)]
        strangers += [key for group in self.groups or () for key in group["params"] if key not in self.params]
        if strangers:
            raise StateDictError(
                f"the optimizer's state dict holds parameter {strangers[0]!r}, and the optimizer has "
                f"{len(self.params)} parameter(s): pass the state dict of this optimizer"
            )

    def _take(self, key: OptimStateKey, state: Mapping[str, Any]) -> None:
        name = key.unflat_param_names[0]
        check_nested(name, state)
        # Copied now: what cannot be is an error while all ranks can still be told.
        state = {key: _copied((name, key), value) for key, value in state.items()}
        if not key.is_fsdp_managed:
            self.unsharded[name] = state
            return
        check_state_shapes(self.infos[name], name, state)
        self.states[name] = state

    def check_is_first(self) -> None:
        """Refuse units whose state the first rank of the model cannot get."""
        for name, info in self.infos.items():
            if not info.mesh.is_first():
                raise StateDictError(
                    f"rank 0 is not the first of the ranks that {name!r} is sharded over, and cannot get its state "
                    "alone: use rank0_only=False, or a sharded state dict"
                )

    def check_is_told(self, merged: Mapping[str, StateInfo], empty: Collection[str]) -> None:
        """Refuse values that this rank would have to show, and that the ranks which have them could not tell it."""
        for fqn in sorted(empty):
            for name, value in merged[fqn].non_tensors.items() if fqn in merged else ():
                if isinstance(value, Unpicklable) and name not in self.states.get(fqn, {}):
                    raise StateDictError(
                        f"optimizer state {name!r} of {fqn!r} is {value}, and of this parameter rank "
                        f"{self.infos[fqn].comm.rank} holds nothing: let the class be pickled, or use "
                        "use_orig_params=False"
                    )

    def to_message(self) -> RankState:
        """What other ranks are to know."""
        groups = []
        for group in self.groups or ():
            names = [name for key in group["params"] for name in self.fqns[self.params[key]] if name in self.infos]
            groups.append((names, {key: picklable(value) for key, value in group.items() if key != "params"}))
        empty = {
            name
            for name, info in self.infos.items()
            if info.flat.use_orig_params and info.is_empty_on(name, info.comm.rank)
        }
        states, unsharded = (
            {name: StateInfo.of(state) for name, state in states.items()} for states in (self.states, self.unsharded)
        )
        order = [([n for key in g["params"] for n in self.fqns[self.params[key]]], list(g)) for g in self.groups or ()]
        return RankState(groups, states, empty, unsharded, list(self.infos), order=order)

    def reorder_groups(self) -> None:
        """Have groups be in an order that all ranks know: parameters as in the model, keys by their names."""
        places = {param: place for place, param in enumerate(self.fqns)}

        def reordered(group: Mapping[str, Any]) -> dict[str, Any]:
            params = sorted(group["params"], key=lambda key: places[self.params[key]])
            return {"params": params, **{key: group[key] for key in sorted(group, key=str) if key != "params"}}

        self.groups = None if self.groups is None else [reordered(group) for group in self.groups]


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
        optim_state_dict: its state dict, on each rank its own; None to have it taken here, where what its hooks raise
            on one rank is told to all.
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
            check_at_rest(model, "optim_state_dict")
            form = form_of(optim_settings_of(model)) if form is None else form
        assert_same(ranks, form, "the kind of state dict, see state_dict_type,")
        with profile(Phase.PREPROCESSING), raise_together(ranks):
            if optim_state_dict is None and optim is not None:
                optim_state_dict = optim.state_dict()
            own = _Own(model, optim, optim_state_dict, optim_input)
            if form.rank0_only and ranks.rank == 0:
                own.check_is_first()
            told = own.to_message()
            packed = told.packed()
        gathered = allgather_state_info(ranks, packed)
        with raise_together(ranks):
            check_same_groups(gathered)
            merged = convert_all_state_info(gathered)
            own.check_is_told(merged, told.empty)
            differing = differing_unsharded(gathered)
            if not gathered.has_one_order:
                own.reorder_groups()
        if differing is not None and ranks.rank == 0:
            log.warning("the optimizer's state of %s is not the same, and is not sharded: each has its own", differing)
        with keeping_scratch():
            if differing is None and not form.sharded:  # else ranks may have other ones
                own.unsharded = {name: _made_whole(state) for name, state in sorted(own.unsharded.items())}
            return _gathered(own, merged, form, is_shown=not form.rank0_only or ranks.rank == 0)


def _gathered(own: _Own, merged: Mapping[str, StateInfo], form: StateDictFormat, *, is_shown: bool) -> dict[str, Any]:
    """Collective over all ranks. The state dict, once ranks agree."""
    states: States = {}
    for info in {id(info): info for info in own.infos.values()}.values():
        if form.is_made_by(info.mesh):
            convert = convert_state_with_orig_params if info.flat.use_orig_params else convert_state_with_flat_params
            states.update(convert(info, own.states, merged, form))
    if not is_shown:
        return {}
    states.update({name: copied(state, form) for name, state in own.unsharded.items()})
    in_order = itertools.chain.from_iterable(own.fqns.values())  # of the model, as optimizers may have others
    found: dict[str, Any] = {"state": {name: states[name] for name in in_order if name in states}}
    for key, value in own.users.items():
        warnings.warn(
            f"optimizer state {key!r} belongs to no parameter of the model: it is copied as it is, of this rank alone",
            stacklevel=2,
        )
        is_tensor = isinstance(value, torch.Tensor)
        found["state"][key] = value.detach().to(form.device(value.device), copy=True) if is_tensor else value
    if own.groups is not None:
        found["param_groups"] = unflatten_param_groups(own.groups, own.params, own.fqns)
    return found


def _made_whole(state: Mapping[str, Any]) -> dict[str, Any]:
    """Collective over the meshes of DTensors. The state of a parameter that is not sharded, with whole tensors."""
    return {
        name: whole_of(value) if isinstance(value, DTensor) else value for name, value in sorted(state.items(), key=str)
    }


def with_keys_of(params: Mapping[ParamKey, nn.Parameter], optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """The state dict with the keys of an optimizer with names, whether it has names of wrappers in them or not."""
    known = {clean_fqn(str(key)): key for key in params}

    def rename(key: Any) -> Any:
        return key if key in params or not isinstance(key, str) else known.get(clean_fqn(key), key)

    groups = [
        {**group, "params": [rename(key) for key in group["params"]]}
        for group in optim_state_dict.get("param_groups", ())
    ]
    renamed = {rename(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": renamed, **({"param_groups": groups} if "param_groups" in optim_state_dict else {})}


def check_at_rest(model: nn.Module, what: str) -> None:
    """Refuse units that are at work, or summoned: they do not have the parameters that the optimizer steps.

    Raises:
        EngineError: with the unit, and what it does.
    """
    for unit in units_in(model):
        unshard.check_at_rest(unit, what)


def _copied(names: tuple[Any, ...], value: Any) -> Any:
    """A copy of a value; a tensor itself, which is one that can be copied later.

    Args:
        names: the parameter's, if there is one, and that of the state.
    """
    if isinstance(value, torch.Tensor):
        check_readable("/".join(map(str, names)), value)
        return value
    return deep_copy(" of ".join(map(repr, reversed(names))), value)


def _check_is_mapping(state: Any, key: OptimStateKey) -> None:
    if not isinstance(state, Mapping):
        raise StateDictError(
            f"the optimizer's state of {key.unflat_param_names[0]!r} is a dict of names and values, not "
            f"{describe(state)}"
        )
