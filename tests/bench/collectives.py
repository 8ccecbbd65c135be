"""Collectives: this project's, gloo's, plain MPI calls, and the speed of copying memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.bench.harness import MIB, Ratio, Table, Times, faster_cell, in_turn, time_cells, times_json
from hpcfsdp.bench.step import OWN
from hpcfsdp.comm.communicator import segment
from hpcfsdp.comm.reduce import reduce_into
from hpcfsdp.world import World


class Comparison(NamedTuple):
    """One collective at one size of the full float32 tensor, done in several ways.

    `floor_s` are the seconds to read and write as many bytes in private memory, all ranks at once: the least that any
    way takes on this machine. 0 for a collective that moves nothing.
    """

    collective: str
    nbytes: int
    floor_s: float
    ways: dict[str, Times]


def measure(world: World, sizes: Sequence[float], *, repeats: int) -> Table:
    """Time every collective at each size (MiB of the full tensor). Collective over all ranks."""
    gloo = dist.new_group(backend="gloo")
    found = []
    for nbytes in (int(size * MIB) for size in sizes):
        numel = max(1, nbytes // 4 // world.size) * world.size
        shared = world.host.alloc(numel, torch.float32), world.host.alloc(numel, torch.float32, gathered=True)
        for collective, floor, ways in _competitors(world, gloo, numel, *shared):
            calls = min(200, max(1, 4 * MIB // nbytes)) if floor else 200
            times = in_turn(world.host, ways | ({"floor": floor} if floor else {}), repeats=repeats, calls=calls)
            floor_s = times.pop("floor").median_s if floor else 0.0
            found.append(Comparison(collective, numel * 4, floor_s, times))
        for memory in shared:
            world.host.free(memory)
    return table(found)


def table(found: Sequence[Comparison]) -> Table:
    """Return a row for each way, with its speed as a multiple of gloo's, and its time as a multiple of the floor."""
    rows = []
    for one in found:
        for name, times in one.ways.items():
            faster = faster_cell(times, one.ways.get("gloo"))
            of_floor = f"{times.median_s / one.floor_s:.2f}x" if one.floor_s else ""
            rows.append((one.collective, f"{one.nbytes / MIB:g} MiB", name, *time_cells(times), faster, of_floor))
    as_json = [
        {"collective": one.collective, "bytes": one.nbytes, "floor_s": one.floor_s, "ways": times_json(one.ways)}
        for one in found
    ]
    columns = ("collective", "size", "way", "median", "min-max", "against gloo", "against the floor")
    ratios = [
        Ratio.of_speeds(f"{one.collective} of {one.nbytes / MIB:g} MiB: speed / gloo", one.ways[OWN], one.ways["gloo"])
        for one in found
        if {OWN, "gloo"} <= set(one.ways)
    ]
    return Table(columns, rows, as_json, ratios=ratios)


def _competitors(
    world: World, gloo: Any, numel: int, shared_full: torch.Tensor, shared_gathered: torch.Tensor
) -> list[tuple[str, Callable[[], object] | None, dict[str, Callable[[], object]]]]:
    """Return each collective with work that moves as many bytes in private memory, and the ways to do it."""
    from mpi4py import MPI

    host, mpi = world.host, world.comm
    full, other = torch.zeros(numel), torch.ones(numel)  # zeros stay so under any number of sums
    shard, mine = torch.zeros(numel // world.size), segment(shared_gathered, host)
    segments, others = list(full.view(world.size, -1)), numel - shard.numel()
    whole, part = full.numpy(), shard.numpy()
    shared_full.fill_(0)
    mine.fill_(1)

    def reduce() -> None:
        reduce_into(shard, segments, "sum", torch.float32)

    def reduce_and_copy() -> None:
        """Reduce a segment, and copy the others."""
        reduce()
        other[:others].copy_(full[:others])

    gather: dict[str, Callable[[], object]] = {
        OWN: lambda: host.all_gather_into_tensor(full, shard),
        "torch on hpcmpi": lambda: _compat.all_gather_single(full, shard, None, False),
        "gloo": lambda: _compat.all_gather_single(full, shard, gloo, False),
        "MPI_Allgather": lambda: mpi.Allgather(part, whole),
    }
    scatter: dict[str, Callable[[], object]] = {
        "hpcfsdp shared": lambda: host.reduce_scatter_tensor(shard, shared_full, "sum"),
        OWN: lambda: host.reduce_scatter_tensor(shard, full, "sum"),
        "torch on hpcmpi": lambda: _compat.reduce_scatter_single(shard, full, dist.ReduceOp.SUM, None, False),
        "gloo": lambda: _compat.reduce_scatter_single(shard, full, dist.ReduceOp.SUM, gloo, False),
        "MPI_Reduce_scatter_block": lambda: mpi.Reduce_scatter_block(whole, part, MPI.SUM),
    }
    reduction: dict[str, Callable[[], object]] = {
        "hpcfsdp shared": lambda: host.all_reduce(shared_full, "sum"),
        OWN: lambda: host.all_reduce(full, "sum"),
        "torch on hpcmpi": lambda: dist.all_reduce(full),
        "gloo": lambda: dist.all_reduce(full, dist.ReduceOp.SUM, gloo),
        "MPI_Allreduce": lambda: mpi.Allreduce(MPI.IN_PLACE, whole, MPI.SUM),
    }
    in_place = {"hpcfsdp shared": lambda: host.all_gather_into_tensor(shared_gathered, mine)}
    return [
        ("all_gather, zero-copy", None, in_place),
        ("all_gather", lambda: other.copy_(full), gather),
        ("reduce_scatter", reduce, scatter),
        ("all_reduce", reduce_and_copy, reduction),
    ]
