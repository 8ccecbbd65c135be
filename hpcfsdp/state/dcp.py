"""The functions of ``torch.distributed.checkpoint.state_dict`` for models with units of this package in them.

Torch's own functions look for torch's own class: they take a unit for an ordinary module, and the shard of a flat
parameter for a whole one. These call torch's for all other models.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import inspect
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint.state_dict as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import FullStateDictConfig, ShardedStateDictConfig, StateDictType

from hpcfsdp._compat import IncompatibleKeys
from hpcfsdp.comm import communicator_for, raise_together
from hpcfsdp.errors import StateDictError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.state.load import load_model
from hpcfsdp.state.model import communicator_of, ranks_of_model
from hpcfsdp.state.optim import load, save
from hpcfsdp.state.optim.keys import StepsWholeTensors, get_aliases, get_param_to_fqns, hyper
from hpcfsdp.state.optim.load_plan import merged
from hpcfsdp.state.optim.values import place_steps, same, states_of_first_step
from hpcfsdp.state.rank0 import broadcast_values
from hpcfsdp.state.settings import StateDictFormat, state_dict_type
from hpcfsdp.state.wrappers import clean_fqn, with_clean_names
from hpcfsdp.units.flat_unit import units_in

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

Function = TypeVar("Function", bound=Callable[..., Any])


def _or_torchs(function: Function) -> Function:
    """Return a function for models with units, and torch's own function of its name for all others."""

    @functools.wraps(function)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        if units_in(model):
            return function(model, *args, **kwargs)
        given = inspect.signature(function).bind(model, *args, **kwargs).arguments
        with _optimizers_ready(given) if "optimizers" in given else contextlib.nullcontext():
            return getattr(stock, function.__name__)(**given)

    return call  # type: ignore[return-value]


@contextlib.contextmanager
def initial_state(model: nn.Module, optimizer: torch.optim.Optimizer) -> Iterator[None]:
    """Return a context in which an optimizer that has no state on any rank has that of its first step.

    Collective over all ranks of a model with units, and of an optimizer of whole tensors. After it the optimizer is as
    it was, or as it has been loaded.
    """
    whole = isinstance(optimizer, StepsWholeTensors)
    ranks = ranks_of_model(model) if units_in(model) else communicator_of(model) if whole else None
    has_begun = any(optimizer.state.values())
    if any(ranks.all_gather_object(has_begun)) if ranks is not None else has_begun:
        yield
        return
    if isinstance(optimizer, StepsWholeTensors):
        made = optimizer.initial_state()
    else:
        with contextlib.nullcontext() if ranks is None else raise_together(ranks):
            made = states_of_first_step(optimizer)
    before = optimizer.state
    shown = optimizer.state = collections.defaultdict(dict, made)
    try:
        yield
    finally:
        if optimizer.state is shown:
            optimizer.state = before


@contextlib.contextmanager
def _optimizers_ready(given: dict[str, Any]) -> Iterator[None]:
    """Return a context for torch's function: optimizers have their first state, and groups are those of a state dict.

    Its arguments, `given`, are changed to what it takes.
    """
    model, options = given["model"], given.get("options") or StateDictOptions()
    given["optimizers"] = optimizers = _listed(given["optimizers"])
    with contextlib.ExitStack() as stack:
        is_stateless = "optim_state_dict" in given and not stack.enter_context(_groups_as_given(given, options))
        for optimizer in optimizers:
            stack.enter_context(initial_state(model, optimizer))
            params = [param for group in optimizer.param_groups for param in group["params"]]
            if params and not optimizer.state and all(param.grad is None for param in params):
                params[0].grad = torch.zeros_like(params[0])  # without one torch's function would step the optimizer
                stack.callback(setattr, params[0], "grad", None)
        if is_stateless and not any(optimizer.state for optimizer in optimizers):
            # Torch's function would look for a tensor of the state, to know the device.
            given["options"] = dataclasses.replace(options, full_state_dict=False, broadcast_from_rank0=False)
            given["optim_state_dict"] = _named(model, optimizers)
        yield


