"""Calls in which ranks differ: no byte is written outside of the caller's tensors, and all waiting ranks raise."""

import pytest
import torch

from hpcfsdp.comm.mpi import communicator, messages as mpi_messages
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology

pytestmark = [pytest.mark.ranks(3, 2, 4), pytest.mark.transport]

MARGIN = 200_000  # elements: what Open MPI writes behind a buffer without a look at the size


class Guarded:
    """Tensors in the middle of memory that no rank may write."""

    def __init__(self):
        self._all = []

    def empty(self, numel, dtype=torch.float32):
        whole = torch.full((numel + 2 * MARGIN,), 7, dtype=dtype)
        self._all.append((whole, numel))
        return whole[MARGIN : MARGIN + numel]

    def list_of(self, size, numel):
        return [self.empty(numel) for _ in range(size)]

    def is_intact(self):
        return all(bool((whole[:MARGIN] == 7).all() & (whole[MARGIN + n :] == 7).all()) for whole, n in self._all)


def gather(comm, guarded, numel, root):
    outputs = guarded.list_of(comm.size, numel) if comm.rank == root else None
    comm.gather(outputs, torch.ones(numel), root)


def scatter(comm, guarded, numel, root):
    inputs = [torch.ones(numel)] * comm.size if comm.rank == root else None
    comm.scatter(guarded.empty(numel), inputs, root)


# What each does when ranks give different numbers of elements; rank 0 is the root of those that have one.
CALLS = {
    "all_gather_into_tensor": lambda c, g, n: c.all_gather_into_tensor(g.empty(n * c.size), torch.ones(n)),
    "reduce_scatter_tensor": lambda c, g, n: c.reduce_scatter_tensor(g.empty(n), torch.ones(n * c.size), "sum"),
    "all_reduce": lambda c, g, n: c.all_reduce(g.empty(n), "sum"),
    "broadcast": lambda c, g, n: c.broadcast(g.empty(n), 0),
    "all_gather": lambda c, g, n: c.all_gather(g.list_of(c.size, n), torch.ones(n)),
    "reduce_scatter": lambda c, g, n: c.reduce_scatter(g.empty(n), [torch.ones(n)] * c.size, "sum"),
    "all_to_all": lambda c, g, n: c.all_to_all(g.list_of(c.size, n), [torch.ones(n)] * c.size),
    "gather": lambda c, g, n: gather(c, g, n, 0),
    "scatter": lambda c, g, n: scatter(c, g, n, 0),
}
WAITS = {  # the ranks that receive something; the others may be through before anyone knows
    "broadcast": lambda rank, odd: rank == odd,
    "scatter": lambda rank, odd: rank == odd,
    "gather": lambda rank, odd: rank == 0,
}


@pytest.mark.parametrize("sizes", [(4, 8), (16, 100_000), (100_000, 16)], ids=str)
@pytest.mark.parametrize("name", CALLS)
def test_ranks_that_differ_in_size_write_nothing_outside_and_all_that_wait_raise(
    several, world, make_comm, name, sizes
):
    comm, guarded, odd = make_comm(timeout_s=60), Guarded(), world.size - 1
    problem = ""
    try:
        CALLS[name](comm, guarded, sizes[world.rank == odd])
    except CommunicationError as error:
        problem = str(error)
    assert guarded.is_intact()
    assert "waited" not in problem
    if WAITS.get(name, lambda rank, odd: True)(world.rank, odd):
        assert f"rank {world.rank}" in problem
        assert " sent " in problem or ", but rank " in problem
    world.comm.Barrier()
    total = torch.ones(3)
    comm.all_reduce(total, "sum")  # and the communicator is as good as before
    assert total.tolist() == [world.size] * 3


@pytest.mark.parametrize("source", [1, None], ids=["from one", "from any"])
@pytest.mark.parametrize("sizes", [(16, 2000), (16, 200_000), (200_000, 16), (0, 5)], ids=str)
def test_a_message_of_another_size_is_not_written_and_the_next_one_is(several, world, make_comm, source, sizes):
    comm, guarded = make_comm(timeout_s=60), Guarded()
    expected, sent = sizes
    if world.rank == 1:
        comm.send(torch.ones(sent), 0)
        comm.send(torch.full((expected,), 2.0), 0)
    if world.rank == 0:
        tensor = guarded.empty(expected)
        with pytest.raises(CommunicationError, match=rf"rank 1 sent {4 * sent} bytes where {4 * expected} bytes were"):
            comm.recv(tensor, source)
        assert bool((tensor == 7).all())
        comm.recv(tensor, source)
        assert tensor.tolist() == [2.0] * expected
    assert guarded.is_intact()


def test_unexpected_messages_in_parts_are_received_in_order(several, world, make_comm, monkeypatch):
    monkeypatch.setattr(mpi_messages, "_INLINE_BYTES", 16)
    monkeypatch.setattr(mpi_messages, "_PART_BYTES", 64)
    comm = make_comm(timeout_s=60)
    if world.rank == 1:
        for numel in (100, 5, 40, 3):
            comm.send(torch.full((numel,), float(numel)), 0, async_op=True)
    if world.rank == 0:
        numels = (100, 6, 40, 3)
        tensors = [torch.zeros(numel) for numel in numels]
        works = [comm.recv(tensors[n], None if n % 2 else 1, async_op=True)[1] for n in range(4)]
        for n in (3, 2, 0):
            works[n].wait()
            assert tensors[n].tolist() == [float(numels[n])] * numels[n]
        with pytest.raises(CommunicationError, match=r"rank 1 sent 20 bytes where 24 bytes"):
            works[1].wait()
        assert not tensors[1].any()


