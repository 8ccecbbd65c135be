"""Ranks that make units or models in another order, or call models in another order: an error names both."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

import hpcfsdp
from hpcfsdp.errors import DifferentCallsError, DisagreementError
from hpcfsdp.fsdp import FullyShardedDataParallel
from tests.mpi.models import ORIGINAL

pytestmark = [pytest.mark.ranks(2), pytest.mark.filterwarnings("ignore::hpcfsdp.errors.DifferentValuesWarning")]

SHARED_AND_NOT = pytest.mark.parametrize("transport", ["shared memory", "messages"])


def layers(keys="012"):
    return nn.ModuleDict({key: nn.Linear(3, 3) for key in keys})


class Net(nn.Module):
    def __init__(self, keys="012"):
        super().__init__()
        self.layers = layers(keys)

    def forward(self, x):
        for key in sorted(self.layers):
            x = self.layers[key](x)
        return x


@SHARED_AND_NOT
@pytest.mark.parametrize("synchronises", [False, True])
def test_units_wrapped_in_another_order(world, groups, transport, synchronises):
    net, options = Net(), {"process_group": groups[transport], "sync_module_states": synchronises}
    for key in "210" if world.rank else "012":
        net.layers[key] = FullyShardedDataParallel(net.layers[key], **options)
    with pytest.raises(DisagreementError, match=r"where rank 0 has made 'layers\.0', rank 1 has made 'layers\.2'"):
        FullyShardedDataParallel(net, **options)


@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
@pytest.mark.parametrize("inside", [False, True])
def test_units_sharded_in_another_order(world, row_meshes, transport, inside):
    net = Net()
    for key in "210" if world.rank else "012":
        hpcfsdp.fully_shard(net.layers[key], mesh=row_meshes[transport])
    model = nn.Sequential(net, nn.Linear(3, 3)) if inside else net
    with pytest.raises(DisagreementError, match=r"where rank 0 has made '.*layers\.0', rank 1 has made '.*layers\.2'"):
        hpcfsdp.fully_shard(model, mesh=row_meshes[transport])


def test_rows_that_get_memory_later_are_matched_by_their_place(world):
    with torch.device("meta"):
        net = Net()
    for key in "210" if world.rank else "012":
        hpcfsdp.fully_shard(net.layers[key])
    model = hpcfsdp.fully_shard(net).to_empty(device="cpu")
    for number, param in enumerate(model.parameters()):
        nn.init.constant_(param, number)
    plain = Net()
    for number, param in enumerate(plain.parameters()):
        nn.init.constant_(param, number)
    assert torch.equal(model(torch.ones(1, 3)), plain(torch.ones(1, 3)))


def test_modules_registered_in_another_order(world):
    net = Net("021" if world.rank else "012")
    for key in "012":
        net.layers[key] = FullyShardedDataParallel(net.layers[key])
    with pytest.raises(DisagreementError, match=r"where rank 0 has made 'layers\.1', rank 1 has made 'layers\.2'"):
        FullyShardedDataParallel(net)


@SHARED_AND_NOT
@ORIGINAL
def test_models_wrapped_in_another_order(world, groups, transport, original):
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    made = {}
    for number in (1, 0) if world.rank else (0, 1):
        made[number] = FullyShardedDataParallel(modules[number], groups[transport], use_orig_params=original)
    with pytest.raises(DisagreementError, match=r"rank 0 has made 'Linear', rank 1 has made a unit of another model"):
        made[0](torch.ones(1, 3))


def test_models_sharded_in_another_order(world):
    modules = [nn.Linear(3, 3), nn.Linear(3, 3)]
    for number in (1, 0) if world.rank else (0, 1):
        hpcfsdp.fully_shard(modules[number])
    with pytest.raises(DisagreementError, match=r"rank 0 has made 'Linear', rank 1 has made a unit of another model"):
        modules[0](torch.ones(1, 3))


def test_models_copied_in_another_order(world):
    models = [FullyShardedDataParallel(nn.Linear(3, 3)) for _ in range(2)]
    copies = {}
    for number in (1, 0) if world.rank else (0, 1):
        copies[number] = copy.deepcopy(models[number])
    with pytest.raises(DisagreementError, match=r"rank 0 has made 'Linear', rank 1 has made a unit of another model"):
        copies[0](torch.ones(1, 3))


@pytest.mark.parametrize("front", ["wrapper", "rows"])
@pytest.mark.parametrize("transport", ["shared memory", "gloo"])
def test_models_called_in_another_order(world, make_comm, row_meshes, front, transport):
    """Of one name and as often as each other: nothing but the model is different."""
    models = [nn.Linear(3, 3) for _ in range(2)]
    for number, model in enumerate(models):
        if front == "rows":
            hpcfsdp.fully_shard(model, mesh=row_meshes[transport])
        else:
            models[number] = FullyShardedDataParallel(model, device_mesh=row_meshes[transport])
    for model in models:
        model(torch.ones(1, 3)).sum().backward()
    with pytest.raises(DifferentCallsError, match=r"step \d of model \d+"):
        models[world.rank](torch.ones(1, 3))


def test_models_made_alike_train(world):
    teacher, student = (FullyShardedDataParallel(Net(), sync_module_states=True) for _ in range(2))
    other = hpcfsdp.fully_shard(Net())
    loss = (student(torch.ones(2, 3)) - teacher(torch.ones(2, 3)) + other(torch.ones(2, 3))).square().sum()
    loss.backward()
    assert all(isinstance(param, DTensor) and param.grad is not None for param in other.parameters())
