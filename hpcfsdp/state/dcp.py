"""The functions of ``torch.distributed.checkpoint.state_dict`` for models with units of this package in them.

Torch's own functions look for torch's own class: they take a unit for an ordinary module, and the shard of a flat
parameter for a whole one. These call torch's for all other models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from typing import Any, TypeVar

import torch
import torch.distributed.checkpoint.state_dict as stock
from torch import nn
from torch.distributed.checkpoint.state_dict import StateDictOptions
from torch.distributed.fsdp import (
    FullOptimStateDictConfig,
    FullStateDictConfig,
    ShardedOptimStateDictConfig,
    ShardedStateDictConfig,
    StateDictType,
)

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.launch.calls import public_call
from hpcfsdp.sharded.managed import unit_fqn
from hpcfsdp.sharded.unit import units_in
from hpcfsdp.state.load import load_model
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.optim import load, save
from hpcfsdp.state.optim.keys import get_aliases, get_param_to_fqns
from hpcfsdp.state.optim.values import same
from hpcfsdp.state.settings import StateDictFormat, state_dict_type
from hpcfsdp.state.wrappers import clean_fqn, with_clean_names

Optimizers = torch.optim.Optimizer | Iterable[torch.optim.Optimizer]

Function = TypeVar("Function", bound=Callable[..., Any])


def _or_torchs(function: Function) -> Function:
    """A function for models with units, and torch's own function of its name for all others."""

    @functools.wraps(function)
    def call(model: nn.Module, *args: Any, **kwargs: Any) -> Any:
        chosen = function if units_in(model) else getattr(stock, function.__name__)
        return chosen(model, *args, **kwargs)

    return call  # type: ignore[return-value]


