"""Who keeps gathered values, by what the program passes and by the nodes of the ranks."""

from types import SimpleNamespace

import pytest
import torch

from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import ShardingError
from hpcfsdp.launch.topology import Topology
from hpcfsdp.units.keepers import check_choice, keepers_for


@pytest.mark.parametrize(
    ("given", "taken"), [(True, True), (False, False), (1, False), (8, True), (2, 2), (4, 4), ("node", "node")]
)
def test_what_a_program_may_pass(given, taken):
    assert check_choice(given, 8) is taken or (check_choice(given, 8) == taken and not isinstance(taken, bool))


@pytest.mark.parametrize("given", [0, -2, 3, 16, 2.0, "nodes", None, torch.tensor([2, 4])], ids=str)
def test_what_is_refused(given):
    with pytest.raises(ValueError, match="reshard_after_forward"):
        check_choice(given, 8)


def kept(topology, choice, *, rank=0, in_node_memory=False, stays=False):
    """None, "node", or the places of the ranks that keep parts."""
    comm = FakeCommunicator(rank, topology.size, topology=topology)
    params = SimpleNamespace(comm=comm, stays_gathered=stays, is_in_node_memory=in_node_memory)
    found = keepers_for(params, choice, CommOptions())
    return found if found is None or isinstance(found, str) else (found.size, found.rank)


NODES = Topology.regular(2, 4)
CYCLIC = Topology.from_labels([0, 1, 0, 1])


@pytest.mark.parametrize("in_node_memory", [True, False])
def test_nobody_keeps_what_is_freed_or_shared_or_not_divided(in_node_memory):
    for choice in (True, False):
        assert kept(NODES, choice, in_node_memory=in_node_memory) is None
    assert kept(NODES, "node", in_node_memory=in_node_memory, stays=True) is None
    assert kept(Topology.regular(3, 1), 2, in_node_memory=in_node_memory) is None  # experts on other ranks


def test_nodes_keep_values_in_their_memory():
    assert [kept(NODES, choice, in_node_memory=True) for choice in ("node", 2, 4)] == ["node"] * 3
    assert kept(Topology.uneven([3, 1]), "node", in_node_memory=True) == "node"
    # A number of ranks that a node does not have: parts on whole nodes, or nobody.
    assert kept(Topology.regular(4, 2), 4, rank=5, in_node_memory=True) == (4, 1)
    assert kept(Topology.uneven([3, 1]), 2, in_node_memory=True) is None
    assert kept(CYCLIC, 2, in_node_memory=True) == "node"
    assert kept(Topology.from_labels([0, 1, 2, 3, 0, 1, 2, 3]), 4, in_node_memory=True) is None


def test_ranks_with_devices_keep_parts():
    assert kept(NODES, "node", rank=5) == (4, 1)
    assert kept(CYCLIC, "node", rank=2) == (2, 1)
    assert kept(CYCLIC, 2, rank=2) == (2, 0)  # consecutive ranks, as with torch
    assert kept(Topology.regular(1, 8), "node") is None  # the shards are there
    assert kept(Topology.regular(8, 1), "node") == (1, 0)  # a node keeps all


def test_unequal_nodes_of_devices_are_refused():
    with pytest.raises(ShardingError, match=r"needs nodes of equal numbers of ranks, not 1 node.* of 3"):
        kept(Topology.uneven([3, 1]), "node")
