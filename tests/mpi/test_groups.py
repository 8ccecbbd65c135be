"""Groups of ranks for the sharding strategies, over MPI and over gloo."""

import dataclasses

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy as Strategy

import hpcfsdp.world
from hpcfsdp.api import groups as module
from hpcfsdp.api.groups import resolve_groups
from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.mpi import MpiCommunicator
from hpcfsdp.comm.topology import Topology
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError, LaunchError


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
    groups = resolve_groups(None, None, None)
    assert groups.shard is groups.everyone is comm
    groups = resolve_groups(None, None, Strategy.NO_SHARD)
    assert (groups.shard.size, groups.replicate) == (1, comm)
    assert total(groups.shard, world.rank) == world.rank


@pytest.mark.parametrize("labels", ["aaaa", "aabb", "abab", "abcd", "abbb"])
@pytest.mark.parametrize("strategy", [Strategy.HYBRID_SHARD, Strategy._HYBRID_SHARD_ZERO2])
def test_hybrid_shards_within_the_nodes(world, on_nodes, labels, strategy):
    topology = on_nodes(labels)
    if topology.ranks_per_node is None:
        with pytest.raises(LaunchError, match=r"HYBRID_SHARD shards within each node .* nodes of one size"):
            resolve_groups(None, None, strategy)
        return
    groups = resolve_groups(None, None, strategy)
    node, place = topology.node_of(world.rank), topology.local_rank(world.rank)
    assert grid_of(groups, world.rank) == (list(node), [other[place] for other in topology.nodes])
    assert total(groups.replicate, total(groups.shard, 2**world.rank)) == 2**world.size - 1
    assert groups.everyone is world.communicator
    again = resolve_groups(None, None, strategy)
    assert (again.shard, again.replicate) == (groups.shard, groups.replicate)


def test_without_init_nodes_are_found_by_the_names_of_hosts(world, monkeypatch):
    group = dist.new_group(backend="gloo")
    over_gloo = TorchGroupCommunicator(group)
    monkeypatch.setattr(hpcfsdp.world, "_world", None)
    monkeypatch.setattr(module, "communicator_for", lambda *_, **__: over_gloo)
    monkeypatch.setattr(module.env, "host_name", lambda: "nid001" if world.rank < world.size / 2 else "nid002")
    if world.size == 3:
        with pytest.raises(LaunchError, match=r"they are 1 node\(s\) of 2 rank\(s\) \+ 1 node\(s\) of 1 rank\(s\)"):
            resolve_groups(None, None, Strategy.HYBRID_SHARD)
        return
    groups = resolve_groups(None, None, Strategy.HYBRID_SHARD)
    half = (world.size + 1) // 2
    first = world.rank // half * half
    across = list(range(world.rank % half, world.size, half))
    assert grid_of(groups, world.rank) == (list(range(first, first + half)), across)
    assert resolve_groups(None, None, Strategy.HYBRID_SHARD).shard is groups.shard


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
    groups = resolve_groups((shard, replicate), None, Strategy.HYBRID_SHARD)
    first = world.rank // 2 * 2
    assert grid_of(groups, world.rank) == ([first, first + 1], list(range(world.rank % 2, world.size, 2)))
    assert groups.everyone is comm
    assert isinstance(groups.shard, MpiCommunicator if backend == "hpcmpi" else TorchGroupCommunicator)
    swapped = resolve_groups((replicate, shard), None, Strategy.HYBRID_SHARD)
    assert (swapped.shard.size, swapped.replicate.size) == (world.size // 2, 2)


def test_a_pair_of_communicators_of_some_ranks_has_no_everyone(world, comm):
    if world.size < 3:
        pytest.skip("at least three ranks")
    if world.rank >= 2:
        return
    groups = resolve_groups((comm.subgroup([0, 1]), comm.subgroup([world.rank])), None, Strategy.HYBRID_SHARD)
    assert groups.everyone is None
    assert total(groups.shard, 2**world.rank) == 3


def test_ranks_of_a_pair_that_makes_no_grid_all_raise(world, comm):
    if world.size < 4:
        pytest.skip("four ranks")
    if world.rank >= 4:
        return
    shard = comm.subgroup([0, 1] if world.rank < 2 else [2, 3])
    replicate = comm.subgroup([0, 3] if world.rank in (0, 3) else [1, 2])
    with pytest.raises(DisagreementError, match="make no grid: the ranks of this rank's replicate group are"):
        resolve_groups((shard, replicate), None, Strategy.HYBRID_SHARD)


def test_meshes_of_torch(world, comm):
    mesh = world.mesh()
    assert grid_of(resolve_groups(None, mesh, Strategy.NO_SHARD), world.rank)[1] == list(range(world.size))
    assert resolve_groups(None, mesh, None).shard.size == world.size
    inner = 2 if world.size % 2 == 0 else 1
    mesh = world.mesh(replicate=None, shard=inner)
    groups = resolve_groups(None, mesh, Strategy.HYBRID_SHARD)
    first = world.rank // inner * inner
    assert grid_of(groups, world.rank)[0] == list(range(first, first + inner))
    assert groups.everyone is comm


def test_everyone_of_a_part_of_a_mesh(world):
    tensor = 2 if world.size % 2 == 0 else 1
    ranks = torch.arange(world.size).view(1, -1, tensor)
    whole = DeviceMesh("cpu", ranks, mesh_dim_names=("replicate", "shard", "tensor"))
    groups = resolve_groups(None, whole["replicate", "shard"], Strategy.HYBRID_SHARD)
    members = list(range(world.rank % tensor, world.size, tensor))
    assert groups.everyone.all_gather_object(world.rank) == members
    assert resolve_groups(None, whole["replicate", "shard"], Strategy.HYBRID_SHARD).everyone is groups.everyone


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
