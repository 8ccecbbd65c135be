import os
import sys
from types import ModuleType, SimpleNamespace

import pytest

from hpcfsdp import env
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch import job
from hpcfsdp.launch.topology import Topology

LAUNCHER_VARIABLES = ("OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS")


@pytest.fixture
def mpi(monkeypatch):
    """``mpi(size)``: an mpi4py whose world has so many ranks; no launcher started this process."""
    for name in LAUNCHER_VARIABLES:
        monkeypatch.delenv(name, raising=False)

    def make(size, finalized=False, initialized=True):
        package = ModuleType("mpi4py")
        package.MPI = SimpleNamespace(
            COMM_WORLD=SimpleNamespace(size=size),
            Is_finalized=lambda: finalized,
            Is_initialized=lambda: initialized,
            Get_library_version=lambda: "MPICH Version: 4.2\nMPICH Release date: then\n\x00",
        )
        monkeypatch.setitem(sys.modules, "mpi4py", package)
        return package.MPI

    return make


def test_a_process_that_no_launcher_started_is_a_world_of_one(mpi):
    library = mpi(1)
    assert job.load_mpi() is library


@pytest.mark.parametrize("variable", LAUNCHER_VARIABLES)
def test_a_launcher_that_the_mpi_library_does_not_detect_is_an_error(mpi, monkeypatch, variable):
    mpi(1)
    monkeypatch.setenv(variable, "4")
    with pytest.raises(LaunchError) as caught:
        job.load_mpi()
    assert str(caught.value) == (
        f"the launcher started 4 processes ({variable}=4), but the MPI library that mpi4py loaded (MPICH Version: 4.2) "
        "does not detect it: every process would be rank 0 of 1. Start with that library's own mpirun, choose its "
        "plug-in (srun --mpi=pmix or --mpi=pmi2), or install mpi4py for the launcher's MPI"
    )
    assert caught.value.exit_code == 3


def test_a_launcher_that_the_mpi_library_detects_is_no_error(mpi, monkeypatch):
    library = mpi(4)
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "4")
    assert job.load_mpi() is library


def test_mpi_that_was_kept_from_starting_is_an_error(mpi):
    mpi(1, initialized=False)
    with pytest.raises(LaunchError, match=r"kept from starting .*__main__.*MPI\.Init_thread\(\)"):
        job.load_mpi()


def test_a_launcher_of_one_process_is_fine(mpi, monkeypatch):
    library = mpi(1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "1")
    assert job.load_mpi() is library


def test_mpirun_inside_of_a_larger_allocation_goes_by_its_own_size(mpi, monkeypatch):
    library = mpi(1)
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "1")
    assert job.load_mpi() is library


ALLOCATION = {"SLURM_JOB_ID": "7", "SLURM_NTASKS": "8", "SLURM_NNODES": "2"}


@pytest.mark.parametrize(
    ("environ", "idle"),
    [
        ({}, 0),
        (ALLOCATION, 7),
        (ALLOCATION | {"SLURM_NTASKS": ""}, 1),
        (ALLOCATION | {"SLURM_NTASKS": "1", "SLURM_NNODES": "1"}, 0),
        (ALLOCATION | {"SLURM_STEP_NUM_TASKS": "1"}, 7),  # an interactive step: a shell
        (ALLOCATION | {"SLURM_STEP_NUM_TASKS": "8"}, 0),
        (ALLOCATION | {"OMPI_COMM_WORLD_SIZE": "1"}, 0),  # mpirun -n 1
        ({"SLURM_NTASKS": "8"}, 0),
    ],
)
def test_a_process_alone_in_an_allocation_of_several_tasks_is_noticed(mpi, monkeypatch, environ, idle):
    mpi(1)  # no launcher
    for name in ALLOCATION:
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert env.idle_tasks() == idle
    if idle:
        with pytest.raises(LaunchError, match=rf"SLURM's job 7, which has {idle + 1} tasks, but not in a step of it"):
            job.check_step()
    else:
        job.check_step()


def test_mpi_cannot_start_again_after_its_end(mpi):
    mpi(1, finalized=True)
    with pytest.raises(LaunchError) as caught:
        job.load_mpi()
    assert str(caught.value) == (
        "MPI has been finalised in this process and cannot start again; call hpcfsdp.init() earlier"
    )


@pytest.mark.parametrize(("given", "local_rank"), [(None, "1"), (5, "5")])
def test_local_rank_may_be_the_number_of_a_device(monkeypatch, given, local_rank):
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    monkeypatch.setattr(env, "_exported", {})
    topology = Topology.regular(2, 2)
    job.Job(SimpleNamespace(rank=3), topology).export(topology, ("n1", 7), given)
    assert [os.environ[name] for name in ("RANK", "LOCAL_RANK", "LOCAL_WORLD_SIZE")] == ["3", local_rank, "2"]


CRAY, GTL, ABI = b"\0libmpi_gnu_123.so.12\0", b"libmpi_gtl_hsa.so.0\0", b"\0libmpi.so.12\0libc.so.6\0"


@pytest.mark.parametrize(
    ("needed", "environ", "outcome"),
    [
        (CRAY, {}, "raises"),
        (b"\0libmpi_cray.so.12\0", {}, "raises"),
        (CRAY + GTL, {}, "passes"),  # the compiler of Cray links it
        (CRAY, {"LD_PRELOAD": "/opt/cray/pe/lib64/libmpi_gtl_hsa.so"}, "passes"),
        (CRAY, {"MPICH_GPU_SUPPORT_ENABLED": "0"}, "passes"),
        (ABI, {}, "passes"),  # any MPICH
        (ABI, {"CRAY_MPICH_VERSION": "8.1.30"}, "warns"),
        (None, {"CRAY_MPICH_VERSION": "8.1.30"}, "warns"),
        (None, {}, "passes"),
    ],
)
def test_mpi_of_cray_that_would_end_the_process_as_it_starts(tmp_path, monkeypatch, needed, environ, outcome):
    for name in ("LD_PRELOAD", "CRAY_MPICH_VERSION", "CRAY_MPICH_DIR"):
        monkeypatch.delenv(name, raising=False)
    for name, value in ({"MPICH_GPU_SUPPORT_ENABLED": "1"} | environ).items():
        monkeypatch.setenv(name, value)
    monkeypatch.delitem(sys.modules, "mpi4py.MPI", raising=False)
    extension = tmp_path / "MPI.so"
    if needed is not None:
        extension.write_bytes(b"\x7fELF" + needed)
    monkeypatch.setattr(job.importlib.util, "find_spec", lambda name: SimpleNamespace(origin=str(extension)))
    if outcome == "raises":
        with pytest.raises(LaunchError, match=r"GTL library is not linked.*export MPICH_GPU_SUPPORT_ENABLED=0"):
            job.load_mpi()
    elif outcome == "warns":
        with pytest.warns(RuntimeWarning, match="where mpi4py loads Cray's MPI: MPICH_GPU_SUPPORT_ENABLED=1"):
            job.check_gtl()
    else:
        job.check_gtl()


def test_mpi_that_has_started_is_not_looked_at(mpi, monkeypatch):
    library = mpi(1)
    monkeypatch.setenv("MPICH_GPU_SUPPORT_ENABLED", "1")
    monkeypatch.setitem(sys.modules, "mpi4py.MPI", library)
    monkeypatch.setattr(job.importlib.util, "find_spec", lambda name: pytest.fail("looked"))
    job.check_gtl()
