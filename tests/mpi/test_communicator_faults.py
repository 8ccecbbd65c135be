"""Labelled barriers, missing ranks, and ranks that make another call: the errors, and the ranks that they name."""

import gc
import random
import re
import time

import pytest
import torch

from hpcfsdp.comm.mpi import messages as mpi_messages
from hpcfsdp.comm.progress import Condition
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology

pytestmark = [pytest.mark.ranks(3, 1, more=(2, 4)), pytest.mark.transport]

# Labelled barriers


@pytest.fixture(params=["one node", "single ranks", "two nodes", "gloo", "compared"])
def breakable(request, world, gloo, make_comm):
    """A communicator that the test may break."""
    if request.param == "gloo":
        return gloo
    size = world.size
    topology = {
        "single ranks": Topology.regular(size, 1),
        "two nodes": Topology.from_labels([rank % 2 for rank in range(size)]),
    }.get(request.param, Topology.regular(1, size))
    return make_comm(topology, timeout_s=60, compare_calls=request.param == "compared")


def test_a_labelled_barrier_waits_for_all_ranks_and_tells_whether_one_has_set_a_flag(world, breakable):
    dice = random.Random(world.rank)
    for turn in range(30):
        if dice.random() < 0.3:
            time.sleep(dice.random() * 0.003)
        arrived_s = time.monotonic()
        flags = [random.Random(turn * world.size + rank).random() < 0.3 for rank in range(world.size)]
        assert breakable.labelled_barrier(f"turn {turn}", flags[world.rank]) is any(flags)
        left_s = time.monotonic()
        assert max(world.comm.allgather(arrived_s)) <= left_s


@pytest.mark.parametrize("length", [0, 100, 500, 100000])
@pytest.mark.parametrize("character", ["x", "ü"])
def test_labels_may_have_any_length(breakable, length, character):
    for turn in range(3):
        breakable.labelled_barrier(character * length + str(turn))


@pytest.mark.parametrize("common", [0, 100, 1000])
def test_a_rank_with_another_label_is_named_with_it_on_every_rank(several, world, breakable, common):
    odd = world.size - 1
    breakable.labelled_barrier("all is well")
    labels = [f"{'odd' if rank == odd else 'even'} " for rank in range(world.size)]
    # Where they are too long for the message, they differ in what is cut off.
    labels = ["." * common + note for note in labels] if common > 200 else [note + "." * common for note in labels]
    with pytest.raises(CommunicationError) as caught:
        breakable.labelled_barrier(labels[world.rank])
    others = range(odd) if world.rank == odd else [odd]
    message = str(caught.value)
    assert message.startswith(f"rank {world.rank} calls {labels[world.rank][:20].rstrip()}")
    assert any(f", but rank {other} calls {labels[other][:20].rstrip()}" in message for other in others)
    world.comm.Barrier()
    breakable.labelled_barrier("and it is again")


def test_a_rank_that_is_missing_in_a_labelled_barrier_is_named(several, world, make_comm):
    for topology in (Topology.regular(1, world.size), Topology.regular(world.size, 1)):
        comm, missing = make_comm(topology, timeout_s=0.5), world.size - 1
        comm.labelled_barrier("all are here")
        if world.rank != missing:
            with pytest.raises(CommunicationError) as caught:
                comm.labelled_barrier("one is not")
            assert str(caught.value).startswith(f"one is not on rank {world.rank}: waited 0.5 s")
            assert named(caught.value, missing)
        world.comm.Barrier()


def test_a_labelled_barrier_works_while_collectives_are_in_progress(make_comm):
    comm = make_comm(Topology.regular(1, make_comm().size))
    memory = comm.alloc(4 * comm.size, torch.float32).fill_(1.0)
    output = torch.empty(4)
    works = [comm.reduce_scatter_tensor(output, memory, "sum", async_op=True), comm.barrier(async_op=True)]
    comm.labelled_barrier("meanwhile")
    for work in works:
        work.wait()
    assert output.tolist() == [comm.size] * 4


# Ranks that do not come


def named(error, *ranks):
    return f"for rank(s) {', '.join(map(str, ranks))}, which did not take part" in str(error)


@pytest.mark.parametrize("absent", ["first", "last"])
def test_a_rank_that_does_not_come_is_named(several, world, make_comm, absent):
    size, rank = world.size, world.rank
    missing = 0 if absent == "first" else size - 1
    comms = [make_comm() for _ in range(9)]
    works = []
    if rank != missing:
        one, many = torch.ones(3), [torch.ones(3) for _ in range(size)]
        works = [
            comms[0].barrier(async_op=True),
            comms[1].all_gather_into_tensor(torch.empty(3 * size), one, async_op=True),
            comms[2].all_reduce(torch.ones(3), "sum", async_op=True),
            comms[3].broadcast(torch.ones(3), missing, async_op=True),
            comms[4].all_gather(many, one, async_op=True),
            comms[5].all_to_all([torch.empty(3) for _ in range(size)], many, async_op=True),
            comms[6].scatter(torch.empty(3), None, missing, async_op=True),
            comms[7].recv(torch.empty(3), missing, async_op=True)[1],
            # The last step of the ring waits for the neighbour.
            comms[8].reduce_scatter_tensor(torch.empty(3), torch.ones(3 * size), "sum", async_op=True),
        ]
    world.comm.Barrier()  # all others are there
    for work in works:
        with pytest.raises(CommunicationError) as caught:
            work.wait(0.15)
        assert named(caught.value, missing), caught.value
        assert f" on rank {rank}: waited 0.15 s " in str(caught.value)
        with pytest.raises(CommunicationError) as again:
            work.wait()
        assert again.value is caught.value


