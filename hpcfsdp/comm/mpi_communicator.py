"""Collectives on CPU tensors over MPI: messages between any ranks, shared memory where a node has it.

Each collective is a generator of the conditions it waits for (progress.py). Those on tensors from ``alloc`` work on the
node's shared memory (shared.py); all others exchange messages (exchange.py).
"""

from __future__ import annotations

import os
import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from hpcfsdp.comm import exchange, shared, sparse
from hpcfsdp.comm.communicator import (
    ReduceOp,
    accumulate_dtype,
    check_alloc,
    check_list,
    check_members,
    check_peer,
    check_same_numel,
    check_sizes,
    check_tensors,
    refuse_op,
)
from hpcfsdp.comm.failures import Failures
from hpcfsdp.comm.messages import Call, Inbox, Mail
from hpcfsdp.comm.progress import Running, Steps, complete, run
from hpcfsdp.comm.reduce import Reduction
from hpcfsdp.comm.shared import Place
from hpcfsdp.comm.waits import key_of, same_call
from hpcfsdp.comm.window import Window, window_at
from hpcfsdp.errors import CommunicationError, CrossedCallsError, DifferentCallsError
from hpcfsdp.launch import calls, shutdown
from hpcfsdp.launch.topology import Topology

_TAGS = 1 << 13
"""Collectives under way at a time that can be told apart; tags above are those of ``send`` and ``recv``."""
_TAG_FAILED = _TAGS
_TAG_MEET = _TAGS + 1
_TAG_USER = _TAGS + 2
_MEETING = "meet: "
"""What the labels of ``meet`` begin with."""
_REMEMBERED = 128
"""Calls of which it is known what they were."""


