"""Programs whose backward waits for other ranks: signals, time limits and errors of hooks reach ``loss.backward()``."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks(1)

SCRIPT = """
import os, signal, sys, time, torch
from tests.accelerator import simulated
import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel

case, threads = sys.argv[1], sys.argv[2] == "threads"
world = hpcfsdp.init("sim", timeout_s=8 if case == "late" else 300)
if threads:  # as a program may choose
    torch.autograd.set_multithreading_enabled(True)
torch.manual_seed(0)
model = FullyShardedDataParallel(torch.nn.Linear(9, 9).to("sim"))
x = torch.ones(2, 9, device="sim")
for _ in range(3):
    model(x).sum().backward()
y = model(x)
pids = world.comm.allgather(os.getpid())
began = time.monotonic()

def fail(grad):
    raise ValueError("a hook has failed")

if world.rank == 1:
    if case == "interrupt":
        time.sleep(1)
        os.kill(pids[0], signal.SIGINT)
    if case in ("interrupt", "late"):
        time.sleep(30)
    y.register_hook(fail)
try:
    y.sum().backward()
except BaseException as error:
    seconds = time.monotonic() - began
    print(f"rank {world.rank}|{type(error).__name__}: {error}|{seconds:.0f}", flush=True)
    if case == "uncaught" or world.rank == 0:
        raise
"""


def run(tmp_path, case, threads):
    script = tmp_path / "script.py"
    script.write_text(SCRIPT)
    launcher = ("OMPI_", "PMIX_", "PRTE_", "PMI_")  # of this test's own mpirun
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = Path(sys.executable).parent / "mpirun"
    command = [mpirun if mpirun.exists() else "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable, script]
    job = subprocess.run(
        [*command, case, threads],
        cwd=tmp_path,  # where a report about a hang goes
        env={**environ, **allowed, "PYTHONPATH": str(Path(__file__).parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    found = {}
    for line in job.stdout.splitlines():
        who, error, seconds = line.split("|")
        found[who] = error, int(seconds)
    return job, found


def test_an_interrupt_ends_a_wait_for_another_rank(tmp_path):
    job, found = run(tmp_path, "interrupt", "one thread")
    assert found["rank 0"][0] == "KeyboardInterrupt: ", job.stderr
    assert found["rank 0"][1] < 25, "rank 1 comes after 30 s"
    assert (job.returncode, job.stderr.count("\nKeyboardInterrupt\n")) == (130, 1)


def test_the_time_limit_of_a_wait_reaches_the_program(tmp_path):
    job, found = run(tmp_path, "late", "threads")
    assert "CommunicationError" in found["rank 0"][0], job.stderr
    assert "waited 8 s for rank(s) 1" in found["rank 0"][0]
    assert job.returncode != 0


@pytest.mark.parametrize(
    ("case", "threads"), [("caught", "one thread"), ("caught", "threads"), ("uncaught", "one thread")]
)
def test_an_error_in_a_hook_reaches_the_program_and_ends_the_others(tmp_path, case, threads):
    job, found = run(tmp_path, case, threads)
    assert found["rank 1"][0] == "ValueError: a hook has failed", job.stderr
    if case == "caught":
        assert "rank(s) 1 left the program without taking part" in found["rank 0"][0], job.stderr
    else:
        assert "rank 1 of 2" in job.stderr
        assert "ValueError: a hook has failed" in job.stderr
    assert job.returncode != 0
