"""Folders of runs: whole, old, damaged, empty, not there."""

import json
import os
import re

import pytest

from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.launch.lock import RunLock
from hpcfsdp.report.run_folder import LAST_BYTES, flat_config, read_run, total_steps
from tests.example_runs import write_lines, write_run


def test_a_whole_folder(usual):
    assert usual.series.steps.tolist() == [*range(1, 401)]
    assert [event.kind for event in usual.events if event.kind != "checkpoint"] == (
        ["start", "signal", "end", "start", "end"]
    )
    assert [one.step for one in usual.checkpoints] == [*range(50, 401, 50)]
    assert not any(one.present for one in usual.checkpoints)
    assert [one.step for one in usual.held_out] == [*range(50, 401, 50)]
    assert total_steps(usual.config) == 400
    assert usual.unreadable == () and usual.holder == ""


def test_one_warning_of_several_ranks_is_one_note_and_numbers_in_it_do_not_count(tmp_path):
    run = write_run(tmp_path, 20, every=10)
    for rank in range(8):
        lines = [{"level": "WARNING", "rank": rank, "topic": "hpcfsdp.x", "message": f"slow at {rank}"}] * 3
        write_lines(run / "logs" / f"rank-{rank:04d}.jsonl", [*lines, {"level": "ERROR", "message": "bad", "rank": 0}])
    notes = read_run(run).notes
    assert notes.counts == {"WARNING": 24, "ERROR": 8}
    assert [(note.level, note.topic, note.count, note.ranks) for note in notes.notes] == [
        ("WARNING", "x", 24, {*range(8)}),
        ("ERROR", "", 8, {0}),
    ]


def test_of_a_long_log_the_end_is_read(tmp_path):
    run = write_run(tmp_path, 20, every=10)
    lines = [
        {"level": "WARNING", "rank": 0, "message": "x" * 1000 + "abcdefghij"[number % 10]} for number in range(2000)
    ]
    path = write_lines(run / "logs" / "rank-0000.jsonl", lines)
    notes = read_run(run).notes
    assert path.stat().st_size > LAST_BYTES
    assert 900 < notes.counts["WARNING"] - 7 < LAST_BYTES / 1000
    assert "of 1 long file(s) only the end was read" in notes.incomplete


def test_a_folder_of_an_older_version_has_no_events_and_fewer_fields(tmp_path):
    record = {"kind": "train", "loss": 2.0, "grad_norm": 1.0, "lr": 1e-3, "seconds": 0.2, "bytes_per_s": 100.0}
    write_lines(tmp_path / "metrics.jsonl", [{"step": step, **record} for step in (1, 2)])
    run = read_run(tmp_path)
    assert run.events == () and run.config is None and len(run.series) == 2


def test_a_folder_with_events_alone_is_a_run(tmp_path):
    write_lines(tmp_path / "events.jsonl", [{"kind": "start", "step": 0}, {"kind": "end", "outcome": "error"}])
    assert len(read_run(tmp_path).series) == 0


def test_damaged_lines_are_counted_by_file(tmp_path):
    run = write_run(tmp_path, 20, every=10)
    with open(run / "metrics.jsonl", "a") as file:
        file.write('{"kind": "train", "loss": 1.0}\nnoise\n{"step": 21, "kind": "train", "loss": 1.5}\n{"step"')
    with open(run / "events.jsonl", "ab") as file:
        file.write(b"\xff\xfe\n")
    found = read_run(run)
    assert found.series.steps[-1] == 21
    assert {name: tally.damaged for name, tally in found.tallies.items()} == {"metrics.jsonl": 2, "events.jsonl": 1}
    assert found.tallies["metrics.jsonl"].first_damaged == 23  # after 20 steps and 2 evaluations


def test_a_configuration_that_is_no_yaml_is_kept_as_text(tmp_path):
    run = write_run(tmp_path, 20, every=10)
    (run / "config.yaml").write_text("a: [1, \n")
    found = read_run(run)
    assert found.config is None and found.config_text == "a: [1, \n"
    assert flat_config({"a": {"b": 1, "c": {}}, "d": [1, 2]}) == [("a.b", "1"), ("a.c", "{}"), ("d", "[1, 2]")]


def test_checkpoints_in_the_folder_are_opened_and_damage_is_a_fact(tmp_path):
    import torch

    from hpcfsdp import checkpoint

    run = write_run(tmp_path, 20, every=10)
    folder = run / "checkpoints"
    checkpoint.save(folder / "step-00000010.h5", model=torch.nn.Linear(2, 2), step=10)
    (folder / "step-00000020.h5").write_bytes(b"\x89HDF\r\n\x1a\n" + b"\0" * 100)
    first, second = read_run(run).checkpoints
    assert (first.step, first.present, first.world_size, first.fault) == (10, True, 1, "")
    assert first.took_s == 9.5, "from its event"
    assert second.present and "step-00000020.h5" in second.fault


def test_the_training_that_holds_the_folder_is_named(tmp_path):
    run, lock = write_run(tmp_path, 20, every=10, end=None), RunLock(tmp_path)
    lock.acquire()
    try:
        assert f"process {os.getpid()}" in read_run(run).holder
    finally:
        lock.release()
    assert read_run(run).holder == ""


