import json

import pytest

from hpcfsdp.errors import UsageError
from hpcfsdp.observe.perfetto import events_of, in_lanes, steps_to_trace
from tests.unit.observe.traces import spans_of


def test_spans_that_overlap_get_lanes_of_their_own():
    spans = [("inner", 2, 3), ("outer", 0, 10), ("across", 5, 12), ("later", 12, 13), ("same", 0, 10)]
    assert in_lanes(spans) == [
        [("outer", 0, 10), ("same", 0, 10), ("inner", 2, 3), ("later", 12, 13)],
        [("across", 5, 12)],
    ]


def test_no_spans_need_no_lane():
    assert in_lanes([]) == []


def test_the_events_of_a_process(tmp_path):
    spans = [("units", "forward a", 1000, 5000), ("gather", "a", 2000, 9000), ("units", "forward b", 4000, 6000)]
    events = list(events_of(spans, pid=3, process="rank 3 (n1)"))
    (tmp_path / "t.json").write_text(json.dumps({"traceEvents": events}))
    found, processes = spans_of(tmp_path / "t.json")
    assert processes == {3: "rank 3 (n1)"}
    assert found == {
        (3, "units", "forward a"): [(1.0, 5.0)],
        (3, "gather", "a"): [(2.0, 9.0)],
        (3, "units (2)", "forward b"): [(4.0, 6.0)],
    }


def test_tracks_stand_in_one_order_whatever_comes_first():
    spans = [("waits", "w", 0, 1), ("my own", "x", 0, 1), ("units", "u", 0, 1), ("steps", "s", 0, 1)]
    order = {
        event["args"]["sort_index"]: event["tid"]
        for event in events_of(spans, pid=0, process="")
        if event["name"] == "thread_sort_index"
    }
    names = {
        event["tid"]: event["args"]["name"]
        for event in events_of(spans, pid=0, process="")
        if event["name"] == "thread_name"
    }
    assert [names[order[index]] for index in sorted(order)] == ["steps", "units", "waits", "my own"]


def test_steps_to_trace():
    assert steps_to_trace(False) is None
    assert steps_to_trace(True) == range(3, 6)
    assert steps_to_trace(range(1, 2)) == range(1, 2)


@pytest.mark.parametrize("wrong", [range(0, 3), range(3, 3), range(1, 9, 2), 3, "yes"])
def test_steps_that_cannot_be_traced_are_refused(wrong):
    with pytest.raises(UsageError, match=r"trace must be True, False or steps such as range\(3, 6\)"):
        steps_to_trace(wrong)
