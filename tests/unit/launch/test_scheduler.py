"""The end of the job: SLURM's variable, or the answers of schedulers' commands."""

import time

import pytest

from hpcfsdp.launch import scheduler

QSTAT = '{"Jobs": {"7.head": {"stime": "Mon Nov 23 10:00:00 2026", "Resource_List": {"walltime": "01:30:05"}}}}'


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Put a command that prints a text, or fails, first in the path of a process without a scheduler."""
    for name in ("SLURM_JOB_ID", "SLURM_JOB_END_TIME", "PBS_JOBID", "FLUX_JOB_ID"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("PATH", f"{tmp_path}:/usr/bin:/bin")
    monkeypatch.setenv("TZ", "UTC")
    time.tzset()

    def make(name, text, code=0):
        path = tmp_path / name
        path.write_text(f"#!/bin/sh\necho \"$@\" > {tmp_path}/arguments\ncat <<'TEXT'\n{text}\nTEXT\nexit {code}\n")
        path.chmod(0o755)
        return tmp_path / "arguments"

    yield make
    monkeypatch.undo()
    time.tzset()


def test_without_a_scheduler_there_is_no_end(command):
    command("squeue", "2026-11-23T10:00:00")
    assert scheduler.job_end() is None


def test_slurms_variable_is_enough(command, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setenv("SLURM_JOB_END_TIME", "1795428000")
    assert scheduler.job_end() == 1795428000.0


def test_an_older_slurm_is_asked(command, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    arguments = command("squeue", "2026-11-23T10:00:00")
    assert scheduler.job_end() == 1795428000.0
    assert arguments.read_text() == "--noheader --jobs 7 --format=%e\n"


def test_pbs_is_asked_for_start_and_wall_time(command, monkeypatch):
    monkeypatch.setenv("PBS_JOBID", "7.head")
    arguments = command("qstat", QSTAT)
    assert scheduler.job_end() == 1795428000.0 + 5405
    assert arguments.read_text() == "-f -F json 7.head\n"


@pytest.mark.parametrize(("answer", "left_s"), [("123.5", 123.5), ("infinity", None)])
def test_flux_is_asked_for_the_time_left(command, monkeypatch, answer, left_s):
    monkeypatch.setenv("FLUX_JOB_ID", "fABC")
    command("flux", answer)
    end_s = scheduler.job_end()
    assert end_s is None if left_s is None else abs(end_s - time.time() - left_s) < 30


@pytest.mark.parametrize(
    ("name", "text", "code"),
    [
        ("squeue", "NONE", 0),  # no time limit
        ("squeue", "", 0),
        ("squeue", "slurm_load_jobs error: Unable to contact slurm controller", 1),
        (None, "", 0),  # in a container
    ],
)
def test_no_usable_answer_is_no_end(command, monkeypatch, name, text, code):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    if name:
        command(name, text, code)
    assert scheduler.job_end() is None


@pytest.mark.parametrize("text", ["{}", "[", '{"Jobs": {"7": {"stime": "?", "Resource_List": {"walltime": "1:2:3"}}}}'])
def test_an_answer_of_pbs_without_times_is_no_end(command, monkeypatch, text):
    monkeypatch.setenv("PBS_JOBID", "7")
    command("qstat", text)
    assert scheduler.job_end() is None


def test_a_command_that_hangs_is_given_up(command, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_ID", "7")
    monkeypatch.setattr(scheduler, "ANSWER_S", 0.2)
    command("squeue", "2026-11-23T10:00:00").parent.joinpath("squeue").write_text("#!/bin/sh\nexec sleep 60\n")
    assert scheduler.job_end() is None
