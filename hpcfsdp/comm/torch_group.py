"""Collectives through a process group of torch.distributed, and the communicator for any group."""

from __future__ import annotations

import contextlib
import copy
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
from hpcfsdp.comm.communicator import CommOptions, Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.reduce import OptionalTensors, Reduction, Tensors, divide_, reduce_rows
from hpcfsdp.errors import DifferentCallsError
from hpcfsdp.hang import events, lost
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
        self._options = CommOptions()

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

    def _check(self, label: str, *tensors: Tensor, written: Tensors = ()) -> None:
        lost.check(label)
        super()._check(label, *tensors, written=written)

    def choosing(self, options: CommOptions) -> TorchGroupCommunicator:
        if options == self._options:
            return self
        made = copy.copy(self)
        made._options = options
        return made

    def lacking(self, options: CommOptions) -> list[str]:
        backend = _compat.backend_name(self.group, self.device)
        found = [f"{name}={value!r}" for name, value in options.of_group if backend != "nccl"]
        if options.memory in ("registered", "symmetric") and accelerator.is_accelerator(self.device):
            has_it = _compat.has_symmetric_memory if options.memory == "symmetric" else _compat.has_registered_memory
            found += [] if has_it(self.group, self.device) else [f"memory={options.memory!r}"]
        return found

    def with_own_group(self, options: CommOptions) -> TorchGroupCommunicator:
        """Return one of the same ranks with a group that is made with options. Collective over the group."""
        made = _compat.group_options(dict(options.of_group)) if options.of_group else None
        group = _compat.new_group_of(self.world_ranks, dist.get_backend(self.group), made)
        return TorchGroupCommunicator(group, self.device)

    @property
    def _is_symmetric(self) -> bool:
        return self._options.memory == "symmetric" and accelerator.is_accelerator(self.device)

    def gathering_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which device memory is registered with the group, or symmetric, if that was chosen.

        NCCL copies between a tensor and buffers of its own, unless the tensor's memory comes from NCCL's allocator and
        is registered with the group. Collective over the group, if that has sent nothing yet.
        """
        chosen = self._options.memory
        if chosen == "plain" or (chosen is None and not env.registered_memory()):
            return contextlib.nullcontext()
        if chosen is not None and not accelerator.is_accelerator(self.device):
            return contextlib.nullcontext()
        pools = _pools.setdefault(self.group, {})
        if self._is_symmetric not in pools:
            make = _compat.symmetric_pool if self._is_symmetric else _compat.registered_pool
            pools[self._is_symmetric] = make(self.group, self.device)
            if pools[self._is_symmetric] is None:
                backend = dist.get_backend(self.group)
                log.warning("%s has no registered memory: HPCFSDP_REGISTERED_MEMORY=1 has no effect", backend)
        pool = pools[self._is_symmetric]
        return contextlib.nullcontext() if pool is None else accelerator.allocating_from(pool, self.device)

    def announce_gather(self, output: Tensor) -> None:
        if self._is_symmetric and self.size > 1:
            _compat.rendezvous(output, self.group)

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
        if self._sums_by_backend(full, reduction):
            total = output if output.dtype == sent.dtype else torch.empty_like(output, dtype=sent.dtype)
            op, after = _divided(sent, reduction.size)
            work = _compat.reduce_scatter_single(total, sent, op, self.group, async_op)
            return _ended(work, lambda: _store(total, output, after))
        if full.dtype == accumulate and accumulate in _NATIVE_DTYPES and reduction.op in _NATIVE_OPS:
            total = output if output.dtype == accumulate else torch.empty_like(output, dtype=accumulate)
            op, after = self._native(reduction)
            work = _compat.reduce_scatter_single(total, sent, op, self.group, async_op)
            return _ended(work, lambda: _store(total, output, after))
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
        if self._sums_by_backend(flat, reduction):
            op, after = _divided(flat, reduction.size)
            return _ended(dist.all_reduce(flat, op, self.group, async_op), lambda: _store(flat, flat, after))
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
            op, after = self._native(reduction)
            work = dist.all_reduce(total, op, self.group, async_op)
            return _ended(work, lambda: _store(total, flat, after))
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

    def _sums_by_backend(self, tensor: Tensor, reduction: Reduction) -> bool:
        is_float = tensor.is_floating_point() and tensor.dtype.itemsize > 1  # no backend adds up fp8
        return self._options.sums_by == "backend" and reduction.op == "average" and is_float

    def _native(self, reduction: Reduction) -> tuple[Any, float]:
        """Return the backend's operation, and the divisor after it.

        Backends of devices average float32 in the same kernel; torch's FSDP2 needs that of them, too.
        """
        is_float32 = reduction.accumulate == torch.float32
        if reduction.op == "average" and is_float32 and accelerator.is_accelerator(self.device):
            return dist.ReduceOp.AVG, 1
        return _NATIVE_OPS[reduction.op], reduction.divisor

    def _subgroup(self, ranks: list[int]) -> TorchGroupCommunicator:
        members = [dist.get_global_rank(self.group, rank) for rank in ranks]
        return TorchGroupCommunicator(_compat.new_group_of(members, dist.get_backend(self.group)), self.device)


_pools: weakref.WeakKeyDictionary[dist.ProcessGroup, dict[bool, Any | None]] = weakref.WeakKeyDictionary()
"""Registered memory for each group, by whether it is symmetric: it is registered with one communicator."""


def _divided(sent: Tensor, size: int) -> tuple[Any, float]:
    """Return the reduction, and the divisor after it, that make an average of it as FSDP2 does; divide before it.

    A sum of float16 overflows early: about the root of the divisor comes before it. Backends average other dtypes.
    """
    if sent.dtype in (torch.float32, torch.bfloat16):
        return dist.ReduceOp.AVG, 1
    before = 1
    while size % before == 0 and size / before > before:
        before *= 2
    sent.div_(before)
    return dist.ReduceOp.SUM, size / before


def _store(total: Tensor, output: Tensor, divisor: float) -> None:
    divide_(total, divisor)
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
