"""Collectives of one process with itself, for programs without a launcher and without torch.distributed."""

from __future__ import annotations

from typing import Any

import torch

from hpcfsdp.comm.communicator import ReduceOp, check_sizes


class SoloCommunicator:
    """A ``Communicator`` of one rank: everything gathered, reduced or sent is what the rank has already."""

    rank = 0
    size = 1

    def __repr__(self) -> str:
        return "SoloCommunicator()"

    def all_gather_into_tensor(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        check_sizes("all_gather_into_tensor", self, output, shard)
        output.copy_(shard)

    def reduce_scatter_tensor(self, output: torch.Tensor, full: torch.Tensor, op: ReduceOp) -> None:
        check_sizes("reduce_scatter_tensor", self, full, output)
        output.copy_(full)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        pass

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        pass

    def all_gather_object(self, value: Any) -> list[Any]:
        return [value]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        return value
