"""The rules of real devices and of NCCL that the simulated device has: each with a program that breaks it."""

import threading
import time

import pytest
import torch
import torch.distributed as dist

from tests.accelerator import simulated
from tests.accelerator.programs import SIM
from tests.accelerator.traces import traces_of
from tests.deadlock import cycle, difference_of_order, one_queue, own_queues

pytestmark = [pytest.mark.ranks(1), pytest.mark.other_orders("programs that break the rules")]

ONE = torch.device("sim", 1)


@pytest.fixture
def two_devices():
    simulated.set_devices(2)
    simulated.forget_contexts()
    yield
    torch.accelerator.set_device_index(0)
    simulated.set_devices(1)


@pytest.fixture
def groups(world):
    """Two groups of all ranks that a test may break."""
    made = [dist.new_group(backend=simulated.BACKEND) for _ in range(2)]
    yield made
    for group in made:
        dist.destroy_process_group(group)


def backend_of(group):
    return group._get_backend(SIM)


def in_thread(function):
    """What a function returns, or the error that it raises, in a thread of its own."""
    found = []

    def run():
        try:
            found.append(function())
        except Exception as error:
            found.append(error)

    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    return found[0]


# Devices


def test_a_thread_without_a_device_is_served_on_the_first(two_devices):
    torch.accelerator.set_device_index(1)
    event = torch.zeros(3, device=ONE).add(1) is not None and torch.accelerator.current_stream().record_event()
    torch.accelerator.synchronize()
    assert simulated.contexts() == {1}
    assert in_thread(event.query) is True
    assert simulated.contexts() == {0, 1}


def test_tensors_of_two_devices_do_not_meet(two_devices):
    with pytest.raises(RuntimeError, match="at least two devices, sim:0 and sim:1"):
        torch.ones(2, device=SIM).add_(torch.ones(2, device=ONE))
    assert torch.ones(2, device=ONE).add(1).device == ONE
    assert all(torch.full((2,), float(place), device=ONE).to(SIM).tolist() == [place] * 2 for place in range(300))


# Graphs


def test_a_graph_runs_when_it_is_replayed():
    x = torch.zeros(2, device=SIM)
    side = torch.Stream(SIM)
    with simulated.capturing() as graph:
        assert torch.get_device_module(SIM).is_current_stream_capturing()
        x += 1
        side.wait_stream(torch.accelerator.current_stream())  # it joins
        with side:
            x += 2
        torch.accelerator.current_stream().wait_stream(side)
    assert x.tolist() == [0, 0]
    graph.replay()
    graph.replay()
    assert x.tolist() == [6, 6]


@pytest.mark.parametrize("ask", [torch.Event.query, torch.Event.synchronize])
def test_no_thread_asks_while_a_graph_is_captured(ask):
    event = torch.accelerator.current_stream().record_event()
    asked = []
    with pytest.raises(RuntimeError, match=r"the capture of a graph has failed: .*"), simulated.capturing():
        asked.append(in_thread(lambda: ask(event)))
    assert "not permitted while a stream is capturing" in str(asked[0])


# Kernels


@pytest.mark.parametrize(
    ("make", "count"),
    [
        (lambda: [torch.ones(3, 4, device=SIM) for _ in range(70)], 2),  # 64 at a time
        (lambda: [torch.ones(3, 8, device=SIM)[:, :4] for _ in range(5)], 5),  # with gaps
        (lambda: [torch.ones(4, 3, device=SIM).t() for _ in range(5)], 5),  # other strides than what they get
    ],
    ids=["alike", "gaps", "transposed"],
)
def test_copies_of_lists_are_counted_as_cuda_launches_them(make, count):
    targets, source = make(), torch.full((3, 4), 2.0, device=SIM)
    simulated.reset_counts()
    torch._foreach_copy_(targets, [source] * len(targets))
    assert simulated.launches() == count
    assert all(target.eq(2).all() for target in targets)


def test_copies_of_lists_between_dtypes_take_the_fast_path():
    targets, source = [torch.ones(3, device=SIM, dtype=torch.bfloat16) for _ in range(3)], torch.ones(3, device=SIM)
    simulated.reset_counts()
    torch._foreach_copy_(targets, [source] * 3)
    assert simulated.launches() == 1
    torch._foreach_add_(targets, [source] * 3)  # sums do not
    assert simulated.launches() == 1 + 3


