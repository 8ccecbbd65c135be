"""The state of this rank's optimizer by parameter names of the whole model, compared over ranks, then gathered."""

from __future__ import annotations

import copy
import itertools
import logging
import warnings
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import assert_same, raise_together
from hpcfsdp.errors import StateDictError
from hpcfsdp.output.profile import Phase, SimpleProfiler, profile
from hpcfsdp.reshard.sharded_tensors import check_readable, full_tensor
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.optim import compare, keys
from hpcfsdp.state.optim.compare import RankState, StateInfo
from hpcfsdp.state.optim.keys import FSDPParamInfo, OptimInput, ParamKey, StepsWholeTensors
from hpcfsdp.state.optim.values import Unpicklable, check_nested, deep_copy, picklable
from hpcfsdp.state.settings import StateDictFormat, optim_format_of
from hpcfsdp.state.tensors import LocalShards, is_whole_state
from hpcfsdp.state.transfer import gather, keeping_scratch
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units.flat_unit import units_in


@dataclass
class FlatParamState:
    """This rank's state of a flat parameter's parameters. All but shards is by parameter, the same on all ranks."""

    shards: dict[tuple[str, torch.dtype], LocalShards] = field(default_factory=dict)  # with a value for each element
    whole: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # of other shapes, if stepped whole
    scalars: dict[str, dict[str, torch.Tensor]] = field(default_factory=dict)  # without dimensions
    others: dict[str, dict[str, Any]] = field(default_factory=dict)  # no tensors

    @classmethod
    def of(
        cls, info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], merged: Mapping[str, StateInfo]
    ) -> FlatParamState:
        """Sort this rank's `states`. Those of parameters without elements here follow from all ranks' (`merged`)."""
        found, slots = cls(), info.layout.slots
        runs: dict[tuple[str, torch.dtype], list[torch.Tensor | None]] = {}
        for index, slot in enumerate(slots):
            fqn = slot.fqn
            state = states.get(fqn if info.flat.use_orig_params else slots[0].fqn, {})
            if info.flat.use_orig_params and info.is_empty_on(fqn, info.comm.rank):
                state = _of_no_elements(merged.get(fqn), state, info.flat.parameter)
            for name, value in keys.sorted_items(state):
                if compare.is_zero_dim_tensor(value):
                    found.scalars.setdefault(fqn, {})[name] = value
                elif not isinstance(value, torch.Tensor):
                    found.others.setdefault(fqn, {})[name] = value
                elif is_whole_state(value) or (info.shows_whole(fqn) and value.shape != slot.shape):
                    found.whole.setdefault(fqn, {})[name] = value
                else:
                    own = runs.setdefault((name, value.dtype), [None] * len(slots))
                    own[index] = value.detach().reshape(-1)
        for kind in sorted(runs, key=str):  # all ranks gather in this order
            found.shards[kind] = LocalShards(info.layout, runs[kind], whole_shard=not info.flat.use_orig_params)
        return found


def _of_no_elements(info: StateInfo | None, held: Mapping[str, Any], param: torch.Tensor) -> dict[str, Any]:
    """Return state without elements as others have it; values that they cannot send are those `held` here."""
    if info is None:
        return {}
    tensors = {
        name: held[name] if is_whole_state(held.get(name)) else param.new_empty(0, dtype=tensor.dtype)
        for name, tensor in info.tensors.items()
    }
    others = {
        name: held.get(name, value) if isinstance(value, Unpicklable) else value
        for name, value in info.non_tensors.items()
    }
    return {**tensors, **info.scalar_tensors, **others}