class MpiCommunicator:
    """A ``Communicator`` over the ranks of an mpi4py communicator, for CPU tensors of any dtype."""

    device = torch.device("cpu")

    def __init__(
        self,
        comm: MPI.Intracomm,
        topology: Topology | None = None,
        *,
        timeout_s: float = 1800.0,
        compare_calls: bool = False,
    ) -> None:
        """Not collective.

        Args:
            comm: used by this object alone from here on; its tags and collectives are taken.
            topology: which of its ranks share memory; None if it is not known, and none is shared then.
            timeout_s: how long a collective waits for ranks that do not take part.
            compare_calls: before each collective all ranks compare what they call, and a rank that calls something
                else is named. Costs a message to every rank each time.

        Raises:
            CommunicationError: the topology is one of another number of ranks.
        """
        self.comm = comm
        self.rank: int = comm.rank
        self.size: int = comm.size
        self.topology = topology or Topology.regular(comm.size, 1)
        self.timeout_s = timeout_s
        self.compare_calls = compare_calls
        if self.topology.size != self.size:
            raise CommunicationError(
                f"a topology of {self.topology.size} ranks ({self.topology}) was given for {self.size} ranks"
            )
        self._inbox = Inbox(comm, Failures(comm, _TAG_FAILED))
        self._calls = 0
        self._labels: list[str | None] = [None] * _REMEMBERED  # of the last calls
        self.world_ranks = _world_ranks(comm)
        self.key = key_of(self, self.world_ranks)
        self._closed = False
        self._node: MPI.Intracomm | None = None
        self._windows: dict[int, Window] = {}  # by address
        self._barrier_window: Window | None = None  # where `meet` exchanges notes

    @property
    def calls(self) -> int:
        """Collectives that this rank has begun, the same number on all ranks."""
        return self._calls

    @property
    def shares_memory(self) -> bool:
        return any(len(node) > 1 for node in self.topology.nodes)

    def __repr__(self) -> str:
        return f"MpiCommunicator(rank={self.rank}, size={self.size}, {self.topology})"

    # Memory

    @property
    def shares_gathered(self) -> bool:
        return self.topology.num_nodes == 1 and self.size > 1

    def alloc(self, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> torch.Tensor:
        self._check_open("alloc")
        check_alloc(self, numel, gathered)
        label = f"alloc of {numel} x {dtype}" + (", gathered" if gathered else "")
        call = self._call(label)
        run(exchange.barrier(call), label, self.rank, self.timeout_s, False, self, call.sequence)
        if self._node is None:
            self._node = self.comm.Split(self.topology.node_rank(self.rank), self.rank)
        window, problem = None, None
        try:
            window = Window(self._node, self.topology.node_of(self.rank), numel, dtype, gathered=gathered)
        except Exception as error:  # whatever it is, the others have to hear of it
            problem = str(error)
        problems = [other for other in self.comm.allgather(problem) if other]
        if window is None or problems:
            raise CommunicationError(f"{label}: {problems[0]}")
        if numel:
            self._windows[window.address] = window
        return window.mine

    def free(self, tensor: torch.Tensor) -> None:
        if not tensor.numel() or self._closed:  # closing has let go of all memory
            return
        window = self._windows.get(tensor.untyped_storage().data_ptr())
        if window is None or window.mine.data_ptr() != tensor.data_ptr() or window.mine.numel() != tensor.numel():
            raise CommunicationError(
                f"free on rank {self.rank}: this tensor of {tensor.numel()} x {tensor.dtype} did not come from alloc "
                "of this communicator, is a part of what did, or was freed before"
            )
        del self._windows[window.address]

    def release(self, full: torch.Tensor) -> None:
        window = self._gathered_window("release", full)
        if window is not None:
            window.done()

    def claim(self, full: torch.Tensor) -> None:
        window = self._gathered_window("claim", full)
        if window is not None:
            run(shared.claim(window), f"claim of {_described(full)}", self.rank, self.timeout_s, False, self)

    # Collectives on tensors

    def all_gather_into_tensor(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False
    ) -> Running | None:
        label = f"all_gather_into_tensor of {_described(shard)}"
        window = self._window_of(output, gathered=True)
        self._check(label, shard, output) if window is not None else self._check(label, shard, written=[output])
        check_sizes(label, self, output, shard)
        if window is None:
            return self._run(label, async_op, exchange.all_gather, _segments(output, self.size), shard)
        if output.numel() != window.mine.numel():
            raise CommunicationError(
                f"{label} on rank {self.rank}: gathered memory of {window.mine.numel()} elements can only be gathered "
                f"as a whole, not {output.numel()} of them"
            )
        return self._run(label, async_op, shared.all_gather, self._place(window), output.view(-1), shard)

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Running | None:
        label = f"{label}: " if label else ""
        label += f"reduce_scatter_tensor({op}) of {_described(full)}"
        label += f" in {accumulate}" if accumulate else ""
        self._check(label, full)
        self._check(label, written=[output])
        check_sizes(label, self, full, output)
        how = self._reduction(label, op, full, accumulate)
        pieces, window = _segments(full, self.size), self._window_of(full)
        if window is None:
            return self._run(label, async_op, exchange.reduce_scatter, pieces, output.view(-1), how)
        label += _at(full, window)
        return self._run(label, async_op, shared.reduce_scatter, self._place(window), pieces, output.view(-1), how)

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Running | None:
        label = f"{label}: " if label else ""
        label += f"all_reduce({op}) of {_described(tensor)}" + (f" in {accumulate}" if accumulate else "")
        self._check(label, written=[tensor])
        how = self._reduction(label, op, tensor, accumulate)
        window = self._window_of(tensor)
        if window is None:
            return self._run(label, async_op, exchange.all_reduce, tensor.view(-1), how)
        pieces = tensor.view(-1).tensor_split(self.size)
        label += _at(tensor, window)
        return self._run(label, async_op, shared.all_reduce, self._place(window), pieces, how)

    def all_reduce_sparse(self, tensor: torch.Tensor, op: ReduceOp, *, async_op: bool = False) -> Running | None:
        """`tensor`, sparse COO of the same shape on all ranks, becomes its sum or average over all ranks, coalesced."""
        label = f"all_reduce({op}) of a sparse tensor of {tuple(tensor.shape)} x {tensor.dtype}"
        label += f", sparse in {tensor.sparse_dim()} dimension(s)"
        self._check_open(label)
        if op not in ("sum", "average"):
            raise CommunicationError(f"{label} on rank {self.rank}: sparse tensors have 'sum' and 'average' alone")
        return self._run(label, async_op, sparse.all_reduce, tensor, self._reduction(label, op, tensor, None))

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, *, async_op: bool = False
    ) -> Running | None:
        """`output` becomes the reduction of all ranks' ``inputs[rank]``; its size may be another on each rank."""
        label = f"reduce_scatter({op}) of {output.dtype}"
        check_list(label, self, "inputs", inputs)
        self._check(label, *inputs, written=[output])
        check_same_numel(label, self, output, inputs[self.rank])
        how = self._reduction(label, op, output, None)
        pieces = [piece.view(-1) for piece in inputs]
        return self._run(label, async_op, exchange.reduce_scatter, pieces, output.view(-1), how)

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Running | None:
        label = f"broadcast from {src} of {_described(tensor)}"
        self._check(label, written=[tensor])
        check_peer(label, self, src)
        return self._run(label, async_op, exchange.broadcast, tensor, src)

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False
    ) -> Running | None:
        label = f"all_gather of {tensor.dtype}"
        check_list(label, self, "outputs", outputs)
        self._check(label, tensor, written=outputs)
        check_same_numel(label, self, outputs[self.rank], tensor)
        return self._run(label, async_op, exchange.all_gather, outputs, tensor)

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Running | None:
        check_list("all_to_all", self, "outputs", outputs)
        check_list("all_to_all", self, "inputs", inputs)
        label = f"all_to_all of {inputs[0].dtype}"
        self._check(label, *inputs, written=outputs)
        check_same_numel(label, self, outputs[self.rank], inputs[self.rank])
        return self._run(label, async_op, exchange.all_to_all, outputs, inputs)

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> Running | None:
        label = f"gather to {dst} of {tensor.dtype}"
        check_peer(label, self, dst)
        self._check(label, tensor)
        if self.rank != dst:
            return self._run(label, async_op, exchange.deliver, tensor, dst)
        check_list(label, self, "outputs", outputs)
        self._check(label, tensor, written=outputs)
        check_same_numel(label, self, outputs[dst], tensor)
        return self._run(label, async_op, exchange.collect, outputs, tensor)

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, *, async_op: bool = False
    ) -> Running | None:
        label = f"scatter from {src} of {output.dtype}"
        check_peer(label, self, src)
        self._check(label, written=[output])
        if self.rank != src:
            return self._run(label, async_op, exchange.accept, output, src)
        check_list(label, self, "inputs", inputs)
        self._check(label, output, *inputs)
        check_same_numel(label, self, output, inputs[src])
        return self._run(label, async_op, exchange.distribute, output, inputs)

    def barrier(self, *, async_op: bool = False) -> Running | None:
        self._check_open("barrier")
        return self._run("barrier", async_op, exchange.barrier)

    def labelled_barrier(self, note: str) -> None:
        try:
            self._labelled_barrier(f"{_MEETING}{note}")
        except CommunicationError as error:
            (text,) = error.args
            error.args = (text.replace(_MEETING, ""),)
            if type(error) is DifferentCallsError and text.count(_MEETING) < 2:
                raise CrossedCallsError(*error.args) from None  # the other rank is elsewhere: it cannot be asked
            raise

    def _labelled_barrier(self, note: str) -> None:
        self._check_open("labelled_barrier")
        if self.size == 1:
            return
        if self.topology.num_nodes > 1:
            call = self._call(note)
            run(exchange.barrier(call), note, self.rank, self.timeout_s, False, self, call.sequence)
            return
        if self._barrier_window is None:
            self._barrier_window = self._window_of(self.alloc(self.size, torch.uint8, gathered=True), gathered=True)
        self._count(note)
        run(
            shared.labelled_barrier(self._barrier_window, note),
            note,
            self.rank,
            self.timeout_s,
            False,
            self,
            self._calls,
        )

    # Messages between two ranks

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Running | None:
        """Not collective. Send `tensor` to rank `dst`, which receives it with the same tag."""
        label = f"send to {dst} of {_described(tensor)}"
        self._check(label, tensor)
        check_peer(label, self, dst)
        call = Call(self._inbox, label, self._user_tag(label, tag), compared=str(tensor.dtype))
        steps = exchange.deliver(call, tensor, dst)
        return run(steps, label, self.rank, self.timeout_s, async_op, self)

    def recv(
        self, tensor: torch.Tensor, src: int | None, tag: int = 0, *, async_op: bool = False
    ) -> tuple[Mail, Running | None]:
        """Not collective. Receive what rank `src` (None: any) sends with the same tag; the mail tells its source."""
        label = f"recv from {'any rank' if src is None else src} of {_described(tensor)}"
        self._check(label, written=[tensor])
        if src is not None:
            check_peer(label, self, src)
        mail = Call(self._inbox, label, self._user_tag(label, tag), compared=str(tensor.dtype)).mail()
        mail.receive(tensor, src)
        work = run(exchange.accept_posted(mail), label, self.rank, self.timeout_s, async_op, self)
        if work is not None:
            work.optional = True
        return mail, work

    # Collectives on objects

    def all_gather_object(self, value: Any) -> list[Any]:
        mine = _pickled((calls.current(), value))
        counts = torch.empty(self.size, dtype=torch.int64)
        self.all_gather_into_tensor(counts, torch.tensor([mine.numel()]))
        blobs = [torch.empty(count, dtype=torch.uint8) for count in counts.tolist()]
        self.all_gather(blobs, mine)
        return same_call([pickle.loads(_raw(blob)) for blob in blobs])

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        blob = _pickled(value) if self.rank == src else torch.empty(0, dtype=torch.uint8)
        count = torch.tensor([blob.numel()])
        self.broadcast(count, src)
        if self.rank != src:
            blob = torch.empty(int(count), dtype=torch.uint8)
        self.broadcast(blob, src)
        return value if self.rank == src else pickle.loads(_raw(blob))

    # Groups, and the end

    def subgroup(self, ranks: Sequence[int]) -> MpiCommunicator:
        self._check_open("subgroup")
        ranks = check_members(self, ranks)
        label = f"subgroup of ranks {ranks}"
        call = Call(self._inbox, label, _TAG_MEET)
        run(exchange.wait_for(call, ranks), label, self.rank, self.timeout_s, False, self)
        comm = members_only(self.comm, ranks)
        return MpiCommunicator(
            comm, self.topology.restrict(ranks), timeout_s=self.timeout_s, compare_calls=self.compare_calls
        )

    def close(self) -> None:
        """Collective. Complete what is under way, let go of all memory, and refuse further calls."""
        if self._closed:
            return
        try:
            complete(self)
        finally:
            self.abandon()
            if self._node is not None:
                self._node.Free()
            if self._inbox.is_clean:
                self.comm.Free()

    def abandon(self) -> None:
        """Not collective. Refuse further calls, and leave what is under way as it is."""
        self._closed = True
        self._windows.clear()

    def departed(self) -> set[int]:
        """Not collective. The ranks of which it is known that they have left the program."""
        gone = sorted(shutdown.departed())
        if not gone:
            return set()
        everyone, members = MPI.COMM_WORLD.Get_group(), self.comm.Get_group()
        places = MPI.Group.Translate_ranks(everyone, gone, members)
        return {place for place in places if place != MPI.UNDEFINED}

    # What they share

    def _run(self, label: str, async_op: bool, collective: Callable[..., Steps], *arguments: Any) -> Running | None:
        call = self._call(label)
        steps = collective(call, *arguments)
        if self.compare_calls and self.size > 1:
            texts = [f"{text} (call {self._calls})" for text in (label, call.label)]
            steps = _compared(Call(self._inbox, texts[0], call.tag, call.sequence, within=texts[1]), steps)
        return run(steps, label, self.rank, self.timeout_s, async_op, self, call.sequence)

    def _call(self, label: str) -> Call:
        self._count(label)
        return Call(self._inbox, label, self._calls % _TAGS, self._calls, within=calls.within(label))

    def _count(self, label: str) -> None:
        self._calls += 1
        self._labels[self._calls % _REMEMBERED] = label

    def called(self, number: int) -> str | None:
        """What this rank has called as its `number`-th collective: "" nothing yet, None if that is not known."""
        if number > self._calls:
            return ""
        return self._labels[number % _REMEMBERED] if number > self._calls - _REMEMBERED else None

    def _user_tag(self, label: str, tag: int) -> int:
        limit = self.comm.Get_attr(MPI.TAG_UB) - _TAG_USER
        if not 0 <= tag <= limit:
            raise CommunicationError(f"{label} on rank {self.rank}: tag {tag} is not in 0 to {limit}")
        return _TAG_USER + tag

    def _window_of(self, tensor: torch.Tensor, *, gathered: bool = False) -> Window | None:
        """The window that `tensor` lies in, None for any other memory, or memory of the other kind."""
        if not self._windows or not tensor.numel():
            return None
        window = self._windows.get(tensor.untyped_storage().data_ptr())
        if window is None or window.gathered != gathered or window.mine.dtype != tensor.dtype:
            return None
        begin = tensor.storage_offset() - window.mine.storage_offset()
        if begin < 0 or begin + tensor.numel() > window.mine.numel():  # neighbours read the same place of theirs
            raise CommunicationError(
                f"a tensor of {_described(tensor)} on rank {self.rank} reaches out of the {window.mine.numel()} "
                "elements that alloc gave this rank"
            )
        return window

    def _gathered_window(self, what: str, full: torch.Tensor) -> Window | None:
        self._check_open(what)
        window = self._window_of(full, gathered=True)
        if window is None and full.numel():
            raise CommunicationError(
                f"{what} on rank {self.rank}: this tensor of {_described(full)} is no gathered memory of this "
                "communicator"
            )
        return window

    def _place(self, window: Window) -> Place:
        return Place(window, self.topology, self.rank)

    def _reduction(self, label: str, op: ReduceOp, tensor: torch.Tensor, accumulate: torch.dtype | None) -> Reduction:
        problem = refuse_op(op, tensor.dtype)
        if problem:
            raise CommunicationError(f"{label} on rank {self.rank}: {problem}")
        return Reduction(op, accumulate or accumulate_dtype(tensor.dtype, op), self.size)

    def _check(self, label: str, *tensors: torch.Tensor, written: Sequence[torch.Tensor] = ()) -> None:
        self._check_open(label)
        check_tensors(label, self, *tensors, *written)
        for tensor in written:
            window = window_at(tensor)
            if window is not None and window.gathered and len(window.regions) > 1:
                raise CommunicationError(
                    f"{label} on rank {self.rank}: the output lies in gathered memory, of which the ranks of a node "
                    "hold one copy: only all_gather_into_tensor, with the communicator and dtype it was made for, may "
                    "write there"
                )

    def _check_open(self, label: str) -> None:
        if _is_forked:
            raise CommunicationError(
                f"{label} on rank {self.rank}: this process was forked from a rank, and MPI does not work in it; start "
                "processes with the 'spawn' method, and leave communication to the ranks"
            )
        if self._closed:
            raise CommunicationError(
                f"{label} on rank {self.rank}: the communicator has been closed (hpcfsdp.finalize, or its process "
                "group was destroyed)"
            )


