import os

import pytest
import torch
import torch.distributed as dist

import hpcfsdp
from hpcfsdp import accelerator, env, world as worlds
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch import rendezvous, together
from hpcfsdp.launch.job import current_job
from tests.under_mpi import MPI

pytestmark = [pytest.mark.ranks(2, 1, 3, 4), pytest.mark.transport]


def test_the_world_has_the_ranks_of_mpi(world):
    from mpi4py import MPI

    everyone = MPI.COMM_WORLD
    node = everyone.Split_type(MPI.COMM_TYPE_SHARED)  # mostly one node; tests/slurm runs these tests on two
    nodes = sorted({tuple(ranks) for ranks in everyone.allgather(node.allgather(everyone.rank))})
    assert (world.rank, world.size) == (everyone.rank, everyone.size)
    assert (world.local_rank, world.local_size) == (node.rank, node.size)
    assert world.rank in nodes[world.node_rank]
    assert world.num_nodes == len(nodes)
    node.Free()
    assert world.device == torch.device("cpu")


def test_init_again_returns_the_same_world(world):
    assert hpcfsdp.init() is world


def test_messages_on_the_worlds_communicator_match_no_others(world):
    from mpi4py import MPI

    assert MPI.Comm.Compare(world.comm, MPI.COMM_WORLD) == MPI.CONGRUENT


def test_process_group_spans_all_ranks(world):
    assert world.process_group is dist.group.WORLD
    total = torch.tensor([world.rank + 1.0])
    dist.all_reduce(total, group=world.process_group)
    assert total.item() == world.size * (world.size + 1) / 2


def test_rendezvous_variables_are_set_for_third_parties(world):
    names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE")
    values = (world.rank, world.size, world.local_rank, world.local_size)
    assert [os.environ[name] for name in names] == [str(value) for value in values]
    assert {"MASTER_ADDR", "MASTER_PORT"} <= set(os.environ)


def test_store_is_reached_by_an_address_of_the_host(world, monkeypatch):
    if not world.comm.bcast(rendezvous.addresses_of_this_host()):
        pytest.skip("this host has no address besides loopback")
    monkeypatch.setattr(rendezvous, "PROBE_TIMEOUT_S", 1.0)
    store, address = rendezvous.open_store(world.comm, single_node=False, timeout_s=60)
    assert address in world.comm.bcast(rendezvous.addresses_of_this_host())
    store.add("ranks", 1)
    world.comm.Barrier()
    assert store.add("ranks", 0) == world.size
    world.comm.Barrier()


def test_unreachable_addresses_are_named_on_every_rank(world, monkeypatch):
    monkeypatch.setattr(rendezvous, "PROBE_TIMEOUT_S", 0.2)
    with pytest.raises(LaunchError, match=r"127\.0\.0\.1.*port 9.*Allow TCP between the nodes"):
        rendezvous.first_reached_by_all(["127.0.0.1"], 9, world.comm)


def test_the_lowest_of_each_value_over_all_ranks(world):
    assert together.minima(world.comm, [world.rank, -world.rank, 7]) == [0, 1 - world.size, 7]
    assert together.minima(world.comm, []) == []


def test_ranks_detect_that_a_value_differs_on_one_of_them(world):
    assert together.is_same(world.comm, {"a": (1, None)})
    for odd in range(world.size):
        assert together.is_same(world.comm, world.rank == odd) == (world.size == 1)


@pytest.mark.parametrize("kind", [LaunchError, RuntimeError])
def test_all_ranks_raise_the_error_of_the_lowest(world, kind):
    with together.raise_lowest(world.comm):
        pass
    first = world.size // 2
    with (
        pytest.raises(LaunchError, match=rf"^(rank {first} on \S+: )?no driver on {first}$") as caught,
        together.raise_lowest(world.comm),
    ):
        if world.rank >= first:
            raise kind(f"no driver on {world.rank}")
    assert caught.value.raised_on_all_ranks
    has_trace = world.rank >= first and kind is not LaunchError
    assert isinstance(caught.value.__cause__, kind if has_trace else type(None))


@pytest.fixture
def other_software(world, monkeypatch):
    """``other_software(name, version)``: what all ranks but the first have."""

    def change(name, version):
        found = together.versions()
        assert name in found
        if world.rank:
            found[name] = version
        monkeypatch.setattr(together, "versions", lambda: found)

    if world.size == 1:
        pytest.skip("one rank has nobody to differ from")
    return change


@pytest.mark.parametrize("name", ["hpcfsdp", "torch", "Python"])
def test_ranks_with_other_software_are_named_on_all_ranks(world, other_software, name):
    together.compare_versions(world.comm)
    other_software(name, "0.1")
    first, *others = world.comm.allgather(env.host_name())
    text = rf"{name} is \S+ on rank 0 \({first}\), but 0\.1 on rank 1 \({others[0]}\); "
    text += rf"{len(others)} rank\(s\) differ .*, on {', '.join(dict.fromkeys(others))}:"
    with pytest.raises(LaunchError, match=text) as caught:
        together.compare_versions(world.comm)
    assert caught.value.raised_on_all_ranks


@pytest.mark.parametrize(("name", "version"), [("Python's release", "3.11.99"), ("mpi4py", "9.9"), ("h5py", None)])
def test_differences_that_may_be_fine_are_logged_once(world, other_software, caplog, name, version):
    other_software(name, version)
    together.compare_versions(world.comm)
    logged = [record.getMessage() for record in caplog.records if record.name == "hpcfsdp.launch"]
    assert len(logged) == (world.rank == 0)
    if logged:
        assert f"but {version or 'missing'} on rank 1" in logged[0]


def test_threads_are_shared_between_the_ranks_of_a_node(world):
    from hpcfsdp.launch import device

    cores = os.sched_getaffinity(0)
    everyone = world.comm.allgather(cores)
    threads = world.comm.allgather(device.fair_threads(cores, everyone))
    assert sum(threads) <= max(len(set().union(*everyone)), world.size)


def test_one_rank_warns_where_a_driver_has_no_devices(world, monkeypatch, recwarn):
    node = current_job().comm.Split_type(MPI.COMM_TYPE_SHARED)
    concerned = world.size // 2
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    monkeypatch.setattr(accelerator, "unseen_driver", lambda: "no driver" if world.rank >= concerned else None)

    def warned(**settings):
        recwarn.clear()
        worlds._settle(worlds._Settings(**settings), torch.device("cpu"), node)
        return world.comm.allgather([str(each.message) for each in recwarn])

    text = f"all ranks compute on the CPU: on {env.host_name()} no driver; hpcfsdp.init(device='cpu') if that is meant"
    assert warned() == [[text] if rank == concerned else [] for rank in range(world.size)]
    assert warned(device="cpu") == [[]] * world.size
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    assert warned() == [[]] * world.size
    node.Free()


def test_init_with_other_arguments_is_refused(world):
    with pytest.raises(
        LaunchError, match=r"init was called before with .*device='cpu'.*, and now with .*device='cuda'"
    ):
        hpcfsdp.init("cuda")
    assert hpcfsdp.init("cpu") is world


def test_variables_that_others_have_set_stay(monkeypatch):
    from hpcfsdp import env

    monkeypatch.setattr(env, "_exported", {})
    monkeypatch.setenv("RANK", "theirs")
    monkeypatch.delenv("MASTER_PORT")
    for port in ("1", "2"):
        env.export_rendezvous({"RANK": "0", "MASTER_PORT": port})
    assert (os.environ["RANK"], os.environ["MASTER_PORT"]) == ("theirs", "2")
