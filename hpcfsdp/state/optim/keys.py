"""The parameters of an optimizer: their names in the model, and their keys in the optimizer's state dict."""

import copy
import itertools
import math
import operator
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, NamedTuple, Protocol, runtime_checkable

import torch
from torch import nn
from torch.distributed.fsdp import OptimStateKeyType, ShardingStrategy

from hpcfsdp.comm import Communicator
from hpcfsdp.errors import StateDictError, nearest
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.model import flat_params, named_flat_params
from hpcfsdp.state.wrappers import CleanNames, clean_fqn
from hpcfsdp.units.unit_mesh import UnitMesh

ParamKey = int | str
"""The key of a parameter in an optimizer's state dict: its number in ``param_groups``, or its name."""

OptimInput = list[dict[str, Any]] | Iterable[nn.Parameter] | None
"""The argument that an optimizer was built from: parameters, or groups of them; None for ``model.parameters()``."""


@runtime_checkable
class StepsWholeTensors(Protocol):
    """An optimizer that steps whole tensors of sharded parameters, each on one rank."""

    def initial_state(self) -> dict[Any, dict[str, Any]]:
        """Return what ``states_of_first_step`` gives for all optimizers. Collective over all ranks of the model."""

    def shown_state(self) -> Mapping[Any, dict[str, Any]]:
        """Return state by sharded parameter, as if each rank stepped its shard. Collective over all ranks of the model.

        What has another shape than the parameter is whole on all ranks, and marked by ``mark_whole_state``.
        """

    def load_shown_state(self, given: Mapping[Any, dict[str, Any]]) -> None:
        """Replace the state by such state. Collective over all ranks of the model."""


@dataclass(frozen=True, eq=False)
class FSDPParamInfo:
    """A flat parameter and the ranks that share it, for the state of an optimizer."""

    mesh: UnitMesh
    flat: FlatParam
    layout: FlatLayout  # of its parameters, under their names in the whole model
    is_stepped_whole: bool = False  # whether the optimizer is one of ``StepsWholeTensors``

    @property
    def comm(self) -> Communicator:
        """The ranks that hold its shards."""
        return self.flat.comm

    @cached_property
    def param_indices(self) -> dict[str, int]:
        """The place of each name among the layout's slots."""
        return {slot.fqn: index for index, slot in enumerate(self.layout.slots)}

    @property
    def keeps_shapes(self) -> bool:
        """Whether the optimizer steps parameters in the shapes that they have here, and not runs of them."""
        return self.flat.use_orig_params and self.mesh.strategy is ShardingStrategy.NO_SHARD

    def shows_whole(self, fqn: str) -> bool:
        """Return whether the optimizer steps all of a parameter here, in its original shape."""
        return self.keeps_shapes and not self.layout.slots[self.param_indices[fqn]].is_cut

    def has_state_of_any_shape(self, fqn: str) -> bool:
        """Return whether state of a parameter may have other shapes than the parameter: somebody steps all of it."""
        return self.is_stepped_whole or self.shows_whole(fqn)

    def is_empty_on(self, fqn: str, rank: int) -> bool:
        """Return whether the shard of a rank of ``comm`` has no elements of a parameter that has some."""
        slot = self.layout.slots[self.param_indices[fqn]]
        return math.prod(slot.whole_shape) > 0 and self.layout.param_run(fqn, rank) is None


class OptimStateKey(NamedTuple):
    """The parameters that an entry of optimizer state is for, by their names in the model; several for a flat one."""

    unflat_param_names: tuple[str, ...]
    is_fsdp_managed: bool


def sorted_items(dictionary: Mapping[str, Any]) -> Iterator[tuple[str, Any]]:
    """Return the items of a mapping in the order of their keys, which is the same on all ranks."""
    for key in sorted(dictionary):
        yield key, dictionary[key]


def get_fqn_to_fsdp_param_info(
    model: nn.Module, optim: torch.optim.Optimizer | None = None, *, in_file: bool = False
) -> dict[str, FSDPParamInfo]:
    """Return the flat parameter that each sharded parameter of the model is in, in the order of units.

    Tied parameters are there under their first name: of a state dict, or of a checkpoint (see ``flat_params``).
    """
    found = flat_params(model) if in_file else ((flat, names, u.mesh) for u, flat, names in named_flat_params(model))
    is_stepped_whole = isinstance(optim, StepsWholeTensors)
    infos = [FSDPParamInfo(mesh, flat, layout, is_stepped_whole) for flat, layout, mesh in found]
    return {slot.fqn: info for info in infos for slot in info.layout.slots}


