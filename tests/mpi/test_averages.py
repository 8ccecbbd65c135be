"""Averages over steps, and over tokens, of sharded models: those of one process."""

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpcfsdp
import hpcfsdp.fsdp2 as ours
from hpcfsdp import checkpoint
from hpcfsdp.errors import UsageError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.optim import ExponentialAverage
from tests.mpi.row_cases import TIGHT

pytestmark = pytest.mark.ranks(2, 3)
FRONTS = ["rows", "class", "class, one parameter"]


def make():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(5, 7), nn.Sequential(nn.Linear(7, 7), nn.Tanh()), nn.Linear(7, 3)).double()


def shard(front, model):
    if front == "rows":
        ours.fully_shard(model[1])
        return ours.fully_shard(model)
    original = front == "class"
    model[1] = FSDP(model[1], use_orig_params=original)
    return FSDP(model, use_orig_params=original)


def batch(step, rank):
    return torch.randn(4, 5, generator=torch.Generator().manual_seed(100 * step + rank), dtype=torch.float64)


def train(model, optimizer, batches):
    for ranks in batches:
        optimizer.zero_grad()
        for x in ranks:
            (model(x).square().mean() / len(ranks)).backward()
        optimizer.step()


def values(model):
    if isinstance(model, FSDP):
        with FSDP.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [p.detach().full_tensor() if isinstance(p, DTensor) else p.detach().clone() for p in model.parameters()]


@pytest.mark.parametrize("front", FRONTS)
def test_the_average_of_one_process_in_files_of_any_front(world, shared_path, front):
    plain, x = make(), batch(50, 0)
    optimizer = torch.optim.AdamW(plain.parameters(), lr=1e-2)
    average = ExponentialAverage(optimizer, 0.8)
    train(plain, optimizer, [[batch(step, rank) for rank in range(world.size)] for step in range(4)])
    with average.swapped():
        expected, output = values(plain), plain(x).detach()

    model = shard(front, make())
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    ExponentialAverage(optimizer, 0.8)
    train(model, optimizer, [[batch(step, world.rank)] for step in range(2)])
    checkpoint.save(shared_path / "half.h5", model=model, optimizer=optimizer)
    for other in FRONTS:
        model = shard(other, make())
        optimizer = torch.optim.AdamW(model.parameters(), lr=1)
        average = ExponentialAverage(optimizer, 0.8)
        checkpoint.load(shared_path / "half.h5", model=model, optimizer=optimizer)
        train(model, optimizer, [[batch(step, world.rank)] for step in range(2, 4)])
        trained = values(model)
        with average.swapped(), torch.no_grad():
            torch.testing.assert_close(model(x), output, **TIGHT)
            torch.testing.assert_close(values(model), expected, **TIGHT)
        torch.testing.assert_close(values(model), trained, rtol=0, atol=0)


@pytest.mark.parametrize("front", FRONTS)
def test_tokens_count_the_same_on_all_ranks_and_in_all_micro_batches(world, front):
    sizes = [[1 + 3 * rank, 6 - rank, 0 if rank else 2] for rank in range(world.size)]
    data = [
        [batch(number, rank).repeat(3, 1)[:size] for number, size in enumerate(sizes[rank])]
        for rank in range(world.size)
    ]
    plain = make()
    everything = torch.cat([x for of_rank in data for x in of_rank])
    plain(everything).square().sum(1).mean().backward()
    optimizer = torch.optim.SGD(plain.parameters(), lr=0.1)
    optimizer.step()

    model = shard(front, make())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    mean = hpcfsdp.WeightedMean(sizes[world.rank])
    assert mean.total == len(everything)
    for x in data[world.rank]:
        mean(model(x).square().sum()).backward()
    expected = make()(everything).square().sum(1).mean()
    assert mean.value() == pytest.approx(float(expected.detach()), rel=1e-12)
    optimizer.step()
    torch.testing.assert_close(values(model), values(plain), **TIGHT)


def test_counts_that_are_refused(world):
    with pytest.raises(UsageError, match="counts are numbers of tokens"):
        hpcfsdp.WeightedMean([3, -1])
    with pytest.raises(UsageError, match="no rank has a token"):
        hpcfsdp.WeightedMean([0] if world.rank else [])
