"""``copy.deepcopy`` of wrapped models, and averages of weights on it."""

import copy
import pickle
import types

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper
from torch.distributed.tensor import Shard
from torch.nn.utils import parametrizations
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpcfsdp import checkpoint
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import CPUOffload, MixedPrecision, ShardingStrategy
from hpcfsdp.fsdp2 import CPUOffloadPolicy, MixedPrecisionPolicy, fully_shard, register_fsdp_forward_method
from tests.mpi.models import ORIGINAL, Block, Net, adamw, batch, make_net, shard, train_plain, train_sharded

pytestmark = pytest.mark.ranks(2)

CONFIGURATIONS = {
    "full": {},
    "grad_op": {"sharding_strategy": ShardingStrategy.SHARD_GRAD_OP},
    "no_shard": {"sharding_strategy": ShardingStrategy.NO_SHARD},
    "offload": {"cpu_offload": CPUOffload(offload_params=True)},
    "mixed": {"mixed_precision": MixedPrecision(torch.bfloat16, torch.float32, torch.bfloat16)},
    "ignored": {},
}


def make(case, original):
    net = make_net()
    net.blocks[1].up = checkpoint_wrapper(net.blocks[1].up)
    ignored = [net.blocks[0].norm] if case == "ignored" else None
    return shard(net, use_orig_params=original, ignored_modules=ignored, **CONFIGURATIONS[case])


def same(left, right):
    return list(left) == list(right) and all(torch.equal(left[name], right[name]) for name in left)


@ORIGINAL
@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("case", CONFIGURATIONS)
def test_a_copy_trains_as_the_original_does_and_apart_from_it(comm, case, when, original):
    model = make(case, original)
    if when == "after":
        train_sharded(model, adamw(model), [0], comm)
    states = model.state_dict()
    copied = copy.deepcopy(model)
    assert same(copied.state_dict(), states)
    losses = train_sharded(copied, adamw(copied), [1, 2], comm)
    after = copied.state_dict()
    assert not same(after, states)
    assert same(model.state_dict(), states)
    assert train_sharded(model, adamw(model), [1, 2], comm) == losses
    assert same(model.state_dict(), after)
    assert same(copied.state_dict(), after)
    kept = {id(tensor) for tensor in (*model.parameters(), *model.buffers(), *model.modules())}
    assert not kept & {id(tensor) for tensor in (*copied.parameters(), *copied.buffers(), *copied.modules())}


@ORIGINAL
def test_an_average_of_weights_is_that_of_the_plain_model(comm, original, shared_path):
    def average(model):
        return AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9), use_buffers=True)

    plain, model = make_net(), shard(make_net(), use_orig_params=original)
    ema_plain, ema = average(plain), average(model)
    optimizers = [adamw(plain), adamw(model)]
    for step in range(3):
        train_plain(plain, optimizers[0], [step])
        train_sharded(model, optimizers[1], [step], comm)
        ema_plain.update_parameters(plain)
        ema.update_parameters(model)
    ids, _ = batch(7)
    expected = ema_plain.eval()(ids)
    with torch.no_grad():
        torch.testing.assert_close(ema.eval()(ids), expected, rtol=1e-4, atol=1e-5)
    path = shared_path / "both.h5"
    checkpoint.save(path, model=nn.ModuleDict({"model": model, "ema": ema}), optimizer=optimizers[1])
    again = shard(make_net(seed=1), use_orig_params=original)
    both = nn.ModuleDict({"model": again, "ema": average(again)})
    checkpoint.load(path, model=both, optimizer=adamw(again))
    assert both["ema"].n_averaged == 3
    assert same(again.state_dict(), model.state_dict())
    with torch.no_grad():
        assert torch.equal(both["ema"].eval()(ids), ema(ids))


def test_a_copy_of_a_unit_is_a_model_of_its_own(comm):
    model = shard(make_net())
    x = torch.ones(2, 13)
    expected = make_net().blocks[0](x)
    block = copy.deepcopy(model.module.blocks[0])
    assert block.check_is_root()
    torch.testing.assert_close(block(x), expected)
    assert type(block.module) is Block
    assert type(model.module) is Net


def test_models_at_work_are_not_copied_and_none_is_pickled(comm):
    model = shard(make_net())
    with model.summon_full_params(model), pytest.raises(EngineError, match=r"call copy.deepcopy outside of summon"):
        copy.deepcopy(model)
    for refused in (pickle.dumps, copy.copy):
        with pytest.raises(EngineError, match=r"cannot be pickled or copied by copy.copy: use copy.deepcopy"):
            refused(model)


