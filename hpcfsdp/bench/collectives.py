"""Collectives on one node: this project's against gloo, plain MPI calls, and the speed of copying memory."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.comm.communicator import segment
from hpcfsdp.world import World

MIB = 1 << 20


@dataclass(frozen=True)
class Measurement:
    """One collective at one size, done in several ways.

    Attributes:
        nbytes: of the full float32 tensor.
        floor_s: seconds that the bytes which must be moved take at the speed of copying memory, all ranks at once. A
            copy of n bytes reads n and writes n; what reads or writes more is counted in halves.
        ways: name -> times.
    """

    collective: str
    nbytes: int
    floor_s: float
    ways: dict[str, Times]


def measure(world: World, sizes: Sequence[int], *, repeats: int) -> list[Measurement]:
    """Collective over all ranks. Measure every collective at each size (bytes of the full tensor)."""
    gloo = dist.new_group(backend="gloo")
    found = []
    for nbytes in sizes:
        numel = max(1, nbytes // 4 // world.size) * world.size
        buffers = _Buffers(world, numel)
        copied = in_turn(world.host, {"copy": buffers.copy}, repeats=repeats, calls=_calls(nbytes))["copy"]
        for collective, moved, ways in _competitors(world, gloo, buffers):
            calls = _calls(nbytes) if moved else 200
            times = in_turn(world.host, ways, repeats=repeats, calls=calls)
            found.append(Measurement(collective, numel * 4, moved * copied.median_s, times))
        buffers.free()
    return found


def _calls(nbytes: int) -> int:
    return min(200, max(1, 4 * MIB // nbytes))


class _Buffers:
    """Tensors of one size: plain ones, and the same in shared memory."""

    def __init__(self, world: World, numel: int) -> None:
        self.comm = world.host
        self.full, self.other = torch.ones(numel), torch.ones(numel)
        self.shard = torch.ones(numel // world.size)
        self.shared_full = self.comm.alloc(numel, torch.float32)
        self.shared_gathered = self.comm.alloc(numel, torch.float32, gathered=True)
        self.shared_full.fill_(1)
        segment(self.shared_gathered, self.comm).fill_(1)

    def copy(self) -> None:
        self.other.copy_(self.full)

    def free(self) -> None:
        self.comm.free(self.shared_full)
        self.comm.free(self.shared_gathered)


def _competitors(world: World, gloo: Any, b: _Buffers) -> list[tuple[str, float, dict[str, Callable[[], object]]]]:
    """name, bytes that must be moved as a multiple of a copy of the full tensor, and the ways to do it."""
    from mpi4py import MPI

    n, host, mpi = world.size, world.host, world.comm
    mine = segment(b.shared_gathered, host)
    full, shard, other = b.full.numpy(), b.shard.numpy(), b.other.numpy()
    return [
        (
            "all_gather, zero-copy",
            0.0,
            {"hpcfsdp shared": lambda: host.all_gather_into_tensor(b.shared_gathered, mine)},
        ),
        (
            "all_gather",
            1.0,
            {
                "hpcfsdp": lambda: host.all_gather_into_tensor(b.full, b.shard),
                "gloo": lambda: _compat.all_gather_single(b.full, b.shard, gloo, False),
                "MPI_Allgather": lambda: mpi.Allgather(shard, full),
            },
        ),
        (
            "reduce_scatter",
            (1 + 1 / n) / 2,  # reads everyone's segment, writes one
            {
                "hpcfsdp shared": lambda: host.reduce_scatter_tensor(b.shard, b.shared_full, "sum"),
                "hpcfsdp": lambda: host.reduce_scatter_tensor(b.shard, b.full, "sum"),
                "gloo": lambda: _compat.reduce_scatter_single(b.shard, b.full, dist.ReduceOp.SUM, gloo, False),
                "MPI_Reduce_scatter_block": lambda: mpi.Reduce_scatter_block(full, shard, MPI.SUM),
            },
        ),
        (
            "all_reduce",
            (1 + 1 / n) / 2 + (n - 1) / n,  # a reduce-scatter, then the others' segments are copied
            {
                "hpcfsdp shared": lambda: host.all_reduce(b.shared_full, "max"),
                "hpcfsdp": lambda: host.all_reduce(b.full, "max"),
                "gloo": lambda: dist.all_reduce(b.full, dist.ReduceOp.MAX, gloo),
                "MPI_Allreduce": lambda: mpi.Allreduce(full, other, MPI.MAX),
            },
        ),
    ]
