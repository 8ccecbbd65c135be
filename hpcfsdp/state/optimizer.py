"""An optimizer's state as named state tensors, keyed by the parameters of the whole model, and put back from them."""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError, CheckpointMismatchError, StateDictError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.sharded.unit_mesh import UnitMesh
from hpcfsdp.state.blocks import Blocks, FileStaging
from hpcfsdp.state.model import flat_params, held_runs, shard_pieces
from hpcfsdp.state.optim.compare import (
    RankState,
    StateInfo,
    allgather_state_info,
    convert_all_state_info,
)
from hpcfsdp.state.optim.flatten import TORCH_SCALARS
from hpcfsdp.state.optim.values import Unpicklable
from hpcfsdp.state.tensors import LocalPiece, StateTensor, replicated, unsharded
from hpcfsdp.state.wrappers import CleanNames

Scalar = bool | int | float


Forms = dict[tuple[int, str, torch.dtype], FileStaging]
"""By the identity of a layout, the name of a state, and its dtype."""


@dataclass(frozen=True)
class TrainedParam:
    """A parameter that the optimizer steps: one of the model's own, or the shard of several in a flat parameter.

    Attributes:
        param: as it stands in the optimizer's ``param_groups``.
        shapes: by name, of the parameters of the model that it holds.
        layout: how they lie in it; None for a parameter that is not sharded.
        shard_rank: which shard of the layout is here.
        mesh: the ranks that have it; None for a parameter that is not sharded.
        is_run: whether it is this rank's run of one parameter, rather than a whole shard.
    """

    param: nn.Parameter
    shapes: dict[str, tuple[int, ...]]
    layout: FlatLayout | None = None
    shard_rank: int = 0
    mesh: UnitMesh | None = None
    is_run: bool = False

    @property
    def is_empty(self) -> bool:
        """Whether this rank holds nothing of a parameter that others hold parts of."""
        if not self.is_run or self.layout is None:
            return False
        [fqn] = self.shapes
        return math.prod(self.shapes[fqn]) > 0 and self.layout.param_extent(fqn, self.shard_rank) is None

    def state_tensor(self, fqn: str, key: str, value: torch.Tensor, forms: Forms) -> StateTensor:
        """The part of one state value that belongs to the parameter `fqn`, under the name ``fqn/key``.

        Args:
            forms: added to: what is put together for the file, the same for all parameters of a flat one.
        """
        name = f"{fqn}/{key}"
        if value.dim() == 0 or self.layout is None or self.mesh is None:
            return unsharded(name, value)
        if value.shape != self.param.shape:
            raise CheckpointError(
                f"optimizer state {key!r} of {fqn!r} has shape {tuple(value.shape)}, neither a scalar nor that of the "
                f"shard, {tuple(self.param.shape)}: it cannot be split by parameter"
            )
        if self.layout.by_name[fqn].is_cut:
            index, kind = self.layout.places[fqn], (id(self.layout), key, value.dtype)
            if kind not in forms:
                forms[kind] = FileStaging(Blocks(self.mesh, self.layout, whole_shard=not self.is_run))
            forms[kind].add(index, value.view(-1))
            return forms[kind].state_tensor(index, name)
        runs = held_runs(self.layout, fqn, self.mesh)
        if self.is_run:
            extent = self.layout.param_extent(fqn, self.shard_rank)
            pieces = (LocalPiece(extent.start, value),) if extent is not None else ()
        else:
            pieces = shard_pieces(self.layout, fqn, self.shard_rank, value)
        return StateTensor(name, self.shapes[fqn], value.dtype, runs, pieces)


@dataclass(frozen=True)
class OptimizerState:
    """What an optimizer remembers, by the names of the model's parameters.

    Attributes:
        tensors: named ``fqn/key``.
        scalars: values that are Python numbers, by ``fqn/key``.
        groups: ``param_groups`` with parameters by name.
    """

    tensors: list[StateTensor]
    scalars: dict[str, Scalar]
    groups: list[dict[str, Any]]

    def only(self, names: Collection[str]) -> OptimizerState:
        """What it remembers of some parameters, in the groups that have one of them.

        Raises:
            CheckpointError: it steps none of them.
        """
        groups = [{**group, "params": [name for name in group["params"] if name in names]} for group in self.groups]
        if not any(group["params"] for group in groups):
            raise CheckpointError("the optimizer steps no parameter that names= chooses: leave it out")
        return OptimizerState(
            [tensor for tensor in self.tensors if tensor.name.rpartition("/")[0] in names],
            {name: value for name, value in self.scalars.items() if name.rpartition("/")[0] in names},
            [group for group, whole in zip(groups, self.groups, strict=True) if group["params"] or not whole["params"]],
        )


