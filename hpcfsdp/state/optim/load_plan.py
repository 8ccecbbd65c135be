"""The state that this rank's optimizer is to load, from that of the whole model's optimizer: checked on this rank.

Nothing is sent and nothing changed. ``load`` fills it from a state dict, ``in_file`` from a checkpoint.
"""

import contextlib
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.reshard.sharded_tensors import check_readable, is_distributed, local_blocks, properties_of
from hpcfsdp.state.optim import keys
from hpcfsdp.state.optim.compare import RankState, StateInfo
from hpcfsdp.state.optim.keys import FSDPParamInfo, OptimInput, OptimStateKey, ParamKey
from hpcfsdp.state.optim.values import FLAGS, deep_copy, picklable, same
from hpcfsdp.state.tensors import TensorInfo, shape_and_dtype
from hpcfsdp.state.wrappers import clean_fqn

log = logging.getLogger("hpcfsdp.optim")

TORCH_SCALARS = {"step", "mu_product", "eta", "mu"}
"""State that torch's optimizers have once for each parameter: it has no dimensions, whatever the parameter has."""

_SHARED = "which share one flat parameter here: wrap them in different units, or pass use_orig_params=True"


@dataclass
class StatePlan:
    """What the state of one entry of the optimizer will be, by name; values for each parameter of the entry."""

    tensors: dict[str, list[Any]] = field(default_factory=dict)  # of the parameters' shapes, in the state dict
    others: dict[str, Any] = field(default_factory=dict)  # scalars and all else, ready
    unread: dict[str, list[TensorInfo]] = field(default_factory=dict)  # scalars without values yet


def elementwise_names(states: Mapping[str, Any], shapes: Mapping[str, Sequence[int]]) -> set[str]:
    """Return the names of states with a value for each element, by parameters that are not one number themselves."""
    named = [(fqn, state) for fqn, state in states.items() if isinstance(state, Mapping)]
    judged = [(name, shape_and_dtype(v)) for fqn, state in named if shapes.get(fqn) for name, v in state.items()]
    tensors = {name for name, described in judged if described is not None}
    found = {name for name, described in judged if described is not None and described[0]}
    return found | {name for _, state in named for name in state} - tensors - TORCH_SCALARS


def plan_flat_state(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], elementwise: set[str]
) -> StatePlan | None:
    """Return what the state of a flat parameter will be; None without any. See ``elementwise_names``."""
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
        names = ", ".join(sorted(states[present[0]]))
        raise StateDictError(f"there is state of {present[0]!r} ({names}) and none of {absent[0]!r}, {_SHARED}")
    plan = StatePlan()
    for name in sorted({name for fqn in fqns for name in states[fqn]}):
        lacking = next((fqn for fqn in fqns if name not in states[fqn]), None)
        if lacking is not None:
            having = next(fqn for fqn in fqns if name in states[fqn])
            raise StateDictError(f"there is state {name!r} of {having!r} and none of {lacking!r}, {_SHARED}")
        values = [states[fqn][name] for fqn in fqns]
        kinds = [_kind(info, index, name, value, elementwise) for index, value in enumerate(values)]
        facts = [(kind, kind == "tensor" and shape_and_dtype(v)[1]) for kind, v in zip(kinds, values, strict=True)]
        odd = next((index for index, fact in enumerate(facts) if fact != facts[0]), None)
        if odd is not None:
            raise StateDictError(
                f"state {name!r} of {fqns[0]!r} is {_describe(values[0])}, of {fqns[odd]!r} {_describe(values[odd])}, "
                "which share one flat parameter here"
            )
        if kinds[0] == "tensor":
            plan.tensors[name] = values
        elif kinds[0] == "scalar" and isinstance(values[0], TensorInfo):
            plan.unread[name] = values
        elif kinds[0] == "scalar":
            plan.others[name] = flatten_zero_dim_tensor_optim_state(name, values, fqns)
        else:
            plan.others[name] = flatten_non_tensor_optim_state(name, values, fqns)
    return plan


def plan_orig_state(info: FSDPParamInfo, fqn: str, state: Mapping[str, Any], elementwise: set[str]) -> StatePlan | None:
    """Return what the state of a parameter will be that the optimizer steps by itself; None if it has none."""
    if not state:
        return None
    plan, index = StatePlan(), info.param_indices[fqn]
    for name, value in keys.sorted_items(state):
        if _kind(info, index, name, value, elementwise) == "tensor":
            if not info.has_state_of_any_shape(fqn) or is_distributed(value):
                _check_shape(fqn, name, value, info.layout.slots[index].whole_shape)
            plan.tensors[name] = [value]
        elif isinstance(value, TensorInfo):
            plan.unread[name] = [value]
        else:
            is_tensor = isinstance(value, torch.Tensor)
            plan.others[name] = value.detach().clone() if is_tensor else deep_copy(f"{name!r} of {fqn!r}", value)
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


