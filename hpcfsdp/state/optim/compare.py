"""The state of all ranks' optimizers, without large tensors: exchanged and compared before any tensor moves."""

from __future__ import annotations

import itertools
import pickle
import zlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import numpy as np
import torch

from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.comm.communicator import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.output.profile import Phase, profile
from hpcfsdp.state.optim.keys import check_missing_keys_on_rank, sorted_items
from hpcfsdp.state.optim.values import digest, picklable, same
from hpcfsdp.state.tensors import shape_and_dtype


class PosDimTensorInfo(NamedTuple):
    """The description of a tensor with dimensions; `carrier` is the name of its class."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    carrier: str = "Tensor"


@dataclass
class StateInfo:
    """The state of one parameter on one rank, by name: tensors with dimensions, those without on the host, others."""

    tensors: dict[str, PosDimTensorInfo] = field(default_factory=dict)
    scalar_tensors: dict[str, torch.Tensor] = field(default_factory=dict)
    non_tensors: dict[str, Any] = field(default_factory=dict)

    @classmethod
    def of(cls, state: Mapping[str, Any]) -> StateInfo:
        """Describe a parameter's state, names in order."""
        info = cls()
        for name, value in sorted_items(state):
            described = shape_and_dtype(value)
            if described is not None and described[0]:
                info.tensors[name] = PosDimTensorInfo(*described, type(value).__name__)
            elif is_zero_dim_tensor(value):
                info.scalar_tensors[name] = value.detach().cpu()
            else:
                info.non_tensors[name] = picklable(value)
        return info

    def kinds(self, *, with_shapes: bool) -> dict[str, tuple[Any, ...]]:
        """Return each state as a tuple that can be compared and printed; of tensors the shape only if asked for."""
        found: dict[str, tuple[Any, ...]] = {
            name: ("a tensor", info.dtype, *((info.carrier, "of shape", info.shape) if with_shapes else ()))
            for name, info in self.tensors.items()
        }
        found |= {name: ("a scalar", value.dtype, value.item()) for name, value in self.scalar_tensors.items()}
        return found | {name: (f"a {type(value).__name__}", value) for name, value in self.non_tensors.items()}


def is_zero_dim_tensor(value: Any) -> bool:
    """Return whether a state value is one number in a tensor, as the count of steps."""
    return isinstance(value, torch.Tensor) and shape_and_dtype(value)[0] == ()


# Codes for a parameter without state; other codes are places of a ``StateInfo`` in a list.
_HOLDS_NOTHING, _LACKS = -2, -1

Groups = list[tuple[list[str], dict[str, Any]]]


@dataclass
class RankState:
    """The state of one rank's optimizer, as a message to all others. A part is pickled and sent only if ranks differ.

    Many parameters have equal state: it is stored once, and each parameter has a number that refers to it.
    """

    groups: Groups  # each with the names of its sharded parameters, in order, and its hyper-parameters
    states: dict[str, StateInfo]  # by the name of the first parameter that an entry is for; of sharded parameters alone
    empty: set[str] = field(default_factory=set)  # no elements in the shard: the rank needs no state, and sends none
    unsharded: dict[str, StateInfo] = field(default_factory=dict)  # of all other parameters
    names: Sequence[str] = ()  # of all sharded parameters, as in the model, by default those in `states` and `empty`
    with_shapes: bool = False  # whether tensors must have the same shape on all ranks; those of shards need not
    order: Sequence[Any] = ()  # of groups, parameters and keys in this rank's optimizer; ranks may have different ones

    def __post_init__(self) -> None:
        self.names = list(self.names) or sorted({*self.states, *self.empty})
        self._places: dict[bytes, int] = {}
        self.infos: list[StateInfo] = []  # the different states of sharded parameters
        self.codes = np.full(len(self.names), _LACKS, np.int32)  # by name, the place in `infos`, or why there is none
        for index, name in enumerate(self.names):
            if name in self.empty:
                self.codes[index] = _HOLDS_NOTHING
            elif name in self.states:
                info = self.states[name]
                kind = digest(info.kinds(with_shapes=self.with_shapes))
                self.codes[index] = self._places.setdefault(kind, len(self._places))
                if self.codes[index] == len(self.infos):
                    self.infos.append(info)
        self.digests = {
            "groups": digest(self.groups),
            "names": digest(self.names),
            "states": digest((list(self._places), self.codes.tobytes())),
            "unsharded": digest({name: info.kinds(with_shapes=True) for name, info in self.unsharded.items()}),
            "order": digest(self.order),
        }

    def text(self, part: str) -> bytes:
        """Return the pickle of a part. Raise what a user's own values raise when they are pickled."""
        return b"" if part == "order" else pickle.dumps(self.content(part))  # enough that the order differs

    def content(self, part: str) -> Any:
        """Return a part; as "states" digests and pickles of the different ones, and codes."""
        if part == "states":
            return [*zip(self._places, map(pickle.dumps, self.infos), strict=True)], self.codes
        return getattr(self, part)


