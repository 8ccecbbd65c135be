import json
import math
import os
import resource
import signal

import numpy as np
import pytest
import torch

from hpcfsdp import observe
from hpcfsdp.observe.records import EventsFile, MetricsFile, append_end, last_step, read_records
from hpcfsdp.observe.step_figures import Curves


def steps(path):
    return [json.loads(line)["step"] for line in path.read_text().splitlines()]


def written(path, *wanted, resume_step=0):
    metrics = MetricsFile(path, resume_step=resume_step)
    for step in wanted:
        metrics.write({"step": step, "loss": step / 2})
    metrics.close()


def test_records_are_json_lines_in_the_order_of_writing(tmp_path):
    path = tmp_path / "new/metrics.jsonl"
    written(path, 1, 2)
    assert path.read_text() == '{"step": 1, "loss": 0.5}\n{"step": 2, "loss": 1.0}\n'


def test_a_record_is_in_the_file_as_soon_as_it_is_written(tmp_path):
    metrics = MetricsFile(tmp_path / "m.jsonl")
    metrics.write({"step": 1})
    assert steps(tmp_path / "m.jsonl") == [1]
    metrics.close()


def test_resuming_drops_the_records_of_later_steps(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 1, 2, 3, 4)
    written(path, 3, 4, 5, resume_step=2)
    assert steps(path) == [1, 2, 3, 4, 5]


def test_a_new_run_starts_with_an_empty_file(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 1, 2)
    written(path, 1)
    assert steps(path) == [1]


def test_lines_that_were_cut_off_or_are_no_records_are_dropped(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}\n\n{"loss": 2}\n[3]\n4\n{"step": 2}\n{"step": 2, "lo')
    written(path, 3, resume_step=2)
    assert steps(path) == [1, 2, 3]


def test_a_last_line_without_its_end_is_kept_whole(tmp_path):
    path = tmp_path / "m.jsonl"
    path.write_text('{"step": 1}')
    written(path, 2, resume_step=1)
    assert path.read_text().splitlines()[0] == '{"step": 1}'
    assert steps(path) == [1, 2]


def test_no_other_file_is_left_behind(tmp_path):
    path = tmp_path / "m.jsonl"
    written(path, 1)
    written(path, 2, resume_step=1)
    assert [entry.name for entry in tmp_path.iterdir()] == ["m.jsonl"]


def test_records_of_a_requeued_job_have_the_number_of_restarts(tmp_path, monkeypatch):
    path = tmp_path / "m.jsonl"
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    written(path, 1, 2)
    monkeypatch.setenv("SLURM_RESTART_COUNT", "3")
    written(path, 2, resume_step=1)
    assert [json.loads(line)["restart"] for line in path.read_text().splitlines()] == [0, 3]


def test_a_full_disk_loses_records_and_ends_nothing(tmp_path, caplog):
    (tmp_path / "events.jsonl").symlink_to("/dev/full")
    events = EventsFile(tmp_path / "events.jsonl")
    for step in (1, 2):
        events.write_event("note", step, {})
    events.close()
    assert caplog.text.count("events.jsonl cannot be written, records are lost: No space left on device") == 1


def test_events_are_appended_and_read_back_without_lines_that_were_cut_off(tmp_path):
    path = tmp_path / "events.jsonl"
    assert read_records(path) == []
    for step in (3, 1):
        events = EventsFile(path)
        events.write_event("note", step, {"value": float("inf"), "text": "x"})
        events.close()
    with open(path, "a") as file:
        file.write('[1]\n{"step": 9, "ki')
    found = read_records(path)
    assert [(event["step"], event["value"], event["text"]) for event in found] == [(3, None, "x"), (1, None, "x")]
    assert all(event["date"].endswith("Z") for event in found)


# What a killed process, a full disk, or somebody else has left


def kinds(path):
    """The kinds of the events that can be read."""
    return [event.get("kind") for event in read_records(path)]


@pytest.mark.parametrize("end", [b'{"kind": "checkp', b"\0\0\0", b"\xff", b'{"kind": "whole"}'])
def test_an_event_after_a_torn_line_is_on_a_line_of_its_own(tmp_path, end):
    path = tmp_path / "events.jsonl"
    path.write_bytes(b'{"kind": "start"}\n' + end)
    for kind in ("start", "end"):
        events = EventsFile(path)
        events.write_event(kind, 5, {})
        events.close()
    whole = ["whole"] if b"whole" in end else []
    assert kinds(path) == ["start", *whole, "start", "end"]
    append_end(path, 6, "error", "two")  # there is one
    assert kinds(path)[-2:] == ["start", "end"]


def test_a_disk_that_fills_in_a_line_loses_that_line_alone(tmp_path, caplog):
    """A limit of the size of files, in place of a small file system."""
    events = EventsFile(tmp_path / "events.jsonl")
    before = resource.getrlimit(resource.RLIMIT_FSIZE), signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    events.write_event("one", 1, {})
    written = (tmp_path / "events.jsonl").stat().st_size
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (written + 9, before[0][1]))
        for _ in range(2):
            events.write_event("two", 2, {})
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, before[0])
        signal.signal(signal.SIGXFSZ, before[1])
    assert (tmp_path / "events.jsonl").stat().st_size == written + 9
    events.write_event("three", 3, {})
    events.close()
    assert kinds(tmp_path / "events.jsonl") == ["one", "three"]
    assert caplog.text.count("cannot be written, records are lost") == 1


