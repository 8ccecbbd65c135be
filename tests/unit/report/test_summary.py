"""The state of a run in a few facts."""

import os

import pytest

from hpcfsdp.report.run_folder import read_run
from hpcfsdp.report.summary import save_interval, segments, summarize
from tests.example_runs import checkpoint_event, dated, start_event, train_record, write_lines, write_run


def test_the_facts_of_a_complete_run(usual):
    facts = summarize(usual)
    losses, rates = usual.series.column("loss"), usual.series.column("tokens_per_s")
    assert (facts.status, facts.step, facts.total_steps) == ("complete", 400, 400)
    assert facts.loss == losses[-1]
    assert (facts.best_loss, facts.best_loss_step) == (losses.min(), losses.argmin() + 1)
    assert rates[-50:].min() < facts.rate < rates[-50:].max() and facts.rate_unit == "tokens/s"
    assert facts.trained_s == pytest.approx(usual.series.column("seconds").sum())
    assert facts.wall_s == pytest.approx(usual.events[-1].seconds - usual.events[0].seconds)
    assert facts.eta_s is None, "it has ended"
    assert (facts.world_size, facts.num_nodes, facts.starts, facts.signals) == (8, 2, 2, 1)
    assert (facts.checkpoints, facts.last_checkpoint_step) == (8, 400)
    assert facts.peak_bytes == usual.series.column("memory.peak_bytes").max()
    assert facts.warnings == 8 and facts.errors == 0
    assert save_interval(usual) == 50


def test_the_parts_of_a_run(usual):
    first, second = segments(usual)
    assert (first.first, first.last, second.first, second.last) == (1, 200, 201, 400)
    assert first.end.text("outcome") == "stopped" and second.end.text("outcome") == "complete"
    assert [event.text("reason") for event in first.signals] == ["SIGUSR2 from the scheduler"]
    assert second.start.text("resumed_from").endswith("step-00000200.h5")


def test_steps_that_were_trained_again_belong_to_the_later_part(tmp_path):
    """The first part had come to step 8, and the second resumes from 5: metrics.jsonl has lost 6 to 8."""
    write_lines(tmp_path / "metrics.jsonl", [train_record(step, step) for step in range(1, 11)])
    write_lines(tmp_path / "events.jsonl", [start_event(0), start_event(20, 5, resumed_from="step-00000005.h5")])
    assert [(part.first, part.last) for part in segments(read_run(tmp_path))] == [(1, 5), (6, 10)]


def test_without_events_restarts_of_the_scheduler_are_the_parts(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": n, "loss": 1.0, "restart": n // 4} for n in range(1, 10)])
    parts = segments(read_run(tmp_path))
    assert [(part.first, part.last) for part in parts] == [(1, 3), (4, 7), (8, 9)]


@pytest.mark.parametrize(
    ("outcome", "status"), [("complete", "complete"), ("stopped", "stopped"), ("error", "failed"), (None, "ended")]
)
def test_the_status_is_that_of_the_last_end(written, outcome, status):
    assert summarize(written(20, every=10, end=outcome, total=40)).status == status


def test_a_training_that_holds_the_folder_runs_and_has_a_time_to_go(tmp_path):
    from hpcfsdp.launch.lock import RunLock

    write_run(tmp_path, 20, every=10, end=None, total=120)
    lock = RunLock(tmp_path)
    lock.acquire()
    try:
        facts = summarize(read_run(tmp_path))
    finally:
        lock.release()
    assert facts.status == "running"
    assert facts.eta_s == pytest.approx(100 * facts.step_s)


def test_a_loop_without_a_lock_runs_while_it_writes(tmp_path):
    write_run(tmp_path, 20, every=10, end=None)
    (tmp_path / "config.yaml").unlink()
    assert summarize(read_run(tmp_path)).status == "running"
    for name in ("metrics.jsonl", "events.jsonl"):
        os.utime(tmp_path / name, (0, 0))
    assert summarize(read_run(tmp_path)).status == "ended"


@pytest.mark.parametrize("end", ["error", None])
def test_a_report_about_a_hang_after_the_last_step(tmp_path, end):
    run = write_run(tmp_path, 20, every=10, end=end, total=40)
    (run / "hang").mkdir()
    (run / "hang" / "x-1.txt").write_text("Job 1: rank 0 has waited 300 s\n")
    assert summarize(read_run(run)).status == "hung"
    os.utime(run / "hang" / "x-1.txt", (0, 0))  # somebody has asked earlier, and the run went on
    assert summarize(read_run(run)).status == ("failed" if end else "ended")


def test_an_older_folder_that_has_done_all_its_steps_is_complete(tmp_path):
    write_run(tmp_path, 20, every=10)
    (tmp_path / "events.jsonl").unlink()
    assert summarize(read_run(tmp_path)).status == "complete"


def test_bytes_are_the_rate_where_there_are_no_tokens(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [{"step": 1, "bytes_per_s": 100.0}])
    facts = summarize(read_run(tmp_path))
    assert (facts.rate, facts.rate_unit, facts.loss) == (100.0, "bytes/s", None)


def test_events_alone_have_no_numbers(tmp_path):
    events = [
        start_event(0),
        checkpoint_event(5, 0),
        {"kind": "end", "date": dated(9), "outcome": "error", "message": "x"},
    ]
    write_lines(tmp_path / "events.jsonl", events)
    facts = summarize(read_run(tmp_path))
    assert (facts.status, facts.message, facts.step, facts.wall_s) == ("failed", "x", None, 9.0)
