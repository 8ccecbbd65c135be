"""Collectives of one process that stands for many: for planning, for tests, and for a program of a single process."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from hpcfsdp.comm.communicator import (
    PlainMemory,
    ReduceOp,
    accumulate_dtype,
    check_list,
    check_members,
    check_peer,
    check_sizes,
    check_tensors,
    refuse_op,
)
from hpcfsdp.comm.progress import Finished
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology


class FakeCommunicator(PlainMemory):
    """A ``Communicator`` as if each of `size` ranks held what this one holds. With one rank that is simply true."""

    def __init__(
        self,
        rank: int = 0,
        size: int = 1,
        *,
        topology: Topology | None = None,
        device: str | torch.device = "cpu",
    ) -> None:
        self.rank = rank
        self.size = size
        self.topology = topology or Topology.regular(1, size)
        self.device = torch.device(device)
        if not 0 <= rank < size or self.topology.size != size:
            raise CommunicationError(f"there is no rank {rank} among {size} rank(s) ({self.topology})")

    def __repr__(self) -> str:
        return f"FakeCommunicator(rank={self.rank}, size={self.size})"

    def all_gather_into_tensor(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False
    ) -> Finished | None:
        check_tensors("all_gather_into_tensor", self, output, shard)
        check_sizes("all_gather_into_tensor", self, output, shard)
        mine = shard.detach().clone()  # the shard may lie within the output
        output.detach().view(self.size, -1).copy_(mine.view(1, -1))
        return _work(async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Finished | None:
        check_tensors("reduce_scatter_tensor", self, full)
        check_tensors("reduce_scatter_tensor", self, output)
        check_sizes("reduce_scatter_tensor", self, full, output)
        mine = full.detach().view(self.size, -1)[self.rank]
        output.detach().view(-1).copy_(self._reduced("reduce_scatter_tensor", mine, op, accumulate))
        return _work(async_op)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Finished | None:
        check_tensors("all_reduce", self, tensor)
        tensor.detach().copy_(self._reduced("all_reduce", tensor.detach(), op, accumulate))
        return _work(async_op)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Finished | None:
        check_tensors("broadcast", self, tensor)
        check_peer("broadcast", self, src)
        return _work(async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False
    ) -> Finished | None:
        check_list("all_gather", self, "outputs", outputs)
        check_tensors("all_gather", self, tensor, *outputs)
        for output in outputs:
            self._copy("all_gather", output, tensor)
        return _work(async_op)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Finished | None:
        check_list("all_to_all", self, "outputs", outputs)
        check_list("all_to_all", self, "inputs", inputs)
        check_tensors("all_to_all", self, *inputs, *outputs)
        for output in outputs:
            self._copy("all_to_all", output, inputs[self.rank])
        return _work(async_op)

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> Finished | None:
        check_peer("gather", self, dst)
        check_tensors("gather", self, tensor)
        if self.rank == dst:
            check_list("gather", self, "outputs", outputs)
            return self.all_gather(outputs, tensor, async_op=async_op)
        return _work(async_op)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, *, async_op: bool = False
    ) -> Finished | None:
        check_peer("scatter", self, src)
        check_tensors("scatter", self, output)
        if self.rank == src:
            check_list("scatter", self, "inputs", inputs)
            check_tensors("scatter", self, output, *inputs)
            self._copy("scatter", output, inputs[self.rank])
        return _work(async_op)

    def barrier(self, *, async_op: bool = False) -> Finished | None:
        return _work(async_op)

    def labelled_barrier(self, note: str) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value] * self.size

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        check_peer("broadcast_object", self, src)
        return value

    def subgroup(self, ranks: Sequence[int]) -> FakeCommunicator:
        ranks = check_members(self, ranks)
        topology = self.topology.restrict(ranks)
        return FakeCommunicator(ranks.index(self.rank), len(ranks), topology=topology, device=self.device)

    def _reduced(self, label: str, mine: torch.Tensor, op: ReduceOp, accumulate: torch.dtype | None) -> torch.Tensor:
        """`size` times the same value, reduced."""
        problem = refuse_op(op, mine.dtype)
        if problem:
            raise CommunicationError(f"{label} on rank {self.rank}: {problem}")
        value = mine.to(accumulate or accumulate_dtype(mine.dtype, op))
        if op == "sum" and value.dtype is not torch.bool:
            return value * self.size
        if op == "product" and value.dtype is not torch.bool:
            return _power(value, self.size)
        if op == "bxor":
            return value if self.size % 2 else torch.zeros_like(value)
        return value

    def _copy(self, label: str, output: torch.Tensor, given: torch.Tensor) -> None:
        if output.numel() != given.numel():
            raise CommunicationError(
                f"{label} on rank {self.rank}: an output has {output.numel()} elements, what it would get "
                f"{given.numel()}"
            )
        output.detach().view(-1).copy_(given.detach().view(-1))


def _work(async_op: bool) -> Finished | None:
    return Finished() if async_op else None


def _power(value: torch.Tensor, exponent: int) -> torch.Tensor:
    """By multiplication alone, as ranks do it: torch's own power of complex numbers goes through angles."""
    total = torch.ones_like(value)
    while exponent:
        if exponent % 2:
            total = total * value
        value, exponent = value * value, exponent // 2
    return total