def _check_shape(fqn: str, name: str, value: Any, shape: Sequence[int]) -> None:
    given = shape_and_dtype(value)[0]
    if given != tuple(shape):
        raise StateDictError(
            f"state {name!r} of {fqn!r} has shape {given}, and the parameter {tuple(shape)}: a sharded parameter needs "
            "state with one value for each of its elements"
        )


def flatten_zero_dim_tensor_optim_state(name: str, values: Sequence[torch.Tensor], fqns: Sequence[str]) -> torch.Tensor:
    """Return the scalar that all parameters of one flat parameter have, as a new tensor."""
    for fqn, value in zip(fqns, values, strict=True):
        if value.dtype != values[0].dtype or not same(value, values[0]):
            raise StateDictError(
                f"state {name!r} is {values[0].item()} ({values[0].dtype}) for {fqns[0]!r} and {value.item()} "
                f"({value.dtype}) for {fqn!r}, {_SHARED}"
            )
    return values[0].detach().clone()


def flatten_non_tensor_optim_state(name: str, values: Sequence[Any], fqns: Sequence[str]) -> Any:
    """Return the value that all parameters of one flat parameter have, copied."""
    for fqn, one in zip(fqns, values, strict=True):
        if type(one) is not type(values[0]) or not same(one, values[0]):
            raise StateDictError(f"state {name!r} is {values[0]!r} for {fqns[0]!r} and {one!r} for {fqn!r}, {_SHARED}")
    return deep_copy(f"{name!r} of {fqns[0]!r}", values[0])


