"""The engine on the simulated accelerator: as one process on the CPU, whatever the device leaves for later."""

import copy
import math

import pytest
import torch
from mpi4py import MPI
from torch import nn

from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.accelerator import simulated
from tests.accelerator.programs import POLICIES, SIM, leave_for_later

pytestmark = [pytest.mark.ranks(2, 1, 4), pytest.mark.usefixtures("hardware")]

STEPS = 3
TOLERANCE = 1e-5


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


def trained(model, device, ranks, average):
    """The losses of some steps. The host waits for nothing in between: all inputs are there before."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    batches = [[inputs(step, rank).to(device) for rank in ranks] for step in range(STEPS)]
    losses = []
    for batch in batches:
        for x in batch:
            loss = model(x).square().mean()
            (loss / average).backward()
            losses.append(loss.detach())
        optimizer.step()
        optimizer.zero_grad()
    return losses


def differences(world, group, streams, policy, **options):
    """Train, and return the largest difference from one process on the CPU, of losses and parameters."""
    torch.manual_seed(0)
    reference = Net()
    model = FullyShardedDataParallel(
        copy.deepcopy(reference).to(SIM),
        process_group=group,
        auto_wrap_policy=ModuleWrapPolicy({nn.Sequential}),
        **options,
    )
    leave_for_later(streams, policy)
    losses = trained(model, SIM, [world.rank], 1)
    expected = trained(reference, torch.device("cpu"), range(world.size), world.size)[world.rank :: world.size]
    found = [(loss.cpu() - other).abs().item() for loss, other in zip(losses, expected, strict=True)]
    simulated.starve()
    with FullyShardedDataParallel.summon_full_params(model):
        for param, other in zip(model.parameters(), reference.parameters(), strict=True):
            found.append((param.detach().cpu().view(-1) - other.detach().view(-1)).abs().max().item())
    worst = max(float("inf") if math.isnan(each) else each for each in found)
    return world.comm.allreduce(worst, op=MPI.MAX)


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD"])
def test_training_is_that_of_one_process(world, group, streams, strategy, original, policy):
    options = {"sharding_strategy": ShardingStrategy[strategy], "use_orig_params": original}
    assert differences(world, group, streams, policy, **options) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
@pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
def test_parameters_in_host_memory(world, group, streams, original, policy):
    options = {"cpu_offload": CPUOffload(offload_params=True), "use_orig_params": original}
    assert differences(world, group, streams, policy, **options) < TOLERANCE


@pytest.mark.parametrize("policy", POLICIES)
def test_mixed_precision(world, group, streams, policy):
    half = torch.bfloat16
    options = {"mixed_precision": MixedPrecision(param_dtype=half, reduce_dtype=half, cast_forward_inputs=True)}
    assert differences(world, group, streams, policy, **options) < 0.05


def test_the_host_waits_for_nothing_between_two_steps(world, group):
    model = FullyShardedDataParallel(
        Net().to(SIM), process_group=group, auto_wrap_policy=ModuleWrapPolicy({nn.Sequential})
    )
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, foreach=True)
    x = inputs(0, world.rank).to(SIM)
    for step in range(4):
        if step == 2:  # the first steps allocate, and agree on the order of units
            simulated.reset_counts()
        model(x).square().mean().backward()
        optimizer.step()
        optimizer.zero_grad()
    assert simulated.waits() == {}
