"""What a report finds in a run; each finding also has a run in which it is not found."""

import json
import re

import numpy as np
import pytest

from hpcfsdp.report.problems import ORDER, problems_of
from hpcfsdp.report.run_folder import read_run
from hpcfsdp.report.summary import summarize
from tests.cli.conftest import ROOT
from tests.example_runs import GIB, start_event, train_record, write_lines, write_run


def found_in(folder):
    run = read_run(folder)
    return {problem.topic: problem for problem in problems_of(run, summarize(run))}


def changed(folder, change):
    """Have `change` edit each record of a step."""
    path = folder / "metrics.jsonl"
    records = [json.loads(line) for line in path.read_text().splitlines()]
    for record in records:
        if record["kind"] == "train":
            change(record)
    write_lines(path, records)
    return folder


@pytest.fixture
def plain(tmp_path):
    """A run of 400 steps without anything to find but that its files are elsewhere."""
    return write_run(tmp_path / "plain", 400, every=50, restart_at=0)


def test_a_sound_run_has_nothing_to_find(plain):
    assert set(found_in(plain)) == {"gone_checkpoints"}


def test_the_worst_comes_first(tmp_path):
    run = read_run(changed(write_run(tmp_path, 400, end="error"), lambda one: one.update(comm_share=0.6)))
    severities = [problem.severity for problem in problems_of(run, summarize(run))]
    assert {"bad", "warning", "note"} == set(severities)
    assert severities == sorted(severities, key=ORDER.index)


def test_an_error_is_quoted(tmp_path):
    problem = found_in(write_run(tmp_path, 20, every=10, end="error"))["failed"]
    assert problem.text == "rank 3: CUDA out of memory" and problem.page == "reference/errors.md"


def test_a_run_that_was_killed(tmp_path):
    assert "has recorded no end" in found_in(write_run(tmp_path, 20, every=10, end=None, total=40))["ended"].text


def test_losses_that_are_not_finite(plain):
    problem = found_in(changed(plain, lambda one: one.update(loss=None) if one["step"] > 390 else None))["not_finite"]
    assert problem.title == "The loss was not finite from step 391 on."
    assert "in 10 of 400 steps" in problem.text
    assert problem.severity == "bad"


def test_a_loss_that_rises(plain):
    problem = found_in(changed(plain, lambda one: one.update(loss=4.0) if one["step"] > 350 else None))["diverged"]
    assert "to 4 now" in problem.text


def test_a_loss_that_only_varies_has_not_risen(plain):
    random = np.random.default_rng(1)
    assert "diverged" not in found_in(changed(plain, lambda one: one.update(loss=2 + random.standard_normal())))


def test_a_rank_that_is_always_late(tmp_path):
    problem = found_in(write_run(tmp_path, 400, every=50, slow_from=100))["straggler"]
    assert problem.title == "Rank 5 on n0001 holds up the others."
    assert "slowest in 100% of the last 200 steps" in problem.text and "25% longer" in problem.text
    assert "--exclude=n0001" in problem.remedy


def test_ranks_of_one_host_that_are_late_in_turn(plain):
    def late(one):
        one["straggler"] = {"rank": 4 + one["step"] % 4, "host": "n0001", "behind_s": 0.2}
        if one["step"] % 10 == 0:
            one["straggler"] = {"rank": 0, "host": "n0000", "behind_s": 0.2}

    assert found_in(changed(plain, late))["straggler"].title == "A rank on n0001 holds up the others."


def test_late_ranks_that_change_are_no_straggler(plain):
    def late(one):
        rank = one["step"] % 8
        one["straggler"] = {"rank": rank, "host": f"n000{rank // 4}", "behind_s": 0.2}

    assert "straggler" not in found_in(changed(plain, late))


@pytest.mark.parametrize(("share", "is_found"), [(60, False), (90, True)])
def test_one_of_two_ranks_has_to_be_late_more_often(tmp_path, share, is_found):
    """One of two equal ranks is the last one in half of the steps."""
    records = [train_record(step, step) for step in range(1, 401)]
    for record in records:
        record["straggler"] = {"rank": int(record["step"] % 100 < share), "host": "n0000", "behind_s": 0.2}
    write_lines(tmp_path / "metrics.jsonl", records)
    write_lines(tmp_path / "events.jsonl", [start_event(0, world_size=2, num_nodes=1)])
    assert ("straggler" in found_in(tmp_path)) == is_found


def test_ranks_that_wait_long(plain):
    problem = found_in(changed(plain, lambda one: one.update(comm_share=0.45)))["communication"]
    assert "in 45% of a step" in problem.title and problem.page == "how-to/networks.md"


