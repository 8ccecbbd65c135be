import os
import socket

import pytest

from hpcfsdp import env
from hpcfsdp.errors import LaunchError

LAUNCHERS = ["OMPI_COMM_WORLD_SIZE", "PMI_SIZE", "SLURM_STEP_NUM_TASKS", "PMIX_RANK"]


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch):
    for name in [*LAUNCHERS, "OMPI_MCA_btl", "OMPI_MCA_pml", "OMP_NUM_THREADS", "NO_COLOR"]:
        monkeypatch.delenv(name, raising=False)


def test_a_plain_process_has_no_launcher():
    assert env.launcher_size() is None


@pytest.mark.parametrize("name", LAUNCHERS[:3])
def test_a_variable_of_the_launcher_gives_the_number_of_processes(monkeypatch, name):
    monkeypatch.setenv(name, "12")
    assert env.launcher_size() == (name, 12)


def test_the_most_specific_launcher_counts(monkeypatch):
    monkeypatch.setenv("SLURM_STEP_NUM_TASKS", "8")
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", "2")
    assert env.launcher_size() == ("OMPI_COMM_WORLD_SIZE", 2)


@pytest.mark.parametrize("value", ["", "many", "-1", "2(x3)"])
def test_a_size_that_is_no_number_is_passed_over(monkeypatch, value):
    monkeypatch.setenv("OMPI_COMM_WORLD_SIZE", value)
    monkeypatch.setenv("PMI_SIZE", "3")
    assert env.launcher_size() == ("PMI_SIZE", 3)


@pytest.mark.parametrize(
    ("environ", "size"),
    [
        ({}, 0),
        ({"WORLD_SIZE": "4"}, 0),  # set by a job script, or by init
        ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none"}, 4),
        ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "OMPI_COMM_WORLD_SIZE": "2"}, 0),
        ({"WORLD_SIZE": "4", "TORCHELASTIC_RUN_ID": "none", "SLURM_STEP_NUM_TASKS": "1"}, 4),  # srun -n 1 torchrun
        ({"TORCHELASTIC_RUN_ID": "none"}, 0),
    ],
)
def test_torchrun_is_known_by_its_variables(monkeypatch, environ, size):
    for name in ("WORLD_SIZE", "TORCHELASTIC_RUN_ID", "OMPI_COMM_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    for name, value in environ.items():
        monkeypatch.setenv(name, value)
    assert env.torchrun_size() == size


def mca():
    return {name: value for name, value in os.environ.items() if name.startswith("OMPI_MCA_")}


def test_a_single_process_starts_mpi_without_shared_memory_and_forgets_the_variables():
    with env.singleton_mpi():
        assert mca() == {"OMPI_MCA_btl": "self", "OMPI_MCA_pml": "ob1"}
    assert mca() == {}


def test_the_variables_are_unset_after_an_error():
    with pytest.raises(KeyError), env.singleton_mpi():
        raise KeyError
    assert mca() == {}


def test_what_the_user_chose_for_mpi_stays(monkeypatch):
    monkeypatch.setenv("OMPI_MCA_btl", "tcp,self")
    with env.singleton_mpi():
        assert mca() == {"OMPI_MCA_btl": "tcp,self", "OMPI_MCA_pml": "ob1"}
    assert mca() == {"OMPI_MCA_btl": "tcp,self"}


@pytest.mark.parametrize("name", ["OMPI_COMM_WORLD_SIZE", "PMIX_RANK"])
def test_a_process_of_open_mpis_launcher_starts_mpi_as_the_launcher_wants(monkeypatch, name):
    monkeypatch.setenv(name, "0")
    with env.singleton_mpi():
        assert mca() == {}


def test_rendezvous_variables_are_set_where_they_are_not(monkeypatch):
    monkeypatch.setenv("RANK", "7")
    monkeypatch.setenv("WORLD_SIZE", "x")
    monkeypatch.delenv("WORLD_SIZE")
    env.export_rendezvous({"RANK": "0", "WORLD_SIZE": "4"})
    assert (os.environ["RANK"], os.environ["WORLD_SIZE"]) == ("7", "4")


def test_threads_are_chosen_by_the_user_or_not(monkeypatch):
    assert not env.threads_chosen()
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert env.threads_chosen()


def test_the_configuration_is_every_variable_with_the_prefix(monkeypatch):
    for name in [name for name in os.environ if name.startswith("HPCFSDP")]:
        monkeypatch.delenv(name)
    monkeypatch.setenv("HPCFSDP_SEED", "1")
    monkeypatch.setenv("HPCFSDP_OPTIM__LR", "2")
    monkeypatch.setenv("MY_HPCFSDP_SEED", "3")
    monkeypatch.setenv("HPCFSDPX", "4")
    assert env.config_values() == {"HPCFSDP_SEED": "1", "HPCFSDP_OPTIM__LR": "2"}


@pytest.mark.parametrize(("value", "refused"), [(None, False), ("", False), ("1", True), ("0", True)])
def test_colour_is_refused_by_any_value(monkeypatch, value, refused):
    if value is not None:
        monkeypatch.setenv("NO_COLOR", value)
    assert env.colour_refused() is refused


def test_the_hosts_name_comes_without_its_domain(monkeypatch):
    monkeypatch.setattr(socket, "gethostname", lambda: "nid001.cluster.example")
    assert env.host_name() == "nid001"


@pytest.mark.parametrize(
    ("name", "asks"),
    [
        ("HPCFSDP_REGISTERED_MEMORY", env.registered_memory),
        ("HPCFSDP_PROGRESS_THREAD", env.progress_thread),
    ],
)
def test_options_are_asked_for_by_1(monkeypatch, name, asks):
    monkeypatch.delenv(name, raising=False)
    assert not asks()
    for value, wanted in (("0", False), ("", False), ("1", True)):
        monkeypatch.setenv(name, value)
        assert asks() is wanted
    assert name not in env.config_values()
    monkeypatch.setenv(name, "yes")
    with pytest.raises(LaunchError, match=f"{name}=yes: give 1"):
        asks()


def test_the_time_until_waits_are_logged_is_no_configuration_of_a_command(monkeypatch):
    monkeypatch.setenv("HPCFSDP_WAIT_LOG_S", "2.5")
    monkeypatch.setenv("HPCFSDP_TRAIN__BATCH", "4")
    assert env.wait_log_s() == 2.5
    assert env.config_values() == {"HPCFSDP_TRAIN__BATCH": "4"}
    monkeypatch.delenv("HPCFSDP_WAIT_LOG_S")
    assert env.wait_log_s() == 10
