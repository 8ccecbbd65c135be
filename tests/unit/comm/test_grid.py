import pytest
import torch

from hpcfsdp.comm.grid import Grid
from tests.unit.conftest import NUM_REPLICAS, NUM_SHARDS


def test_ranks_of_a_grid_are_numbered_replica_after_replica(run_grid):
    def body(shard, replicate):
        grid = Grid(shard, replicate)
        return grid.rank, grid.size, grid.device, grid.all_gather_object((replicate.rank, shard.rank))

    everyone = [(replica, part) for replica in range(NUM_REPLICAS) for part in range(NUM_SHARDS)]
    expected = [(rank, 6, torch.device("cpu"), everyone) for rank in range(6)]
    assert run_grid(body) == expected


@pytest.mark.parametrize("src", range(NUM_SHARDS * NUM_REPLICAS))
def test_all_ranks_of_a_grid_get_what_one_has(run_grid, src):
    def body(shard, replicate):
        grid = Grid(shard, replicate)
        tensor = torch.full((2,), float(grid.rank))
        grid.broadcast(tensor, src)
        return grid.broadcast_object({"rank": grid.rank}, src), tensor.tolist()

    assert run_grid(body) == [({"rank": src}, [src, src])] * 6


def test_by_default_the_first_rank_speaks(run_grid):
    assert (
        run_grid(lambda shard, replicate: Grid(shard, replicate).broadcast_object((shard.rank, replicate.rank)))
        == [(0, 0)] * 6
    )
