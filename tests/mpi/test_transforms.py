"""Functions of torch.func over sharded models: derivatives as of the plain model, also those that train it."""

import pytest
import torch
from torch import nn
from torch.func import grad, hessian, jacfwd, jacrev, jvp, vjp, vmap

import hpcfsdp
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel

pytestmark = [
    pytest.mark.ranks(2),
    pytest.mark.filterwarnings("ignore:`torch.jit.script` is deprecated:DeprecationWarning"),  # torch's, in jvp
]

FUNCTIONS = {
    "grad": lambda model, x: grad(lambda value: model(value).sum())(x),
    "two calls": lambda model, x: grad(lambda value: (model(value) * model(2 * value)).sum())(x),
    "vmap": lambda model, x: vmap(model)(x),
    "jacrev": lambda model, x: vmap(jacrev(model))(x),
    "jacfwd": lambda model, x: vmap(jacfwd(model))(x),
    "hessian": lambda model, x: hessian(lambda value: model(value).sum())(x),
    "jvp": lambda model, x: jvp(model, (x,), (torch.ones_like(x),))[1],
    "vjp": lambda model, x: vjp(model, x)[1](torch.ones(len(x), 1, dtype=x.dtype))[0],
    "without gradients": lambda model, x: torch.no_grad()(vmap(model))(x),
}


def build():
    torch.manual_seed(0)
    layers = [nn.Linear(8, 8), nn.Tanh(), nn.Sequential(nn.Linear(8, 8), nn.Tanh(), nn.LayerNorm(8)), nn.Linear(8, 1)]
    return nn.Sequential(*layers).double()


def shard(model, kind, groups):
    if kind in ("rows", "kept rows"):
        hpcfsdp.fully_shard(model[2], reshard_after_forward=kind == "rows")
        return hpcfsdp.fully_shard(model)
    options = {"use_orig_params": kind == "original", "process_group": groups["messages"]}
    model[2] = FullyShardedDataParallel(model[2], **options)
    return FullyShardedDataParallel(model, **options)


def train(model, x, loss):
    """The model's outputs after a step."""
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    optimizer.zero_grad()
    loss(model, x).backward()
    optimizer.step()
    optimizer.zero_grad()
    return model(x).detach()


def plain(model, x):
    return model(x).square().sum()


def penalty(model, x):
    return grad(lambda value: model(value).sum())(x).square().sum()


@pytest.mark.parametrize("kind", ["rows", "kept rows", "flat", "original"])
def test_transforms_between_steps(kind, groups):
    x = torch.randn(3, 8, dtype=torch.double)
    one, model = build(), shard(build(), kind, groups)
    for _ in range(2):
        for name, function in FUNCTIONS.items():
            torch.testing.assert_close(function(model, x), function(one, x), msg=lambda text, n=name: f"{n}: {text}")
        torch.testing.assert_close(train(model, x, plain), train(one, x, plain))


@pytest.mark.parametrize("kind", ["rows", "kept rows", "flat"])
def test_penalty_on_a_derivative(kind, groups):
    x = torch.randn(3, 8, dtype=torch.double)
    one, model = build(), shard(build(), kind, groups)
    for loss in (penalty, plain, lambda model, x: penalty(model, x) + plain(model, x)):
        torch.testing.assert_close(train(model, x, loss), train(one, x, loss))


def test_original_parameters_refuse_a_penalty_that_they_would_lose(groups):
    model = shard(build(), "original", groups)
    with pytest.raises(EngineError, match="arrived while the unit was in idle"):
        penalty(model, torch.randn(3, 8, dtype=torch.double)).backward()
