"""A training that is disturbed again and again at random moments: it ends as if nothing had happened."""

import json
import random
import shutil
import subprocess
import sys
import time
from collections import defaultdict

import h5py
import numpy as np
import pytest

from hpcfsdp.checkpoint import checkpoint_files
from tests.slurm.batch import train_steps
from tests.slurm.conftest import MPICH, ROOT

BATCH = 12
SHAPE = "--device cpu --model.layers 1 --model.width 128 --model.heads 2 --model.context 16 --data.paths words.txt"
KINDS = ("signal", "requeue", "scancel", "rank", "slurmstepd")
MOMENTS = ("step", "save")
TWO_NODES = (2, 1)
"""Nodes, and ranks on each."""


def arguments(run_dir, steps):
    rules = f"--train.steps {steps} --train.batch {BATCH} --checkpoint.every 4 --checkpoint.keep_last 3"
    return [*SHAPE.split(), *rules.split(), "--train.log_every", "1", "--run_dir", run_dir]


class Rounds:
    """A job that is disturbed, and started again."""

    def __init__(self, cluster, submit, folder, steps, seed):
        self.cluster, self.submit, self.folder, self.steps = cluster, submit, folder, steps
        self.random, self.run = random.Random(seed), folder / "run"
        self.half_saved = 0
        """Saves that were killed half-way."""

    def start(self, nodes, ranks_per_node):
        options = [f"--nodes={nodes}", f"--ntasks-per-node={ranks_per_node}"]
        # The wait after the death of a rank makes up much of a round.
        edit = lambda text: text.replace("--wait=6 ", "--wait=2 ")  # noqa: E731
        self.nodes, self.world = nodes, nodes * ranks_per_node
        training = ["recorded_train.py", "train", *arguments("run", self.steps)]
        self.job = self.submit("many-nodes.sbatch", options, training, edit=edit)

    def disturb(self, kind, moment):
        """One round; afterwards nothing of the job runs, and it is in the queue or has to be submitted anew."""
        job, before = self.job, train_steps(self.run)
        job.wait_for(lambda: train_steps(self.run) > 0 and len(job.ranks()) == self.world)
        # Fewer at first: the training begins with the last checkpoint.
        job.wait_for(lambda: train_steps(self.run) != before)
        ranks = list(job.ranks().values())
        victim = self.random.choice(ranks)
        wanted = train_steps(self.run) + self.random.randint(1, 10)
        job.wait_for(lambda: train_steps(self.run) >= wanted)
        if moment == "save":
            self.stop_in_a_save(victim)
        else:
            time.sleep(self.random.uniform(0, 0.05))
        if kind == "signal":
            self.cluster.run("scancel", "--signal=USR2", job.id)
        elif kind == "requeue":
            self.cluster.run("scontrol", "requeue", job.id)
        elif kind == "scancel":
            self.cluster.run("scancel", job.id)
        elif kind == "rank":
            victim.kill()
        else:
            victim.parent().kill()
        if victim.is_running():
            victim.resume()
        alone = kind == "slurmstepd" and self.nodes == 1
        if alone:  # srun hears of no end any more
            job.wait_for(lambda: not job.ranks())
            self.cluster.run("scancel", job.id)
        job.wait_for(lambda: not self.cluster.ranks() and job.state not in ("RUNNING", "COMPLETING"))
        if kind == "rank" and moment == "save":
            self.half_saved += bool(self.partial_files())
        expected = "CANCELLED" if alone else {"scancel": "CANCELLED", "rank": "FAILED"}.get(kind, "PENDING")
        assert job.state == expected, f"{kind} in a {moment}: {job.state}\n{job.log[-3000:]}"

    def start_again(self, kind):
        if kind == "scancel":
            self.start(*TWO_NODES)
            return
        if kind == "rank":
            self.cluster.run("scontrol", "requeue", self.job.id)
        self.job.start_again()

    def partial_files(self):
        return list((self.run / "checkpoints").glob(".*.partial"))

    def stop_in_a_save(self, victim):
        """Hold a rank while a checkpoint is unfinished."""
        until = time.monotonic() + 60
        while time.monotonic() < until:
            if self.partial_files():
                victim.suspend()
                time.sleep(0.05)  # without this rank the others cannot commit it
                if self.partial_files():
                    return
                victim.resume()
        pytest.fail("no save was caught half-way")

    def finish(self):
        assert self.job.wait(timeout=240) == "COMPLETED", self.job.log[-3000:]