@contextlib.contextmanager
def _groups_as_given(given: dict[str, Any], options: StateDictOptions) -> Iterator[bool]:
    """Return a context in which torch's function loads the groups of a state dict, and whether that has state.

    To torch the keys of the optimizer's own groups, and of its state, are those of every state dict. It fails where one
    side has others, and makes lists of tuples.
    """
    model, optimizers, whole = given["model"], given["optimizers"], given["optim_state_dict"]
    nested: dict[str, Any] = {"state": {}, "param_groups": []}

    def facts() -> tuple[list[dict[str, Any]], bool]:
        for mine in (_of_optimizer(model, each, whole) for each in optimizers if whole):
            nested["state"].update(mine["state"])
            nested["param_groups"] += mine.get("param_groups", ())
        known = {clean_fqn(name): hyper(group) for group in nested["param_groups"] for name in group["params"]}
        named = _named(model, optimizers)["param_groups"]
        found = [next((known[name] for name in group["params"] if name in known), {}) for group in named]
        return found, bool(nested["state"])

    ranks = communicator_for(None, required=True) if options.broadcast_from_rank0 else None
    hypers, has_state = facts() if ranks is None else broadcast_values(ranks, facts)
    groups = [group for each in optimizers for group in each.param_groups]
    before = list(map(hyper, groups))
    after = [merged(own, new) if new else {} for own, new in zip(before, hypers, strict=True)]
    for group, new in zip(groups, after, strict=True):
        group.update(new)
    has_owners = any(isinstance(each, StepsWholeTensors) for each in optimizers)
    if options.flatten_optimizer_state_dict and (options.full_state_dict or has_owners):  # of which torch knows nothing
        given["options"] = dataclasses.replace(options, flatten_optimizer_state_dict=False)
        given["optim_state_dict"] = nested if whole else {}
    elif whole and "state" not in whole:
        given["optim_state_dict"] = {**flatten(_named(model, optimizers)), **whole}
    try:
        yield has_state
    except BaseException:
        for group, own in zip(groups, before, strict=True):
            for key in hyper(group).keys() - own.keys():
                del group[key]
            group.update(own)
        raise
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            group.update(after.pop(0))
        place_steps(optimizer.param_groups, optimizer.state)


