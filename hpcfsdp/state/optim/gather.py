"""State of one flat parameter brought together: first what ranks hold is compared, then tensors are gathered."""

from __future__ import annotations

import hashlib
import pickle
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.state.optim.keys import FSDPParamInfo, check_missing_keys_on_rank, sorted_items
from hpcfsdp.state.transfer import Form, OnFirst, Parts, collect
from hpcfsdp.tensor.sharded import properties_of


class PosDimTensorInfo(NamedTuple):
    """What is known of a tensor with dimensions without having it."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    carrier: str = "Tensor"
    """The class of what holds it."""


@dataclass
class StateInfo:
    """The state of one parameter on one rank, without its large tensors.

    Attributes:
        tensors: with dimensions, by the name of the state.
        scalar_tensors: without dimensions, in host memory.
        non_tensors: all else.
    """

    tensors: dict[str, PosDimTensorInfo] = field(default_factory=dict)
    scalar_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateInfo:
        """That of a parameter's state, names in order."""
        info = cls()
        for name, value in sorted_items(state):
            described = describe(value)
            if described is not None and described[0]:
                info.tensors[name] = PosDimTensorInfo(*described, type(value).__name__)
            elif is_zero_dim_tensor(value):
                info.scalar_tensors[name] = value.detach().cpu()
            else:
                info.non_tensors[name] = tellable(value)
        return info

    def kinds(self, *, with_shapes: bool) -> dict[str, tuple[Any, ...]]:
        """What each state is, in a form that can be compared and read; of tensors the shape only if asked for."""
        tensors = {
            name: (info.dtype, *((info.carrier, "of shape", info.shape) if with_shapes else ()))
            for name, info in self.tensors.items()
        }
        scalars = {name: (value.dtype, value.item()) for name, value in self.scalar_tensors.items()}
        return {
            **{name: ("a tensor", *told) for name, told in tensors.items()},
            **{name: ("a scalar", *told) for name, told in scalars.items()},
            **{name: (f"a {type(value).__name__}", value) for name, value in self.non_tensors.items()},
        }


@dataclass
class ConsolidatedOptimState:
    """The state of one flat parameter, all ranks' together.

    Attributes:
        tensor_state: tensors with dimensions by name, for each parameter what a state dict shows of it; None where this
            rank shows nothing.
        zero_dim_tensor_state, non_tensor_state: this rank's, which are those of all ranks.
    """

    tensor_state: dict[str, list[Any]] = field(default_factory=dict)
    zero_dim_tensor_state: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensor_state: dict[str, Any] = field(default_factory=dict)


class Ranks(Protocol):
    """Ranks that can tell each other something; a ``Communicator`` is one."""

    rank: int
    size: int

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks."""


def describe(value: Any) -> tuple[tuple[int, ...], torch.dtype] | None:
    """Shape and dtype of a state value, the whole of it where it is distributed; None for what is no tensor."""
    if isinstance(value, OnFirst):
        return tuple(value.shape), value.dtype
    return properties_of(value) if isinstance(value, torch.Tensor) else None


def is_zero_dim_tensor(value: Any) -> bool:
    """Whether a state value is one number in a tensor, as the count of steps."""
    return isinstance(value, torch.Tensor) and properties_of(value)[0] == ()


@dataclass
class RankState:
    """What one rank tells all others before any tensor moves.

    Attributes:
        groups: the optimizer's, each with the names of its sharded parameters, in order, and its hyper-parameters.
        states: by the name of the first parameter that an entry is for; sharded ones alone.
        empty: names of parameters of which the rank's shard holds nothing: it need not have state for them.
    """

    groups: list[tuple[list[str], dict[str, Any]]]
    states: dict[str, StateInfo]
    empty: set[str] = field(default_factory=set)

    def digest(self) -> str:
        """A short text that ranks share which have the same."""
        states = {name: info.kinds(with_shapes=True) for name, info in self.states.items()}
        text = repr(_plain((self.groups, states, self.empty)))
        return hashlib.blake2b(text.encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """A value in a form whose text is the same for equal values, which is not so for pickles."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist()
    if isinstance(value, Mapping):
        return sorted((repr(key), _plain(inner)) for key, inner in value.items())
    if isinstance(value, (set, frozenset)):
        return sorted(map(repr, value))
    if isinstance(value, (list, tuple)):
        return [type(value).__name__, *map(_plain, value)]
    if isinstance(value, (bool, int, float, complex, str, bytes, type(None), torch.dtype)):
        return value
    return pickle.dumps(value)


class Untold(str):
    """Stands for a value that cannot be sent to other ranks."""


