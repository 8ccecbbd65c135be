"""What ranks tell each other of their optimizers' state before any tensor moves, and what has to be the same."""

from __future__ import annotations

import hashlib
import pickle
import zlib
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple, Protocol

import torch

from hpcfsdp.errors import StateDictError
from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.state.optim.keys import check_missing_keys_on_rank, sorted_items
from hpcfsdp.state.transfer import OnFirst
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
        unsharded: of all other parameters.
    """

    groups: list[tuple[list[str], dict[str, Any]]]
    states: dict[str, StateInfo]
    empty: set[str] = field(default_factory=set)
    unsharded: dict[str, StateInfo] = field(default_factory=dict)

    def digest(self) -> str:
        """A short text that ranks share which have the same."""
        states, unsharded = (
            {name: info.kinds(with_shapes=True) for name, info in infos.items()}
            for infos in (self.states, self.unsharded)
        )
        return _digest((self.groups, states, self.empty, unsharded))


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(_plain(value)).encode(), digest_size=16).hexdigest()


def _plain(value: Any) -> Any:
    """A value in a form whose text is the same for equal values, which is not so for pickles."""
    if isinstance(value, torch.Tensor):
        return "tensor", str(value.dtype), tuple(value.shape), value.tolist()  # they are small, see `check_nested`
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
    """What other ranks are told of a value: a user's own that cannot be pickled by the name of its type.

    Tensors in it are brought to host memory: a pickle would bring them to the device that they were on.
    """
    if isinstance(value, (bool, int, float, str, type(None))):
        return value
    if next(_tensors_in(value), None) is not None:
        value = on_host(value)
    try:
        pickle.dumps(value)
    except Exception:  # whatever a class of a user's own raises
        return Untold(f"<{type(value).__qualname__}, which cannot be pickled>")
    return value


def on_host(value: Any) -> Any:
    """A value in which tensors, in lists, tuples and dicts too, lie in host memory."""
    if isinstance(value, torch.Tensor):
        return value.detach().cpu()
    if type(value) in (list, tuple):
        return type(value)(map(on_host, value))
    return {key: on_host(inner) for key, inner in value.items()} if type(value) is dict else value


def _tensors_in(value: Any) -> Iterator[torch.Tensor]:
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, (list, tuple, set, frozenset, Mapping)):
        for inner in value.values() if isinstance(value, Mapping) else value:
            yield from _tensors_in(inner)


_NESTED_NUMEL = 1 << 16


def check_nested(fqn: str, state: Mapping[str, Any]) -> None:
    """Refuse values with large tensors in them, as histories of gradients: they are neither gathered nor divided.

    Raises:
        StateDictError: with the name of the state, and how many elements there are.
    """
    for name, value in state.items():
        if isinstance(value, (torch.Tensor, bool, int, float, str, type(None))):
            continue
        numel = sum(tensor.numel() for tensor in _tensors_in(value))
        if numel > _NESTED_NUMEL:
            raise StateDictError(
                f"optimizer state {name!r} of {fqn!r} is a {type(value).__name__} of tensors with {numel} elements: it "
                "cannot be told which part of them belongs to which element of the parameter"
            )


def allgather_state_info(ranks: Ranks, mine: RankState) -> list[RankState]:
    """Collective over `ranks`. What each rank has.

    First they exchange hashes. Where all have the same, which is the rule for flat parameters, nothing else is sent.
    Ranks have different ones of the original parameters; groups, which name them all, are sent only if they differ.
    """
    with profile(Phase.OBJECT_GATHER):
        told = ranks.all_gather_object((mine.digest(), _digest(mine.groups)))
        if len({whole for whole, _ in told}) == 1:
            return [mine] * ranks.size
        same_groups = len({groups for _, groups in told}) == 1
        sent = replace(mine, groups=[]) if same_groups else mine
        texts = ranks.all_gather_object(zlib.compress(pickle.dumps(sent)))  # names are much alike
        gathered = [pickle.loads(zlib.decompress(text)) for text in texts]
        return [replace(one, groups=mine.groups) for one in gathered] if same_groups else gathered


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


def differing_unsharded(gathered: Sequence[RankState]) -> str | None:
    """In words, where ranks have different state of a parameter that is not sharded; None if nowhere."""
    first = gathered[0].unsharded
    for rank, one in enumerate(gathered):
        for name in sorted(first.keys() | one.unsharded.keys()):
            kinds = [infos[name].kinds(with_shapes=True) if name in infos else None for infos in (first, one.unsharded)]
            if not same(*kinds):
                return f"{name!r} on rank 0 and rank {rank}"
    return None


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
        equal = bool(one == other) or bool(one != one and other != other)  # noqa: PLR0124
        return equal or (_has_no_equality(one) and type(one) is type(other) and _plain(one) == _plain(other))
    except Exception:  # a value of a user's own class that cannot be compared
        return repr(one) == repr(other)


def _has_no_equality(value: Any) -> bool:
    """Whether objects of its class equal themselves alone."""
    return type(value).__eq__ is object.__eq__


def _same_values(one: torch.Tensor, other: torch.Tensor) -> bool:
    if one.shape != other.shape:
        return False
    return bool(((one == other) | ((one != one) & (other != other))).all())  # noqa: PLR0124


def _said(kind: tuple[Any, ...] | None) -> str:
    return "none" if kind is None else " ".join(map(str, kind))
