"""Collectives through a process group of torch.distributed: NCCL on GPUs, gloo or any other on the CPU."""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp.comm.communicator import (
    PlainMemory,
    ReduceOp,
    accumulate_dtype,
    check_list,
    check_members,
    check_peer,
    check_same_numel,
    check_sizes,
    check_tensors,
    refuse_op,
)
from hpcfsdp.comm.progress import Finished
from hpcfsdp.comm.reduce import divide_, reduce_into
from hpcfsdp.comm.waits import same_call
from hpcfsdp.errors import CommunicationError, DifferentCallsError
from hpcfsdp.launch import calls

_NATIVE_DTYPES = {torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8}
"""Those that all backends reduce themselves. The others are moved as bytes and reduced here."""

_NATIVE_OPS = {
    "sum": dist.ReduceOp.SUM,
    "average": dist.ReduceOp.SUM,  # not every backend has an average of its own
    "product": dist.ReduceOp.PRODUCT,
    "min": dist.ReduceOp.MIN,
    "max": dist.ReduceOp.MAX,
}


class TorchGroupCommunicator(PlainMemory):
    """A ``Communicator`` over a ``torch.distributed.ProcessGroup``."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group = group
        self.rank: int = dist.get_rank(group)
        self.size: int = dist.get_world_size(group)
        self.world_ranks = tuple(dist.get_process_group_ranks(group))
        self.device = device or _compat.device_of_group(group)

    def __eq__(self, other: object) -> bool:
        # Each unit that is wrapped by hand has an object of its own; they are to share what there is once for a group.
        return isinstance(other, TorchGroupCommunicator) and (self.group, self.device) == (other.group, other.device)

    def __hash__(self) -> int:
        return hash((self.group, self.device))

    def __repr__(self) -> str:
        return f"TorchGroupCommunicator({dist.get_backend(self.group)}, rank={self.rank}, size={self.size})"

    def all_gather_into_tensor(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False
    ) -> _Work | Finished | None:
        check_tensors("all_gather_into_tensor", self, output, shard)
        check_sizes("all_gather_into_tensor", self, output, shard)
        return _ended(_compat.all_gather_single(_bytes(output), _bytes(shard), self.group, async_op), async_op)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> _Work | Finished | None:
        check_tensors("reduce_scatter_tensor", self, full)
        check_tensors("reduce_scatter_tensor", self, output)
        check_sizes("reduce_scatter_tensor", self, full, output)
        accumulate = self._accumulate_dtype("reduce_scatter_tensor", op, full, accumulate)
        output, divisor = output.detach().view(-1), self.size if op == "average" else 1
        travelling = full.detach().view(-1)
        if full.dtype == accumulate and accumulate in _NATIVE_DTYPES and op in _NATIVE_OPS:
            total = output if output.dtype == accumulate else torch.empty_like(output, dtype=accumulate)
            work = _compat.reduce_scatter_single(total, travelling, _NATIVE_OPS[op], self.group, async_op)

            def keep() -> None:
                divide_(total, divisor)
                if total is not output:
                    output.copy_(total)

            return _ended(work, async_op, keep)
        # Values travel in their own dtype, and are summed here in another: as many bytes as a sum on the way takes.
        arriving = torch.empty_like(travelling)
        work = dist.all_to_all_single(_bytes(arriving), _bytes(travelling), group=self.group, async_op=async_op)

        def reduce() -> None:
            pieces = list(arriving.view(self.size, -1))
            reduce_into(output, pieces, op, accumulate, divisor=divisor)

        return _ended(work, async_op, reduce)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> _Work | Finished | None:
        check_tensors("all_reduce", self, tensor)
        accumulate = self._accumulate_dtype("all_reduce", op, tensor, accumulate)
        flat, divisor = tensor.detach().view(-1), self.size if op == "average" else 1
        if (
            tensor.dtype in _NATIVE_DTYPES | {torch.float16, torch.bfloat16}
            and accumulate in _NATIVE_DTYPES
            and op in _NATIVE_OPS
        ):
            total = flat.to(accumulate)

            def keep() -> None:
                divide_(total, divisor)
                if total is not flat:
                    flat.copy_(total)

            return _ended(dist.all_reduce(total, _NATIVE_OPS[op], self.group, async_op), async_op, keep)
        everyone = torch.empty(self.size * flat.numel(), dtype=flat.dtype, device=flat.device)
        work = _compat.all_gather_single(_bytes(everyone), _bytes(flat), self.group, async_op)

        def reduce() -> None:
            reduce_into(flat, list(everyone.view(self.size, -1)), op, accumulate, divisor=divisor)

        return _ended(work, async_op, reduce)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> _Work | Finished | None:
        check_tensors("broadcast", self, tensor)
        check_peer("broadcast", self, src)
        return _ended(dist.broadcast(_bytes(tensor), group_src=src, group=self.group, async_op=async_op), async_op)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False
    ) -> _Work | Finished | None:
        check_list("all_gather", self, "outputs", outputs)
        check_tensors("all_gather", self, tensor, *outputs)
        check_same_numel("all_gather", self, outputs[self.rank], tensor)
        # Backends gather equal parts: pad to the largest.
        largest = max(output.numel() for output in outputs)
        padded = torch.zeros(largest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()].copy_(tensor.detach().view(-1))
        everyone = torch.empty(self.size * largest, dtype=tensor.dtype, device=tensor.device)
        work = _compat.all_gather_single(_bytes(everyone), _bytes(padded), self.group, async_op)

        def keep() -> None:
            for output, part in zip(outputs, everyone.view(self.size, -1), strict=True):
                output.detach().view(-1).copy_(part[: output.numel()])

        return _ended(work, async_op, keep)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> _Work | Finished | None:
        check_list("all_to_all", self, "outputs", outputs)
        check_list("all_to_all", self, "inputs", inputs)
        check_tensors("all_to_all", self, *inputs, *outputs)
        check_same_numel("all_to_all", self, outputs[self.rank], inputs[self.rank])
        return self._exchange(outputs, inputs, async_op)

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> _Work | Finished | None:
        check_peer("gather", self, dst)
        check_tensors("gather", self, tensor)
        if self.rank == dst:
            check_list("gather", self, "outputs", outputs)
            check_tensors("gather", self, tensor, *outputs)
            check_same_numel("gather", self, outputs[dst], tensor)
        nothing = tensor.new_empty(0)
        sent = [tensor if rank == dst else nothing for rank in range(self.size)]
        return self._exchange(outputs if self.rank == dst else [nothing] * self.size, sent, async_op)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, *, async_op: bool = False
    ) -> _Work | Finished | None:
        check_peer("scatter", self, src)
        check_tensors("scatter", self, output)
        if self.rank == src:
            check_list("scatter", self, "inputs", inputs)
            check_tensors("scatter", self, output, *inputs)
            check_same_numel("scatter", self, output, inputs[src])
        nothing = output.new_empty(0)
        received = [output if rank == src else nothing for rank in range(self.size)]
        return self._exchange(received, inputs if self.rank == src else [nothing] * self.size, async_op)

    def barrier(self, *, async_op: bool = False) -> _Work | Finished | None:
        return _ended(dist.barrier(self.group, async_op), async_op)

    def labelled_barrier(self, note: str) -> None:
        digest = int.from_bytes(hashlib.blake2b(note.encode(), digest_size=7).digest(), "little")
        mine = torch.tensor([digest], device=self.device)
        everyone = torch.empty(self.size, dtype=mine.dtype, device=self.device)
        self.all_gather_into_tensor(everyone, mine)
        if everyone.eq(mine).all():
            return
        for peer, theirs in enumerate(self.all_gather_object(note)):
            if theirs != note:
                raise DifferentCallsError(f"rank {self.rank} calls {note}, but rank {peer} calls {theirs}")

    def all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, (calls.current(), value), group=self.group)
        return same_call(values)

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        holder = [value]
        dist.broadcast_object_list(holder, group_src=src, group=self.group)
        return holder[0]

    def subgroup(self, ranks: Sequence[int]) -> TorchGroupCommunicator:
        ranks = check_members(self, ranks)
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        return TorchGroupCommunicator(_compat.new_group_of(members, dist.get_backend(self.group)), self.device)

    def _exchange(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], async_op: bool
    ) -> _Work | Finished | None:
        sent = torch.cat([_bytes(tensor) for tensor in inputs])
        sent_bytes = [tensor.numel() * tensor.element_size() for tensor in inputs]
        received_bytes = [tensor.numel() * tensor.element_size() for tensor in outputs]
        received = torch.empty(sum(received_bytes), dtype=torch.uint8, device=sent.device)
        work = dist.all_to_all_single(received, sent, received_bytes, sent_bytes, group=self.group, async_op=async_op)

        def keep() -> None:
            for output, part in zip(outputs, received.split(received_bytes), strict=True):
                _bytes(output).copy_(part)

        return _ended(work, async_op, keep)

    def _accumulate_dtype(
        self, label: str, op: str, tensor: torch.Tensor, accumulate: torch.dtype | None
    ) -> torch.dtype:
        problem = refuse_op(op, tensor.dtype)
        if problem:
            raise CommunicationError(f"{label} on rank {self.rank}: {problem}")
        return accumulate or accumulate_dtype(tensor.dtype, op)


class _Work:
    """A collective of torch.distributed, and what is left to do here when it is through."""

    def __init__(self, work: dist.Work, finish: Callable[[], None]) -> None:
        self._work = work
        self._finish: Callable[[], None] | None = finish

    def wait(self) -> None:
        self._work.wait()
        if self._finish is not None:
            with torch.no_grad():
                self._finish()
            self._finish = None

    def is_completed(self) -> bool:
        if self._finish is not None and not self._work.is_completed():
            return False
        self.wait()
        return True


def _ended(
    work: dist.Work | None, async_op: bool, finish: Callable[[], None] = lambda: None
) -> _Work | Finished | None:
    """What a collective returns whose transport has returned `work`."""
    if work is not None:
        return _Work(work, finish)
    with torch.no_grad():
        finish()
    return Finished() if async_op else None  # a group that this rank is alone in, for example


def _bytes(tensor: torch.Tensor) -> torch.Tensor:
    """The memory of a tensor of any dtype."""
    return tensor.detach().view(-1).view(torch.uint8)
