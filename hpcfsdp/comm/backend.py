"""The torch.distributed backend ``hpcmpi`` and the rendezvous ``mpi://``, for stock torch code. See hpcfsdp/mpi.py.

torch lets a Python class stand in for a whole process group, not for one backend inside of a group: a group is either
all hpcmpi or none of it. Tensors on a GPU are staged through pinned host memory.
"""

from __future__ import annotations

import contextlib
import datetime
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist

from hpcfsdp import _compat, env
from hpcfsdp.comm.communicator import ReduceOp
from hpcfsdp.comm.progress import Running, Steps, run
from hpcfsdp.errors import CommunicationError, LaunchError
from hpcfsdp.launch import rendezvous, shutdown
from hpcfsdp.launch.job import DEFAULT_TIMEOUT_S, current_job
from hpcfsdp.launch.topology import Topology

if TYPE_CHECKING:
    from hpcfsdp.comm.mpi_communicator import MpiCommunicator

NAME = "hpcmpi"

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


def register() -> None:
    """Make torch know the backend and the rendezvous. Does not start MPI. May be called again."""
    if NAME not in dist.Backend.backend_list:
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=["cpu", "cuda"])
        dist.register_rendezvous_handler("mpi", _rendezvous)


def _rendezvous(url: str, timeout: datetime.timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Collective over all processes of the job. Ranks from MPI, and a store whose address goes over MPI."""
    job, parts = current_job(), urlsplit(url)
    given = dict(parse_qsl(parts.query))  # torch puts what init_process_group was given there
    known = {"rank": str(job.comm.rank), "world_size": str(job.comm.size)}
    if parts.netloc or parts.path.strip("/") or set(given) - set(known):
        raise LaunchError(f"init_method {url!r}: 'mpi://' takes nothing more, ranks and addresses come from MPI")
    for name, value in given.items():
        if value != known[name]:
            raise LaunchError(
                f"init_process_group was given {name}={value}, but MPI has this process as rank {job.comm.rank} of "
                f"{job.comm.size}: leave rank and world_size out, 'mpi://' takes both from MPI"
            )
    seconds = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
    store, address = rendezvous.open_store(job.comm, single_node=job.topology.num_nodes == 1, timeout_s=seconds)
    job.export(job.topology, address, store.port)
    yield store, job.comm.rank, job.comm.size
    raise LaunchError("an MPI job cannot be joined again: start a new one")


def _create_group(options: Any, topology: Topology | None) -> MpiProcessGroup:
    """What torch calls on the members of a new group; `topology` is given as ``pg_options``."""
    job = current_job()
    from hpcfsdp.comm.mpi_communicator import MpiCommunicator, members_only  # starts MPI where nothing has yet

    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(job.comm.size))
    if len(ranks) != options.group_size or ranks[options.group_rank] != job.comm.rank:
        raise LaunchError(
            f"torch.distributed has this process as rank {options.group_rank} of {options.group_size}, MPI as rank "
            f"{job.comm.rank} of {job.comm.size}: use init_method='mpi://', which takes both from MPI"
        )
    if topology is None:
        parent = dist.group.WORLD if dist.is_initialized() else None
        topology = (parent.communicator if carries(parent) else job).topology.restrict(ranks)
    if options.global_ranks_in_group:
        _meet(options.store, job.comm.rank, ranks, timeout_s)
        comm = members_only(job.comm, ranks)
    else:
        comm = job.comm.Dup()
    return MpiProcessGroup(MpiCommunicator(comm, topology, timeout_s=timeout_s, compare_calls=env.compare_calls()))


def _meet(store: Any, rank: int, ranks: list[int], timeout_s: float) -> None:
    """Collective over `ranks`. Wait until all members of a group have come, and agree on who is one.

    MPI itself would wait without end for a member that does not know it is one, and nothing else would move meanwhile.
    """
    meeting = _Meeting(store, rank, ranks)
    try:
        run(meeting.steps(), f"new_group of ranks {ranks}", rank, timeout_s, False, meeting)
    except CommunicationError as error:
        meeting.end(str(error))
    meeting.close()


class _Meeting:
    """Ranks that tell each other through torch's store that they are here. ``Condition`` and ``Owner`` of progress.py.

    The first to know how the meeting ends writes it down; that holds for all, also for those that come later.
    """

    _ALL_HERE = "all are here"
    _LONGEST_PAUSE_S = 0.05

    def __init__(self, store: Any, rank: int, ranks: list[int]) -> None:
        self._store = store
        self._ranks = ranks
        self._outcome: str | None = None
        self._look_at_s = self._pause_s = 0.0
        mine = f"rank {rank} makes a group of ranks {ranks}"
        first = store.compare_set("members", "", mine).decode()
        store.set(f"here/{rank}", "")
        if first.rpartition(" of ")[2] != mine.rpartition(" of ")[2]:
            differ = f"{first}, but {mine}: all members must give the same"
            self.end(differ)
            if self._outcome == self._ALL_HERE:  # the others have just met; this rank is none of theirs
                self._outcome = differ
        elif store.add("count", 1) == len(ranks):
            self.end(self._ALL_HERE)

    def steps(self) -> Steps:
        yield self

    def holds(self) -> bool:
        now_s = time.monotonic()
        if self._outcome is None and now_s >= self._look_at_s:
            self._pause_s = min(2 * self._pause_s + 1e-4, self._LONGEST_PAUSE_S)  # one store answers all ranks
            self._look_at_s = now_s + self._pause_s
            if self._store.check(["outcome"]):
                self._outcome = self._store.get("outcome").decode()
        return self._outcome is not None

    def missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"here/{rank}"])]

    def departed(self) -> set[int]:
        return shutdown.departed()

    def end(self, outcome: str) -> None:
        """Not collective. Write down how the meeting ends, unless that is known already."""
        self._outcome = self._store.compare_set("outcome", "", outcome).decode()

    def close(self) -> None:
        """Raise what has kept the members from meeting. Otherwise the last to leave clears up.

        torch may give another group of the same ranks the name, and with it the part of the store, of one that is
        gone. Who the members were stays there, for those that come with another list.
        """
        if self._outcome != self._ALL_HERE:
            raise CommunicationError(self._outcome)
        if self._store.add("left", 1) == len(self._ranks):
            for key in ("count", "outcome", "left", *(f"here/{rank}" for rank in self._ranks)):
                self._store.delete_key(key)


def carries(group: Any) -> bool:
    """Whether a process group is one of hpcmpi."""
    return isinstance(group, MpiProcessGroup)


class MpiProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed over MPI.

    Attributes:
        communicator: what carries its collectives; hpcfsdp's own code uses it directly.
    """

    def __init__(self, communicator: MpiCommunicator) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self._name = self._desc = ""

    # What torch asks of a group

    def getBackendName(self) -> str:
        return NAME

    def getGroupName(self) -> str:
        return self._name

    def setGroupName(self, name: str) -> None:
        self._name = name

    def getGroupDesc(self) -> str:
        return self._desc

    def setGroupDesc(self, desc: str) -> None:
        self._desc = desc

    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    @property
    def group_name(self) -> str:
        return self._name

    @property
    def group_desc(self) -> str:
        return self._desc

    def name(self) -> str:
        return NAME

    def size(self) -> int:
        return self.communicator.size

    def rank(self) -> int:
        return self.communicator.rank

    @property
    def _device_types(self) -> list[torch.device]:
        kinds = ["cpu", "cuda"] if torch.cuda.is_available() else ["cpu"]
        return [torch.device(kind) for kind in kinds]

    def _get_backend(self, device: torch.device) -> MpiProcessGroup:
        return self

    supports_splitting = supports_coalescing = supports_time_estimate = False

    def supports_tensor_alloc(self, device: torch.device) -> bool:
        return False

    def set_timeout(self, timeout: datetime.timedelta) -> None:
        self.communicator.timeout_s = timeout.total_seconds()

    def shutdown(self) -> None:
        self.communicator.close()

    def abort(self) -> None:
        self.communicator.abandon()

    def _get_sequence_number_for_group(self) -> int:
        return self.communicator.calls

    def _set_sequence_number_for_group(self) -> None:
        pass  # it begins at 0 on every rank

    def __repr__(self) -> str:
        return f"MpiProcessGroup({self._name!r}, {self.communicator})"

    # Collectives. torch's C++ side calls some of these, its Python side others; names are torch's.

    def allreduce(self, tensors: Sequence[torch.Tensor], opts: Any = None) -> GroupWork:
        hosts = _Hosts(outputs=tensors, filled=True, op=dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        comm = self.communicator
        return hosts.work(
            [
                (comm.all_reduce_sparse if _is_sparse(tensor) else comm.all_reduce)(tensor, hosts.op, async_op=True)
                for tensor in hosts.outputs
            ]
        )

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Sequence[torch.Tensor], opts: Any) -> GroupWork:
        # Only the root may see the result: the others reduce a copy.
        root = opts.rootRank == self.rank()
        outputs = tensors if root else [tensor.detach().clone() for tensor in tensors]
        hosts = _Hosts(outputs=outputs, filled=True, op=opts.reduceOp)
        label = f"reduce to {opts.rootRank}"
        works = [self.communicator.all_reduce(t, hosts.op, label=label, async_op=True) for t in hosts.outputs]
        return hosts.work(works)

    def broadcast(self, tensors: Sequence[torch.Tensor], opts: Any) -> GroupWork:
        hosts = _Hosts(outputs=tensors, filled=opts.rootRank == self.rank())
        return hosts.work([self.communicator.broadcast(t, opts.rootRank, async_op=True) for t in hosts.outputs])

    def allgather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        (outputs,), (mine,) = output_lists, inputs
        hosts = _Hosts(inputs=[mine], outputs=outputs)
        return hosts.work([self.communicator.all_gather(hosts.outputs, hosts.inputs[0], async_op=True)])

    def allgather_coalesced(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        hosts = _Hosts(inputs=inputs, outputs=[output for of_rank in output_lists for output in of_rank])
        columns = [hosts.outputs[place :: len(inputs)] for place in range(len(inputs))]
        pairs = zip(columns, hosts.inputs, strict=True)
        return hosts.work([self.communicator.all_gather(column, mine, async_op=True) for column, mine in pairs])

    def all_gather_single(self, output: torch.Tensor, mine: torch.Tensor, opts: Any = None) -> GroupWork:
        work = self.all_gather_single_coalesced([output], [mine], opts)
        work.pieces = self.size()
        return work

    def all_gather_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None
    ) -> GroupWork:
        hosts = _Hosts(inputs=inputs, outputs=outputs)
        pairs = zip(hosts.outputs, hosts.inputs, strict=True)
        return hosts.work(
            [self.communicator.all_gather_into_tensor(output, mine, async_op=True) for output, mine in pairs]
        )

    def reduce_scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> GroupWork:
        (output,), (pieces,) = outputs, input_lists
        hosts = _Hosts(inputs=pieces, outputs=[output], op=opts.reduceOp)
        return hosts.work([self.communicator.reduce_scatter(hosts.outputs[0], hosts.inputs, hosts.op, async_op=True)])

    def reduce_scatter_single(self, output: torch.Tensor, full: torch.Tensor, opts: Any) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [full], opts)

    def reduce_scatter_single_coalesced(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any
    ) -> GroupWork:
        hosts = _Hosts(inputs=inputs, outputs=outputs, op=opts.reduceOp)
        pairs = zip(hosts.outputs, hosts.inputs, strict=True)
        return hosts.work(
            [self.communicator.reduce_scatter_tensor(output, full, hosts.op, async_op=True) for output, full in pairs]
        )

    def alltoall(self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], opts: Any = None) -> GroupWork:
        hosts = _Hosts(inputs=inputs, outputs=outputs)
        return hosts.work([self.communicator.all_to_all(hosts.outputs, hosts.inputs, async_op=True)])

    def all_to_all_single(
        self,
        output: torch.Tensor,
        given: torch.Tensor,
        output_splits: Sequence[int],
        input_splits: Sequence[int],
        opts: Any = None,
    ) -> GroupWork:
        hosts = _Hosts(inputs=[given], outputs=[output])
        outputs = self._rows(hosts.outputs[0], output_splits)
        inputs = self._rows(hosts.inputs[0], input_splits)
        return hosts.work([self.communicator.all_to_all(outputs, inputs, async_op=True)])

    def gather(
        self, output_lists: Sequence[Sequence[torch.Tensor]], inputs: Sequence[torch.Tensor], opts: Any
    ) -> GroupWork:
        root = opts.rootRank == self.rank()
        hosts = _Hosts(inputs=inputs, outputs=output_lists[0] if root else [])
        outputs = hosts.outputs if root else None
        return hosts.work([self.communicator.gather(outputs, hosts.inputs[0], opts.rootRank, async_op=True)])

    def scatter(
        self, outputs: Sequence[torch.Tensor], input_lists: Sequence[Sequence[torch.Tensor]], opts: Any
    ) -> GroupWork:
        root = opts.rootRank == self.rank()
        hosts = _Hosts(inputs=input_lists[0] if root else [], outputs=outputs)
        inputs = hosts.inputs if root else None
        return hosts.work([self.communicator.scatter(hosts.outputs[0], inputs, opts.rootRank, async_op=True)])

    def barrier(self, opts: Any = None) -> GroupWork:
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0  # negative where none was given
        work = _Hosts().work([self.communicator.barrier(async_op=True)])
        work.timeout_s = timeout_s if timeout_s > 0 else None
        return work

    def send(self, tensors: Sequence[torch.Tensor], dst: int, tag: int = 0) -> GroupWork:
        hosts = _Hosts(inputs=tensors)
        return hosts.work([self.communicator.send(tensor, dst, tag, async_op=True) for tensor in hosts.inputs])

    def recv(self, tensors: Sequence[torch.Tensor], src: int | None, tag: int = 0) -> GroupWork:
        hosts = _Hosts(outputs=tensors)
        mails, works = zip(
            *(self.communicator.recv(tensor, src, tag, async_op=True) for tensor in hosts.outputs), strict=True
        )
        return hosts.work(list(works), mail=mails[-1])

    def recv_anysource(self, tensors: Sequence[torch.Tensor], tag: int = 0) -> GroupWork:
        return self.recv(tensors, None, tag)

    # The names that torch 2.11 has for some of them
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _rows(self, tensor: torch.Tensor, splits: Sequence[int]) -> list[torch.Tensor]:
        """The part of each rank, as runs of rows; equal parts where no split is given."""
        if not splits:
            if tensor.shape[0] % self.size():
                raise CommunicationError(
                    f"all_to_all_single on rank {self.rank()}: {tensor.shape[0]} rows do not divide by {self.size()} "
                    "ranks; give split sizes"
                )
            splits = [tensor.shape[0] // self.size()] * self.size()
        return list(tensor.split(list(splits)))


class _Hosts:
    """What MPI reads and writes in place of the caller's tensors: these themselves, if on the CPU and contiguous."""

    def __init__(
        self,
        inputs: Sequence[torch.Tensor] = (),
        outputs: Sequence[torch.Tensor] = (),
        *,
        filled: bool = False,
        op: Any = None,
    ) -> None:
        """
        Args:
            filled: the outputs are inputs, too.
            op: torch's name of the reduction that follows. The attribute `op` is ours.
        """
        factor = None if op is None else _compat.premultiplier(op)
        self.op: ReduceOp = "sum" if op is None or factor is not None else _op(op)
        self.inputs = [_host(tensor, fill=True) for tensor in inputs]
        self.outputs = [_host(tensor, fill=filled) for tensor in outputs]
        self._results = list(outputs)
        if factor is not None:
            self.inputs = [host * factor for host in self.inputs]
            for host in self.outputs if filled else ():
                host.mul_(factor)

    def work(self, parts: Sequence[Running | None], mail: Any = None) -> GroupWork:
        return GroupWork([part for part in parts if part is not None], self, mail)

    def bring_back(self) -> list[torch.Tensor]:
        """Write what was staged to where the caller wants it; the caller's tensors."""
        with torch.no_grad():
            for result, host in zip(self._results, self.outputs, strict=True):
                if host is not result and (_is_sparse(host) or _place(host) != _place(result)):
                    _copy_back(result, host)
        return self._results


def _host(tensor: torch.Tensor, *, fill: bool) -> torch.Tensor:
    if _is_sparse(tensor):
        return tensor.cpu()  # itself, if it is there
    tensor = tensor.detach()
    if tensor.device.type == "cpu" and tensor.is_contiguous():
        return tensor
    staged = torch.empty(tensor.shape, dtype=tensor.dtype, pin_memory=tensor.device.type == "cuda")
    if fill:
        staged.copy_(tensor)
    return staged


def _copy_back(result: torch.Tensor, host: torch.Tensor) -> None:
    """Write to a tensor of the caller, one that was expanded where its elements lie."""
    if not _is_sparse(result):
        for dim, (size, stride) in enumerate(zip(result.shape, result.stride(), strict=True)):
            first = host.narrow(dim, 0, min(size, 1))
            if size > 1 and stride == 0 and bool(((host == first) | first.isnan()).all()):
                result, host = result.narrow(dim, 0, 1), first
    result.copy_(host)


def _place(tensor: torch.Tensor) -> tuple[torch.device, int]:
    return tensor.device, tensor.data_ptr()


def _is_sparse(tensor: torch.Tensor) -> bool:
    return tensor.layout is torch.sparse_coo


class GroupWork(_compat.Work):
    """A collective of a group under way."""

    def __init__(self, parts: Sequence[Running], hosts: _Hosts, mail: Any) -> None:
        super().__init__()
        self.timeout_s: float | None = None  # None: that of the group
        self.pieces = 1  # as which the result is given
        self._parts = parts
        self._hosts = hosts
        self._mail = mail
        self._results: list[torch.Tensor] | None = None

    def wait(self, timeout: datetime.timedelta | None = None) -> bool:
        """Return when the result may be used; `timeout` instead of that of the group."""
        for part in self._parts:
            part.wait(timeout.total_seconds() if timeout else self.timeout_s)
        if self._results is None:
            self._results = self._hosts.bring_back()
            if self.pieces > 1:
                self._results = list(self._results[0].chunk(self.pieces))
        return True

    synchronize = wait

    def is_completed(self) -> bool:
        """Whether it is over, well or not; ``wait`` raises what went wrong."""
        if not all(part.is_completed() for part in self._parts):
            return False
        with contextlib.suppress(CommunicationError):
            self.wait()
        return True

    def is_success(self) -> bool:
        return self.is_completed() and self._results is not None

    def result(self) -> list[torch.Tensor]:
        self.wait()
        assert self._results is not None
        return self._results

    def source_rank(self) -> int:
        """The rank that a received message came from."""
        return self._mail.source

    _source_rank = source_rank

    def get_future(self) -> torch.futures.Future:
        """The result as a future that is complete: nothing moves a collective on while code in C++ waits for it."""
        future: torch.futures.Future = torch.futures.Future()
        future.set_result(self.result())
        return future


def _op(op: Any) -> ReduceOp:
    for known, name in _OPS:
        if op == known:
            return name
    raise CommunicationError(f"hpcmpi does not reduce by {op}: use one of {', '.join(name for _, name in _OPS)}")