class LoadPlan:
    """Which value goes where, checked on this rank, before anything is sent.

    Arguments are those of ``optim_state_dict_to_load``. With `in_file`, names are those of a checkpoint, and tensors a
    ``TensorInfo`` each. All state that the optimizer has is replaced, whatever it is.
    """

    def __init__(
        self,
        model: nn.Module,
        optim: torch.optim.Optimizer | None,
        optim_state_dict: Mapping[str, Any],
        optim_input: OptimInput,
        *,
        is_named_optimizer: bool = False,
        strict: bool = True,
        in_file: bool = False,
    ) -> None:
        self._what = "the checkpoint" if in_file else "the state dict"
        if optim is None or optim_input is not None:  # perhaps a generator
            optim_input = [{"params": params} for params in keys.get_param_groups_of_optim_input(model, optim_input)]
        self.infos = keys.get_fqn_to_fsdp_param_info(model, optim, in_file=in_file)
        fqns = keys.get_param_to_fqns(model, self.infos, in_file=in_file)
        self.params = keys.resolve_param_keys(model, optim, optim_input, is_named_optimizer=is_named_optimizer)
        self.keys = keys.map_param_key_to_optim_keys(self.params, fqns, self.infos)
        self._names_of = {own_key: key.unflat_param_names for key, own_key in self.keys.items()}
        self._aliases = {} if in_file else keys.get_aliases(model)
        known = {name for names in fqns.values() for name in names}
        given = self._by_name(optim_state_dict["state"])
        # Entries that belong to no parameter; like `unsharded` new memory but for tensors, see ``_loaded``.
        users = {key: value for key, value in given.items() if _is_users(key, value, given, known)}
        self.users = {key: _copied_but_tensors(repr(key), value) for key, value in users.items()}
        self.states = {key: value for key, value in given.items() if key not in users}
        keys.check_known(self.states, known, self._what if in_file else "the optimizer's state dict")
        # Parameters that no unit has and that are DTensors.
        self.dtensors = {name: param for param, names in fqns.items() if isinstance(param, DTensor) for name in names}
        chunked = {name for param, names in fqns.items() if is_distributed(param) for name in names}
        self.states = {fqn: self._readable(fqn, state, fqn in chunked) for fqn, state in self.states.items()}
        self.entries: dict[str, StatePlan] = {}  # of sharded parameters that have state, by the first name
        self.unsharded: dict[str, Mapping[str, Any]] = {}  # state of the others
        shapes = {slot.fqn: slot.whole_shape for info in self.infos.values() for slot in info.layout.slots}
        elementwise = elementwise_names(self.states, shapes)
        for key in self.keys:
            self._plan_entry(key, elementwise)
        self._check_nothing_is_lost(optim if strict and not in_file else None)
        if optim is not None and not in_file:
            self._check_shapes_held(optim)
        self.groups = None
        if "param_groups" in optim_state_dict:
            by_param = {param: key for key, param in self.params.items()}
            stepped: Any = optim_input if optim is None else optim.param_groups
            own = [[by_param[param] for param in group["params"]] for group in stepped]
            self.groups = self._matched(optim_state_dict["param_groups"], own, known | set(self._aliases))
            if not in_file:
                self.groups = list(map(merged, map(keys.hyper, stepped), self.groups))

    def _name(self, key: Any) -> Any:
        """Return the first name of the parameter that a state dict calls `key`."""
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
        """Return state with plain tensors for distributed ones that are loaded as they are."""
        if not isinstance(state, Mapping):
            raise StateDictError(f"the state of {fqn!r} is a dict of names and values, not a {type(state).__name__}")
        found = {}
        for name, value in state.items():
            if isinstance(value, torch.Tensor):
                check_readable(f"{fqn}/{name}", value)
            # The state of a chunked parameter, which is a distributed tensor itself that no unit owns, is one, too.
            is_filled = fqn in self.infos and is_distributed(value) and properties_of(value)[0]
            if not is_distributed(value) or is_filled or is_chunked:
                found[name] = value
                continue
            found[name], (whole, _) = None, properties_of(value)
            with contextlib.suppress(ValueError):  # it is a sum over ranks, say
                found[name] = next((block for box, block in local_blocks(value) if tuple(box.sizes) == whole), None)
            if found[name] is None:
                why = "has no dimensions" if fqn in self.infos else "is of a parameter that is not sharded here"
                raise StateDictError(
                    f"state {name!r} of {fqn!r} is a {type(value).__name__}, and {why}, so each rank needs the "
                    "whole: load a full state dict, or put whole tensors in its place"
                )
        return found

    def _plan_entry(self, key: OptimStateKey, elementwise: set[str]) -> None:
        name = key.unflat_param_names[0]
        if not key.is_fsdp_managed:
            if self.states.get(name):
                self.unsharded[name] = _copied_but_tensors(repr(name), dict(keys.sorted_items(self.states[name])))
            return
        info = self.infos[name]
        if info.flat.use_orig_params:
            plan = plan_orig_state(info, name, self.states.get(name, {}), elementwise)
        else:
            plan = plan_flat_state(info, self.states, elementwise)
        if plan is not None:
            self.entries[name] = plan

    def _check_nothing_is_lost(self, optim: torch.optim.Optimizer | None) -> None:
        """Refuse state that no parameter gets, and parameters that would lose the state that they have."""
        stepped = {name for key in self.keys for name in key.unflat_param_names}
        idle = [fqn for fqn, state in self.states.items() if state and fqn not in stepped]
        if idle:
            more = f" and {len(idle) - 1} other parameter(s)" if len(idle) > 1 else ""
            raise StateDictError(
                f"{self._what} holds state of {idle[0]!r}{more}, which the optimizer does not step: leave it out, or "
                "add the parameter to the optimizer"
            )
        if not any(self.states.values()) and (optim is None or not any(optim.state.values())):
            return
        for own_key, (name, *_) in self._names_of.items():
            held: Mapping[str, Any] = (None if optim is None else optim.state.get(self.params[own_key])) or {}
            names = sorted(map(str, held))
            if name in self.entries or name in self.unsharded:
                lacking = sorted(str(state) for state in held if state not in self.states[name])
                if lacking:
                    raise StateDictError(
                        f"the state dict holds no {lacking[0]!r} of {name!r}, and has {sorted(self.states[name])}; the "
                        f"optimizer has {names}: the state belongs to another optimizer, or to one with other options"
                    )
            elif self.params[own_key].requires_grad and held:
                raise StateDictError(
                    f"{self._what} holds no state of {name!r}, but the optimizer has some ({', '.join(names)}): this "
                    "parameter would start without state while the others continue"
                )
            elif self.params[own_key].requires_grad:
                log.info("%s holds no state of %r: the optimizer will create it at its next step", self._what, name)

    def _check_shapes_held(self, optim: torch.optim.Optimizer) -> None:
        """Refuse state of whole parameters, which may have any shape, in another one than the optimizer's has."""
        for own_key, (name, *_) in self._names_of.items():
            if name in self.unsharded or (name in self.entries and self.infos[name].has_state_of_any_shape(name)):
                for state, held in optim.state.get(self.params[own_key], {}).items():
                    here, given = shape_and_dtype(held), shape_and_dtype(self.states[name].get(state))
                    if here is not None and given is not None and here[0] != given[0]:
                        raise StateDictError(
                            f"state {state!r} of {name!r} has shape {given[0]}, and that of the optimizer {here[0]}: "
                            "the state belongs to another model or another optimizer"
                        )

    def _matched(
        self, given: Sequence[Mapping[str, Any]], own: list[list[ParamKey]], known: set[str]
    ) -> list[dict[str, Any]]:
        """Return the groups of the state dict in the order of the optimizer's, with the keys of its parameters."""
        for group in given:
            keys.check_known(map(self._name, group["params"]), known, "param_groups")
        left = [({self._name(key) for key in group["params"]}, group) for group in given]
        found = []
        for place, own_keys in enumerate(own):
            names = {name for key in own_keys for name in self._names_of[key]}
            match = next((index for index, (other, _) in enumerate(left) if other == names), None)
            if match is None:
                raise StateDictError(_no_such_group(self._what, place, names, [other for other, _ in left]))
            _, group = left.pop(match)
            found.append({**group, "params": list(own_keys)})
        if left:
            raise StateDictError(
                f"{self._what} has {len(given)} parameter groups, the optimizer {len(own)}: there is no group with "
                f"{', '.join(repr(name) for name in sorted(left[0][0])[:3]) or 'no parameters'}"
            )
        return found

    def distributed(self) -> list[tuple[str, ShardedTensor | DTensor, FSDPParamInfo]]:
        """Return the distributed tensors in the state dict, with names and flat parameters; the same on all ranks."""
        return [
            (fqn, value, self.infos[first])
            for first, plan in self.entries.items()
            for values in plan.tensors.values()
            for fqn, value in zip([first] if len(values) == 1 else self.infos[first].param_indices, values, strict=True)
            if is_distributed(value)
        ]

    def to_message(self) -> RankState:
        """Return the message to other ranks."""
        groups = []
        for group in self.groups or ():
            names = [name for key in group["params"] for name in self._names_of[key] if name in self.infos]
            groups.append((names, {key: picklable(value) for key, value in keys.hyper(group).items()}))
        states = {fqn: StateInfo.of(state) for fqn, state in self.states.items() if fqn in self.infos}
        return RankState(groups, states, names=list(self.infos), with_shapes=True)


