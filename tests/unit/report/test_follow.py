"""Following a run that is being written."""

import json
import os

from hpcfsdp.report.follow import LAST_RECORDS, MOST_LOGS, Follower
from tests.example_runs import checkpoint_event, start_event, write_lines


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
