"""Communicators that outlive lost ranks, next to MPI's own: objects, buffers, messages, and groups of ranks."""

from array import array

import numpy as np
import pytest
import torch
from mpi4py import MPI

from hpcfsdp.comm.mpi import part_comm
from hpcfsdp.comm.mpi.communicator import MpiCommunicator, create_group
from hpcfsdp.comm.mpi.part_comm import PartComm
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.job import current_job
from tests.under_mpi import COMM

pytestmark = pytest.mark.ranks(3)


@pytest.fixture(scope="module")
def base():
    made = COMM.Dup()
    yield made
    made.Free()


@pytest.fixture
def comm(base, monkeypatch):
    """All ranks, in another order than MPI's."""
    part_comm.start_again()
    made = PartComm(base, [*range(1, COMM.size), 0])
    whole = current_job()
    monkeypatch.setattr("hpcfsdp.comm.mpi.communicator.current_job", lambda: type(whole)(made, whole.topology))
    yield made
    made.Barrier()


def test_objects_are_exchanged_as_by_mpi(comm):
    rank, size = comm.rank, comm.size
    assert rank == (COMM.rank - 1) % COMM.size
    value = {"rank": rank, "long": "x" * (100_000 * rank)}
    assert comm.allgather(value)[-1] == {"rank": size - 1, "long": "x" * (100_000 * (size - 1))}
    assert comm.bcast(value if rank == 1 else None, 1)["rank"] == 1
    assert comm.gather(rank, 1) == (list(range(size)) if rank == 1 else None)
    assert comm.scatter([10 * other for other in range(size)] if rank == 0 else None) == 10 * rank
    assert comm.alltoall([(rank, to) for to in range(size)]) == [(source, rank) for source in range(size)]
    assert comm.allreduce(rank + 1) == size * (size + 1) // 2
    assert comm.allreduce(rank, MPI.MAX) == size - 1
    assert comm.reduce(1, root=2) == (size if rank == 2 else None)
    comm.send(f"from {rank}", (rank + 1) % size, tag=7)
    assert comm.recv((rank - 1) % size, tag=7) == f"from {(rank - 1) % size}"


def test_buffers_are_exchanged_as_by_mpi(comm):
    rank, size = comm.rank, comm.size
    ranks = array("i", bytes(4 * size))
    comm.Allgather(array("i", [rank]), ranks)
    assert ranks.tolist() == list(range(size))
    lowest = array("i", [rank, -rank])
    comm.Allreduce(MPI.IN_PLACE, lowest, op=MPI.MIN)
    assert lowest.tolist() == [0, 1 - size]
    matrix, total = np.full((2, 3), rank + 0.5), np.empty((2, 3))
    comm.Allreduce(matrix, total)
    assert (total == sum(other + 0.5 for other in range(size))).all()
    sent = np.arange(5) * (rank + 1)
    comm.Bcast(sent, 2)
    assert (sent == np.arange(5) * 3).all()
    arrival = comm.Ibarrier()
    while not arrival.Test():
        pass


def test_parts_do_not_mix_their_messages(comm):
    rank, size = comm.rank, comm.size
    copy, same = comm.Dup(), comm.Split(rank % 2, -rank)
    assert same.size == len(range(rank % 2, size, 2))
    assert same.allgather(rank) == list(range(rank % 2, size, 2))[::-1]
    requests = [each.Isend(array("i", [number]), (rank + 1) % size, 5) for number, each in enumerate((comm, copy))]
    found, status = array("i", [-1]), MPI.Status()
    for number, each in ((1, copy), (0, comm)):
        while (message := each.Improbe(tag=5, status=status)) is None:
            pass
        message.Recv(found)
        assert (found[0], status.Get_source()) == (number, (rank - 1) % size)
    for request in requests:
        request.Wait()
    if rank != 1:
        part = comm.part([other for other in range(size) if other != 1])
        assert part.allgather(rank) == [other for other in range(size) if other != 1]
        assert part.ranks_in(comm) == tuple(other for other in range(size) if other != 1)


def test_what_it_does_not_have_is_named(comm):
    with pytest.raises(CommunicationError, match="has no Alltoallw: it outlives lost ranks"):
        comm.Alltoallw()
    assert not hasattr(comm, "__array__")


def test_collectives_on_tensors_go_over_it(comm):
    made = MpiCommunicator(comm.Dup(), current_job().topology)
    memory = made.alloc(6, torch.float64)
    memory.fill_(made.rank + 1)
    made.all_reduce(memory, "sum")
    assert memory.tolist() == [made.size * (made.size + 1) / 2] * 6
    large = torch.full((300_000,), float(made.rank))
    made.all_reduce(large, "average")
    assert large.unique().tolist() == [(made.size - 1) / 2]
    assert made.all_gather_object(made.rank) == list(range(made.size))
    if made.rank < 2:
        pair = made.subgroup([0, 1])
        assert pair.all_gather_object(made.rank) == [0, 1]
        assert isinstance(create_group(comm, [0, 1]), PartComm)
        pair.close()
    made.barrier()
    made.close()
