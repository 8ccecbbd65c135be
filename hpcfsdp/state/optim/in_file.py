"""An optimizer's state as a checkpoint stores it, in named tensors and numbers, and loaded from them."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, StateDictError
from hpcfsdp.state.model import DTensorRanks, hold_shards
from hpcfsdp.state.optim import compare
from hpcfsdp.state.optim.compare import GatheredState, StateInfo
from hpcfsdp.state.optim.keys import (
    FSDPParamInfo,
    StepsWholeTensors,
    hyper,
    rekey_sharded_optim_state_dict,
    with_params,
)
from hpcfsdp.state.optim.load import allocate_optim_state
from hpcfsdp.state.optim.load_plan import LoadPlan, flatten_zero_dim_tensor_optim_state
from hpcfsdp.state.optim.save import FlatParamState, LocalOptimState, unflatten_param_groups
from hpcfsdp.state.optim.values import FLAGS, Unpicklable, deep_copy
from hpcfsdp.state.tensors import Runs, StateTensor, TensorInfo, unsharded

Scalar = bool | int | float


@dataclass(frozen=True)
class OptimizerState:
    """The state of an optimizer: tensors and Python numbers, named ``fqn/key``, and groups with parameters by name."""

    tensors: list[StateTensor]
    scalars: dict[str, Scalar]
    groups: list[dict[str, Any]]

    def only(self, names: Collection[str]) -> OptimizerState:
        """Return the state of some parameters, in the groups that have one of them."""
        groups = [{**group, "params": [name for name in group["params"] if name in names]} for group in self.groups]
        if not any(group["params"] for group in groups):
            raise CheckpointError("the optimizer steps no parameter that names= chooses: leave the optimizer out")
        return OptimizerState(
            [tensor for tensor in self.tensors if tensor.name.rpartition("/")[0] in names],
            {name: value for name, value in self.scalars.items() if name.rpartition("/")[0] in names},
            [group for group, whole in zip(groups, self.groups, strict=True) if group["params"] or not whole["params"]],
        )


@contextlib.contextmanager
def _errors_as(kind: type[CheckpointError]) -> Iterator[None]:
    """Return a context in which a ``StateDictError`` becomes an error of a checkpoint."""
    try:
        yield
    except StateDictError as error:
        raise kind(str(error)) from error


States = Mapping[Any, Mapping[str, Any]]
"""State by parameter, as ``torch.optim.Optimizer.state``."""


def local_state(model: nn.Module, optimizer: torch.optim.Optimizer, states: States) -> LocalOptimState:
    """Not collective. Return the state of this rank's optimizer, or what ``StepsWholeTensors`` show, by saved names."""
    odd = next((key for key in states if not isinstance(key, torch.Tensor)), None)
    if odd is not None:
        raise CheckpointError(
            f"the optimizer's state holds {odd!r}, which belongs to no parameter: keep it in a group, or pass extra="
        )
    params = [param for group in optimizer.param_groups for param in group["params"]]
    numbers = iter(range(len(params)))
    groups = [{**group, "params": [next(numbers) for _ in group["params"]]} for group in optimizer.param_groups]
    state = {number: states[param] for number, param in enumerate(params) if param in states}
    with _errors_as(CheckpointError):
        return LocalOptimState(model, optimizer, {"state": state, "param_groups": groups}, in_file=True)


def gather_state(
    comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer, states: States
) -> tuple[LocalOptimState, GatheredState | None]:
    """Return ``local_state``, and what ranks hold of original parameters, if there are any. Collective over `comm`."""
    with raise_together(comm) as exchange:
        hold_shards(model)
        own, message = local_state(model, optimizer, states), None
        flats = [info for info in own.infos.values() if info.flat.use_orig_params]
        if any(info.comm.size > 1 or info.mesh.tensor for info in flats):
            message = own.to_message()
            exchange.mine = message.digests
    if message is None or None in exchange.everyone:  # ranks with other models: their plans will differ
        return own, None
    return own, compare.allgather_state_info(comm, message, exchange.everyone)


def state_elsewhere(gathered: GatheredState | None) -> dict[str, StateInfo]:
    """Not collective. Return state of original parameters, also without elements here, to write it with others."""
    if gathered is None:
        return {}
    with _errors_as(CheckpointError):
        compare.check_same_groups(gathered)
        return compare.convert_all_state_info(gathered)


