import time

import torch

from hpcfsdp import timeline
from hpcfsdp.timeline import Recorder, TraceSlice


def recorder():
    return Recorder(torch.device("cpu"))


def test_waits_are_added_up_until_an_interval_ends():
    made = recorder()
    for _ in range(3):
        begun = made.begin_wait()
        time.sleep(0.01)
        made.end_wait(begun, "barrier")
    seconds, waited_s = made.end_interval().read()
    assert 0.03 <= waited_s <= seconds
    assert made.end_interval().read()[1] == 0
    assert made.spans == [], "spans are kept for a trace alone"


def test_a_wait_within_a_wait_counts_once():
    made = recorder()
    outer = made.begin_wait()
    inner = made.begin_wait()
    time.sleep(0.01)
    made.end_wait(inner, "inner")
    made.end_wait(outer, "outer")
    seconds, waited_s = made.end_interval().read()
    assert 0.01 <= waited_s <= seconds


def test_pauses_and_their_waits_do_not_count():
    made = recorder()
    with made.paused():
        begun = made.begin_wait()
        time.sleep(0.05)
        made.end_wait(begun, "x")
    seconds, waited_s = made.end_interval().read()
    assert seconds < 0.05 and waited_s == 0


def test_the_phases_of_units_become_spans():
    made = recorder()
    made.change_state("a", "idle", "forward")  # before the trace
    made.traces = True
    made.change_state("a", "forward", "idle")
    for before, after in (
        ("idle", "backward"),
        ("backward", "recompute"),
        ("recompute", "backward"),
        ("backward", "idle"),
    ):
        made.change_state("a", before, after)
    spans = made.pop_spans()
    assert [(span.track, span.name) for span in spans] == [("units", "recompute a"), ("units", "backward a")]
    recompute, backward = spans
    assert backward.begin <= recompute.begin <= recompute.end <= backward.end
    assert made.pop_spans() == [] and not made.traces


def test_gathered_bytes_at_most():
    made = recorder()
    for change in (10, 20, -10, 5, -25, -100):
        made.count_gathered(change)
    assert made.pop_most_gathered() == 30
    made.count_gathered(4)
    assert made.pop_most_gathered() == 4


def test_a_context_of_waiting(monkeypatch):
    with timeline.waiting("nobody looks"):
        pass
    made = recorder()
    made.traces = True
    monkeypatch.setattr(timeline, "recorder", made)
    with timeline.waiting("barrier"):
        time.sleep(0.01)
    (span,) = made.pop_spans()
    assert isinstance(span, TraceSlice) and (span.track, span.name) == ("waits", "barrier")
    assert made.end_interval().read()[1] >= 0.01