class LocalOptimState:
    """The state of this rank's optimizer, by names that all ranks know: those of a state dict, or of a checkpoint."""

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer | None,
        optim_state_dict: Any,
        optim_input: OptimInput = None,
        *,
        in_file: bool = False,
    ) -> None:
        keys.check_is_state_dict(optim_state_dict)
        self.infos = keys.get_fqn_to_fsdp_param_info(model, optim, in_file=in_file)
        self.fqns = keys.get_param_to_fqns(model, self.infos, in_file=in_file)
        named = keys.is_named_optimizer(optim_state_dict)
        self.params = keys.resolve_param_keys(model, optim, optim_input, is_named_optimizer=named)
        entries = keys.map_param_key_to_optim_keys(self.params, self.fqns, self.infos)
        optim_state_dict = with_keys_of(self.params, optim_state_dict) if named else optim_state_dict
        given = optim_state_dict["state"]
        self.states: dict[str, Mapping[str, Any]] = {}  # of sharded parameters, by the first name of an entry
        self.unsharded: dict[str, Mapping[str, Any]] = {}  # of all others
        for ((name, *_), is_sharded), own_key in entries.items():
            state = given.get(own_key)
            if state is not None and not isinstance(state, Mapping):
                raise StateDictError(
                    f"the optimizer's state of {name!r} is a dict of names and values, not {keys.describe(state)}"
                )
            if not state:
                continue
            check_nested(name, state)
            # Copied now, so that a value that cannot be copied is an error that all ranks raise.
            state = {key: _copied_or_tensor((name, key), value) for key, value in state.items()}
            if is_sharded:
                check_state_shapes(self.infos[name], name, state)
            (self.states if is_sharded else self.unsharded)[name] = state
        # Entries that belong to no parameter.
        self.users = {key: _copied_or_tensor((key,), value) for key, value in given.items() if key not in self.params}
        self.groups = optim_state_dict.get("param_groups")
        for group in self.groups or ():
            for name, value in group.items():
                deep_copy(f"{name!r} of a parameter group", value)
        strangers = [key for key in self.users if isinstance(key, int)]
        strangers += [key for group in self.groups or () for key in group["params"] if key not in self.params]
        if strangers:
            raise StateDictError(
                f"the optimizer's state dict holds parameter {strangers[0]!r}, but the optimizer has only "
                f"{len(self.params)} parameter(s): pass the state dict of this optimizer"
            )

    def check_is_first(self) -> None:
        """Refuse units if the first rank of the model cannot get their state."""
        for name, info in self.infos.items():
            if not info.mesh.is_first():
                raise StateDictError(
                    f"rank 0 is not the first of the ranks that {name!r} is sharded over, and cannot get its state "
                    "alone: use rank0_only=False, or a sharded state dict"
                )

    def check_is_known(self, merged: Mapping[str, StateInfo], empty: Collection[str]) -> None:
        """Refuse values that this rank would have to show, and that other ranks cannot send."""
        for fqn in sorted(empty):
            for name, value in merged[fqn].non_tensors.items() if fqn in merged else ():
                if isinstance(value, Unpicklable) and name not in self.states.get(fqn, {}):
                    raise StateDictError(
                        f"optimizer state {name!r} of {fqn!r} is {value}, but rank {self.infos[fqn].comm.rank} needs "
                        "it and has no elements of the parameter: make the class picklable, or use "
                        "use_orig_params=False"
                    )

    def to_message(self) -> RankState:
        """Return the message to other ranks."""
        named = [([n for key in g["params"] for n in self.fqns[self.params[key]]], g) for g in self.groups or ()]
        groups = [
            ([n for n in names if n in self.infos], {key: picklable(value) for key, value in keys.hyper(group).items()})
            for names, group in named
        ]
        originals = [(name, info) for name, info in self.infos.items() if info.flat.use_orig_params]
        empty = {name for name, info in originals if info.is_empty_on(name, info.comm.rank)}
        states, unsharded = (
            {name: StateInfo.of(state) for name, state in states.items()} for states in (self.states, self.unsharded)
        )
        order = [(names, list(group)) for names, group in named]
        return RankState(groups, states, empty, unsharded, list(self.infos), order=order)

    def reorder_groups(self) -> None:
        """Sort groups in an order that all ranks know: parameters as in the model, keys by their names."""
        places = {param: place for place, param in enumerate(self.fqns)}

        params = [sorted(group["params"], key=lambda key: places[self.params[key]]) for group in self.groups or ()]
        self.groups = [
            {"params": own, **{key: group[key] for key in sorted(keys.hyper(group), key=str)}}
            for own, group in zip(params, self.groups or (), strict=True)
        ]


def check_state_shapes(info: FSDPParamInfo, fqn: str, state: Mapping[str, Any]) -> None:
    """Refuse state that is neither a scalar nor shaped like what the optimizer steps: `fqn`, or the flat one."""
    if info.shows_whole(fqn):
        return
    shape = tuple(info.flat.parameter.shape)
    if info.keeps_shapes:
        shape = info.layout.by_name[fqn].shape
    elif info.flat.use_orig_params:
        run = info.layout.param_run(fqn, info.comm.rank)
        shape = (run.numel if run else 0,)
    for name, value in state.items():
        is_own = isinstance(value, torch.Tensor) and value.dim() > 0 and not is_whole_state(value)
        if is_own and tuple(value.shape) != shape:
            raise StateDictError(
                f"optimizer state {name!r} of {fqn!r} has shape {tuple(value.shape)}, but must be a scalar or have "
                f"the shape of the parameter that the optimizer steps, {shape}"
            )


