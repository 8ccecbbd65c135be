import copy
import io
import pickle
import weakref

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError, StateDictError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy

ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])


class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.linear, self.norm = nn.Linear(4, 4), nn.BatchNorm1d(4)

    def forward(self, x):
        self.seen = {name: tuple(value.shape) for name, value in self.linear.state_dict().items()}
        return self.norm(self.linear(x))


def plain():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(4, 4), Block(), nn.Linear(4, 1))


def shard(module=None, **arguments):
    return FullyShardedDataParallel(module or plain(), process_group=FakeCommunicator(), **arguments)


INSIDE = {
    "wrapped module": lambda model: model.module,
    "submodule": lambda model: model.module[1],
    "leaf": lambda model: model.module[1].linear,
}


@ORIGINAL
@pytest.mark.parametrize("inside", INSIDE.values(), ids=INSIDE)
def test_modules_that_hold_shards_do_not_pass_them_off_as_weights(inside, original):
    model = shard(use_orig_params=original)
    module = inside(model)
    with pytest.raises(StateDictError, match=r"Sequential: .* sharded, .* call state_dict\(\)"):
        module.state_dict()
    with pytest.raises(StateDictError, match=r"call load_state_dict\(\)"):
        module.load_state_dict({}, strict=False)
    with pytest.raises(StateDictError, match="copy the FullyShardedDataParallel around it"):
        copy.deepcopy(module)
    with pytest.raises(StateDictError, match=r"a pickle .* save the state_dict\(\)"):
        torch.save(module, io.BytesIO())


@ORIGINAL
def test_modules_that_hold_whole_parameters_are_as_any_other(original):
    model, weights = shard(use_orig_params=original), plain().state_dict()
    with FullyShardedDataParallel.summon_full_params(model):
        found = model.module.state_dict()
        assert all(torch.equal(found[name], value) for name, value in weights.items())
        copied = copy.deepcopy(model.module)
        model.module[1].linear.load_state_dict({"weight": torch.ones(4, 4), "bias": torch.ones(4)})
    assert torch.equal(copied.state_dict()["1.linear.weight"], weights["1.linear.weight"])
    copied.load_state_dict(weights)
    again = copy.deepcopy(copied)
    assert again.state_dict().keys() == weights.keys()
    assert torch.equal(model.state_dict()["1.linear.weight"], torch.ones(4, 4))
    pickle.dumps(again._state_dict_pre_hooks)


@ORIGINAL
def test_a_copy_is_wrapped_and_guarded_again(original):
    model = shard(use_orig_params=original)
    with FullyShardedDataParallel.summon_full_params(model):
        other = shard(copy.deepcopy(model.module), use_orig_params=original)
    with pytest.raises(StateDictError, match="sharded"):
        other.module.state_dict()
    assert torch.equal(other.state_dict()["0.weight"], plain().state_dict()["0.weight"])


@ORIGINAL
def test_what_a_unit_does_not_shard_is_free(original):
    model = plain()
    model = shard(model, use_orig_params=original, ignored_modules=[model[1]])
    assert model.module[1].state_dict().keys() == Block().state_dict().keys()
    copy.deepcopy(model.module[1])
    assert model.module[1].norm.load_state_dict(nn.BatchNorm1d(4).state_dict()) == ([], [])
    with pytest.raises(StateDictError, match="sharded"):
        model.module.state_dict()


@ORIGINAL
def test_plain_modules_around_units_give_what_the_units_give(original):
    """Also those that an outer unit has nothing of."""
    units = nn.Sequential(*(FullyShardedDataParallel(each, FakeCommunicator()) for each in (Block(), Block())))
    model = shard(nn.Sequential(units, nn.Linear(4, 4)), use_orig_params=original)
    assert len(model.module[0].state_dict()) == 14
    assert len(nn.ModuleDict({"model": model}).state_dict()) == 16
    with pytest.raises(StateDictError, match="sharded"):
        model.module[1].state_dict()


