"""The engine on the simulated accelerator: as one process on the CPU, whatever the device leaves for later."""

import copy

import pytest
import torch
from torch import nn

from hpcfsdp.engine import root
from hpcfsdp.engine.streams import DeviceStreams, Queue
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated

pytestmark = pytest.mark.ranks(2, 1, 4)

SIM = torch.device("sim", 0)
STEPS = 3


class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(9, 9), nn.ReLU()) for _ in range(3))
        self.last = nn.Linear(9, 5)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.last(x)


def inputs(step, rank):
    return torch.randn(4, 9, generator=torch.Generator().manual_seed(100 * step + rank))


@pytest.fixture
def streams(monkeypatch):
    """The queues of all models that the test makes."""
    made = DeviceStreams(SIM)
    monkeypatch.setattr(root, "streams_for", lambda device: made)
    return made


def leave_for_later(streams, policy):
    """Have the device starve queues: all that run concurrently, or in a random order."""
    queues = {"eager": [], "random": [], "all": [Queue.COMPUTE, Queue.GATHER, Queue.REDUCE]}
    starved = queues.get(policy, [queue for queue in Queue if queue.value == policy])
    seed = 1 if policy in ("random", "all") else None
    simulated.starve(*(streams._stream(queue) for queue in starved), seed=seed)


def trained(model, device, ranks, average):
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    losses = []
    for step in range(STEPS):
        for rank in ranks:
            loss = model(inputs(step, rank).to(device)).square().mean()
            (loss / average).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


@pytest.mark.parametrize("policy", ["eager", "compute", "gather", "reduce", "random", "all"])
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_is_that_of_one_process(world, group, streams, strategy, original, policy):
    torch.manual_seed(0)
    reference = Net()
    model = FullyShardedDataParallel(
        copy.deepcopy(reference).to(SIM),
        process_group=group,
        sharding_strategy=ShardingStrategy[strategy],
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        use_orig_params=original,
    )
    leave_for_later(streams, policy)
    losses = trained(model, SIM, [world.rank], 1)
    expected = trained(reference, torch.device("cpu"), range(world.size), world.size)[world.rank :: world.size]
    torch.testing.assert_close([loss.cpu() for loss in losses], expected)
    with FullyShardedDataParallel.summon_full_params(model):
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            torch.testing.assert_close(param.detach().cpu().view(-1), other.detach().view(-1))
