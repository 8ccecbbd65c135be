"""Collectives on CPU tensors over MPI: messages between any ranks, shared memory where a node has it.

Each collective is a generator of the conditions it waits for (progress.py). Those on tensors from ``alloc`` work on the
node's shared memory (shared.py); all others exchange messages (exchange.py).
"""

from __future__ import annotations

import pickle
import zlib
from collections.abc import Callable, Sequence
from typing import Any

import torch
from mpi4py import MPI

from hpcfsdp.comm import exchange, shared
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
from hpcfsdp.comm.messages import Call, Mail
from hpcfsdp.comm.progress import Running, Steps, complete, run
from hpcfsdp.comm.reduce import Reduction
from hpcfsdp.comm.shared import Place
from hpcfsdp.comm.topology import Topology
from hpcfsdp.comm.window import Window, fitted, window_at
from hpcfsdp.errors import CommunicationError, DifferentCallsError
from hpcfsdp.launch import farewell

_TAGS = 1 << 13
"""Collectives under way at a time that can be told apart; tags above are those of ``send`` and ``recv``."""
_TAG_COMPARE = _TAGS
_TAG_MEET = _TAGS + 1
_TAG_USER = _TAGS + 2
_COMPARED_BYTES = 192


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
        self._calls = 0
        self._closed = False
        self._node: MPI.Intracomm | None = None
        self._windows: dict[int, Window] = {}  # by address
        self._turnstile: Window | None = None  # where `meet` exchanges notes

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
        run(exchange.barrier(self._call("alloc")), label, self.rank, self.timeout_s, False, self)
        for rank, other in enumerate(self.comm.allgather(label)):
            if other != label:
                raise CommunicationError(
                    f"rank {self.rank} calls {label}, but rank {rank} calls {other}: all ranks must ask for the same"
                )
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
        wire: torch.dtype | None = None,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Running | None:
        label = f"{label}: " if label else ""
        label += f"reduce_scatter_tensor({op}) of {_described(full)}" + (f" as {wire}" if wire else "")
        label += f" in {accumulate}" if accumulate else ""
        self._check(label, full)
        self._check(label, written=[output])
        check_sizes(label, self, full, output)
        how = self._reduction(label, op, full, wire, accumulate)
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
        how = self._reduction(label, op, tensor, None, accumulate)
        window = self._window_of(tensor)
        if window is None:
            return self._run(label, async_op, exchange.all_reduce, tensor.view(-1), how)
        pieces = tensor.view(-1).tensor_split(self.size)
        label += _at(tensor, window)
        return self._run(label, async_op, shared.all_reduce, self._place(window), pieces, how)

    def reduce_scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor], op: ReduceOp, *, async_op: bool = False
    ) -> Running | None:
        """`output` becomes the reduction of all ranks' ``inputs[rank]``; its size may be another on each rank."""
        label = f"reduce_scatter({op}) of {output.dtype}"
        check_list(label, self, "inputs", inputs)
        self._check(label, *inputs, written=[output])
        check_same_numel(label, self, output, inputs[self.rank])
        how = self._reduction(label, op, output, None, None)
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

    def meet(self, note: str) -> None:
        self._check_open("meet")
        if self.size == 1:
            return
        if self.topology.num_nodes > 1:
            nothing: Steps = iter(())  # type: ignore[assignment]
            run(self._compared(nothing, note), note, self.rank, self.timeout_s, False, self)
            return
        if self._turnstile is None:
            self._turnstile = self._window_of(self.alloc(self.size, torch.uint8, gathered=True), gathered=True)
        run(shared.meet(self._turnstile, note), note, self.rank, self.timeout_s, False, self)

    # Messages between two ranks

    def send(self, tensor: torch.Tensor, dst: int, tag: int = 0, *, async_op: bool = False) -> Running | None:
        """Not collective. Send `tensor` to rank `dst`, which receives it with the same tag."""
        label = f"send to {dst} of {_described(tensor)}"
        self._check(label, tensor)
        check_peer(label, self, dst)
        steps = exchange.deliver(Call(self.comm, label, self._user_tag(label, tag)), tensor, dst)
        return run(steps, label, self.rank, self.timeout_s, async_op, self)

    def recv(
        self, tensor: torch.Tensor, src: int | None, tag: int = 0, *, async_op: bool = False
    ) -> tuple[Mail, Running | None]:
        """Not collective. Receive what rank `src` (None: any) sends with the same tag; the mail tells its source."""
        label = f"recv from {'any rank' if src is None else src} of {_described(tensor)}"
        self._check(label, written=[tensor])
        if src is not None:
            check_peer(label, self, src)
        mail = Mail(self.comm, label, self._user_tag(label, tag))
        mail.receive_from_anyone(tensor) if src is None else mail.receive(tensor, src)
        work = run(exchange.accept_posted(mail), label, self.rank, self.timeout_s, async_op, self)
        if work is not None:
            work.optional = True
        return mail, work

    # Collectives on objects

    def all_gather_object(self, value: Any) -> list[Any]:
        mine = _pickled(value)
        counts = torch.empty(self.size, dtype=torch.int64)
        self.all_gather_into_tensor(counts, torch.tensor([mine.numel()]))
        blobs = [torch.empty(count, dtype=torch.uint8) for count in counts.tolist()]
        self.all_gather(blobs, mine)
        return [pickle.loads(_raw(blob)) for blob in blobs]

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
        call = Call(self.comm, label, _TAG_MEET)
        run(exchange.meet(call, ranks), label, self.rank, self.timeout_s, False, self)
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
            self.comm.Free()

    def abandon(self) -> None:
        """Not collective. Refuse further calls, and leave what is under way as it is."""
        self._closed = True
        self._windows.clear()

    def departed(self) -> set[int]:
        """Not collective. The ranks of which it is known that they have left the program."""
        gone = sorted(farewell.departed())
        if not gone:
            return set()
        everyone, members = MPI.COMM_WORLD.Get_group(), self.comm.Get_group()
        places = MPI.Group.Translate_ranks(everyone, gone, members)
        return {place for place in places if place != MPI.UNDEFINED}

    # What they share

    def _run(self, label: str, async_op: bool, collective: Callable[..., Steps], *arguments: Any) -> Running | None:
        steps = collective(self._call(label), *arguments)
        if self.compare_calls and self.size > 1:
            steps = self._compared(steps, f"{label} (call {self._calls})")
        return run(steps, label, self.rank, self.timeout_s, async_op, self)

    def _call(self, label: str) -> Call:
        self._calls += 1
        return Call(self.comm, label, self._calls % _TAGS)

    def _compared(self, steps: Steps, text: str) -> Steps:
        """The steps, after all ranks have told each other what they call."""
        told = torch.frombuffer(bytearray(fitted(text, _COMPARED_BYTES)), dtype=torch.uint8)
        everyone = [torch.empty_like(told) for _ in range(self.size)]
        yield from exchange.all_gather(Call(self.comm, text, _TAG_COMPARE), everyone, told)
        mine, *others = (_raw(told), *map(_raw, everyone))
        for peer, theirs in enumerate(others):
            if theirs != mine:
                mine, theirs = (note.decode(errors="replace").rstrip() for note in (mine, theirs))
                raise DifferentCallsError(f"rank {self.rank} calls {mine}, but rank {peer} calls {theirs}")
        yield from steps

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
        return window if window and window.gathered == gathered and window.mine.dtype == tensor.dtype else None

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

    def _reduction(
        self, label: str, op: ReduceOp, tensor: torch.Tensor, wire: torch.dtype | None, accumulate: torch.dtype | None
    ) -> Reduction:
        problem = refuse_op(op, tensor.dtype)
        if problem:
            raise CommunicationError(f"{label} on rank {self.rank}: {problem}")
        return Reduction(op, wire or tensor.dtype, accumulate or accumulate_dtype(tensor.dtype), self.size)

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
        if self._closed:
            raise CommunicationError(
                f"{label} on rank {self.rank}: the communicator has been closed (hpcfsdp.finalize, or its process "
                "group was destroyed)"
            )


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


def members_only(comm: MPI.Intracomm, ranks: Sequence[int]) -> MPI.Intracomm:
    """Collective over `ranks`, ascending ranks of `comm`, which the others need not call. A communicator of these."""
    everyone = comm.Get_group()
    members = everyone.Incl(ranks)
    # Creations that go on at the same time are told apart by their members, or by this.
    made = comm.Create_group(members, zlib.crc32(repr(list(ranks)).encode()) % _TAGS)
    members.Free()
    everyone.Free()
    return made
