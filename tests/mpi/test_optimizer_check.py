"""Optimizers that look across elements: right, or refused at their first step."""

import functools

import pytest
import torch
from torch import nn, optim

import hpcfsdp
from hpcfsdp.errors import EngineError
from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP, ShardingStrategy
from hpcfsdp.optim import WholeTensors
from tests.optimizers import Lamb, Prodigy, Sam

pytestmark = pytest.mark.ranks(2, 3)
OPTIMIZERS = {
    "LBFGS": lambda p: optim.LBFGS(p, lr=0.5, max_iter=3, line_search_fn="strong_wolfe"),
    "LAMB": Lamb,
    "Prodigy": functools.partial(Prodigy, lr=1.0, d0=1e-2),
    "SAM": lambda p: Sam(p, optim.SGD, lr=0.1, momentum=0.9),
    "SAM in two steps": lambda p: Sam(p, optim.SGD, lr=0.1, momentum=0.9),
    "Adafactor": optim.Adafactor,
}
WRAPS = {
    "flat": FSDP,
    "original": lambda model: FSDP(model, use_orig_params=True),
    "whole": lambda model: FSDP(model, use_orig_params=True, granularity="whole"),
    "replicated": lambda model: FSDP(model, use_orig_params=True, sharding_strategy=ShardingStrategy.NO_SHARD),
    "rows": hpcfsdp.fully_shard,
}
RIGHT = {("rows", name) for name in OPTIMIZERS if name != "Adafactor"} | {("whole", "LAMB")}
RIGHT |= {("replicated", name) for name in OPTIMIZERS}


def net():
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(6, 12), nn.Tanh(), nn.Linear(12, 6)).double()


def train(model, name, x, mean=lambda loss: loss):
    """The losses before each of a few steps."""
    optimizer = OPTIMIZERS[name](model.parameters())

    def closure():
        optimizer.zero_grad()
        loss = (model(x) - x.sort().values).square().mean()
        loss.backward()
        return mean(loss.detach().clone())

    losses = []
    for _ in range(5):
        if name == "LBFGS":  # where the closure is the first to call the model
            losses.append(optimizer.step(closure).item())
            continue
        losses.append(closure().item())
        if name == "SAM in two steps":
            optimizer.first_step(zero_grad=True)
            closure()
            optimizer.second_step()
        elif name == "SAM":
            optimizer.step(closure)
        else:
            optimizer.step()
    return losses


@pytest.mark.parametrize("name", OPTIMIZERS)
@pytest.mark.parametrize("wrap", WRAPS)
def test_an_optimizer_is_right_or_refused(world, wrap, name):
    def mean(loss):
        torch.distributed.all_reduce(loss)
        return loss / world.size

    x = torch.randn(6 * world.size, 6, dtype=torch.float64)
    model, mine = WRAPS[wrap](net()), x.chunk(world.size)[world.rank]
    if (wrap, name) in RIGHT:
        torch.testing.assert_close(train(model, name, mine, mean), train(net(), name, x), rtol=1e-9, atol=1e-11)
    elif wrap == "rows":
        with pytest.raises((NotImplementedError, RuntimeError)):  # by torch's DTensor
            train(model, name, mine, mean)
    else:
        with pytest.raises(EngineError, match=f"(?i)the {name.partition(' ')[0]} does not step"):
            train(model, name, mine, mean)


def test_whole_tensors_are_right_where_the_error_says_so(world):
    OPTIMIZERS["WholeTensors"] = lambda params: WholeTensors(model, params, Lamb)
    x = torch.randn(6 * world.size, 6, dtype=torch.float64)
    model = WRAPS["original"](net())
    got = train(model, "WholeTensors", x)
    torch.testing.assert_close(got, train(net(), "LAMB", x), rtol=1e-9, atol=1e-11)


def test_one_that_steps_another_is_refused(world):
    model = WRAPS["original"](net())
    optimizer = Sam(model.parameters(), optim.SGD, lr=0.1)
    before = [param.detach().clone() for param in model.parameters()]
    model(torch.ones(2, 6, dtype=torch.float64)).sum().backward()
    optimizer.first_step()
    for _ in range(2):
        with pytest.raises(EngineError, match=r"the Sam does not .*hpcfsdp.fully_shard"):
            optimizer.second_step()
    for param, value in zip(model.parameters(), before, strict=True):
        assert torch.equal(param, value)
