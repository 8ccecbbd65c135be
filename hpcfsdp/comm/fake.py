"""Collectives of one process that stands for many: for planning, for tests, and for a program of a single process."""

from __future__ import annotations

from typing import Any

import torch

from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.progress import Finished, finished
from hpcfsdp.comm.reduce import OptionalTensors, Reduction
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology


class FakeCommunicator(Communicator):
    """A ``Communicator`` as if each of `size` ranks held the values of this process."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, topology: Topology | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.rank = rank
        self.size = size
        self.topology = topology or Topology.regular(1, size)
        self.device = torch.device(device)
        if not 0 <= rank < size or self.topology.size != size:
            raise CommunicationError(f"there is no rank {rank} among {size} rank(s) ({self.topology})")

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def _barrier(self, async_op: bool) -> Finished | None:
        return finished(async_op)

    def _labelled_barrier(self, label: str, flag: bool) -> bool:
        return flag

    def _all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def _broadcast_object(self, value: Any, src: int) -> Any:
        return value

    def _all_gather_into_tensor(
        self, label: str, output: torch.Tensor, shard: torch.Tensor, async_op: bool
    ) -> Finished | None:
        mine = shard.detach().clone()  # the shard may be a part of the output
        output.detach().view(self.size, -1).copy_(mine.view(1, -1))
        return finished(async_op)

    def _reduce_scatter_tensor(
        self, label: str, output: torch.Tensor, full: torch.Tensor, reduction: Reduction, async_op: bool
    ) -> Finished | None:
        mine = full.detach().view(self.size, -1)[self.rank]
        output.detach().view(-1).copy_(_reduce_equal(mine, reduction))
        return finished(async_op)

    def _all_reduce(self, label: str, tensor: torch.Tensor, reduction: Reduction, async_op: bool) -> Finished | None:
        tensor.detach().copy_(_reduce_equal(tensor.detach(), reduction))
        return finished(async_op)

    def _broadcast(self, label: str, tensor: torch.Tensor, src: int, async_op: bool) -> Finished | None:
        return finished(async_op)

    def _exchange(
        self, label: str, outputs: OptionalTensors, inputs: OptionalTensors, async_op: bool
    ) -> Finished | None:
        given = inputs[self.rank]
        for output in outputs:
            if output is None or given is None:
                continue
            if output.numel() != given.numel():
                raise CommunicationError(
                    f"{label} on rank {self.rank}: an output has {output.numel()} elements, its input {given.numel()}"
                )
            output.detach().view(-1).copy_(given.detach().view(-1))
        return finished(async_op)

    def _subgroup(self, ranks: list[int]) -> FakeCommunicator:
        topology = self.topology.restrict(ranks)
        return FakeCommunicator(ranks.index(self.rank), len(ranks), topology=topology, device=self.device)


def _reduce_equal(mine: torch.Tensor, reduction: Reduction) -> torch.Tensor:
    """Return the reduction of the same value on each rank."""
    value, op = mine.to(reduction.accumulate), reduction.op
    if op == "sum" and value.dtype is not torch.bool:
        return value * reduction.size
    if op == "product" and value.dtype is not torch.bool:
        return _power(value, reduction.size)
    if op == "bxor":
        return value if reduction.size % 2 else torch.zeros_like(value)
    return value


def _power(value: torch.Tensor, exponent: int) -> torch.Tensor:
    """Return the power by multiplication alone, as ranks compute it; torch takes angles of complex numbers."""
    total = torch.ones_like(value)
    while exponent:
        if exponent % 2:
            total = total * value
        value, exponent = value * value, exponent // 2
    return total