POLICIES = {
    "rows": {},
    "kept": {"reshard_after_forward": False},
    "offload": {"offload_policy": CPUOffloadPolicy(pin_memory=False)},
    "mixed": {"mp_policy": MixedPrecisionPolicy(torch.bfloat16, torch.float32)},
}


def make_rows(mesh=None, **options):
    """Units of one module, of two that are not next to each other, of columns, and around them."""
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8), nn.Linear(8, 8), nn.LayerNorm(8))
    fully_shard([model[0], model[2]], mesh=mesh, **options)
    fully_shard(model[1], mesh=mesh, shard_placement_fn=lambda param: Shard(param.dim() - 1), **options)
    return fully_shard(model, mesh=mesh, **options)


def train_rows(model):
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    for _ in range(2):
        loss = model(torch.arange(32.0).view(4, 8).cos()).square().sum()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
    return loss.item()


def whole(model):
    return {name: value.full_tensor() for name, value in model.state_dict().items()}


@pytest.mark.parametrize("when", ["before", "after"])
@pytest.mark.parametrize("policy", POLICIES)
def test_a_copy_of_rows_trains_as_the_original_does_and_apart_from_it(ours_on, policy, when):
    model = make_rows(ours_on, **POLICIES[policy])
    if when == "after":
        train_rows(model)
    before = whole(model)
    copied = copy.deepcopy(model)
    assert type(copied) is type(model) and same(whole(copied), before)
    loss = train_rows(copied)
    assert same(whole(model), before)
    after = whole(copied)
    assert train_rows(model) == loss and same(whole(model), after)
    copied.load_state_dict({name: torch.zeros_like(value) for name, value in copied.state_dict().items()}, assign=True)
    assert not any(copied(torch.ones(2, 8)).flatten()) and same(whole(model), after)
    kept = {id(tensor) for tensor in (*model.parameters(), *model.modules())}
    assert not kept & {id(tensor) for tensor in (*copied.parameters(), *copied.modules())}


@pytest.mark.parametrize("build", [lambda: nn.LSTM(8, 8, 2), lambda: parametrizations.weight_norm(nn.Linear(8, 8))])
def test_modules_that_keep_state_of_their_own_are_copied(world, build):
    torch.manual_seed(0)
    model, x = fully_shard(build()), torch.ones(3, 2, 8)
    copied = copy.deepcopy(model)
    before = whole(model)
    for each in (copied, model):
        assert same(whole(each), before)
        outputs = each(x)
        (outputs[0] if isinstance(outputs, tuple) else outputs).square().sum().backward()
        torch.optim.SGD(each.parameters(), lr=0.1).step()
    after = whole(model)
    assert same(whole(copied), after) and not same(after, before)


def test_gradients_of_rows_are_not_copied(world):
    model = make_rows()
    model(torch.ones(2, 8)).sum().backward()
    copied = copy.deepcopy(model)
    assert same(whole(copied), whole(model))
    assert any(param.grad is not None for param in model.parameters())
    assert all(param.grad is None for param in copied.parameters())


def test_choices_for_rows_are_copied_and_changed_apart(world):
    model = make_rows()
    model.set_gradient_divide_factor(8 * world.size)
    grads = []
    copied = copy.deepcopy(model)
    copied.set_gradient_divide_factor(world.size)
    for each in (model, copied, copy.deepcopy(model)):
        each(torch.ones(2, 8)).sum().backward()
        grads.append(each[1].weight.grad.full_tensor())
    torch.testing.assert_close(grads[1], 8 * grads[0])
    torch.testing.assert_close(grads[2], grads[0])


def test_an_average_of_rows_and_methods_that_compute(world):
    model = make_rows()
    model.forward_twice = types.MethodType(lambda self, x: self.forward(self.forward(x)), model)
    register_fsdp_forward_method(model, "forward_twice")
    average = AveragedModel(model, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    expected = whole(model)
    average.update_parameters(model)
    train_rows(model)
    average.update_parameters(model)
    for name, value in whole(model).items():
        torch.testing.assert_close(whole(average.module)[name], 0.9 * expected[name] + 0.1 * value)
    x = torch.ones(2, 8)
    torch.testing.assert_close(average.module.forward_twice(x), average(average(x)))
    with pytest.raises(EngineError, match="pickled or copied by copy"):
        copy.copy(model)