def merged(own: Mapping[str, Any], given: Mapping[str, Any]) -> dict[str, Any]:
    """Return a copy of a group, with tensors on the devices of the optimizer's own, and tuples, where it has them.

    Keys that `given` lacks, as a group of an older version of torch may, keep the optimizer's values; so do ``FLAGS``.
    """
    chosen = {**own, **given, **{key: own[key] for key in FLAGS & own.keys()}}
    found = {key: deep_copy(f"{key!r} of a parameter group", value) for key, value in chosen.items()}
    for key, value in found.items():
        now = own.get(key)
        if isinstance(now, torch.Tensor) and isinstance(value, (torch.Tensor, int, float)):
            found[key] = torch.as_tensor(value, dtype=now.dtype, device=now.device)
        elif isinstance(now, tuple) and isinstance(value, list):
            found[key] = tuple(value)
    found.pop("param_names", None)  # an optimizer that was built from names has names of its own parameters
    return {**found, "param_names": list(own["param_names"])} if "param_names" in own else found


def _copied_but_tensors(what: str, entry: Any) -> Any:
    """Copy an entry of state for all ranks to raise errors now, but tensors, which are copied or sent later."""

    def copied(what: str, value: Any) -> Any:
        return value if isinstance(value, (torch.Tensor, TensorInfo)) else deep_copy(what, value)

    is_dict = isinstance(entry, Mapping)
    return {k: copied(f"{k!r} of {what}", value) for k, value in entry.items()} if is_dict else copied(what, entry)


def _is_users(key: Any, value: Any, given: Mapping[Any, Any], known: set[str]) -> bool:
    """Return whether an entry of state belongs to no parameter at all, rather than to one of another model."""
    if key in known or not isinstance(value, Mapping):
        return key not in known
    of_params = {name for other in known & given.keys() if isinstance(given[other], Mapping) for name in given[other]}
    return bool(of_params) and not of_params & value.keys()


def _no_such_group(what: str, place: int, names: set[str], others: list[set[str]]) -> str:
    closest = max(others, key=lambda other: len(other & names), default=set())
    text = f"parameter group {place} of the optimizer has {len(names)} parameter(s), and no group of {what} has these"
    for title, odd in (("in the optimizer only", names - closest), (f"in {what} only", closest - names)):
        if odd:
            text += f"; {title}: {', '.join(sorted(odd)[:3])}" + (f" and {len(odd) - 3} more" if len(odd) > 3 else "")
    return text + ": build the optimizer with the groups that were saved"