class GatheredState:
    """The states of all ranks; parts that differ are `received`, compressed, and unpickled when first read."""

    def __init__(self, mine: RankState, received: Sequence[Mapping[str, bytes]]) -> None:
        self._mine, self._received, self.with_shapes = mine, received, mine.with_shapes

    @cached_property
    def groups(self) -> list[Groups]:
        """The groups of each rank's optimizer; one object where they are the same."""
        return self._by_rank("groups")

    @cached_property
    def unsharded(self) -> list[dict[str, StateInfo]]:
        """The states of unsharded parameters, by rank."""
        return self._by_rank("unsharded")

    @property
    def has_one_order(self) -> bool:
        return "order" not in self._received[0]

    @cached_property
    def states(self) -> tuple[list[str], list[StateInfo], np.ndarray]:
        """Names of sharded parameters, different states, and codes, ranks x names; one row if ranks are equal."""
        if not {"names", "states"} & self._received[0].keys():
            return list(self._mine.names), self._mine.infos, self._mine.codes[None]
        names_of = self._by_rank("names")
        different = {id(own): own for own in names_of}
        names = list(dict.fromkeys(itertools.chain.from_iterable(different.values())))
        column = {name: index for index, name in enumerate(names)}
        columns = {key: [column[name] for name in own] for key, own in different.items()}
        codes = np.full((len(names_of), len(names)), _LACKS, np.int32)
        infos: list[StateInfo] = []
        places: dict[bytes, int] = {}
        for rank, (own, (table, own_codes)) in enumerate(zip(names_of, self._by_rank("states"), strict=True)):
            for kind, text in table:
                if kind not in places:
                    places[kind] = len(infos)
                    infos.append(_unpickled(rank, text))
            # The negative codes index the last two elements, which are these codes themselves.
            common = np.array([*(places[kind] for kind, _ in table), _HOLDS_NOTHING, _LACKS], np.int32)
            codes[rank, columns[id(own)]] = common[own_codes]
        return names, infos, codes

    def _by_rank(self, part: str) -> list[Any]:
        if part not in self._received[0]:
            return [self._mine.content(part)] * len(self._received)
        known: dict[bytes, Any] = {}
        for rank, texts in enumerate(self._received):
            if texts[part] not in known:
                known[texts[part]] = _unpickled(rank, zlib.decompress(texts[part]))
        return [known[texts[part]] for texts in self._received]


def _unpickled(rank: int, text: bytes) -> Any:
    try:
        return pickle.loads(text)
    except Exception as error:  # whatever a class of a user's own raises, perhaps on this rank alone
        raise StateDictError(
            f"the optimizer's state or groups of rank {rank} cannot be unpickled: {type(error).__name__}: {error}: "
            "all ranks must be able to import the modules that define its classes"
        ) from error


def allgather_state_info(
    ranks: Communicator | Grid, mine: RankState, digests: Sequence[Mapping[str, bytes]] | None = None
) -> GatheredState:
    """Return the states of all ranks. Collective over `ranks`.

    Ranks exchange `digests`, unless they have done so, and then the parts that differ: with flat parameters usually
    none, with original parameters the states, as ranks have shards of different ones.
    """
    with profile(Phase.OBJECT_GATHER):
        digests = digests or ranks.all_gather_object(mine.digests)
        differing = [part for part in mine.digests if len({each[part] for each in digests}) > 1]
        if not differing:
            return GatheredState(mine, [{}] * ranks.size)
        # Names are much alike, and so are the codes of consecutive parameters.
        with raise_together(ranks) as exchange:
            exchange.mine = {part: zlib.compress(mine.text(part)) for part in differing}
        return GatheredState(mine, exchange.everyone)


