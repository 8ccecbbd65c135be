import pytest
from torch import nn
from torch.distributed.fsdp import ShardingStrategy as Strategy

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.state.ranks import ranks_of_model


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
