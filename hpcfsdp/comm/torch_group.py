"""Collectives through a process group of torch.distributed: NCCL on GPUs, gloo as a fallback on CPU."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.comm.communicator import ReduceOp, accumulate_dtype, check_sizes


class TorchGroupCommunicator:
    """A ``Communicator`` over a ``torch.distributed.ProcessGroup``."""

    def __init__(self, group: dist.ProcessGroup) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)

    def __repr__(self) -> str:
        return f"TorchGroupCommunicator({dist.get_backend(self.group)}, rank={self.rank}, size={self.size})"

    def all_gather_into_tensor(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        check_sizes("all_gather_into_tensor", self, output, shard)
        _compat.all_gather_single(output, shard, group=self.group)

    def reduce_scatter_tensor(self, output: torch.Tensor, full: torch.Tensor, op: ReduceOp) -> None:
        check_sizes("reduce_scatter_tensor", self, full, output)
        wide = accumulate_dtype(full.dtype)
        total = output if wide == full.dtype else torch.empty_like(output, dtype=wide)
        _compat.reduce_scatter_single(total, full.to(wide), op=_op(op), group=self.group)
        self._finish(total, op)
        if total is not output:
            output.copy_(total)

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        wide = tensor.to(accumulate_dtype(tensor.dtype))
        dist.all_reduce(wide, op=_op(op), group=self.group)
        self._finish(wide, op)
        if wide is not tensor:
            tensor.copy_(wide)

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        dist.broadcast(tensor, group_src=src, group=self.group)

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        holder = [value]
        dist.broadcast_object_list(holder, group_src=src, group=self.group)
        return holder[0]

    def _finish(self, total: torch.Tensor, op: ReduceOp) -> None:
        if op == "average":  # not every backend has an average of its own
            total.div_(self.size)


def _op(op: ReduceOp) -> Any:
    return dist.ReduceOp.MAX if op == "max" else dist.ReduceOp.SUM