def trained_params(model: nn.Module, optimizer: torch.optim.Optimizer) -> list[list[TrainedParam]]:
    """For each of the optimizer's groups, what its parameters are in the model.

    Raises:
        CheckpointError: the optimizer steps a parameter that the model does not have.
    """
    known: dict[nn.Parameter, TrainedParam] = {}
    for flat, layout, unit in flat_params(model):
        shapes = {slot.fqn: slot.whole_shape for slot in layout.slots}
        if not flat.use_orig_params:
            known[flat.parameter] = TrainedParam(flat.parameter, shapes, layout, flat.comm.rank, unit)
            continue
        for leaf, (fqn, shape) in zip(flat.leaves, shapes.items(), strict=True):
            known[leaf] = TrainedParam(leaf, {fqn: shape}, layout, flat.comm.rank, unit, is_run=True)
    name_of = CleanNames.of(model)
    for name, param in model.named_parameters():
        known.setdefault(param, TrainedParam(param, {name_of("", name): tuple(param.shape)}))
    groups = []
    for index, group in enumerate(optimizer.param_groups):
        strangers = [param for param in group["params"] if param not in known]
        if strangers:
            raise CheckpointError(
                f"the optimizer's group {index} holds a parameter of shape {tuple(strangers[0].shape)} that the model "
                "does not have: build the optimizer from model.parameters() after wrapping the model"
            )
        groups.append([known[param] for param in group["params"]])
    return groups


def optimizer_state(
    model: nn.Module, optimizer: torch.optim.Optimizer, elsewhere: Mapping[str, StateInfo] | None = None
) -> OptimizerState:
    """What the optimizer remembers on this rank; not collective.

    Args:
        elsewhere: what it remembers of parameters of which this rank holds nothing, see ``state_elsewhere``.

    Raises:
        CheckpointError: a value is neither a tensor nor a number, or has a shape that cannot be split.
    """
    odd = next((key for key in optimizer.state if not isinstance(key, torch.Tensor)), None)
    if odd is not None:
        raise CheckpointError(
            f"the optimizer remembers {odd!r}, which belongs to no parameter: keep it in its param_groups, or give it "
            "to extra="
        )
    tensors: list[StateTensor] = []
    forms: Forms = {}
    scalars: dict[str, Scalar] = {}
    groups: list[dict[str, Any]] = []
    for group, members in zip(optimizer.param_groups, trained_params(model, optimizer), strict=True):
        hyper = {key: value for key, value in group.items() if key != "params"}
        groups.append({"params": [fqn for member in members for fqn in member.shapes], **hyper})
        for member in members:
            state = optimizer.state.get(member.param, {})
            if member.is_empty:  # what this rank has for it, if anything, has not been stepped with the others
                state = _of_no_elements((elsewhere or {}).get(next(iter(member.shapes))), member.param)
            # The order in which an optimizer came to remember things is not known where nothing is held.
            for key, value in sorted(state.items()) if member.is_run else state.items():
                if "/" in key:
                    raise CheckpointError(
                        f"optimizer state {key!r} of {next(iter(member.shapes))!r}: a key with / in it"
                    )
                for fqn in member.shapes:
                    if isinstance(value, torch.Tensor):
                        tensors.append(member.state_tensor(fqn, key, value, forms))
                    elif isinstance(value, (bool, int, float)):
                        scalars[f"{fqn}/{key}"] = value
                    elif isinstance(value, Unpicklable):
                        raise CheckpointError(f"optimizer state {key!r} of {fqn!r} is {value}")
                    elif value is not None:
                        raise CheckpointError(
                            f"optimizer state {key!r} of {fqn!r} is a {type(value).__name__}: tensors and numbers can "
                            "be saved"
                        )
    return OptimizerState(tensors, scalars, groups)


