import pytest

from hpcfsdp.doctor import findings, installed, rank_findings
from hpcfsdp.doctor.findings import Finding, exit_code, summary


def found(*levels):
    return [Finding("area", level, "what") for level in levels]


@pytest.mark.parametrize(
    ("levels", "code", "text"),
    [
        ([], 0, "all fine: ready to train"),
        (["ok", "ok"], 0, "all fine: ready to train"),
        (["ok", "note", "warning", "warning"], 0, "2 warnings, 1 note: ready to train"),
        (["ok", "problem", "note"], 3, "1 problem, 1 note: a training would break here"),
    ],
)
def test_only_problems_change_the_exit_code(levels, code, text):
    assert exit_code(found(*levels)) == code
    assert summary(found(*levels)) == text


CPU_TORCH = {
    **{"version": "2.13.0+cpu", "cuda": None, "rocm": None, "gpu_files": 0, "nccl": None},
    **{"accelerator": None, "devices": 0, "backend": None, "has_backend": False},
}
CUDA_TORCH = {
    **{"version": "2.13.0+cu130", "cuda": "13.0", "rocm": None, "gpu_files": 4, "nccl": "2.29.7"},
    **{"accelerator": "cuda", "devices": 4, "backend": "nccl", "has_backend": True},
}
OTHERS = {
    "xpu": {"accelerator": "xpu", "devices": 12, "backend": "xccl", "has_backend": True},
    "plug-in": {"accelerator": "npu", "devices": 8, "backend": "hccl", "has_backend": True},
}


def levels(findings):
    return [(finding.area, finding.level) for finding in findings]


@pytest.mark.parametrize(
    ("area", "version", "level"),
    [
        ("python", "3.9.18", "problem"),
        ("python", "3.10.0", "ok"),
        ("python", "3.14.0rc1", "note"),
        ("torch", "2.10.1+cu126", "problem"),
        ("torch", "2.11.0", "note"),
        ("torch", "2.13.0a0+git1234", "ok"),
        ("torch", "2.14.0", "note"),
        ("mpi4py", "3.1.6", "problem"),
        ("mpi4py", "4.0.0", "ok"),
        ("h5py", "3.9.0", "problem"),
        ("h5py", "3.11.0", "ok"),
    ],
)
def test_old_versions_are_problems_and_untested_ones_notes(area, version, level):
    finding = findings.judge_version(area, version)
    assert (finding.level, version in finding.what) == (level, True)
    assert bool(finding.hint) == (level != "ok")


def test_a_missing_or_broken_package_is_a_problem():
    missing = findings.judge_package("h5py", None)
    assert (missing.level, missing.hint) == ("problem", "pip install 'h5py>=3.11'")
    broken = findings.judge_package("torch", "2.13.0", "ImportError: libcudart.so.13")
    assert broken.level == "problem"
    assert "libcudart.so.13" in broken.what


def test_accelerators():
    assert levels(findings.judge_accelerator(CPU_TORCH)) == [("accel", "ok")]
    (finding,) = findings.judge_accelerator(CPU_TORCH | {"gpu_files": 2})
    assert (finding.level, "2 GPU(s)" in finding.what) == ("warning", True)
    built, backend = findings.judge_accelerator(CUDA_TORCH)
    assert built.what == "torch is built for CUDA 13.0, 4 GPU(s) in /dev; visible here: 4"
    assert backend.what == "process groups on 'cuda' use nccl"
    rocm = next(findings.judge_accelerator(CUDA_TORCH | {"cuda": None, "rocm": "7.1"}))
    assert rocm.what == "torch is built for ROCm 7.1, 4 GPU(s) in /dev; visible here: 4"
    assert not list(findings.judge_accelerator({}))


@pytest.mark.parametrize("kind", OTHERS)
def test_accelerators_of_other_vendors(kind):
    built, backend = findings.judge_accelerator(CPU_TORCH | OTHERS[kind])
    name, number = OTHERS[kind]["accelerator"], OTHERS[kind]["devices"]
    assert (built.level, built.what) == ("ok", f"torch is built for {name}; visible here: {number}")
    assert (backend.level, backend.what) == ("ok", f"process groups on {name!r} use {OTHERS[kind]['backend']}")


