"""An average of the parameters over steps, in the state of any optimizer."""

import copy

import pytest
import torch
from torch import nn
from torch.optim.swa_utils import AveragedModel, get_ema_multi_avg_fn

from hpcfsdp.errors import UsageError
from hpcfsdp.optim import ExponentialAverage, WholeTensors

OPTIMIZERS = {
    "SGD": lambda params: torch.optim.SGD(params, lr=0.1),
    "momentum": lambda params: torch.optim.SGD(params, lr=0.1, momentum=0.9),
    "AdamW": lambda params: torch.optim.AdamW(params, lr=0.1),
    "fused": lambda params: torch.optim.AdamW(params, lr=0.1, fused=True),
}


def train(model, optimizer, steps=4, after=lambda: None, first=0):
    for step in range(first, first + steps):
        generator = torch.Generator().manual_seed(step)
        optimizer.zero_grad()
        model(torch.randn(5, 3, generator=generator)).square().mean().backward()
        optimizer.step()
        after()


def make(seed=0):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2))


@pytest.mark.parametrize("kind", OPTIMIZERS)
def test_it_is_that_of_torch(kind):
    model = make()
    other = copy.deepcopy(model)
    expected = AveragedModel(other, multi_avg_fn=get_ema_multi_avg_fn(0.9))
    theirs = OPTIMIZERS[kind](other.parameters())
    train(other, theirs, after=lambda: expected.update_parameters(other))
    optimizer = OPTIMIZERS[kind](model.parameters())
    average = ExponentialAverage(optimizer, 0.9)
    train(model, optimizer)
    trained = [param.detach().clone() for param in model.parameters()]
    with average.swapped():
        torch.testing.assert_close(list(model.parameters()), list(expected.module.parameters()))
    torch.testing.assert_close([param.detach() for param in model.parameters()], trained, rtol=0, atol=0)


def test_parameters_that_get_gradients_late_are_stepped_as_without_it():
    found = []
    for averages in (False, True):
        model = make()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        if averages:
            ExponentialAverage(optimizer)
        model[0].requires_grad_(False)
        train(model, optimizer, 2)
        model[0].requires_grad_(True)
        train(model, optimizer, 2, first=2)
        found.append(list(model.parameters()))
    torch.testing.assert_close(*found, rtol=0, atol=0)


def test_it_goes_on_from_a_state_dict():
    model, whole = make(), make()
    optimizer, expected = (torch.optim.AdamW(each.parameters(), lr=0.1) for each in (model, whole))
    ExponentialAverage(expected, 0.9)
    train(whole, expected)
    ExponentialAverage(optimizer, 0.9)
    train(model, optimizer, 2)
    again = make(1)
    again.load_state_dict(model.state_dict())
    resumed = torch.optim.AdamW(again.parameters(), lr=0.5)
    average = ExponentialAverage(resumed, 0.9)
    resumed.load_state_dict(optimizer.state_dict())
    train(again, resumed, 2, first=2)
    for one, other in zip(again.parameters(), whole.parameters(), strict=True):
        assert torch.equal(resumed.state[one]["ema"], expected.state[other]["ema"])
    average.remove()
    assert not any("ema" in state for state in resumed.state.values())
    ExponentialAverage(resumed)


def test_what_is_refused():
    optimizer = torch.optim.SGD(make().parameters(), lr=0.1)
    for decay in (-0.1, 1.5, "0.9"):
        with pytest.raises(UsageError, match="decay must be between 0 and 1"):
            ExponentialAverage(optimizer, decay)
    ExponentialAverage(optimizer)
    with pytest.raises(UsageError, match="has an ExponentialAverage already"):
        ExponentialAverage(optimizer)
    model = make()
    with pytest.raises(UsageError, match="owners of parameters"):
        ExponentialAverage(WholeTensors(model, model.parameters(), torch.optim.SGD, lr=0.1))
