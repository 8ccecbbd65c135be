"""The watch of a rank: its report comes, or the wait goes on without it."""

import os
import time
import weakref

import pytest

from hpcfsdp.hang import events, stacks, watch
from hpcfsdp.hang.inquiry import Inquiry


@pytest.fixture
def make(tmp_path):
    """``make(**arguments)``: the watch of a world of one rank."""
    made = []

    def make_watch(*, limit_s=300.0, end_job=lambda text: None, **arguments):
        seat = watch.Seat("7", 0, [[0]], 0, memoryview(bytearray(events.NBYTES)), "here")
        made.append(watch.Watcher(seat, tmp_path, limit_s, end_job=end_job, **arguments))
        return made[-1]

    yield make_watch
    for one in made:
        one.close()


def left_in(folder):
    return sorted(path.suffix for path in (folder / "hang").iterdir())


def test_a_report_is_written_and_nothing_else_stays(make, tmp_path):
    path = make().explain("has waited")
    assert path.read_text().startswith("Job 7, 1 rank(s) on 1 node(s)")
    assert left_in(tmp_path) == [".txt"]


def test_a_folder_that_does_not_answer_holds_up_nobody(make, monkeypatch, caplog):
    monkeypatch.setattr(watch, "_MOST_S", 0.2)
    monkeypatch.setattr(Inquiry, "ask", lambda *_, **__: time.sleep(2.0))
    began_s = time.monotonic()
    assert make().explain("has waited") is None
    assert time.monotonic() - began_s < 1.9
    assert "does not answer within 0 s" in caplog.text


def test_a_backend_that_cannot_be_asked_costs_its_part_alone(make, tmp_path):
    def traces():
        raise ZeroDivisionError("no recorder")

    assert "(the backend could not be asked: no recorder)" in make(traces=traces).explain("has waited").read_text()
    assert left_in(tmp_path) == [".txt"]


def test_an_error_of_the_report_ends_no_wait_and_leaves_no_request(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch.report, "render", lambda *_: 1 / 0)
    assert make().explain("has waited") is None
    assert "could not be made" in caplog.text
    assert not (tmp_path / "hang").exists()


def test_a_node_that_nobody_could_ask_is_no_error(make, tmp_path, monkeypatch, caplog):
    monkeypatch.setattr(watch, "_ANSWER_S", 0.1)
    monkeypatch.setattr(Inquiry, "claim", lambda *_: False)  # a neighbour has, and died
    assert make().explain("has waited") is None
    assert "no rank on any node answers" in caplog.text
    assert not (tmp_path / "hang").exists()


def test_a_rank_that_has_closed_its_watch_gets_no_signal(tmp_path):
    memory = memoryview(bytearray(events.NBYTES))
    watch.Watcher(watch.Seat("7", 0, [[0]], 0, memory, "here"), tmp_path, 300.0, end_job=lambda text: None).close()
    record = events.read(memory)
    assert (record.pid, record.stacks_fd) == (os.getpid(), -1)
    assert stacks.ask_all([(record.pid, record.stacks_fd)]) == [""]


def test_a_device_that_is_no_longer_used_is_freed(make, monkeypatch):
    class Device:
        looks = 0

        def longest_wait(self, _limit_s):
            Device.looks += 1

    monkeypatch.setattr(watch, "_TICK_S", 0.01)
    watched, device = make(), Device()
    watched.add_probe(weakref.WeakMethod(device.longest_wait))
    until_s = time.monotonic() + 5.0
    while not Device.looks and time.monotonic() < until_s:
        time.sleep(0.01)
    device = weakref.ref(device)
    while (device() or watched._probes) and time.monotonic() < until_s:
        time.sleep(0.01)
    assert Device.looks and device() is None and not watched._probes


class Job:
    """What a watch asks about the job where ranks may be lost."""

    def __init__(self, losses):
        self.losses, self.limits, self.beats = losses, [], 0

    def beat(self):
        self.beats += 1

    def end_hung(self, limit_s):
        self.limits.append(limit_s)

    def lost(self):
        return self.losses if self.limits else []


@pytest.mark.parametrize(("losses", "ends"), [([1], False), ([], True)])
def test_a_wait_for_a_device_ends_the_job_unless_a_rank_that_hangs_is_lost(make, monkeypatch, losses, ends):
    class Device:
        def longest_wait(self, _limit_s):
            return 400.0, "its stream"

    job, ended = Job(losses), []
    monkeypatch.setattr(watch, "_TICK_S", 0.01)
    monkeypatch.setattr(watch.lost, "current", job)
    monkeypatch.setattr(watch.lost, "REPORTED_WITHIN_S", 0.2)
    watched, device = make(end_job=ended.append, limit_s=0.1), Device()
    watched.add_probe(weakref.WeakMethod(device.longest_wait))
    until_s = time.monotonic() + 5.0
    while not (ended if ends else job.limits) and time.monotonic() < until_s:
        time.sleep(0.01)
    time.sleep(0.1)
    assert bool(ended) == ends
    assert job.beats and job.limits[0] == 0.1 + 2 * 0.01  # time for others to find what waits for a device
