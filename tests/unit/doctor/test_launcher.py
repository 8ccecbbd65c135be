import pytest

from hpcfsdp.doctor import launcher

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


def levels(findings):
    return [(finding.area, finding.level) for finding in findings]


def test_a_sound_process_has_no_problems():
    found = list(launcher.judge(facts()))
    assert levels(found) == [("mpi", "ok"), ("mpirun", "ok")]
    assert found[0].what == "Open MPI 5.0.11 (MPI 3.1), thread level multiple, one process"
    four = next(launcher.judge(facts(world={"rank": 0, "size": 4})))
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
    assert launcher.implementation(text) == (name, version)


def test_an_unknown_implementation():
    assert launcher.implementation("slurm 24.05.1") is None
    finding = launcher.judge_mpirun(OPEN_MPI, {"path": "/x", "text": "?"}, None, launched=False)
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
    finding = launcher.judge_mpirun(
        library, {"path": "/usr/bin/mpirun", "text": mpirun}, "/env/mpirun", launched=launched
    )
    assert finding.level == level
    assert "/usr/bin/mpirun" in finding.what
    assert ("/env/mpirun" in finding.hint) == (level != "ok")


def test_a_missing_mpirun_is_a_note():
    finding = launcher.judge_mpirun(OPEN_MPI, None, None, launched=True)
    assert finding.level == "note"
    finding = launcher.judge_mpirun(OPEN_MPI, None, "/env/bin/mpirun", launched=False)
    assert finding.hint == "use /env/bin/mpirun"


def test_an_undetected_launcher_is_a_problem_with_the_text_of_the_error():
    error = {"kind": "LaunchError", "text": "the launcher started 4 processes, but"}
    finding = launcher.judge_start(facts(mpi_error=error))
    assert (finding.level, finding.what, finding.hint) == ("problem", error["text"], "")


def test_a_missing_mpi_library_is_a_problem():
    finding = launcher.judge_start(facts(mpi_error={"kind": "ImportError", "text": "libmpi.so.40: no such file"}))
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
    finding = launcher.judge_start(given)
    assert finding.level == "problem"
    assert finding.what == "initialising MPI ended the process (signal 6, SIGABRT); it printed: a | b"
    assert hint in finding.hint


def test_output_of_a_child_that_came_through_is_a_note():
    assert not list(launcher.judge_output(facts()))
    (finding,) = launcher.judge_output(facts(output=["no fast network here"]))
    assert (finding.level, "no fast network here" in finding.what) == ("note", True)
    assert not list(launcher.judge_output(facts(output=["x"], failure="died")))


@pytest.mark.parametrize(
    ("level", "problem"),
    [("single", True), ("funneled", True), ("serialized", False), ("multiple", False), (None, False)],
)
def test_thread_levels(level, problem):
    assert bool(list(launcher.judge_threads({"thread_level": level}))) == problem


def test_slurm():
    assert not list(launcher.judge_slurm({}))
    (note,) = launcher.judge_slurm({"SLURM_JOB_ID": "42"})
    assert (note.level, "job 42" in note.what, "srun -n 2" in note.hint) == ("note", True, True)
    (step,) = launcher.judge_slurm({"SLURM_JOB_ID": "42", "SLURM_STEP_NUM_TASKS": "8", "SLURM_STEP_ID": "1"})
    assert (step.level, step.what) == ("ok", "job 42, started by step 1 of 8 task(s)")
    (mpirun,) = launcher.judge_slurm({"SLURM_JOB_ID": "42", "OMPI_COMM_WORLD_SIZE": "8"})
    assert (mpirun.level, mpirun.what) == ("ok", "job 42, started by mpirun")


def test_root():
    allowed = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    (finding,) = launcher.judge_root(OPEN_MPI, {}, root=True)
    assert finding.level == "warning"
    assert all(name in finding.hint for name in allowed)
    assert launcher.judge_root(OPEN_MPI, {"OMPI_ALLOW_RUN_AS_ROOT": "1"}, root=True)
    assert not list(launcher.judge_root(OPEN_MPI, allowed, root=True))
    assert not list(launcher.judge_root(OPEN_MPI, {}, root=False))
    assert not list(launcher.judge_root("MPICH Version: 4", {}, root=True))
    assert levels(launcher.judge(facts(root=True, launched_as=0, world={"rank": 0, "size": 2}))) == [
        ("mpi", "ok"),
        ("mpirun", "ok"),
    ]


def test_gpu_support_of_cray_mpich_with_nccl_is_a_warning():
    given = {"environment": {"MPICH_GPU_SUPPORT_ENABLED": "1"}, "torch": {"gpu_files": 4}}
    *_, last = launcher.judge(facts(**given))
    assert last.level == "warning"
    assert "MPICH_GPU_SUPPORT_ENABLED=0" in last.hint
    assert levels(launcher.judge(facts(**given | {"torch": {"gpu_files": 0}}))) == [("mpi", "ok"), ("mpirun", "ok")]
