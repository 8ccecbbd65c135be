import gc
import logging
import weakref

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as Strategy
from torch.testing._internal.distributed.fake_pg import FakeStore

import hpcfsdp.world
from hpcfsdp import accelerator
from hpcfsdp.comm import communicator_for, torch_group
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import DisagreementError, LaunchError
from hpcfsdp.launch.topology import Topology
from hpcfsdp.units.groups import resolve_mesh

HYBRID = [Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2]
PLAIN = [Strategy.FULL_SHARD, Strategy.SHARD_GRAD_OP]
SCATTERED = Topology.from_labels("abba")


@pytest.fixture
def fake_torch():
    """``fake_torch(rank, size)``: torch's default process group, as one rank of many would have it."""
    yield lambda rank=1, size=4: dist.init_process_group("fake", store=FakeStore(), rank=rank, world_size=size)
    if dist.is_initialized():
        dist.destroy_process_group()


class World:
    """What the groups need of ``hpcfsdp.World``."""

    def __init__(self, rank, topology):
        self.rank, self.topology, self.device = rank, topology, torch.device("cpu")
        self.communicator = FakeCommunicator(rank, topology.size, topology=topology)


@pytest.fixture
def make_world(monkeypatch, fake_torch):
    """``make_world(rank, topology)``: the world after ``hpcfsdp.init()`` on such a machine."""

    def make(rank, topology):
        fake_torch(rank, topology.size)
        return enter(World(rank, topology), monkeypatch)

    return make


def enter(world, monkeypatch):
    """Have it be the current world for the rest of the test."""
    monkeypatch.setattr(hpcfsdp.world, "_world", world)
    monkeypatch.setattr(torch_group, "default", world.communicator)
    return world


class Spy(FakeCommunicator):
    """Ranks that gather other objects than this one."""

    def __init__(self, rank, size, others):
        super().__init__(rank, size)
        self.others = others

    def all_gather_object(self, value):
        return [value, *self.others]


def places(comm):
    return comm.rank, comm.size


def facts(mesh):
    return mesh.strategy, mesh.shard, mesh.replicate, mesh.data


@pytest.mark.parametrize("strategy", [None, *PLAIN])
def test_all_ranks_of_the_group_shard(strategy):
    comm = FakeCommunicator(1, 4)
    groups = resolve_mesh(comm, None, strategy)
    assert facts(groups) == (strategy or Strategy.FULL_SHARD, comm, None, comm)
    assert (groups.is_hybrid, groups.size(), groups.size("replicate")) == (False, 4, 1)


def test_without_sharding_all_ranks_of_the_group_replicate():
    comm = FakeCommunicator(1, 4, device="meta")
    groups = resolve_mesh(comm, None, Strategy.NO_SHARD)
    assert (groups.replicate, groups.data, groups.size("replicate")) == (comm, comm, 4)
    assert (places(groups.shard), groups.shard.device) == ((0, 1), comm.device)


@pytest.mark.parametrize("strategy", [None, Strategy.NO_SHARD, *HYBRID])
def test_there_must_be_a_process_group(strategy):
    with pytest.raises(RuntimeError, match=r"there is no process group yet: call hpcfsdp.init\(\) first"):
        resolve_mesh(None, None, strategy)


def test_torchs_default_group_is_the_default(fake_torch):
    fake_torch(1, 4)
    groups = resolve_mesh(None, None, None)
    assert isinstance(groups.shard, FakeCommunicator)
    assert places(groups.shard) == (1, 4)
    part = dist.new_group([1, 3])
    assert places(resolve_mesh(part, None, None).shard) == (0, 2)


@pytest.mark.parametrize(
    ("arguments", "error", "message"),
    [
        (("g", "m", None), ValueError, "process_group and device_mesh were both given: pass one of them"),
        ((None, [0, 1], None), TypeError, "device_mesh must be a torch DeviceMesh, not list"),
        (("g", None, "FULL_SHARD"), TypeError, "sharding_strategy must be a ShardingStrategy, not 'FULL_SHARD'"),
        (
            (("g", "g"), None, None),
            ValueError,
            "a pair (shard, replicate) of process groups was given under FULL_SHARD, which takes one group; for a pair "
            "use HYBRID_SHARD",
        ),
        (
            ("g", None, Strategy.HYBRID_SHARD),
            ValueError,
            "HYBRID_SHARD takes a pair (shard, replicate) of process groups, not FakeCommunicator; without a pair it "
            "shards within each node and replicates across nodes",
        ),
        (
            (("g", "g", "g"), None, Strategy._HYBRID_SHARD_ZERO2),
            ValueError,
            "_HYBRID_SHARD_ZERO2 takes a pair (shard, replicate) of process groups, not tuple of 3; without a pair it "
            "shards within each node and replicates across nodes",
        ),
        (
            ((None, None), None, Strategy.HYBRID_SHARD),
            ValueError,
            "HYBRID_SHARD needs both groups of a pair (shard, replicate), not (None, None)",
        ),
        (
            ((1, "g"), None, Strategy.HYBRID_SHARD),
            TypeError,
            "process_group must be a torch.distributed ProcessGroup or an hpcfsdp Communicator, not int",
        ),
    ],
)
def test_what_does_not_fit_the_strategy_is_refused(arguments, error, message):
    group = FakeCommunicator(0, 2)

    def real(value):
        return tuple(map(real, value)) if isinstance(value, tuple) else group if value == "g" else value

    with pytest.raises(error) as caught:
        resolve_mesh(*map(real, arguments))
    assert str(caught.value) == message