def state_elsewhere(comm: Communicator, model: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, StateInfo]:
    """Collective over `comm`. What ranks remember of original parameters whose elements they hold.

    A rank that holds nothing of a parameter does not step it. For others to read, or to write with it, it still has to
    know what there is.

    Raises:
        CheckpointError: ranks that hold parts of one parameter remember different things.
    """
    if not any(flat.use_orig_params and (flat.comm.size > 1 or u.tensor) for flat, _, u in flat_params(model)):
        return {}
    with raise_together(comm):
        members = [member for group in trained_params(model, optimizer) for member in group if member.is_run]
        held = {next(iter(m.shapes)): optimizer.state.get(m.param, {}) for m in members if not m.is_empty}
        mine = RankState(
            [],
            {name: StateInfo.of(state) for name, state in held.items() if state},
            {next(iter(member.shapes)) for member in members if member.is_empty},
            names=[slot.fqn for flat, layout, _ in flat_params(model) if flat.use_orig_params for slot in layout.slots],
        ).packed()
    gathered = allgather_state_info(comm, mine)
    with raise_together(comm):
        try:
            return convert_all_state_info(gathered)
        except StateDictError as error:
            raise CheckpointError(str(error)) from error


def _of_no_elements(info: StateInfo | None, param: nn.Parameter) -> dict[str, Any]:
    if info is None:
        return {}
    tensors = {key: param.new_empty(param.shape, dtype=described.dtype) for key, described in info.tensors.items()}
    return {**tensors, **info.scalar_tensors, **info.non_tensors}


@dataclass(frozen=True)
class SavedTensor:
    """Shape and dtype of one optimizer state tensor in a checkpoint."""

    shape: tuple[int, ...]
    dtype: torch.dtype


