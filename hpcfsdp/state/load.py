"""A state dict loaded into a sharded model: read and compared as a whole on all ranks, and only then copied."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import IncompatibleKeys, ShardedTensor
from hpcfsdp.api import unshard
from hpcfsdp.api.groups import Groups
from hpcfsdp.api.wrapper import FullyShardedDataParallel
from hpcfsdp.errors import StateDictError
from hpcfsdp.flat.layout import FlatLayout, ParamSlot
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.state.ranks import ranks_of_model
from hpcfsdp.state.reading import Reading
from hpcfsdp.state.save import flat_numel
from hpcfsdp.state.transfer import OnFirst, Parts, check_blocks, fill


def refuse_assign() -> NoReturn:
    """Say why ``assign=True`` is not supported."""
    raise StateDictError(
        "load_state_dict(assign=True) would have the model hold the tensors of the state dict, and a sharded model "
        "holds its shards: load with assign=False, which copies into them"
    )


def load_model(
    module: nn.Module, state_dict: Mapping[str, Any] | None, *, strict: bool = True, from_first: bool = False
) -> Any:
    """Collective over the ranks of the model. Load a state dict, or change nothing on any rank.

    Args:
        module: a unit, or a module that holds units.
        state_dict: see ``StateDictMethods.load_state_dict``.
        strict: all names must be there, and no others.
        from_first: the first rank alone has the state dict, of whole tensors; what others pass does not count.

    Returns:
        A named tuple of missing_keys and unexpected_keys.

    Raises:
        EngineError: a unit is at work, or summoned.
        StateDictError: on every rank, see ``StateDictMethods.load_state_dict``; or there is no unit.
    """
    reading, first = Reading(module), _First(module) if from_first else None

    def read() -> None:
        values, metadata = state_dict, getattr(state_dict, "_metadata", None)
        if first is not None:
            values, metadata = first.announce(state_dict)
        reading.read(_checked(values), "", metadata)
        wrong = reading.problems(strict)
        if wrong:
            raise StateDictError("\n\t".join([f"Error(s) in loading state_dict for {type(module).__name__}:", *wrong]))

    problem = _agree(reading, read)
    if problem is not None:
        raise problem
    _commit(reading, first)
    return IncompatibleKeys(reading.missing, reading.unexpected)


def load_within(
    unit: FullyShardedDataParallel,
    state_dict: Mapping[str, Any],
    prefix: str,
    missing: list[str],
    unexpected: list[str],
    errors: list[str],
) -> None:
    """Collective over the ranks of the unit. Its part, and that of units inside, of loading a module around it.

    That module knows whether names may be missing, and raises when it has been through all of its children: what is
    missing does not keep this unit from loading the rest, and anything else that is wrong does.

    Args:
        state_dict: in which names begin with `prefix`.
        missing, unexpected, errors: added to, as by any module that loads its part.
    """
    reading = Reading(unit)

    def read() -> None:
        values = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        reading.read(values, prefix, None, within=True)
        if reading.errors:
            raise StateDictError("\n\t".join(reading.errors))

    problem = _agree(reading, read)
    missing += reading.missing
    unexpected += reading.unexpected
    if problem is None:
        _commit(reading, None)
    elif isinstance(problem, StateDictError):
        errors.append(str(problem))
    else:
        raise problem


def _checked(state_dict: Any) -> Mapping[str, Any]:
    if not isinstance(state_dict, Mapping):
        raise TypeError(f"a state dict must be a mapping of names to tensors, not {type(state_dict).__name__}")
    for key in state_dict:
        if not isinstance(key, str):
            raise TypeError(f"the names in a state dict must be str, not {key!r} of type {type(key).__name__}")
    return state_dict


class _First:
    """The first rank of a model, that alone has what is to be loaded."""

    def __init__(self, module: nn.Module) -> None:
        self._module = module
        self._rank = 0

    def announce(self, state_dict: Any) -> tuple[dict[str, Any], Any]:
        """Collective over the ranks of the model. What the first rank has, without its values, and the metadata.

        Raises:
            StateDictError: it is not all whole tensors, or units do not have their first rank in common.
            TypeError: it is no state dict, on the first rank.
        """
        units, ranks = FullyShardedDataParallel.fsdp_modules(self._module), ranks_of_model(self._module)
        is_first = units[0]._groups.is_first
        self._rank = ranks.all_gather_object(is_first).index(True)
        told, problem = None, None
        if is_first:
            try:
                told = {key: _described(key, value) for key, value in _checked(state_dict).items()}
            except (StateDictError, TypeError) as error:
                problem = error
        mine = told, getattr(state_dict, "_metadata", None), None if problem is None else str(problem)
        announced, metadata, wrong = ranks.broadcast_object(mine, self._rank)
        if wrong is not None:
            raise problem or StateDictError(f"rank {self._rank}: {wrong}")
        if any(unit._groups.is_first != is_first for unit in units):
            raise StateDictError(
                "one rank is to give the state dict to all, but units are sharded over groups with different first "
                "ranks: pass the whole state dict on every rank"
            )
        values = {
            key: OnFirst(*value, state_dict[key] if is_first else None) if is_tensor else value
            for key, (is_tensor, value) in announced.items()
        }
        return values, metadata

    def broadcast(self, source: OnFirst) -> torch.Tensor:
        """Collective over the ranks of the model. The tensor, on all of them."""
        ranks = ranks_of_model(self._module)
        if source.tensor is None:
            there = torch.empty(source.shape, dtype=source.dtype, device=ranks.device)
        else:
            there = source.tensor.detach().to(ranks.device).contiguous()
        ranks.broadcast(there, self._rank)
        return there


def _described(key: str, value: Any) -> tuple[bool, Any]:
    """Whether a value is a tensor, and its shape and dtype if it is; the value itself otherwise."""
    if isinstance(value, (ShardedTensor, DTensor)):
        raise StateDictError(
            f"{key!r} is a {type(value).__name__}: where one rank has the state dict for all, it has to have whole "
            "tensors"
        )
    return (True, (value.shape, value.dtype)) if isinstance(value, torch.Tensor) else (False, value)


def _agree(reading: Reading, read: Callable[[], None]) -> Exception | None:
    """Collective over the ranks of the model. Have all ranks read, and compare what they are about to load.

    Returns:
        What is wrong on this rank, or on another one, if anything is wrong anywhere.

    Raises:
        EngineError: a unit is at work, or summoned.
        StateDictError: there is no unit.
    """
    ranks = ranks_of_model(reading.module)
    for unit in reading.units:
        unshard.check_at_rest(unit, "load_state_dict")
    if dist.is_initialized():
        for unit in reading.units:
            unit._groups.global_ranks()  # known from here on, whatever this rank finds
    problem: Exception | None = None
    try:
        read()
        _check_blocks(reading)
    except Exception as error:
        problem = error
    everyone = ranks.all_gather_object((None if problem is None else str(problem), reading.digest))
    if problem is None:
        wrong = next((f"rank {rank}: {text}" for rank, (text, _) in enumerate(everyone) if text is not None), None)
        if wrong is None and any(digest != reading.digest for _, digest in everyone):
            wrong = _difference(ranks.all_gather_object(reading.facts))
        problem = None if wrong is None else StateDictError(wrong)
    if isinstance(problem, StateDictError):
        problem.collective = True
    return problem


def _difference(tables: list[dict[str, str]]) -> str:
    """The first thing in which ranks differ that all read without an error, in words."""
    rank = next(rank for rank, table in enumerate(tables) if table != tables[0])
    found = (
        (key, tables[0].get(key, "nothing"), tables[rank].get(key, "nothing")) for key in {**tables[0], **tables[rank]}
    )
    key, first, other = next(each for each in found if each[1] != each[2])
    return f"ranks load different state dicts: for {key!r} rank 0 has {first}, rank {rank} has {other}"


def _check_blocks(reading: Reading) -> None:
    """See that distributed tensors lie where they can be had from. Not collective.

    Raises:
        StateDictError: one that does not.
    """
    for target, source in reading.found.items():
        if not isinstance(source, (ShardedTensor, DTensor)):
            continue
        key = reading.keys[target]
        if target not in reading.sharded:
            if isinstance(source, ShardedTensor):
                raise StateDictError(f"{key!r} is not sharded in the model, and cannot be loaded from a ShardedTensor")
            continue
        check_blocks(key, source, reading.sharded[target].global_ranks())


def _commit(reading: Reading, first: _First | None) -> None:
    """Collective over the ranks of the model. Copy what has been found."""
    for unit in reading.units:
        for flat in unit._unit.flats:
            if flat in reading.found:
                _fill(unit._groups, flat, _one_slot(flat), [reading.found[flat]])
            else:
                _fill(unit._groups, flat, flat.layout, [reading.found.get(leaf) for leaf in flat.leaves])
    with torch.no_grad():
        for target, source in reading.found.items():
            if target in reading.sharded:
                continue
            if isinstance(source, OnFirst):
                assert first is not None
                source = first.broadcast(source)
            elif isinstance(source, DTensor) and not isinstance(target, DTensor):
                source = source.full_tensor()
            target.copy_(source)
        for (module, name), buffer in reading.replaced:
            setattr(module, name, buffer)
    for module, state in reading.states:
        module.set_extra_state(state)


def _fill(groups: Groups, flat: FlatParam, layout: FlatLayout, values: list[Any]) -> None:
    """Collective over the ranks of `groups`. Copy values into the shard, cut as `layout` says."""
    shard, moves = flat.parameter.data, any(isinstance(value, (ShardedTensor, DTensor, OnFirst)) for value in values)
    # Nothing may be received in memory that ranks share.
    target = shard.clone() if moves and flat.is_resident else shard
    fill(groups, Parts.of_shard(layout, target), values)
    if target is not shard:
        shard.copy_(target)


def _one_slot(flat: FlatParam) -> FlatLayout:
    """The layout of a flat parameter as one parameter."""
    layout = flat.layout
    slot = ParamSlot(unshard.flat_param_name(0), (flat_numel(layout),), 0)
    return FlatLayout((slot,), layout.dtype, layout.num_shards, layout.shard_numel)
