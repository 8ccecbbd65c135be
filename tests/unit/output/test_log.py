import json
import logging
import os
import re

import pytest

from hpcfsdp.output import log


@pytest.fixture(autouse=True)
def keep_logger():
    level, propagate = log.LOGGER.level, log.LOGGER.propagate
    yield
    log.close()
    log.LOGGER.level, log.LOGGER.propagate = level, propagate


def lines_of(path):
    return [json.loads(line) for line in path.read_text().splitlines()]


def test_rank_0_writes_lines_with_date_level_rank_host_and_topic(capsys):
    log.set_up(0, 128, "nid001")
    logging.getLogger("hpcfsdp.checkpoint").info("saved step=%d", 500)
    line = capsys.readouterr().err
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ INFO \[r000/128 nid001\] checkpoint: saved step=500\n", line)


def test_the_date_is_utc(capsys):
    log.set_up(0, 1, "host")
    record = logging.LogRecord("hpcfsdp.train", logging.WARNING, "", 0, "slow", None, None)
    record.created = 1_767_323_045.9
    log.LOGGER.handle(record)
    assert capsys.readouterr().err == "2026-01-02T03:04:05Z WARNING [r000/1 host] train: slow\n"


def test_every_rank_has_a_file_of_json_lines(tmp_path):
    for rank in (0, 12):
        log.set_up(rank, 16, "nid001", tmp_path / "logs")
        logging.getLogger("hpcfsdp.data").warning("änderung %s", "x")
    log.close()
    assert sorted(path.name for path in (tmp_path / "logs").iterdir()) == ["rank-0000.jsonl", "rank-0012.jsonl"]
    [entry] = lines_of(tmp_path / "logs/rank-0012.jsonl")
    assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ", entry.pop("date"))
    assert entry == {"level": "WARNING", "rank": 12, "host": "nid001", "topic": "hpcfsdp.data", "message": "änderung x"}


def test_other_ranks_are_silent_on_stderr_and_stdout(tmp_path, capfd):
    log.set_up(3, 4, "host", tmp_path)
    logging.getLogger("hpcfsdp.train").error("hidden")
    assert capfd.readouterr() == ("", "")
    assert lines_of(tmp_path / "rank-0003.jsonl")[0]["message"] == "hidden"


def test_a_traceback_is_in_both_logs(tmp_path, capsys):
    log.set_up(0, 1, "host", tmp_path)
    try:
        raise KeyError("lost")
    except KeyError:
        logging.getLogger("hpcfsdp.train").exception("failed")
    text = capsys.readouterr().err
    assert text.splitlines()[0].endswith("ERROR [r000/1 host] train: failed")
    assert text.endswith("KeyError: 'lost'\n")
    assert lines_of(tmp_path / "rank-0000.jsonl")[0]["traceback"].endswith("KeyError: 'lost'")


def test_debug_messages_and_other_loggers_are_left_out(capsys):
    log.set_up(0, 1, "host")
    logging.getLogger("hpcfsdp.train").debug("detail")
    assert capsys.readouterr().err == ""
    assert not log.LOGGER.propagate


def test_setting_up_twice_writes_once(tmp_path, capsys):
    log.set_up(0, 1, "host", tmp_path)
    log.set_up(0, 1, "host", tmp_path)
    logging.getLogger("hpcfsdp.train").info("once")
    assert capsys.readouterr().err.count("once") == 1
    assert len(lines_of(tmp_path / "rank-0000.jsonl")) == 1


def test_a_second_run_adds_to_the_file(tmp_path):
    for text in ("first", "second"):
        log.set_up(1, 2, "host", tmp_path)
        logging.getLogger("hpcfsdp.train").info(text)
        log.close()
    assert [entry["message"] for entry in lines_of(tmp_path / "rank-0001.jsonl")] == ["first", "second"]


def test_close_takes_all_handlers_away(tmp_path, capsys):
    log.set_up(0, 1, "host", tmp_path)
    log.close()
    assert log.LOGGER.handlers == []
    logging.getLogger("hpcfsdp.train").info("nobody")
    assert "nobody" not in capsys.readouterr().err
    assert lines_of(tmp_path / "rank-0000.jsonl") == []


def test_importing_the_library_sets_up_nothing(run_python):
    code = "import logging, hpcfsdp.output.log, hpcfsdp.examples.gpt.loop; print(logging.getLogger('hpcfsdp').handlers)"
    assert run_python(code) == "[]\n"


def test_logs_of_a_requeued_job_go_on_and_count_the_restarts(tmp_path, capsys, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "12")
    for count in ("0", "3"):
        monkeypatch.setenv("SLURM_RESTART_COUNT", count)
        log.set_up(0, 2, "nid001", tmp_path)
        logging.getLogger("hpcfsdp.train").info("step")
    log.close()
    assert [entry["restart"] for entry in lines_of(tmp_path / "rank-0000.jsonl")] == [0, 0, 3, 3]
    shown = [line.partition("] ")[2] for line in capsys.readouterr().err.splitlines()]
    assert shown == ["job: job 12, restart 0", "train: step", "job: job 12, restart 3", "train: step"]


def test_outside_of_a_scheduler_there_is_no_number_of_restarts(tmp_path, capsys, monkeypatch):
    for name in ("SLURM_JOB_ID", "PBS_JOBID", "LSB_JOBID", "FLUX_JOB_ID", "FLUX_ENCLOSING_ID", "PALS_APID"):
        monkeypatch.delenv(name, raising=False)
    log.set_up(0, 2, "nid001", tmp_path)
    assert capsys.readouterr().err == ""
    logging.getLogger("hpcfsdp.train").info("step")
    assert "restart" not in lines_of(tmp_path / "rank-0000.jsonl")[0]


@pytest.mark.timeout(20)
def test_a_log_goes_on_behind_a_torn_line_and_not_through_a_pipe_or_a_link_of_another(tmp_path, give_away):
    path = tmp_path / "rank-0001.jsonl"
    path.write_text('{"message": "first"}\n{"mess')
    log.set_up(1, 2, "host", tmp_path)
    logging.getLogger("hpcfsdp.train").error("second")
    log.close()
    assert json.loads(path.read_text().splitlines()[2])["message"] == "second"
    os.mkfifo(tmp_path / "rank-0002.jsonl")
    with pytest.raises(OSError, match="is not a regular file"):
        log.set_up(2, 3, "host", tmp_path)
    give_away(path)
    (tmp_path / "rank-0003.jsonl").symlink_to(path)
    give_away(tmp_path / "rank-0003.jsonl")
    with pytest.raises(PermissionError, match="belongs to the user"):
        log.set_up(3, 4, "host", tmp_path)