class OptimizerRestore:
    """New state for an optimizer: made beside the old one, filled from a checkpoint, checked, then put in place."""

    def __init__(
        self,
        model: nn.Module,
        optimizer: torch.optim.Optimizer,
        saved: Mapping[str, SavedTensor],
        scalars: Mapping[str, Scalar],
        groups: list[dict[str, Any]],
    ) -> None:
        """Plan the state that `optimizer` will have.

        Args:
            saved: the checkpoint's tensors by ``fqn/key``; `scalars` likewise.
            groups: the checkpoint's ``param_groups``, parameters by name.

        Raises:
            CheckpointMismatchError: the groups hold other parameters, or state within one flat parameter differs in
                kind.
        """
        self._optimizer = optimizer
        self._members = trained_params(model, optimizer)
        self._groups = _match_groups(self._members, groups)
        self._fitted = [
            {key: _fitted(optimizer, number, key, value) for key, value in hyper.items()}
            for number, hyper in enumerate(self._groups)
        ]
        pairs = zip(self._members, self._groups, strict=True)
        self._hyper = {member.param: hyper for members, hyper in pairs for member in members}
        self._state: dict[nn.Parameter, dict[str, Any]] = {}
        self._forms: Forms = {}
        self._scalar_parts: list[tuple[str, str, nn.Parameter, torch.Tensor]] = []
        self.tensors: list[StateTensor] = []
        """To be filled: every piece is memory of the new state."""
        by_param = _by_param(saved, scalars)
        for member in (member for group in self._members for member in group):
            self._plan_member(member, by_param)

    @property
    def param_names(self) -> list[str]:
        """Names of all parameters that the optimizer steps."""
        return [fqn for group in self._members for member in group for fqn in member.shapes]

    def check(self) -> None:
        """To be called when all tensors are filled: one flat parameter has one value of each scalar.

        Raises:
            CheckpointMismatchError: scalars of one flat parameter differ between its parameters.
        """
        chosen: dict[tuple[nn.Parameter, str], tuple[str, torch.Tensor]] = {}
        for fqn, key, param, value in self._scalar_parts:
            first_fqn, first = chosen.setdefault((param, key), (fqn, value))
            if not torch.equal(first, value):
                raise CheckpointMismatchError(
                    f"optimizer state {key!r} is {first.item()} for {first_fqn!r} and {value.item()} for {fqn!r}, "
                    "which share one flat parameter here: wrap them in different units"
                )
        for (param, key), (_, value) in chosen.items():
            self._state[param][key] = value

    def apply(self) -> None:
        """Put the new state and hyper-parameters in place."""
        for group, hyper in zip(self._optimizer.param_groups, self._fitted, strict=True):
            for key, value in hyper.items():
                if isinstance(group.get(key), torch.Tensor):  # a capturable optimizer's lr has to stay the tensor it is
                    group[key].copy_(value)
                else:
                    group[key] = value
        for param, state in self._state.items():
            self._optimizer.state[param] = state
        for param in [p for p in self._optimizer.state if isinstance(p, torch.Tensor) and p not in self._state]:
            del self._optimizer.state[param]

    def _plan_member(self, member: TrainedParam, by_param: dict[str, dict[str, SavedTensor | Scalar]]) -> None:
        present = [fqn for fqn in member.shapes if fqn in by_param]
        if not present:
            return
        absent = [fqn for fqn in member.shapes if fqn not in by_param]
        keys = set(by_param[present[0]])
        odd = absent[:1] or [fqn for fqn in present if set(by_param[fqn]) != keys][:1]
        if odd:
            raise CheckpointMismatchError(
                f"the checkpoint holds optimizer state {sorted(keys)} for {present[0]!r} and "
                f"{sorted(by_param.get(odd[0], ()))} for {odd[0]!r}, which share one flat parameter here: wrap them in "
                "different units"
            )
        state: dict[str, Any] = {}
        for key in by_param[present[0]]:
            values = {fqn: by_param[fqn][key] for fqn in present}
            self._plan_value(member, key, values, state)
        self._state[member.param] = state

    def _plan_value(
        self, member: TrainedParam, key: str, values: dict[str, SavedTensor | Scalar], state: dict[str, Any]
    ) -> None:
        fqn, first = next(iter(values.items()))
        if not isinstance(first, SavedTensor):
            other = next((f for f, v in values.items() if v != first), None)
            if other is not None:
                raise CheckpointMismatchError(
                    f"optimizer state {key!r} is {first} for {fqn!r} and {values[other]} for {other!r}, which share "
                    "one flat parameter here: wrap them in different units"
                )
            state[key] = first
            return
        kinds = {v.dtype if isinstance(v, SavedTensor) else type(v) for v in values.values()}
        if len(kinds) > 1:
            raise CheckpointMismatchError(f"optimizer state {key!r} differs in dtype between {sorted(values)}")
        if not _elementwise(member, key, values):
            device = self._scalar_device(member.param, key)
            for name in values:
                value = torch.zeros((), dtype=first.dtype, device=device)
                self._scalar_parts.append((name, key, member.param, value))
                self.tensors.append(replicated(f"{name}/{key}", value))
            state[key] = None  # keeps the order of keys; set by check
            return
        if member.layout is None:
            if isinstance(member.param, DTensor) and first.shape == tuple(member.param.shape):
                state[key] = torch.zeros_like(member.param.detach(), dtype=first.dtype)
            else:
                state[key] = torch.zeros(first.shape, dtype=first.dtype, device=member.param.device)
        else:
            wrong = next((f for f, v in values.items() if v.shape != member.shapes[f]), None)
            if wrong is not None:
                raise CheckpointMismatchError(
                    f"optimizer state {key!r} of {wrong!r} has shape {values[wrong].shape} in the checkpoint, the "
                    f"parameter has {member.shapes[wrong]}"
                )
            state[key] = torch.zeros_like(member.param, dtype=first.dtype, requires_grad=False)
        self.tensors += [member.state_tensor(name, key, state[key], self._forms) for name in values]

    def _scalar_device(self, param: nn.Parameter, key: str) -> torch.device:
        # torch's optimizers keep step on the CPU unless capturable or fused, where it sits beside the parameter; the
        # checkpoint's flags are those that will hold.
        hyper = self._hyper[param]
        beside = key != "step" or hyper.get("capturable") or hyper.get("fused")
        return param.device if beside else torch.device("cpu")


def _elementwise(member: TrainedParam, key: str, values: Mapping[str, SavedTensor]) -> bool:
    """Whether a state value has an element for each element of its parameter, rather than one for all of it."""
    if member.layout is None or any(value.shape != () for value in values.values()):
        return any(value.shape != () for value in values.values())
    # Of parameters without dimensions a single element could be either: go by the names that torch.optim uses.
    return key not in TORCH_SCALARS and all(shape == () for shape in member.shapes.values())


