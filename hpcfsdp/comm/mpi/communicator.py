"""Collectives on CPU tensors over MPI: messages between any ranks, shared memory within a node.

Each collective is a generator of the conditions that it waits for (progress.py). Those on tensors from ``alloc`` use
the node's shared memory (shared.py). On one node large tensors elsewhere pass through such memory (staged.py); all
others exchange messages (exchange.py).
"""

from __future__ import annotations

import functools
import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI
from torch import Tensor

from hpcfsdp import _compat
from hpcfsdp.comm.communicator import KEPT_PART, Communicator, Work, check_list, check_peer, check_same_numel, describe
from hpcfsdp.comm.mpi import exchange, shared, staged
from hpcfsdp.comm.mpi.messages import MessageMatcher, MpiCall, Requests
from hpcfsdp.comm.mpi.node_memory import NodeMemory, memory_at, memory_bytes, memory_limit, share
from hpcfsdp.comm.mpi.part_comm import PartComm
from hpcfsdp.comm.mpi.shared import NodeView
from hpcfsdp.comm.progress import Running, Steps, complete, run
from hpcfsdp.comm.reduce import OptionalTensors, ReduceOp, Reduction, Tensors
from hpcfsdp.errors import CommunicationError, CrossedCallsError, DifferentCallsError
from hpcfsdp.hang import calls, departure, lost
from hpcfsdp.hang.waits import key_of
from hpcfsdp.launch.job import current_job
from hpcfsdp.launch.topology import Topology

_TAGS = 1 << 13
"""Tags of collectives, which take turns. Higher tags are those of mismatches, ``subgroup``, ``send`` and ``recv``."""
_TAG_MISMATCH = _TAGS
_TAG_SUBGROUP = _TAGS + 1
_TAG_USER = _TAGS + 2
_BARRIER = "barrier: "  # the beginning of the labels of ``labelled_barrier``
_STORED_LABELS = 128  # calls whose labels are stored


