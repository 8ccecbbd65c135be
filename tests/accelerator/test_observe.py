"""Figures on a device: its own times, no waits for it, and a trace of its queues."""

import time

import pytest
import torch
from torch import nn

from hpcfsdp import observe, timeline
from tests.accelerator import simulated
from tests.accelerator.programs import SIM, shard
from tests.unit.observe.traces import lines_on_all_ranks, trace_of

pytestmark = pytest.mark.ranks(2)

LATE_S = 0.1
MIB = 1 << 20


class Layer(nn.Linear):
    def __init__(self):
        super().__init__(8, 8)


class Chain(nn.Sequential):
    units = (Layer,)

    def __init__(self):
        super().__init__(*(Layer() for _ in range(3)))


@pytest.fixture(autouse=True)
def nothing_is_left():
    yield
    left, timeline.recorder = timeline.recorder, None
    assert left is None


@pytest.fixture
def started(group, shared_path):
    def start(**options):
        model = shard(Chain().to(SIM), group)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
        return observe.Run(shared_path, model=model, optimizer=optimizer, peak_flops=1e9, **options), model, optimizer

    return start


def train(run, model, optimizer, steps, *, before_step=None):
    for _ in range(steps):
        loss = model(torch.ones(2, 8, device=SIM)).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        if before_step is not None:
            before_step()
        run.step(loss=loss, tokens=2, grad_norm=loss * 2)


def test_figures_come_from_the_device_without_a_wait_for_it(world, started, shared_path):
    run, model, optimizer = started()
    waits = []

    def step_alone():
        torch.accelerator.synchronize()  # the steps before are complete
        simulated.reset_counts()

    with run:
        train(run, model, optimizer, 3)
        for _ in range(3):
            train(run, model, optimizer, 1, before_step=step_alone)
            waits.append(simulated.waits())
    assert waits == [{}] * 3
    records = lines_on_all_ranks(shared_path / "metrics.jsonl", world)
    assert [record["step"] for record in records] == list(range(1, 7))
    losses = [record["loss"] for record in records]
    assert losses == sorted(losses, reverse=True) and losses[0] > losses[-1] > 0
    assert [record["grad_norm"] for record in records] == pytest.approx([2 * loss for loss in losses])
    for record in records:
        assert 0 <= record["comm_share"] <= 1 and record["seconds"] > 0


def test_the_queue_of_computation_stalls_for_a_late_rank(world, started, shared_path):
    run, model, optimizer = started()
    with run:
        train(run, model, optimizer, 3)
        train(run, model, optimizer, 5, before_step=lambda: time.sleep(LATE_S * (world.rank == 1)))
    for record in lines_on_all_ranks(shared_path / "metrics.jsonl", world)[-2:]:
        assert record["straggler"]["rank"] == 1
        assert record["busy_s_max"] > 0.7 * LATE_S
        assert record["comm_share_max"] > 0.6


def test_the_times_of_waits_between_queues(world):
    recorder = timeline.Recorder(SIM)
    side, compute = torch.Stream(SIM), torch.accelerator.current_stream()
    recorder.traces = True
    event = torch.Event(SIM)
    with side:
        simulated.starve(side)
        torch.ones(4, device=SIM)
    side.record_event(event)
    recorder.stream_waits("compute", "VALUES_GATHERED", compute, event, counts=True)
    interval = recorder.end_interval()
    time.sleep(LATE_S)  # the side stream does nothing meanwhile, so the compute queue waits for it
    interval.wait()
    seconds, waited_s = interval.read()
    assert LATE_S * 0.9 <= waited_s <= seconds
    (span,) = recorder.pop_spans()
    assert (span.track, span.name) == ("compute waits", "VALUES_GATHERED")


def test_memory_is_that_of_the_allocator(world, started, shared_path):
    run, model, optimizer = started()
    with run:
        train(run, model, optimizer, 2)
        large = torch.empty(8 * MIB, dtype=torch.uint8, device=SIM)
        del large
        train(run, model, optimizer, 1)
        train(run, model, optimizer, 1)
    *_, before, peak, after = [record["memory"] for record in lines_on_all_ranks(shared_path / "metrics.jsonl", world)]
    assert peak["peak_bytes"] >= 8 * MIB > peak["now_bytes"]
    assert before["peak_bytes"] < 8 * MIB and after["peak_bytes"] < 8 * MIB
    assert after["gathered_bytes"] >= 4 * 72, "a unit at a time, at least"


def test_a_trace_of_the_queues(world, started, shared_path):
    run, model, optimizer = started(trace=range(3, 5))
    with run:
        train(run, model, optimizer, 5)
    found, processes = trace_of(shared_path, world)
    assert sorted(processes) == list(range(world.size))
    for rank in range(world.size):
        tracks = {track.split(" (")[0] for pid, track, _ in found if pid == rank}
        assert {"steps", "units", "gather", "reduce", "compute waits", "gather waits", "reduce waits"} <= tracks
        waits = {name for pid, track, name in found if pid == rank and track.startswith("compute waits")}
        assert {"VALUES_GATHERED", "GRADS_REDUCED"} <= waits
        units = {name for pid, track, name in found if pid == rank and track.startswith("units")}
        assert {name.split(" ")[0] for name in units} >= {"forward", "backward", "optimizer"}
        (first,), (second,) = found[rank, "steps", "step 3"], found[rank, "steps", "step 4"]
        assert first[1] <= second[0] + 1 and first[0] < first[1]