def test_parameters_that_stay_whole_or_are_gathered_can_be_read():
    """What holds whole parameters under their own names; flat parameters are none."""
    policy, x = ModuleWrapPolicy({Block}), torch.ones(2, 4)
    model = shard(auto_wrap_policy=policy, sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    found = model.module.state_dict()
    assert {name: value.shape for name, value in found.items()} == {n: v.shape for n, v in plain().state_dict().items()}
    assert model.module[2].load_state_dict(nn.Linear(4, 1).state_dict()) == ([], [])
    copied = copy.deepcopy(model.module[0])
    assert torch.equal(copied.weight, model.module[0].weight)
    model = shard(auto_wrap_policy=policy, use_orig_params=True)
    model(x)
    assert model.module[1].module.seen == {"weight": (4, 4), "bias": (4,)}
    for strategy in (ShardingStrategy.NO_SHARD, ShardingStrategy.FULL_SHARD):
        with pytest.raises(StateDictError, match="sharded"):
            shard(sharding_strategy=strategy)(x)


def test_hooks_of_a_unit_that_is_gone_remain_and_do_not_keep_it():
    model = shard()
    inner, reference = model.module, weakref.ref(model)
    del model
    assert reference() is None
    with pytest.raises(StateDictError, match="sharded"):
        inner.state_dict()


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


def shard_whole(module, **arguments):
    return FullyShardedDataParallel(module, FakeCommunicator(), **arguments)


@pytest.mark.parametrize("original", [False, True])
def test_generate_needs_the_parameters_of_the_wrapper(original):
    net = Generating()
    expected = net.generate(IDS, steps=2)
    net.block = shard_whole(net.block, use_orig_params=original)
    model = shard_whole(net, use_orig_params=original)
    assert model.generate.__doc__ == "Some numbers."
    for _ in range(2):
        with pytest.raises(EngineError, match=r"generate runs the wrapped module .* call it within .*recurse=False"):
            model.generate(IDS)
        with model.summon_full_params(model, recurse=False, writeback=False):
            assert model.generate(IDS, steps=2) == expected
        assert model(IDS).tolist() == expected[0]


def test_generate_needs_nothing_where_parameters_are_whole():
    expected = Generating().generate(IDS)
    assert shard_whole(Generating(), sharding_strategy=ShardingStrategy.NO_SHARD).generate(IDS) == expected
    net = Generating()
    net.embed, net.block = shard_whole(net.embed), shard_whole(net.block)
    assert shard_whole(net).generate(IDS) == expected


def test_a_whole_model_that_is_summoned_is_not_called():
    net = Generating()
    net.block = shard_whole(net.block)
    model = shard_whole(net)
    with model.summon_full_params(model), pytest.raises(EngineError, match="was called within summon_full_params"):
        model.generate(IDS)


PAST = r"a {} was called without the FullyShardedDataParallel around it, .* on all ranks within .*summon_full_params"


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP"])
@pytest.mark.parametrize("original", [False, True])
def test_modules_with_sharded_parameters_are_not_called_without_the_wrapper(original, strategy):
    net = Generating()
    expected = net(IDS)
    net.block = shard_whole(net.block, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])
    model = shard_whole(net, use_orig_params=original, sharding_strategy=ShardingStrategy[strategy])

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
    expected, model = net(IDS), shard_whole(net)
    with model.summon_full_params(model):
        plain = copy.deepcopy(model.module)
    assert torch.equal(plain(IDS), expected)


def test_whole_modules_are_called_as_they_are():
    expected = Generating()(IDS)
    model = shard_whole(Generating(), sharding_strategy=ShardingStrategy.NO_SHARD, use_orig_params=True)
    assert torch.equal(model.module(IDS), expected)


def test_hooks_of_a_module_stay_where_they_are_beside_that_which_refuses():
    model, called = shard_whole(Generating()), []
    model.module.embed.register_forward_pre_hook(lambda *_: called.append("before"))
    model(IDS)
    model(IDS)
    assert called == ["before"] * 2
