"""Commands run as users run them: in processes of their own, also under mpirun."""

import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path
from types import SimpleNamespace

import psutil
import pytest

from hpcfsdp.cli.main import main
from tests.preloaded import Server

ROOT = Path(__file__).resolve().parents[2]
TINY = "--device cpu --model.layers 1 --model.width 16 --model.heads 2 --model.context 16 --train.log_every 1".split()


class Job:
    """A command in a new session. None of its processes outlives the test.

    Args:
        folder: where mpirun keeps files of the job; by default where it keeps those of all jobs, by its process number,
            so that it fails where a job of that number was killed and could not clean up.
        preloaded: the server of processes that begin with torch loaded, if ranks may be such.
        launcher: further arguments of mpirun.
    """

    def __init__(self, arguments, ranks, cwd, environ, folder=None, preloaded=None, launcher=()):
        allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMP_NUM_THREADS": "1"}
        if ranks:
            allowed["OMPI_MCA_btl"] = "^ofi"  # libfabric sleeps for a second where /proc/cpuinfo tells no frequency
        if folder:
            allowed["PRTE_MCA_prte_tmpdir_base"] = str(folder)
        environ = {**os.environ, **allowed, **(environ or {})}
        arguments = [*map(str, arguments)]
        self.command = (preloaded and preloaded.command(arguments, environ)) or [sys.executable, *arguments]
        if ranks:
            mpirun = Path(sys.executable).parent / "mpirun"
            command = str(mpirun) if mpirun.exists() else shutil.which("mpirun")
            self.command = [command, *launcher, "--map-by", ":OVERSUBSCRIBE", "-n", str(ranks), *self.command]
        self.process = subprocess.Popen(
            self.command,
            cwd=cwd,
            env=environ,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        self.stdout = self.stderr = ""

    def family(self):
        """All running processes that the job has started, in no order."""
        return psutil.Process(self.process.pid).children(recursive=True)

    def ranks(self):
        """The processes of the ranks, and processes that these have started, in no order."""
        return [process for process in self.family() if command_of(process)[:1] == [sys.executable]]

    def wait(self, timeout=120):
        try:
            self.stdout, self.stderr = self.process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            self.end()
            pytest.fail(f"{self.command} took over {timeout} s\n{self.stdout}\n{self.stderr}")
        return self

    def wait_for(self, condition, timeout=120):
        """Wait until `condition()` holds while the job runs."""
        until = time.monotonic() + timeout
        while not condition():
            if self.process.poll() is not None or time.monotonic() > until:
                self.end()
                pytest.fail(f"{self.command} ended or took over {timeout} s too early\n{self.stderr}")
            time.sleep(0.05)

    def end(self):
        if self.process.poll() is None:
            family = self.family()
            self.process.send_signal(signal.SIGTERM)  # mpirun then ends its ranks and cleans up
            _, alive = psutil.wait_procs([psutil.Process(self.process.pid), *family], timeout=10)
            for process in alive:
                process.kill()
        self.stdout, self.stderr = self.process.communicate()

    @property
    def code(self):
        return self.process.returncode


def command_of(process):
    """The command line of a process, empty if it has ended meanwhile."""
    try:
        return process.cmdline()
    except psutil.Error:
        return []


def survivors(processes, timeout=60):
    """Processes that still run after a while. A killed process may take a moment to end on busy cores."""
    until = time.monotonic() + timeout
    while (alive := [process for process in processes if _runs(process)]) and time.monotonic() < until:
        time.sleep(0.05)
    return alive


def _runs(process):
    with contextlib.suppress(psutil.Error):  # it has ended meanwhile
        return process.is_running() and process.status() != psutil.STATUS_ZOMBIE
    return False


def mapped(name):
    """Whether a process, of another job on this machine, uses a segment of /dev/shm."""
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):  # it has ended, or belongs to another user
            if f"/dev/shm/{name}" in maps.read_text():
                return True
    return not Path("/dev/shm", name).exists()


@pytest.fixture(scope="session")
def preloaded():
    with tempfile.TemporaryDirectory(prefix="preloaded-") as folder:
        server = Server(folder)
        yield server
        server.close()


@pytest.fixture
def start(request, tmp_path):
    """Start ``python arguments`` on so many ranks (0: without mpirun) in an empty folder.

    Processes begin with torch loaded, see tests/preloaded.py, but in tests with ``pytest.mark.fresh``.
    """
    jobs = []
    fresh = request.node.get_closest_marker("fresh")
    server = None if fresh else request.getfixturevalue("preloaded")
    launcher_files = tempfile.mkdtemp(prefix="mpirun-")

    def start_job(*arguments, ranks=0, cwd=tmp_path, environ=None, launcher=()):
        jobs.append(Job(arguments, ranks, cwd, environ, launcher_files, server, launcher))
        return jobs[-1]

    before = set(os.listdir("/dev/shm"))
    yield start_job
    for job in jobs:
        if job.code is None:
            job.end()
    shutil.rmtree(launcher_files, ignore_errors=True)
    # Jobs of other workers of pytest make and remove segments, too: these disappear after a while.
    until = time.monotonic() + 20
    while left := {name for name in set(os.listdir("/dev/shm")) - before if not mapped(name)}:
        assert time.monotonic() < until, f"shared memory was left behind: {left}"
        time.sleep(0.1)


@pytest.fixture
def hpcfsdp(start):
    """Run ``hpcfsdp arguments`` to its end."""

    def run(*arguments, **options):
        return start("-m", "hpcfsdp", *arguments, **options).wait()

    return run


@pytest.fixture
def command(tmp_path, monkeypatch, capsys):
    """Run ``hpcfsdp arguments`` in this process, where a new process would show nothing else."""
    monkeypatch.chdir(tmp_path)

    def run(*arguments):
        capsys.readouterr()
        code = main([*map(str, arguments)])
        printed = capsys.readouterr()
        return SimpleNamespace(code=code, stdout=printed.out, stderr=printed.err)

    return run


@pytest.fixture
def no_mpi(tmp_path, monkeypatch):
    """MPI and torch that end a process when it loads them."""
    folder = tmp_path / "forbidden"
    folder.mkdir()
    for name in ("mpi4py", "torch"):
        (folder / f"{name}.py").write_text(f"raise SystemExit('{name} was loaded')")
    monkeypatch.setenv("PYTHONPATH", f"{folder}{os.pathsep}{ROOT}")


@pytest.fixture
def tiny(tmp_path):
    """Arguments of a short training in a folder with spaces in its name."""
    corpus = tmp_path / "some words.txt"
    corpus.write_bytes(b"the quick brown fox jumps over the lazy dog\n" * 40)
    run_dir = tmp_path / "a run"
    return [*TINY, "--data.paths", str(corpus), "--run_dir", str(run_dir), "--train.batch", "4"]


@pytest.fixture(scope="session")
def saved(tmp_path_factory):
    """A checkpoint of a small plain model with its optimizer."""
    import torch

    from hpcfsdp import checkpoint

    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Linear(4, 2))
    output = model(torch.ones(1, 3))
    model[1].register_buffer("counts", torch.arange(5))
    model.twin = model[0]
    optimizer = torch.optim.AdamW(model.parameters())
    output.sum().backward()
    optimizer.step()
    path = tmp_path_factory.mktemp("saved") / "step-00000007.h5"
    return checkpoint.save(path, model=model, optimizer=optimizer, step=7, extra={"note": "x"})
