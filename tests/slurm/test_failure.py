"""A rank that fails under srun: the job ends with an exit code, and leaves no process."""

import pytest

SCRIPT = """
import os, signal
import hpcfsdp

world = hpcfsdp.init("cpu")
world.comm.Barrier()
if world.rank == 1:
    {action}
world.comm.Barrier()  # the others wait here
"""


@pytest.mark.parametrize(
    ("options", "action"),
    [
        ("", "raise ZeroDivisionError('on purpose')"),  # MPI_Abort reaches srun through PMI2
        # Only srun sees that: without an option it waits on.
        pytest.param("--wait=2", "os.kill(os.getpid(), signal.SIGKILL)", marks=pytest.mark.slow),
        ("--kill-on-bad-exit", "os.kill(os.getpid(), signal.SIGKILL)"),
        pytest.param("--wait=2", "os._exit(7)", marks=pytest.mark.slow),
    ],
    ids=["raised", "killed, --wait", "killed, --kill-on-bad-exit", "left"],
)
def test_a_rank_that_fails_ends_the_others(srun, tmp_path, options, action):
    (tmp_path / "script.py").write_text(SCRIPT.format(action=action))
    step = srun(f"-N2 -n4 {options}", "script.py").wait()  # the fixture checks for remaining processes
    assert step.code != 0
    if "raise" in action:
        assert "hpcfsdp: rank 1 of 4 on " in step.stderr
        assert step.stderr.count("ZeroDivisionError: on purpose") == 1
