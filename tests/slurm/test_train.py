"""Training on two nodes: resume, signals, and the job script that puts itself back into the queue."""

import time

from hpcfsdp.checkpoint import checkpoint_files, open_index
from tests.slurm.conftest import ROOT


def saved(run_dir):
    infos = [open_index(path).info for path in checkpoint_files(run_dir / "checkpoints")]
    return [(info.step, info.world_size) for info in infos]


def begun(run_dir):
    """Whether a few steps are done."""
    metrics = run_dir / "metrics.jsonl"
    return metrics.exists() and metrics.read_text().count("\n") >= 3


def test_the_quickstart_trains_on_two_nodes_and_resumes_on_other_ranks(srun, tmp_path):
    few = ["--run_dir", tmp_path / "run", "--eval.bytes", "4096", "--checkpoint.every", "0", "--device", "cpu"]
    quickstart = ["-m", "hpcfsdp", "train", ROOT / "jobs/quickstart.yaml", *few]
    first = srun("-N2 -n4", *quickstart, "--train.run_steps", "3").wait()
    assert first.code == 0, first.stderr
    assert "step: 3 of 4000\n" in first.stdout
    second = srun("-N2 -n3 --distribution=cyclic", *quickstart, "--train.run_steps", "2").wait()
    assert second.code == 0, second.stderr
    assert saved(tmp_path / "run") == [(3, 4), (5, 3)]


def test_sigterm_to_the_step_ends_it_with_a_checkpoint_and_75(srun, cluster, tmp_path, tiny):
    step = srun("-N2 -n4 --job-name=endless", "-m", "hpcfsdp", "train", *tiny, "--train.steps", "1000000")
    step.wait_for(lambda: begun(tmp_path / "run"))
    cluster.run("scancel", "--signal=TERM", "--name=endless")
    step.wait()
    assert step.code == 75, step.stderr
    last, ranks = saved(tmp_path / "run")[-1]
    assert ranks == 4
    assert f"stopped after step {last} by signal 15" in step.stderr


def test_the_job_script_requeues_itself_and_goes_on(cluster, job_folder, tiny):
    script = job_folder / "jobs/train.sbatch"
    text = script.read_text()
    script.write_text("".join(line for line in text.splitlines(keepends=True) if "--gpu" not in line))
    options = [
        "--parsable",
        "--ntasks-per-node=2",
        "--cpus-per-task=1",
        "--output=log",
        "--export=ALL,HPC_SRUN_MPI=pmi2",
    ]
    arguments = [*tiny, "--train.steps", "400", "--checkpoint.every", "0"]
    job = cluster.run("sbatch", *options, f"--chdir={job_folder}", script, *arguments, cwd=job_folder)

    def state(name="JobState"):
        fields = cluster.run("scontrol", "show", "job", job).split()
        return dict(pair.split("=", 1) for pair in fields if "=" in pair)[name]

    def wait_for(condition, timeout=120):
        until = time.monotonic() + timeout
        while not condition():
            assert time.monotonic() < until, f"{state()}\n{(job_folder / 'log').read_text()[-2000:]}"
            time.sleep(0.1)

    wait_for(lambda: begun(job_folder / "run"))
    cluster.run("scancel", "--signal=USR2", job)  # as SLURM does some time before the end, for --signal=USR2@300
    wait_for(lambda: state() == "PENDING")
    # SLURM would wait two minutes. Not at once: slurmd refuses credentials of the second in which the job was ended.
    cluster.run("scontrol", "update", f"JobId={job}", "StartTime=now+3")
    wait_for(lambda: state() not in ("PENDING", "CONFIGURING", "RUNNING", "COMPLETING"))
    log = (job_folder / "log").read_text()
    assert (state(), state("Restarts")) == ("COMPLETED", "1"), log
    assert f"checkpointed after a signal: requeueing job {job}" in log
    assert "checkpoint: loaded " in log
    assert [ranks for _, ranks in saved(job_folder / "run")] == [4, 4]
    assert saved(job_folder / "run")[-1][0] == 400