@public_call("get_model_state_dict")
@_or_torchs
def get_model_state_dict(
    model: nn.Module, *, submodules: set[nn.Module] | None = None, options: StateDictOptions | None = None
) -> dict[str, Any]:
    """Collective over all ranks of the model. Return its state dict, sharded unless `options` ask for the whole.

    Args:
        submodules: return only the tensors of these modules; without ``options.keep_submodule_prefixes`` names begin
            below them.
        options: torch's own. ``full_state_dict`` with ``cpu_offload`` gives it to rank 0 alone, an empty one to others.
    """
    options = _checked(options)
    with _state_dict_type(model, options):
        found = with_clean_names(model.state_dict())
    if options.full_state_dict and options.cpu_offload and ranks_of_model(model).rank != 0:
        return {}
    if options.cpu_offload:
        found = {key: value.cpu() if isinstance(value, torch.Tensor) else value for key, value in found.items()}
    if options.ignore_frozen_params:
        frozen = _frozen(model)
        found = {key: value for key, value in found.items() if key not in frozen}
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
    """Collective over all ranks of the model. Return the state of one optimizer or several, by parameter name.

    An optimizer that has no state yet is given some, by a step with gradients of zero and a learning rate of zero, so
    that a checkpoint can be loaded into the result.

    Args:
        submodules: not supported; torch's own have deprecated it.
        options: torch's own; see ``get_model_state_dict``. With ``flatten_optimizer_state_dict`` the result has one
            level, with keys ``state.NAME.KEY`` and ``param_groups.NAME.KEY``.
    """
    if submodules:
        raise StateDictError(
            "submodules is not supported for optimizers: take the state dict of all parameters and keep the names you "
            "want"
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
        init_optim_state(ranks_of_model(model), optimizer)
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
    """Collective over all ranks of the model. Return the state dicts of a model and of its optimizers."""
    weights = get_model_state_dict(model, submodules=submodules, options=options)
    return weights, get_optimizer_state_dict(model, optimizers, submodules=submodules, options=options)


@public_call("set_model_state_dict")
@_or_torchs
def set_model_state_dict(
    model: nn.Module, model_state_dict: Mapping[str, Any], *, options: StateDictOptions | None = None
) -> Any:
    """Collective over all ranks of the model. Load a state dict of whole or distributed tensors, or change nothing.

    Args:
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
    """Collective over all ranks of the model. Load state by the names of parameters into one optimizer or several.

    Args:
        options: torch's own. With ``broadcast_from_rank0`` rank 0 alone needs to have it; without ``strict``,
            parameters whose state it lacks start without state. Names that the model does not have are always an error.
    """
    for optimizer, one in _to_load(model, _listed(optimizers), optim_state_dict, _checked(options)):
        optimizer.load_state_dict(one)


def _to_load(
    model: nn.Module, optimizers: list[torch.optim.Optimizer], optim_state_dict: Any, options: StateDictOptions
) -> list[tuple[torch.optim.Optimizer, dict[str, Any]]]:
    """Collective over all ranks of the model. What each optimizer loads; nothing is changed yet."""
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
@_or_torchs
def set_state_dict(
    model: nn.Module,
    optimizers: Optimizers,
    *,
    model_state_dict: Mapping[str, Any],
    optim_state_dict: Mapping[str, Any],
    options: StateDictOptions | None = None,
) -> Any:
    """Collective over all ranks of the model. Load the state dicts of a model and of its optimizers, or neither."""
    loaded = _to_load(model, _listed(optimizers), optim_state_dict, _checked(options))
    found = set_model_state_dict(model, model_state_dict, options=options)
    for optimizer, one in loaded:
        optimizer.load_state_dict(one)
    return found


@torch.no_grad()
def init_optim_state(ranks: Communicator | Grid, optimizer: torch.optim.Optimizer) -> None:
    """Collective over `ranks`. Give an optimizer its state, unless there is some, or there are gradients, on a rank.

    Parameters stay as they are. As in training, a rank does not step an original parameter that it holds nothing of.
    """
    params = [param for group in optimizer.param_groups for param in group["params"]]
    has_begun = any(optimizer.state.values()) or any(param.grad is not None for param in params)
    if any(ranks.all_gather_object(has_begun)):
        return
    with raise_together(ranks):
        _step_without_effect(optimizer, params)


def _step_without_effect(optimizer: torch.optim.Optimizer, params: list[nn.Parameter]) -> None:
    rates = [group.get("lr") for group in optimizer.param_groups]
    try:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = torch.zeros_like(rate) if isinstance(rate, torch.Tensor) else 0.0
        for param in params:
            if param.requires_grad and (param.numel() or unit_fqn(param) is None):
                param.grad = torch.zeros_like(param)
        optimizer.step()
    finally:
        for group, rate in zip(optimizer.param_groups, rates, strict=True):
            if rate is not None:
                group["lr"] = rate
        for param in params:
            param.grad = None


def flatten(state_dict: Mapping[str, Any]) -> dict[str, Any]:
    """An optimizer's state dict with one level: ``state.NAME.KEY`` and, for each parameter, ``param_groups.NAME.KEY``.

    Raises:
        StateDictError: a value that is neither a tensor nor a number.
    """
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


def unflatten(state_dict: Mapping[str, Any], groups: Iterable[Sequence[str]]) -> dict[str, Any]:
    """The way back from ``flatten``.

    Args:
        groups: the names of the parameters in each group of the optimizer.

    Raises:
        StateDictError: parameters of one group have other hyper-parameters.
    """
    groups = [list(names) for names in groups]
    known = {name for names in groups for name in names}
    by_kind: dict[str, dict[str, dict[str, Any]]] = {"state": {}, "param_groups": {}}
    for full_key, value in state_dict.items():
        kind, _, rest = str(full_key).partition(".")
        name, key = _split(rest, known)
        if kind in by_kind and name:
            by_kind[kind].setdefault(name, {})[key] = value
    found: list[dict[str, Any]] = []
    for names in groups:
        hypers = [by_kind["param_groups"].get(name, {}) for name in names]
        odd = next((name for name, hyper in zip(names, hypers, strict=True) if not same(hyper, hypers[0])), None)
        if odd is not None:
            raise StateDictError(
                f"{odd!r} and {names[0]!r} of one parameter group have different hyper-parameters: "
                f"{by_kind['param_groups'].get(odd)} and {hypers[0]}"
            )
        found.append({**(hypers[0] if hypers else {}), "params": names})
    return {"state": by_kind["state"], "param_groups": found}


def _split(text: str, names: Collection[str]) -> tuple[str, str]:
    """``NAME.KEY`` as the longest of `names` that it begins with, and the rest; empty if it begins with none."""
    end = text.rfind(".")
    while end > 0:
        if text[:end] in names:
            return text[:end], text[end + 1 :]
        end = text.rfind(".", 0, end)
    return "", text


def _of_optimizer(model: nn.Module, optimizer: torch.optim.Optimizer, given: Mapping[str, Any]) -> dict[str, Any]:
    """What of a state dict is for this optimizer, where there are others."""
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


@contextlib.contextmanager
def _state_dict_type(model: nn.Module, options: StateDictOptions) -> Iterator[None]:
    offload = options.cpu_offload
    if options.full_state_dict:
        chosen: tuple[Any, ...] = (
            StateDictType.FULL_STATE_DICT,
            FullStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
            FullOptimStateDictConfig(offload_to_cpu=offload, rank0_only=offload),
        )
    else:
        chosen = (
            StateDictType.SHARDED_STATE_DICT,
            ShardedStateDictConfig(offload_to_cpu=offload, _use_dtensor=True),
            ShardedOptimStateDictConfig(offload_to_cpu=offload, _use_dtensor=True),
        )
    with state_dict_type(model, *chosen):
        yield


def _frozen(model: nn.Module) -> set[str]:
    """The names of parameters that are not trained, tied names too."""
    fqns = get_param_to_fqns(model)
    found = {name for param, names in fqns.items() if not param.requires_grad for name in names}
    return found | {alias for alias, name in get_aliases(model).items() if name in found}


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
