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