@pytest.mark.parametrize("strategy", HYBRID)
@pytest.mark.parametrize("kind", [tuple, list])
def test_a_pair_is_shard_and_replicate(strategy, kind):
    shard, replicate = FakeCommunicator(1, 4), FakeCommunicator(0, 2)
    groups = resolve_mesh(kind([shard, replicate]), None, strategy)
    assert facts(groups) == (strategy, shard, replicate, None)
    assert (groups.is_hybrid, groups.size(), groups.size("replicate")) == (True, 8, 2)


def test_everyone_of_a_pair_is_the_world_where_the_pair_makes_it_up(make_world):
    world = make_world(5, Topology.regular(2, 4))
    pair = FakeCommunicator(1, 4), FakeCommunicator(1, 2)
    assert resolve_mesh(pair, None, Strategy.HYBRID_SHARD).data is world.communicator
    half = FakeCommunicator(1, 2), FakeCommunicator(1, 2)
    assert resolve_mesh(half, None, Strategy.HYBRID_SHARD).data is None


def test_a_pair_that_makes_no_grid_is_refused_with_the_places():
    shard, replicate = Spy(0, 2, [(1, 2)]), FakeCommunicator(0, 2)
    with pytest.raises(DisagreementError) as caught:
        resolve_mesh((shard, replicate), None, Strategy.HYBRID_SHARD)
    assert str(caught.value) == (
        "the process groups (shard, replicate) do not form a grid: the ranks of this rank's shard group are 0 of 2, "
        "1 of 2 in their replicate groups, but must have the same place and size in all of them"
    )
    with pytest.raises(DisagreementError, match="this rank's replicate group are 0 of 2, 0 of 3 in their shard groups"):
        resolve_mesh((FakeCommunicator(0, 2), Spy(0, 2, [(0, 3)])), None, Strategy.HYBRID_SHARD)


@pytest.mark.parametrize(
    ("topology", "rank", "shard", "replicate"),
    [
        (Topology.regular(2, 4), 5, (1, 4), (1, 2)),
        (Topology.regular(3, 2), 4, (0, 2), (2, 3)),
        (Topology.from_labels("abab"), 3, (1, 2), (1, 2)),
        (Topology.regular(1, 4), 2, (2, 4), (0, 1)),
        (Topology.regular(4, 1), 2, (0, 1), (2, 4)),
        (Topology.regular(1, 1), 0, (0, 1), (0, 1)),
    ],
)
@pytest.mark.parametrize("strategy", HYBRID)
def test_hybrid_shards_within_nodes_and_replicates_across_them(
    make_world, monkeypatch, topology, rank, shard, replicate, strategy
):
    monkeypatch.setattr(accelerator, "device_count", lambda: 1)  # as each rank sees it under CUDA_VISIBLE_DEVICES
    world = make_world(rank, topology)
    groups = resolve_mesh(None, None, strategy)
    assert (places(groups.shard), places(groups.replicate)) == (shard, replicate)
    assert groups.data is world.communicator
    assert groups.shard.topology.num_nodes == 1


@pytest.mark.parametrize(
    ("topology", "message"),
    [
        (
            Topology.uneven([3, 1]),
            "HYBRID_SHARD shards within each node and replicates across nodes, which needs nodes of one size, but they "
            "are 1 node(s) of 3 rank(s) + 1 node(s) of 1 rank(s): start the same number of ranks on each (srun "
            "--ntasks-per-node), or pass process_group=(shard, replicate) or a device_mesh",
        ),
        (SCATTERED, "this mesh cannot follow the order of the ranks"),
    ],
)
def test_nodes_that_make_no_grid_are_refused_with_the_mend(make_world, topology, message):
    make_world(1, topology)
    with pytest.raises(LaunchError) as caught:
        resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    assert message in str(caught.value)


def test_one_node_is_one_replica_and_rank_0_warns(make_world, caplog):
    make_world(0, Topology.regular(1, 4))
    with caplog.at_level(logging.INFO, "hpcfsdp"):
        resolve_mesh(None, None, Strategy.HYBRID_SHARD)
        resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    assert caplog.messages == ["HYBRID_SHARD on one node: the model is sharded over its 4 rank(s), with one replica"]


