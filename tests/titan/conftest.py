"""torchtitan's trainer with hpcfsdp's ``fully_shard``, in the environment of its own that ``make test-titan`` makes."""

from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.cli.conftest import ROOT, Job

PROGRAM = Path(__file__).with_name("program.py")
LAUNCHERS = {"torch": "torch.distributed.run", "ours": "hpcfsdp.run"}
MADE_BY = {"torch": "torch.distributed.fsdp", "ours": "hpcfsdp.api.fsdp_module"}


@pytest.fixture(scope="module")
def train(tmp_path_factory):
    """Do runs one after another in one job, by torch's FSDP2 or by hpcfsdp's; return their metrics by folder and step.

    Arguments of a run: see program.py. The folder is one for all jobs of a module.
    """
    if find_spec("torchtitan") is None:
        pytest.skip("torchtitan is not installed: make test-titan")
    folder = tmp_path_factory.mktemp("titan")

    def train_all(by, ranks, runs):
        options = ["--standalone", "--nproc-per-node", ranks] if by == "torch" else []
        command = ["-m", LAUNCHERS[by], *options, PROGRAM, *runs]
        job = Job(command, ranks if by == "ours" else 0, folder, {"PYTHONPATH": str(ROOT)}).wait(900)
        assert job.code == 0, job.stdout + job.stderr
        metrics = {run.split()[0].removeprefix(f"{by}/"): {} for run in runs}
        for line in job.stdout.splitlines():
            run, step, *values = line.split()
            metrics[run.removeprefix(f"{by}/")][int(step)] = values if step == "0" else [*map(float, values)]
        makers = {name for steps in metrics.values() for name in steps.pop(0)}
        assert ranks == 1 or makers == {MADE_BY[by]}
        return metrics

    train_all.folder = folder
    return train_all