def convert_all_state_info(gathered: GatheredState) -> dict[str, StateInfo]:
    """Return the states of all ranks together. Refuse those that differ, or that a rank lacks, by rank and name."""
    names, infos, codes = gathered.states
    has = codes >= 0
    first_rank = has.argmax(axis=0)
    first = codes[first_rank, np.arange(len(names))]
    compared: set[tuple[int, int]] = set()
    for rank, index in zip(*np.nonzero(has & (codes != first)), strict=True):
        pair = int(first[index]), int(codes[rank, index])
        if pair not in compared:  # digests of equal values can differ
            ranks = int(first_rank[index]), int(rank)
            _check_same(names[index], ranks, infos[pair[0]], infos[pair[1]], with_shapes=gathered.with_shapes)
            compared.add(pair)
    for rank, lacking in enumerate((codes == _LACKS) & has.any(axis=0)):
        expected = {names[index]: int(first_rank[index]) for index in np.nonzero(lacking)[0]}
        check_missing_keys_on_rank(rank, (), expected)
    return {name: infos[code] for name, code in zip(names, first.tolist(), strict=True) if code >= 0}


def differing_unsharded(gathered: GatheredState) -> str | None:
    """Describe the first unsharded parameter that has different state on two ranks; None if there is none."""
    first, *others = gathered.unsharded
    for rank, one in enumerate(others, 1):
        if one is first:
            continue
        for name in sorted(first.keys() | one.keys()):
            kinds = [infos[name].kinds(with_shapes=True) if name in infos else None for infos in (first, one)]
            if not same(*kinds):
                return f"{name!r} on rank 0 and rank {rank}"
    return None


def check_same_groups(gathered: GatheredState) -> None:
    """Check that the optimizers of all ranks have groups of the same parameters, with the same hyper-parameters."""
    first, *others = gathered.groups
    for rank, groups in enumerate(others, 1):
        if groups is first:
            continue
        if len(groups) != len(first):
            raise StateDictError(f"rank {rank}'s optimizer has {len(groups)} parameter groups, rank 0's {len(first)}")
        for place, ((names, hyper), (first_names, first_hyper)) in enumerate(zip(groups, first, strict=True)):
            odd = sorted(set(names) ^ set(first_names))
            if odd:
                has, lacks = (rank, 0) if odd[0] in names else (0, rank)
                raise StateDictError(
                    f"{odd[0]!r} is in parameter group {place} of rank {has}'s optimizer, but not of rank {lacks}'s"
                )
            for key in sorted(hyper.keys() | first_hyper.keys()):
                if (key in hyper) != (key in first_hyper) or not same(hyper[key], first_hyper[key]):
                    here, there = (repr(each[key]) if key in each else "missing" for each in (hyper, first_hyper))
                    raise StateDictError(
                        f"{key!r} in parameter group {place} of rank {rank}'s optimizer is {here}, of rank 0's {there}"
                        + (f" (the group of {names[0]!r})" if names else "")
                    )


def _check_same(name: str, ranks: tuple[int, int], first: StateInfo, other: StateInfo, *, with_shapes: bool) -> None:
    here, there = first.kinds(with_shapes=with_shapes), other.kinds(with_shapes=with_shapes)
    for key in sorted(here.keys() | there.keys()):
        one, two = here.get(key), there.get(key)
        if not same(one, two):
            raise StateDictError(
                f"optimizer state {key!r} of {name!r} differs between ranks: rank {ranks[0]} has {_describe(one)}, "
                f"rank {ranks[1]} has {_describe(two)}"
            )


def _describe(kind: tuple[Any, ...] | None) -> str:
    return "none" if kind is None else " ".join(map(str, kind))
