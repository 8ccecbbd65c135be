"""The speed of a few collectives, also in shared memory, and of links within and between nodes."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcfsdp import accelerator
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import segment
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.launch.topology import Topology
from hpcfsdp.world import World

SHARD_BYTES = 16 << 20
MOST_GATHERED_BYTES = 256 << 20
"""The gathered tensor has no more: shards are smaller where there are many ranks."""
REPETITIONS = 5
_SLOW_S = 1.0
"""After a first round that takes longer, there is only one more."""


def shared_memory(world: World) -> dict[str, Any]:
    """Find out how ranks of a node share memory: {"way": "memfd", "file" or "private", "error"}.

    Collective over all ranks.
    """
    way, error = None, None
    try:
        memory = world.host.alloc(1024, torch.float32)
        way = way_of(Path("/proc/self/maps").read_text(), memory.data_ptr())
        world.host.free(memory)
    except (HpcfsdpError, OSError) as problem:
        error = f"rank {world.rank}: {problem}"
    answers = world.comm.allgather((way, error))
    return {"way": answers[0][0], "error": next((error for _, error in answers if error), None)}


def way_of(maps: str, address: int) -> str:
    """Return the kind of memory at an address, by the text of ``/proc/self/maps``."""
    for line in maps.splitlines():
        first, _, end = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return "memfd" if "/memfd:" in line else "file" if "/dev/shm/" in line else "private"
    return "private"


def measure_collectives(world: World, *, shared: bool) -> dict[str, dict[str, Any]]:
    """Return seconds and GB/s of each collective, by name; empty for a single rank. Collective over all ranks.

    GB/s are the bytes that a rank receives (or sends) in a second, for any number of ranks; None where no bytes move,
    as when a node's ranks gather in shared memory. `shared` ones use the memory of ``alloc``, too, which is ordinary
    memory on an accelerator, and left out there.
    """
    comm = world.communicator
    if comm.size == 1:
        return {}
    numel = min(SHARD_BYTES, MOST_GATHERED_BYTES // comm.size) // 4
    found = {
        "all-gather": _all_gather(world, torch.zeros(comm.size * numel, device=comm.device)),
        "reduce-scatter": _reduce_scatter(world, torch.zeros(comm.size * numel, device=comm.device)),
    }
    if shared and comm.device.type == "cpu":
        gathered = comm.alloc(comm.size * numel, torch.float32, gathered=True)
        found["all-gather in shared memory"] = _all_gather_in_place(world, gathered)
        comm.free(gathered)
        full = comm.alloc(comm.size * numel, torch.float32)
        found["reduce-scatter in shared memory"] = _reduce_scatter(world, full)
        comm.free(full)
    return found


def _all_gather(world: World, full: torch.Tensor) -> dict[str, Any]:
    comm = world.communicator
    shard = torch.full((full.numel() // comm.size,), float(comm.rank + 1), device=comm.device)

    def is_right() -> bool:
        expected = torch.arange(1.0, comm.size + 1, device=full.device)
        return bool((full.view(comm.size, -1) == expected[:, None]).all())

    return _timed(world, lambda: comm.all_gather_into_tensor(full, shard), is_right, full)


def _all_gather_in_place(world: World, full: torch.Tensor) -> dict[str, Any]:
    comm = world.communicator
    shard = segment(full, comm)
    elsewhere = world.size - world.local_size  # ranks on other nodes: those of this node fetch their shards
    moved = elsewhere * shard.numel() * shard.element_size() // world.local_size

    def run() -> None:
        comm.labelled_barrier("bandwidth")  # no rank reads any more
        shard[0] = comm.rank + 1
        comm.all_gather_into_tensor(full, shard)

    def is_right() -> bool:
        comm.all_gather_into_tensor(full, shard)
        return torch.equal(full.view(comm.size, -1)[:, 0], torch.arange(1.0, comm.size + 1))

    return _timed(world, run, is_right, full, moved)


def _reduce_scatter(world: World, full: torch.Tensor) -> dict[str, Any]:
    comm = world.communicator
    full.fill_(comm.rank + 1)
    output = torch.zeros(full.numel() // comm.size, device=comm.device)
    total = comm.size * (comm.size + 1) / 2
    run = functools.partial(comm.reduce_scatter_tensor, output, full, "sum")
    return _timed(world, run, lambda: bool((output == total).all()), full)


def _timed(
    world: World, run: Callable[[], object], is_right: Callable[[], bool], full: torch.Tensor, moved: int | None = None
) -> dict[str, Any]:
    """Return the median of all rounds, each of which lasts as long as on its slowest rank.

    `full` is the tensor of all ranks together, `moved` the bytes that a rank receives, by default those of all others.
    """
    nbytes = full.numel() * full.element_size() * (world.size - 1) // world.size
    first = seconds_of(world, run)
    seconds = statistics.median(seconds_of(world, run) for _ in range(1 if first > _SLOW_S else REPETITIONS))
    correct = all(world.comm.allgather(is_right()))
    moved = nbytes if moved is None else moved
    speed = moved / seconds / 1e9 if moved else None
    return {"bytes": nbytes, "seconds": seconds, "gb_per_s": speed, "correct": correct}


def seconds_of(world: World, run: Callable[[], object], calls: int = 1) -> float:
    """Return the seconds of one of some calls, on the slowest rank. Collective over all ranks."""
    _settle(world)
    world.comm.Barrier()
    began = time.perf_counter()
    for _ in range(calls):
        run()
    _settle(world)
    return max(world.comm.allgather(time.perf_counter() - began)) / calls


def _settle(world: World) -> None:
    if accelerator.is_accelerator(world.device):
        accelerator.synchronize(world.device)


LARGE_BYTES = 8 << 20
"""A shard has as much; less where a group has many ranks."""
MOST_LINK_BYTES = 128 << 20
SMALL_BYTES = 256
_ROUNDS = 5
_SMALL_CALLS = 20


def members(topology: Topology, rank: int, *, between: bool) -> list[int]:
    """Return the ranks that a rank measures a link with, itself included; pure.

    Within a node all of its ranks; between nodes those with the same place on every node. A rank whose place is not
    there on each node is alone.
    """
    if not between:
        return list(topology.node_of(rank))
    place = topology.local_rank(rank)
    if any(len(node) <= place for node in topology.nodes):
        return [rank]
    return sorted(node[place] for node in topology.nodes)


def measure_links(world: World) -> dict[str, dict[str, Any] | None]:
    """Return the links "within" and "between" nodes; None where there are none. Collective over all ranks.

    All groups communicate at the same time, so that ranks share their node's network as in a training. An all-gather of
    few bytes over n ranks passes n - 1 links one after the other: its time gives the latency of one. One of many bytes
    gives the bandwidth of a rank.
    """
    several = {"within": any(len(node) > 1 for node in world.topology.nodes), "between": world.num_nodes > 1}
    return {name: _measured(world, between=name == "between") if there else None for name, there in several.items()}


def _measured(world: World, *, between: bool) -> dict[str, Any]:
    group = world.communicator.subgroup(members(world.topology, world.rank, between=between))
    most = max(world.comm.allgather(group.size))
    small_s = min(_rounds(world, _gather(group, SMALL_BYTES // 4), _SMALL_CALLS))  # other work only adds to it
    numel = min(LARGE_BYTES, MOST_LINK_BYTES // most) // 4
    large_s = statistics.median(_rounds(world, _gather(group, numel), 1))
    received = 4 * numel * (most - 1)
    speed = received / max(large_s - small_s, 1e-9)
    return {"latency_s": small_s / (most - 1), "bytes_per_s": speed, "ranks": most, "bytes": received}


def _gather(group: Communicator, numel: int) -> Callable[[], object]:
    """Return an all-gather of so many elements of each rank; nothing for a rank that is alone."""
    if group.size == 1:
        return lambda: None
    shard = torch.zeros(numel, device=group.device)
    full = torch.empty(numel * group.size, device=group.device)
    return lambda: group.all_gather_into_tensor(full, shard)


def _rounds(world: World, run: Callable[[], object], calls: int) -> list[float]:
    """Return the seconds of one call on the slowest rank, for several rounds. Collective over all ranks."""
    first = seconds_of(world, run, calls)  # which opens connections
    return [seconds_of(world, run, calls) for _ in range(_ROUNDS)] if first * calls < _SLOW_S else [first]