def tellable(value: Any) -> Any:
    """What other ranks are told of a value: a user's own that cannot be pickled by the name of its type."""
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    try:
        pickle.dumps(value)
    except Exception:  # whatever a class of a user's own raises
        return Untold(f"<{type(value).__qualname__}, which cannot be pickled>")
    return value


def allgather_state_info(ranks: Ranks, mine: RankState) -> list[RankState]:
    """Collective over `ranks`. What each rank has.

    First they exchange a hash. Where all have the same, which is the rule for flat parameters, nothing else is sent.
    """
    with profile(Phase.OBJECT_GATHER):
        if len(set(ranks.all_gather_object(mine.digest()))) == 1:
            return [mine] * ranks.size
        return ranks.all_gather_object(mine)


def convert_all_state_info(gathered: Sequence[RankState], *, with_shapes: bool = False) -> dict[str, StateInfo]:
    """The states of all ranks together, compared.

    Args:
        gathered: by rank.
        with_shapes: whether shapes of tensors must be the same; those of shards need not be.

    Raises:
        StateDictError: a rank has no state where another one has, or another one, with both and both ranks.
    """
    if all(one is gathered[0] for one in gathered):
        return dict(gathered[0].states)
    found: dict[str, tuple[int, StateInfo]] = {}
    for rank, one in enumerate(gathered):
        for name, info in one.states.items():
            if name in one.empty:
                continue
            if name in found:
                _check_same(name, *found[name], rank, info, with_shapes=with_shapes)
            else:
                found[name] = rank, info
    for rank, one in enumerate(gathered):
        expected = {name: other for name, (other, _) in found.items() if name not in one.empty}
        check_missing_keys_on_rank(rank, one.states, expected, "optimizer state")
    return {name: info for name, (_, info) in found.items()}


def check_same_groups(gathered: Sequence[RankState]) -> None:
    """Refuse ranks whose optimizers have other groups, of other parameters or with other hyper-parameters.

    Raises:
        StateDictError: with the first difference, and both ranks.
    """
    first = gathered[0].groups
    for rank, one in enumerate(gathered):
        if one.groups is first:
            continue
        where = f"of rank {rank}'s optimizer"
        if len(one.groups) != len(first):
            raise StateDictError(f"there are {len(one.groups)} parameter groups {where}, and {len(first)} of rank 0's")
        for place, ((names, hyper), (first_names, first_hyper)) in enumerate(zip(one.groups, first, strict=True)):
            odd = sorted(set(names) ^ set(first_names))
            if odd:
                has, lacks = (rank, 0) if odd[0] in names else (0, rank)
                raise StateDictError(
                    f"{odd[0]!r} is in parameter group {place} of rank {has}'s optimizer, and not of rank {lacks}'s"
                )
            for key in sorted(hyper.keys() | first_hyper.keys()):
                here, there = hyper.get(key), first_hyper.get(key)
                if (key in hyper) != (key in first_hyper) or not same(here, there):
                    raise StateDictError(
                        f"{key!r} in parameter group {place} {where} is {_value(hyper, key)}, of rank 0's "
                        f"{_value(first_hyper, key)}" + (f" (the group of {names[0]!r})" if names else "")
                    )


def _value(hyper: Mapping[str, Any], key: str) -> str:
    return repr(hyper[key]) if key in hyper else "missing"


def _check_same(
    name: str, first_rank: int, first: StateInfo, rank: int, other: StateInfo, *, with_shapes: bool
) -> None:
    here, there = first.kinds(with_shapes=with_shapes), other.kinds(with_shapes=with_shapes)
    for key in sorted(here.keys() | there.keys()):
        one, two = here.get(key), there.get(key)
        if not same(one, two):
            raise StateDictError(
                f"optimizer state {key!r} of {name!r} differs between ranks: rank {first_rank} has {_said(one)}, rank "
                f"{rank} has {_said(two)}"
            )


def same(one: Any, other: Any) -> bool:
    """Whether two values of any kind are equal; not-a-number equals itself."""
    if isinstance(one, torch.Tensor) or isinstance(other, torch.Tensor):
        return type(one) is type(other) and one.dtype == other.dtype and _same_values(one.cpu(), other.cpu())
    if isinstance(one, (list, tuple)) and isinstance(other, (list, tuple)):
        return len(one) == len(other) and all(map(same, one, other))
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(same(one[key], other[key]) for key in one)
    try:
        return bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
    except Exception:  # a value of a user's own class that cannot be compared
        return repr(one) == repr(other)


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _said(kind: tuple[Any, ...] | None) -> str:
    return "none" if kind is None else " ".join(map(str, kind))


