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
    """One collective at one size, done in several ways.

    Attributes:
        nbytes: of the full float32 tensor.
        floor_s: seconds to read and write as many bytes in private memory, all ranks at once: the least that any way
            takes on this machine. 0 for a collective that moves nothing.
        ways: name -> times.
    """

    collective: str
    nbytes: int
    floor_s: float
    ways: dict[str, Times]


def measure(world: World, sizes: Sequence[int], *, repeats: int) -> Table:
    """Time every collective at each size (bytes of the full tensor). Collective over all ranks."""
    gloo = dist.new_group(backend="gloo")
    found = []
    for nbytes in sizes:
        numel = max(1, nbytes // 4 // world.size) * world.size
        buffers = _Buffers(world, numel)
        for collective, floor, ways in _competitors(world, gloo, buffers):
            calls = min(200, max(1, 4 * MIB // nbytes)) if floor else 200
            times = in_turn(world.host, ways | ({"floor": floor} if floor else {}), repeats=repeats, calls=calls)
            floor_s = times.pop("floor").median_s if floor else 0.0
            found.append(Comparison(collective, numel * 4, floor_s, times))
        buffers.free()
    return table(found)


def table(found: Sequence[Comparison]) -> Table:
    """Return a row for each way, with its speed as a multiple of gloo's, and its time as a multiple of the floor."""
    rows = [
        (
            one.collective,
            f"{one.nbytes / MIB:g} MiB",
            name,
            *time_cells(times),
            faster_cell(times, one.ways.get("gloo")),
            f"{times.median_s / one.floor_s:.2f}x" if one.floor_s else "",
        )
        for one in found
        for name, times in one.ways.items()
    ]
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


class _Buffers:
    """Tensors of one size: plain ones, and the same in shared memory."""

    def __init__(self, world: World, numel: int) -> None:
        self.comm = world.host
        self.full, self.other = torch.zeros(numel), torch.ones(numel)  # zeros stay so under any number of sums
        self.shard = torch.zeros(numel // world.size)
        self.segments = list(self.full.view(world.size, -1))
        self.shared_full = self.comm.alloc(numel, torch.float32)
        self.shared_gathered = self.comm.alloc(numel, torch.float32, gathered=True)
        self.shared_full.fill_(0)
        segment(self.shared_gathered, self.comm).fill_(1)

    def copy(self) -> None:
        """Move as many bytes as an all-gather does."""
        self.other.copy_(self.full)

    def reduce(self) -> None:
        """Move as many bytes as a reduce-scatter does."""
        reduce_into(self.shard, self.segments, "sum", torch.float32)

    def reduce_and_copy(self) -> None:
        """Move as many bytes as an all-reduce does: each rank reduces a segment, and copies the others."""
        self.reduce()
        numel = self.full.numel() - self.shard.numel()
        self.other[:numel].copy_(self.full[:numel])

    def free(self) -> None:
        self.comm.free(self.shared_full)
        self.comm.free(self.shared_gathered)


def _competitors(
    world: World, gloo: Any, b: _Buffers
) -> list[tuple[str, Callable[[], object] | None, dict[str, Callable[[], object]]]]:
    """Return each collective with the same work in private memory, and the ways to do it."""
    from mpi4py import MPI

    host, mpi = world.host, world.comm
    mine = segment(b.shared_gathered, host)
    full, shard = b.full.numpy(), b.shard.numpy()
    return [
        (
            "all_gather, zero-copy",
            None,
            {"hpcfsdp shared": lambda: host.all_gather_into_tensor(b.shared_gathered, mine)},
        ),
        (
            "all_gather",
            b.copy,
            {
                OWN: lambda: host.all_gather_into_tensor(b.full, b.shard),
                "gloo": lambda: _compat.all_gather_single(b.full, b.shard, gloo, False),
                "MPI_Allgather": lambda: mpi.Allgather(shard, full),
            },
        ),
        (
            "reduce_scatter",
            b.reduce,
            {
                "hpcfsdp shared": lambda: host.reduce_scatter_tensor(b.shard, b.shared_full, "sum"),
                OWN: lambda: host.reduce_scatter_tensor(b.shard, b.full, "sum"),
                "gloo": lambda: _compat.reduce_scatter_single(b.shard, b.full, dist.ReduceOp.SUM, gloo, False),
                "MPI_Reduce_scatter_block": lambda: mpi.Reduce_scatter_block(full, shard, MPI.SUM),
            },
        ),
        (
            "all_reduce",
            b.reduce_and_copy,
            {
                "hpcfsdp shared": lambda: host.all_reduce(b.shared_full, "sum"),
                OWN: lambda: host.all_reduce(b.full, "sum"),
                "torch on hpcmpi": lambda: dist.all_reduce(b.full),
                "gloo": lambda: dist.all_reduce(b.full, dist.ReduceOp.SUM, gloo),
                "MPI_Allreduce": lambda: mpi.Allreduce(MPI.IN_PLACE, full, MPI.SUM),
            },
        ),
    ]
