"""A view of a running job: what it reads, and what it shows."""

import dataclasses
import json
import math
import os

import numpy as np
import pytest

from hpcfsdp.report.live import (
    ASCII_BLOCKS,
    LAST_RECORDS,
    MOST_LOGS,
    Follower,
    bar,
    line_of,
    rows_of,
    sparkline,
    view_of,
)
from hpcfsdp.report.run_folder import read_run
from tests.example_runs import checkpoint_event, start_event, write_lines


@pytest.fixture(scope="module")
def view(usual):
    return view_of(usual, ["rank 3: slow \x1b[2J"], usual.checkpoints[-1].seconds + 90)


def test_a_sparkline_has_the_shape_of_the_curve():
    assert sparkline(np.array([0.0, 1.0, 2.0, 3.5]), 10) == "▁▃▅█"
    assert sparkline(np.array([5.0, 5.0]), 10) == "▁▁"
    assert sparkline(np.arange(1000.0), 8) == "▁▂▃▄▅▆▇█"
    assert sparkline(np.array([1.0, math.nan, 2.0]), 10, ASCII_BLOCKS) == "_x#"
    assert sparkline(np.array([]), 10) == ""


def test_a_bar_is_as_long_as_asked():
    assert bar(0.5, 4) == "██░░"
    assert bar(7.0, 4, ASCII_BLOCKS) == "####"
    assert bar(-1.0, 3, ASCII_BLOCKS) == "---"


@pytest.mark.parametrize("width", [50, 65, 100])
def test_rows_fit_and_say_what_is_known(view, width):
    rows = rows_of(view, width)
    found = dict(rows)
    assert found["status"] == "complete, 8 ranks on 2 nodes"
    assert found["step"].startswith("400 of 400") and found["step"].endswith("100%")
    assert found["slowest"].startswith("rank 0 on n0000, ")
    assert found["checkpoint"] == "step 400, 1 min 30 s ago"
    assert found["warning"] == "rank 3: slow \\x1b[2J"
    assert all(len(text) <= width for label, text in rows if label != "warning")


def test_one_line(view, usual):
    line = line_of(view)
    assert line.startswith(f"complete, step 400/400, loss {usual.series.column('loss')[-1]:.4f}, ")
    assert line.endswith(", checkpoint 400")


def test_a_tiny_loss_keeps_its_digits(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.5e-7}])
    assert "loss 2.5e-07" in line_of(view_of(read_run(tmp_path), [], 0.0))


def test_a_loss_that_is_not_finite_is_not_the_one_before(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "loss": 2.0}, {"step": 2, "loss": None}])
    view = view_of(read_run(tmp_path), [], 0.0)
    assert dict(rows_of(view, 65))["loss"].split() == ["not", "finite", "▁x"]
    assert "loss not finite" in line_of(view)
    assert view.as_json()["loss"] is None


def test_few_facts_make_few_rows(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 7}])
    rows = rows_of(view_of(read_run(tmp_path), [], 0.0), 65)
    assert rows == [("status", "running"), ("step", "7")]


def test_silence_is_told_while_the_run_has_not_ended(usual):
    events = tuple(event for event in usual.events if event.kind != "end")
    run = dataclasses.replace(usual, events=events, holder="process 1", silent_s=500.0)
    view = view_of(run, [], 0.0)
    assert not view.has_ended
    assert "nothing new for 8 min 20 s" in dict(rows_of(view, 65))["status"]
    assert "nothing new" not in dict(rows_of(view_of(dataclasses.replace(run, silent_s=5.0), [], 0.0), 65))["status"]


def test_a_run_from_before_its_first_line_to_its_end(tmp_path):
    folder = tmp_path / "run"
    follower = Follower(folder)
    assert not follower.poll() and not follower.has_begun
    write_lines(folder / "events.jsonl", [start_event(0)])
    assert follower.poll() and follower.has_begun
    with open(folder / "metrics.jsonl", "w", buffering=1) as file:
        for step in (1, 2):
            file.write(json.dumps({"step": step, "kind": "train", "loss": 3.0 - step}) + "\n")
            file.write(json.dumps({"step": step, "kind": "held_out"}) + "\n")
            assert follower.poll()
            assert follower.run().series.steps.tolist() == [*range(1, step + 1)]
    assert not follower.poll()
    with open(folder / "events.jsonl", "a") as file:
        file.write(json.dumps(checkpoint_event(9, 2)) + "\n")
    assert follower.poll()
    assert [one.step for one in follower.run().checkpoints] == [2]


def test_steps_that_a_resumed_run_has_dropped_are_forgotten(tmp_path):
    path = write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in range(1, 9)])
    follower = Follower(tmp_path)
    follower.poll()
    draft = write_lines(tmp_path / "draft", [{"step": step, "loss": 1.0} for step in range(1, 5)])
    os.replace(draft, path)
    assert follower.poll()
    assert follower.run().series.steps.tolist() == [1, 2, 3, 4]


def test_a_long_run_takes_bounded_memory(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, "loss": 1.0} for step in range(1, 3 * LAST_RECORDS)])
    follower = Follower(tmp_path)
    follower.poll()
    steps = follower.run().series.steps
    assert (len(steps), steps[-1]) == (LAST_RECORDS, 3 * LAST_RECORDS - 1)


def test_the_last_warnings_of_several_ranks(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1}])
    follower = Follower(tmp_path)
    follower.poll()
    for rank in range(MOST_LOGS + 1):
        log = {"level": "WARNING", "rank": rank, "date": "2026-01-01T00:00:00Z", "message": f"message {rank}"}
        write_lines(tmp_path / "logs" / f"rank-{rank:04d}.jsonl", [{"level": "INFO", "message": "x"}, log])
    assert follower.poll()
    assert [text.split(": ")[-1] for text in follower.warnings] == ["message 7", "message 8", "message 9"]
    assert not follower.poll()


def test_without_events_the_newest_file_is_the_last_checkpoint(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 20}])
    (tmp_path / "checkpoints").mkdir()
    for step in (10, 20):
        (tmp_path / "checkpoints" / f"step-{step:08d}.h5").write_bytes(b"")
    follower = Follower(tmp_path)
    follower.poll()
    assert [one.step for one in follower.run().checkpoints] == [20]
