"""Collectives that advance while the program computes, on a thread of their own."""

import time

import pytest
import torch
import torch.distributed as dist

from hpcfsdp.comm import progress
from hpcfsdp.errors import HpcfsdpError, LaunchError
from hpcfsdp.launch import device
from hpcfsdp.launch.topology import Topology
from tests.mpi.models import adamw, make_net, shard, train_sharded

pytestmark = [pytest.mark.ranks(3, 2), pytest.mark.transport]


@pytest.fixture
def messages(make_comm, world):
    """A communicator whose ranks are on nodes of their own."""
    return make_comm(Topology.regular(world.size, 1))


@pytest.fixture
def thread():
    progress.start_thread()
    yield
    progress.stop_thread()


def reduce_without_a_look(comm, seconds):
    """Begin a large reduction, leave the library alone for a while, and return whether it is complete then."""
    value = torch.full((1 << 20,), float(comm.rank))
    work = comm.all_reduce(value, "sum", async_op=True)
    end_s = time.monotonic() + seconds
    while not work.done and time.monotonic() < end_s:
        time.sleep(0.01)
    was_done = work.done
    comm.barrier()  # all ranks have looked
    work.wait()
    assert (value == sum(range(comm.size))).all()
    return was_done


def test_a_collective_completes_while_the_program_does_something_else(messages, thread):
    assert reduce_without_a_look(messages, 60.0)


def test_without_the_thread_it_waits_for_the_program(messages):
    assert not reduce_without_a_look(messages, 0.5)


def test_training_is_bitwise_the_same(groups, comm):
    def train():
        torch.manual_seed(1)
        model = shard(make_net(), groups["messages"])
        losses = train_sharded(model, adamw(model), range(4), comm)
        return losses, [param.detach().clone() for param in model.parameters()]

    losses, params = train()
    progress.start_thread()
    try:
        with_thread, same = train()
    finally:
        progress.stop_thread()
    assert torch.equal(torch.as_tensor(losses), torch.as_tensor(with_thread))
    for one, other in zip(params, same, strict=True):
        assert torch.equal(one, other)


def test_many_collectives_of_two_threads_do_not_mix(messages, thread):
    works = []
    for turn in range(60):
        value = torch.full((1 + 997 * (turn % 7),), float(turn + messages.rank))
        works.append((turn, value, messages.all_reduce(value, "sum", async_op=True)))
        if turn % 9 == 8:
            messages.barrier()
    for turn, value, work in reversed(works):
        work.wait()
        assert (value == sum(turn + rank for rank in range(messages.size))).all()


def test_errors_reach_the_wait(messages, thread):
    value = torch.ones(4 + messages.rank)
    work = messages.all_reduce(value, "sum", async_op=True)
    end_s = time.monotonic() + 30.0
    while not work.done and time.monotonic() < end_s:
        time.sleep(0.01)
    assert work.failed
    with pytest.raises(HpcfsdpError, match=r"calls all_reduce.sum. of \d x torch.float32, but rank \d"):
        work.wait()


def test_tensors_of_inference_mode_are_reduced_outside_of_it(world):
    for numel in (3, 3000, 1 << 20):
        with torch.inference_mode():
            value = torch.full((numel,), float(world.rank))
            time.sleep(0.02 * world.rank)
            work = dist.all_reduce(value, async_op=True)
        work.wait()
        assert (value == sum(range(world.size))).all()


def test_fewer_threads_in_mpi_are_refused(monkeypatch):
    from mpi4py import MPI

    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    device.check_thread_level(torch.device("cpu"), progress_thread=False)
    with pytest.raises(LaunchError, match="'serialized', but with HPCFSDP_PROGRESS_THREAD=1 it must be 'multiple'"):
        device.check_thread_level(torch.device("cpu"), progress_thread=True)