def test_a_message_that_is_none_of_ours_is_refused(several, world, make_comm):
    comm, guarded = make_comm(timeout_s=60), Guarded()
    if world.rank == 1:
        comm.comm.Send(bytearray(b"x" * 4_000_000), 0, communicator._TAG_USER)
        comm.comm.Send(bytearray(3), 0, communicator._TAG_USER)
    if world.rank == 0:
        for nbytes in (4_000_000, 3):
            with pytest.raises(CommunicationError, match=rf"rank 1 sent {nbytes} bytes that belong to no"):
                comm.recv(guarded.empty(16), 1)
    assert guarded.is_intact()


def test_what_a_failed_call_left_behind_is_dropped_when_its_tag_comes_again(several, world, make_comm, monkeypatch):
    monkeypatch.setattr("hpcfsdp.comm.mpi.communicator._TAGS", 4)
    comm = make_comm(timeout_s=60)
    for numel in (3, 20_000):
        with pytest.raises(CommunicationError):
            comm.all_gather(
                [torch.empty(numel) for _ in range(world.size)], torch.ones(numel if world.rank else numel + 1)
            ) if world.rank else comm.all_gather([torch.empty(numel + 1)] * world.size, torch.ones(numel + 1))
        world.comm.Barrier()
        for turn in range(10):
            outputs = [torch.empty(numel) for _ in range(world.size)]
            comm.all_gather(outputs, torch.full((numel,), float(world.rank + turn)))
            assert [output.unique().tolist() for output in outputs] == [[float(r + turn)] for r in range(world.size)]


# Ranks that differ in what is to be done with the values


DIFFERENT = {
    "dtype": (lambda c: c.all_reduce(torch.ones(4), "sum"), lambda c: c.all_reduce(torch.ones(4).int(), "sum")),
    "operation": (lambda c: c.all_reduce(torch.ones(9_000), "sum"), lambda c: c.all_reduce(torch.ones(9_000), "max")),
    "call": (lambda c: c.barrier(), lambda c: c.all_gather_object("x")),
    "dtype of a list": (
        lambda c: c.all_gather([torch.ones(4)] * c.size, torch.ones(4)),
        lambda c: c.all_gather([torch.ones(4).int()] * c.size, torch.ones(4).int()),
    ),
    "accumulate": (
        lambda c: c.reduce_scatter_tensor(torch.ones(1), torch.ones(c.size), "sum", accumulate=torch.float64),
        lambda c: c.reduce_scatter_tensor(torch.ones(1), torch.ones(c.size), "sum"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_every_rank_raises_where_one_differs_in(several, world, make_comm, what):
    comm, odd = make_comm(timeout_s=60), world.size - 1
    comm.barrier()
    with pytest.raises(CommunicationError) as caught:
        DIFFERENT[what][world.rank == odd](comm)
    other = 0 if world.rank == odd else odd
    assert str(caught.value).startswith(f"rank {world.rank} calls ")
    assert world.rank == odd or f", but rank {other} calls " in str(caught.value)
    world.comm.Barrier()
    comm.barrier()


def test_a_message_of_another_dtype_is_refused(several, world, make_comm):
    comm = make_comm(timeout_s=60)
    if world.rank == 1:
        comm.send(torch.ones(4), 0)
    if world.rank == 0:
        with pytest.raises(CommunicationError, match=r"rank 1 sent torch\.float32 where torch\.int32 was expected"):
            comm.recv(torch.ones(4).int(), 1)


def test_a_rank_that_exchanges_with_neither_of_two_that_differ_raises(several, world, make_comm):
    if world.size < 3:
        pytest.skip("two ranks exchange with each other")
    last = world.size - 1
    comm = make_comm(Topology.uneven([last, 1]), timeout_s=60)
    gathered = comm.alloc(2 * world.size, torch.float32, gathered=True)
    with pytest.raises(CommunicationError, match=rf"^rank {world.rank} calls .*, but rank \d calls .*") as caught:
        if world.rank == last:
            comm.all_reduce(torch.ones(4), "sum")
        else:  # the last rank sends its part to rank 0 alone
            comm.all_gather_into_tensor(gathered, torch.ones(2))
    assert world.rank == last or f"but rank {last} calls all_reduce" in str(caught.value)
    world.comm.Barrier()


def test_memory_of_a_neighbour_is_no_part_of_what_a_rank_was_given(several, world, make_comm):
    comm = make_comm(Topology.regular(1, world.size), timeout_s=60)
    memory = comm.alloc(8, torch.float32)
    for begin, numel in ((0, 100), (-4, 6), (4, 5)):
        beyond = torch.as_strided(memory, (numel,), (1,), memory.storage_offset() + begin)
        with pytest.raises(CommunicationError, match=rf"tensor of {numel} x torch\.float32 .* reaches out of the 8 "):
            comm.all_reduce(beyond, "sum")
    comm.all_reduce(memory[2:], "sum")
