import json

from hpcfsdp.observe.records import EventsFile, MetricsFile, read_records


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
