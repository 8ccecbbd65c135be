"""Groups of ranks for the sharding strategies, over MPI and over gloo."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as Strategy

import hpcfsdp.world
from hpcfsdp import _compat
from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.mpi.communicator import MpiCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError, LaunchError
from hpcfsdp.launch.topology import Topology
from hpcfsdp.units import groups as groups_module, unit_mesh
from hpcfsdp.units.groups import resolve_mesh

pytestmark = [pytest.mark.ranks(4, 1, 2, 3), pytest.mark.transport]


@pytest.fixture
def on_nodes(world, monkeypatch):
    """``on_nodes("aabb")``: the world as if its ranks lay on such nodes; the ranks on this rank's node."""

    def pretend(labels):
        topology = Topology.from_labels(labels[: world.size])
        monkeypatch.setattr(hpcfsdp.world, "_world", dataclasses.replace(world, topology=topology))
        return topology

    return pretend


def total(comm, value):
    """The sum over a communicator."""
    tensor = torch.tensor([float(value)])
    comm.all_reduce(tensor, "sum")
    return int(tensor)


def grid_of(groups, rank):
    """The ranks of the shard group, and of the replicate group, in order."""
    return groups.shard.all_gather_object(rank), groups.replicate.all_gather_object(rank)


def test_full_shard_is_over_all_ranks_and_no_shard_replicates(world, comm):
    groups = resolve_mesh(None, None, None)
    assert groups.shard is groups.data is comm
    groups = resolve_mesh(None, None, Strategy.NO_SHARD)
    assert (groups.shard.size, groups.replicate) == (1, comm)
    assert total(groups.shard, world.rank) == world.rank


@pytest.mark.parametrize("labels", ["aaaa", "aabb", "abab", "abcd", "abbb"])
@pytest.mark.parametrize("strategy", [Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2])
def test_hybrid_shards_within_the_nodes(world, on_nodes, labels, strategy):
    topology = on_nodes(labels)
    if topology.ranks_per_node is None:
        with pytest.raises(LaunchError, match=r"HYBRID_SHARD shards within each node .* nodes of one size"):
            resolve_mesh(None, None, strategy)
        return
    groups = resolve_mesh(None, None, strategy)
    node, place = topology.node_of(world.rank), topology.local_rank(world.rank)
    assert grid_of(groups, world.rank) == (list(node), [other[place] for other in topology.nodes])
    assert total(groups.replicate, total(groups.shard, 2**world.rank)) == 2**world.size - 1
    assert groups.data is world.communicator
    again = resolve_mesh(None, None, strategy)
    assert (again.shard, again.replicate) == (groups.shard, groups.replicate)


def test_without_init_nodes_are_found_by_the_names_of_hosts(world, monkeypatch):
    group = dist.new_group(backend="gloo")
    over_gloo = TorchGroupCommunicator(group)
    monkeypatch.setattr(hpcfsdp.world, "_world", None)
    for module in (groups_module, unit_mesh):
        monkeypatch.setattr(module, "communicator_for", lambda *_, **__: over_gloo)
    monkeypatch.setattr(unit_mesh.env, "host_name", lambda: "nid001" if world.rank < world.size / 2 else "nid002")
    if world.size == 3:
        with pytest.raises(LaunchError, match=r"they are 1 node\(s\) of 2 rank\(s\) \+ 1 node\(s\) of 1 rank\(s\)"):
            resolve_mesh(None, None, Strategy.HYBRID_SHARD)
        return
    groups = resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    half = (world.size + 1) // 2
    first = world.rank // half * half
    across = list(range(world.rank % half, world.size, half))
    assert grid_of(groups, world.rank) == (list(range(first, first + half)), across)
    assert resolve_mesh(None, None, Strategy.HYBRID_SHARD).shard is groups.shard


def pairs(world, shard_size, backend):
    """Groups of neighbours, and of ranks in the same place of those."""
    rows = [list(range(first, first + shard_size)) for first in range(0, world.size, shard_size)]
    columns = [list(ranks) for ranks in zip(*rows, strict=True)]
    made = []
    for lines in (rows, columns):
        groups = [dist.new_group(ranks, backend=backend) for ranks in lines]
        made.append(next(group for group, ranks in zip(groups, lines, strict=True) if world.rank in ranks))
    return made