def test_a_missing_folder_a_file_and_an_empty_folder_have_their_own_messages(tmp_path):
    with pytest.raises(UsageError, match="no such folder: give the run_dir of a training"):
        read_run(tmp_path / "none")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file: give the folder of a run"):
        read_run(tmp_path / "file")
    (tmp_path / "empty").mkdir()
    with pytest.raises(HpcfsdpError, match=r"no step has been recorded: metrics.jsonl and events.jsonl are missing"):
        read_run(tmp_path / "empty")


def test_a_folder_of_runs_names_them(tmp_path):
    for name in ("one", "two"):
        write_run(tmp_path / name, 5, every=5)
    with pytest.raises(HpcfsdpError, match=r"has folders of runs in it \(one, two\): give one of them") as caught:
        read_run(tmp_path)
    assert caught.value.kind == "missing"


def test_records_that_are_all_damaged(tmp_path):
    (tmp_path / "metrics.jsonl").write_text("noise\n" * 3)
    with pytest.raises(HpcfsdpError, match=r"3 line\(s\) of .* are damaged, the first one is line 1"):
        read_run(tmp_path)


def refusing(path, monkeypatch):
    """Have the disk refuse one path, as it refuses users other than root."""
    real = os.open

    def refuse(name, *arguments, **options):
        if str(name) == str(path):
            raise PermissionError(13, "Permission denied", str(path))
        return real(name, *arguments, **options)

    monkeypatch.setattr(os, "open", refuse)


def test_records_that_may_not_be_read_are_an_error(tmp_path, monkeypatch):
    run = write_run(tmp_path, 5, every=5)
    refusing(run / "metrics.jsonl", monkeypatch)
    with pytest.raises(HpcfsdpError, match=r"metrics.jsonl: cannot be read: Permission denied") as caught:
        read_run(run)
    assert caught.value.kind == "permission"


def test_logs_that_may_not_be_read_are_a_note(tmp_path, monkeypatch):
    run = write_run(tmp_path, 5, every=5)
    refusing(run / "logs" / "rank-0003.jsonl", monkeypatch)
    (failure,) = read_run(run).unreadable
    assert failure.startswith("logs: ") and "Permission denied" in failure


def test_reports_about_hangs_are_read(tmp_path):
    run = write_run(tmp_path, 5, every=5)
    (run / "hang").mkdir()
    text = "Job 1: rank 0 has waited\n\nRank 5 has not come\n\nRanks\n-----\nrank 0\n"
    (run / "hang" / "x-1.txt").write_text(text)
    (hang,) = read_run(run).hangs
    assert hang.head == "Job 1: rank 0 has waited\n\nRank 5 has not come"
    assert hang.text == text


def test_a_run_that_jsons_nothing_sensible(tmp_path):
    """Every field of a wrong type: no error, and no number that was not there."""
    values = [None, "text", [], {}, True, 1e308, -5, {"a": {"b": []}}]
    names = (
        "step kind date loss grad_norm lr seconds tokens_per_s comm_share straggler memory restart path bytes".split()
    )
    lines = [{"step": number, **dict.fromkeys(names[2:], value)} for number, value in enumerate(values)]
    write_lines(tmp_path / "metrics.jsonl", lines)
    events = [
        {**dict.fromkeys(names, value), "kind": kind} for value in values for kind in ("start", "checkpoint", "end")
    ]
    write_lines(tmp_path / "events.jsonl", [*events, {}])
    (tmp_path / "config.yaml").write_text("train: 5\n")
    run = read_run(tmp_path)
    assert len(run.series) == len(values)
    json.dumps([event.text("path") for event in run.events])


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "a link of another"])
@pytest.mark.parametrize(
    "name", ["metrics.jsonl", "config.yaml", "logs/rank-0000.jsonl", "hang/x-1.txt", "running.json"]
)
def test_a_folder_of_somebody_else_holds_up_no_report_and_shows_none_of_the_readers_files(
    tmp_path, give_away, kind, name
):
    run, path, secret = write_run(tmp_path / "run", 5, every=5), tmp_path / "run" / name, tmp_path / "secret"
    secret.write_text("{step: 1, message: secret}")
    path.parent.mkdir(exist_ok=True)
    path.unlink(missing_ok=True)
    os.mkfifo(path) if kind == "pipe" else path.symlink_to(secret)
    if kind != "pipe":
        give_away(path)
    why = r"is not a regular file|belongs to the user \d+"
    if name == "metrics.jsonl":
        with pytest.raises(HpcfsdpError, match=rf"metrics.jsonl: cannot be read: ({why})"):
            read_run(run)
        return
    found = read_run(run)
    assert "secret" not in repr(found)
    assert name == "running.json" or re.search(why, " ".join(found.unreadable))


def test_a_configuration_that_unfolds_is_shown_as_it_is(tmp_path):
    run = write_run(tmp_path, 5, every=5)
    lines = ["a0: &a0 [x, x]", *(f"a{n}: &a{n} [{', '.join([f'*a{n - 1}'] * 9)}]" for n in range(1, 30))]
    (run / "config.yaml").write_text("\n".join(lines))
    found = read_run(run)
    assert (found.config, found.config_text) == (None, "\n".join(lines))