def _named(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> dict[str, Any]:
    """Return a state dict of the groups of optimizers alone, with the names of their parameters."""
    fqns, groups = get_param_to_fqns(model), [group for each in optimizers for group in each.param_groups]
    named = [{**group, "params": [n for p in group["params"] for n in fqns.get(p, ())]} for group in groups]
    return {"state": {}, "param_groups": named}


@public_call("get_model_state_dict")
@_or_torchs
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Return its state dict, sharded unless `options` ask for the whole. Collective over all ranks of the model.

    Args:
        submodules: return only the tensors of these modules; without ``options.keep_submodule_prefixes`` names begin
            below them.
        options: torch's own. ``full_state_dict`` with ``cpu_offload`` gives it to rank 0 alone, an empty one to others.
    """
    options = _checked(options)
    offload, is_full = options.cpu_offload, options.full_state_dict
    config: FullStateDictConfig | ShardedStateDictConfig = ShardedStateDictConfig(offload, _use_dtensor=True)
    if is_full:
        config = FullStateDictConfig(offload, rank0_only=offload)
    kind = StateDictType.FULL_STATE_DICT if is_full else StateDictType.SHARDED_STATE_DICT
    with state_dict_type(model, kind, config):
        found = with_clean_names(model.state_dict())
    if is_full and offload and ranks_of_model(model).rank != 0:
        return {}
    if offload:
        found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    if options.ignore_frozen_params:
        names_of, aliases = get_param_to_fqns(model).items(), get_aliases(model)
        frozen = {name for param, names in names_of if not param.requires_grad for name in names}
        found = {key: value for key, value in found.items() if aliases.get(key, key) not in frozen}
    return _within(model, submodules, found, options) if submodules else found


@public_call("get_optimizer_state_dict")
@_or_torchs
def get_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> dict[str, Any]:
    """Return the state of `optimizers`, one or several, by parameter name. Collective over all ranks of the model.

    Of an optimizer that has no state yet it is that of its first step, so that a checkpoint can be loaded into the
    result. The optimizer stays without state, and no later step changes by it.

    Args:
        submodules: not supported; torch's own have deprecated it.
        options: torch's own; see ``get_model_state_dict``. With ``flatten_optimizer_state_dict`` the result has one
            level, with keys ``state.NAME.KEY`` and ``param_groups.NAME.KEY``.
    """
    if submodules:
        raise StateDictError(
            "submodules is not supported for optimizers: take the state of all parameters and keep the names you want"
        )
    options = _checked(options)
    form = StateDictFormat(
        sharded=not options.full_state_dict,
        rank0_only=options.full_state_dict and options.cpu_offload,
        offload_to_cpu=options.cpu_offload,
        dtensor=True,
    )
    found: dict[str, Any] = {"state": {}, "param_groups": []}
    for optimizer in _listed(optimizers):
        with initial_state(model, optimizer):
            one = save.optim_state_dict(model, optimizer, optimizer.state_dict(), form)
        found["state"].update(one.get("state", {}))
        found["param_groups"] += one.get("param_groups", [])
    if form.rank0_only and ranks_of_model(model).rank != 0:
        return {}
    return flatten(found) if options.flatten_optimizer_state_dict else found


@public_call("get_state_dict")
@_or_torchs
def get_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    submodules: set[nn.Module] | None = None,
    options: StateDictOptions | None = None,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the state dicts of a model and of its optimizers. Collective over all ranks of the model.

    Arguments are those of ``get_model_state_dict`` (`submodules`, `options`) and ``get_optimizer_state_dict``.
    """
    chosen: dict[str, Any] = {"submodules": submodules, "options": options}
    return get_model_state_dict(model, **chosen), get_optimizer_state_dict(model, optimizers, **chosen)


@public_call("set_model_state_dict")
@_or_torchs
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Load a state dict of whole or distributed tensors, or change nothing. Collective over all ranks of the model.

    Args:
        model_state_dict: tensors by the names of the model.
        options: torch's own. With ``broadcast_from_rank0`` rank 0 alone needs to have it.

    Returns:
        A named tuple of missing_keys and unexpected_keys.
    """
    options = _checked(options)
    return load_model(model, model_state_dict, strict=options.strict, from_rank0=options.broadcast_from_rank0)


@public_call("set_optimizer_state_dict")
@_or_torchs
def set_optimizer_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    optim_state_dict: Mapping[str, Any],
    *,
    options: StateDictOptions | None = None,
) -> None:
    """Load state by the names of parameters. Collective over all ranks of the model.

    Args:
        optimizers: one, or several of the same model.
        optim_state_dict: as ``get_optimizer_state_dict`` returns it.
        options: torch's own. With ``broadcast_from_rank0`` rank 0 alone needs to have it; without ``strict``,
            parameters whose state it lacks start without state. Names that the model does not have are always an error.
    """
    for optimizer, one in _to_load(model, _listed(optimizers), optim_state_dict, _checked(options)):
        optimizer.load_state_dict(one)


def _to_load(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], optim_state_dict: Any, options: StateDictOptions
) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Return what each optimizer loads; nothing is changed yet. Collective over all ranks of the model."""
    ranks, rank0_only = ranks_of_model(model), options.broadcast_from_rank0
    loaded = []
    for optimizer in optimizers:
        mine = None
        with raise_together(ranks):
            if not rank0_only or ranks.rank == 0:
                mine = _of_optimizer(model, optimizer, optim_state_dict)
        one = load.optim_state_dict_to_load(model, optimizer, mine, rank0_only=rank0_only, strict=options.strict)
        loaded.append((optimizer, one))
    return loaded


@public_call("set_state_dict")
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Load the state dicts of a model and of its optimizers, or neither. Collective over all ranks of the model.

    Args:
        model_state_dict, optim_state_dict: as ``get_state_dict`` returns them.
        options: torch's own; see ``set_model_state_dict``.
    """
    chosen = _listed(optimizers)
    if not units_in(model):
        if chosen:
            set_optimizer_state_dict(model, chosen, optim_state_dict, options=options)
        has_weights = bool(model_state_dict)
        if options is not None and options.broadcast_from_rank0:  # torch's own function looks at what each rank has
            has_weights = communicator_for(None, required=True).broadcast_object(has_weights)
        found = IncompatibleKeys([], [])
        return set_model_state_dict(model, model_state_dict, options=options) if has_weights else found
    loaded = _to_load(model, chosen, optim_state_dict, _checked(options))
    found = set_model_state_dict(model, model_state_dict, options=options)
    for optimizer, one in loaded:
        optimizer.load_state_dict(one)
    return found


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """Return an optimizer's state dict with one level: ``state.NAME.KEY``, ``param_groups.NAME.KEY``."""
    found: dict[str, Any] = {}
    for name, state in state_dict["state"].items():
        for key, value in state.items() if isinstance(state, Mapping) else ():
            if not isinstance(value, (torch.Tensor, int, float)):
                raise StateDictError(
                    f"optimizer state {key!r} of {name!r} is a {type(value).__name__}: with "
                    "flatten_optimizer_state_dict it must be a tensor or a number"
                )
            found[f"state.{name}.{key}"] = value
    for group in state_dict["param_groups"]:
        for name in group["params"]:
            found.update({f"param_groups.{name}.{key}": value for key, value in group.items() if key != "params"})
    return found


def unflatten(state_dict: Mapping[str, Any], groups: list[list[str]]) -> dict[str, Any]:
    """Undo ``flatten`` for an optimizer with parameters of these names in its groups."""
    known = {name for names in groups for name in names}
    by_kind: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for full_key, value in state_dict.items():
        kind, _, rest = str(full_key).partition(".")
        name, key = _split(rest, known)
        if kind in by_kind and name:
            by_kind[kind].setdefault(name, {})[key] = value
    found, hypers = [], by_kind["param_groups"]
    for names in groups:
        first: dict[str, Any] = hypers.get(names[0], {}) if names else {}
        odd = next((name for name in names if not same(hypers.get(name, {}), first)), None)
        if odd is not None:
            raise StateDictError(
                f"{odd!r} and {names[0]!r} of one group have different hyper-parameters: {hypers.get(odd)} and {first}"
            )
        found.append({**first, "params": names})
    return {"state": by_kind["state"], "param_groups": found}


def _split(text: str, names: Collection[str]) -> tuple[str, str]:
    """Return ``NAME.KEY`` as the longest of `names` that it begins with, and the rest; empty if it begins with none."""
    end = text.rfind(".")
    while end > 0:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
        end = text.rfind(".", 0, end)
    return "", text


def _of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """Return what of a state dict is for this optimizer, where there are others."""
    if not isinstance(given, Mapping):
        raise StateDictError(f"an optimizer's state dict is a dict, not a {type(given).__name__}")
    fqns, aliases = get_param_to_fqns(model), get_aliases(model)
    groups = [[name for param in group["params"] for name in fqns.get(param, ())] for group in optimizer.param_groups]
    if "state" not in given:
        given = unflatten(given, groups)
    mine = {name for names in groups for name in names}

    def is_mine(key: Any) -> bool:
        name = clean_fqn(key) if isinstance(key, str) else key
        return aliases.get(name, name) in mine

    known = {name for names in fqns.values() for name in names} | set(aliases)
    state = {
        key: value
        for key, value in given["state"].items()
        if is_mine(key) or not isinstance(key, str) or clean_fqn(key) not in known
    }
    if "param_groups" not in given:
        return {"state": state}
    kept = [group for group in given["param_groups"] if not group["params"] or any(map(is_mine, group["params"]))]
    return {"state": state, "param_groups": kept}


def _checked(options: StateDictOptions | None) -> StateDictOptions:
    options = options or StateDictOptions()
    if options.broadcast_from_rank0 and not options.full_state_dict:
        raise StateDictError("broadcast_from_rank0 needs full_state_dict=True: rank 0 has whole tensors")
    return options


def _within(
    model: nn.Module, submodules: set[nn.Module], found: Mapping[str, Any], options: StateDictOptions
) -> dict[str, Any]:
    prefixes = [f"{clean_fqn(name)}." for name, module in model.named_modules() if module in submodules]
    if not options.keep_submodule_prefixes and len(prefixes) != 1:
        raise StateDictError("keep_submodule_prefixes=False takes one submodule: names of several would clash")
    return {
        key if options.keep_submodule_prefixes else key[len(prefix) :]: value
        for key, value in found.items()
        for prefix in prefixes
        if key.startswith(prefix)
    }


def _listed(optimizers: Optimizers) -> list[torch.optim.Optimizer]:
    return [optimizers] if isinstance(optimizers, torch.optim.Optimizer) else list(optimizers)