def optimizer_state(own: LocalOptimState, elsewhere: Mapping[str, StateInfo], ranks: DTensorRanks) -> OptimizerState:
    """Not collective. Return the optimizer's state on this rank; for `elsewhere` see ``state_elsewhere``."""
    tensors: list[StateTensor] = []
    scalars: dict[str, Scalar] = {}

    def add(fqn: str, state: Mapping[str, Any], writer: int = 0) -> None:
        for key, value in state.items():
            what = f"optimizer state {key!r} of {fqn!r}"
            if "/" in key:
                raise CheckpointError(f"{what}: a key with / in it cannot be saved")
            if isinstance(value, torch.Tensor):
                found = ranks.state_tensor(f"{fqn}/{key}", value)
                tensors.append(replace(found, runs=Runs.of((0, 1), ((writer,),))) if writer else found)
            elif isinstance(value, (bool, int, float)):
                scalars[f"{fqn}/{key}"] = value
            elif isinstance(value, Unpicklable):
                raise CheckpointError(f"{what} is {value}")
            elif value is not None:
                raise CheckpointError(f"{what} is a {type(value).__name__}: tensors and numbers can be saved")

    for info in dict.fromkeys(own.infos.values()):
        state = FlatParamState.of(info, own.states, elsewhere)
        for (key, _), parts in state.shards.items():
            if "/" in key:
                raise CheckpointError(f"optimizer state {key!r}: a key with / in it cannot be saved")
            tensors += parts.in_file(info.mesh, [f"{slot.fqn}/{key}" for slot in info.layout.slots])
        for part in (state.whole, state.others):
            for fqn, values in part.items():
                add(fqn, values)
        for fqn, values in state.scalars.items():
            add(fqn, values, _writer_of_scalars(info, fqn))
    for fqn, values in own.unsharded.items():
        add(fqn, values)
    return OptimizerState(tensors, scalars, unflatten_param_groups(own.groups or (), own.params, own.fqns))


def _writer_of_scalars(info: FSDPParamInfo, fqn: str) -> int:
    """Return the rank that writes a parameter's state without dimensions: the first one that steps it."""
    slot = info.layout.slots[info.param_indices[fqn]]
    if not info.flat.use_orig_params or slot.is_cut or not slot.numel:
        return 0
    return int(info.mesh.copies[info.layout.param_edges(fqn)[0], 0])


def named_groups(optimizer: torch.optim.Optimizer, params: Sequence[Sequence[str]]) -> list[dict[str, Any]]:
    """Not collective. Return the present ``param_groups``, copied, with the names of their parameters, by group."""
    with _errors_as(CheckpointError):
        for name, value in (item for group in optimizer.param_groups for item in hyper(group).items()):
            deep_copy(f"{name!r} of a parameter group", value)
    pairs = zip(optimizer.param_groups, params, strict=True)
    return [with_params(group, list(names), list(names)) for group, names in pairs]