def test_a_training_that_becomes_slower(plain):
    problem = found_in(changed(plain, lambda one: one.update(tokens_per_s=5e4) if one["step"] > 300 else None))[
        "slower"
    ]
    assert "to 50,000 tokens/s now" in problem.text


def test_memory_near_the_capacity(plain):
    def full(one):
        one["memory"].update(capacity_bytes=40 * GIB, peak_bytes=39 * GIB if one["step"] == 77 else 30 * GIB)

    problem = found_in(changed(plain, full))["memory"]
    assert "39.0 GiB of 40.0 GiB in step 77 on rank 3" in problem.text
    changed(plain, lambda one: one["memory"].update(peak_bytes=30 * GIB))
    assert "memory" not in found_in(plain)


def test_a_capacity_of_zero_is_unknown(plain):
    assert "memory" not in found_in(changed(plain, lambda one: one["memory"].update(capacity_bytes=0)))


def test_memory_that_grows(plain):
    problem = found_in(changed(plain, lambda one: one["memory"].update(peak_bytes=(10 + one["step"] / 100) * GIB)))
    assert "from 10.6 GiB to 13.5 GiB" in problem["memory_grows"].text


def test_no_checkpoint_and_a_late_one(plain, tmp_path):
    events = [json.loads(line) for line in (plain / "events.jsonl").read_text().splitlines()]
    kept = [event for event in events if event["kind"] != "checkpoint" or event["step"] <= 200]
    write_lines(plain / "events.jsonl", kept)
    assert found_in(plain)["late_checkpoint"].text.startswith("200 steps are not saved; before, there was one every 50")
    write_lines(plain / "events.jsonl", [event for event in events if event["kind"] != "checkpoint"])
    assert "no_checkpoint" in found_in(plain)


def test_a_damaged_checkpoint(plain):
    folder = plain / "checkpoints"
    folder.mkdir()
    (folder / "step-00000400.h5").write_bytes(b"")
    problem = found_in(plain)["damaged_checkpoint"]
    assert problem.severity == "bad" and "also the newest one" in problem.title


def test_checkpoints_that_hold_up_training(plain):
    events = [json.loads(line) for line in (plain / "events.jsonl").read_text().splitlines()]
    write_lines(plain / "events.jsonl", [{**event, "held_s": 10.0} for event in events])
    assert "80 s" in (text := found_in(plain)["held"].text) or "1 min 20 s" in text


def test_restarts_say_what_was_lost(tmp_path):
    records = [train_record(step, step) for step in range(1, 11)]
    write_lines(tmp_path / "metrics.jsonl", records)
    error = {"kind": "end", "step": 8, "outcome": "error", "message": "x"}
    write_lines(tmp_path / "events.jsonl", [start_event(0), error, start_event(20, 5), start_event(30, 7)])
    problem = found_in(tmp_path)["restarts"]
    assert problem.title == "The run was restarted twice."
    assert "lost ranks" not in problem.text
    assert "ended with an error once" in problem.text and "killed, or its node had failed, once" in problem.text
    assert "3 steps had to be trained again" in problem.text


def test_losses_after_which_the_job_went_on_are_no_errors(tmp_path):
    write_lines(tmp_path / "metrics.jsonl", [train_record(step, step) for step in range(1, 11)])
    lost = {"kind": "end", "step": 8, "outcome": "lost", "message": "x"}
    write_lines(tmp_path / "events.jsonl", [start_event(0), lost, start_event(20, 8)])
    problem = found_in(tmp_path)["restarts"]
    assert problem.text == "It was started twice; it had lost ranks once, and went on without them."


def test_damaged_lines_and_logged_errors(plain):
    with open(plain / "metrics.jsonl", "a") as file:
        file.write("noise\n")
    write_lines(plain / "logs" / "rank-0000.jsonl", [{"level": "ERROR", "message": "x"}])
    problems = found_in(plain)
    assert problems["damaged_lines"].title == "metrics.jsonl: 1 damaged line."
    assert problems["errors"].title == "Ranks have logged 1 error."


def test_few_steps_lead_to_no_trend(tmp_path):
    records = [{**train_record(step, step), "comm_share": 0.9, "loss": float(step)} for step in range(1, 15)]
    write_lines(tmp_path / "metrics.jsonl", records)
    assert set(found_in(tmp_path)) == {"no_checkpoint"}


def test_the_pages_that_findings_name_exist():
    import inspect

    from hpcfsdp.report import problems

    pages = set(re.findall(r'"([a-z-]+/[a-z-]+\.md)"', inspect.getsource(problems)))
    assert len(pages) >= 6
    assert all((ROOT / "docs" / page).is_file() for page in pages)