def _compared(call: Call, steps: Steps) -> Steps:
    """The steps, after all ranks have compared what they call."""
    yield from exchange.wait_for(call, range(call.size))
    yield from steps


_is_forked = False
"""Whether this process was forked from one that may have started MPI."""


def _note_fork() -> None:
    global _is_forked
    _is_forked = True


os.register_at_fork(after_in_child=_note_fork)


def _segments(full: torch.Tensor, size: int) -> list[torch.Tensor]:
    """`size` equal parts of `full`, as views."""
    flat = full.view(-1)
    numel = flat.numel() // size
    return [flat[numel * place : numel * (place + 1)] for place in range(size)]


def _at(tensor: torch.Tensor, window: Window) -> str:
    """Where in a window: neighbours read the same place of theirs."""
    return f" at {tensor.storage_offset() - window.mine.storage_offset()} of shared memory"


def _described(tensor: torch.Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"


def _pickled(value: Any) -> torch.Tensor:
    return torch.frombuffer(bytearray(pickle.dumps(value, protocol=pickle.HIGHEST_PROTOCOL)), dtype=torch.uint8)


def _raw(blob: torch.Tensor) -> bytes:
    return blob.numpy().tobytes()


def _world_ranks(comm: MPI.Intracomm) -> tuple[int, ...]:
    """The numbers that the ranks of `comm` have among all processes."""
    members, everyone = comm.Get_group(), MPI.COMM_WORLD.Get_group()
    found = MPI.Group.Translate_ranks(members, range(comm.size), everyone)
    members.Free()
    everyone.Free()
    return tuple(found)


def members_only(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Collective over `ranks`, ascending ranks of `comm`, which the others need not call. A communicator of these."""
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    # Creations that go on at the same time are told apart by their members, or by this.
    made = comm.Create_group(members, zlib.crc32(repr(list(ranks)).encode()) % _TAGS)
    members.Free()
    everyone.Free()
    return made
