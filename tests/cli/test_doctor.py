"""The doctor as users run it: alone, under mpirun, and where MPI or one rank fails."""

import json
import os

import pytest

from tests.cli.conftest import ROOT, survivors

REPLACED = """
from types import SimpleNamespace
rc = SimpleNamespace(initialize=True)
"""
REAL_EXCEPT_ON_RANK_1 = """
import os, sys, time
here = os.path.dirname(os.path.dirname(__file__))
sys.path.remove(here)
del sys.modules["mpi4py"]
if os.environ["OMPI_COMM_WORLD_RANK"] == "1":
    {action}
import mpi4py as real
sys.modules["mpi4py"] = real
"""


@pytest.fixture
def fake(tmp_path):
    """``fake(package, MPI)``: variables that make Python import this source as mpi4py."""

    def write(package, module=""):
        folder = tmp_path / "fake" / "mpi4py"
        folder.mkdir(parents=True)
        (folder / "__init__.py").write_text(package)
        (folder / "MPI.py").write_text(module)
        return {"PYTHONPATH": f"{folder.parent}{os.pathsep}{ROOT}"}

    return write


def levels(report):
    return {(finding["area"], finding["level"]) for finding in report["findings"]}


def of(report, area):
    return next(finding for finding in report["findings"] if finding["area"] == area)


def test_a_plain_process(hpcfsdp):
    done = hpcfsdp("doctor")
    assert (done.code, done.stderr) == (0, "")
    *lines, last = done.stdout.splitlines()
    assert {line.split()[0] for line in lines} <= {"ok", "note", "warning"}
    areas = [line.split()[1] for line in lines]
    wanted = ["python", "torch", "mpi4py", "h5py", "hdf5", "mpi", "nodes", "devices", "binding", "network", "memory"]
    assert [area for area in areas if area in wanted] == wanted
    assert lines[areas.index("mpi")].endswith(", one process")
    assert lines[-1].endswith("-> to measure: mpirun -n 2 python -m hpcfsdp doctor")
    assert last.endswith("ready to train")
    assert "\x1b" not in done.stdout


def test_two_ranks_give_one_report_with_bandwidth(hpcfsdp):
    done = hpcfsdp("doctor", "--json", ranks=2)
    assert done.code == 0, done.stderr
    report = json.loads(done.stdout)
    assert set(report) == {"findings", "facts", "ranks"}
    assert set(of(report, "mpi")) == {"area", "level", "what", "hint"}
    assert report["facts"]["world"] == {"rank": 0, "size": 2}
    assert [rank["rank"] for rank in report["ranks"]] == [0, 1]
    assert [rank["packages"] for rank in report["ranks"]] == [report["facts"]["packages"]] * 2
    assert report["facts"]["nodes"] == [[0, 1]]
    assert of(report, "memory")["what"].startswith("ranks share memory")
    measured = report["facts"]["bandwidth"]
    kinds = [f"{kind}{where}" for where in ("", " in shared memory") for kind in ("all-gather", "reduce-scatter")]
    assert list(measured) == kinds
    assert all(result["correct"] and result["seconds"] > 0 for result in measured.values())
    speeds = {name: result["gb_per_s"] for name, result in measured.items()}
    assert speeds.pop("all-gather in shared memory") is None  # it moves nothing
    assert all(speed > 0 for speed in speeds.values())
    links = report["facts"]["links"]
    assert links["between"] is None
    assert (links["within"]["ranks"], links["within"]["bytes"]) == (2, 8 << 20)
    assert links["within"]["latency_s"] > 0 and links["within"]["bytes_per_s"] > 0
    assert of(report, "links")["what"].startswith("within a node: ")


def test_a_problem_on_many_ranks_is_printed_once_in_plain_text_and_ends_all_with_3(hpcfsdp):
    done = hpcfsdp("doctor", ranks=2, environ={"MPI4PY_RC_THREAD_LEVEL": "single"})
    assert done.code == 3
    *lines, last = done.stdout.splitlines()
    (problem,) = [line for line in lines if line.startswith("problem")]
    assert problem.split()[1] == "mpi"
    assert "thread level single" in problem
    assert [line.endswith(", 2 ranks") for line in lines if line.startswith("ok       mpi ")] == [True]
    assert last.startswith("1 problem")
    assert "\x1b" not in done.stdout  # although mpirun gives its ranks terminals
    assert "hpcfsdp:" not in done.stderr