def _by_param(
    saved: Mapping[str, SavedTensor], scalars: Mapping[str, Scalar]
) -> dict[str, dict[str, SavedTensor | Scalar]]:
    found: dict[str, dict[str, SavedTensor | Scalar]] = {}
    for name, value in [*saved.items(), *scalars.items()]:
        fqn, key = name.rsplit("/", 1)
        found.setdefault(fqn, {})[key] = value
    return found


def check_saved(groups: Any, scalars: Any) -> None:
    """Raise unless what a checkpoint has of an optimizer, beside tensors, is of the kinds that it has to be.

    Raises:
        CheckpointMismatchError: it is not.
    """
    if not isinstance(groups, list) or not all(isinstance(group, dict) for group in groups):
        raise CheckpointMismatchError(f"its optimizer's param_groups are {groups!r:.40}, no list of groups")
    unnamed = next((group.get("params") for group in groups if not _are_names(group.get("params"))), ...)
    if unnamed is not ...:
        raise CheckpointMismatchError(
            f"its optimizer's parameters are {'not listed' if unnamed is None else f'listed as {unnamed!r:.40}'}, not "
            "by their names, as in optimizer.state_dict(): load it with optimizer=None, and save the optimizer by "
            "hpcfsdp.checkpoint.save, or as torch's get_state_dict gives it"
        )
    if not isinstance(scalars, dict):
        raise CheckpointMismatchError(f"its optimizer's scalars are {scalars!r:.40}, no values by names")
    for name, value in scalars.items():
        if "/" not in name or not isinstance(value, (bool, int, float)):
            raise CheckpointMismatchError(
                f"its optimizer's state {name!r:.80} is {value!r:.40}, no number of a parameter"
            )


def _fitted(optimizer: torch.optim.Optimizer, number: int, key: str, value: Any) -> Any:
    """A saved hyper-parameter as a group of this optimizer is to have it: of the kind that it has there now.

    Raises:
        CheckpointMismatchError: it cannot be.
    """
    group = optimizer.param_groups[number]
    if key not in group:
        return value
    now, fits = group[key], True
    if isinstance(now, torch.Tensor):
        try:
            return torch.tensor(value, dtype=now.dtype).expand(now.shape)
        except (RuntimeError, TypeError, ValueError):
            fits = False
    elif isinstance(now, tuple):
        fits = isinstance(value, (list, tuple)) and len(value) == len(now) and all(map(_are_alike, now, value))
        value = tuple(value) if fits else value
    elif value is None or now is None:  # as foreach=None, which lets torch choose
        fits = value is now or now is None or isinstance(now, bool) or optimizer.defaults.get(key, now) is None
    else:
        fits = _are_alike(now, value)
    if not fits:
        raise CheckpointMismatchError(
            f"its optimizer's group {number} has {key}={value!r:.60}, the optimizer here {now!r:.60}: it is of another "
            "kind of optimizer, or damaged; load it with optimizer=None"
        )
    return value


def _are_alike(now: Any, value: Any) -> bool:
    """Whether a value may stand where another one is: both are numbers, or of the same type; None is anything."""
    if now is None:
        return True
    number = (bool, int, float)
    return isinstance(value, number) if isinstance(now, number) else type(value) is type(now)


def _match_groups(members: list[list[TrainedParam]], saved: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """The saved hyper-parameters for each of the optimizer's groups."""
    here = [sorted(fqn for member in group for fqn in member.shapes) for group in members]
    there = [sorted(group["params"]) for group in saved]
    if here != there:
        names_here, names_there = {n for g in here for n in g}, {n for g in there for n in g}
        raise CheckpointMismatchError(
            f"the optimizer has {len(here)} group(s) of {[len(g) for g in here]} parameters, the checkpoint "
            f"{len(there)} of {[len(g) for g in there]}"
            + _listed("; in the checkpoint only: ", names_there - names_here)
            + _listed("; in the optimizer only: ", names_here - names_there)
        )
    return [{key: value for key, value in group.items() if key != "params"} for group in saved]


def _are_names(params: object) -> bool:
    return isinstance(params, list) and all(isinstance(name, str) for name in params)


def _listed(title: str, names: set[str]) -> str:
    return title + ", ".join(sorted(names)) if names else ""