def get_param_to_fqns(
    model: nn.Module, fqn_to_info: Mapping[str, FSDPParamInfo] | None = None, *, in_file: bool = False
) -> dict[nn.Parameter, list[str]]:
    """Return the names in the whole model of each parameter, in the order of ``model.parameters()``.

    Of tied parameters the first name. A flat parameter has the names of all parameters in it. For other arguments see
    ``get_fqn_to_fsdp_param_info``.
    """
    infos = get_fqn_to_fsdp_param_info(model, in_file=in_file) if fqn_to_info is None else fqn_to_info
    sharded_params: dict[nn.Parameter, list[str]] = {}
    for fqn, info in infos.items():
        param = info.flat.leaves[info.param_indices[fqn]] if info.flat.use_orig_params else info.flat.parameter
        sharded_params.setdefault(param, []).append(fqn)
    name_of = CleanNames.of(model) if in_file else CleanNames()
    return {param: sharded_params.get(param, [name_of("", name)]) for name, param in model.named_parameters()}


def get_flat_param_to_fqn(model: nn.Module) -> dict[nn.Parameter, str]:
    """Return the name of each flat parameter itself, as ``layers.0._flat_param``, without the names of wrappers."""
    sharded_params = {flat.parameter for _, flat, _ in named_flat_params(model) if not flat.use_orig_params}
    return {param: clean_fqn(name) for name, param in model.named_parameters() if param in sharded_params}


def get_aliases(model: nn.Module) -> dict[str, str]:
    """Return the first name of each tied parameter of the model, by all others that it has."""
    slots = [slot for _, _, layout in named_flat_params(model) for slot in layout.slots]
    found = {alias: slot.fqn for slot in slots for alias in slot.aliases}
    first: dict[nn.Parameter, str] = {}
    for name, param in model.named_parameters(remove_duplicate=False):
        clean = clean_fqn(name)
        if first.setdefault(param, clean) != clean:
            found.setdefault(clean, first[param])
    return found


def get_param_groups_of_optim_input(model: nn.Module, optim_input: OptimInput = None) -> list[list[nn.Parameter]]:
    """Return the parameters in each group of an optimizer that is built from `optim_input`. Exhausts generators."""
    if optim_input is None:
        return [list(model.parameters())]
    if isinstance(optim_input, (str, bytes, torch.Tensor, Mapping)) or not isinstance(optim_input, Iterable):
        raise TypeError(f"optim_input must be parameters, or a list of groups, not {type(optim_input).__name__}")
    entries = list(optim_input)
    if not entries:
        raise ValueError("optim_input is empty: pass what the optimizer was built from")
    if all(isinstance(entry, torch.Tensor) for entry in entries):
        return [entries]
    for place, entry in enumerate(entries):
        if not isinstance(entry, Mapping) or "params" not in entry:
            raise TypeError(
                f"optim_input[{place}] must be a group, a dict with 'params' as all others, not {type(entry).__name__}"
            )
    given = (entry["params"] for entry in entries)
    return [[params] if isinstance(params, torch.Tensor) else list(params) for params in given]


def get_param_id_to_param_from_optim_input(model: nn.Module, optim_input: OptimInput = None) -> dict[int, nn.Parameter]:
    """Return the numbers that an optimizer built from `optim_input` gives to parameters."""
    return dict(enumerate(itertools.chain.from_iterable(get_param_groups_of_optim_input(model, optim_input))))


def get_param_to_param_id_from_optim_input(model: nn.Module, optim_input: OptimInput = None) -> dict[nn.Parameter, int]:
    """Return the inverse of ``get_param_id_to_param_from_optim_input``."""
    return {param: key for key, param in get_param_id_to_param_from_optim_input(model, optim_input).items()}


def is_named_optimizer(optim_state_dict: Mapping[str, Any]) -> bool:
    """Return whether the keys of parameters in an optimizer's own state dict are names, not numbers."""
    keys = [key for group in optim_state_dict.get("param_groups", ()) for key in group.get("params", ())]
    keys = keys or list(optim_state_dict.get("state") or ())
    return bool(keys) and isinstance(keys[0], str)


