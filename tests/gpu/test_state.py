"""State dicts and checkpoints of models on accelerators."""

import pytest
import torch

from hpcfsdp import checkpoint
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, ShardingStrategy, StateDictType
from tests.gpu.training import batches, make_model, train, wrap

pytestmark = pytest.mark.ranks(2, 1, 4)


def trained(world, device, seed=0, **options):
    """A model and its optimizer after some steps, all ranks with the same inputs."""
    torch.manual_seed(seed)
    model = wrap(make_model(device), **options)
    optimizers = []

    def optimizer(params, lr):
        optimizers.append(torch.optim.AdamW(params, lr))
        return optimizers[0]

    train(model, [x + seed for x in batches(device)], optimizer)
    return model, optimizers[0]


def values(model):
    """Of the whole model, in host memory."""
    with FullyShardedDataParallel.summon_full_params(model, writeback=False):
        return torch.cat([param.detach().flatten().cpu() for param in model.parameters()])


def moments(model, optimizer):
    return {
        name: entry["exp_avg"].cpu()
        for name, entry in FullyShardedDataParallel.optim_state_dict(model, optimizer)["state"].items()
    }


@pytest.mark.parametrize("kind", ["FULL_STATE_DICT", "SHARDED_STATE_DICT", "LOCAL_STATE_DICT"])
@pytest.mark.parametrize("strategy", ["FULL_SHARD", "NO_SHARD"])
def test_a_state_dict_comes_back(world, device, kind, strategy):
    options = {"sharding_strategy": ShardingStrategy[strategy]}
    model, optimizer = trained(world, device, **options)
    other, other_optimizer = trained(world, device, seed=1, **options)
    assert not torch.equal(values(model), values(other))
    with (
        FullyShardedDataParallel.state_dict_type(model, StateDictType[kind]),
        FullyShardedDataParallel.state_dict_type(other, StateDictType[kind]),
    ):
        other.load_state_dict(model.state_dict())
        state = FullyShardedDataParallel.optim_state_dict(model, optimizer)
        there = FullyShardedDataParallel.optim_state_dict_to_load(other, other_optimizer, state)
        other_optimizer.load_state_dict(there)
    assert torch.equal(values(model), values(other))
    mine, its = moments(model, optimizer), moments(other, other_optimizer)
    assert mine.keys() == its.keys()
    assert all(torch.equal(mine[name], its[name]) for name in mine)


@pytest.mark.parametrize("offload", [False, True], ids=["on the device", "offload"])
def test_a_checkpoint_comes_back(world, device, shared_path, offload):
    options = {"cpu_offload": CPUOffload(offload)}
    model, optimizer = trained(world, device, **options)
    checkpoint.save(shared_path / "a.h5", model=model, optimizer=optimizer)
    other, other_optimizer = trained(world, device, seed=1, **options)
    checkpoint.load(shared_path / "a.h5", model=other, optimizer=other_optimizer)
    assert torch.equal(values(model), values(other))
    mine, its = moments(model, optimizer), moments(other, other_optimizer)
    assert all(torch.equal(mine[name], its[name]) for name in mine)


def test_an_asynchronous_checkpoint_has_the_values_of_its_step(world, device, shared_path):
    model, optimizer = trained(world, device)
    with checkpoint.CheckpointManager(shared_path, asynchronous=True) as manager:
        expected = values(model)
        manager.save(1, model=model, optimizer=optimizer)
        train(model, batches(device))
        manager.wait()
        assert not torch.equal(values(model), expected)
        manager.load_latest(model=model, optimizer=optimizer)
    assert torch.equal(values(model), expected)
