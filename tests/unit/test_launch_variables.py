import pytest

from hpcfsdp import env


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in env.diagnostic_values():
        monkeypatch.delenv(name)


def set_all(monkeypatch, values):
    for name, value in values.items():
        monkeypatch.setenv(name, value)


def test_a_plain_process():
    assert env.launcher_rank() is None
    assert not env.started_by_srun()
    assert not env.launcher_ends_all()


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_RANK", "PMIX_RANK", "PMI_RANK", "SLURM_PROCID"])
def test_the_rank_is_read_from_the_launcher(monkeypatch, name):
    monkeypatch.setenv(name, "3")
    assert env.launcher_rank() == 3
    monkeypatch.setenv(name, "")
    assert env.launcher_rank() is None


def test_mpirun_inside_an_allocation_takes_precedence_over_slurm(monkeypatch):
    mpirun = {"OMPI_COMM_WORLD_RANK": "5", "OMPI_COMM_WORLD_SIZE": "8"}
    set_all(monkeypatch, mpirun | {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "2"})
    assert env.launcher_rank() == 5
    assert not env.started_by_srun()
    assert env.launcher_ends_all()


@pytest.mark.parametrize("more", [{}, {"PMI_RANK": "1", "PMI_SIZE": "4"}, {"PMIX_RANK": "1"}])
def test_srun(monkeypatch, more):
    set_all(monkeypatch, {"SLURM_PROCID": "1", "SLURM_STEP_NUM_TASKS": "4"} | more)
    assert env.launcher_rank() == 1
    assert env.started_by_srun()
    assert not env.launcher_ends_all()


def test_only_variables_that_are_set_are_reported(monkeypatch):
    assert env.diagnostic_values() == {}
    monkeypatch.setenv("NCCL_SOCKET_IFNAME", "ib0")
    assert env.diagnostic_values() == {"NCCL_SOCKET_IFNAME": "ib0"}


def test_variables_that_decide_on_accelerators_are_reported_by_their_beginnings(monkeypatch):
    values = {
        **{"CUDA_VISIBLE_DEVICES": "0", "ROCR_VISIBLE_DEVICES": "1", "ZE_AFFINITY_MASK": "0.1"},
        **{"NCCL_ALGO": "Ring", "TORCH_NCCL_TRACE_BUFFER_SIZE": "2000", "RCCL_MSCCL_ENABLE": "0"},
        **{"MPICH_GPU_SUPPORT_ENABLED": "0", "FI_CXI_ATS": "0", "PYTORCH_ALLOC_CONF": "expandable_segments:True"},
        **{"PYTORCH_CUDA_ALLOC_CONF": "x", "CUDA_DEVICE_MAX_CONNECTIONS": "1"},
    }
    set_all(monkeypatch, values | {"CUDA_HOME": "/usr", "OMP_NUM_THREADS": "1"})
    assert env.accelerator_values() == values
    assert env.diagnostic_values() == values | {"OMP_NUM_THREADS": "1"}


@pytest.mark.parametrize(("given", "count"), [(None, None), ("1", 1), ("32", 32), ("", None), ("one", None)])
def test_queues_between_a_process_and_its_gpu(monkeypatch, given, count):
    if given is not None:
        monkeypatch.setenv("CUDA_DEVICE_MAX_CONNECTIONS", given)
    assert env.device_connections() == count


@pytest.mark.parametrize(
    ("environ", "hides"),
    [
        ({}, False),
        ({"CUDA_VISIBLE_DEVICES": "0"}, False),
        ({"CUDA_VISIBLE_DEVICES": ""}, True),
        ({"HIP_VISIBLE_DEVICES": "-1"}, True),
    ],
)
def test_a_user_may_hide_all_devices(monkeypatch, environ, hides):
    set_all(monkeypatch, environ)
    assert env.hides_devices() is hides