class MpiCommunicator(Communicator):
    """A ``Communicator`` over the ranks of an mpi4py communicator, for CPU tensors of any dtype."""

    device = torch.device("cpu")

    def __init__(
        self,
        comm: MPI.Intracomm | PartComm,
        topology: Topology | None = None,
        *,
        timeout_s: float = 1800.0,
        compare_calls: bool = False,
    ) -> None:
        """Not collective. This object alone may use `comm`, whose ranks share memory as `topology` says; None: none do.

        A collective waits `timeout_s` for ranks that do not take part. If `compare_calls`, all compare their calls
        before each collective, and an error names a rank with another one: a message to every rank each time.
        """
        self.comm = comm
        self.rank, self.size = comm.rank, comm.size
        self.topology = topology or Topology.regular(comm.size, 1)
        self.timeout_s, self.compare_calls = timeout_s, compare_calls
        if self.topology.size != self.size:
            raise CommunicationError(
                f"a topology of {self.topology.size} ranks ({self.topology}) was given for {self.size} ranks"
            )
        self.shares_gathered = self.topology.num_nodes == 1 and self.size > 1
        self.shares_memory = any(len(node) > 1 for node in self.topology.nodes)
        self.spans_nodes = self.topology.num_nodes > 1
        self.node_size = len(self.topology.node_of(self.rank))
        self._matcher = MessageMatcher(comm, _TAG_MISMATCH, self.topology.node_of(self.rank))
        self.calls = 0  # collectives that this rank has begun, the same number on all ranks
        self._labels: list[str | None] = [None] * _STORED_LABELS  # of the last calls
        self.world_ranks = _ranks_in_job(comm)
        self.key = key_of(self, self.world_ranks)
        self._closed, self._generation = False, lost.generation
        self._node: MPI.Intracomm | None = None
        self._allocated: dict[int, NodeMemory] = {}  # by address
        self._released: dict[NodeMemory, None] = {}  # by ``release``, not freed yet, the oldest first
        self._staging = staged.StagingMemory()
        self._barrier_memory: NodeMemory | None = None  # for labelled_barrier

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size}, {self.topology})"

    # Memory

    def _alloc(self, numel: int, dtype: torch.dtype, gathered: bool) -> Tensor:
        self._check_open("alloc")
        label = f"alloc of {numel} x {dtype}" + (", gathered" if gathered else "")
        self._run(label, False, exchange.barrier)
        if self._node is None:
            self._node = self.comm.Split(self.topology.node_rank(self.rank), self.rank)
        memory, problem = None, None
        try:
            ranks = self.topology.node_of(self.rank)
            shared_bytes = share(self._node, memory_bytes(len(ranks), numel * dtype.itemsize, gathered=gathered))
            memory = NodeMemory(shared_bytes, self._node.rank, ranks, numel, dtype, gathered=gathered)
        except Exception as error:  # of any kind: the others must learn of it
            problem = str(error)
        problems = [other for other in self.comm.allgather(problem) if other]
        if memory is None or problems:
            raise CommunicationError(f"{label}: {problems[0]}")
        if numel:
            self._allocated[memory.address] = memory
        return memory.mine

    def free(self, tensor: Tensor) -> None:
        if not tensor.numel() or self._closed:  # close() has freed all memory
            return
        memory = self._allocated.get(tensor.untyped_storage().data_ptr())
        if memory is None or memory.mine.data_ptr() != tensor.data_ptr() or memory.mine.numel() != tensor.numel():
            raise CommunicationError(
                f"free on rank {self.rank}: this tensor of {describe(tensor)} is not a whole tensor from this "
                "communicator's alloc, or was freed before"
            )
        del self._allocated[memory.address]
        self._released.pop(memory, None)

    # Collectives on tensors

    def _all_gather_into_tensor(self, label: str, output: Tensor, shard: Tensor, async_op: bool) -> Running | None:
        memory = self._memory_of(output, gathered=True)
        if memory is None:
            self._check(label, written=[output])
            whole, by_messages = output.view(self.size, output.numel() // self.size), exchange.all_gather_into
            ways = staged.all_gather_into, functools.partial(by_messages, topology=self.topology)
            return self._run_plain(label, async_op, output, ways, whole, shard.view(-1))
        if output.numel() != memory.mine.numel():
            raise CommunicationError(
                f"{label} on rank {self.rank}: gathered memory of {memory.mine.numel()} elements can only be gathered "
                f"as a whole, not {output.numel()} of them"
            )
        parts = [(part,) for part in output.view(self.size, -1)]
        return self._run(label, async_op, shared.all_gather, self._view(memory), parts, (shard.view(-1),))

    @_compat.outside_of_modes
    def all_gather_parts(
        self,
        memory: Tensor,
        parts: Sequence[Tensors],
        mine: Tensors,
        *,
        within: Communicator | None = None,
        async_op: bool = False,
    ) -> Work | None:
        label, ranks = f"all_gather_parts of {describe(memory)}", within or self
        assert isinstance(ranks, MpiCommunicator)
        self._check_open(label)
        found = self._memory_of(memory, gathered=True)
        assert found is not None
        self._released.pop(found, None)
        self._clear_released()
        found.ranks = ranks.topology.node_of(ranks.rank)
        return ranks._run(label, async_op, shared.all_gather, ranks._view(found), parts, mine)

    def release(self, memory: Tensor) -> None:
        found = self._memory_of(memory, gathered=True)
        if found is not None and self.spans_nodes and not self._closed:
            found.release()
            self._released[found] = None
            self._clear_released()

    def _clear_released(self) -> None:
        """Free the memory that was released first, as far as peers have released it, too; keep the last."""
        excess = sum(memory.mine.nbytes for memory in self._released) - KEPT_PART * memory_limit()
        for memory in list(self._released):
            if excess <= 0:
                return
            if memory.clear():
                excess -= memory.mine.nbytes
                del self._released[memory]

    def _reduce_scatter_tensor(
        self, label: str, output: Tensor, full: Tensor, reduction: Reduction, async_op: bool
    ) -> Running | None:
        pieces = full.view(self.size, full.numel() // self.size)
        memory, flat = self._memory_of(full), output.view(-1)
        if memory is None:
            ways = staged.reduce_scatter, exchange.reduce_scatter
            return self._run_plain(label, async_op, full, ways, pieces, flat, reduction)
        label += _at(full, memory)
        return self._run(label, async_op, shared.reduce_scatter, self._view(memory), pieces.unbind(), flat, reduction)

    def _all_reduce(self, label: str, tensor: Tensor, reduction: Reduction, async_op: bool) -> Running | None:
        flat, memory = tensor.view(-1), self._memory_of(tensor)
        if memory is None:
            ways = staged.all_reduce, functools.partial(exchange.all_reduce, topology=self.topology)
            return self._run_plain(label, async_op, tensor, ways, flat, reduction)
        pieces, label = flat.tensor_split(self.size), label + _at(tensor, memory)
        return self._run(label, async_op, shared.all_reduce, self._view(memory), pieces, reduction)

    @_compat.outside_of_modes
    def all_reduce_sparse(self, tensor: Tensor, op: ReduceOp, *, async_op: bool = False) -> Running | None:
        """`tensor`, sparse COO of the same shape on all ranks, becomes its sum or average over all ranks, coalesced."""
        label = f"all_reduce({op}) of a sparse tensor of {tuple(tensor.shape)} x {tensor.dtype}"
        label += f", sparse in {tensor.sparse_dim()} dimension(s)"
        self._check_open(label)
        if op not in ("sum", "average"):
            raise CommunicationError(f"{label} on rank {self.rank}: sparse tensors support only 'sum' and 'average'")
        reduction = self._reduction(label, op, tensor, None)
        return self._run(label, async_op, exchange.all_reduce_sparse, tensor, reduction)

    @_compat.outside_of_modes
    def reduce_scatter(self, output: Tensor, inputs: Tensors, op: ReduceOp, *, async_op: bool = False) -> Work | None:
        """`output` becomes the reduction of all ranks' ``inputs[rank]``. Its size may differ between ranks."""
        label = f"reduce_scatter({op}) of {output.dtype}"
        check_list(label, self, "inputs", inputs)
        self._check(label, *inputs, written=[output])
        check_same_numel(label, self, output, inputs[self.rank])
        reduction = self._reduction(label, op, output, None)
        pieces = [piece.view(-1) for piece in inputs]
        return self._run(label, async_op, exchange.reduce_scatter, pieces, output.view(-1), reduction)

    def _broadcast(self, label: str, tensor: Tensor, src: int, async_op: bool) -> Running | None:
        return self._run(label, async_op, exchange.broadcast, tensor, src)

    def _exchange(self, label: str, outputs: OptionalTensors, inputs: OptionalTensors, async_op: bool) -> Work | None:
        return self._run(label, async_op, exchange.all_to_all, outputs, inputs)

    def _barrier(self, async_op: bool) -> Running | None:
        self._check_open("barrier")
        return self._run("barrier", async_op, exchange.barrier)

    def _labelled_barrier(self, label: str, flag: bool) -> bool:
        self._check_open("labelled_barrier")
        try:
            return self._compare_labels(f"{_BARRIER}{label}", flag)
        except CommunicationError as error:
            (text,) = error.args
            error.args = (text.replace(_BARRIER, ""),)
            if type(error) is DifferentCallsError and text.count(_BARRIER) < 2:
                raise CrossedCallsError(*error.args) from None  # the other rank makes another call: it cannot be asked
            raise

    def _compare_labels(self, label: str, flag: bool) -> bool:
        if self.topology.num_nodes > 1:
            call, flags = self._call(label), torch.zeros(self.size, 1, dtype=torch.uint8)
            flags[self.rank] = flag
            self._start(exchange.gather_small(call, flags), label, number=call.sequence)
            return bool(flags.any())
        if self._barrier_memory is None:
            self._barrier_memory = self._memory_of(self.alloc(2 * self.size, torch.uint8, gathered=True), gathered=True)
        self._count(label)
        self._start(shared.labelled_barrier(self._barrier_memory, label, self.rank, flag), label, number=self.calls)
        return bool(shared.barrier_flags(self._barrier_memory).any())

    # Messages between two ranks

    @_compat.outside_of_modes
    def send(self, tensor: Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Running | None:
        """Not collective. Send `tensor` to rank `dst`, which receives it with the same tag."""
        label = f"send to {dst} of {describe(tensor)}"
        self._check(label, tensor)
        check_peer(label, self, dst)
        call = self._message(label, tag, tensor)
        return self._start(exchange.send(call, tensor, dst), label, async_op)

    @_compat.outside_of_modes
    def recv(
        self, tensor: Tensor, src: int | None, tag: int = 0, *, async_op: bool = False
    ) -> tuple[Requests, Running | None]:
        """Not collective. Receive a tensor that rank `src` (None: any) sends with the same tag.

        Return the requests, with the sender as their `source`, and the work.
        """
        label = f"recv from {'any rank' if src is None else src} of {describe(tensor)}"
        self._check(label, written=[tensor])
        if src is not None:
            check_peer(label, self, src)
        requests = Requests(self._message(label, tag, tensor))
        requests.recv(tensor, src)
        work = self._start(exchange.recv(requests), label, async_op)
        if work is not None:
            work.optional = True
        return requests, work

    # Collectives on objects

    def _all_gather_object(self, value: Any) -> list[Any]:
        mine = _pickled(value)
        counts = torch.empty(self.size, dtype=torch.int64)
        self.all_gather_into_tensor(counts, torch.tensor([mine.numel()]))
        blobs = [torch.empty(count, dtype=torch.uint8) for count in counts.tolist()]
        self.all_gather(blobs, mine)
        return [pickle.loads(blob.numpy()) for blob in blobs]

    def _broadcast_object(self, value: Any, src: int) -> Any:
        blob = _pickled(value) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        count = torch.tensor([blob.numel()])
        self.broadcast(count, src)
        if self.rank != src:
            blob = torch.empty(int(count), dtype=torch.uint8)
        self.broadcast(blob, src)
        return value if self.rank == src else pickle.loads(blob.numpy())

    # Groups, and the end

    def _subgroup(self, ranks: list[int]) -> MpiCommunicator:
        self._check_open("subgroup")
        label = f"subgroup of ranks {ranks}"
        call = MpiCall(self._matcher, label, _TAG_SUBGROUP)
        self._start(exchange.wait_for(call, ranks), label)
        comm, topology = create_group(self.comm, ranks), self.topology.restrict(ranks)
        return MpiCommunicator(comm, topology, timeout_s=self.timeout_s, compare_calls=self.compare_calls)

    def close(self) -> None:
        """Complete collectives in progress, free all memory, and refuse further calls. Collective over its ranks."""
        if self._generation != lost.generation:
            self.abandon()
        if self._closed:
            return
        try:
            complete(self)
        finally:
            self.abandon()
            if self._node is not None:
                self._node.Free()
            if self._matcher.is_clean:
                self.comm.Free()

    def abandon(self) -> None:
        """Not collective. Refuse further calls, and leave collectives in progress incomplete."""
        self._closed = True
        self._allocated.clear()
        self._released.clear()
        self._staging.memory = None

    def departed(self) -> set[int]:
        """Not collective. Return the ranks that are known to have left the program."""
        gone = departure.departed()
        return {rank for rank, world_rank in enumerate(self.world_ranks) if world_rank in gone}

    def _start(self, steps: Steps, label: str, async_op: bool = False, number: int | None = None) -> Running | None:
        return run(steps, label, self.rank, self.timeout_s, async_op, self, number)

    def _run(self, label: str, async_op: bool, collective: Callable[..., Steps], *arguments: Any) -> Running | None:
        """Count a collective, and begin it."""
        call = self._call(label)
        steps = collective(call, *arguments)
        if self.compare_calls and self.size > 1 and collective is not staged.in_turn:  # which compares by itself
            texts = [f"{text} (call {self.calls})" for text in (label, call.label)]
            steps = _after_comparison(self._current_call(*texts), steps)
        return self._start(steps, label, async_op, call.sequence)

    def _run_plain(
        self, label: str, async_op: bool, full: Tensor, ways: tuple[Callable[..., Steps], ...], *arguments: Any
    ) -> Running | None:
        """Run a collective of memory that is not the communicator's, through memory of the node or by messages."""
        if self.shares_gathered and staged.pays(ways[0], full):
            return self._run(label, async_op, staged.in_turn, self._staging, *ways, *arguments)
        return self._run(label, async_op, ways[1], *arguments)

    def _call(self, label: str) -> MpiCall:
        self._count(label)
        return self._current_call(label, calls.within(label))

    def _current_call(self, label: str, within: str) -> MpiCall:
        return MpiCall(self._matcher, label, self.calls % _TAGS, self.calls, within=within)

    def _count(self, label: str) -> None:
        self.calls += 1
        self._labels[self.calls % _STORED_LABELS] = label

    def called(self, number: int) -> str | None:
        """Return what ``waits.register`` says."""
        if number > self.calls:
            return ""
        return self._labels[number % _STORED_LABELS] if number > self.calls - _STORED_LABELS else None

    def _message(self, label: str, tag: int, tensor: Tensor) -> MpiCall:
        limit = self.comm.Get_attr(MPI.TAG_UB) - _TAG_USER
        if not 0 <= tag <= limit:
            raise CommunicationError(f"{label} on rank {self.rank}: tag {tag} is not in 0 to {limit}")
        return MpiCall(self._matcher, label, _TAG_USER + tag, expected=str(tensor.dtype))

    def _memory_of(self, tensor: Tensor, *, gathered: bool = False) -> NodeMemory | None:
        """Return the ``NodeMemory`` that holds `tensor`, None unless one of this kind and dtype does."""
        if not self._allocated or not tensor.numel():
            return None
        memory = self._allocated.get(tensor.untyped_storage().data_ptr())
        if memory is None or memory.gathered != gathered or memory.mine.dtype != tensor.dtype:
            return None
        begin = tensor.storage_offset() - memory.mine.storage_offset()
        if begin < 0 or begin + tensor.numel() > memory.mine.numel():  # neighbours read the same range of their regions
            raise CommunicationError(
                f"a tensor of {describe(tensor)} on rank {self.rank} reaches out of the {memory.mine.numel()} "
                "elements that alloc gave this rank"
            )
        return memory

    def _view(self, memory: NodeMemory) -> NodeView:
        return NodeView(memory, self.topology, self.rank)

    def _check(self, label: str, *tensors: Tensor, written: Tensors = ()) -> None:
        self._check_open(label)
        super()._check(label, *tensors, written=written)
        for tensor in written:
            memory = memory_at(tensor)
            if memory is not None and memory.gathered and len(memory.regions) > 1:
                raise CommunicationError(
                    f"{label} on rank {self.rank}: the output is gathered memory, of which the ranks of a node hold "
                    "one copy: only all_gather_into_tensor may write there, with the communicator and dtype of its "
                    "alloc"
                )

    def _check_open(self, label: str) -> None:
        if os.getpid() != _process:
            raise CommunicationError(
                f"{label} on rank {self.rank}: this process was forked from a rank, and MPI does not work in it; start "
                "processes with the 'spawn' method, and leave communication to the ranks"
            )
        if self._generation != lost.generation:
            raise CommunicationError(
                f"{label} on rank {self.rank}: this communicator is of the world before ranks were lost; make the "
                "model, the optimizer and all groups within the function that hpcfsdp.resilient calls"
            )
        lost.check(label)
        if self._closed:
            raise CommunicationError(
                f"{label} on rank {self.rank}: the communicator has been closed (hpcfsdp.finalize, or its process "
                "group was destroyed)"
            )


def _after_comparison(call: MpiCall, steps: Steps) -> Steps:
    """Compare the calls of all ranks, then take the steps. Closing this closes them, also while a frame has them."""
    yield from exchange.wait_for(call, range(call.size))
    yield from steps


_process = os.getpid()  # the process that may have started MPI: one that was forked from it cannot use MPI


def _at(tensor: Tensor, memory: NodeMemory) -> str:
    """Describe the place in a ``NodeMemory``: neighbours read the same range of their regions."""
    return f" at {tensor.storage_offset() - memory.mine.storage_offset()} of shared memory"


def _pickled(value: Any) -> Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _ranks_in_job(comm: MPI.Intracomm | PartComm) -> tuple[int, ...]:
    """Return the rank in the job of each rank of `comm`. Not collective."""
    if isinstance(comm, PartComm):
        return comm.ranks_in(current_job().comm)
    members, world = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = MPI.Group.Translate_ranks(members, range(comm.size), world)
    members.Free()
    world.Free()
    return tuple(found)


def create_group(comm: MPI.Intracomm | PartComm, ranks: Sequence[int]) -> MPI.Intracomm | PartComm:
    """Create a communicator of these. Collective over `ranks`, ascending ranks of `comm`."""
    if isinstance(comm, PartComm):
        return comm.part(ranks)
    group = comm.Get_group()
    members = group.Incl(ranks)
    # The tag separates creations at the same time, with the members.
    created = comm.Create_group(members, zlib.crc32(repr(list(ranks)).encode()) % _TAGS)
    members.Free()
    group.Free()
    return created