def test_a_file_that_is_removed_while_the_disk_is_full_ends_nothing(tmp_path, monkeypatch):
    events = EventsFile(tmp_path / "run" / "events.jsonl")
    (tmp_path / "run" / "events.jsonl").unlink()
    (tmp_path / "run").rmdir()
    with monkeypatch.context() as full:

        def fail(*_arguments, **_options):
            raise OSError(28, "No space left on device")

        for call in ("open", "mkdir", "write"):
            full.setattr(os, call, fail)
        for _ in range(3):
            events.write_event("lost", 1, {})
    events.write_event("kept", 2, {})
    events.close()
    assert kinds(tmp_path / "run" / "events.jsonl") == ["kept"]


ODD_LINES = {
    "a step of 400 digits": '{"step": 1' + "0" * 400 + "}",
    "a step of 5000 digits": '{"step": 1' + "0" * 5000 + "}",
    "many levels": "[" * 100_000,
    "text": '{"step": 2, "kind": "train", "loss": "x", "not_finite": {"loss": "y"}}',
    "objects": '{"step": 2, "kind": "train", "loss": {}, "not_finite": {"loss": []}, "memory": {"peak_bytes": {}}}',
    "null": '{"step": 2, "kind": "train", "memory": null, "not_finite": null}',
    "lists": '{"step": 2, "kind": "train", "memory": [], "not_finite": []}',
    "no step": '{"kind": "train", "loss": 1.0}',
    "another step": '{"step": [2], "kind": "train", "loss": 1.0}',
    "not finite": '{"step": NaN, "kind": ["train"], "loss": 1e999}',
    "bytes": "\0\0\0",
    "no object": '[{"step": 2}]',
}


@pytest.mark.parametrize("odd", ODD_LINES)
def test_odd_lines_end_no_run_and_leave_the_others(tmp_path, odd):
    for name in ("metrics.jsonl", "events.jsonl"):
        (tmp_path / name).write_text(f'{{"step": 1, "kind": "train", "loss": 2.0}}\n{ODD_LINES[odd]}\n')
    with observe.Run(tmp_path, peak_flops=1.0) as run:
        run.step(loss=1.0)
        curves = run.series()
    assert curves["loss"] in [([1, number], [2.0, 1.0]) for number in (2, 3)]
    records = read_records(tmp_path / "metrics.jsonl")
    assert (records[0]["loss"], records[-1]["loss"]) == (2.0, 1.0)
    assert kinds(tmp_path / "events.jsonl")[-2:] == ["start", "end"]


def test_a_record_without_sensible_figures_is_in_no_curve():
    series = Curves()
    for line in ODD_LINES.values():
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            continue
        if isinstance(record, dict):
            series.add(record)
    assert series.curves == {}
    assert last_step([{"step": True}, {"step": 10**400}, {"step": "9"}, {}]) == 0


def in_place_of_a_file(kind, path):
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    else:
        (path.parent / "victim").write_text("precious")
        path.symlink_to(path.parent / "victim")


@pytest.mark.timeout(60)
@pytest.mark.parametrize("kind", ["pipe", "folder", "link"])
def test_what_lies_in_place_of_the_files_ends_no_run(tmp_path, give_away, caplog, kind):
    for name in ("metrics.jsonl", "events.jsonl", ".metrics.jsonl.partial"):
        in_place_of_a_file(kind, tmp_path / name)
        if kind == "link":
            give_away(tmp_path / name)
    with observe.Run(tmp_path, peak_flops=1.0) as run:
        run.step(loss=1.0)
        assert run.series()["loss"] == ([1], [1.0])
    append_end(tmp_path / "events.jsonl", 1, "error", "an error")
    assert "events.jsonl cannot be written, records are lost" in caplog.text
    if kind == "link":
        assert (tmp_path / "victim").read_text() == "precious"


def test_values_that_json_lacks_end_no_training(tmp_path, caplog):
    path = tmp_path / "events.jsonl"
    events, endless = EventsFile(path), []
    endless.append(endless)
    values = {
        "nested": {"a": [math.nan, 1.5]},
        "numpy": np.float32(2),
        "count": np.int64(3),
        "tensor": torch.tensor(4.0),
    }
    events.write_event("values", 1, values | {"path": tmp_path, 5: {6: 7}})
    events.write_event("endless", 2, {"x": endless})
    events.write_event("digits", 3, {"x": 10**5000})
    events.write_event("end", 4, {})
    events.close()
    first, last = read_records(path)
    assert {name: first[name] for name in values} == {
        "nested": {"a": [None, 1.5]},
        "numpy": 2.0,
        "count": 3,
        "tensor": 4.0,
    }
    assert (first["path"], first["5"], last["kind"]) == (str(tmp_path), {"6": 7}, "end")
    assert caplog.text.count("a record for") == 2
