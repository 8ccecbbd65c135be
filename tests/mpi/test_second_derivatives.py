"""Derivatives of a sharded model within a loss: forces of potentials, gradient penalties, differential equations.

torch's engines free what the graph of the derivatives computes with; one process is the reference.
"""

import contextlib

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

import hpcfsdp.fsdp2 as ours
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from tests.mpi.row_cases import TIGHT, whole

pytestmark = pytest.mark.ranks(2, 3)


class Energy(nn.Module):
    def __init__(self):
        super().__init__()
        self.first = nn.Linear(3, 8)
        self.blocks = nn.ModuleList([nn.Sequential(nn.Linear(8, 8), nn.Tanh()) for _ in range(3)])
        self.last = nn.Linear(8, 1)

    def forward(self, x):
        x = torch.tanh(self.first(x))
        for block in self.blocks:
            x = x + block(x)
        return self.last(x)


class Forces(nn.Module):
    """A potential, whose forward differentiates: through units inside of its own."""

    def __init__(self):
        super().__init__()
        self.energy = Energy()

    def forward(self, x):
        energy = self.energy(x)
        return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def first(model, x):
    if isinstance(model, Forces) or isinstance(getattr(model, "module", None), Forces):
        return model(x)
    energy = model(x)
    return energy, torch.autograd.grad(energy.sum(), x, create_graph=True)[0]


def force_matching(model, x, target):
    energy, forces = first(model, x)
    return (forces - target).square().mean() + energy.square().mean()


def penalty(model, x, target):
    """The gradient of the inputs alone: the last layer's output gets no gradient."""
    return (first(model, x)[1].norm(dim=1) - 1).square().mean()


def equation(model, x, target):
    """With a second derivative, as for a diffusion term."""
    value, slope = first(model, x)
    (curvature,) = torch.autograd.grad(slope.sum(), x, create_graph=True)
    return (curvature - value).square().mean()


def several_forwards(model, x, target):
    """Outputs of other inputs, before and after the derivative."""
    before = model(x.detach())
    loss = penalty(model, x, target)
    return loss + (model(target) - before).square().mean()


def forwards_aside(model, x, target):
    """Outputs that the loss does not contain, as for a metric, with gradients and without."""
    loss = penalty(model, x, target)
    model(target)
    with torch.no_grad():
        model(x)
    return loss


LOSSES = {each.__name__: each for each in (force_matching, penalty, equation, several_forwards, forwards_aside)}


def build(kind=Energy, dtype=torch.float64):
    torch.manual_seed(0)
    return kind().to(dtype)


def shard(front, model, *, mesh=None, **options):
    net = model.energy if isinstance(model, Forces) else model
    if front == "class":
        for index, block in enumerate(net.blocks):
            net.blocks[index] = FSDP(block, **options)
        return FSDP(model, **options)
    for block in net.blocks:
        ours.fully_shard(block, mesh=mesh, **options)
    return ours.fully_shard(model, mesh=mesh, **options)


def data(step, rank, dtype=torch.float64):
    generator = torch.Generator().manual_seed(100 * step + rank)
    x, target = (torch.randn(5, 3, generator=generator, dtype=torch.float64).to(dtype) for _ in range(2))
    return x.requires_grad_(), target


def train(model, loss, batches, *, around=lambda _: contextlib.nullcontext(), late_zero=False):
    """Steps, each of the sum of losses of its batches."""
    optimizer = torch.optim.AdamW(
        model.parameters(), lr=1e-2, weight_decay=0
    )  # which a part of a flat parameter would have
    for batch in batches:
        if not late_zero:
            optimizer.zero_grad()
        for number, (x, target) in enumerate(batch):
            with around(number):
                value = loss(model, x, target)
                if late_zero and not number:
                    optimizer.zero_grad()
                (value / len(batch)).backward()
        optimizer.step()


def values(front, model):
    if front == "class":
        with FSDP.summon_full_params(model):
            return [param.detach().clone() for param in model.parameters()]
    return [whole(param) for param in model.parameters()]


def compare(front, world, loss, *, kind=Energy, micro=1, around=None, late_zero=False, **options):
    """Train one process on the data of all ranks, and a sharded model on that of each."""
    plain = build(kind)
    everyone = [[data(10 * step + n, r) for n in range(micro) for r in range(world.size)] for step in range(3)]
    train(plain, loss, everyone, late_zero=late_zero)
    model = shard(front, build(kind), **options)
    mine = [[data(10 * step + n, world.rank) for n in range(micro)] for step in range(3)]
    train(model, loss, mine, late_zero=late_zero, **({"around": around(model)} if around else {}))
    torch.testing.assert_close(values(front, model), [param.detach() for param in plain.parameters()], **TIGHT)
    return model


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("options", [{}, {"reshard_after_forward": True}, {"reshard_after_forward": False}], ids=str)
def test_fully_shard(world, ours_on, loss, options):
    compare("rows", world, LOSSES[loss], mesh=ours_on, **options)


@pytest.mark.parametrize("loss", LOSSES)
@pytest.mark.parametrize("original", [False, True])
@pytest.mark.parametrize("group", ["shared memory", "gloo"])
def test_the_class(world, groups, loss, original, group):
    compare("class", world, LOSSES[loss], process_group=groups[group], use_orig_params=original)


@pytest.mark.parametrize("front", ["rows", "class"])
@pytest.mark.parametrize("late_zero", [False, True])
def test_within_the_forward_of_an_outer_unit(world, front, late_zero):
    compare(front, world, force_matching, kind=Forces, late_zero=late_zero)


@pytest.mark.parametrize("front", ["rows", "class"])
def test_gradients_of_several_backwards_add_up(world, front):
    """Each reduced, or held until the last: before the graph is made, and while it is there."""
    compare(front, world, penalty, micro=3)

    def held(model):
        def around(number):
            if front == "class":
                return model.no_sync() if number < 2 else contextlib.nullcontext()
            model.set_requires_gradient_sync(number == 2)
            return contextlib.nullcontext()

        return around

    compare(front, world, force_matching, micro=3, around=held)


def test_checkpoints_of_activations(world):
    plain = build()
    train(plain, force_matching, [[data(step, r) for r in range(world.size)] for step in range(3)])
    model = shard("rows", build())
    for block in model.blocks:
        block.forward = lambda x, call=block.forward: checkpoint(call, x, use_reentrant=False)
    train(model, force_matching, [[data(step, world.rank)] for step in range(3)])
    torch.testing.assert_close(values("rows", model), [param.detach() for param in plain.parameters()], **TIGHT)


@pytest.mark.parametrize("front", ["rows", "class"])
def test_a_derivative_without_a_backward(world, front):
    """As in an evaluation: the next step is that of a model that was not evaluated."""
    found = []
    for evaluates in (False, True):
        model = shard(front, build())
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        for step in range(2):
            if evaluates:
                first(model, data(50 + step, world.rank)[0])
            model(data(step, world.rank)[0]).square().mean().backward()
            optimizer.step()
            optimizer.zero_grad()
        found.append(values(front, model))
    torch.testing.assert_close(*found, rtol=0, atol=0)


@pytest.mark.filterwarnings("ignore:Using backward.. with create_graph=True")
@pytest.mark.parametrize("front", ["rows", "class"])
def test_gradients_of_parameters_with_a_graph_are_refused(world, front):
    model = shard(front, build())
    with pytest.raises(EngineError, match=r"backward\(create_graph=True\) wants gradients of sharded parameters"):
        model(data(0, 0)[0]).square().mean().backward(create_graph=True)
