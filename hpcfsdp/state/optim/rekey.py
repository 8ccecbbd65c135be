"""Names of parameters for numbers in an optimizer's state dict, and numbers for names. Nothing is sent."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType

from hpcfsdp.errors import StateDictError
from hpcfsdp.state.optim.keys import (
    OptimInput,
    OptimStateKey,
    ParamKey,
    check_is_state_dict,
    check_known,
    get_aliases,
    get_param_to_fqns,
    resolve_param_keys,
    with_params,
)


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """The state dict of a whole model's optimizer with its parameters by name, or by number.

    Names are those of `model`, wrappers' left out; numbers are those of the optimizer, and come in its order: by that
    ``Optimizer.load_state_dict`` goes, and not by number. Of tied parameters a state dict may have each name: the state
    of the first one counts. Tensors are shared with what was given.

    Args:
        optim_state_key_type: what keys are to be.
        model: `optim` steps its parameters, or an optimizer built from `optim_input`, by default from
            ``model.parameters()``. A wrapped one has to have ``use_orig_params=True``.

    Returns:
        A new dict; the one that was given if its keys are of that kind already.

    Raises:
        TypeError: `optim_state_key_type` is none.
        StateDictError: names and numbers are mixed, are not those of the model and the optimizer, one number stands
            for several names, or a parameter is in two groups.
    """
    if not isinstance(optim_state_key_type, OptimStateKeyType):
        raise TypeError(f"optim_state_key_type must be an OptimStateKeyType, not {optim_state_key_type!r}")
    check_is_state_dict(optim_state_dict)
    wanted = str if optim_state_key_type is OptimStateKeyType.PARAM_NAME else int
    state, groups = optim_state_dict["state"], optim_state_dict.get("param_groups", [])
    keys = [*state, *(key for group in groups for key in group["params"])]
    kinds = {type(key) for key in keys}
    if len(kinds) > 1 or not kinds <= {int, str}:
        raise StateDictError(
            f"the keys of the state dict are {sorted(kind.__name__ for kind in kinds)}: they must be either all names "
            "or all numbers"
        )
    if kinds <= {wanted}:
        return optim_state_dict
    names = _names(model, optim, optim_input)
    if wanted is str:
        check_numbers(keys, names)
        rename: Callable[[Any], ParamKey] = names.__getitem__
    else:
        numbers = {name: number for number, name in names.items()}
        aliases = get_aliases(model)
        numbers.update({alias: numbers[name] for alias, name in aliases.items() if name in numbers})
        known = {name for names in get_param_to_fqns(model).values() for name in names}
        check_known(keys, known | set(aliases), "the state dict")
        idle = [key for key in keys if key not in numbers]
        if idle:
            raise StateDictError(
                f"the state dict holds {idle[0]!r}, which the optimizer does not step: leave it out, or pass the "
                "optimizer that the state dict is of"
            )
        rename = numbers.__getitem__
    rekeyed: dict[str, Any] = {"state": {rename(key): value for key, value in state.items()}}
    if wanted is int:
        rekeyed["state"].update({number: state[name] for number, name in names.items() if name in state})
    if "param_groups" in optim_state_dict:
        params = [[rename(key) for key in group["params"]] for group in groups]
        if wanted is int:
            params = [sorted(set(numbers)) for numbers in params]
            _check_in_one_group(params, names)
        rekeyed["param_groups"] = [
            with_params(group, keys, [names.get(key, key) for key in keys])
            for group, keys in zip(groups, params, strict=True)
        ]
        if wanted is int:
            rekeyed["param_groups"] = _in_order(rekeyed["param_groups"])
            if optim is not None:
                _check_groups(rekeyed["param_groups"], optim, names)
    return rekeyed


def _check_in_one_group(params: list[list[int]], names: Mapping[int, str]) -> None:
    """Refuse groups that have a parameter in common, as two names of tied parameters may be in two."""
    places: dict[int, int] = {}
    for place, numbers in enumerate(params):
        for number in numbers:
            if places.setdefault(number, place) != place:
                raise StateDictError(
                    f"{names[number]!r}, or another parameter that is tied to it, is in the parameter groups "
                    f"{places[number]} and {place} of the state dict: leave it in one"
                )


def _check_groups(groups: list[dict[str, Any]], optim: torch.optim.Optimizer, names: Mapping[int, str]) -> None:
    """Refuse groups of other parameters than the optimizer's: it would load state into the wrong ones."""
    numbers = iter(names)
    own = [[next(numbers) for _ in group["params"]] for group in optim.param_groups]
    if len(groups) != len(own):
        raise StateDictError(f"the state dict has {len(groups)} parameter groups, and the optimizer {len(own)}")
    for place, (group, expected) in enumerate(zip(groups, own, strict=True)):
        odd = sorted(set(group["params"]) ^ set(expected))
        if odd:
            has, lacks = "state dict", "optimizer"
            if odd[0] in expected:
                has, lacks = lacks, has
            raise StateDictError(
                f"{names[odd[0]]!r} is in parameter group {place} of the {has}, but not of the {lacks}: build the "
                "optimizer with the groups that were saved"
            )


def _in_order(groups: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Groups by their first number; those without parameters stay where they are."""
    ordered = iter(sorted((group for group in groups if group["params"]), key=lambda group: group["params"][0]))
    return [next(ordered) if group["params"] else group for group in groups]


def check_numbers(keys: list[int], names: Mapping[int, str]) -> None:
    """Refuse numbers that an optimizer does not have."""
    strange = [key for key in keys if key not in names]
    if strange:
        raise StateDictError(
            f"the state dict holds parameter {strange[0]}, but the optimizer has only {len(names)} parameter(s): "
            "pass the model and the optimizer that the state dict is of"
        )


def _names(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput) -> dict[int, str]:
    """The name of each numbered parameter."""
    fqns = get_param_to_fqns(model)
    found: dict[int, str] = {}
    for number, param in resolve_param_keys(model, optim, optim_input).items():
        if param not in fqns:
            raise StateDictError(
                f"parameter {number} of the optimizer, of shape {tuple(param.shape)}, does not belong to the model: "
                "pass the model whose parameters it steps"
            )
        if len(fqns[param]) > 1:
            first, second, *_ = fqns[param]
            raise StateDictError(
                f"parameter {number} of the optimizer is a flat parameter that stands for {first!r}, {second!r} and "
                "others: names match numbers only in a plain model, or with use_orig_params=True"
            )
        [found[int(number)]] = fqns[param]
    return found


def rekey_sharded_optim_state_dict(
    states: Mapping[str, dict[str, Any]], keys: Mapping[OptimStateKey, ParamKey]
) -> dict[ParamKey, dict[str, Any]]:
    """State by the keys of this rank's optimizer, in its order.

    Args:
        states: by the first parameter that an entry is for.
    """
    named = ((key.unflat_param_names[0], own_key) for key, own_key in keys.items())
    return {own_key: states[name] for name, own_key in named if name in states}
