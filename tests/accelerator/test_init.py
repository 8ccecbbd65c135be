"""``hpcfsdp.init`` on the simulated accelerator."""

import dataclasses
import datetime
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpcfsdp import _compat, world as worlds
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import LaunchError
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1)


@pytest.mark.parametrize(("level", "name"), [(MPI.THREAD_SINGLE, "single"), (MPI.THREAD_FUNNELED, "funneled")])
def test_mpi_must_allow_calls_from_other_threads(world, monkeypatch, level, name):
    if world.rank == world.size - 1:
        monkeypatch.setattr(MPI, "Query_thread", lambda: level)
    with pytest.raises(LaunchError, match=f"MPI was started with the thread level '{name}', but on 'sim'") as caught:
        worlds._agree(worlds._Settings(simulated.NAME))
    assert caught.value.raised_on_all_ranks
    assert worlds._agree(worlds._Settings("cpu"))[1] == torch.device("cpu")


def test_serialized_calls_are_enough(world, monkeypatch):
    monkeypatch.setattr(MPI, "Query_thread", lambda: MPI.THREAD_SERIALIZED)
    assert worlds._agree(worlds._Settings(simulated.NAME))[1] == torch.device(simulated.NAME, 0)


@pytest.mark.parametrize(
    ("device", "backend", "bound", "timeout_s"),
    [
        ("sim:0", simulated.BACKEND, True, 180),
        ("sim:0", f"cpu:gloo,sim:{simulated.BACKEND}", True, 180),
        ("sim:0", "hpcmpi", False, 120),
        ("sim:0", "gloo", False, 120),
        ("cpu", "hpcmpi", False, 120),
    ],
)
def test_the_group_is_bound_to_the_device_whose_backend_it_has(world, monkeypatch, device, backend, bound, timeout_s):
    given = {}

    def make(name, **options):
        given.update(options)
        dist.group.WORLD.bound_device_id = options["device_id"]

    monkeypatch.setattr(dist, "init_process_group", make)
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", None, raising=False)
    device = torch.device(device)
    worlds._make_group(None, backend, device, 120.0, None)
    assert given["device_id"] == (device if bound else None)
    assert dist.group.WORLD.bound_device_id is None  # torch would split it for each further group
    assert given["timeout"].total_seconds() == timeout_s  # the backend leaves time for a report about a hang
    monkeypatch.setenv("HPCFSDP_HANG_S", "0")
    worlds._make_group(None, backend, device, 120.0, None)
    assert given["timeout"].total_seconds() == 120


def test_groups_within_a_bound_group_connect_their_ranks(world, group, monkeypatch):
    """A group of torch's may be split from the default group, for which all its ranks would have to come."""
    device = torch.device(simulated.NAME, 0)
    monkeypatch.setattr(dist.group.WORLD, "bound_device_id", device, raising=False)
    options = SimpleNamespace(_timeout=datetime.timedelta(seconds=77))
    backend = SimpleNamespace(options=options, supports_splitting=False)
    monkeypatch.setattr(dist.group.WORLD, "_get_backend", lambda device: backend, raising=False)
    make, found = dist.distributed_c10d._new_process_group_helper, []

    def record(*args, **given):
        found.append((given["timeout"].total_seconds(), dist.group.WORLD.bound_device_id))
        return make(*args, **given)

    monkeypatch.setattr(dist.distributed_c10d, "_new_process_group_helper", record)
    made = [
        _compat.new_group_of([world.rank], simulated.BACKEND),
        dist.new_group(backend=simulated.BACKEND),
        TorchGroupCommunicator(group, device).subgroup(list(range(world.size))).group,
    ]
    assert dist.group.WORLD.bound_device_id == device
    assert found[0] == found[2] == (77, None)  # ours have the timeout of the default group, and do not split it
    for each in made:
        total = torch.ones(2, device=device)
        dist.all_reduce(total, group=each)
        assert total.tolist() == [each.size()] * 2
        dist.destroy_process_group(each)


@pytest.mark.parametrize(("device", "limit_s"), [(simulated.NAME, 120.0), ("cpu", 300.0)])
def test_a_device_waits_no_longer_than_the_timeout_before_a_report(world, monkeypatch, device, limit_s):
    made = []
    monkeypatch.setattr(worlds.hang, "Watcher", lambda _seat, _folder, limit_s, **_options: made.append(limit_s))
    monkeypatch.setattr(worlds.hang, "watcher", worlds.hang.watcher)
    settings = dataclasses.replace(world.settings, timeout_s=120.0)
    monkeypatch.setattr(worlds, "_world", dataclasses.replace(world, device=torch.device(device), settings=settings))
    job = worlds.current_job()
    node = job.comm.Split_type(MPI.COMM_TYPE_SHARED)
    worlds._watch_for_hangs(job, node, "test", Path())
    node.Free()
    assert made == [limit_s]


def test_the_device_of_a_rank_is_settled_with_those_of_its_node(world):
    node = worlds.current_job().comm.Split_type(MPI.COMM_TYPE_SHARED)
    found = worlds._settle(worlds._Settings(), torch.device(simulated.NAME, 0), node)
    assert found == (torch.device(simulated.NAME, 0), world.rank)
    if world.size > 1:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(torch.sim, "get_device_properties", lambda _: SimpleNamespace(name="one", uuid="SIM-1"))
            with pytest.raises(
                LaunchError, match=r"use 1 device\(s\): local ranks \[0, 1\] share one \(number 0, SIM-1\)"
            ):
                worlds._settle(worlds._Settings(), torch.device(simulated.NAME, 0), node)
            worlds._settle(worlds._Settings(backend="hpcmpi"), torch.device(simulated.NAME, 0), node)
    node.Free()