def get_param_key_to_param(
    optim: torch.optim.Optimizer, model: nn.Module | None = None, is_named_optimizer: bool = False
) -> dict[ParamKey, nn.Parameter]:
    """Return the key of each parameter in an optimizer's state dict: its number, or its name if that has names.

    Names are those that the optimizer was given (``named_parameters`` of torch's ``_NamedOptimizer``, ``params`` of
    TorchRec's ``KeyedOptimizer``), and otherwise those of ``model.named_parameters()``, names of wrappers included.
    """
    params = [param for group in optim.param_groups for param in group["params"]]
    if not is_named_optimizer:
        return dict(enumerate(params))
    known = (getattr(optim, attribute, None) for attribute in ("named_parameters", "params"))
    given: Mapping[str, Any] = next((names for names in known if isinstance(names, Mapping)), {})
    names = {param: name for name, param in given.items() if isinstance(param, torch.Tensor)}
    for name, param in model.named_parameters() if model is not None else ():
        names.setdefault(param, name)
    for place, param in enumerate(params):
        if param not in names:
            raise StateDictError(
                f"parameter {place} of the optimizer, of shape {tuple(param.shape)}, has no name in the optimizer or "
                "the model: build the optimizer from model.named_parameters() after wrapping the model"
            )
    return {names[param]: param for param in params}


def get_param_to_param_key(
    optim: torch.optim.Optimizer, model: nn.Module | None = None, is_named_optimizer: bool = False
) -> dict[nn.Parameter, ParamKey]:
    """Return the inverse of ``get_param_key_to_param``."""
    return {param: key for key, param in get_param_key_to_param(optim, model, is_named_optimizer).items()}


def resolve_param_keys(
    model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput, *, is_named_optimizer: bool = False
) -> dict[ParamKey, nn.Parameter]:
    """Return the parameters of an optimizer by their keys, from the optimizer or from what it was built from."""
    if optim is None:
        return dict(get_param_id_to_param_from_optim_input(model, optim_input))
    if optim_input is not None:
        stepped = [param for group in optim.param_groups for param in group["params"]]
        built_from = list(get_param_id_to_param_from_optim_input(model, optim_input).values())
        if len(stepped) != len(built_from) or any(map(operator.is_not, stepped, built_from)):
            raise StateDictError(
                f"optim ({len(stepped)} parameter(s)) was not built from optim_input ({len(built_from)} "
                "parameter(s)), or in another order: pass optim alone"
            )
    return get_param_key_to_param(optim, model, is_named_optimizer)


def map_param_key_to_optim_keys(
    param_key_to_param: Mapping[ParamKey, nn.Parameter],
    param_to_fqns: Mapping[nn.Parameter, Sequence[str]],
    fqn_to_info: Mapping[str, FSDPParamInfo],
) -> dict[OptimStateKey, ParamKey]:
    """Return the keys of an optimizer's parameters, by the names that all ranks know; in the order of the optimizer."""
    found: dict[OptimStateKey, ParamKey] = {}
    for key, param in param_key_to_param.items():
        if param not in param_to_fqns:
            raise StateDictError(
                f"parameter {key!r} of the optimizer, of shape {tuple(param.shape)}, does not belong to the model: "
                "build the optimizer from model.parameters() after wrapping the model"
            )
        names = tuple(param_to_fqns[param])
        found[OptimStateKey(names, names[0] in fqn_to_info)] = key
    return found