def with_keys_of(params: Mapping[ParamKey, nn.Parameter], optim_state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return the state dict with the keys of an optimizer with names; either may have names of wrappers in them."""
    known = {clean_fqn(str(key)): key for key in params}

    def rename(key: Any) -> Any:
        return key if key in params or not isinstance(key, str) else known.get(clean_fqn(key), key)

    groups = [
        {**group, "params": [rename(key) for key in group["params"]]}
        for group in optim_state_dict.get("param_groups", ())
    ]
    renamed = {rename(key): value for key, value in optim_state_dict["state"].items()}
    return {"state": renamed, **({"param_groups": groups} if "param_groups" in optim_state_dict else {})}


def _copied_or_tensor(names: tuple[Any, ...], value: Any) -> Any:
    """Return a copy of a value, with its `names` for errors; a tensor itself, if it can be copied later."""
    if isinstance(value, torch.Tensor):
        check_readable("/".join(map(str, names)), value)
        return value
    return deep_copy(" of ".join(map(repr, reversed(names))), value)


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
    """Return the state dict of the optimizer of the whole model. Collective over all ranks of the model.

    All ranks compare what they have before any tensor moves. Then one flat parameter at a time is gathered.

    Args:
        optim_state_dict: its state dict, on each rank its own; None to call ``optim.state_dict()`` here: all ranks then
            raise an error that its hooks raise on one.
        form: how tensors are shown; None as the model is set. Parameters of a ``NO_SHARD`` unit are whole in any form.
        optim_input, group: see ``StateDictMethods``.

    Returns:
        ``state`` by the names of the model's parameters, and ``param_groups`` with these names; new memory. Parameters
        without state are not in it. Empty on ranks that the form leaves out.
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
        with profile(Phase.PREPROCESSING), raise_together(ranks) as exchange:
            if optim_state_dict is None and optim is not None:
                optim_state_dict = optim.state_dict()
            own = LocalOptimState(model, optim, optim_state_dict, optim_input)
            if form.rank0_only and ranks.rank == 0:
                own.check_is_first()
            message = own.to_message()
            exchange.mine = message.digests
        gathered = compare.allgather_state_info(ranks, message, exchange.everyone)
        with raise_together(ranks):
            compare.check_same_groups(gathered)
            merged = compare.convert_all_state_info(gathered)
            own.check_is_known(merged, message.empty)
            differing = compare.differing_unsharded(gathered)
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
                    name: {k: full_tensor(v) if isinstance(v, DTensor) else v for k, v in keys.sorted_items(state)}
                    for name, state in keys.sorted_items(own.unsharded)  # a collective for each DTensor
                }
            return _gathered(own, merged, form, is_shown=not form.rank0_only or ranks.rank == 0)


def _gathered(
    own: LocalOptimState, merged: Mapping[str, StateInfo], form: StateDictFormat, *, is_shown: bool
) -> dict[str, Any]:
    """Return the state dict, once ranks agree. Collective over all ranks."""
    states: States = {}
    for info in dict.fromkeys(own.infos.values()):  # in the order of the model, which all ranks have
        if form.is_made_by(info.mesh):
            states.update(communicate_optim_state(info, FlatParamState.of(info, own.states, merged), form))
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
    """Return new state by parameter; nothing on ranks that the form leaves out. Collective over a replica."""
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
        for fqn, values in itertools.chain(*(part.items() for part in (state.whole, state.scalars, state.others))):
            tensors.setdefault(fqn, {}).update(_copied(values, form))
    return {slot.fqn: tensors[slot.fqn] for slot in info.layout.slots if slot.fqn in tensors}


def unflatten_param_groups(
    param_groups: Sequence[Mapping[str, Any]],
    param_key_to_param: Mapping[ParamKey, nn.Parameter],
    param_to_fqns: Mapping[nn.Parameter, Sequence[str]],
) -> list[dict[str, Any]]:
    """Return an optimizer's groups with the names of the model's parameters; every other key is copied."""
    names = [[fqn for key in g["params"] for fqn in param_to_fqns[param_key_to_param[key]]] for g in param_groups]
    return [keys.with_params(group, fqns, fqns) for group, fqns in zip(param_groups, names, strict=True)]


def _copied(state: Mapping[Any, Any], form: StateDictFormat) -> dict[Any, Any]:
    """Return state that needs no communication, as new memory. DTensors stay what they are."""
    return {
        name: value.detach().to(form.device(value.device), copy=True)
        if isinstance(value, torch.Tensor)
        else copy.deepcopy(value)
        for name, value in keys.sorted_items(state)
    }
