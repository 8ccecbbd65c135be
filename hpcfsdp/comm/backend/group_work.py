"""Collectives of a torch process group in progress, with the host tensors that MPI reads and writes for them."""

from __future__ import annotations

import contextlib
import datetime
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any, get_args

import torch
import torch.distributed as dist
from torch import Tensor

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.progress import Running
from hpcfsdp.comm.reduce import ReduceOp, Tensors
from hpcfsdp.errors import CommunicationError

if TYPE_CHECKING:
    from hpcfsdp.comm.mpi.messages import Requests

_OPS = {name: getattr(dist.ReduceOp, {"average": "AVG"}.get(name, name.upper())) for name in get_args(ReduceOp)}


class GroupWork(_compat.Work):
    """A collective of a process group in progress.

    MPI reads and writes `inputs` and `outputs`: the caller's own if on the CPU and contiguous, copies of others. `op`
    is the reduction in terms of ``Communicator``.
    """

    @_compat.outside_of_modes
    def __init__(
        self, inputs: Tensors = (), outputs: Tensors = (), in_place: bool = False, op: Any = None, ordered: bool = True
    ) -> None:
        """Prepare the tensors for torch's `op`. If `in_place` the outputs are inputs, too.

        If `ordered`, complete earlier collectives on the same memory first, also if no caller waits for them, as NCCL
        does. Not for messages between two ranks: a receive may wait for a later send of this rank.
        """
        super().__init__()
        inputs, outputs = list(map(_with_memory, inputs)), list(map(_with_memory, outputs))
        self.timeout_s: float | None = None  # None: that of the group
        self.chunks = 1  # into which the result is split
        self._parts: list[Running] = []
        self._requests: Requests | None = None
        self._results: list[Tensor] | None = None
        self._ordered = ordered
        self._written = _spans(outputs)
        self._used = self._written + _spans(inputs)
        for earlier in tuple(_unfinished) if ordered else ():
            if _overlap(earlier._written, self._used) or _overlap(earlier._used, self._written):
                earlier.wait()
            elif all(part.done for part in earlier._parts) and earlier.is_completed():
                _forget(earlier)
        factor = None if op is None else _compat.premultiplier(op)
        plain = dist.ReduceOp.SUM if op is None or factor is not None else op
        self.op: ReduceOp | None = next((name for name, known in _OPS.items() if plain == known), None)
        if self.op is None:
            raise CommunicationError(f"hpcmpi does not reduce by {op}: use one of {', '.join(_OPS)}")
        self.inputs = [_to_host(tensor, copy=True) for tensor in inputs]
        self.outputs = [_to_host(tensor, copy=in_place) for tensor in outputs]
        self._given = list(outputs)
        if factor is not None:
            self.inputs = [host * factor for host in self.inputs]
            for host in self.outputs if in_place else ():
                host.mul_(factor)

    def of(self, parts: Iterable[Running | None], requests: Requests | None = None) -> GroupWork:
        """Return this work, which consists of these parts."""
        self._parts, self._requests = [part for part in parts if part is not None], requests
        if self._ordered and self._parts:
            _unfinished.append(self)
        return self

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the result may be used; `timeout` instead of that of the group."""
        _forget(self)  # first: a later call on the same memory must not raise the error of this one
        for part in self._parts:
            part.wait(timeout.total_seconds() if timeout else self.timeout_s)
        if self._results is None:
            self._copy_back()
            self._results = self._given if self.chunks == 1 else list(self._given[0].chunk(self.chunks))
        return True

    synchronize = wait

    @_compat.outside_of_modes
    @torch.no_grad()
    def _copy_back(self) -> None:
        for result, host in zip(self._given, self.outputs, strict=True):
            if is_sparse(host):
                if host is not result:
                    result.copy_(host)
            elif (host.device, host.data_ptr()) != (result.device, result.data_ptr()):
                _copy_to_caller(result.data, host)

    def is_completed(self) -> bool:
        """Return whether it has ended, also with an error, which ``wait`` raises."""
        if not all(part.is_completed() for part in self._parts):
            return False
        if not any(part.failed for part in self._parts):
            self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._results is not None

    def result(self) -> list[Tensor]:
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


_unfinished: list[GroupWork] = []  # collectives whose results no caller has waited for


def _forget(work: GroupWork) -> None:
    with contextlib.suppress(ValueError):  # another thread was first
        _unfinished.remove(work)


def _with_memory(tensor: Tensor) -> Tensor:
    """Return the tensor within a subclass that wraps one and has no memory; any other itself."""
    found = [tensor] if is_sparse(tensor) else list(_compat.inner_tensors(tensor))
    if len(found) != 1:
        raise CommunicationError(
            f"hpcmpi was given a {type(tensor).__module__}.{type(tensor).__qualname__}, which holds {len(found)} "
            "tensors: send these one by one"
        )
    return found[0]


def _to_host(tensor: Tensor, *, copy: bool) -> Tensor:
    if is_sparse(tensor):
        return tensor.cpu()
    tensor = tensor.data  # with a version of its own: autograd may have saved the caller's, as with other backends
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    host = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=accelerator.is_accelerator(tensor.device))
    return host.copy_(tensor) if copy else host


def _copy_to_caller(result: Tensor, host: Tensor) -> None:
    """Copy to a tensor that may be expanded: its elements share memory along a dimension of stride 0."""
    for dim, size in enumerate(result.shape):
        first = host.narrow(dim, 0, min(size, 1))
        if size > 1 and result.stride(dim) == 0 and bool(((host == first) | first.isnan()).all()):
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


def _overlap(spans: Iterable[tuple[int, int]], others: Iterable[tuple[int, int]]) -> bool:
    return any(begin < other_end and other < end for begin, end in spans for other, other_end in others)


def is_sparse(tensor: Tensor) -> bool:
    return tensor.layout is torch.sparse_coo