def test_the_groups_of_the_nodes_are_made_once_for_a_world(make_world, fake_torch, monkeypatch):
    make_world(1, Topology.regular(2, 2))
    first, second = (resolve_mesh(None, None, strategy) for strategy in HYBRID)
    assert first.shard is second.shard
    assert first.replicate is second.replicate
    enter(World(1, Topology.regular(1, 4)), monkeypatch)
    assert places(resolve_mesh(None, None, Strategy.HYBRID_SHARD).shard) == (1, 4)
    dist.destroy_process_group()
    fake_torch(1, 4)
    enter(World(1, Topology.regular(2, 2)), monkeypatch)
    assert resolve_mesh(None, None, Strategy.HYBRID_SHARD).shard is not first.shard


def test_nothing_outlives_the_process_group(make_world):
    make_world(1, Topology.regular(2, 2))
    groups = resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    held = [weakref.ref(groups.shard), weakref.ref(groups.replicate), weakref.ref(dist.group.WORLD)]
    del groups
    assert all(ref() is not None for ref in held)
    dist.destroy_process_group()
    gc.collect()
    assert [ref() for ref in held] == [None] * 3


def test_a_mesh_of_one_dimension_is_a_group(fake_torch):
    fake_torch(1, 4)
    mesh = DeviceMesh("cpu", torch.arange(4), mesh_dim_names=("shard",))
    assert places(resolve_mesh(None, mesh, None).shard) == (1, 4)
    assert places(resolve_mesh(None, mesh, Strategy.NO_SHARD).replicate) == (1, 4)
    with pytest.raises(ValueError, match=r"HYBRID_SHARD takes a device_mesh of two dimensions \(replicate, shard\)"):
        resolve_mesh(None, mesh, Strategy.HYBRID_SHARD)


@pytest.mark.parametrize("strategy", HYBRID)
def test_a_mesh_of_two_dimensions_is_replicate_and_shard(fake_torch, strategy):
    fake_torch(4, 6)
    mesh = DeviceMesh("cpu", torch.arange(6).view(2, 3))
    groups = resolve_mesh(None, mesh, strategy)
    assert (places(groups.replicate), places(groups.shard), places(groups.data)) == ((1, 2), (1, 3), (4, 6))
    with pytest.raises(ValueError, match=r"SHARD_GRAD_OP takes a device_mesh of one dimension, not 2: .* HYBRID_SHARD"):
        resolve_mesh(None, mesh, Strategy.SHARD_GRAD_OP)


def test_everyone_of_a_part_of_a_mesh_is_made_once(fake_torch):
    fake_torch(5, 8)
    whole = DeviceMesh("cpu", torch.arange(8).view(2, 2, 2), mesh_dim_names=("replicate", "shard", "tensor"))
    mesh = whole["replicate", "shard"]
    groups = resolve_mesh(None, mesh, Strategy.HYBRID_SHARD)
    assert (places(groups.replicate), places(groups.shard), places(groups.data)) == ((1, 2), (0, 2), (2, 4))
    assert resolve_mesh(None, mesh, Strategy.HYBRID_SHARD).data is groups.data


def test_the_groups_of_an_outer_unit_serve_another_strategy():
    comm = FakeCommunicator(1, 4)
    outer = resolve_mesh(comm, None, Strategy.SHARD_GRAD_OP)
    assert resolve_mesh(outer, None, None) is outer
    assert facts(resolve_mesh(outer, None, Strategy.FULL_SHARD)) == facts(resolve_mesh(comm, None, None))
    replicated = resolve_mesh(outer, None, Strategy.NO_SHARD)
    assert (replicated.replicate, replicated.shard.size) == (comm, 1)
    assert resolve_mesh(replicated, None, Strategy.FULL_SHARD).shard is comm
    with pytest.raises(
        ValueError, match="HYBRID_SHARD does not fit the process groups of the outer unit, which uses SHARD_GRAD_OP"
    ):
        resolve_mesh(outer, None, Strategy.HYBRID_SHARD)


def test_the_groups_of_a_hybrid_unit_serve_another_strategy(make_world):
    make_world(1, Topology.regular(2, 2))
    outer = resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    inner = resolve_mesh(outer, None, Strategy._HYBRID_SHARD_ZERO2)
    assert facts(inner) == (Strategy._HYBRID_SHARD_ZERO2, outer.shard, outer.replicate, outer.data)
    assert resolve_mesh(outer, None, Strategy.FULL_SHARD).shard is communicator_for(None, required=True)
    pair = resolve_mesh((FakeCommunicator(0, 2), FakeCommunicator(0, 3)), None, Strategy.HYBRID_SHARD)
    with pytest.raises(
        ValueError, match="FULL_SHARD does not fit the process groups of the outer unit, which uses HYBRID_SHARD"
    ):
        resolve_mesh(pair, None, Strategy.FULL_SHARD)
