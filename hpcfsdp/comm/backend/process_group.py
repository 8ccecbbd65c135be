"""The torch.distributed backend ``hpcmpi`` and the rendezvous ``mpi://``, for stock torch code. See hpcfsdp/mpi.py.

In torch a Python class can implement a whole process group, but not one of several backends of a group: hpcmpi serves
all devices of a group. Tensors on a GPU are staged through pinned host memory.
"""

from __future__ import annotations

import datetime
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Any, TypeGuard
from urllib.parse import parse_qsl, urlsplit

import torch
import torch.distributed as dist
from torch import Tensor

from hpcfsdp import accelerator, env
from hpcfsdp.comm.backend.group_work import GroupWork, is_sparse
from hpcfsdp.comm.progress import run
from hpcfsdp.comm.reduce import Tensors
from hpcfsdp.errors import CommunicationError, LaunchError
from hpcfsdp.hang import departure
from hpcfsdp.launch import rendezvous
from hpcfsdp.launch.job import DEFAULT_TIMEOUT_S, current_job
from hpcfsdp.launch.topology import Topology

if TYPE_CHECKING:
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator

NAME = "hpcmpi"


def register() -> None:
    """Register the backend and the rendezvous with torch. Does not start MPI. May be called again."""
    if NAME not in dist.Backend.backend_list:
        devices = list(dist.Backend.default_device_backend_map)  # those that torch has a backend for
        dist.Backend.register_backend(NAME, _create_group, extended_api=True, devices=devices)
        dist.register_rendezvous_handler("mpi", _rendezvous)


def _rendezvous(url: str, timeout: datetime.timedelta | None = None, **_: Any) -> Iterator[tuple[Any, int, int]]:
    """Yield a store, and this rank and their number as MPI has them. Collective over all processes of the job."""
    job, parts = current_job(), urlsplit(url)
    arguments = dict(parse_qsl(parts.query))  # of init_process_group
    known = {"rank": str(job.comm.rank), "world_size": str(job.comm.size)}
    if parts.netloc or parts.path.strip("/") or set(arguments) - set(known):
        raise LaunchError(
            f"init_method {url!r}: 'mpi://' takes no host, path or other argument: ranks and addresses come from MPI"
        )
    for name, value in arguments.items():
        if value != known[name]:
            raise LaunchError(
                f"init_process_group was given {name}={value}, but this process is rank {job.comm.rank} of "
                f"{job.comm.size} in MPI: leave rank and world_size out, 'mpi://' takes both from MPI"
            )
    seconds = DEFAULT_TIMEOUT_S if timeout is None else timeout.total_seconds()
    store, address = rendezvous.open_store(job.comm, single_node=job.topology.num_nodes == 1, timeout_s=seconds)
    job.export(job.topology, (address, store.port))
    yield store, job.comm.rank, job.comm.size
    raise LaunchError(
        "init_method='mpi://' gives the ranks of an MPI job once, and lost ranks cannot join it again: start a new job"
    )


def _create_group(options: Any, topology: Topology | None) -> MpiProcessGroup:
    """Make a group. torch calls this on its members. `topology` comes from ``pg_options``."""
    job = current_job()
    from hpcfsdp.comm.mpi.communicator import MpiCommunicator, create_group  # starts MPI

    timeout_s = options.timeout.total_seconds()
    ranks = list(options.global_ranks_in_group) or list(range(job.comm.size))
    if len(ranks) != options.group_size or ranks[options.group_rank] != job.comm.rank:
        raise LaunchError(
            f"torch.distributed has this process as rank {options.group_rank} of {options.group_size}, MPI as rank "
            f"{job.comm.rank} of {job.comm.size}: use init_method='mpi://', which takes both from MPI"
        )
    if topology is None:
        parent = dist.group.WORLD if dist.is_initialized() else None
        topology = (parent.communicator if is_mpi_group(parent) else job).topology.restrict(ranks)
    if options.global_ranks_in_group:
        MemberRendezvous(options.store, job.comm.rank, ranks).wait(timeout_s)
        comm = create_group(job.comm, ranks)
    else:
        comm = job.comm.Dup()
    return MpiProcessGroup(MpiCommunicator(comm, topology, timeout_s=timeout_s, compare_calls=env.compare_calls()))


