"""What schedulers say of a job: their variables, and the answers of their commands about its end."""

import time

import pytest

from hpcfsdp import env
from hpcfsdp.launch import scheduler

QSTAT = '{"Jobs": {"7.head": {"stime": "Mon Nov 23 10:00:00 2026", "Resource_List": {"walltime": "01:30:05"}}}}'


@pytest.fixture(autouse=True)
def no_scheduler(monkeypatch):
    for row in env.SCHEDULERS:
        for name in (*row.jobs, *filter(None, row[2:])):
            monkeypatch.delenv(name, raising=False)


def test_each_scheduler_names_the_job_and_its_ranks(monkeypatch):
    assert (env.scheduler_job(), env.restarts(), env.launcher_rank()) == (env.SchedulerJob(), {}, None)
    rows = {
        "SLURM": ({"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "4", "SLURM_PROCID": "3"}, "7", {"restart": 0}, 4, 3),
        "SLURM again": ({"SLURM_JOB_ID": "7", "SLURM_RESTART_COUNT": "2"}, "7", {"restart": 2}, None, None),
        "PBS, in an array": ({"PBS_JOBID": "7[3].head", "PBS_ARRAY_INDEX": "3"}, "7[3].head", {}, None, None),
        "PALS within PBS": ({"PBS_JOBID": "7.head", "PALS_APID": "a-b", "PALS_RANKID": "3"}, "7.head", {}, None, 3),
        "PALS alone": ({"PALS_APID": "a-b", "PALS_RANKID": "3", "PMI_SIZE": "4"}, "a-b", {}, 4, 3),
        "LSF": ({"LSB_JOBID": "7", "LSB_JOBINDEX": "0"}, "7", {}, None, None),
        "LSF, in an array": ({"LSB_JOBID": "7", "LSB_JOBINDEX": "3"}, "7[3]", {}, None, None),
        "LSF with jsrun": (
            {"LSB_JOBID": "7", "JSM_NAMESPACE_SIZE": "4", "JSM_NAMESPACE_RANK": "3"},
            *("7", {}, 4, 3),
        ),
        "Flux": ({"FLUX_JOB_ID": "fABC", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3"}, "fABC", {}, 4, 3),
        "mpirun in a script of flux batch": ({"FLUX_ENCLOSING_ID": "fABC"}, "fABC", {}, None, None),
        "Flux within SLURM": (
            {"SLURM_JOB_ID": "7", "SLURM_STEP_NUM_TASKS": "2", "SLURM_PROCID": "0"}
            | {"FLUX_JOB_ID": "fABC", "FLUX_JOB_SIZE": "4", "FLUX_TASK_RANK": "3"},
            *("7", {"restart": 0}, 4, 3),
        ),
    }
    for case, (variables, number, restarts, size, rank) in rows.items():
        with monkeypatch.context() as patch:
            for name in ("OMPI_COMM_WORLD_SIZE", "OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_SIZE", "PMI_RANK"):
                patch.delenv(name, raising=False)
            for name, value in variables.items():
                patch.setenv(name, value)
            launched = env.launcher_size()
            found = env.scheduler_job().number, env.restarts(), launched and launched[1], env.launcher_rank()
        assert found == (number, restarts, size, rank), case


@pytest.fixture
def command(monkeypatch, tmp_path):
    """Put a command that prints a text, or fails, first in the path of a process without a scheduler."""
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


def test_a_variable_without_an_end_or_a_job_is_no_job(command, monkeypatch):
    monkeypatch.setenv("SLURM_JOB_END_TIME", "0")
    command("squeue", "2026-11-23T10:00:00")
    assert env.scheduler_jobs() == [] and scheduler.job_end() is None


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
    ("answer", "left_s"),
    [
        ("1:30 L", 5400),
        ("200:00 L ", 720_000),
        ("1:30 E", None),  # what the user has estimated is no limit
        ("0:00 X", None),
        ("-", None),
        ("Job <7> is not found", None),
    ],
)
def test_lsf_is_asked_for_the_time_left(command, monkeypatch, answer, left_s):
    monkeypatch.setenv("LSB_JOBID", "7")
    monkeypatch.setenv("LSB_JOBINDEX", "3")
    arguments = command("bjobs", answer)
    end_s = scheduler.job_end()
    assert end_s is None if left_s is None else abs(end_s - time.time() - left_s) < 30
    assert arguments.read_text() == "-noheader -o time_left 7[3]\n"


def test_pals_knows_no_end_and_pbs_around_it_does(command, monkeypatch):
    monkeypatch.setenv("PALS_APID", "a-b")
    assert scheduler.job_end() is None
    monkeypatch.setenv("PBS_JOBID", "7.head")
    command("qstat", QSTAT)
    assert scheduler.job_end() == 1795428000.0 + 5405


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
