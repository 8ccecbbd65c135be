"""A device that waits for another rank, while the main thread waits for the device in C code."""

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.ranks(1)

SCRIPT = """
import time, torch
from tests.accelerator import simulated
import hpcfsdp
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy

world = hpcfsdp.init("sim", run_dir="run")
calls = 0

class Layer(torch.nn.Linear):
    def forward(self, x):
        global calls
        calls += 1
        if calls > 12 and world.rank == 1:
            time.sleep(1000)
        torch.accelerator.synchronize()
        return super().forward(x)

torch.manual_seed(0)
layers = torch.nn.Sequential(*(Layer(9, 9) for _ in range(3)))
model = FullyShardedDataParallel(layers.to("sim"), auto_wrap_policy=ModuleWrapPolicy({Layer}))
x = torch.ones(2, 9, device="sim")
while True:
    model(x).sum().backward()
"""


def test_the_job_ends_with_a_report_about_the_queue_and_the_rank_that_has_not_come(tmp_path):
    (tmp_path / "script.py").write_text(SCRIPT)
    launcher = ("OMPI_", "PMIX_", "PRTE_", "PMI_")  # of this test's own mpirun
    environ = {name: value for name, value in os.environ.items() if not name.startswith(launcher)}
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "HPCFSDP_HANG_S": "5"}
    mpirun = Path(sys.executable).parent / "mpirun"
    root = str(Path(__file__).resolve().parents[2])
    job = subprocess.run(
        [mpirun if mpirun.exists() else "mpirun", "--map-by", ":OVERSUBSCRIBE", "-n", "2", sys.executable, "script.py"],
        cwd=tmp_path,
        env={**environ, **allowed, "PYTHONPATH": root},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert job.returncode == 76, job.stderr
    (path,) = (tmp_path / "run/hang").iterdir()
    text = path.read_text()
    assert re.search(r" has waited \d+ s for the gather stream of sim:0$", text.splitlines()[0])
    assert re.search(r"^rank 1: it sleeps in forward \(.*script\.py:\d+\)$", text, re.MULTILINE)
    assert "begin     all_gather_into_tensor of " in text
