"""``hpcfsdp.preemption``: all ranks stop at the same step, for a signal to any of them or the end of the job."""

import os
import signal
import time

import pytest

import hpcfsdp
from hpcfsdp.comm.mpi import exchange
from hpcfsdp.errors import CommunicationError, LaunchError, UsageError
from hpcfsdp.launch import scheduler
from tests.signals import own_handlers

pytestmark = pytest.mark.ranks(3, 2)


@pytest.fixture(autouse=True)
def handlers_come_back():
    with own_handlers():
        yield


def steps_until(stop, world, after=None, at=0, last=20, seconds=0.0):
    """The step at which each rank stops, None if it does not. `after` is called before the end of step `at`."""
    for step in range(1, last + 1):
        time.sleep(seconds)
        if step == at:
            after()
        if stop.requested(step):
            return world.comm.allgather(step)
    return world.comm.allgather(None)


def send(number=signal.SIGUSR2):
    os.kill(os.getpid(), number)


def test_without_a_signal_no_rank_stops(world):
    with hpcfsdp.preemption() as stop:
        assert steps_until(stop, world) == [None] * world.size
    assert (stop.reason, stop.signal, stop.seconds_left()) == ("", 0, None)


@pytest.mark.parametrize("number", [signal.SIGUSR1, signal.SIGUSR2, signal.SIGTERM])
def test_a_signal_to_all_ranks_stops_them_after_the_same_step(world, number):
    with hpcfsdp.preemption() as stop:
        assert steps_until(stop, world, lambda: send(number), at=3, seconds=0.1) == [3] * world.size
    assert (stop.signal, stop.reason) == (number, f"signal {number:d} ({number.name})")


@pytest.mark.parametrize("receiver", ["first", "last"])
def test_a_signal_to_one_rank_stops_all_one_step_later(world, receiver):
    chosen = {"first": 0, "last": world.size - 1}[receiver]
    with hpcfsdp.preemption() as stop:
        after = send if world.rank == chosen else lambda: None
        assert steps_until(stop, world, after, at=3, seconds=0.1) == [4] * world.size
    assert stop.signal == signal.SIGUSR2


def test_a_signal_before_the_world_is_not_lost(world):
    with hpcfsdp.preemption() as stop:
        send()
        assert steps_until(stop, world) == [1] * world.size


def test_short_steps_ask_rarely_and_stop_together(world, monkeypatch):
    asked = []
    real = exchange.all_reduce
    monkeypatch.setattr(exchange, "all_reduce", lambda *given, **named: asked.append(1) or real(*given, **named))
    with hpcfsdp.preemption() as stop:
        (step,) = set(steps_until(stop, world, send, at=2000, last=100_000))
    assert 2000 <= step <= 2000 + 2 * 20
    assert len(asked) < 1000


def test_later_signals_change_nothing(world):
    with hpcfsdp.preemption() as stop:
        assert steps_until(stop, world, send, at=2, seconds=0.1) == [2] * world.size
        send(signal.SIGTERM)
        assert stop.requested(2)
        assert stop.requested(3)
    send(signal.SIGTERM)
    assert stop.signal == signal.SIGUSR2


def test_the_same_step_gives_the_same_answer(world):
    with hpcfsdp.preemption() as stop:
        assert not stop.requested(1)
        send()
        assert not stop.requested(1)
        assert stop.requested(2)


@pytest.mark.parametrize(
    ("left_s", "before_s", "stops"),
    [
        (25.0, None, True),  # less than the spare time
        (3600.0, None, False),
        (3600.0, 4000.0, True),
        (25.0, 0.0, False),
        (25.0, 20.0, False),
    ],
)
def test_the_end_of_the_job_stops_all_ranks(world, monkeypatch, left_s, before_s, stops):
    end_s = time.time() + left_s
    monkeypatch.setattr(scheduler, "job_end", lambda: end_s)
    monkeypatch.setattr("hpcfsdp.env.launcher_rank", lambda: world.rank)
    with hpcfsdp.preemption(before_end_s=before_s) as stop:
        assert steps_until(stop, world, last=3) == [2 if stops else None] * world.size  # rank 0 alone knows in step 1
        assert abs(stop.seconds_left() - left_s) < 15
    assert stop.signal == 0
    assert ("before the end of the job" in stop.reason) == stops


def test_a_long_step_makes_the_stop_earlier(world, monkeypatch):
    monkeypatch.setattr(scheduler, "job_end", lambda: time.time() + 31.0)
    with hpcfsdp.preemption() as stop:
        assert steps_until(stop, world, last=4, seconds=1.0) != [None] * world.size


def test_training_does_not_wait_for_the_answer(world):
    """The last rank asks only when the others have their answer: if they waited for it, no rank would go on."""
    with hpcfsdp.preemption() as stop:
        assert not stop.requested(1)
        if world.rank == world.size - 1:
            for rank in range(world.size - 1):
                world.comm.recv(source=rank)
        assert not stop.requested(2)
        if world.rank != world.size - 1:
            world.comm.send(None, world.size - 1)


def test_ranks_that_ask_for_different_steps_raise(world):
    with hpcfsdp.preemption() as stop, pytest.raises(CommunicationError, match=r"stop\.requested"):
        for step in range(3):
            stop.requested(step + world.rank)


@pytest.mark.ranks(1)
def test_it_needs_a_world(world, monkeypatch):
    monkeypatch.setattr("hpcfsdp.preempt.current_world", lambda: None)
    with hpcfsdp.preemption() as stop, pytest.raises(LaunchError, match=r"hpcfsdp\.init"):
        stop.requested(1)


@pytest.mark.ranks(1)
@pytest.mark.parametrize("seconds", [-1.0, float("nan")])
def test_a_negative_time_is_refused(seconds):
    with pytest.raises(UsageError, match="before_end_s"):
        hpcfsdp.preemption(before_end_s=seconds)
