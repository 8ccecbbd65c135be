"""Parameters that are changed between a forward and its backward."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel

X = torch.ones(2, 3)
EVERYWHERE = [
    pytest.mark.parametrize("original", [False, True]),
    pytest.mark.parametrize("size", [1, 2]),
    pytest.mark.parametrize(
        "strategy", [ShardingStrategy.FULL_SHARD, ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy.NO_SHARD]
    ),
]


def everywhere(test):
    for mark in EVERYWHERE:
        test = mark(test)
    return test


class Heads(nn.Module):
    """Two results of one trunk."""

    def __init__(self):
        super().__init__()
        self.trunk, self.one, self.other = nn.Linear(3, 3), nn.Linear(3, 1), nn.Linear(3, 1)

    def forward(self, x):
        x = self.trunk(x)
        return self.one(x).sum(), self.other(x).sum()


def shard(size=1, strategy=ShardingStrategy.FULL_SHARD, original=True):
    options = {
        "process_group": FakeCommunicator(0, size),
        "sharding_strategy": strategy,
        "use_orig_params": original,
    }
    model = Heads()
    for name, child in list(model.named_children()):
        setattr(model, name, FullyShardedDataParallel(child, **options))
    return FullyShardedDataParallel(model, **options)


def step(model):
    optimizer = torch.optim.SGD(model.parameters(), 0.1)
    optimizer.step()
    optimizer.zero_grad()


@everywhere
def test_a_step_between_forward_and_backward_is_noticed(original, size, strategy):
    model = shard(size, strategy, original)
    sum(model(X)).backward()
    loss = sum(model(X))
    step(model)
    with pytest.raises(
        EngineError, match=r"^(one|other): '(weight|bias)' was changed between a forward and its backward"
    ):
        loss.backward()
    sum(model(X)).backward()
    step(model)


@everywhere
def test_a_change_within_summon_full_params_is_noticed(original, size, strategy):
    model = shard(size, strategy, original)
    loss = sum(model(X))
    with FullyShardedDataParallel.summon_full_params(model):
        pass
    loss.backward()
    loss = sum(model(X))
    with FullyShardedDataParallel.summon_full_params(model):
        model.module.one.module.weight.data.add_(1)
    with pytest.raises(EngineError, match="one: 'weight' was changed"):
        loss.backward()


@everywhere
def test_other_forwards_and_graphs_that_are_dropped_do_no_harm(original, size, strategy):
    model = shard(size, strategy, original)
    sum(model(X)).backward()
    dropped = sum(model(X))
    step(model)
    del dropped
    first, second = sum(model(X)), sum(model(X))
    with torch.no_grad():
        model(X)
    (first + second).backward()
    step(model)
    kept = sum(model(X))
    averaged = [parameter.detach().clone() for parameter in model.parameters()]
    with torch.no_grad():  # weights of another kind for an evaluation, by a way that torch does not count either
        for parameter, other in zip(model.parameters(), averaged, strict=True):
            parameter.data.copy_(other)
        model(X)
    kept.backward()


def test_what_has_no_part_in_a_backward_may_be_changed():
    plain, model = Heads(), shard()
    model_params = dict(model.named_parameters())
    with torch.no_grad():
        for (_, parameter), (_, own) in zip(plain.named_parameters(), model_params.items(), strict=True):
            own.copy_(parameter.flatten())
    for net in (plain, model):
        one, other = net(X)
        one.backward(retain_graph=True)
        torch.optim.SGD(net.one.parameters(), 0.1).step()
        other.backward()
    for parameter, own in zip(plain.parameters(), model.parameters(), strict=True):
        torch.testing.assert_close(own.grad, parameter.grad.flatten())


def test_the_plain_model_refuses_it_as_well():
    """Which makes it an error and no warning."""
    plain = copy.deepcopy(Heads())
    sum(plain(X)).backward()
    loss = sum(plain(X))
    step(plain)
    with pytest.raises(RuntimeError, match="modified by an inplace operation"):
        loss.backward()