class OptimizerRestore:
    """New state for an optimizer: allocated next to the old one, filled from a checkpoint, checked, and applied."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, TensorInfo],
        scalars: Mapping[str, Scalar],
        groups: list[dict[str, Any]],
    ) -> None:
        """Plan the state, see ``OptimizerState``. Not collective, once ranks that share parameters know each other."""
        _check_named(groups)
        given: dict[str, dict[str, TensorInfo | Scalar]] = {}
        for name, value in [*saved.items(), *scalars.items()]:
            fqn, _, key = name.rpartition("/")
            given.setdefault(fqn, {})[key] = value
        with _errors_as(CheckpointMismatchError):
            plan = LoadPlan(model, optimizer, {"state": given, "param_groups": groups}, None, in_file=True)
        self._optimizer, self._plan, ranks = optimizer, plan, DTensorRanks(model)
        # An optimizer keeps the names that it was built from, and its flags.
        kept = [{"params", "param_names", *(FLAGS & group.keys())} for group in optimizer.param_groups]
        self._groups = [
            {k: _fitted(optimizer, number, k, v) for k, v in group.items() if k not in kept[number]}
            for number, group in enumerate(plan.groups)
        ]
        self._state: dict[str, dict[str, Any]] = {}
        self._unread: list[tuple[str, str, list[str], list[torch.Tensor]]] = []
        self.tensors: list[StateTensor] = []
        """What is to be filled: every piece is memory of the new state."""
        pairs = zip(optimizer.param_groups, plan.groups, strict=True)
        hypers = {key: own for own, group in pairs for key in group["params"]}
        owners = {key.unflat_param_names[0]: (plan.params[own], hypers[own]) for key, own in plan.keys.items()}
        for info in dict.fromkeys(plan.infos.values()):
            entries = {fqn: plan.entries[fqn] for fqn in info.param_indices if fqn in plan.entries}
            new = allocate_optim_state(info, entries)
            self._state.update(new.states)
            for key, parts, _ in new.shards:
                self.tensors += parts.in_file(info.mesh, [f"{slot.fqn}/{key}" for slot in info.layout.slots])
            self.tensors += [unsharded(f"{fqn}/{key}", tensor) for (fqn, key), tensor in new.whole.items()]
            for fqn, entry in entries.items():
                names = [fqn] if info.flat.use_orig_params else list(info.param_indices)
                for key, values in entry.unread.items():
                    scalars_of = [_empty_state(*owners[fqn], key, value) for value in values]
                    self.tensors += [unsharded(f"{n}/{key}", v) for n, v in zip(names, scalars_of, strict=True)]
                    self._unread.append((fqn, key, names, scalars_of))
        for fqn, state in plan.unsharded.items():
            self._state[fqn] = found = {
                key: _empty_state(*owners[fqn], key, value) if isinstance(value, TensorInfo) else value
                for key, value in state.items()
            }
            self.tensors += [
                ranks.state_tensor(f"{fqn}/{key}", value)
                for key, value in found.items()
                if isinstance(value, torch.Tensor)
            ]

    @property
    def param_names(self) -> list[str]:
        """Names of all parameters that the optimizer steps."""
        return [fqn for key in self._plan.keys for fqn in key.unflat_param_names]

    def check(self) -> None:
        """Check, when all tensors are filled, that one flat parameter has one value of each scalar."""
        with _errors_as(CheckpointMismatchError):
            for fqn, key, names, values in self._unread:
                self._state[fqn][key] = flatten_zero_dim_tensor_optim_state(key, values, names)

    def apply(self) -> None:
        """Put the new state and hyper-parameters in place. Collective for an optimizer of ``StepsWholeTensors``."""
        rekeyed = rekey_sharded_optim_state_dict(self._state, self._plan.keys)
        new = {self._plan.params[own_key]: state for own_key, state in rekeyed.items()}
        if isinstance(self._optimizer, StepsWholeTensors):
            with _errors_as(CheckpointMismatchError):
                self._optimizer.load_shown_state(new)
        else:
            for param in [param for param in self._optimizer.state if isinstance(param, torch.Tensor)]:
                del self._optimizer.state[param]
            self._optimizer.state.update(new)
        for group, new_values in zip(self._optimizer.param_groups, self._groups, strict=True):
            for key, value in new_values.items():
                if isinstance(group.get(key), torch.Tensor):  # a capturable optimizer's lr has to stay the tensor it is
                    group[key].copy_(value)
                else:
                    group[key] = value


def _empty_state(param: nn.Parameter, group: Mapping[str, Any], key: str, value: TensorInfo) -> torch.Tensor:
    """Return memory for a state that is whole on this rank, or for a number."""
    # Torch's optimizers keep the step on the CPU unless they are capturable or fused.
    if isinstance(param, DTensor) and value.shape == tuple(param.shape):
        return torch.zeros_like(param.detach(), dtype=value.dtype)
    is_on_device = value.shape or key != "step" or group.get("capturable") or group.get("fused")
    return torch.zeros(value.shape, dtype=value.dtype, device=param.device if is_on_device else "cpu")


def _check_named(groups: list[dict[str, Any]]) -> None:
    """Refuse groups that list their parameters by number, as a file of torch.distributed.checkpoint may."""
    for params in (group.get("params") for group in groups):
        if not isinstance(params, list) or not all(isinstance(name, str) for name in params):
            raise CheckpointMismatchError(
                f"its optimizer's parameters are {'not listed' if params is None else f'listed as {params!r:.40}'}, "
                "but must be listed by name, not by number as in optimizer.state_dict(): load it with "
                "optimizer=None, and save optimizers with hpcfsdp.checkpoint.save, or with torch's get_state_dict"
            )


def _fitted(optimizer: torch.optim.Optimizer, number: int, key: str, value: Any) -> Any:
    """Return a saved hyper-parameter as a value of the kind that a group of this optimizer has now, or an error."""
    group = optimizer.param_groups[number]
    if key not in group:
        return value
    now, fits, is_own = group[key], True, key not in optimizer.defaults  # a user's own key may have any value
    if isinstance(now, torch.Tensor):
        try:
            return torch.tensor(value, dtype=now.dtype, device=now.device).expand(now.shape)
        except (RuntimeError, TypeError, ValueError):
            fits = False
    elif isinstance(now, (list, tuple)) and isinstance(value, (list, tuple)):
        fits = is_own or (len(value) == len(now) and all(map(_are_alike, now, value)))
        value = value if is_own and isinstance(value, tuple) else type(now)(value)
    elif value is None or now is None:  # as foreach=None, which lets torch choose
        fits = value is now or now is None or isinstance(now, bool) or optimizer.defaults.get(key, now) is None
    else:
        fits = _are_alike(now, value)
    if not fits and not is_own:
        raise CheckpointMismatchError(
            f"its optimizer's group {number} has {key}={value!r:.60}, the optimizer here {now!r:.60}: it belongs to "
            "another kind of optimizer, or is damaged; load it with optimizer=None"
        )
    return value


def _are_alike(now: Any, value: Any) -> bool:
    """Return whether a value may stand for another: both are numbers, or of one type; None is anything."""
    if now is None:
        return True
    number = (bool, int, float)
    return isinstance(value, number) if isinstance(now, number) else type(value) is type(now)