def verify(folder):
    """Every checkpoint that is there has its checksums, and there is one."""
    assert checkpoint_files(folder)
    command = [sys.executable, "-m", "hpcfsdp", "verify", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def metrics(run_dir):
    records = map(json.loads, (run_dir / "metrics.jsonl").read_text().splitlines())
    return [record for record in records if record["kind"] == "train"]


def tensors(path):
    found = {}

    def add(name, item):
        if isinstance(item, h5py.Dataset):
            found[item.name] = item[()]

    with h5py.File(path) as file:
        for part in ("model", "optim/state"):
            file[part].visititems(add)
    return found


def check_history(folder, steps):
    """Each step is in the metrics once, in order, with the samples of the run that did it: each sample once."""
    records = metrics(folder / "run")
    assert [record["step"] for record in records] == list(range(1, steps + 1))
    taken, times = defaultdict(lambda: defaultdict(list)), defaultdict(list)
    for path in folder.glob("samples-*.jsonl"):
        for record in map(json.loads, path.read_text().splitlines()):
            taken[record["step"]][tuple(record["run"])] += record["samples"]
            times[tuple(record["run"])].append(record["time"])
    begun = {run: min(found) for run, found in times.items()}
    read = []
    for record in records:
        step = record["step"]
        run = max(taken[step], key=begun.get)  # earlier ones were ended before they saved it
        assert len(taken[step][run]) == BATCH, (step, run)
        read += taken[step][run]
        assert record["restart"] == run[1], (step, run)
    assert len(set(read)) == len(read), "no sample twice: an epoch is longer than the run"
    again = sum(len(runs) - 1 for runs in taken.values())
    return sorted(begun, key=begun.get), again


def check_logs(folder, runs):
    log = (folder / "log").read_text()
    places = [log.index(f"job: job {job}, restart {restart}\n") for job, restart in runs]
    assert places == sorted(places), "the log was begun anew, or runs are missing"
    entries = map(json.loads, (folder / "run/logs/rank-0000.jsonl").read_text().splitlines())
    restarts = [entry["restart"] for entry in entries if entry["message"].startswith("job ")]
    assert restarts == [restart for _, restart in runs]


@pytest.fixture
def undisturbed(srun, job_folder):
    """Train without a break on two nodes, in another folder: a function of the number of steps."""
    (job_folder / "words.txt").write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    shutil.copy(ROOT / "tests/slurm/recorded_train.py", job_folder)

    def train(steps):
        done = srun("-N2 -n2", "-m", "hpcfsdp", "train", *arguments("undisturbed", steps), python=MPICH, cwd=job_folder)
        assert done.wait(240).code == 0, done.stderr
        return job_folder / "undisturbed"

    return train


def check_end(folder, steps, expected):
    """Bit for bit the undisturbed run."""
    losses = [[record["loss"] for record in metrics(run_dir)] for run_dir in (folder / "run", expected)]
    assert losses[0] == losses[1]
    ours, theirs = (tensors(run_dir / f"checkpoints/step-{steps:08}.h5") for run_dir in (folder / "run", expected))
    assert ours.keys() == theirs.keys()
    assert len(ours) > 10
    for name, value in theirs.items():
        assert np.array_equal(ours[name], value), name


def disturbed(cluster, submit, folder, steps, rounds, seed):
    """Train in so many rounds on two nodes; the runs of the job."""
    training = Rounds(cluster, submit, folder, steps, seed)
    training.start(*TWO_NODES)
    for kind, moment in rounds:
        training.disturb(kind, moment)
        verify(folder / "run/checkpoints")
        training.start_again(kind)
    training.finish()
    verify(folder / "run/checkpoints")
    runs, again = check_history(folder, steps)
    assert len(runs) == len(rounds) + 1
    check_logs(folder, runs)
    return training, again


@pytest.mark.slow
@pytest.mark.timeout(400)
def test_a_training_survives_each_kind_of_disturbance(cluster, submit, undisturbed, job_folder):
    steps, rounds = 200, list(zip(KINDS, ("save", "step", "save", "save", "step"), strict=True))
    random.Random(1).shuffle(rounds)
    expected = undisturbed(steps)
    training, again = disturbed(cluster, submit, job_folder, steps, rounds, seed=1)
    assert training.half_saved == 1
    assert again > 0  # steps after the last checkpoint of a killed rank
    check_end(job_folder, steps, expected)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_disturbances_in_a_row_change_nothing(cluster, submit, undisturbed, job_folder):
    steps, seed = 900, 20
    draw = random.Random(seed)
    rounds = [(KINDS[number % len(KINDS)], draw.choice(MOMENTS)) for number in range(20)]
    draw.shuffle(rounds)
    expected = undisturbed(steps)
    disturbed(cluster, submit, job_folder, steps, rounds, seed)
    check_end(job_folder, steps, expected)


@pytest.mark.slow
@pytest.mark.timeout(1500)
def test_twenty_disturbances_each_followed_by_another_number_of_ranks(cluster, submit, undisturbed, job_folder):
    steps, seed = 900, 21
    draw = random.Random(seed)
    expected = undisturbed(steps)
    training = Rounds(cluster, submit, job_folder, steps, seed)
    worlds = [(1, 1), (2, 1), (2, 2), (1, 2)]
    for number in range(20):
        training.start(*worlds[number % len(worlds)])
        kind = draw.choice(KINDS)
        training.disturb(kind, draw.choice(MOMENTS))
        verify(job_folder / "run/checkpoints")
        if training.job.state == "PENDING":
            cluster.run("scancel", training.job.id)
    training.start(*TWO_NODES)
    training.finish()
    verify(job_folder / "run/checkpoints")
    runs, _ = check_history(job_folder, steps)
    check_logs(job_folder, runs)
    ours, theirs = ([record["loss"] for record in metrics(run_dir)] for run_dir in (job_folder / "run", expected))
    np.testing.assert_allclose(ours, theirs, rtol=0.02)  # sums of other orders
