"""Ranks, and a node's daemon, that are lost from a job: jobs/resilient.sbatch."""

import os

import psutil
import pytest

from tests.slurm.batch import train_steps
from tests.slurm.conftest import ROOT, TINY


def allow_root(script):
    allowed = "export OMPI_ALLOW_RUN_AS_ROOT=1 OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=1\n"
    return script.replace("messages=$(mktemp)", f"{allowed}messages=$(mktemp)")


@pytest.fixture
def resilient(submit, job_folder):
    """Submit a training on two ranks of the first node; those of the second are spares. Open MPI 5 starts it."""
    (job_folder / ".venv").unlink()
    (job_folder / ".venv").symlink_to(ROOT / ".venv")

    def begin(steps):
        arguments = ["-m", "hpcfsdp", "train", *TINY, "--run_dir", "run", "--resilience.spares", "2"]
        arguments += ["--train.steps", str(steps), "--checkpoint.every", "2", "--data.paths", __file__]
        arguments += ["--data.held_out", "0.4"]
        return submit("resilient.sbatch", ["--nodes=2", "--ntasks-per-node=2"], arguments, edit=allow_root)

    return begin


def of_job(job, name):
    """Processes of the job with a name, by node."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.name() == name and process.environ().get("SLURM_JOB_ID") == job.id:
                found.append(process)
        except psutil.Error:
            continue
    return found


def world_ranks(job):
    """The processes that train: their rank among all is less than two."""
    found = [(int(rank.environ()["OMPI_COMM_WORLD_RANK"]), rank) for rank in of_job(job, "python")]
    return [process for rank, process in found if rank < 2]


def test_spares_of_another_node_take_the_places_of_lost_ranks(resilient, job_folder):
    job = resilient(60)
    job.wait_for(lambda: train_steps(job_folder / "run") >= 8)
    for process in world_ranks(job):
        process.kill()
    assert job.wait() == "COMPLETED", job.log
    assert "going on with 2 rank(s) after loss 1 of this job" in job.log
    assert "step: 60 of 60" in job.log
    assert job.field("Restarts") == "0"


@pytest.mark.slow
def test_a_job_whose_launcher_gives_up_a_node_is_requeued_and_goes_on(resilient, job_folder):
    job = resilient(200)
    job.wait_for(lambda: train_steps(job_folder / "run") >= 8)
    for process in of_job(job, "prted"):
        os.kill(process.pid, 9)
    job.start_again()
    assert job.wait() == "COMPLETED", job.log
    assert job.field("Restarts") == "1"
    assert f"lost too much to go on: requeueing job {job.id}" in job.log
    assert "step: 200 of 200" in job.log
