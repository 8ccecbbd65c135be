"""The speed of a few all-gathers and reduce-scatters, also in shared memory."""

from __future__ import annotations

import functools
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcfsdp import accelerator
from hpcfsdp.comm.communicator import segment
from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.world import World

SHARD_BYTES = 16 << 20
MOST_BYTES = 256 << 20
"""Of the gathered tensor: shards are smaller where there are many ranks."""
REPETITIONS = 5
_SLOW_S = 1.0
"""After a first round that takes longer, there is only one more."""


def shared_memory(world: World) -> dict[str, Any]:
    """Collective. Whether the ranks of each node can share memory: {"way": "memfd", "file" or "private", "error"}."""
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
    """The kind of memory at an address, by the text of ``/proc/self/maps``."""
    for line in maps.splitlines():
        first, _, end = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return "memfd" if "/memfd:" in line else "file" if "/dev/shm/" in line else "private"
    return "private"


def measure(world: World, *, shared: bool) -> dict[str, dict[str, Any]]:
    """Collective. Seconds and GB/s of each collective, by name; empty for a single rank.

    GB/s are the bytes that a rank receives (or sends) in a second, for any number of ranks; None where no bytes move,
    as when a node's ranks gather in shared memory.

    Args:
        shared: also in the memory of ``alloc``. On an accelerator that is ordinary memory, and left out.
    """
    comm = world.communicator
    if comm.size == 1:
        return {}
    numel = min(SHARD_BYTES, MOST_BYTES // comm.size) // 4
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
    """The median of all rounds, each of which lasts as long as on its slowest rank.

    Args:
        run: the collective.
        is_right: checks its result.
        full: the tensor of all ranks together.
        moved: bytes that a rank receives; by default those of all other ranks.
    """
    nbytes = full.numel() * full.element_size() * (world.size - 1) // world.size
    first = seconds_of(world, run)
    seconds = statistics.median(seconds_of(world, run) for _ in range(1 if first > _SLOW_S else REPETITIONS))
    correct = all(world.comm.allgather(is_right()))
    moved = nbytes if moved is None else moved
    return {
        "bytes": nbytes,
        "seconds": seconds,
        "gb_per_s": moved / seconds / 1e9 if moved else None,
        "correct": correct,
    }


def seconds_of(world: World, run: Callable[[], object], calls: int = 1) -> float:
    """Collective. Seconds of one of some calls, on the slowest rank."""
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
