"""Steps of training: registered parameters, equality with one process, gradients that accumulate, shared parameters."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor

from tests.conformance.models import MLP, close, data_of, reference


def test_a_model_without_inputs(fsdp, mesh):
    class Square(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(4, 4))

        def forward(self):
            return self.weight @ self.weight

    model = fsdp.fully_shard(Square(), mesh=mesh)
    out = model()
    assert out.shape == (4, 4)
    out.sum().backward()
    assert model.weight.grad.shape == (4, 4)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_parameters_after_the_forward(fsdp, mesh, world, reshard):
    model = nn.Sequential(MLP(3), MLP(3)).double()
    plain = copy.deepcopy(model)
    for unit in (model[0].in_proj, model[0].out_proj, model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    model(data_of(world.rank, 2, 3))
    for name, expected in plain.named_parameters():
        module, _, attribute = name.rpartition(".")
        param = getattr(model.get_submodule(module), attribute)
        kept = reshard is False or (reshard is None and not name.startswith("0."))
        assert isinstance(param, DTensor) != kept, name
        close(param, expected)


@pytest.mark.parametrize("shapes", [[(16, 15), (15, 8)], [(7, 15), (15, 3)], [(16, 17), (17, 8)]], ids=str)
def test_one_unit_against_one_process(fsdp, mesh, world, shapes):
    model = nn.Sequential(nn.Linear(*shapes[0]), nn.ReLU(), nn.Linear(*shapes[1])).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 4, shapes[0][0])).sum()

    losses, params = reference(model, world, loss_of)
    fsdp.fully_shard(model, mesh=mesh)
    optim = torch.optim.Adam(model.parameters(), lr=1e-2)
    for step, expected in enumerate(losses):
        loss = loss_of(model, world.rank, step)
        loss.backward()
        optim.step()
        optim.zero_grad()
        close(world.comm.allreduce(loss.detach()) / world.size, expected)
    for name, param in model.named_parameters():
        close(param, params[name])
