"""Numbers of gathers and reductions, and what is gathered and reduced: values, divisors, memory."""

import copy

import pytest
import torch
from torch import nn
from torch.distributed.device_mesh import init_device_mesh

from tests.conformance.models import MLP, check_training, close, data_of, reference
from tests.conformance.recording import record, sharded_stack, since

SHAPES = [(17, 7), (17,), (8, 3, 2), (64,), (1,), (3, 1), (2, 9)]
GATHERS, REDUCTIONS = ["g0", "g1", "g2", "groot"], ["r0", "r1", "r2", "rroot"]


class Sums(nn.Module):
    """A parameter for each of ``SHAPES``; their gradients are the argument, or its product with them and 2."""

    def __init__(self, dtype, *, squares=False):
        super().__init__()
        self.params, self.squares = nn.ParameterList(torch.randn(shape, dtype=dtype) for shape in SHAPES), squares

    def forward(self, factor):
        return sum((param.square() if self.squares else param).sum() for param in self.params) * factor


def mesh_of(*shape):
    names = ("replicate", "shard")[-len(shape) :]
    return init_device_mesh("cpu", shape, mesh_dim_names=names)


@pytest.mark.parametrize("reshard", [True, pytest.param(2, marks=pytest.mark.ranks(4))])
def test_gathered_values_of_odd_shapes(fsdp, mesh, reshard):
    model = Sums(torch.float32, squares=True)
    plain = [param.detach().clone() for param in model.params]
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=reshard)
    for param, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(param.full_tensor(), expected)
    model(torch.ones(())).backward()
    for param, expected in zip(model.parameters(), plain, strict=True):
        assert torch.equal(param.grad.full_tensor(), 2 * expected)  # by what the backward has gathered
    model.unshard()
    for param, expected in zip(model.params, plain, strict=True):
        assert type(param) is nn.Parameter
        assert torch.equal(param, expected)


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16])
def test_reduced_gradients_of_odd_shapes(fsdp, mesh, world, dtype):
    model = Sums(dtype)
    fsdp.fully_shard(model, mesh=mesh)
    model(torch.tensor(float(world.rank), dtype=dtype)).backward()
    for param in model.parameters():
        expected = torch.full(param.shape, (world.size - 1) / 2, dtype=dtype)
        assert torch.equal(param.grad.full_tensor(), expected)


@pytest.mark.parametrize("reshard", [True, False, None, pytest.param(2, marks=pytest.mark.ranks(4))])
def test_number_of_collectives(fsdp, mesh, world, reshard):
    model, log = sharded_stack(fsdp, mesh, 3, reshard=reshard)
    for _ in range(2):
        out = model(data_of(world.rank, 2, 4))
        assert sorted(event for event in since(log).split() if event[0] != "c") == GATHERS
        out.sum().backward()
        gathers = {False: [], None: GATHERS[:-1]}.get(reshard, GATHERS)
        assert sorted(since(log).split()) == gathers + REDUCTIONS


def test_a_reshard_between_forward_and_backward(fsdp, mesh, world):
    model, log = sharded_stack(fsdp, mesh, 3, reshard=False)
    for _ in range(2):
        out = model(data_of(world.rank, 2, 4))
        since(log)
        for unit in (*model.layers, model):
            unit.reshard()
        out.sum().backward()
        assert sorted(since(log).split()) == GATHERS + REDUCTIONS


@pytest.mark.parametrize("recurse", [True, False])
@pytest.mark.parametrize("choice", [True, False])
def test_set_reshard_after_forward(fsdp, mesh, world, choice, recurse):
    model, log = sharded_stack(fsdp, mesh, 3, reshard=not choice)
    model.set_reshard_after_forward(choice, recurse=recurse)
    for _ in range(2):
        out = model(data_of(world.rank, 2, 4))
        assert sorted(event for event in since(log).split() if event[0] != "c") == GATHERS
        out.sum().backward()
        layers = choice if recurse else not choice
        gathers = GATHERS[:-1] * layers + GATHERS[-1:] * choice
        assert sorted(since(log).split()) == gathers + REDUCTIONS


@pytest.mark.parametrize("factor", [1, 2])
@pytest.mark.parametrize(
    "shape",
    [(2,), pytest.param((2, 2), marks=pytest.mark.ranks(4))],
    ids=str,
)
def test_a_divisor_of_the_outermost_unit(fsdp, world, shape, factor):
    """`factor`: the divisor, in numbers of ranks."""
    model = nn.Sequential(MLP(3), MLP(3)).double()
    plain, mesh = copy.deepcopy(model), mesh_of(*shape)
    fsdp.fully_shard(model[0], mesh=mesh, reshard_after_forward=False)
    fsdp.fully_shard(model, mesh=mesh, reshard_after_forward=False)
    model.set_gradient_divide_factor(float(factor * world.size))
    for step in range(2):
        model(data_of(world.rank + 10 * step, 2, 3)).sum().backward()
        for rank in range(world.size):
            (plain(data_of(rank + 10 * step, 2, 3)).sum() / world.size).backward()
    for (name, param), expected in zip(model.named_parameters(), plain.parameters(), strict=True):
        close(param.grad, expected.grad if name.startswith("0.") else expected.grad / factor)