def test_a_missing_backend_is_a_problem_where_there_are_devices():
    lacking = CUDA_TORCH | {"has_backend": False}
    assert levels(findings.judge_accelerator(lacking)) == [("accel", "ok"), ("backend", "problem")]
    assert levels(findings.judge_accelerator(lacking | {"devices": 0})) == [("accel", "ok")]
    unknown = CPU_TORCH | {"accelerator": "new", "devices": 1}
    assert levels(findings.judge_accelerator(unknown)) == [("accel", "ok"), ("backend", "problem")]


def test_nccl():
    assert levels(findings.judge_nccl(CUDA_TORCH)) == [("nccl", "ok")]
    (finding,) = findings.judge_nccl(CUDA_TORCH | {"cuda": None, "rocm": "7.1"})
    assert finding.what == "RCCL 2.29.7"
    assert not list(findings.judge_nccl(CPU_TORCH))
    assert not list(findings.judge_nccl({}))


def test_hdf5():
    h5py = {"version": "3.16.0", "hdf5": "2.0.0", "mpi": False, "other_mpi_files": []}
    (note,) = findings.judge_hdf5(h5py)
    assert note.level == "note"
    assert "posix" in note.what
    assert "mpio is not available" in note.what
    assert levels(findings.judge_hdf5(h5py | {"mpi": True})) == [("hdf5", "ok")]
    (other,) = findings.judge_hdf5(h5py | {"mpi": True, "other_mpi_files": ["/usr/lib/libmpi.so.12"]})
    assert (other.level, "/usr/lib/libmpi.so.12" in other.what) == ("warning", True)
    assert not list(findings.judge_hdf5({"error": "ImportError: no"}))


def test_ranks_with_different_packages():
    row = {"python": "3.11.7", "packages": {"torch": "2.13.0", "mpi4py": "4.1.2", "h5py": "3.16.0"}}
    assert not list(rank_findings.judge_same_software([row, row]))
    other = row | {"packages": row["packages"] | {"torch": "2.12.0", "h5py": None}}
    found = list(rank_findings.judge_same_software([row, row, other]))
    assert levels(found) == [("torch", "problem"), ("h5py", "warning")]
    assert found[0].what == "ranks differ: 2.13.0 on ranks 0-1; 2.12.0 on rank 2"


def test_mpi_libraries_are_found_among_mapped_files():
    maps = """\
7f00-7f01 r-xp 00000000 08:01 12 /opt/openmpi/lib/libmpi.so.40.40.7
7f01-7f02 r--p 00000000 08:01 12 /opt/openmpi/lib/libmpi.so.40.40.7
7f02-7f03 r-xp 00000000 08:01 13 /opt/cray/lib/libmpi_gnu_123.so.12.0.0
7f03-7f04 r-xp 00000000 08:01 14 /usr/lib/libmpich.so.12
7f04-7f05 r-xp 00000000 08:01 15 /usr/lib/python3/mpi4py/MPI.mpich.cpython-311-x86_64-linux-gnu.so
7f05-7f06 r-xp 00000000 08:01 16 /usr/lib/libc.so.6
"""
    assert installed.mpi_files(maps) == [
        "/opt/cray/lib/libmpi_gnu_123.so.12.0.0",
        "/opt/openmpi/lib/libmpi.so.40.40.7",
        "/usr/lib/libmpich.so.12",
    ]


def test_versions_are_found_without_loading(run_python):
    code = (
        "import sys; from hpcfsdp.doctor.installed import versions; print(versions()['torch'], 'torch' in sys.modules)"
    )
    version, loaded = run_python(code).split()
    assert (version[0], loaded) == ("2", "False")


OPEN_MPI = "Open MPI v5.0.11, package: Open MPI user@localhost Distribution, ident: 5.0.11"
OPEN_MPI_RUN = "mpirun (Open MPI) 5.0.11\n\nReport bugs to https://www.open-mpi.org/community/help/"
HYDRA = "HYDRA build details:\n    Version:                                 4.2.0\n    Release Date: then"
INTEL_RUN = "Intel(R) MPI Library for Linux* OS, Version 2021.10 Build 20230619"


