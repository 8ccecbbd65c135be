"""All ranks of a model, for what has to be compared before anything moves."""

from __future__ import annotations

from typing import Any

from torch import nn

from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.errors import StateDictError
from hpcfsdp.sharded.build import join_tp_group
from hpcfsdp.sharded.groups import Groups
from hpcfsdp.sharded.unit import ShardedUnit, units_in


class Grid:
    """The ranks of a pair of groups, as (shard, replicate), that have no communicator over all of them."""

    def __init__(self, shard: Communicator | Grid, replicate: Communicator) -> None:
        self._shard, self._replicate = shard, replicate
        self.rank = replicate.rank * shard.size + shard.rank
        self.size = shard.size * replicate.size
        self.device = shard.device

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collective over all ranks. Their values, replica after replica."""
        rows = self._replicate.all_gather_object(self._shard.all_gather_object(value))
        return [other for row in rows for other in row]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Collective over all ranks. The value of rank `src`."""
        replica, part = divmod(src, self._shard.size)
        if self._replicate.rank == replica:
            value = self._shard.broadcast_object(value, part)
        return self._replicate.broadcast_object(value, replica)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Collective over all ranks. `tensor` becomes what it is on rank `src`."""
        replica, part = divmod(src, self._shard.size)
        if self._replicate.rank == replica:
            self._shard.broadcast(tensor, part)
        self._replicate.broadcast(tensor, replica)


def units_of(model: nn.Module) -> list[ShardedUnit]:
    """Collective over the ranks of the model, the first time. Its units, outer ones first.

    Those that have nothing to do with tensor parallelism know of the ranks that others are parallel with, as they do
    where an outer unit holds them all.
    """
    units = units_in(model)
    tensor = next((unit.groups.tensor for unit in units if unit.groups.tensor is not None), None)
    for unit in units:
        if tensor is not None and unit.groups.tensor is None:
            join_tp_group(unit, tensor, sync_module_states=False)
    return units


def ranks_of(groups: Groups) -> Communicator | Grid:
    """Collective over them, the first time. All that share a unit, also those that have other blocks of it."""
    team = None if groups.tensor is None else groups.team()
    if team is not None:
        return team.comm
    ranks: Communicator | Grid = groups.shard
    if groups.everyone is not None:
        ranks = groups.everyone
    elif groups.replicate is not None:
        ranks = Grid(groups.shard, groups.replicate)
    return ranks if groups.tensor is None else Grid(ranks, groups.tensor.comm)


def ranks_of_replica(groups: Groups) -> Communicator | Grid:
    """Collective over them, the first time. The ranks that together have all of a unit, once."""
    if groups.tensor is None:
        return groups.shard
    return groups.holders().comm if groups.dtensor_ranks is groups.shard else Grid(groups.shard, groups.tensor.comm)


def ranks_of_model(model: nn.Module, group: Any = None) -> Communicator | Grid:
    """Collective over them, the first time. The ranks that make and load state dicts of a model together: those of its
    largest unit.

    Args:
        group: those of a process group instead.

    Raises:
        StateDictError: there is no unit in the model.
    """
    units = units_of(model)
    if not units:
        raise StateDictError(
            f"there is no FullyShardedDataParallel in this {type(model).__name__}: wrap the model first, or use the "
            "optimizer's own state_dict and load_state_dict"
        )
    if group is not None:
        return communicator_for(group, required=True)
    return ranks_of(max((unit.groups for unit in units), key=lambda groups: groups.num_ranks))
