import pytest

from hpcfsdp.comm.mesh import plan_mesh
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.topology import Topology

TWO_OF_FOUR = Topology.regular(2, 4)


@pytest.mark.parametrize(
    ("dimensions", "shape"),
    [
        ({"shard": None}, (8,)),
        ({"shard": 8}, (8,)),
        ({"replicate": "nodes", "shard": "node"}, (2, 4)),
        ({"replicate": "nodes", "shard": None}, (2, 4)),
        ({"replicate": None, "shard": "node"}, (2, 4)),
        ({"replicate": 2, "shard": None, "tensor": 2}, (2, 2, 2)),
        ({"data": "nodes", "pipe": 4, "rest": None}, (2, 4, 1)),
        ({"one": 1, "shard": None}, (1, 8)),
    ],
)
def test_extents_are_numbers_nodes_or_what_the_others_leave(dimensions, shape):
    plan = plan_mesh(TWO_OF_FOUR, dimensions)
    assert plan.names == tuple(dimensions)
    assert plan.shape == shape
    assert plan.ranks == tuple(range(8))


def test_a_single_rank_makes_a_mesh_of_any_names():
    assert plan_mesh(Topology.regular(1, 1), {"replicate": "nodes", "shard": "node"}).shape == (1, 1)


def test_ranks_that_the_launcher_dealt_out_come_node_by_node():
    plan = plan_mesh(Topology.from_labels("abab"), {"replicate": "nodes", "shard": "node"})
    assert (plan.shape, plan.ranks) == ((2, 2), (0, 2, 1, 3))


def test_a_single_dimension_keeps_the_numbers_of_the_ranks():
    assert plan_mesh(Topology.from_labels("abab"), {"shard": None}).ranks == (0, 1, 2, 3)


def test_lines_that_fit_no_node_keep_the_numbers_of_the_ranks():
    plan = plan_mesh(Topology.from_labels("abcabc"), {"replicate": 2, "shard": 3})
    assert plan.ranks == (0, 1, 2, 3, 4, 5)


@pytest.mark.parametrize("labels", ["aabb", "abab", "aaabbb", "ababab", "abcabc", "aabbcc"])
def test_a_coordinate_is_the_rank_in_its_group(labels):
    plan = plan_mesh(Topology.from_labels(labels), {"replicate": "nodes", "shard": "node"})
    assert [list(line) for d in (0, 1) for line in plan.lines(d)] == [sorted(x) for d in (0, 1) for x in plan.lines(d)]


def test_an_order_of_ranks_that_a_mesh_cannot_follow_is_refused():
    with pytest.raises(LaunchError, match=r"order of the ranks .*\(\(\(0, 3\), \(1, 2\)\)\); start them"):
        plan_mesh(Topology.from_labels("abba"), {"replicate": "nodes", "shard": "node"})


def test_dimensions_within_nodes_come_last():
    with pytest.raises(
        LaunchError, match=r"shard='node' does not follow the nodes in this place \(ranks \(0, 2, 4, 6\)"
    ):
        plan_mesh(TWO_OF_FOUR, {"shard": "node", "replicate": "nodes"})


def test_nodes_of_different_sizes_hold_a_mesh_of_plain_numbers():
    plan = plan_mesh(Topology.uneven([3, 1]), {"replicate": 2, "shard": None})
    assert (plan.shape, plan.ranks) == ((2, 2), (0, 1, 2, 3))


@pytest.mark.parametrize(
    ("topology", "dimensions", "text"),
    [
        (TWO_OF_FOUR, {}, "a mesh needs at least one dimension, for example shard=None"),
        (
            Topology.uneven([3, 1]),
            {"replicate": "nodes", "shard": None},
            "mesh dimension replicate='nodes' needs nodes of one size, but they hold [3, 1] ranks: start the same "
            "number on each (srun --ntasks-per-node), or give numbers",
        ),
        (Topology.uneven([1, 2]), {"shard": "node"}, "mesh dimension shard='node' needs nodes of one size, but they"),
        (TWO_OF_FOUR, {"shard": 0}, "mesh dimension shard=0: give a positive number, 'nodes', 'node' or None"),
        (TWO_OF_FOUR, {"shard": -2}, "mesh dimension shard=-2: give a positive number, 'nodes', 'node' or None"),
        (TWO_OF_FOUR, {"shard": True}, "mesh dimension shard=True: give a positive number, 'nodes', 'node' or None"),
        (TWO_OF_FOUR, {"shard": 2.0}, "mesh dimension shard=2.0: give a positive number, 'nodes', 'node' or None"),
        (TWO_OF_FOUR, {"shard": "host"}, "mesh dimension shard='host': give a positive number, 'nodes', 'node' or"),
        (
            TWO_OF_FOUR,
            {"replicate": None, "shard": None},
            "mesh replicate=? x shard=?: only one dimension may be None (all remaining ranks)",
        ),
        (
            TWO_OF_FOUR,
            {"replicate": 2, "shard": 3},
            "mesh replicate=2 x shard=3: 6 does not equal the 8 rank(s) of this job (2 node(s) of 4 rank(s))",
        ),
        (
            TWO_OF_FOUR,
            {"replicate": 3, "shard": None},
            "mesh replicate=3 x shard=?: 3 does not divide the 8 rank(s) of this job (2 node(s) of 4 rank(s))",
        ),
        (TWO_OF_FOUR, {"replicate": "nodes"}, "mesh replicate=2: 2 does not equal the 8 rank(s) of this job (2 node"),
        (TWO_OF_FOUR, {"replicate": 16, "shard": None}, "mesh replicate=16 x shard=?: 16 does not divide the 8 rank"),
    ],
)
def test_a_mesh_that_does_not_fit_is_refused(topology, dimensions, text):
    with pytest.raises(LaunchError) as caught:
        plan_mesh(topology, dimensions)
    assert str(caught.value).startswith(text)