def test_a_rank_that_does_not_come_to_make_memory_or_a_group_is_named(several, world, make_comm):
    comm, other, missing = make_comm(timeout_s=1), make_comm(timeout_s=1), world.size - 1
    if world.rank == missing:
        return
    with pytest.raises(CommunicationError) as caught:
        comm.alloc(8, torch.float32)
    assert named(caught.value, missing)
    assert str(caught.value).startswith(f"alloc of 8 x torch.float32 on rank {world.rank}: waited 1 s")
    with pytest.raises(CommunicationError) as caught:
        other.subgroup(range(world.size))
    assert named(caught.value, missing)


def test_memory_that_mpi_may_still_read_outlives_a_send_that_failed(several, world, make_comm):
    comm = make_comm()
    tensor = torch.empty(1_000_000)
    address = tensor.data_ptr()
    if world.rank == 0:
        with pytest.raises(CommunicationError):
            comm.send(tensor, 1, async_op=True).wait(0.05)
        del tensor
        gc.collect()
        kept = [tensor for _, _, read in mpi_messages.abandoned if isinstance(read, tuple) for tensor in read]
        assert address in [tensor.data_ptr() for tensor in kept]
    world.comm.Barrier()


def test_a_receive_that_was_given_up_is_not_written_later(several, world, make_comm):
    comm, numel = make_comm(), 1000
    given_up, taken = torch.zeros(numel), torch.zeros(numel)
    if world.rank == 0:
        requests, work = comm.recv(given_up, 1, async_op=True)  # the requests live on, as they do in torch's work
        with pytest.raises(CommunicationError):
            work.wait(0.05)
    world.comm.Barrier()
    if world.rank == 1:
        comm.send(torch.ones(numel), 0)
    if world.rank == 0:
        comm.recv(taken, 1)
        assert requests.source is None
    assert not given_up.any()
    assert world.rank != 0 or taken.all()


# Ranks that call something else


DIFFERENT = {
    "operation": (lambda c: c.all_reduce(torch.ones(4), "sum"), lambda c: c.broadcast(torch.ones(4), 0)),
    "reduction": (lambda c: c.all_reduce(torch.ones(4), "sum"), lambda c: c.all_reduce(torch.ones(4), "max")),
    "dtype": (
        lambda c: c.all_reduce(torch.ones(4), "sum"),
        lambda c: c.all_reduce(torch.ones(4, dtype=torch.int32), "sum"),
    ),
    "size": (lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(5), 0)),
    "root": (lambda c: c.broadcast(torch.ones(4), 0), lambda c: c.broadcast(torch.ones(4), 1)),
    "barrier": (lambda c: c.barrier(), lambda c: c.all_gather_object("x")),
    "accumulate": (
        lambda c: c.reduce_scatter_tensor(torch.ones(1), torch.ones(c.size), "sum", accumulate=torch.float64),
        lambda c: c.reduce_scatter_tensor(torch.ones(1), torch.ones(c.size), "sum"),
    ),
}


@pytest.mark.parametrize("what", DIFFERENT)
def test_different_calls_raise_on_every_rank_where_calls_are_compared(several, world, make_comm, what):
    comm = make_comm(compare_calls=True, timeout_s=60)
    comm.all_reduce(torch.ones(1), "sum")
    odd = world.size - 1
    with pytest.raises(CommunicationError) as caught:
        DIFFERENT[what][world.rank == odd](comm)
    message = re.fullmatch(rf"rank {world.rank} calls .*, but rank (\d) calls .*", str(caught.value))
    other = int(message.group(1))  # the first whose message arrives
    assert other != odd if world.rank == odd else other == odd
    texts = world.comm.allgather(str(caught.value))
    mine, theirs = (texts[rank].split(" calls ")[1].rpartition(", but rank")[0] for rank in (world.rank, other))
    assert mine != theirs
    assert str(caught.value) == f"rank {world.rank} calls {mine}, but rank {other} calls {theirs}"
    comm.all_reduce(torch.ones(1), "sum")  # and the communicator is as good as before


def test_calls_that_are_the_same_pass_the_comparison_in_any_order_of_waiting(make_comm):
    comm = make_comm(compare_calls=True)
    for turn in range(40):
        one, two = torch.full((5,), float(comm.rank)), torch.full((5,), 10.0 + comm.rank)
        works = [comm.broadcast(one, 0, async_op=True), comm.broadcast(two, 0, async_op=True)]
        works.append(comm.barrier(async_op=True))
        for work in works if (comm.rank + turn) % 2 else reversed(works):
            work.wait()
        assert (one.tolist(), two.tolist()) == ([0.0] * 5, [10.0] * 5)


def test_a_compared_collective_that_fails_has_ended_when_its_error_is_raised(several, make_comm):
    comm, ended = make_comm(compare_calls=True), []

    def collective(call):
        try:
            yield Condition(lambda: 1 / 0, list)
        finally:
            ended.append(call.sequence)

    with pytest.raises(ZeroDivisionError) as caught:
        comm._run("a collective", False, collective)
    assert caught.tb is not None  # the frames of the call, and all that they have
    assert ended == [comm.calls]