@pytest.mark.parametrize("backend", ["hpcmpi", "gloo"])
def test_a_pair_of_torch_groups(world, comm, backend):
    if world.size % 2:
        pytest.skip("an even number of ranks")
    shard, replicate = pairs(world, 2, backend)
    groups = resolve_mesh((shard, replicate), None, Strategy.HYBRID_SHARD)
    first = world.rank // 2 * 2
    assert grid_of(groups, world.rank) == ([first, first + 1], list(range(world.rank % 2, world.size, 2)))
    assert groups.data is comm
    assert isinstance(groups.shard, MpiCommunicator if backend == "hpcmpi" else TorchGroupCommunicator)
    swapped = resolve_mesh((replicate, shard), None, Strategy.HYBRID_SHARD)
    assert (swapped.shard.size, swapped.replicate.size) == (world.size // 2, 2)


def test_a_pair_of_communicators_of_some_ranks_has_no_everyone(world, comm):
    if world.size < 3:
        pytest.skip("at least three ranks")
    if world.rank >= 2:
        return
    groups = resolve_mesh((comm.subgroup([0, 1]), comm.subgroup([world.rank])), None, Strategy.HYBRID_SHARD)
    assert groups.data is None
    assert total(groups.shard, 2**world.rank) == 3


def test_ranks_of_a_pair_that_makes_no_grid_all_raise(world, comm):
    if world.size < 4:
        pytest.skip("four ranks")
    if world.rank >= 4:
        return
    shard = comm.subgroup([0, 1] if world.rank < 2 else [2, 3])
    replicate = comm.subgroup([0, 3] if world.rank in (0, 3) else [1, 2])
    with pytest.raises(DisagreementError, match="do not form a grid: the ranks of this rank's replicate group are"):
        resolve_mesh((shard, replicate), None, Strategy.HYBRID_SHARD)


def test_meshes_of_torch(world, comm):
    mesh = world.mesh()
    assert grid_of(resolve_mesh(None, mesh, Strategy.NO_SHARD), world.rank)[1] == list(range(world.size))
    assert resolve_mesh(None, mesh, None).shard.size == world.size
    inner = 2 if world.size % 2 == 0 else 1
    mesh = world.mesh(replicate=None, shard=inner)
    groups = resolve_mesh(None, mesh, Strategy.HYBRID_SHARD)
    first = world.rank // inner * inner
    assert grid_of(groups, world.rank)[0] == list(range(first, first + inner))
    assert groups.data is comm


def test_everyone_of_a_part_of_a_mesh(world):
    tensor = 2 if world.size % 2 == 0 else 1
    ranks = torch.arange(world.size).view(1, -1, tensor)
    whole = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard", "tensor"))
    groups = resolve_mesh(None, whole["replicate", "shard"], Strategy.HYBRID_SHARD)
    members = list(range(world.rank % tensor, world.size, tensor))
    assert groups.data.all_gather_object(world.rank) == members
    assert resolve_mesh(None, whole["replicate", "shard"], Strategy.HYBRID_SHARD).data is groups.data


def test_gathered_memory_is_one_for_all_ranks_of_one_node(world, comm):
    assert comm.shares_gathered == (world.num_nodes == 1 and world.size > 1)
    assert not comm.subgroup([world.rank]).shares_gathered
    spread = MpiCommunicator(world.comm.Dup(), Topology.regular(world.size, 1))
    assert not spread.shares_gathered
    spread.close()
    assert not communicator_for(dist.new_group(backend="gloo"), required=True).shares_gathered
    full = comm.alloc(world.size, torch.float32, gathered=True)
    full[world.rank] = world.rank + 1.0
    comm.barrier()
    seen = [rank + 1.0 if comm.shares_gathered or rank == world.rank else 0.0 for rank in range(world.size)]
    assert world.num_nodes > 1 or full.tolist() == seen
    comm.barrier()
    comm.free(full)


def test_the_first_rank_and_the_first_replica(world):
    groups = resolve_mesh(None, None, None)
    assert groups.is_first("replicate")
    assert groups.is_first() == (world.rank == 0)
    assert (groups.size("replicate"), groups.is_hybrid) == (1, False)
    groups = resolve_mesh(None, None, Strategy.NO_SHARD)
    assert groups.is_first() == groups.is_first("replicate") == (world.rank == 0)
    assert groups.size("replicate") == world.size


@pytest.mark.parametrize("labels", ["aabb", "abab", "abcd"])
def test_first_ranks_under_hybrid_and_their_names_in_the_world(world, on_nodes, monkeypatch, labels):
    topology = on_nodes(labels)
    if topology.ranks_per_node is None:
        pytest.skip("nodes of one size")
    monkeypatch.setattr(unit_mesh, "_current", None)
    groups = resolve_mesh(None, None, Strategy.HYBRID_SHARD)
    node = list(topology.node_of(world.rank))
    assert groups.is_first("replicate") == (topology.nodes[0] == topology.node_of(world.rank))
    assert groups.is_first() == (world.rank == 0)
    assert groups.device_mesh is None
    assert list(groups.ranks(groups.dtensor_dim)) == node
    group = groups.process_group()
    assert dist.get_process_group_ranks(group) == node
    assert (group is dist.group.WORLD) == (len(node) == world.size)
    assert groups.process_group() is group
    assert resolve_mesh(None, None, Strategy.HYBRID_SHARD).process_group() is group
    total_of_node = torch.tensor([world.rank])
    dist.all_reduce(total_of_node, group=group)
    assert total_of_node.item() == sum(node)


@pytest.mark.parametrize("backend", ["hpcmpi", "gloo"])
def test_the_process_group_of_groups_that_came_from_torch(world, backend):
    everyone = dist.new_group(backend=backend)
    groups = resolve_mesh(everyone, None, None)
    assert groups.ranks(groups.dtensor_dim) == tuple(range(world.size))
    assert dist.get_process_group_ranks(groups.process_group()) == list(range(world.size))
    if world.size % 2:
        return
    shard, replicate = pairs(world, 2, backend)
    groups = resolve_mesh((shard, replicate), None, Strategy.HYBRID_SHARD)
    first = world.rank // 2 * 2
    assert groups.ranks(groups.dtensor_dim) == (first, first + 1)
    assert dist.get_process_group_ranks(groups.process_group()) == [first, first + 1]
    assert groups.is_first("replicate") == (first == 0)
    if backend == "gloo":
        assert groups.process_group() is shard


def test_ranks_are_named_in_the_order_of_the_shards(world):
    """Which need not be that of the world."""
    turned = MpiCommunicator(world.comm.Split(0, -world.rank))
    groups = resolve_mesh(turned, None, None)
    assert groups.shard.rank == world.size - 1 - world.rank
    assert groups.ranks(groups.dtensor_dim) == tuple(reversed(range(world.size)))
    assert sorted(dist.get_process_group_ranks(groups.process_group())) == list(range(world.size))
    turned.close()


def test_ranks_that_are_in_different_numbers_of_groups_meet_in_one(world, monkeypatch):
    """Torch itself names a group after that number, where not all ranks of the world take part in the making."""
    monkeypatch.setattr(unit_mesh, "_current", None)
    mine = [dist.new_group([0])]
    parts = [range(world.size), range((world.size + 1) // 2)]
    for ranks in parts:
        if world.rank in ranks:
            turned = MpiCommunicator(world.comm.Create_group(world.comm.group.Incl(list(reversed(ranks)))))
            group = resolve_mesh(turned, None, None).process_group()
            assert dist.get_process_group_ranks(group) == list(ranks)
            total_of_ranks = torch.tensor([world.rank])
            dist.all_reduce(total_of_ranks, group=group)
            assert total_of_ranks.item() == sum(ranks)
            turned.close()
            mine.append(group)
    for group in mine:
        if group not in (dist.group.WORLD, dist.GroupMember.NON_GROUP_MEMBER):
            dist.destroy_process_group(group)


def test_groups_of_the_same_ranks_are_several(world):
    first, second = (_compat.new_group_of(range(world.size), backend) for backend in (None, "gloo"))
    assert first is not second
    assert (dist.get_backend(first), dist.get_backend(second)) == (dist.get_backend(), "gloo")
    for group in (first, second):
        assert dist.get_rank(group) == world.rank
        value = torch.tensor([float(world.rank)])
        dist.all_reduce(value, group=group)
        assert value.item() == sum(range(world.size))
        dist.destroy_process_group(group)
    again = _compat.new_group_of(range(world.size))
    dist.barrier(group=again)
    dist.destroy_process_group(again)


def test_a_group_can_be_made_again_when_one_of_the_same_ranks_is_gone(world):
    """What that has left in the store is not for this one to find."""
    names = set()
    for _ in range(3):
        group = _compat.new_group_of(range(world.size), "gloo")
        names.add(group.group_name)
        value = torch.tensor([1.0])
        dist.all_reduce(value, group=group)
        assert value.item() == world.size
        dist.destroy_process_group(group)
    assert len(names) == 3


def test_under_no_shard_distributed_tensors_are_on_all_ranks(world):
    groups = resolve_mesh(None, None, Strategy.NO_SHARD)
    assert groups.shard.size == 1
    assert groups.dtensor_ranks.size == world.size
    assert groups.ranks(groups.dtensor_dim) == tuple(range(world.size))
    assert groups.process_group() is dist.group.WORLD


def test_the_mesh_that_was_given_is_kept_for_units_that_it_fits(world):
    mesh = world.mesh()
    groups = resolve_mesh(None, mesh, None)
    assert groups.device_mesh is mesh
    assert resolve_mesh(groups, None, None).device_mesh is mesh
    assert resolve_mesh(groups, None, Strategy.SHARD_GRAD_OP).device_mesh is mesh
    assert resolve_mesh(None, None, None).device_mesh is None
    inner = 2 if world.size % 2 == 0 else 1
    mesh = world.mesh(replicate=None, shard=inner)
    groups = resolve_mesh(None, mesh, Strategy.HYBRID_SHARD)
    assert groups.device_mesh is mesh
    assert groups.ranks(groups.dtensor_dim) == tuple(mesh.mesh[world.rank // inner].tolist())
    assert resolve_mesh(groups, None, Strategy._HYBRID_SHARD_ZERO2).device_mesh is mesh
    assert resolve_mesh(groups, None, Strategy.FULL_SHARD).device_mesh is None  # its rows are over all ranks
