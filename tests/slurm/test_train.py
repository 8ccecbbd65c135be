"""Training on two nodes: resume, and signals."""

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
    assert f"stopped after step {last}: signal 15 (SIGTERM)" in step.stderr
