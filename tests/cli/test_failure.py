"""What is left when ranks fail: a traceback that says where, an exit code, and nothing running."""

import time

import psutil
import pytest

SCRIPT = """
import sys, time
import hpcfsdp
world = hpcfsdp.init("cpu")
world.comm.Barrier()
open(f"ready-{{world.rank}}", "w").close()
if world.rank == 1:
    {action}
world.comm.Barrier()  # the others wait here for the one that failed
"""


def started(start, tmp_path, action):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT.format(action=action))
    return start(script, ranks=3)


@pytest.mark.parametrize(
    ("action", "text"),
    [
        ("raise ZeroDivisionError('on purpose')", "ZeroDivisionError: on purpose"),
        ("raise KeyboardInterrupt", "\nKeyboardInterrupt\n"),
    ],
)
def test_an_uncaught_exception_on_one_rank_ends_all_with_its_traceback(start, tmp_path, action, text):
    job = started(start, tmp_path, action).wait(20)
    assert job.code != 0
    assert job.stderr.count(text) == 1
    assert "hpcfsdp: rank 1 of 3 on " in job.stderr


def test_a_killed_rank_ends_the_job_and_leaves_no_process(start, tmp_path):
    job = started(start, tmp_path, "time.sleep(60)")
    job.wait_for(lambda: len(list(tmp_path.glob("ready-*"))) == 3)
    family = psutil.Process(job.process.pid).children(recursive=True)
    job.ranks()[0].kill()
    began = time.monotonic()
    job.wait(20)
    assert job.code != 0
    assert time.monotonic() - began < 20
    alive = [p for p in family if p.is_running() and p.status() != psutil.STATUS_ZOMBIE]
    assert not alive


def test_a_plain_python_process_leaves_no_shared_memory(start, tmp_path):
    script = tmp_path / "alone.py"
    script.write_text("import hpcfsdp; print(hpcfsdp.init('cpu').size); hpcfsdp.finalize()")
    job = start(script).wait()  # the fixture looks into /dev/shm
    assert (job.code, job.stdout) == (0, "1\n"), job.stderr


def test_a_launcher_that_the_mpi_library_does_not_hear_is_explained(start, tmp_path):
    script = tmp_path / "unheard.py"
    script.write_text("import hpcfsdp; hpcfsdp.init('cpu')")
    job = start(script, environ={"SLURM_STEP_NUM_TASKS": "4"}).wait()
    assert job.code != 0
    assert "SLURM_STEP_NUM_TASKS=4" in job.stderr
    assert "--mpi=pmix" in job.stderr
