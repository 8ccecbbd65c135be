"""The program of docs/how-to/preemption.md under mpirun, and the signals that it gets."""

import re
import signal

import pytest

from hpcfsdp.checkpoint import open_index
from tests.cli.test_docs import blocks

NEVER = {"STEPS": "100000000"}
SLOW_SAVE = """
import os, pathlib, signal, time
import hpcfsdp

save = hpcfsdp.checkpoint.save
def slow(*given, **named):
    for number in (signal.SIGUSR2, signal.SIGTERM, signal.SIGUSR1):
        os.kill(os.getpid(), number)
    save(*given, **named)
    os.kill(os.getpid(), signal.SIGTERM)
hpcfsdp.checkpoint.save = slow
pathlib.Path("begun").touch()
"""


@pytest.fixture
def program(tmp_path):
    (code,) = blocks("docs/how-to/preemption.md", "python")
    path = tmp_path / "program.py"
    path.write_text(code.replace("    for step in", "    open('begun', 'w').close()\n    for step in"))
    return path


def begun(program):
    return (program.parent / "begun").exists


def stopped_at(job):
    """The step, and the reason, that the ranks print."""
    found = re.findall(r"^rank \d stops after step (\d+): (.*)$", job.stdout, re.MULTILINE)
    assert len(found) == 2, job.stdout + job.stderr
    (only,) = set(found)
    return int(only[0]), only[1]


@pytest.mark.parametrize("number", [signal.SIGUSR1, pytest.param(signal.SIGUSR2, marks=pytest.mark.slow)])
def test_a_signal_to_the_launcher_ends_a_users_loop_with_a_checkpoint_and_75(start, program, number):
    job = start(program, ranks=2, environ=NEVER)
    job.wait_for(begun(program))
    job.process.send_signal(number)
    job.wait()
    assert job.code == 75, job.stderr
    step, reason = stopped_at(job)
    assert reason == f"signal {number:d} ({number.name})"
    assert open_index(program.parent / "run.h5").info.step == step
    again = start(program, ranks=2, environ={"STEPS": str(step + 5)}).wait()
    assert again.code == 0, again.stderr
    assert open_index(program.parent / "run.h5").info.step == step + 5


def test_sigterm_to_one_rank_is_enough(start, program):
    job = start(program, ranks=2, environ=NEVER)
    job.wait_for(begun(program))
    job.ranks()[0].send_signal(signal.SIGTERM)
    job.wait()
    assert job.code == 75, job.stderr
    assert stopped_at(job)[1] == "signal 15 (SIGTERM)"


def test_signals_during_the_save_do_no_harm(start, program):
    program.write_text(SLOW_SAVE + program.read_text().replace("step % 50 == 0", "step % 1000 == 0"))
    job = start(program, ranks=2, environ=NEVER)  # the signals come with the first save
    job.wait()
    assert job.code == 75, job.stderr
    step, _ = stopped_at(job)
    assert open_index(program.parent / "run.h5").info.step == step


def test_the_end_of_the_job_ends_a_users_loop(start, program):
    job = start(program, ranks=2, environ={**NEVER, "SLURM_JOB_END_TIME": "1"})
    job.wait()
    assert job.code == 75, job.stderr
    step, reason = stopped_at(job)
    assert step == 2
    assert reason.endswith(" s before the end of the job")
