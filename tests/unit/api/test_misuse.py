"""Uses of a wrapped model that would go past its forward."""

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy


class Generating(nn.Module):
    """Runs itself in a method beside its forward, as the models of transformers do."""

    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(3, 2)
        self.block = nn.Linear(2, 2)
        with torch.no_grad():
            for number, param in enumerate(self.parameters()):
                param.fill_(number + 1)

    def forward(self, ids):
        return self.block(self.embed(ids))

    def generate(self, ids, *, steps=1):
        """Some numbers."""
        return [self.forward(ids).tolist() for _ in range(steps)]


IDS = torch.tensor([0, 2])


def shard(module, **arguments):
    return FullyShardedDataParallel(module, FakeCommunicator(), **arguments)


@pytest.mark.parametrize("original", [False, True])
def test_generate_needs_the_parameters_of_the_wrapper(original):
    net = Generating()
    expected = net.generate(IDS, steps=2)
    net.block = shard(net.block, use_orig_params=original)
    model = shard(net, use_orig_params=original)
    assert model.generate.__doc__ == "Some numbers."
    for _ in range(2):
        with pytest.raises(EngineError, match=r"generate runs the wrapped module .* call it within .*recurse=False"):
            model.generate(IDS)
        with model.summon_full_params(model, recurse=False, writeback=False):
            assert model.generate(IDS, steps=2) == expected
        assert model(IDS).tolist() == expected[0]


def test_generate_needs_nothing_where_parameters_are_whole():
    expected = Generating().generate(IDS)
    assert shard(Generating(), sharding_strategy=ShardingStrategy.NO_SHARD).generate(IDS) == expected
    net = Generating()
    net.embed, net.block = shard(net.embed), shard(net.block)
    assert shard(net).generate(IDS) == expected


def test_a_whole_model_that_is_summoned_is_not_called():
    net = Generating()
    net.block = shard(net.block)
    model = shard(net)
    with model.summon_full_params(model), pytest.raises(EngineError, match="was called within summon_full_params"):
        model.generate(IDS)
