"""Latency and bandwidth of links within and between nodes, for ``hpcfsdp plan --links``."""

from __future__ import annotations

import statistics
from collections.abc import Callable
from typing import Any

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.doctor.bandwidth import seconds_of
from hpcfsdp.launch.topology import Topology
from hpcfsdp.world import World

LARGE_BYTES = 8 << 20
"""Of a shard; less where a group has many ranks."""
MOST_BYTES = 128 << 20
SMALL_BYTES = 256
_ROUNDS = 5
_SMALL_CALLS = 20
_SLOW_S = 1.0
"""After a large all-gather that takes longer, there is no other one."""


def members(topology: Topology, rank: int, *, between: bool) -> list[int]:
    """The ranks that a rank measures a link with, itself included; pure.

    Within a node all of its ranks; between nodes those with the same place on every node. A rank whose place is not
    there on each node is alone.
    """
    if not between:
        return list(topology.node_of(rank))
    place = topology.local_rank(rank)
    if any(len(node) <= place for node in topology.nodes):
        return [rank]
    return sorted(node[place] for node in topology.nodes)


def measure(world: World) -> dict[str, dict[str, Any] | None]:
    """Collective over all ranks. Links "within" and "between" nodes; None where there are none.

    All groups communicate at the same time, so that ranks share their node's network as in a training. An all-gather of
    few bytes over n ranks passes n - 1 links one after the other: its time gives the latency of one. One of many bytes
    gives the bandwidth of a rank.
    """
    several = {"within": any(len(node) > 1 for node in world.topology.nodes), "between": world.num_nodes > 1}
    return {name: _measured(world, between=name == "between") if there else None for name, there in several.items()}


def _measured(world: World, *, between: bool) -> dict[str, Any]:
    group = world.communicator.subgroup(members(world.topology, world.rank, between=between))
    sizes = world.comm.allgather(group.size)
    most = max(sizes)
    small_s = min(_rounds(world, _gather(group, SMALL_BYTES // 4), _SMALL_CALLS))  # other work only adds to it
    numel = min(LARGE_BYTES, MOST_BYTES // most) // 4
    large_s = statistics.median(_rounds(world, _gather(group, numel), 1))
    received = 4 * numel * (most - 1)
    return {
        "latency_s": small_s / (most - 1),
        "bytes_per_s": received / max(large_s - small_s, 1e-9),
        "ranks": most,
        "bytes": received,
    }


def _gather(group: Communicator, numel: int) -> Callable[[], object]:
    """An all-gather of so many elements of each rank; nothing for a rank that is alone."""
    if group.size == 1:
        return lambda: None
    shard = torch.zeros(numel, device=group.device)
    full = torch.empty(numel * group.size, device=group.device)
    return lambda: group.all_gather_into_tensor(full, shard)


def _rounds(world: World, run: Callable[[], object], calls: int) -> list[float]:
    """Collective over all ranks. Seconds of one call on the slowest rank, for several rounds of so many calls."""
    first = seconds_of(world, run, calls)  # which opens connections
    return [seconds_of(world, run, calls) for _ in range(_ROUNDS)] if first * calls < _SLOW_S else [first]
