"""Parameters that are assigned to modules of a unit at rest."""

import pytest
import torch
from torch import nn

from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy


def make(original=True, strategy="FULL_SHARD"):
    torch.manual_seed(0)
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    strategy = ShardingStrategy[strategy]
    return FullyShardedDataParallel(net, FakeCommunicator(), use_orig_params=original, sharding_strategy=strategy)


def step(model, optimizer):
    model(torch.ones(1, 2)).sum().backward()
    optimizer.step()
    optimizer.zero_grad()


def summoned(model):
    with model.summon_full_params(model):
        return model.module[0].weight.detach().clone()


USES = {
    "forward": lambda model: model(torch.ones(1, 2)),
    "state_dict": lambda model: model.state_dict(),
    "summon": summoned,
}


@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
@pytest.mark.parametrize("use", USES)
def test_what_is_assigned_becomes_the_parameter_at_the_next_use(use, strategy):
    model = make(strategy=strategy)
    linear = model.module[0]
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assigned = linear.weight = nn.Parameter(torch.full_like(linear.weight, 3.0))
    USES[use](model)
    assert summoned(model).tolist() == [[3, 3], [3, 3]]
    assert model.state_dict()["0.weight"].tolist() == [[3, 3], [3, 3]]
    assert linear.weight is assigned
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for _ in range(2):
        before = model.state_dict()["0.weight"].clone()
        step(model, optimizer)
        assert not torch.equal(model.state_dict()["0.weight"], before)
    assert linear.weight is assigned


def test_requires_grad_of_what_is_assigned_counts():
    model = make()
    model.module[0].weight = nn.Parameter(torch.ones(4), requires_grad=False)
    step(model, torch.optim.SGD(model.parameters(), lr=0.1))
    assert model.state_dict()["0.weight"].tolist() == [[1, 1], [1, 1]]


def test_an_optimizer_of_replaced_parameters_is_refused():
    model = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    step(model, optimizer)
    model.module[0].weight = nn.Parameter(torch.ones(4))
    with pytest.raises(EngineError, match=r"the SGD steps '0.weight', but the module has been assigned another"):
        step(model, optimizer)


@pytest.mark.parametrize("use", USES)
def test_a_whole_parameter_is_no_shard(use):
    model = make()
    model.module[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(EngineError, match=r"rank 0: .* of shape \(2, 2\) was assigned to '0.weight'.*summon_full"):
        USES[use](model)


@pytest.mark.parametrize("use", USES)
def test_flat_parameters_cannot_take_over_others(use):
    model = make(original=False)
    model.module[0].weight = nn.Parameter(torch.ones(2, 2))
    with pytest.raises(EngineError, match=r"was assigned to '0.weight'.*summon_full_params.*use_orig_params=True"):
        USES[use](model)


def test_a_tied_parameter_is_replaced_everywhere_or_not_at_all():
    net = nn.Sequential(nn.Linear(2, 2), nn.Linear(2, 2))
    net[1].weight = net[0].weight
    model = FullyShardedDataParallel(net, FakeCommunicator(), use_orig_params=True)
    net[0].weight = nn.Parameter(torch.ones(4))
    with pytest.raises(EngineError, match=r"tied: assign the same parameter to all of '0.weight', '1.weight'"):
        model(torch.ones(1, 2))
    net[1].weight = net[0].weight
    model(torch.ones(1, 2))
    assert model.state_dict()["1.weight"].tolist() == [[1, 1], [1, 1]]