def facts(**changed):
    """Facts of a plain process without faults."""
    return {
        "packages": {"torch": "2.13.0", "mpi4py": "4.1.2", "h5py": "3.16.0"},
        "environment": {},
        "launched_as": None,
        "root": False,
        "mpirun": {"path": "/opt/bin/mpirun", "text": OPEN_MPI_RUN},
        "own_mpirun": None,
        "library": {"text": OPEN_MPI, "standard": "3.1", "files": [], "thread_level": "multiple"},
        "world": {"rank": 0, "size": 1},
        "output": [],
    } | changed


def test_a_sound_process_has_no_problems():
    found = list(findings.judge_mpi(facts()))
    assert levels(found) == [("mpi", "ok"), ("mpirun", "ok")]
    assert found[0].what == "Open MPI 5.0.11 (MPI 3.1), thread level multiple, one process"
    four = next(findings.judge_mpi(facts(world={"rank": 0, "size": 4})))
    assert four.what == "Open MPI 5.0.11 (MPI 3.1), thread level multiple, 4 ranks"


@pytest.mark.parametrize(
    ("text", "name", "version"),
    [
        (OPEN_MPI, "Open MPI", "5.0.11"),
        (OPEN_MPI_RUN, "Open MPI", "5.0.11"),
        (HYDRA, "MPICH", "4.2.0"),
        ("MPICH Version:      5.0.2", "MPICH", "5.0.2"),
        (INTEL_RUN, "Intel MPI", "2021.10"),
        ("Intel(R) MPI Library 2021.13 for Linux* OS", "Intel MPI", "2021.13"),
        ("MPI VERSION    : CRAY MPICH version 8.1.29.2 (ANL base 3.4a2)", "Cray MPICH", "8.1.29.2"),
        ("MVAPICH2 Version      :\t2.3.7", "MVAPICH", "2.3.7"),
    ],
)
def test_mpi_implementations_are_recognised(text, name, version):
    assert findings.implementation(text) == (name, version)


def test_an_unknown_implementation():
    assert findings.implementation("slurm 24.05.1") is None
    finding = findings.judge_mpirun(OPEN_MPI, {"path": "/x", "text": "?"}, None, launched=False)
    assert (finding.level, finding.what) == ("ok", "/x (of an unknown MPI)")


@pytest.mark.parametrize(
    ("library", "mpirun", "launched", "level"),
    [
        (OPEN_MPI, OPEN_MPI_RUN, False, "ok"),
        (OPEN_MPI, HYDRA, False, "problem"),
        (OPEN_MPI, HYDRA, True, "warning"),
        ("MPICH Version: 4.1", OPEN_MPI_RUN, False, "problem"),
        ("MPICH Version: 4.1", INTEL_RUN, False, "ok"),
        (OPEN_MPI, "mpirun (Open MPI) 4.1.4", False, "warning"),
        (None, OPEN_MPI_RUN, False, "ok"),
    ],
)
def test_the_mpirun_in_path_must_match_the_library(library, mpirun, launched, level):
    finding = findings.judge_mpirun(
        library, {"path": "/usr/bin/mpirun", "text": mpirun}, "/env/mpirun", launched=launched
    )
    assert finding.level == level
    assert "/usr/bin/mpirun" in finding.what
    assert ("/env/mpirun" in finding.hint) == (level != "ok")


@pytest.mark.parametrize(
    ("library", "environment", "launched", "expected"),
    [
        (OPEN_MPI, {"OMPI_MCA_mpi_ft_enable": "1"}, True, ("ok", "goes on after ranks are lost")),
        (OPEN_MPI, {}, True, ("note", "a lost rank ends the job")),
        (OPEN_MPI, {}, False, None),
        ("MPICH Version: 4.3.0", {}, True, ("note", "MPICH 4.3.0 cannot go on")),
    ],
)
def test_whether_the_job_outlives_a_rank_is_one_line(library, environment, launched, expected):
    found = list(findings.judge_losses(library, environment, launched=launched))
    assert len(found) == (expected is not None)
    if expected is not None:
        assert found[0].level == expected[0]
        assert expected[1] in found[0].what


def test_a_missing_mpirun_is_a_note():
    finding = findings.judge_mpirun(OPEN_MPI, None, None, launched=True)
    assert finding.level == "note"
    finding = findings.judge_mpirun(OPEN_MPI, None, "/env/bin/mpirun", launched=False)
    assert finding.hint == "use /env/bin/mpirun"


