"""The scripts of jobs/, submitted to two nodes."""

import json
import re

import pytest
import torch

from hpcfsdp import checkpoint
from tests.slurm.batch import train_steps
from tests.slurm.conftest import ROOT


def training(run_dir, steps, every=1000):
    """Arguments of jobs/train.py, which is what scripts run by default."""
    return ["jobs/train.py", "--run_dir", run_dir, "--steps", str(steps), "--every", str(every), "--batch", "8"]


def saved(run_dir):
    infos = [checkpoint.open_index(path).info for path in checkpoint.checkpoint_files(run_dir / "checkpoints")]
    return [(info.step, info.world_size) for info in infos]


def recorded_steps(run_dir):
    return [json.loads(line)["step"] for line in (run_dir / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.slow
def test_one_node(submit, job_folder):
    job = submit("one-node.sbatch", ["--ntasks-per-node=2"], training("run", 6, every=3))
    assert job.wait() == "COMPLETED", job.log
    assert saved(job_folder / "run") == [(3, 2), (6, 2)]
    assert job.field("NumNodes") == "1"


def test_many_nodes_with_a_copy_of_the_model_on_each_requeue_and_go_on(submit, cluster, job_folder):
    run = job_folder / "run"
    job = submit("many-nodes.sbatch", ["--ntasks-per-node=2"], [*training("run", 100), "--by_node"])
    job.wait_for(lambda: train_steps(run) >= 3)
    cluster.run("scancel", "--signal=USR2", job.id)  # as SLURM does some time before the end, for --signal=USR2@300
    job.start_again()
    assert job.wait() == "COMPLETED", job.log
    assert job.field("Restarts") == "1"
    assert f"checkpointed after a signal: requeueing job {job.id}" in job.log
    (stopped, ranks), last = saved(run)
    assert (ranks, last) == (4, (100, 4))
    assert stopped < 100
    assert recorded_steps(run) == list(range(1, 101)), "a step came twice, or never"


@pytest.mark.slow
def test_a_task_of_an_array_requeues_itself_and_no_other(submit, cluster, job_folder):
    runs = [job_folder / "runs/array" / task for task in "01"]
    options = ["--array=0-1", "--ntasks-per-node=1", "--output=log-%a"]
    job = submit("array.sbatch", options, ["jobs/train.py", "--steps", "100", "--batch", "8"])
    job.wait_for(lambda: all(train_steps(run) >= 3 for run in runs))
    cluster.run("scancel", "--signal=USR2", f"{job.id}_1")
    job.id = f"{job.id}_1"
    job.start_again()
    assert job.wait() == "COMPLETED", (job_folder / "log-1").read_text()
    array = job.id.removesuffix("_1")
    job.wait_for(lambda: job.field("JobState", f"{array}_0") == "COMPLETED")
    assert [job.field("Restarts", f"{array}_{task}") for task in "01"] == ["0", "1"]
    for run in runs:
        assert recorded_steps(run) == list(range(1, 101))
        assert saved(run)[-1] == (100, 1)
    losses = [(run / "metrics.jsonl").read_text().splitlines()[-1] for run in runs]
    assert json.loads(losses[0])["loss"] != json.loads(losses[1])["loss"]  # of other learning rates


@pytest.mark.slow
def test_inspect(submit, job_folder):
    model = torch.nn.Linear(3, 2)
    for step in (1, 2):
        checkpoint.save(job_folder / f"run/checkpoints/step-{step:08}.h5", model=model, step=step)
    job = submit("inspect.sbatch", arguments=["run"])
    assert job.wait() == "COMPLETED", job.log
    assert job.log.count("step-00000002.h5") >= 2, "listed, and verified"
    damaged = job_folder / "run/checkpoints/step-00000002.h5"
    with checkpoint.open(damaged) as file:
        value = file["model/weight"][:].numpy().tobytes()
    damaged.write_bytes(damaged.read_bytes().replace(value, bytes(len(value))))
    job = submit("inspect.sbatch", arguments=["run"])
    assert job.wait() == "FAILED", job.log
    assert job.field("ExitCode") == "4:0"
    job = submit("inspect.sbatch", ["--output=log-show"], ["show", damaged, "model/bias"])
    assert job.wait() == "COMPLETED"
    assert "bias" in (job_folder / "log-show").read_text()


@pytest.mark.slow
def test_scaling_prints_a_row_for_each_number_of_nodes(submit):
    def shorten(text):
        return text.replace("steps=50 warm_up=10", "steps=4 warm_up=1")

    job = submit("scaling.sbatch", ["--nodes=2", "--ntasks-per-node=1", "--exclusive"], edit=shorten)
    assert job.wait() == "COMPLETED", job.log
    rows = re.findall(r"^ +(\d+) +(\d+) +[\d.]+ +[\d.]+ +([\d.]+)%$", job.log, re.MULTILINE)
    assert [row[:2] for row in rows] == [("1", "1"), ("2", "2")], job.log
    assert rows[0][2] == "100.0"


@pytest.mark.slow
@pytest.mark.parametrize("script", ["one-node.sbatch", "many-nodes.sbatch"])
def test_a_missing_file_is_named(submit, job_folder, script):
    job = submit(script, ["--ntasks-per-node=1"], ["jobs/trian.py"])
    assert job.wait() == "FAILED"
    assert job.field("ExitCode") == "2:0"
    assert f"{job_folder} has no jobs/trian.py" in job.log


@pytest.mark.slow
def test_a_python_without_hpcfsdp_is_named(submit, job_folder):
    (job_folder / ".venv").unlink()
    other = job_folder / ".venv/bin/python"
    other.parent.mkdir(parents=True)
    other.write_text('#!/bin/sh\nexec python3 -I -S "$@"\n')
    other.chmod(0o755)
    job = submit("one-node.sbatch", ["--ntasks-per-node=1"])
    assert job.wait() == "FAILED"
    assert job.field("ExitCode") == "3:0"
    assert "python has no hpcfsdp: edit it or PATH in the script" in job.log


@pytest.mark.slow
def test_a_program_that_a_job_starts_without_srun_is_warned(cluster, job_folder, submit):
    (job_folder / "jobs/alone.sbatch").write_text(
        f"#!/bin/bash\n#SBATCH --nodes=2\n{job_folder}/.venv/bin/python {ROOT}/jobs/train.py --steps 1\n"
    )
    job = submit("alone.sbatch", ["--ntasks-per-node=2"])
    assert job.wait() == "COMPLETED", job.log
    assert "which has 4 tasks, but not in a step of it: it would train alone. Start it with srun" in job.log
