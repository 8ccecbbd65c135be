"""The protocol that the engine and the checkpoints speak. Every method is collective over the communicator's ranks."""

from __future__ import annotations

from typing import Any, Literal, Protocol

import torch

from hpcfsdp.errors import EngineError

ReduceOp = Literal["sum", "average", "max"]


class Communicator(Protocol):
    """Collectives over `size` ranks. Tensors are contiguous; a call returns when its result may be used.

    On a GPU "may be used" means: by work that is enqueued on the current stream afterwards.
    """

    rank: int
    size: int

    def all_gather_into_tensor(self, output: torch.Tensor, shard: torch.Tensor) -> None:
        """Collective. `output` (size * n elements) becomes the shards (n elements each) of all ranks, in rank order."""

    def reduce_scatter_tensor(self, output: torch.Tensor, full: torch.Tensor, op: ReduceOp) -> None:
        """Collective. `output` (n elements) becomes segment `rank` of `full` (size * n elements), reduced over ranks.

        The order of summation is fixed, so equal input gives bitwise equal output. float16 and bfloat16 are summed
        in float32.
        """

    def all_reduce(self, tensor: torch.Tensor, op: ReduceOp) -> None:
        """Collective. `tensor` becomes its reduction over all ranks, the same on each."""

    def broadcast(self, tensor: torch.Tensor, src: int) -> None:
        """Collective. `tensor` becomes what it is on rank `src`."""

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collective. The values of all ranks in rank order. For small, picklable Python objects."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Collective. The value of rank `src`."""


def accumulate_dtype(dtype: torch.dtype) -> torch.dtype:
    """The dtype in which values of `dtype` are summed."""
    return torch.float32 if dtype in (torch.float16, torch.bfloat16) else dtype


def check_sizes(operation: str, comm: Communicator, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Refuse tensors of which the one is not `size` times the other, or which no transport could take as they are."""
    if full.numel() != comm.size * shard.numel() or full.dtype != shard.dtype or full.device != shard.device:
        raise EngineError(
            f"{operation} on rank {comm.rank} of {comm.size}: the full tensor has {full.numel()} elements of "
            f"{full.dtype} on {full.device}, the shard {shard.numel()} of {shard.dtype} on {shard.device}; "
            f"it must have {comm.size} times the shard's elements, the same dtype and device"
        )
    for name, tensor in (("full tensor", full), ("shard", shard)):
        if not tensor.is_contiguous():
            raise EngineError(
                f"{operation} on rank {comm.rank}: the {name} is not contiguous (stride {tensor.stride()})"
            )
