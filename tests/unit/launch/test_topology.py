import pytest
from hypothesis import given, strategies as st

from hpcfsdp.launch.topology import Topology

machines = st.lists(st.integers(0, 5), min_size=1, max_size=14).map(Topology.from_labels)


def test_a_regular_machine_is_filled_node_by_node():
    topology = Topology.regular(3, 2)
    assert topology.nodes == ((0, 1), (2, 3), (4, 5))
    assert (topology.size, topology.num_nodes, topology.ranks_per_node) == (6, 3, 2)
    assert topology.leaders == (0, 2, 4)
    assert [topology.node_rank(rank) for rank in range(6)] == [0, 0, 1, 1, 2, 2]
    assert [topology.local_rank(rank) for rank in range(6)] == [0, 1, 0, 1, 0, 1]
    assert topology.node_of(3) == (2, 3)


def test_nodes_may_hold_different_numbers_of_ranks():
    topology = Topology.uneven([3, 1, 2])
    assert topology.nodes == ((0, 1, 2), (3,), (4, 5))
    assert topology.ranks_per_node is None
    assert topology.leaders == (0, 3, 4)


def test_ranks_with_one_label_share_a_node_in_the_order_of_their_lowest_rank():
    assert Topology.from_labels("baba").nodes == ((0, 2), (1, 3))
    assert Topology.from_labels(["x", "y", "x", "z", "y"]).nodes == ((0, 2), (1, 4), (3,))


def test_equal_machines_are_equal_however_they_were_made():
    assert Topology.regular(2, 2) == Topology.uneven([2, 2]) == Topology.from_labels("aabb")
    assert hash(Topology.regular(2, 2)) == hash(Topology.uneven([2, 2]))
    assert Topology.regular(2, 2) != Topology.from_labels("abab")


@pytest.mark.parametrize(
    ("topology", "text"),
    [
        (Topology.regular(1, 1), "1 node(s) of 1 rank(s)"),
        (Topology.regular(4, 8), "4 node(s) of 8 rank(s)"),
        (Topology.uneven([1, 3, 2, 3]), "2 node(s) of 3 rank(s) + 1 node(s) of 2 rank(s) + 1 node(s) of 1 rank(s)"),
    ],
)
def test_a_topology_is_described_in_words(topology, text):
    assert str(topology) == text


@pytest.mark.parametrize(
    ("nodes", "text"),
    [
        ((), "nodes () must hold each of the ranks 0, 1, 2, ... once and no node may be empty"),
        (((),), "nodes ((),) must hold each of the ranks 0, 1, 2, ... once and no node may be empty"),
        (((0, 1), ()), "no node may be empty"),
        (((0, 2),), "missing or doubled: [1]"),
        (((0, 1), (1, 2)), "missing or doubled: [1]"),
        (((1, 2),), "missing or doubled: [0]"),
        (((1, 0),), "nodes ((1, 0),) must be sorted, within each node and by their lowest rank"),
        (((2, 3), (0, 1)), "nodes ((2, 3), (0, 1)) must be sorted, within each node and by their lowest rank"),
    ],
)
def test_a_machine_that_cannot_be_is_refused(nodes, text):
    with pytest.raises(ValueError) as caught:
        Topology(nodes)
    assert text in str(caught.value)


def test_a_sub_group_keeps_who_shares_a_node_with_whom():
    topology = Topology.uneven([3, 2])
    assert topology.restrict([0, 2, 3, 4]).nodes == ((0, 1), (2, 3))
    assert topology.restrict([1, 4]).nodes == ((0,), (1,))
    assert topology.restrict([3]).nodes == ((0,),)
    assert Topology.from_labels("abab").restrict([1, 2, 3]).nodes == ((0, 2), (1,))


def test_nodes_are_split_into_imagined_ones():
    assert Topology.regular(1, 5).split(2).nodes == ((0, 1), (2, 3, 4))
    assert Topology.from_labels("ababab").split(3).nodes == ((0,), (1,), (2,), (3,), (4,), (5,))
    assert Topology.from_labels("abab").split(1) == Topology.from_labels("abab")
    with pytest.raises(ValueError) as caught:
        Topology.uneven([2, 3]).split(3)
    assert str(caught.value) == "a node of 2 rank(s) cannot be split into 3 nodes"


@given(machines)
def test_each_segment_of_another_node_arrives_on_each_node_exactly_once(topology):
    for home, node in enumerate(topology.nodes):
        arriving = [client for rank in node for client in topology.clients(rank)]
        assert sorted(arriving) == [rank for rank in range(topology.size) if topology.node_rank(rank) != home]


@given(machines)
def test_a_ward_is_who_has_this_rank_as_steward(topology):
    for rank in range(topology.size):
        assert topology.proxy(rank, topology.node_rank(rank)) == rank
        for other in range(topology.size):
            home = topology.node_rank(other)
            is_proxy = home != topology.node_rank(rank) and topology.proxy(rank, home) == other
            assert (rank in topology.clients(other)) == is_proxy


@given(machines)
def test_stewards_share_the_load_evenly(topology):
    for node in topology.nodes:
        for other in topology.nodes:
            if other is not node:
                counts = [len(set(topology.clients(rank)) & set(other)) for rank in node]
                assert max(counts) - min(counts) <= 1


@given(machines, st.data())
def test_a_part_of_a_machine_is_a_machine_on_which_neighbours_stay_neighbours(topology, data):
    ranks = sorted(data.draw(st.sets(st.integers(0, topology.size - 1), min_size=1)))
    part = topology.restrict(ranks)
    assert part.size == len(ranks)
    for mine, rank in enumerate(ranks):
        assert [ranks[other] for other in part.node_of(mine)] == [r for r in topology.node_of(rank) if r in ranks]