def test_a_divisor_of_replicas_that_hold_all_rows(fsdp, world):
    model = Sums(torch.float32)
    fsdp.fully_shard(model, mesh=mesh_of(world.size, 1))
    model.set_gradient_divide_factor(4.0 * world.size)
    model(torch.tensor(float(world.rank))).backward()
    for param in model.parameters():
        assert torch.equal(param.grad.full_tensor(), torch.full(param.shape, (world.size - 1) / 8))


def test_a_divisor_of_sums_in_another_dtype(fsdp, mesh, world):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.float32)
    model = nn.Linear(2, 4, bias=False)
    fsdp.fully_shard(model, mesh=mesh, mp_policy=policy)
    model.set_gradient_divide_factor(4.0 * world.size)
    model(torch.full((1, 2), 256.0 if world.rank else 1.0)).sum().backward()
    total = 1 + 256 * (world.size - 1)  # which bfloat16 rounds
    assert torch.equal(model.weight.grad.full_tensor(), torch.full((4, 2), total / (4 * world.size)))


@pytest.mark.parametrize("factor", [None, 1.0, 2.0])
def test_one_rank_divides_by_the_factor_alone(fsdp, world, factor):
    alone = init_device_mesh("cpu", (world.size, 1), mesh_dim_names=("others", "alone"))["alone"]
    model = nn.Linear(8, 4, bias=False)
    plain = copy.deepcopy(model)
    fsdp.fully_shard(model, mesh=alone)
    if factor is not None:
        model.set_gradient_divide_factor(factor)
    optim, plain_optim = torch.optim.Adam(model.parameters()), torch.optim.Adam(plain.parameters())
    for step in range(3):
        x = data_of(world.rank + 10 * step, 3, 8, dtype=torch.float32)
        loss, expected = model(x).sum(), plain(x).sum()
        assert torch.equal(loss, expected)
        loss.backward()
        expected.backward()
        assert torch.equal(model.weight.grad.to_local(), plain.weight.grad / (factor or 1))
        plain.weight.grad /= factor or 1
        for each in (optim, plain_optim):
            each.step()
            each.zero_grad()


@pytest.mark.parametrize("number", [1, 2])
@pytest.mark.parametrize("reshard", [True, False])
@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.ranks(4))], ids=str)
def test_buffers_for_gradients_change_no_result(fsdp, world, shape, reshard, number):
    policy = fsdp.MixedPrecisionPolicy(param_dtype=torch.bfloat16, reduce_dtype=torch.bfloat16)
    first = nn.Sequential(*(MLP(4) for _ in range(3)))
    models = [first, copy.deepcopy(first)]
    for model in models:
        for unit in (*model, model):
            fsdp.fully_shard(unit, mesh=mesh_of(*shape), mp_policy=policy, reshard_after_forward=reshard)
    models[1].set_reduce_scatter_max_input_buffers(number)
    optims = [torch.optim.AdamW(model.parameters(), lr=1e-2) for model in models]
    for step in range(3):
        for model, optim in zip(models, optims, strict=True):
            optim.zero_grad()
            model(data_of(world.rank + 10 * step, 2, 4, dtype=torch.float32)).float().sum().backward()
            optim.step()
        for one, other in zip(first.parameters(), models[1].parameters(), strict=True):
            assert torch.equal(one.to_local(), other.to_local())
            assert torch.equal(one.grad.to_local(), other.grad.to_local())


def test_wrong_numbers_of_buffers(fsdp, mesh):
    model = fsdp.fully_shard(nn.Linear(4, 4), mesh=mesh)
    with pytest.raises(ValueError):
        model.set_reduce_scatter_max_input_buffers(0)
    for wrong in (2.5, True):
        with pytest.raises(TypeError):
            model.set_reduce_scatter_max_input_buffers(wrong)
    model.set_reduce_scatter_max_input_buffers(2)


def test_registered_memory_and_functions_of_the_program(fsdp, mesh, world):
    """The program's function replaces gathers into registered memory; the other way round is an error."""
    model, log = fsdp.fully_shard(nn.Linear(4, 4).double(), mesh=mesh), []
    model.set_allocate_memory_from_process_group_for_comm(True)
    record(log, only=model)
    model(data_of(world.rank, 2, 4)).sum().backward()
    assert since(log) == "gonly ronly"
    with pytest.raises(AssertionError):
        model.set_allocate_memory_from_process_group_for_comm(True)


@pytest.mark.parametrize("shape", [(2,), pytest.param((2, 2), marks=pytest.mark.ranks(4))], ids=str)
def test_sums_instead_of_averages_in_messages(fsdp, world, shape):
    model = MLP(4).double()

    def loss_of(model, rank, step):
        return model(data_of(rank + 10 * step, 2, 4)).sum()

    expected = reference(model, world, loss_of)
    for unit in (model.in_proj, model):
        fsdp.fully_shard(unit, mesh=mesh_of(*shape))
        unit.set_force_sum_reduction_for_comms(True)
    check_training(model, world, loss_of, expected)
