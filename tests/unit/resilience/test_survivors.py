"""Which processes are the world after a loss."""

import pytest

from hpcfsdp.resilience.survivors import replaced

NODES = [0, 0, 1, 1, 2, 2]


@pytest.mark.parametrize(
    ("world", "spares", "dead", "expected"),
    [
        ((0, 1, 2, 3), (), (1,), ((0, 2, 3), ())),
        ((0, 1, 2, 3), (), (0, 3), ((1, 2), ())),
        ((0, 2, 3, 4), (1, 5), (4,), ((0, 2, 3, 5), (1,))),  # the spare of its own node
        ((0, 2, 4), (1, 3, 5), (0, 4), ((1, 2, 5), (3,))),
        ((0, 1, 2, 3), (4,), (0, 1), ((4, 2, 3), ())),  # one spare for two places: the other is gone
        ((0, 1, 2, 3), (4, 5), (4,), ((0, 1, 2, 3), (5,))),  # a spare alone
        ((0, 1, 2, 3), (4, 5), (4, 1), ((0, 5, 2, 3), ())),
        ((0, 1), (2,), (0, 1, 2), ((), ())),
        # The spares have a node of their own: the node that has lost a rank moves there, and the rest of it are spares.
        ((0, 1, 2, 3), (4, 5), (1,), ((4, 5, 2, 3), (0,))),
        ((0, 1, 2, 3), (4, 5), (2, 3), ((0, 1, 4, 5), ())),
        ((4, 5, 2, 3), (0,), (3,), ((4, 5, 2, 0), ())),  # one spare is left for two places
        ((0, 1, 2, 3), (4, 5), (1, 3), ((0, 4, 2, 5), ())),  # of two nodes: what was in memory is on the other one
        ((0, 1), (4, 5), (1,), ((0, 4), (5,))),  # of one node alone
        ((0, 2, 3), (1, 4, 5), (0,), ((1, 2, 3), (4, 5))),
    ],
)
def test_spares_take_the_places_of_the_dead(world, spares, dead, expected):
    assert replaced(world, spares, dead, NODES) == expected


def test_ranks_that_live_keep_their_order_and_with_spares_their_numbers():
    world, spares = tuple(range(4)), (4, 5)
    for dead in ([0], [3], [1, 2], [0, 3]):
        found, _ = replaced(world, spares, dead, [0] * 6)
        assert [rank for rank in found if rank < 4] == [rank for rank in world if rank not in dead]
        assert all(found[rank] == rank for rank in world if rank not in dead)
        assert len(found) == 4
