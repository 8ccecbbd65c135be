"""Bytes and seconds of collectives, next to sums by hand."""

import pytest

from hpcfsdp.plan.links import Link, Links
from hpcfsdp.plan.wire import Cost, Group

LINKS = Links(Link(1e-6, 100e9, "given"), Link(1e-5, 10e9, "given"))


@pytest.mark.parametrize(
    ("shards", "per_node", "expected"),
    [(16, 8, (8, 2)), (8, 8, (8, 1)), (4, 8, (4, 1)), (12, 8, (4, 3)), (1, 8, (1, 1)), (6, 4, (2, 3))],
)
def test_shards_are_neighbours(shards, per_node, expected):
    found = Group.of_shards(shards, per_node)
    assert (found.per_node, found.nodes) == expected
    assert found.size == shards


@pytest.mark.parametrize(
    ("replicas", "shards", "per_node", "expected"),
    [(4, 8, 8, (1, 4)), (4, 16, 8, (1, 4)), (8, 4, 8, (2, 4)), (16, 1, 8, (8, 2)), (2, 2, 8, (2, 1))],
)
def test_replicas_are_at_the_distance_of_a_copy(replicas, shards, per_node, expected):
    found = Group.of_replicas(replicas, shards, per_node)
    assert (found.per_node, found.nodes) == expected


def test_a_gather_within_a_node():
    found = Group(4, 1).gather(4e9, LINKS)
    assert found == Cost(3e9, 0.0, pytest.approx(3e-6), pytest.approx(0.03), 1)


def test_what_comes_from_other_nodes_arrives_once_at_each_node():
    found = Group(4, 2).gather(8e9, LINKS)
    assert found.between_bytes * 4 == 4e9  # all ranks of a node together receive the other node's half
    assert found.between_bytes + found.within_bytes == 7e9
    assert found.latency_s == pytest.approx(1e-5 + 6e-6)
    assert found.transfer_s == pytest.approx(0.1)  # 1 GB at 10 GB/s; meanwhile the node passes on 6 GB


def test_one_rank_sends_nothing():
    assert Group(1, 1).gather(1e9, LINKS) == Cost()
    assert Group(1, 1).all_reduce(1e9, LINKS).seconds == 0


def test_an_all_reduce_is_a_reduce_scatter_and_a_gather():
    gather, reduced = Group(2, 4).gather(1e9, LINKS), Group(2, 4).all_reduce(1e9, LINKS)
    assert reduced.between_bytes == 2 * gather.between_bytes
    assert reduced.seconds == 2 * gather.seconds
    assert reduced.calls == 1
