"""The ring of a rank's last events, and what it waits in."""

import time

import pytest

from hpcfsdp.hang import events
from hpcfsdp.hang.events import NBYTES, CurrentWait, EventRing


@pytest.fixture
def memory():
    return memoryview(bytearray(NBYTES))


@pytest.fixture
def ring(memory):
    ring = EventRing()
    ring.move_to(memory)
    return ring


def test_an_empty_ring(memory):
    found = events.read(memory)
    assert (found.pid, found.wait, list(found.events)) == (0, None, [])


def test_events_come_back_in_order(ring, memory):
    ring.note(events.BEGIN, "barrier")
    ring.note(events.FORWARD, "blocks.3")
    found = events.read(memory).events
    assert [(event.number, event.kind, event.text) for event in found] == [
        (1, "begin", "barrier"),
        (2, "forward", "blocks.3"),
    ]
    assert found[0].time_s <= found[1].time_s


def test_the_latest_events_are_kept(ring, memory):
    for number in range(3 * events.EVENTS // 2):
        ring.note(events.STEP, str(number))
    found = events.read(memory).events
    last = 3 * events.EVENTS // 2
    assert [event.number for event in found] == list(range(last - events.EVENTS + 1, last + 1))
    assert found[-1].text == str(last - 1)


@pytest.mark.parametrize("text", ["x" * 1000, "ü" * 500, ""])
def test_long_texts_are_cut(ring, memory, text):
    ring.note(events.CALL, text)
    (found,) = events.read(memory).events
    assert text.startswith(found.text.rstrip("\N{REPLACEMENT CHARACTER}"))
    assert len(found.text) >= min(len(text), 80)


def test_events_before_the_move_come_along(memory):
    ring = EventRing()
    ring.note(events.CALL, "hpcfsdp.init")
    ring.move_to(memory)
    ring.note(events.CALL, "forward")
    assert [event.text for event in events.read(memory).events] == ["hpcfsdp.init", "forward"]


def test_after_leaving_nothing_is_written_to_shared_memory(ring, memory):
    ring.note(events.CALL, "one")
    ring.leave()
    ring.note(events.CALL, "other")
    assert [event.text for event in events.read(memory).events] == ["one"]


def test_the_owner(ring, memory):
    ring.own(17, 4711, 9, 0x7F00)
    found = events.read(memory)
    assert (found.pid, found.started, found.stacks_fd, found.main_thread) == (17, 4711, 9, 0x7F00)


def test_a_wait(ring, memory):
    ring.begin_wait(12.5, "all_reduce(sum) of 4 x torch.float32", "backward", [1, 3])
    assert events.read(memory).wait == CurrentWait(12.5, "all_reduce(sum) of 4 x torch.float32", "backward", (1, 3), 2)
    ring.end_wait()
    assert events.read(memory).wait is None


def test_a_wait_for_very_many_ranks_in_a_long_call(ring, memory):
    ring.begin_wait(1.0, "ü" * 400, "ü" * 400, range(10_000))
    found = events.read(memory).wait
    assert (found.missing, found.num_missing) == (tuple(range(16)), 10_000)


def test_a_question_for_stacks_is_seen_by_its_rank(ring, memory):
    assert ring.asked_s == 0.0
    ring.begin_wait(1.0, "x" * 300, "y" * 300, range(16))
    events.note_question(memory)
    assert abs(time.time() - ring.asked_s) < 60
    assert events.read(memory).wait.label == "x" * 300


def test_a_half_written_event_is_dropped(ring, memory):
    ring.note(events.CALL, "good")
    memory[1024 + 2 * 192 : 1024 + 3 * 192] = b"\xff" * 192
    assert [event.text for event in events.read(memory).events] == ["good"]


def test_a_half_written_wait_is_none(ring, memory):
    ring.begin_wait(1.0, "barrier", "", [1])
    memory[32 + 10 : 32 + 20] = b"\xff" * 10
    assert events.read(memory).wait is None
