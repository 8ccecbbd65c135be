import pytest

from hpcfsdp.doctor import installed, software

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
        ("python", "3.14.0rc1", "ok"),
        ("torch", "2.10.1+cu126", "problem"),
        ("torch", "2.11.0", "ok"),
        ("torch", "2.13.0a0+git1234", "ok"),
        ("mpi4py", "3.1.6", "problem"),
        ("mpi4py", "4.0.0", "ok"),
        ("h5py", "3.9.0", "problem"),
        ("h5py", "3.11.0", "ok"),
    ],
)
def test_old_versions_are_problems(area, version, level):
    finding = software.judge_version(area, version)
    assert (finding.level, version in finding.what) == (level, True)
    assert bool(finding.hint) == (level == "problem")


def test_a_missing_or_broken_package_is_a_problem():
    missing = software.judge_package("h5py", None)
    assert (missing.level, missing.hint) == ("problem", "pip install 'h5py>=3.11'")
    broken = software.judge_package("torch", "2.13.0", "ImportError: libcudart.so.13")
    assert broken.level == "problem"
    assert "libcudart.so.13" in broken.what


def test_accelerators():
    assert levels(software.judge_accelerator(CPU_TORCH)) == [("accel", "ok")]
    (finding,) = software.judge_accelerator(CPU_TORCH | {"gpu_files": 2})
    assert (finding.level, "2 GPU(s)" in finding.what) == ("warning", True)
    built, backend = software.judge_accelerator(CUDA_TORCH)
    assert built.what == "torch is built for CUDA 13.0, 4 GPU(s) in /dev; visible here: 4"
    assert backend.what == "process groups on 'cuda' use nccl"
    rocm = next(software.judge_accelerator(CUDA_TORCH | {"cuda": None, "rocm": "7.1"}))
    assert rocm.what == "torch is built for ROCm 7.1, 4 GPU(s) in /dev; visible here: 4"
    assert not list(software.judge_accelerator({}))


@pytest.mark.parametrize("kind", OTHERS)
def test_accelerators_of_other_vendors(kind):
    built, backend = software.judge_accelerator(CPU_TORCH | OTHERS[kind])
    name, number = OTHERS[kind]["accelerator"], OTHERS[kind]["devices"]
    assert (built.level, built.what) == ("ok", f"torch is built for {name}; visible here: {number}")
    assert (backend.level, backend.what) == ("ok", f"process groups on {name!r} use {OTHERS[kind]['backend']}")


def test_a_missing_backend_is_a_problem_where_there_are_devices():
    lacking = CUDA_TORCH | {"has_backend": False}
    assert levels(software.judge_accelerator(lacking)) == [("accel", "ok"), ("backend", "problem")]
    assert levels(software.judge_accelerator(lacking | {"devices": 0})) == [("accel", "ok")]
    unknown = CPU_TORCH | {"accelerator": "new", "devices": 1}
    assert levels(software.judge_accelerator(unknown)) == [("accel", "ok"), ("backend", "problem")]


def test_nccl():
    assert levels(software.judge_nccl(CUDA_TORCH)) == [("nccl", "ok")]
    (finding,) = software.judge_nccl(CUDA_TORCH | {"cuda": None, "rocm": "7.1"})
    assert finding.what == "RCCL 2.29.7"
    assert not list(software.judge_nccl(CPU_TORCH))
    assert not list(software.judge_nccl({}))


def test_hdf5():
    h5py = {"version": "3.16.0", "hdf5": "2.0.0", "mpi": False, "other_mpi_files": []}
    (note,) = software.judge_hdf5(h5py)
    assert note.level == "note"
    assert "posix" in note.what
    assert "mpio is not available" in note.what
    assert levels(software.judge_hdf5(h5py | {"mpi": True})) == [("hdf5", "ok")]
    (other,) = software.judge_hdf5(h5py | {"mpi": True, "other_mpi_files": ["/usr/lib/libmpi.so.12"]})
    assert (other.level, "/usr/lib/libmpi.so.12" in other.what) == ("warning", True)
    assert not list(software.judge_hdf5({"error": "ImportError: no"}))


def test_ranks_with_different_packages():
    row = {"python": "3.11.7", "packages": {"torch": "2.13.0", "mpi4py": "4.1.2", "h5py": "3.16.0"}}
    assert not list(software.judge_ranks([row, row]))
    other = row | {"packages": row["packages"] | {"torch": "2.12.0", "h5py": None}}
    found = list(software.judge_ranks([row, row, other]))
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
