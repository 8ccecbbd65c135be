"""Parameters that need no gradient, within a unit and in units of their own; weights loaded between forwards."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed._composable import checkpoint

from tests.conformance.models import MLP, check_training, close, data_of, reference


def loss_of(model, rank, step):
    return model(data_of(rank + 10 * step, 2, 4)).sum()


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("late", [False, True])
@pytest.mark.parametrize("recomputes", [False, True])
def test_units_that_train_biases_alone(fsdp, mesh, world, reshard, late, recomputes):
    def freeze(frozen=True):
        for name, param in model.named_parameters():
            param.requires_grad_(name.endswith("bias") or not frozen)

    model = nn.Sequential(*(MLP(4) for _ in range(3))).double()
    freeze()
    expected = reference(model, world, loss_of)
    freeze(not late)
    for mlp in model:
        if recomputes:
            checkpoint(mlp)
        fsdp.fully_shard(mlp, mesh=mesh, reshard_after_forward=reshard)
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    freeze()
    check_training(model, world, loss_of, expected)
    loss_of(model, world.rank, 0).backward()
    for name, param in model.named_parameters():
        assert (param.grad is None) != name.endswith("bias")


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("unfreezes", [False, True])
def test_frozen_units_between_others(fsdp, mesh, world, reshard, unfreezes):
    def train(model, ranks):
        optim = torch.optim.Adam(model.parameters(), lr=1e-2)
        for step in range(4):
            for layer in model[::4]:
                layer.requires_grad_(unfreezes and step == 3)
            with torch.set_grad_enabled(step != 1):
                loss = sum(loss_of(model, rank, step) for rank in ranks) / len(ranks)
            if step != 1:
                loss.backward()
                optim.step()
            optim.zero_grad(set_to_none=step % 2 == 0)
            yield loss.detach()

    model = nn.Sequential(*(layer for _ in range(4) for layer in (nn.Linear(4, 4), nn.ReLU()))).double()
    like = copy.deepcopy(model)
    for unit in (*model[::2], model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    for mean, loss in zip(train(like, range(world.size)), train(model, [world.rank]), strict=True):
        close(world.comm.allreduce(loss) / world.size, mean)
    for param, expected in zip(model.parameters(), like.parameters(), strict=True):
        close(param, expected)


@pytest.mark.parametrize("reshard", [True, False])
def test_units_called_several_times(fsdp, mesh, world, reshard):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.first, self.frozen, self.trained = (nn.Linear(4, 4) for _ in range(3))
            self.frozen.requires_grad_(False)

        def forward(self, x):
            x = self.first(x)
            for _ in range(3):
                x = self.frozen(torch.relu(self.trained(x)))
                with torch.no_grad():
                    x += torch.relu(self.trained(x))
            return x

    model = Model().double()
    expected = reference(model, world, loss_of)
    for unit in (model.first, model.frozen, model.trained, model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    check_training(model, world, loss_of, expected)


@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("meta", [True, False])
@pytest.mark.parametrize("assign", [True, False])
def test_weights_loaded_between_forwards(fsdp, mesh, reshard, meta, assign):
    with torch.device("meta" if meta else "cpu"):
        model = nn.Linear(8, 4).requires_grad_(False)
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    if meta:
        model.to_empty(device="cpu")
    for value in range(1, 4):
        model.reshard()
        state = {name: torch.full_like(tensor, value) for name, tensor in model.state_dict().items()}
        model.load_state_dict(state, assign=assign)
        close(model(torch.ones(2, 8)), torch.full((2, 4), 9.0 * value))
