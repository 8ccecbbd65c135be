"""The search for deadlocks, on traces written by hand."""

import collections
import random

import pytest

from tests.deadlock import HOST, Group, Step, cycle, difference_of_order, one_queue, own_queues, problem

ALL = Group("all", (0, 1))
OTHER = Group("other", (0, 1))


def call(group, label, stream="s"):
    return Step("collective", stream, group, label)


def record(key, stream):
    return Step("record", stream, key)


def wait(key, stream):
    return Step("wait", stream, key)


def test_ranks_that_do_the_same_come_to_their_end():
    trace = [call(ALL, "a"), record(1, "s"), wait(1, "compute"), Step("kernel", "compute"), call(OTHER, "b", "t")]
    for queue_of in (own_queues, one_queue):
        assert cycle([trace, trace], queue_of) is None
    assert difference_of_order([trace, trace]) is None


def test_a_call_that_a_rank_never_makes():
    found = cycle([[call(ALL, "a"), call(ALL, "b")], [call(ALL, "a")]])
    assert found == ["rank 1 never calls b of all", "rank 0, 1: stream s: b of all"]
    assert (
        difference_of_order([[call(ALL, "a")], []]) == "call 0 that ranks 0 and 1 share: 'a' of all, but nothing more"
    )


def test_calls_in_another_order_on_two_streams_wait_only_on_few_queues():
    traces = [
        [call(ALL, "a", "s"), call(OTHER, "b", "t")],
        [call(OTHER, "b", "t"), call(ALL, "a", "s")],
    ]
    assert cycle(traces) is None
    assert "call 0 that ranks 0 and 1 share: 'a' of all, but 'b' of other" in difference_of_order(traces)
    # A kernel that waits for other ranks leaves its queue when it has started.
    assert cycle(traces, one_queue) is None
    # One that waits for its stream does not.
    for trace in traces:
        first, second = trace
        trace[:] = [first, record(1, first.stream), wait(1, second.stream), second]
    found = cycle(traces)
    assert {line.split(",")[0] for line in found} == {"rank 0", "rank 1"}
    assert sum("a of all" in line for line in found) == 2
    assert sum("waits for an event" in line for line in found) == 2


def test_a_wait_at_the_head_of_a_queue_holds_up_other_streams():
    ring = [
        [call(ALL, "a", "s"), record(1, "s"), wait(1, "compute"), call(OTHER, "b", "t")],
        [call(OTHER, "b", "t"), record(1, "t"), wait(1, "compute"), call(ALL, "a", "s")],
    ]
    assert cycle(ring) is None
    assert cycle(ring, one_queue) is not None
    assert cycle(ring, {"s": 0, "t": 1, "compute": 2}.get) is None
    assert cycle(ring, {"s": 0, "t": 1, "compute": 1}.get) is None  # rank 1 alone is held up by itself
    assert cycle([ring[0], ring[0]], one_queue) is None


@pytest.mark.parametrize("held", [[wait(1, HOST)], [Step("drain", HOST)]], ids=["event", "drain"])
def test_a_program_that_waits_calls_nothing_meanwhile(held):
    traces = [
        [call(ALL, "a", "s"), record(1, "s"), *held, call(OTHER, "b", "t")],
        [call(OTHER, "b", "t"), record(1, "t"), *held, call(ALL, "a", "s")],
    ]
    found = cycle(traces)
    assert sum("the program" in line for line in found) == 2
    assert cycle([traces[0], traces[0]]) is None


def test_collectives_of_the_program_itself():
    crossed = [
        [call(ALL, "a", "s"), record(1, "s"), wait(1, HOST), call(OTHER, "meet", HOST)],
        [call(OTHER, "meet", HOST), call(ALL, "a", "s")],
    ]
    assert any("the program: meet of other" in line for line in cycle(crossed))


def test_an_event_that_nobody_records():
    with pytest.raises(ValueError, match="rank 0, 0: stream s waits for an event, which is recorded nowhere"):
        cycle([[wait(7, "s")]])


def test_three_ranks_in_a_ring():
    groups = [Group(f"pair {n}", (n, (n + 1) % 3)) for n in range(3)]
    traces = [[call(groups[n], "x"), call(groups[(n - 1) % 3], "x")] for n in range(3)]
    found = cycle(traces)
    assert {line.split(",")[0] for line in found} == {"rank 0", "rank 1", "rank 2"}
    assert difference_of_order(traces) is None  # each pair of ranks shares one group


def test_what_ends_in_turn_ends_on_any_queues():
    """Of random programs of two ranks, which call in one order or not."""
    draw, found = random.Random(0), collections.Counter()
    for _ in range(300):
        calls, traces = [call(draw.choice([ALL, OTHER]), str(n)) for n in range(4)], []
        for _ in range(2):
            trace = draw.sample(calls, 4) if draw.random() < 0.3 else calls
            trace = [each._replace(stream=draw.choice(["s", "t", HOST])) for each in trace]
            for event in range(6):
                at = draw.randrange(len(trace) + 1)
                later = draw.randrange(at, len(trace) + 1)
                trace.insert(later, wait(event, draw.choice(["s", "t", HOST])))
                trace.insert(at, record(event, draw.choice(["s", "t"])))
            traces.append(trace)
        ends = [cycle(traces, queue_of) is None for queue_of in (own_queues, one_queue)]
        found[problem(traces) is None, all(ends)] += 1
    assert found[True, False] == 0
    assert found[True, True] > 20 and found[False, False] > 20, found


def test_a_difference_is_a_problem_though_all_come_to_their_end_and_so_is_a_circle_in_one_order():
    traces = [[call(ALL, "a", "s"), call(OTHER, "b", "t")], [call(OTHER, "b", "t"), call(ALL, "a", "s")]]
    assert cycle(traces, one_queue) is None
    assert problem(traces) == "call 0 that ranks 0 and 1 share: 'a' of all, but 'b' of other"
    groups = [Group(f"pair {n}", (n, (n + 1) % 3)) for n in range(3)]
    ring = [[call(groups[n], "x", "s"), call(groups[(n - 1) % 3], "x", "t")] for n in range(3)]
    assert cycle(ring) is None
    assert "wait in a circle" in problem(ring) and "x of pair 0" in problem(ring)
    assert problem([traces[0], traces[0]]) is None
