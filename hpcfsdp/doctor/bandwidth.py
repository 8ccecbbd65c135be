"""How fast tensors go from rank to rank: a few all-gathers and reduce-scatters, also in shared memory."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from hpcfsdp.comm.communicator import Communicator, segment
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
    """What is mapped at an address, given the text of ``/proc/self/maps``."""
    for line in maps.splitlines():
        first, _, end = line.split(" ", 1)[0].partition("-")
        if int(first, 16) <= address < int(end, 16):
            return "memfd" if "/memfd:" in line else "file" if "/dev/shm/" in line else "private"
    return "private"


def measure(world: World, *, shared: bool) -> dict[str, dict[str, Any]]:
    """Collective. Seconds and GB/s of each collective, by name; nothing where there is only one rank.

    GB/s are the bytes that move from others to a rank (or to them) in a second, whatever the number of ranks; None
    where no bytes move, as when a node's ranks gather in memory that they share.

    Args:
        shared: also in the memory that ``alloc`` gives. On a GPU that is ordinary memory, and left out.
    """
    comm = world.communicator
    if comm.size == 1:
        return {}
    numel = min(SHARD_BYTES, MOST_BYTES // comm.size) // 4
    found = {
        "all-gather": _timed(world, *_all_gather(comm, numel, torch.zeros(comm.size * numel, device=comm.device))),
        "reduce-scatter": _timed(world, *_reduce_scatter(comm, torch.zeros(comm.size * numel, device=comm.device))),
    }
    if shared and comm.device.type == "cpu":
        gathered = comm.alloc(comm.size * numel, torch.float32, gathered=True)
        found["all-gather in shared memory"] = _timed(world, *_all_gather_in_place(world, gathered))
        comm.free(gathered)
        full = comm.alloc(comm.size * numel, torch.float32)
        found["reduce-scatter in shared memory"] = _timed(world, *_reduce_scatter(comm, full))
        comm.free(full)
    return found


Operation = tuple[Callable[[], None], Callable[[], bool], int, int]
"""Runs the collective; whether its result is right; bytes that a rank gets from others, and those of them that move."""


def _all_gather(comm: Communicator, numel: int, full: torch.Tensor) -> Operation:
    shard = torch.full((numel,), float(comm.rank + 1), device=comm.device)
    nbytes = _foreign(comm, full)
    return lambda: comm.all_gather_into_tensor(full, shard), lambda: _holds_all_ranks(comm, full), nbytes, nbytes


def _all_gather_in_place(world: World, full: torch.Tensor) -> Operation:
    comm = world.communicator
    shard = segment(full, comm)
    elsewhere = world.size - world.local_size  # ranks on other nodes, whose shards the ranks of this one fetch in turn
    moved = elsewhere * shard.numel() * shard.element_size() // world.local_size

    def run() -> None:
        comm.claim(full)
        shard[0] = comm.rank + 1
        comm.all_gather_into_tensor(full, shard)
        comm.release(full)

    def right() -> bool:
        comm.all_gather_into_tensor(full, shard)
        held = torch.equal(full.view(comm.size, -1)[:, 0], torch.arange(1.0, comm.size + 1))
        comm.release(full)
        return held

    return run, right, _foreign(comm, full), moved


def _reduce_scatter(comm: Communicator, full: torch.Tensor) -> Operation:
    full.fill_(comm.rank + 1)
    output = torch.zeros(full.numel() // comm.size, device=comm.device)
    total, nbytes = comm.size * (comm.size + 1) / 2, _foreign(comm, full)
    return (
        lambda: comm.reduce_scatter_tensor(output, full, "sum"),
        lambda: bool((output == total).all()),
        nbytes,
        nbytes,
    )


def _holds_all_ranks(comm: Communicator, full: torch.Tensor) -> bool:
    expected = torch.arange(1.0, comm.size + 1, device=full.device)
    return bool((full.view(comm.size, -1) == expected[:, None]).all())


def _foreign(comm: Communicator, full: torch.Tensor) -> int:
    return full.numel() * full.element_size() * (comm.size - 1) // comm.size


def _timed(world: World, run: Callable[[], None], right: Callable[[], bool], nbytes: int, moved: int) -> dict[str, Any]:
    """A round counts as long as on its slowest rank; the median of all rounds counts."""
    first = _round(world, run)
    rounds = [_round(world, run) for _ in range(1 if first > _SLOW_S else REPETITIONS)]
    seconds = statistics.median(rounds)
    correct = all(world.comm.allgather(right()))
    speed = moved / seconds / 1e9 if moved else None
    return {"bytes": nbytes, "seconds": seconds, "gb_per_s": speed, "correct": correct}


def _round(world: World, run: Callable[[], None]) -> float:
    _settle(world)
    world.comm.Barrier()
    began = time.perf_counter()
    run()
    _settle(world)
    return max(world.comm.allgather(time.perf_counter() - began))


def _settle(world: World) -> None:
    if world.device.type == "cuda":
        torch.cuda.synchronize(world.device)
