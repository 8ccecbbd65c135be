"""Ranks that are lost while others wait for their device: the group's collectives are aborted, and training goes on."""

import os
import re
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
from hpcfsdp.hang import lost

waits = sys.argv[1]

def train(world):
    torch.manual_seed(0)
    model = FullyShardedDataParallel(torch.nn.Linear(9, 9).to("sim"))
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    losses = []
    for step in range(8):
        loss = model(torch.ones(2, 9, device="sim")).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
        if step == 4 and lost.generation == 0:
            torch.accelerator.synchronize()
            if world.rank == 1:
                time.sleep(0.5)
                os.kill(os.getpid(), signal.SIGKILL)
            if waits == "host":
                torch.distributed.all_reduce(torch.ones(3, device="sim"))
                torch.accelerator.synchronize()  # in C code, which looks for no loss
    return [round(loss.item(), 6) for loss in losses]

found = hpcfsdp.resilient(train, spares=1, device="sim")
print("result", lost.generation, found, flush=True)
"""


@pytest.mark.parametrize("waits", ["host", "calls"])
def test_collectives_that_wait_for_a_lost_rank_are_aborted(tmp_path, waits):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ("OMPI_", "PMIX_", "PRTE_", "PMI_")  # of this test's own mpirun
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    mpirun = Path(sys.executable).parent / "mpirun"
    options = "--with-ft ulfm --map-by :OVERSUBSCRIBE -n 3".split()
    job = subprocess.run(
        [mpirun if mpirun.exists() else "mpirun", *options, sys.executable, "script.py", waits],
        cwd=tmp_path,
        env={**environ, **allowed, "PYTHONPATH": str(Path(__file__).resolve().parents[2])},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 0, job.stderr
    found = re.findall(r"^result (.*)$", job.stdout, re.MULTILINE)
    assert len(found) == 2, job.stderr
    assert len(set(found)) == 1
    assert found[0].startswith("1 [")