class MemberRendezvous:
    """The members of a new group, which register in torch's store. A ``Condition`` of progress.py, and an owner.

    The first rank that knows the outcome stores it. It holds for all ranks, also for those that come later.
    """

    _COMPLETE = "all are here"
    _LONGEST_PAUSE_S = 0.05

    def __init__(self, store: Any, rank: int, ranks: list[int]) -> None:
        self._store, self._rank, self._ranks = store, rank, ranks
        self._outcome: str | None = None
        self._next_poll_s = self._pause_s = 0.0
        mine = f"rank {rank} makes a group of ranks {ranks}"
        first = store.compare_set("members", "", mine).decode(errors="replace")
        store.set(f"here/{rank}", "")
        if first.rpartition(" of ")[2] != mine.rpartition(" of ")[2]:
            differ = f"{first}, but {mine}: all members must give the same"
            self.end(differ)
            if self._outcome == self._COMPLETE:  # the others have just finished, without this rank
                self._outcome = differ
        elif store.add("count", 1) == len(ranks):
            self.end(self._COMPLETE)

    def wait(self, timeout_s: float) -> None:
        """Wait until all are here, and agree on the list of members. Collective over the members.

        MPI itself would wait without end for a rank that does not know that it is a member, and would block all other
        collectives meanwhile.
        """
        label = f"new_group of ranks {self._ranks}"
        try:
            run((condition for condition in (self,)), label, self._rank, timeout_s, False, self)
        except CommunicationError as error:
            self.end(str(error))
        self.close()

    def holds(self) -> bool:
        now_s = time.monotonic()
        if self._outcome is None and now_s >= self._next_poll_s:
            self._pause_s = min(2 * self._pause_s + 1e-4, self._LONGEST_PAUSE_S)  # one store answers all ranks
            self._next_poll_s = now_s + self._pause_s
            if self._store.check(["outcome"]):
                self._outcome = self._store.get("outcome").decode(errors="replace")
        return self._outcome is not None

    def missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"here/{rank}"])]

    def departed(self) -> set[int]:
        return departure.departed()

    def end(self, outcome: str) -> None:
        """Not collective. Store the outcome, unless one is stored already."""
        self._outcome = self._store.compare_set("outcome", "", outcome).decode(errors="replace")

    def close(self) -> None:
        """Raise the error of the rendezvous. Without one, the last member deletes the keys.

        torch may give another group of the same ranks the name of a destroyed one, and with it the part of the store.
        The list of members stays there, for ranks that come with another list.
        """
        if self._outcome != self._COMPLETE:
            raise CommunicationError(self._outcome)
        if self._store.add("left", 1) == len(self._ranks):
            for key in ("count", "outcome", "left", *(f"here/{rank}" for rank in self._ranks)):
                self._store.delete_key(key)


def is_mpi_group(group: Any) -> TypeGuard[MpiProcessGroup]:
    """Return whether hpcmpi is the backend of a process group."""
    return isinstance(group, MpiProcessGroup)


