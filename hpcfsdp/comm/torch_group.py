"""Collectives through a process group of torch.distributed, and the communicator for any group."""

from __future__ import annotations

import contextlib
import hashlib
import logging
import weakref
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from hpcfsdp import _compat, accelerator, env, timeline
from hpcfsdp.comm.backend.process_group import is_mpi_group
from hpcfsdp.comm.communicator import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.reduce import OptionalTensors, Reduction, Tensors, divide_, reduce_rows
from hpcfsdp.errors import DifferentCallsError
from hpcfsdp.hang import events
from hpcfsdp.launch.topology import Topology

log = logging.getLogger("hpcfsdp.comm")

_NATIVE_DTYPES = {torch.float64, torch.float32, torch.int64, torch.int32, torch.int8, torch.uint8}
"""The dtypes that all backends reduce themselves. Values of others are moved as bytes and reduced here."""

_NATIVE_OPS = {name: getattr(dist.ReduceOp, name.upper()) for name in ("sum", "product", "min", "max")}
_NATIVE_OPS["average"] = dist.ReduceOp.SUM  # not every backend has an average of its own


class TorchGroupCommunicator(Communicator):
    """A ``Communicator`` over a ``torch.distributed.ProcessGroup``: NCCL on GPUs, gloo or any other on the CPU."""

    def __init__(self, group: dist.ProcessGroup, device: torch.device | None = None) -> None:
        self.group = group
        self.rank, self.size = dist.get_rank(group), dist.get_world_size(group)
        self.world_ranks = tuple(dist.get_process_group_ranks(group))
        self.device = device or _compat.device_of_group(group)
        self._lines: tuple[TorchGroupCommunicator, TorchGroupCommunicator] | None = None  # within and across nodes

    @_compat.outside_of_modes
    def divide(self, nodes: Topology) -> None:
        """Make averages of narrow values within the nodes of these ranks first. Collective over the group.

        Each node sends the bytes of one rank, as with a ring. Without this it sends those of all of its ranks. Nodes
        of different sizes change nothing.
        """
        if nodes.num_nodes == 1 or nodes.ranks_per_node in (1, None):
            return
        place = nodes.local_rank(self.rank)
        within = self._subgroup(list(nodes.node_of(self.rank)))
        self._lines = within, self._subgroup([node[place] for node in nodes.nodes])
        # The ranks, by their place on their node: what one rank of this node reduces for its peers is consecutive.
        order = [node[place] for place in range(within.size) for node in nodes.nodes]
        self._by_place = torch.tensor(order, device=self.device)

    def __eq__(self, other: object) -> bool:
        # Units that are wrapped by hand have objects of their own: equal ones share what exists once for each group.
        return isinstance(other, TorchGroupCommunicator) and (self.group, self.device) == (other.group, other.device)

    def __hash__(self) -> int:
        return hash((self.group, self.device))

    def __repr__(self) -> str:
        return f"TorchGroupCommunicator({dist.get_backend(self.group)}, rank={self.rank}, size={self.size})"

    def gathering_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which device memory is registered with the group; nothing without the option.

        NCCL copies between a tensor and buffers of its own, unless the tensor's memory comes from NCCL's allocator and
        is registered with the group. Collective over the group, if that has sent nothing yet.
        """
        if not env.registered_memory():
            return contextlib.nullcontext()
        if self.group not in _pools:
            _pools[self.group] = _compat.registered_pool(self.group, self.device)
            if _pools[self.group] is None:
                backend = dist.get_backend(self.group)
                log.warning("%s has no registered memory: HPCFSDP_REGISTERED_MEMORY=1 has no effect", backend)
        pool = _pools[self.group]
        return contextlib.nullcontext() if pool is None else accelerator.allocating_from(pool, self.device)

    def _barrier(self, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, "barrier")
        with timeline.waiting("barrier"):
            return _ended(dist.barrier(self.group, async_op))

    def _labelled_barrier(self, label: str, flag: bool) -> bool:
        digest = int.from_bytes(hashlib.blake2b(label.encode(), digest_size=7).digest(), "little")
        mine = torch.tensor([digest, flag], device=self.device)
        everyone = torch.empty(2 * self.size, dtype=mine.dtype, device=self.device)
        with timeline.waiting(label):
            self.all_gather_into_tensor(everyone, mine)
            digests, flags = everyone.view(-1, 2).T.tolist()
        if digests.count(digest) != self.size:
            for peer, theirs in enumerate(self.all_gather_object(label)):
                if theirs != label:
                    raise DifferentCallsError(f"rank {self.rank} calls {label}, but rank {peer} calls {theirs}")
        return any(flags)

    def _all_gather_object(self, value: Any) -> list[Any]:
        values: list[Any] = [None] * self.size
        dist.all_gather_object(values, value, group=self.group)
        return values

    def _broadcast_object(self, value: Any, src: int) -> Any:
        holder = [value]
        dist.broadcast_object_list(holder, group_src=src, group=self.group)
        return holder[0]

    def _all_gather_into_tensor(self, label: str, output: Tensor, shard: Tensor, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        return _ended(_compat.all_gather_single(_bytes(output), _bytes(shard), self.group, async_op))

    def _reduce_scatter_tensor(
        self, label: str, output: Tensor, full: Tensor, reduction: Reduction, async_op: bool
    ) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        output, sent, accumulate = output.detach().view(-1), full.detach().view(-1), reduction.accumulate
        if full.dtype == accumulate and accumulate in _NATIVE_DTYPES and reduction.op in _NATIVE_OPS:
            total = output if output.dtype == accumulate else torch.empty_like(output, dtype=accumulate)
            work = _compat.reduce_scatter_single(total, sent, _NATIVE_OPS[reduction.op], self.group, async_op)
            return _ended(work, lambda: _store(total, output, reduction))
        # Ranks send values in their own dtype, and sum them here in another: no more bytes than a sum on the way.
        if self._lines is not None and reduction.op == "average":
            within, across = self._lines
            by_place = sent.view(self.size, -1).index_select(0, self._by_place)
            of_node = torch.empty_like(by_place[: across.size])
            within._reduce_scatter_tensor(label, of_node, by_place, replace(reduction, size=within.size), False)
            across._reduce_scatter_tensor(label, output, of_node, replace(reduction, size=across.size), False)
            return None
        received = torch.empty_like(sent)
        work = dist.all_to_all_single(_bytes(received), _bytes(sent), group=self.group, async_op=async_op)
        return _ended(work, lambda: reduce_rows(output, received.view(self.size, -1), reduction))

    def _all_reduce(self, label: str, tensor: Tensor, reduction: Reduction, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        flat, native = tensor.detach().view(-1), _NATIVE_DTYPES | {torch.float16, torch.bfloat16}
        if accelerator.is_accelerator(self.device) and tensor.dtype.itemsize < reduction.accumulate.itemsize:
            # No backend sends values in their own dtype and sums them in another.
            numel = -(-flat.numel() // self.size)
            padded, mine = flat.new_zeros(self.size * numel), flat.new_empty(numel)
            padded[: flat.numel()].copy_(flat)
            self._reduce_scatter_tensor(label, mine, padded, reduction, False)
            self._all_gather_into_tensor(label, padded, mine, False)
            flat.copy_(padded[: flat.numel()])
            return None
        if tensor.dtype in native and reduction.accumulate in _NATIVE_DTYPES and reduction.op in _NATIVE_OPS:
            total = flat.to(reduction.accumulate)
            work = dist.all_reduce(total, _NATIVE_OPS[reduction.op], self.group, async_op)
            return _ended(work, lambda: _store(total, flat, reduction))
        gathered = flat.new_empty(self.size * flat.numel())
        work = _compat.all_gather_single(_bytes(gathered), _bytes(flat), self.group, async_op)
        return _ended(work, lambda: reduce_rows(flat, gathered.view(self.size, -1), reduction))

    def _broadcast(self, label: str, tensor: Tensor, src: int, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        return _ended(dist.broadcast(_bytes(tensor), group_src=src, group=self.group, async_op=async_op))

    def _all_gather(self, label: str, outputs: Tensors, tensor: Tensor, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        # Backends gather equal parts: pad to the largest.
        largest = max(output.numel() for output in outputs)
        padded = torch.zeros(largest, dtype=tensor.dtype, device=tensor.device)
        padded[: tensor.numel()].copy_(tensor.detach().view(-1))
        gathered = padded.new_empty(self.size * largest)
        work = _compat.all_gather_single(_bytes(gathered), _bytes(padded), self.group, async_op)

        def store() -> None:
            for output, part in zip(outputs, gathered.view(self.size, -1), strict=True):
                output.detach().view(-1).copy_(part[: output.numel()])

        return _ended(work, store)

    def _exchange(self, label: str, outputs: OptionalTensors, inputs: OptionalTensors, async_op: bool) -> _Work | None:
        events.ring.note(events.BEGIN, label)
        nothing = torch.empty(0, dtype=torch.uint8, device=self.device)
        received_parts, sent_parts = ([nothing if t is None else _bytes(t) for t in side] for side in (outputs, inputs))
        sent, sent_bytes = torch.cat(sent_parts), [part.numel() for part in sent_parts]
        received_bytes = [part.numel() for part in received_parts]
        received = sent.new_empty(sum(received_bytes))
        work = dist.all_to_all_single(received, sent, received_bytes, sent_bytes, group=self.group, async_op=async_op)

        def store() -> None:
            for output, part in zip(received_parts, received.split(received_bytes), strict=True):
                output.copy_(part)

        return _ended(work, store)

    def _subgroup(self, ranks: list[int]) -> TorchGroupCommunicator:
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        return TorchGroupCommunicator(_compat.new_group_of(members, dist.get_backend(self.group)), self.device)


_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, Any | None] = weakref.WeakKeyDictionary()
"""Registered memory, for each group: it is registered with one communicator."""


def _store(total: Tensor, output: Tensor, reduction: Reduction) -> None:
    divide_(total, reduction.divisor)
    if total is not output:
        output.copy_(total)


class _Work:
    """A collective of torch.distributed, and what this rank does with its result."""

    def __init__(self, work: dist.Work, finish: Callable[[], None] | None) -> None:
        self._work, self._finish = work, finish

    @_compat.outside_of_modes
    def wait(self) -> None:
        with timeline.waiting("collective of torch.distributed"):
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


def _ended(work: dist.Work | None, finish: Callable[[], None] = lambda: None) -> _Work | None:
    """Return the result of the call of a collective for which torch.distributed has returned `work`."""
    if work is not None:
        return _Work(work, finish)
    with torch.no_grad():
        finish()  # also without the work of an ``async_op``: a group that this rank is alone in, for example
    return None


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().view(-1).view(torch.uint8)


default: Communicator | None = None  # that of the world, from ``hpcfsdp.init`` to ``finalize``


def communicator_for(group: dist.ProcessGroup | Communicator | None, *, required: bool) -> Communicator:
    """Return the communicator for a process group; by default the one of the world.

    After ``hpcfsdp.init()`` the world communicates over MPI on CPU and over NCCL on GPUs. With torch.distributed alone
    it uses the default group. torch's "fake" backend gets a ``FakeCommunicator``. A ``Communicator`` is returned as it
    is. Raises where one is `required` and there is no world yet; otherwise it has this process alone.
    """
    if group is None:
        if default is not None:
            return default
        if not dist.is_initialized() and required:
            raise RuntimeError(
                "there is no process group yet: call hpcfsdp.init() first (or torch.distributed.init_process_group)"
            )
        group = dist.group.WORLD if dist.is_initialized() else FakeCommunicator()
    if isinstance(group, Communicator):
        return group
    if not isinstance(group, dist.ProcessGroup):
        raise TypeError(
            "process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not "
            f"{type(group).__name__}"
        )
    if is_mpi_group(group):
        staged = default is not None and accelerator.is_accelerator(default.device)
        return TorchGroupCommunicator(group, default.device) if staged else group.communicator
    if dist.get_backend(group) == "fake":  # torch's own, for planning and tests: its collectives move no bytes
        return FakeCommunicator(group.rank(), group.size(), device=_compat.device_of_group(group))
    return TorchGroupCommunicator(group)