def communicate_optim_state(
    info: FSDPParamInfo, flat_param_state: Mapping[str, Any], form: Form
) -> ConsolidatedOptimState:
    """Collective over ``info.comm``. The state of a flat parameter, of which each rank holds its shard.

    Args:
        flat_param_state: the optimizer's; of all ranks alike, but for the values of tensors with dimensions.
    """
    state = ConsolidatedOptimState()
    for name, value in sorted_items(flat_param_state):
        if is_zero_dim_tensor(value):
            state.zero_dim_tensor_state[name] = value.detach().to(form.device(value.device), copy=True)
        elif isinstance(value, torch.Tensor):
            parts = Parts.of_shard(info.layout, value.detach())
            with profile(Phase.TENSOR_ALL_GATHER, value.nbytes):
                state.tensor_state[name] = collect(info.groups, parts, value.dtype, info.flat.parameter.device, form)
        else:
            state.non_tensor_state[name] = value
    return state


def check_state_shapes(info: FSDPParamInfo, fqn: str, state: Mapping[str, Any]) -> None:
    """Refuse state that has neither one value nor one for each element of what the optimizer steps.

    Args:
        fqn: of a parameter that is stepped by itself, or of the first one in a flat parameter.

    Raises:
        StateDictError: with both shapes.
    """
    if info.shows_whole:
        return
    extent = info.layout.param_extent(fqn, info.comm.rank) if info.flat.use_orig_params else None
    shape = (extent.numel if extent else 0,) if info.flat.use_orig_params else tuple(info.flat.parameter.shape)
    for name, value in state.items():
        if isinstance(value, torch.Tensor) and value.dim() > 0 and tuple(value.shape) != shape:
            raise StateDictError(
                f"optimizer state {name!r} of {fqn!r} has shape {tuple(value.shape)}, neither a scalar nor that of "
                f"what the optimizer steps, {shape}: it cannot be told which part of it belongs to which element"
            )


def allgather_orig_param_states(
    info: FSDPParamInfo,
    fqns: Iterable[str],
    name: str,
    dtype: torch.dtype,
    states: Mapping[str, Mapping[str, Any]],
    form: Form,
) -> dict[str, Any]:
    """Collective over ``info.comm``. One state of several parameters of a flat parameter, each stepped by itself.

    Args:
        fqns: the parameters, on all ranks alike.
        dtype: of the state.
        states: this rank's, by parameter; it may lack those of which its shard holds nothing.

    Returns:
        What the state dict shows, by parameter; None where this rank shows nothing.
    """
    nothing = torch.empty(0, dtype=dtype, device=info.flat.parameter.device)
    runs: list[torch.Tensor | None] = [None] * len(info.layout.slots)
    for fqn in fqns:
        value = states.get(fqn, {}).get(name)
        runs[info.param_indices[fqn]] = nothing if value is None else value.detach().reshape(-1)
    parts = Parts.of_runs(info.layout, runs)
    with profile(Phase.TENSOR_ALL_GATHER, sum(run.nbytes for run in runs if run is not None)):
        found = collect(info.groups, parts, dtype, nothing.device, form)
    return {info.layout.slots[index].fqn: found[index] for index in parts.present}


def gather_all_orig_param_state(
    info: FSDPParamInfo, states: Mapping[str, Mapping[str, Any]], merged: Mapping[str, StateInfo], form: Form
) -> dict[str, ConsolidatedOptimState]:
    """Collective over ``info.comm``. The states of the parameters of one flat parameter, each stepped by itself.

    Args:
        states: this rank's, by parameter.
        merged: those of all ranks, as ``convert_all_state_info`` has found them.
    """
    found = {fqn: ConsolidatedOptimState() for fqn in info.param_indices if fqn in merged}
    wanted: dict[tuple[str, torch.dtype], list[str]] = {}
    for fqn, state in found.items():
        # What a rank that holds nothing of a parameter has for it, nobody has compared.
        held = states.get(fqn, {})
        own = {} if info.is_empty_on(fqn, info.comm.rank) else held
        device = form.device(info.flat.parameter.device)
        for name, scalar in merged[fqn].scalar_tensors.items():
            value = own.get(name, scalar)
            state.zero_dim_tensor_state[name] = value.detach().to(form.device(value.device), copy=True)
        for name, told in merged[fqn].non_tensors.items():
            state.non_tensor_state[name] = (held if isinstance(told, Untold) else own).get(name, told)
        for name, described in merged[fqn].tensors.items():
            if info.shows_whole:  # nothing is sharded, so state may have any shape
                state.tensor_state[name] = [own[name].detach().to(device, copy=True)]
                continue
            wanted.setdefault((name, described.dtype), []).append(fqn)
    for (name, dtype), fqns in sorted(wanted.items(), key=lambda item: (item[0][0], str(item[0][1]))):
        for fqn, value in allgather_orig_param_states(info, fqns, name, dtype, states, form).items():
            found[fqn].tensor_state[name] = [value]
    return found
