"""What modules hold and what is sharded: before, between and after forward and backward, and once it is cast."""

import copy
import gc

import pytest
import torch
from torch import nn
from torch.distributed.tensor import DTensor, Shard

from tests.conformance.models import MLP, attribute, close, data_of, trains_as_one_process


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


def test_a_model_without_parameters(fsdp, mesh):
    class Sum(nn.Module):
        def forward(self, x, others):
            return x + sum(others)

    one = torch.ones(3)
    model = fsdp.fully_shard(Sum(), mesh=mesh)
    assert torch.equal(model(one, (one, 2 * one)), 4 * one)


def check_registered(fsdp, mesh, world, units_of, reshard, kept):
    """Assert which parameters are whole after a forward, and that none is after ``reshard()`` and after a backward."""
    model = nn.Sequential(MLP(3), MLP(3)).double()
    plain = dict(copy.deepcopy(model).named_parameters())
    for unit in units_of(model):
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    x = data_of(world.rank, 2, 3)

    def check(kept):
        for name, expected in plain.items():
            param = attribute(model, name)
            assert isinstance(param, DTensor) != kept(name), name
            close(param, expected)

    check(lambda name: False)
    model(x)
    check(kept)
    for module in model.modules():
        if isinstance(module, fsdp.FSDPModule):
            module.reshard()
    check(lambda name: False)
    model(x).sum().backward()
    check(lambda name: False)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_parameters_of_one_unit(fsdp, mesh, world, reshard):
    check_registered(fsdp, mesh, world, lambda model: [model], reshard, lambda name: not reshard)


@pytest.mark.parametrize("reshard", [True, False, None])
def test_registered_parameters_of_several_units(fsdp, mesh, world, reshard):
    def units_of(model):
        return model[0].in_proj, model[0].out_proj, model

    def kept(name):
        return reshard is False or (reshard is None and not name.startswith("0."))

    check_registered(fsdp, mesh, world, units_of, reshard, kept)


@pytest.mark.ranks(4)
def test_registered_parameters_where_some_ranks_keep_them(fsdp, mesh, world):
    check_registered(fsdp, mesh, world, lambda model: [model[0], model], 2, lambda name: False)


def test_a_cast_after_sharding(fsdp, mesh, world):
    def loss_of(model, rank, step):
        return model(data_of(rank, 2, 4)).sum()

    def shard(model):
        model.float()
        for unit in (model.in_proj, model.out_proj, model):
            fsdp.fully_shard(unit, mesh=mesh)
        model.double()

    model = trains_as_one_process(MLP(4).double(), world, loss_of, shard)
    loss_of(model, world.rank, 0).backward()
    for param in model.parameters():
        for tensor in (param, param.to_local(), param.grad, param.grad.to_local()):
            assert tensor.dtype == torch.float64


def test_rows_and_columns_are_contiguous(fsdp, mesh, world):
    model = MLP(4).double()
    seen = []
    for unit in (model.in_proj, model.out_proj, model):
        fsdp.fully_shard(unit, mesh=mesh, shard_placement_fn=lambda param: Shard(param.ndim - 1))
    for layer in (model.in_proj, model.out_proj):
        layer.register_forward_pre_hook(lambda layer, _: seen.append(layer.weight.is_contiguous()))
    model(data_of(world.rank, 2, 4)).sum().backward()
    assert seen == [True, True]
    for param in model.parameters():
        assert param.placements == (Shard(param.ndim - 1),)
        for tensor in (param, param.to_local(), param.grad, param.grad.to_local()):
            assert tensor.is_contiguous()


def test_layers_that_are_made_and_sharded_one_by_one(fsdp, mesh, world):
    model = nn.Sequential()
    for _ in range(5):
        model.append(nn.Sequential(nn.LayerNorm(4), nn.Linear(4, 4, bias=False)).double())
        fsdp.fully_shard(model[-1], mesh=mesh)
        gc.collect()  # later parameters may get the addresses of freed ones
    fsdp.fully_shard(model, mesh=mesh)
    model(data_of(world.rank, 2, 4)).sum().backward()
    assert all(param.grad is not None for param in model.parameters())


def test_parameters_that_two_units_share_are_refused(fsdp, mesh):
    model = nn.Sequential(nn.Embedding(7, 4), nn.Linear(4, 7, bias=False))
    model[1].weight = model[0].weight

    def use():
        for unit in (model[0], model[1], model):
            fsdp.fully_shard(unit, mesh=mesh)
        model(torch.tensor([1, 2]))

    with pytest.raises(ValueError):
        use()
