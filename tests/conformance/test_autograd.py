"""Backwards: outputs and modules without part in the loss, nested outputs, hooks, scaled and converted gradients."""

import collections
import copy

import pytest
import torch
from torch import nn
from torch.distributed.tensor import Shard
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from tests.conformance.models import MLP, check_training, close, data_of, mesh_of, reference

Pair = collections.namedtuple("Pair", "x y")


@pytest.mark.filterwarnings("ignore:no parameter of the unit")  # ours, of a unit without gradients
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("calls_both", [True, False])
def test_parts_without_part_in_the_loss(fsdp, mesh, world, reshard, calls_both):
    class Model(nn.Module):
        def __init__(self):
            super().__init__()
            self.one, self.other = nn.Linear(4, 4), nn.Linear(4, 4)

        def forward(self, x):
            return torch.relu(self.one(x)), torch.relu(self.other(x)) if calls_both else 1

    def loss_of(model, rank, step):
        one, other = model(data_of(rank + 10 * step, 2, 4))
        return (one * other).sum() if step < 2 else one.sum()

    model = Model().double()
    expected = reference(model, world, loss_of, steps=4)
    units = (model.one, model) if calls_both else (model.one, model.other, model)
    for unit in units:
        fsdp.fully_shard(unit, mesh=mesh, reshard_after_forward=reshard)
    check_training(model, world, loss_of, expected)


@pytest.mark.parametrize("kind", [list, tuple, dict, Pair])
def test_activations_in_containers(fsdp, mesh, world, kind):
    def pack(x):
        return {list: [x], tuple: (x,), dict: {"x": x}, Pair: Pair(x, "y")}[kind]

    def unpack(packed):
        return packed["x"] if kind is dict else packed[0]

    class Packed(MLP):
        def forward(self, packed):
            assert type(packed) is kind
            return pack(super().forward(unpack(packed)))

    def loss_of(model, rank, step):
        return unpack(model(pack(data_of(rank + 10 * step, 2, 4)))).sum()

    model = nn.Sequential(Packed(4), Packed(4)).double()
    expected = reference(model, world, loss_of)
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    check_training(model, world, loss_of, expected)


def loss_of_mlp(model, rank, step):
    return model(data_of(rank + 10 * step, 2, 4)).sum()


def test_hooks_after_gradients(fsdp, mesh, world):
    model = MLP(4).double()
    _, expected = reference(model, world, loss_of_mlp)
    for unit in (model.in_proj, model.out_proj, model):
        fsdp.fully_shard(unit, mesh=mesh)
    calls, optims = [], {}

    def step_of(param):
        calls.append(param)
        optims[param].step()
        optims[param].zero_grad()

    for param in model.parameters():
        optims[param] = torch.optim.Adam([param], lr=1e-2)
        param.register_post_accumulate_grad_hook(step_of)
    for step in range(3):
        loss_of_mlp(model, world.rank, step).backward()
        assert collections.Counter(calls) == dict.fromkeys(model.parameters(), step + 1)
    for name, param in model.named_parameters():
        close(param, expected[name])


def check_scaler(model, world, x, overflows):
    optim, scaler = torch.optim.Adam(model.parameters(), lr=1e-2), torch.amp.GradScaler("cpu", init_scale=2.0)
    param = next(model.parameters())
    scaler.scale(model(x).square().sum()).backward()
    if overflows and world.rank == 1:
        param.grad.to_local()[0, 0] = float("inf")
    scaled, before = param.grad.to_local().clone(), [each.to_local().clone() for each in model.parameters()]
    assert scaled.any()
    scaler.unscale_(optim)
    close(param.grad.to_local(), scaled / 2)
    scaler.step(optim)
    assert overflows != bool(optim.state)
    steps = [not torch.equal(old, new.to_local()) for old, new in zip(before, model.parameters(), strict=True)]
    assert any(steps) != overflows
    scaler.update()
    assert scaler.get_scale() == (1.0 if overflows else 2.0)


@pytest.mark.parametrize("overflows", [False, True])
def test_scaled_gradients(fsdp, mesh, world, overflows):
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(2)))
    for unit in (*model, model):
        fsdp.fully_shard(unit, mesh=mesh)
    check_scaler(model, world, torch.randn(4, 4), overflows)


@pytest.mark.ranks(4)
@pytest.mark.filterwarnings("ignore:FSDP2-wrapped module")  # torch's, of the output of a tensor-parallel module
@pytest.mark.parametrize("overflows", [False, True])
def test_scaled_gradients_of_tensor_parallel_parameters(fsdp, world, overflows):
    mesh = mesh_of(dp=2, tp=2)
    model = nn.Sequential(*(nn.Sequential(nn.Linear(4, 8), nn.Linear(8, 4)) for _ in range(2)))
    for pair in model:
        parallelize_module(pair, mesh["tp"], {"0": ColwiseParallel(), "1": RowwiseParallel()})
        fsdp.fully_shard(pair, mesh=mesh["dp"])
    fsdp.fully_shard(model, mesh=mesh["dp"])
    check_scaler(model, world, torch.randn(4, 4), overflows)