# Programs of two ranks


def crossed(world, groups, wait):
    """Each rank reduces over one group after the other, the ranks in another order."""
    first, second = groups if world.rank == 0 else groups[::-1]
    streams = [torch.Stream(SIM), torch.Stream(SIM)]
    x, y = torch.ones(1, device=SIM), torch.ones(1, device=SIM)
    with streams[0]:
        dist.all_reduce(x, group=first)
        if wait:
            torch.accelerator.current_stream().record_event()
    torch.Stream(SIM).wait_event(streams[0].record_event())
    with streams[1]:
        dist.all_reduce(y, group=second)
    return streams


def connect(groups):
    for group in groups:
        dist.all_reduce(torch.ones(1, device=SIM), group=group)
    torch.accelerator.synchronize()


@pytest.mark.ranks(2)
def test_a_queue_of_the_hardware_is_held_up_by_its_first_entry(world, groups):
    connect(groups)
    for stream in crossed(world, groups, wait=True):
        stream.synchronize()
    with simulated.log() as entries, simulated.hardware_queues(1):
        streams = crossed(world, groups, wait=True)
        time.sleep(0.3)
        assert not streams[1].query()
        for group in groups:
            backend_of(group).abort()
        for stream in streams:
            stream.synchronize()
    traces = traces_of(world, entries, groups)
    assert cycle(traces, own_queues) is None
    assert any("waits for an event" in line for line in cycle(traces, one_queue))
    assert "all_reduce(sum) of 1 x torch.float32" in difference_of_order(traces)


@pytest.mark.ranks(2)
def test_an_allocation_may_wait_for_other_ranks(world, groups):
    connect(groups)
    ended = []

    def end():
        ended.append(time.monotonic())
        for group in groups:
            backend_of(group).abort()

    if world.rank == 0:
        dist.all_reduce(torch.ones(1, device=SIM), group=groups[0])
        timer = threading.Timer(0.5, end)
        timer.start()
        with simulated.blocking(seed=0):
            kept = [torch.empty(1 << n, device=SIM) for n in range(20)]
        assert len(kept) == 20 and ended
        assert simulated.blocked() > 0
    world.comm.barrier()


@pytest.mark.ranks(2)
def test_the_first_call_of_a_group_waits_for_that_of_all_ranks(world, groups):
    for group in groups:
        backend_of(group).timeout_s = 1.0
    first = groups[world.rank]
    with pytest.raises(RuntimeError, match=f"rank {world.rank} waits for rank {1 - world.rank} to make its first call"):
        dist.all_reduce(torch.ones(1, device=SIM), group=first)
    world.comm.barrier()


@pytest.mark.ranks(2)
@pytest.mark.filterwarnings("ignore:barrier")  # that it guesses
def test_a_barrier_guesses_its_device(world, groups, two_devices):
    x = torch.ones(1, device=SIM)
    dist.all_reduce(x, group=groups[0])
    dist.barrier(group=groups[0])  # on the device of the call before
    assert simulated.contexts() == {0}
    dist.barrier(group=groups[1], device_ids=[0])
    assert simulated.contexts() == {0}
    other = dist.new_group(backend=simulated.BACKEND)
    dist.barrier(group=other)
    assert simulated.contexts() == {0, world.rank}
    dist.destroy_process_group(other)


@pytest.mark.ranks(2)
def test_two_ranks_on_one_device_are_refused(world, groups, monkeypatch):
    module = torch.get_device_module(SIM)
    monkeypatch.setattr(module, "get_device_properties", lambda device: type("Device", (), {"uuid": "one"}))
    with pytest.raises(RuntimeError, match=r"duplicate device: ranks . and . are both on one"):
        dist.all_reduce(torch.ones(1, device=SIM), group=groups[0])


@pytest.mark.ranks(2)
def test_a_group_that_was_aborted_waits_for_nobody(world, groups):
    connect(groups)
    if world.rank == 0:
        dist.all_reduce(torch.ones(1, device=SIM), group=groups[0])
        backend_of(groups[0]).abort()
        with pytest.raises(RuntimeError, match="the group was aborted"):
            dist.all_reduce(torch.ones(1, device=SIM), group=groups[0])
    world.comm.barrier()
    x = torch.ones(1, device=SIM)
    dist.all_reduce(x, group=groups[1])  # others go on
    assert x.item() == world.size
