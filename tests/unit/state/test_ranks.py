import threading

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy as Strategy

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.sharded.groups import Groups
from hpcfsdp.state.ranks import Grid, ranks_of, ranks_of_model

NUM_SHARDS, NUM_REPLICAS = 3, 2


@pytest.fixture
def run_grid(run_ranks):
    """``run_grid(body)``: what ``body(shard, replicate)`` returns on each rank of two replicas of three shards."""

    def run(body):
        shared = {place: (threading.Barrier(size), {}) for size, place in (*_lines("shard"), *_lines("replicate"))}

        def work(comm):
            replica, part = divmod(comm.rank, NUM_SHARDS)
            shard = type(comm)(part, NUM_SHARDS, *shared["shard", replica])
            return body(shard, type(comm)(replica, NUM_REPLICAS, *shared["replicate", part]))

        return run_ranks(NUM_SHARDS * NUM_REPLICAS, work)

    return run


def _lines(name):
    size, count = (NUM_SHARDS, NUM_REPLICAS) if name == "shard" else (NUM_REPLICAS, NUM_SHARDS)
    return [(size, (name, place)) for place in range(count)]


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


def test_all_ranks_of_a_unit():
    shard, replicate, everyone = FakeCommunicator(1, 2), FakeCommunicator(2, 3), FakeCommunicator(5, 6)
    assert ranks_of(Groups(Strategy.HYBRID_SHARD, shard, replicate, everyone)) is everyone
    assert ranks_of(Groups(Strategy.FULL_SHARD, shard, None, None)) is shard
    grid = ranks_of(Groups(Strategy.HYBRID_SHARD, shard, replicate, None))
    assert type(grid) is Grid
    assert (grid.rank, grid.size) == (5, 6)


def wrap(module, comm, **options):
    return FullyShardedDataParallel(module, process_group=comm, **options)


def test_the_ranks_of_a_model_are_those_of_its_largest_unit():
    large, small = FakeCommunicator(1, 4), FakeCommunicator(0, 2)
    assert ranks_of_model(wrap(nn.Linear(2, 2), large)) is large
    model = nn.ModuleList([wrap(nn.Linear(2, 2), small), nn.Sequential(wrap(nn.Linear(2, 2), large))])
    assert ranks_of_model(model) is large
    assert ranks_of_model(wrap(nn.Linear(2, 2), large, sharding_strategy=Strategy.NO_SHARD)) is large


def test_a_pair_of_groups_counts_as_many_ranks_as_it_has_together(run_grid):
    def body(shard, replicate):
        pair = wrap(nn.Linear(2, 2), (shard, replicate), sharding_strategy=Strategy.HYBRID_SHARD)
        ranks = ranks_of_model(nn.ModuleList([wrap(nn.Linear(2, 2), FakeCommunicator(0, 5)), pair]))
        return type(ranks), ranks.rank

    assert run_grid(body) == [(Grid, rank) for rank in range(6)]


def test_a_group_of_ones_own():
    comm = FakeCommunicator(1, 3)
    assert ranks_of_model(wrap(nn.Linear(2, 2), FakeCommunicator(0, 2)), comm) is comm


@pytest.mark.parametrize("group", [None, FakeCommunicator()], ids=["no group", "a group"])
def test_a_model_that_is_not_sharded(group):
    with pytest.raises(StateDictError) as caught:
        ranks_of_model(nn.Linear(2, 2), group)
    assert str(caught.value) == (
        "there is no FullyShardedDataParallel in this Linear: wrap the model first, or use the optimizer's own "
        "state_dict and load_state_dict"
    )