def test_an_undetected_launcher_is_a_problem_with_the_text_of_the_error():
    error = {"kind": "LaunchError", "text": "the launcher started 4 processes, but"}
    finding = findings.judge_start(facts(mpi_error=error))
    assert (finding.level, finding.what, finding.hint) == ("problem", error["text"], "")


def test_a_missing_mpi_library_is_a_problem():
    finding = findings.judge_start(facts(mpi_error={"kind": "ImportError", "text": "libmpi.so.40: no such file"}))
    assert finding.level == "problem"
    assert "install an MPI" in finding.hint


@pytest.mark.parametrize(
    ("changed", "hint"),
    [
        ({"world": None}, "on a login node that is usual: run it inside of an allocation (srun -n 2 "),
        ({"world": None, "environment": {"SLURM_JOB_ID": "7"}}, "this is an allocation, but not a step of it: srun -n"),
        ({"launched_as": 0}, "see also what other ranks printed to stderr"),
        ({"launched_as": 0, "ended_from_outside": True}, "one of them has failed, or the job was cancelled"),
        ({}, "look for the cause in what it printed"),
    ],
)
def test_a_dead_child_has_a_hint_by_its_surroundings(changed, hint):
    given = facts(
        failure="ended the process (signal 6, SIGABRT)", stage="initialising MPI", output=["a", "b"], **changed
    )
    if given["world"] is None:
        del given["world"]
    finding = findings.judge_start(given)
    assert finding.level == "problem"
    assert finding.what == "initialising MPI ended the process (signal 6, SIGABRT); it printed: a | b"
    assert hint in finding.hint


def test_output_of_a_child_that_came_through_is_a_note():
    assert not list(findings.judge_output(facts()))
    (finding,) = findings.judge_output(facts(output=["no fast network here"]))
    assert (finding.level, "no fast network here" in finding.what) == ("note", True)
    assert not list(findings.judge_output(facts(output=["x"], failure="died")))


@pytest.mark.parametrize(
    ("level", "problem"),
    [("single", True), ("funneled", True), ("serialized", False), ("multiple", False), (None, False)],
)
def test_thread_levels(level, problem):
    assert bool(list(findings.judge_thread_level({"thread_level": level}))) == problem


def test_slurm():
    assert not list(findings.judge_slurm({}))
    (note,) = findings.judge_slurm({"SLURM_JOB_ID": "42"})
    assert (note.level, "job 42" in note.what, "srun -n 2" in note.hint) == ("note", True, True)
    (step,) = findings.judge_slurm({"SLURM_JOB_ID": "42", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "1"})
    assert (step.level, step.what) == ("ok", "job 42, started by step 1 of 8 task(s)")
    (mpirun,) = findings.judge_slurm({"SLURM_JOB_ID": "42", "OMPI_COMM_WORLD_SIZE": "8"})
    assert (mpirun.level, mpirun.what) == ("ok", "job 42, started by mpirun")


def test_root():
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    (finding,) = findings.judge_root(OPEN_MPI, {}, root=True)
    assert finding.level == "warning"
    assert all(name in finding.hint for name in allowed)
    assert findings.judge_root(OPEN_MPI, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, root=True)
    assert not list(findings.judge_root(OPEN_MPI, allowed, root=True))
    assert not list(findings.judge_root(OPEN_MPI, {}, root=False))
    assert not list(findings.judge_root("MPICH Version: 4", {}, root=True))
    assert levels(findings.judge_mpi(facts(root=True, launched_as=0, world={"rank": 0, "size": 2}))) == [
        ("mpi", "ok"),
        ("mpirun", "ok"),
        ("losses", "note"),
    ]


def test_gpu_support_of_cray_mpich_with_nccl_is_a_warning():
    given = {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "torch": {"gpu_files": 4}}
    *_, last = findings.judge_mpi(facts(**given))
    assert last.level == "warning"
    assert "MPICH_GPU_SUPPORT_ENABLED=0" in last.hint
    assert levels(findings.judge_mpi(facts(**given | {"torch": {"gpu_files": 0}}))) == [("mpi", "ok"), ("mpirun", "ok")]