class MpiProcessGroup(dist.ProcessGroup):
    """A process group of torch.distributed over MPI. hpcfsdp's own code uses its `communicator` directly."""

    def __init__(self, communicator: MpiCommunicator) -> None:
        super().__init__(communicator.rank, communicator.size)
        self.communicator = communicator
        self._name = self._desc = ""

    # The interface of torch's process groups

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

    name = getBackendName
    group_name, group_desc = property(getGroupName), property(getGroupDesc)
    _set_group_name, _set_group_desc = setGroupName, setGroupDesc

    def size(self) -> int:
        return self.communicator.size

    def rank(self) -> int:
        return self.communicator.rank

    @property
    def _device_types(self) -> list[torch.device]:
        return [torch.device(kind) for kind in ("cpu", accelerator.device_type()) if kind is not None]

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

    # Collectives. torch's C++ code calls some of these, its Python code others. The names are torch's.

    def allreduce(self, tensors: Tensors, opts: Any = None) -> GroupWork:
        work = GroupWork(outputs=tensors, in_place=True, op=dist.ReduceOp.SUM if opts is None else opts.reduceOp)
        comm = self.communicator
        calls = [(comm.all_reduce_sparse if is_sparse(tensor) else comm.all_reduce, tensor) for tensor in work.outputs]
        return work.of(reduce(tensor, work.op, async_op=True) for reduce, tensor in calls)

    allreduce_coalesced = allreduce

    def reduce(self, tensors: Tensors, opts: Any) -> GroupWork:
        # Only the root may see the result: the others reduce a copy.
        root = opts.rootRank == self.rank()
        outputs = tensors if root else [tensor.detach().clone() for tensor in tensors]
        work = GroupWork(outputs=outputs, in_place=True, op=opts.reduceOp)
        reduce, label = self.communicator.all_reduce, f"reduce to {opts.rootRank}"
        return work.of(reduce(tensor, work.op, label=label, async_op=True) for tensor in work.outputs)

    def broadcast(self, tensors: Tensors, opts: Any) -> GroupWork:
        work = GroupWork(outputs=tensors, in_place=opts.rootRank == self.rank())
        return work.of([self.communicator.broadcast(t, opts.rootRank, async_op=True) for t in work.outputs])

    def allgather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        work = GroupWork(inputs=inputs, outputs=output_lists[0])
        return work.of([self.communicator.all_gather(work.outputs, work.inputs[0], async_op=True)])

    def allgather_coalesced(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any = None) -> GroupWork:
        work = GroupWork(inputs=inputs, outputs=[output for of_rank in output_lists for output in of_rank])
        columns = [work.outputs[place :: len(inputs)] for place in range(len(inputs))]
        pairs = zip(columns, work.inputs, strict=True)
        return work.of([self.communicator.all_gather(column, mine, async_op=True) for column, mine in pairs])

    def all_gather_single(self, output: Tensor, mine: Tensor, opts: Any = None) -> GroupWork:
        work = self.all_gather_single_coalesced([output], [mine], opts)
        work.chunks = self.size()
        return work

    def all_gather_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        work = GroupWork(inputs=inputs, outputs=outputs)
        pairs = zip(work.outputs, work.inputs, strict=True)
        return work.of(self.communicator.all_gather_into_tensor(output, mine, async_op=True) for output, mine in pairs)

    def reduce_scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> GroupWork:
        work = GroupWork(inputs=input_lists[0], outputs=outputs, op=opts.reduceOp)
        return work.of([self.communicator.reduce_scatter(work.outputs[0], work.inputs, work.op, async_op=True)])

    def reduce_scatter_single(self, output: Tensor, full: Tensor, opts: Any) -> GroupWork:
        return self.reduce_scatter_single_coalesced([output], [full], opts)

    def reduce_scatter_single_coalesced(self, outputs: Tensors, inputs: Tensors, opts: Any) -> GroupWork:
        work = GroupWork(inputs=inputs, outputs=outputs, op=opts.reduceOp)
        pairs = zip(work.outputs, work.inputs, strict=True)
        reduce = self.communicator.reduce_scatter_tensor
        return work.of(reduce(output, full, work.op, async_op=True) for output, full in pairs)

    def alltoall(self, outputs: Tensors, inputs: Tensors, opts: Any = None) -> GroupWork:
        work = GroupWork(inputs=inputs, outputs=outputs)
        return work.of([self.communicator.all_to_all(work.outputs, work.inputs, async_op=True)])

    def all_to_all_single(
        self, output: Tensor, given: Tensor, output_splits: Sequence[int], input_splits: Sequence[int], opts: Any = None
    ) -> GroupWork:
        work = GroupWork(inputs=[given], outputs=[output])
        outputs = self._rows(work.outputs[0], output_splits)
        inputs = self._rows(work.inputs[0], input_splits)
        return work.of([self.communicator.all_to_all(outputs, inputs, async_op=True)])

    def gather(self, output_lists: Sequence[Tensors], inputs: Tensors, opts: Any) -> GroupWork:
        root = opts.rootRank == self.rank()
        work = GroupWork(inputs=inputs, outputs=output_lists[0] if root else [])
        outputs = work.outputs if root else None
        return work.of([self.communicator.gather(outputs, work.inputs[0], opts.rootRank, async_op=True)])

    def scatter(self, outputs: Tensors, input_lists: Sequence[Tensors], opts: Any) -> GroupWork:
        root = opts.rootRank == self.rank()
        work = GroupWork(inputs=input_lists[0] if root else [], outputs=outputs)
        inputs = work.inputs if root else None
        return work.of([self.communicator.scatter(work.outputs[0], inputs, opts.rootRank, async_op=True)])

    def barrier(self, opts: Any = None) -> GroupWork:
        timeout_s = opts.timeout.total_seconds() if opts is not None else 0.0  # negative: none given
        work = GroupWork().of([self.communicator.barrier(async_op=True)])
        work.timeout_s = timeout_s if timeout_s > 0 else None
        return work

    def send(self, tensors: Tensors, dst: int, tag: int = 0) -> GroupWork:
        work = GroupWork(inputs=tensors, ordered=False)
        return work.of([self.communicator.send(tensor, dst, tag, async_op=True) for tensor in work.inputs])

    def recv(self, tensors: Tensors, src: int | None, tag: int = 0) -> GroupWork:
        work = GroupWork(outputs=tensors, ordered=False)
        received = [self.communicator.recv(tensor, src, tag, async_op=True) for tensor in work.outputs]
        return work.of([part for _, part in received], requests=received[-1][0])

    def recv_anysource(self, tensors: Tensors, tag: int = 0) -> GroupWork:
        return self.recv(tensors, None, tag)

    # The names of torch 2.11
    _allgather_base = all_gather_single
    allgather_into_tensor_coalesced = all_gather_single_coalesced
    _reduce_scatter_base = reduce_scatter_single
    reduce_scatter_tensor_coalesced = reduce_scatter_single_coalesced
    alltoall_base = all_to_all_single

    def _rows(self, tensor: Tensor, splits: Sequence[int]) -> list[Tensor]:
        """Return the rows of each rank; equal parts where no split is given."""
        if not splits:
            if tensor.shape[0] % self.size():
                raise CommunicationError(
                    f"all_to_all_single on rank {self.rank()}: {tensor.shape[0]} rows do not divide by {self.size()} "
                    "ranks; give split sizes"
                )
            splits = [tensor.shape[0] // self.size()] * self.size()
        return list(tensor.split(list(splits)))
