"""Uses of a wrapped model that would go past its forward."""

import copy

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy


class Generating(nn.Module):
    """Computes in a method other than its forward, as the models of transformers do."""

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


PAST = r"a {} was called without the FullyShardedDataParallel around it, .* on all ranks within .*summon_full_params"


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("original", [False, True])
def test_modules_with_sharded_parameters_are_not_called_without_the_wrapper(original, strategy):
    net = Generating()
    expected = net(IDS)
    net.block = shard(net.block, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    model = shard(net, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])

    def refuse():
        calls = {"Generating": model.module, "Embedding": model.module.embed, "Linear": model.module.block.module}
        for name, module in calls.items():
            with pytest.raises(EngineError, match=PAST.format(name)):
                module(expected if name == "Linear" else IDS)

    refuse()
    with model.summon_full_params(model, recurse=False), torch.no_grad():
        assert torch.equal(model.module(IDS), expected)
        with pytest.raises(EngineError, match="Linear: a Linear was"):
            model.module.block.module(expected)
    for _ in range(2):
        outputs = model(IDS)
        if strategy == "SHARD_GRAD_OP" and not original:  # whole until the backward
            assert torch.equal(model.module.embed(IDS), net.embed.weight[IDS])
        else:
            refuse()
        outputs.sum().backward()
        refuse()
    copied = copy.deepcopy(model)
    with pytest.raises(EngineError, match=PAST.format("Embedding")):
        copied.module.embed(IDS)
    assert torch.equal(copied(IDS), expected)


def test_modules_that_are_copied_within_summon_full_params_are_free():
    net = Generating()
    expected, model = net(IDS), shard(net)
    with model.summon_full_params(model):
        plain = copy.deepcopy(model.module)
    assert torch.equal(plain(IDS), expected)


def test_whole_modules_are_called_as_they_are():
    expected = Generating()(IDS)
    model = shard(Generating(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    assert torch.equal(model.module(IDS), expected)


def test_hooks_of_a_module_stay_where_they_are_beside_that_which_refuses():
    model, called = shard(Generating()), []
    model.module.embed.register_forward_pre_hook(lambda *_: called.append("before"))
    model(IDS)
    model(IDS)
    assert called == ["before"] * 2
