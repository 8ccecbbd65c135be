"""Collectives of a torch process group in progress, and the host tensors that MPI reads and writes for them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.progress import Running
from hpcfsdp.comm.reduce import ReduceOp, Tensors
from hpcfsdp.errors import CommunicationError

if TYPE_CHECKING:
    from hpcfsdp.comm.mpi.messages import Requests

_OPS: tuple[tuple[Any, ReduceOp], ...] = (
    (dist.ReduceOp.SUM, "sum"),
    (dist.ReduceOp.AVG, "average"),
    (dist.ReduceOp.PRODUCT, "product"),
    (dist.ReduceOp.MIN, "min"),
    (dist.ReduceOp.MAX, "max"),
    (dist.ReduceOp.BAND, "band"),
    (dist.ReduceOp.BOR, "bor"),
    (dist.ReduceOp.BXOR, "bxor"),
)


class HostTensors:
    """Tensors that MPI uses for the caller's: the caller's own if on the CPU and contiguous, copies of others."""

    @_compat.outside_of_modes
    def __init__(
        self,
        inputs: Tensors = (),
        outputs: Tensors = (),
        *,
        in_place: bool = False,
        op: Any = None,
        ordered: bool = True,
    ) -> None:
        """
        Args:
            in_place: the outputs are inputs, too.
            op: torch's reduction. The attribute `op` is the same in terms of ``Communicator``.
            ordered: complete earlier collectives on the same memory first, also if no caller waits for them, as NCCL
                does. Not for messages between two ranks: a receive may wait for a later send of this rank.
        """
        self.ordered = ordered
        self.written = _spans(outputs)
        self.used = self.written + _spans(inputs)
        if ordered:
            _complete_earlier(self)
        factor = None if op is None else _compat.premultiplier(op)
        self.op: ReduceOp = "sum" if op is None or factor is not None else _reduce_op(op)
        self.inputs = [_to_host(tensor, copy=True) for tensor in inputs]
        self.outputs = [_to_host(tensor, copy=in_place) for tensor in outputs]
        self._results = list(outputs)
        if factor is not None:
            self.inputs = [host * factor for host in self.inputs]
            for host in self.outputs if in_place else ():
                host.mul_(factor)

    def work(self, parts: Iterable[Running | None], requests: Requests | None = None) -> GroupWork:
        work = GroupWork([part for part in parts if part is not None], self, requests)
        if self.ordered and work.parts:
            _unfinished.append(work)
        return work

    @_compat.outside_of_modes
    def copy_back(self) -> list[torch.Tensor]:
        """Copy the outputs to the caller's tensors, and return these."""
        with torch.no_grad():
            for result, host in zip(self._results, self.outputs, strict=True):
                if host is not result and (is_sparse(host) or _spans([host]) != _spans([result])):
                    _copy_to_caller(result if is_sparse(result) else result.data, host)
        return self._results


def _to_host(tensor: torch.Tensor, *, copy: bool) -> torch.Tensor:
    if is_sparse(tensor):
        return tensor.cpu()
    tensor = tensor.data  # with a version of its own: autograd may have saved the caller's, as with other backends
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=accelerator.is_accelerator(tensor.device))
    return host.copy_(tensor) if copy else host


def _copy_to_caller(result: torch.Tensor, host: torch.Tensor) -> None:
    """Copy to a tensor that may be expanded: its elements share memory along a dimension of stride 0."""
    if not is_sparse(result):
        for dim, (size, stride) in enumerate(zip(result.shape, result.stride(), strict=True)):
            first = host.narrow(dim, 0, min(size, 1))
            if size > 1 and stride == 0 and bool(((host == first) | first.isnan()).all()):
                result, host = result.narrow(dim, 0, 1), first
    result.copy_(host)


def _spans(tensors: Tensors) -> list[tuple[int, int]]:
    """Return the memory of each tensor, from its first element to the end of its last."""
    spans = []
    for tensor in tensors:
        if not is_sparse(tensor) and tensor.numel():
            last = sum((size - 1) * stride for size, stride in zip(tensor.shape, tensor.stride(), strict=True))
            spans.append((tensor.data_ptr(), tensor.data_ptr() + (last + 1) * tensor.element_size()))
    return spans


def _overlap(spans: Iterable[tuple[int, int]], others: Sequence[tuple[int, int]]) -> bool:
    return any(begin < other_end and other < end for begin, end in spans for other, other_end in others)


def is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


def _reduce_op(op: Any) -> ReduceOp:
    for known, name in _OPS:
        if op == known:
            return name
    raise CommunicationError(f"hpcmpi does not reduce by {op}: use one of {', '.join(name for _, name in _OPS)}")


class GroupWork(_compat.Work):
    """A collective of a process group in progress."""

    def __init__(self, parts: Sequence[Running], hosts: HostTensors, requests: Requests | None) -> None:
        super().__init__()
        self.timeout_s: float | None = None  # None: that of the group
        self.chunks = 1  # into which the result is split
        self.parts = parts
        self.hosts = hosts
        self._requests = requests
        self._results: list[torch.Tensor] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the result may be used; `timeout` instead of that of the group."""
        _forget(self)  # first: a later call on the same memory must not raise the error of this one
        for part in self.parts:
            part.wait(timeout.total_seconds() if timeout else self.timeout_s)
        if self._results is None:
            self._results = self.hosts.copy_back()
            if self.chunks > 1:
                self._results = list(self._results[0].chunk(self.chunks))
        return True

    synchronize = wait

    def has_ended(self) -> bool:
        """Return whether it needs no more steps. Advances nothing."""
        return all(part.done for part in self.parts)

    def is_completed(self) -> bool:
        """Return whether it has ended, also with an error, which ``wait`` raises."""
        if not all(part.is_completed() for part in self.parts):
            return False
        if not any(part.failed for part in self.parts):
            self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._results is not None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        assert self._results is not None
        return self._results

    def source_rank(self) -> int:
        """Return the rank that sent a received message."""
        return self._requests.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """Return the result as a completed future: nothing advances a collective while C++ code waits for it."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


_unfinished: list[GroupWork] = []
"""Collectives whose results no caller has waited for."""


def _complete_earlier(hosts: HostTensors) -> None:
    for work in tuple(_unfinished):
        if _overlap(work.hosts.written, hosts.used) or _overlap(work.hosts.used, hosts.written):
            work.wait()
        elif work.has_ended() and work.is_completed():
            _forget(work)


def _forget(work: GroupWork) -> None:
    with contextlib.suppress(ValueError):  # another thread was first
        _unfinished.remove(work)
