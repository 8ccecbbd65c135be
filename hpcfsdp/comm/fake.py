"""Collectives of one process that stands for many: for planning, for tests, and for a program of a single process."""

from typing import Any

import torch
from torch import Tensor

from hpcfsdp.comm.communicator import CommOptions, Communicator
from hpcfsdp.comm.reduce import OptionalTensors, Reduction
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology


class FakeCommunicator(Communicator):
    """A ``Communicator`` as if each of `size` ranks held the values of this process."""

    def __init__(
        self, rank: int = 0, size: int = 1, *, topology: Topology | None = None, device: str | torch.device = "cpu"
    ) -> None:
        self.rank, self.size = rank, size
        self.topology = topology or Topology.regular(1, size)
        self.device = torch.device(device)
        if not 0 <= rank < size or self.topology.size != size:
            raise CommunicationError(f"there is no rank {rank} among {size} rank(s) ({self.topology})")
        self.node_size = len(self.topology.node_of(rank))

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def lacking(self, options: CommOptions) -> list[str]:
        return []  # it sends nothing

    def _barrier(self, async_op: bool) -> None: ...

    def _labelled_barrier(self, label: str, flag: bool) -> bool:
        return flag

    def _all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def _broadcast_object(self, value: Any, src: int) -> Any:
        return value

    def _all_gather_into_tensor(self, label: str, output: Tensor, shard: Tensor, async_op: bool) -> None:
        mine = shard.detach().clone()  # the shard may be a part of the output
        output.detach().view(self.size, -1).copy_(mine.view(1, -1))

    def _reduce_scatter_tensor(
        self, label: str, output: Tensor, full: Tensor, reduction: Reduction, async_op: bool
    ) -> None:
        mine = full.detach().view(self.size, -1)[self.rank]
        output.detach().view(-1).copy_(_reduce_equal(mine, reduction))

    def _all_reduce(self, label: str, tensor: Tensor, reduction: Reduction, async_op: bool) -> None:
        tensor.detach().copy_(_reduce_equal(tensor.detach(), reduction))

    def _broadcast(self, label: str, tensor: Tensor, src: int, async_op: bool) -> None: ...

    def _exchange(self, label: str, outputs: OptionalTensors, inputs: OptionalTensors, async_op: bool) -> None:
        given = inputs[self.rank]
        for output in outputs:
            if output is not None and given is not None:
                if output.numel() != given.numel():
                    what = f"an output has {output.numel()} elements, its input {given.numel()}"
                    raise CommunicationError(f"{label} on rank {self.rank}: {what}")
                output.detach().view(-1).copy_(given.detach().view(-1))

    def _subgroup(self, ranks: list[int]) -> "FakeCommunicator":
        topology = self.topology.restrict(ranks)
        return FakeCommunicator(ranks.index(self.rank), len(ranks), topology=topology, device=self.device)


def _reduce_equal(mine: Tensor, reduction: Reduction) -> Tensor:
    """Return the reduction of the same value on each rank."""
    value, op, size = mine.to(reduction.accumulate), reduction.op, reduction.size
    if op == "bxor":
        return value if size % 2 else torch.zeros_like(value)
    if op not in ("sum", "product") or value.dtype is torch.bool:
        return value
    if op == "sum":
        return value * size
    total = torch.ones_like(value)
    while size:  # by multiplication alone, as ranks compute it: torch takes angles for a power of complex numbers
        if size % 2:
            total = total * value
        value, size = value * value, size // 2
    return total
