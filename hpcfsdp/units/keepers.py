"""Who keeps gathered values from a forward to its backward, as ``reshard_after_forward`` says."""

from collections.abc import Sequence
from typing import Literal

import torch.distributed as dist

from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import ShardingError
from hpcfsdp.params.sharded_params import ShardedParams
from hpcfsdp.params.storage import Keepers
from hpcfsdp.units.unit_mesh import GroupCache

ReshardChoice = bool | int | Literal["node"]
"""What the program may pass: whether values are freed, over how many ranks they stay, or that they stay on the node."""


def check_choice(given: object, ranks: int) -> ReshardChoice:
    """Not collective. Refuse what is no choice for a unit of so many shards. 1 of them is False, all of them True."""
    if isinstance(given, bool) or given == "node":
        return given  # type: ignore[return-value]
    if not isinstance(given, int):
        raise ValueError(f"reshard_after_forward must be a bool, a number of ranks or 'node', not {given!r}")
    if given < 1 or ranks % given:
        raise ValueError(f"reshard_after_forward={given} must divide the {ranks} rank(s) that shard")
    return given != 1 if given in (1, ranks) else given


def keepers_for(params: ShardedParams, choice: ReshardChoice, options: CommOptions) -> Keepers | None:
    """Return who keeps the values of these parameters. Collective over their ranks, the first time.

    None where they are freed, or where ranks share the memory of them anyway.
    """
    comm = params.comm
    if isinstance(choice, bool) or params.stays_gathered or comm.size % (1 if choice == "node" else choice):
        return None
    if params.is_in_node_memory and comm.topology is not None:
        if choice == "node" or choice <= min(map(len, comm.topology.nodes)):
            return "node"
        # Ranks that are a part of a node cannot gather into the memory of all of it.
        if any(len({rank // choice for rank in node}) > 1 for node in comm.topology.nodes):
            return None
    if choice != "node":
        first = comm.rank // choice * choice
        return _within(comm, range(first, first + choice), options)
    topology = comm.topology or GroupCache.current().topology_of(comm)
    if topology.ranks_per_node is None:
        raise ShardingError(
            f"reshard_after_forward='node' needs nodes of equal numbers of ranks, not {topology}: pass a number of "
            "ranks, or True"
        )
    if topology.num_nodes == 1:  # shards stay on the node
        return None
    return _within(comm, topology.node_of(comm.rank), options)


def _within(comm: Communicator, ranks: Sequence[int], options: CommOptions) -> Communicator:
    if len(ranks) == 1:
        return FakeCommunicator(device=comm.device)
    return GroupCache.current().within(comm, ranks, options) if dist.is_initialized() else comm.subgroup(ranks)