# Gradients that wait for their reduction


def test_a_divide_factor_with_gradients_that_wait(fsdp, mesh, world):
    model = fsdp.fully_shard(nn.Linear(1, 2, bias=False), mesh=mesh)
    model.set_gradient_divide_factor(4)
    for waits, total in ((False, 3.0), (True, 3.0), (False, 9.0)):
        model.set_requires_gradient_sync(not waits)
        model(torch.full((1, 1), 6.0)).sum().backward()
        close(model.weight.grad, torch.full((2, 1), total))


def test_reduced_gradients_stay_in_the_dtype_of_parameters(fsdp, mesh):
    model = nn.Linear(1, 2, bias=False)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16))
    for syncs, value in ((True, 256), (False, 1), (True, -256)):
        model.set_requires_gradient_sync(syncs)
        model(torch.full((1, 1), value, dtype=torch.bfloat16)).sum().backward()
        assert model.weight.grad.dtype == torch.float32
    close(model.weight.grad, torch.ones(2, 1))  # 257 has no place in 16 bits


@pytest.mark.ranks(4)
@pytest.mark.parametrize("dim", [0, 1])
def test_gradients_that_wait_on_ranks_and_within_shards(fsdp, world, dim):
    model = nn.Sequential(nn.Linear(4, 6, bias=False), nn.Linear(6, 4, bias=False)).double()
    like = copy.deepcopy(model)
    fsdp.fully_shard([*model], mesh=mesh_of(replicate=2, shard=2), shard_placement_fn=lambda param: Shard(dim))
    fsdp.fully_shard(model, mesh=mesh_of(replicate=2, shard=2))
    for step in range(4):
        model.set_requires_gradient_sync(step != 2)
        model.set_requires_all_reduce(step in (0, 3))
        loss_of_mlp(model, world.rank, step).backward()
        sum(loss_of_mlp(like, rank, step) for rank in range(world.size)).div(world.size).backward()
        for param, expected in zip(model.parameters(), like.parameters(), strict=True):
            if step in (0, 3):
                close(param.grad, expected.grad)


# Dtypes


@pytest.mark.parametrize("stored", [torch.bfloat16, torch.float32])
def test_gradients_have_the_dtype_of_parameters(fsdp, mesh, stored):
    model = nn.Linear(4, 4).to(stored)
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    model(torch.ones(2, 4, dtype=torch.bfloat16)).sum().backward()
    for param in model.parameters():
        assert param.grad.dtype == param.grad.to_local().dtype == stored
        close(param.grad.float(), torch.full(param.shape, 2.0))


@pytest.mark.parametrize("has_grads", [False, True])
def test_conversion_as_of_a_plain_module(fsdp, mesh, has_grads):
    def compare():
        for param, expected in zip(model.parameters(), plain.parameters(), strict=True):
            for found, plain_one in ((param, expected), (param.grad, expected.grad)):
                assert (found is None) == (plain_one is None)
                if found is not None:
                    assert (found.dtype, found.requires_grad) == (plain_one.dtype, plain_one.requires_grad)
                    assert found.is_leaf
                    close(found, plain_one, rtol=0, atol=0)

    plain = nn.Linear(4, 4)
    plain.bias.requires_grad_(False)
    model = fsdp.fully_shard(copy.deepcopy(plain), mesh=mesh)
    for module in (model, plain):
        if has_grads:
            module.weight.grad = torch.ones_like(module.weight)
        module.to(torch.bfloat16)
    compare()
    for _ in range(2):
        for module in (model, plain):
            module(torch.arange(8.0).view(2, 4).bfloat16()).sum().backward()
            torch.optim.SGD(module.parameters(), lr=0.125).step()
        compare()


def test_conversion_to_the_same_keeps_gradients(fsdp, mesh, world):
    model = fsdp.fully_shard(nn.Linear(4, 4, bias=False).double(), mesh=mesh)
    param, x = model.weight, torch.full((1, 4), 1.0 + world.rank, dtype=torch.float64)
    mean = torch.full((4, 4), (1 + world.size) / 2, dtype=torch.float64)
    for waits, total in ((False, 1), (True, 1), (False, 3)):
        model.set_requires_gradient_sync(not waits)
        model(x).sum().backward()
        model.cpu().double()
        assert model.weight is param
        close(param.grad, total * mean)
