"""What a process knows about deaths in its job, from an MPI that stands in, and what it does about ranks that hang."""

import signal
import subprocess
import sys
import time

import pytest

from hpcfsdp.errors import CommunicationError, HangError, RankLostError
from hpcfsdp.hang import lost, stacks


class Group:
    """A group of MPI's, of these ranks."""

    def __init__(self, ranks):
        self.ranks, self.size = ranks, len(ranks)

    def Translate_ranks(self, places, _whole):
        return [self.ranks[place] for place in places]

    def Free(self):
        pass


class Comm:
    """What a watch asks of a communicator."""

    rank, size = 0, 4

    def __init__(self):
        self.failed, self.acknowledged = [], 0

    def Get_group(self):
        return Group(range(self.size))

    def Get_failed(self):
        return Group(self.failed)

    def Ack_failed(self, count):
        self.acknowledged = len(self.failed)

    def Iprobe(self, _source, _tag):
        return False


HOSTS = ["a", "a", "b", "b"]


@pytest.fixture
def comm(monkeypatch):
    found = Comm()
    monkeypatch.setattr(lost, "current", lost.Watch(found, [0, 1, 2], HOSTS))
    return found


def test_a_lost_rank_is_named_with_its_host_and_what_was_waited_for(comm):
    lost.check("all_reduce of 3")
    comm.failed = [2]
    for _ in range(2):
        with pytest.raises(RankLostError, match=r"lost rank\(s\) 2 on b, noticed in all_reduce of 3") as caught:
            lost.check("all_reduce of 3")
    assert (caught.value.ranks, caught.value.hosts, caught.value.waited_for) == ((2,), ("b",), "all_reduce of 3")
    assert lost.news()


def test_the_world_goes_on_when_a_spare_dies_and_receives_from_any_rank_do_too(comm):
    comm.failed = [3]
    lost.check("")
    assert comm.acknowledged == 1
    comm.failed = [3, 1]
    with pytest.raises(RankLostError, match="1 on a"):
        lost.check("")


def test_ranks_are_those_of_the_world_and_earlier_deaths_are_no_news(comm, monkeypatch):
    comm.failed = [0]
    watch = lost.Watch(comm, [3, 1], HOSTS, gone=[0])
    watch.check("")
    comm.failed = [0, 3]
    with pytest.raises(RankLostError, match=r"rank\(s\) 0 on b"):
        watch.check("")


def test_an_error_of_mpi_is_a_loss_only_if_it_is_about_one(comm):
    class Error(Exception):
        def __init__(self, number):
            self.number = number

        def Get_error_class(self):
            return self.number

    with pytest.raises(Error):
        lost.translate(Error(15), "")
    lost.translate(Error(75), "")
    comm.failed = [1]
    with pytest.raises(RankLostError):
        lost.translate(Error(77), "")


def test_without_a_loss_there_is_no_news(comm, monkeypatch):
    monkeypatch.setattr(lost, "NEWS_S", 0.05)
    assert not lost.news()
    monkeypatch.setattr(lost, "current", None)
    assert not lost.news()
    lost.check("")


@pytest.fixture
def sleeper():
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(100)"])
    yield process
    process.kill()
    process.wait()


def seat(seats, place, pid, beat_s, namespace=0):
    lost._SEAT.pack_into(
        seats, lost.SEAT_BYTES * place, pid, stacks.start_of(pid), beat_s, namespace or lost._namespace()
    )


def test_a_process_that_has_not_waited_for_the_limit_is_killed_and_no_other(comm, sleeper):
    seats = memoryview(bytearray(3 * lost.SEAT_BYTES))
    lost.current.sit(seats, 0, [0, 1, 2])
    seat(seats, 1, sleeper.pid, time.monotonic())
    assert lost.current.end_hung(5.0) == []
    seat(seats, 1, sleeper.pid, time.monotonic() - 6, namespace=7)  # in another container: the number means another
    assert lost.current.end_hung(5.0) == []
    seat(seats, 1, sleeper.pid, time.monotonic() - 6)
    assert lost.current.end_hung(5.0) == [sleeper.pid]
    assert sleeper.wait(10) == -signal.SIGKILL
    assert lost.current.end_hung(5.0) == []  # it is dead, and its number may belong to another process


def test_an_exit_that_mpi_does_not_report_ends_the_job(comm, sleeper, monkeypatch):
    monkeypatch.setattr(lost, "_LOOK_EVERY_S", 0.0)
    monkeypatch.setattr(lost, "REPORTED_WITHIN_S", 0.2)
    seats = memoryview(bytearray(3 * lost.SEAT_BYTES))
    lost.current.sit(seats, 0, [0, 1, 2])
    seat(seats, 1, sleeper.pid, time.monotonic())
    lost.check("")
    sleeper.kill()
    sleeper.wait()
    lost.check("")  # MPI may still report it
    time.sleep(0.3)
    with pytest.raises(CommunicationError, match=r"process\(es\) \[1\] of the job on a have ended with an exit code"):
        lost.check("")
    comm.failed = [1]
    with pytest.raises(RankLostError):
        lost.check("")


def test_a_wait_that_ends_nobody_ends_with_an_error(comm, monkeypatch):
    monkeypatch.setattr(lost.env, "hang_s", lambda: 0.1)
    monkeypatch.setattr(lost, "REPORTED_WITHIN_S", 0.1)
    monkeypatch.setattr(lost, "_END_EVERY_S", 0.01)
    began_s = time.monotonic()
    with pytest.raises(HangError, match="in a message for ranks that do not come"):
        lost.wait_until(lambda: False, "a message", lost.check)
    assert time.monotonic() - began_s > 0.3  # twice the limit: others may hang, or wait, for less than this rank waits
    until_s = time.monotonic() + 0.5
    lost.wait_until(lambda: time.monotonic() > until_s, "a spare", lost.check, limited=lambda: False)


def test_a_process_is_ended_that_begins_to_hang_while_another_waits_for_it(comm, sleeper, monkeypatch):
    monkeypatch.setattr(lost.env, "hang_s", lambda: 0.4)
    monkeypatch.setattr(lost, "_END_EVERY_S", 0.05)
    seats = memoryview(bytearray(3 * lost.SEAT_BYTES))
    lost.current.sit(seats, 0, [0, 1, 2])
    seat(seats, 1, sleeper.pid, time.monotonic() + 0.3)
    lost.wait_until(lambda: sleeper.poll() is not None, "a message", lost.check)
    assert sleeper.returncode == -signal.SIGKILL


def test_requests_are_settled_when_they_are_complete_or_their_rank_died():
    from mpi4py import MPI

    class Request:
        def __init__(self, found):
            self.found = found

        def Test(self):
            if isinstance(self.found, MPI.Exception):
                raise self.found
            return self.found

    found = [lost.is_settled(Request(each)) for each in (True, False, MPI.Exception(75))]
    assert found == [True, False, True]
