"""Reads back what runs have written, and checks that a viewer can draw a trace."""

import json
from collections import defaultdict
from pathlib import Path


def lines_on_all_ranks(path, world):
    """The lines of JSON that rank 0 has written, on all ranks."""
    found = [json.loads(line) for line in path.read_text().splitlines()] if world.rank == 0 else None
    return world.comm.bcast(found)


def trace_of(folder, world):
    """The spans of a run's trace, on all ranks: rank 0 joins the parts while the others go on."""
    world.comm.Barrier()
    return spans_of(folder / "trace.json")


def spans_of(path):
    """(rank, track, name) of each span -> [(begin, end)] in microseconds; checks the structure of the whole file."""
    trace = json.loads(Path(path).read_text())
    events = trace["traceEvents"]
    processes = {event["pid"]: event["args"]["name"] for event in events if event["name"] == "process_name"}
    threads = {
        (event["pid"], event["tid"]): event["args"]["name"] for event in events if event["name"] == "thread_name"
    }
    found, by_thread = defaultdict(list), defaultdict(list)
    for event in events:
        assert event["ph"] in ("M", "X")
        assert isinstance(event["pid"], int) and isinstance(event["tid"], int)
        if event["ph"] == "X":
            assert event["dur"] >= 0 and event["name"]
            thread = event["pid"], event["tid"]
            begin, end = event["ts"], event["ts"] + event["dur"]
            found[event["pid"], threads[thread], event["name"]].append((begin, end))
            by_thread[thread].append((begin, end))
    for spans in by_thread.values():
        check_nesting(spans)
    assert set(processes) == {pid for pid, _ in threads}
    return dict(found), processes


def check_nesting(spans, slack_us=0.01):
    """Spans of one thread are apart, or one lies within the other: anything else is drawn wrong."""
    ends = []
    for begin, end in sorted(spans, key=lambda span: (span[0], -span[1])):
        while ends and ends[-1] <= begin + slack_us:
            ends.pop()
        assert not ends or end <= ends[-1] + slack_us, (begin, end, ends)
        ends.append(end)
