import pytest
import torch
import torch.distributed as dist
from mpi4py import MPI

from hpcfsdp.comm import communicator_for
from hpcfsdp.comm.mesh import make_mesh, plan_mesh
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.topology import Topology

pytestmark = [pytest.mark.ranks(2, 1, 3, 4), pytest.mark.transport]


def line_of(mesh, name):
    """The ranks of the world with whom this rank shares a line of one dimension, in order."""
    return dist.get_process_group_ranks(mesh.get_group(name))


def test_ranks_share_a_node_where_they_share_memory(world):
    node = world.comm.Split_type(MPI.COMM_TYPE_SHARED)  # mostly all ranks; tests/slurm runs these tests on two nodes
    assert world.topology.node_of(world.rank) == tuple(node.allgather(world.rank))
    assert (world.local_rank, world.local_size) == (node.rank, node.size)
    assert world.num_nodes == world.comm.allreduce(int(node.rank == 0))
    node.Free()
    assert communicator_for(None, required=True).topology == world.topology


def test_a_mesh_has_one_dimension_over_all_ranks_unless_others_are_given(world):
    mesh = world.mesh()
    assert mesh.mesh_dim_names == ("shard",)
    assert mesh.mesh.tolist() == list(range(world.size))
    assert line_of(mesh, "shard") == list(range(world.size))
    mesh = world.mesh(replicate="nodes", shard="node")
    assert mesh.mesh.tolist() == [list(node) for node in world.topology.nodes]
    with pytest.raises(LaunchError, match=rf"does not divide the {world.size} rank\(s\) of this job"):
        world.mesh(replicate=world.size + 1, shard=None)
    with pytest.raises(LaunchError, match=r"mesh dimension shard=0: give a positive number") as caught:
        world.mesh(shard=0 if world.rank == world.size - 1 else None)
    assert caught.value.raised_on_all_ranks


def test_the_group_of_a_mesh_carries_collectives_of_its_ranks_alone(world):
    inner = 2 if world.size % 2 == 0 else 1
    mesh = world.mesh(outer=None, inner=inner)
    first = world.rank // inner * inner
    lines = {"outer": range(world.rank % inner, world.size, inner), "inner": range(first, first + inner)}
    for name, members in lines.items():
        assert line_of(mesh, name) == list(members)
        comm = communicator_for(mesh.get_group(name), required=True)
        assert (comm.rank, comm.size) == (members.index(world.rank), len(members))
        assert comm.topology == world.topology.restrict(members)
        tensor = torch.full((4,), float(world.rank))
        comm.all_reduce(tensor, "sum")
        assert tensor.tolist() == [float(sum(members))] * 4


@pytest.mark.parametrize("labels", ["aabb", "abab"])
def test_the_last_dimension_is_within_nodes_for_any_distribution_of_ranks(world, labels):
    topology = Topology.from_labels(labels[: world.size])
    if topology.ranks_per_node is None:
        with pytest.raises(LaunchError, match="needs nodes of one size"):
            plan_mesh(topology, {"replicate": "nodes", "shard": "node"})
        return
    mesh = make_mesh(plan_mesh(topology, {"replicate": "nodes", "shard": "node"}), "cpu")
    assert line_of(mesh, "shard") == list(topology.node_of(world.rank))
    across = [node[topology.local_rank(world.rank)] for node in topology.nodes]
    assert line_of(mesh, "replicate") == across
    values = communicator_for(mesh.get_group("replicate"), required=True).all_gather_object(world.rank)
    assert values == across


def test_each_segment_arrives_on_every_node_once_when_stewards_exchange(world):
    # The exchange that windows make, with rank numbers in place of tensors.
    for labels in ("aabb", "abab", "abbb", "abcd", "aaba"):
        topology = Topology.from_labels(labels[: world.size])
        proxies = [topology.proxy(world.rank, node) for node in range(topology.num_nodes)]
        sent = [rank in proxies and rank != world.rank for rank in range(world.size)]
        arrived = [rank for rank, came in enumerate(world.comm.alltoall(sent)) if came]
        assert arrived == sorted(topology.clients(world.rank))
        node = topology.node_of(world.rank)
        everyone = world.comm.allgather(arrived)
        assert sorted([*node, *(rank for place in node for rank in everyone[place])]) == list(range(world.size))
