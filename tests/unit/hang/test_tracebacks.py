"""Merging the tracebacks of ranks."""

import sys

import pytest

from hpcfsdp.hang import tracebacks
from hpcfsdp.hang.tracebacks import UncaughtError, error_of, merged


def failed(rank, error="ValueError: x", stack="a.py:1", host="node1", raised_s=0.0):
    return UncaughtError(
        rank, host, raised_s, stack, f"Traceback (most recent call last):\n  {stack}\n{error}\n", error
    )


def raised(rank, text):
    try:
        raise ValueError(text)
    except ValueError:
        return error_of(rank, *sys.exc_info())


def test_failures_of_one_place_have_one_stack_whatever_they_say():
    one, other = (raised(rank, f"on rank {rank}") for rank in range(2))
    assert one.stack == other.stack
    assert (one.error, other.error) == ("ValueError: on rank 0", "ValueError: on rank 1")
    assert one.text.startswith("Traceback (most recent call last):\n")


def test_the_cause_of_an_error_belongs_to_its_stack():
    def chained(first):
        try:
            try:
                raise first
            except Exception as error:
                raise ValueError("x") from error
        except ValueError:
            return error_of(0, *sys.exc_info())

    one, other = (chained(first) for first in (OSError(), KeyError()))
    assert one.stack != other.stack
    assert "OSError" in one.stack and "KeyError" in other.stack


@pytest.mark.parametrize(
    ("failures", "text"),
    [
        ([failed(1)], "rank 1 of 4 on node1: ended the job after an uncaught error\n{a.py:1}"),
        (
            [failed(2, host="node2"), failed(0), failed(1)],
            "ranks 0-2 of 4 on node1, node2: ended the job after an uncaught error\n{a.py:1}",
        ),
        (
            [failed(0), failed(1, error="ValueError: y")],
            "ranks 0-1 of 4 on node1: ended the job after an uncaught error\n{a.py:1}\nrank 1: ValueError: y",
        ),
        (
            [failed(0, stack="b.py:2", raised_s=2.0), failed(3, raised_s=1.0)],
            "rank 3 of 4 on node1: ended the job after an uncaught error\n{a.py:1}\n"
            "hpcfsdp: rank 0 of 4 on node1: ended the job after an uncaught error\n{b.py:2}\n"
            "hpcfsdp: first: rank 3 of 4 on node1: ValueError: x",
        ),
    ],
    ids=["one", "the same", "other words", "other places"],
)
def test_merged(failures, text):
    for stack in ("a.py:1", "b.py:2"):
        text = text.replace("{" + stack + "}", f"Traceback (most recent call last):\n  {stack}\nValueError: x")
    assert merged(failures, 4) == text


def test_many_hosts_are_counted():
    assert "ranks 0-9 of 10 on 10 nodes, node0 among them: " in merged(
        [failed(rank, host=f"node{rank}") for rank in range(10)], 10
    )


class Request:
    def __init__(self, value=None):
        self.value = value

    def test(self):
        return True, self.value

    def Test(self):
        return True

    def irecv(self):
        return self


class Comm:
    """One end of a communicator; others have sent `waiting`, a list of (seconds, failure)."""

    def __init__(self, size, clock, waiting=()):
        self.size, self.sent, self._clock, self._waiting = size, [], clock, list(waiting)

    def isend(self, value, peer, tag):
        self.sent.append(peer)
        return Request()

    def improbe(self, tag):
        if self._waiting and self._waiting[0][0] <= self._clock():
            return Request(self._waiting.pop(0)[1])
        return None


@pytest.fixture
def clock(monkeypatch):
    now = [0.0]

    def sleep(seconds):
        now[0] += seconds

    monkeypatch.setattr(tracebacks.time, "sleep", sleep)
    monkeypatch.setattr(tracebacks.time, "monotonic", lambda: now[0])
    return lambda: now[0]


def test_the_lowest_failed_rank_prints_after_a_moment(clock):
    comm = Comm(4, clock, [(0.1, failed(2)), (0.5, failed(3))])
    found = tracebacks.exchange(comm, failed(1))
    assert sorted(failure.rank for failure in found) == [1, 2, 3]
    assert comm.sent == [0, 2, 3]
    assert tracebacks.WINDOW_S < clock() < tracebacks.WINDOW_S + 0.1


def test_others_wait_for_it_and_then_print_themselves(clock):
    assert tracebacks.exchange(Comm(2, clock, [(0.1, failed(0))]), failed(1)) is None
    assert clock() == pytest.approx(tracebacks.TOGETHER_S, abs=0.1)


def test_in_a_large_job_ranks_tell_rank_0_alone(clock):
    for rank, peers in ((0, []), (7, [0])):
        comm = Comm(tracebacks.MOST_RANKS + 1, clock)
        assert tracebacks.exchange(comm, failed(rank)) == [failed(rank)]
        assert comm.sent == peers