def test_help_needs_no_mpi(hpcfsdp, fake):
    done = hpcfsdp("doctor", "--help", environ=fake("raise SystemExit('MPI was loaded')"))
    assert done.code == 0, done.stderr
    assert "--timeout SECONDS" in done.stdout


@pytest.mark.parametrize("seconds", ["0", "nan", "inf"])
def test_a_wrong_time_limit_is_refused(command, seconds):
    done = command("doctor", "--timeout", seconds)
    assert (done.code, done.stdout) == (2, "")
    assert "--timeout must be a positive number" in done.stderr


def test_a_login_node_where_mpi_aborts(hpcfsdp, fake):
    abort = "import os, sys\nprint('no fabric here', file=sys.stderr, flush=True)\nos.abort()"
    done = hpcfsdp("doctor", "--json", environ=fake(REPLACED, abort))
    assert (done.code, done.stderr) == (3, "")
    report = json.loads(done.stdout)
    finding = of(report, "mpi")
    assert finding["what"] == ("initialising MPI ended the process (signal 6, SIGABRT); it printed: no fabric here")
    assert "login node" in finding["hint"]
    assert "srun -n 2 python -m hpcfsdp doctor" in finding["hint"]
    assert {("torch", "ok"), ("h5py", "ok")} <= levels(report)  # from a second child
    assert report["ranks"] == []


def test_a_hanging_mpi_is_reported_with_its_stack(hpcfsdp, fake):
    done = hpcfsdp("doctor", "--timeout", "3", environ=fake(REPLACED, "import time\ntime.sleep(1000)"))
    assert done.code == 3
    assert "initialising MPI gave no answer within 3 s" in done.stdout
    assert "MPI.py" in done.stdout  # where it hangs


def test_a_missing_mpi_library_is_reported_with_a_remedy(hpcfsdp, fake):
    environ = fake(REPLACED, "raise RuntimeError('cannot load MPI library\\nlibmpi.so.40: no such file')")
    done = hpcfsdp("doctor", environ=environ)
    assert (done.code, done.stderr) == (3, "")
    (line,) = [line for line in done.stdout.splitlines() if line.startswith("problem")]
    assert "cannot load MPI library libmpi.so.40: no such file -> load or install an MPI" in line


def test_ranks_that_mpi_does_not_know_print_one_report(start):
    environ = {"SLURM_STEP_NUM_TASKS": "4", "SLURM_JOB_ID": "7"}
    jobs = [start("-m", "hpcfsdp", "doctor", environ={**environ, "SLURM_PROCID": str(rank)}) for rank in range(2)]
    first, second = (job.wait() for job in jobs)
    assert (first.code, first.stderr) == (second.code, second.stderr) == (3, "")
    assert "the launcher started 4 processes (SLURM_STEP_NUM_TASKS=4)" in first.stdout
    assert "job 7" in first.stdout
    assert second.stdout == ""


@pytest.mark.parametrize(
    ("action", "failure"),
    [
        ("os.abort()", "initialising MPI ended the process (signal 6, SIGABRT)"),
        pytest.param(
            "from mpi4py import MPI; os.kill(os.getpid(), 11)",
            "initialising MPI ended the process (signal 11, SIGSEGV)",
            marks=pytest.mark.slow,
        ),
        ("time.sleep(1000)", "initialising MPI gave no answer within 8 s"),
    ],
    ids=["before MPI", "after MPI", "hangs"],
)
def test_a_failing_rank_is_named_and_rank_0_still_reports(start, fake, action, failure):
    environ = fake(REAL_EXCEPT_ON_RANK_1.format(action=action))
    job = start("-m", "hpcfsdp", "doctor", "--json", "--timeout", "8", ranks=2, environ=environ)
    job.wait_for(lambda: len(job.ranks()) >= 3)  # rank 0 with its child, and rank 1
    family = job.family()
    job.wait()
    assert job.code == 3
    assert f"hpcfsdp: rank 1 on {os.uname().nodename.split('.')[0]}: {failure}" in job.stderr
    finding = of(json.loads(job.stdout), "mpi")
    assert finding["level"] == "problem"
    assert "gave no answer within 8 s" in finding["what"]
    assert "other ranks" in finding["hint"]
    assert not survivors(family)


def test_ranks_end_at_once_with_one_report_when_mpi_aborts(hpcfsdp, fake):
    done = hpcfsdp("doctor", "--json", ranks=2, environ=fake(REPLACED, "import os\nos.abort()"))
    assert done.code == 3
    assert of(json.loads(done.stdout), "mpi")["level"] == "problem"