def hyper(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return the hyper-parameters of a group: all but its parameters."""
    return {key: value for key, value in group.items() if key != "params"}


def with_params(group: Mapping[str, Any], params: list[Any], names: list[Any]) -> dict[str, Any]:
    """Return a copy of a parameter group with other keys, and `names` if the optimizer was built from names."""
    copied = copy.deepcopy(hyper(group))
    return {**copied, **({"param_names": list(names)} if "param_names" in copied else {}), "params": params}


def check_missing_keys_on_rank(rank: int, present: Iterable[str], expected: Mapping[str, int]) -> None:
    """Raise if `rank`, with state of the parameters `present`, lacks an `expected` one, which another rank has."""
    missing = dict(expected)
    for name in present:
        missing.pop(name, None)
    if missing:
        (name, other), more = next(iter(missing.items())), len(missing) - 1
        others = f" and {more} other parameter(s)" if more else ""
        raise StateDictError(
            f"rank {rank} has no optimizer state of {name!r}{others}, and rank {other} has: all ranks must step the "
            "same parameters"
        )


def check_known(names: Iterable[Any], known: Iterable[str], what: str) -> None:
    """Raise if one of `names` is none of the model's."""
    known = set(known)
    unknown = [name for name in names if name not in known]
    if not unknown:
        return
    if all(isinstance(name, int) for name in unknown):
        raise StateDictError(
            f"{what} identifies parameters by number ({unknown[0]}), not by name: turn numbers into names with "
            "FullyShardedDataParallel.rekey_optim_state_dict(state_dict, OptimStateKeyType.PARAM_NAME, model, "
            "optim=optim)"
        )
    more = f" and {len(unknown) - 1} other name(s)" if len(unknown) > 1 else ""
    raise StateDictError(
        f"{what} holds {unknown[0]!r}{more}, which the model does not have{nearest(str(unknown[0]), known)}"
    )


def check_is_state_dict(value: Any) -> None:
    """Raise a ``StateDictError`` unless a value is a state dict of an optimizer."""
    if not isinstance(value, Mapping):
        raise StateDictError(f"an optimizer's state dict is a dict, not {describe(value)}")
    if "state" not in value:
        raise StateDictError(
            f"an optimizer's state dict has the key 'state', this one has {sorted(map(str, value))[:5]}: pass what "
            "optim_state_dict, or the state_dict of an optimizer, returned"
        )
    if not isinstance(value["state"], Mapping):
        raise StateDictError(f"'state' of an optimizer's state dict is a dict, not {describe(value['state'])}")
    groups = value.get("param_groups", [])
    if not isinstance(groups, (list, tuple)) or not all(isinstance(g, Mapping) and "params" in g for g in groups):
        raise StateDictError(
            f"'param_groups' of an optimizer's state dict is a list of dicts with the key 'params', not "
            f"{describe(groups)}"
        )


def describe(value: Any) -> str:
    """Return a value's type, and the value itself if it is short."""
    shown = repr(value)
    return f"a {type(value).__name__}" + (f" ({shown})" if len(shown) < 60 else "")


def rekey_optim_state_dict(
    optim_state_dict: dict[str, Any],
    optim_state_key_type: OptimStateKeyType,
    model: nn.Module,
    optim_input: OptimInput = None,
    optim: torch.optim.Optimizer | None = None,
) -> dict[str, Any]:
    """Return the state dict of a whole model's optimizer with its parameters by name, or by number.

    Names are those of `model`, wrappers' left out; numbers are those of the optimizer, and come in its order: by that
    ``Optimizer.load_state_dict`` goes, and not by number. Of tied parameters a state dict may have each name: the state
    of the first one counts. Tensors are shared with what was given, which is the result if it has such keys already.
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
            f"the keys of the state dict are {sorted(kind.__name__ for kind in kinds)}: pass all names or all numbers"
        )
    if kinds <= {wanted}:
        return optim_state_dict
    names = _names(model, optim, optim_input)
    if wanted is str:
        check_numbers(keys, names)
        rename: Mapping[Any, ParamKey] = names
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
        rename = numbers
    rekeyed: dict[str, Any] = {"state": {rename[key]: value for key, value in state.items()}}
    if wanted is int:
        rekeyed["state"].update({number: state[name] for number, name in names.items() if name in state})
    if "param_groups" in optim_state_dict:
        params = [[rename[key] for key in group["params"]] for group in groups]
        if wanted is int:
            params = [sorted(set(numbers)) for numbers in params]
            _check_in_one_group(params, names)
        rekeyed["param_groups"] = [
            with_params(group, keys, [names.get(key, key) for key in keys])
            for group, keys in zip(groups, params, strict=True)
        ]
        if wanted is int:
            # By their first number; those without parameters stay where they are.
            filled = (group for group in rekeyed["param_groups"] if group["params"])
            ordered = iter(sorted(filled, key=lambda group: group["params"][0]))
            rekeyed["param_groups"] = [next(ordered) if g["params"] else g for g in rekeyed["param_groups"]]
            if optim is not None:
                _check_groups(rekeyed["param_groups"], optim, names)
    return rekeyed


def _check_in_one_group(params: list[list[int]], names: Mapping[int, str]) -> None:
    """Refuse groups that have a parameter in common, as two names of tied parameters may be in two."""
    places: dict[int, int] = {}
    for place, number in ((place, number) for place, numbers in enumerate(params) for number in numbers):
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
            has, lacks = ("optimizer", "state dict") if odd[0] in expected else ("state dict", "optimizer")
            raise StateDictError(
                f"{names[odd[0]]!r} is in parameter group {place} of the {has}, but not of the {lacks}: build the "
                "optimizer with the groups that were saved"
            )


def check_numbers(keys: list[int], names: Mapping[int, str]) -> None:
    """Refuse numbers that an optimizer does not have."""
    strange = [key for key in keys if key not in names]
    if strange:
        raise StateDictError(
            f"the state dict holds parameter {strange[0]}, but the optimizer has only {len(names)} parameter(s): "
            "pass the model and the optimizer that the state dict is of"
        )


def _names(model: nn.Module, optim: torch.optim.Optimizer | None, optim_input: OptimInput) -> dict[int, str]:
    """Return the name of each numbered parameter."""
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
    """Return state, by the first parameter that an entry is for, by the keys of this rank's optimizer, in its order."""
    named = ((key.unflat_param_names[0], own_key) for key, own_key in keys.items())
    return {own_key: states[name] for name, own_key in named if name in states}
