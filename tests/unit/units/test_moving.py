import torch
from torch import nn

from hpcfsdp.units.own import move_buffers
from tests.unit.units.units import mark_as_unit


class Stop(nn.Module):
    """Stands for a unit that is wrapped already."""

    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(2, 2)
        self.register_buffer("inner", torch.zeros(1))
        mark_as_unit(self)


class Metric(nn.Module):
    """Has an `_apply` of its own without `recurse`, as torchmetrics has it, and a tensor unknown to torch."""

    def __init__(self):
        super().__init__()
        self.state = torch.zeros(2)

    def _apply(self, fn):
        self.state = fn(self.state)
        return super()._apply(fn)


def test_modules_that_move_in_a_way_of_their_own():
    model = nn.Sequential(nn.BatchNorm1d(2), nn.Sequential(Metric(), nn.LSTM(2, 2)), nn.Sequential(Stop(), Metric()))
    move_buffers(model, torch.device("meta"))
    assert all(tensor.is_meta for tensor in (*model[0].buffers(), model[1][0].state, model[2][1].state))
    assert not any(tensor.is_meta for tensor in (*model.parameters(), *model[2][0].buffers()))


def test_gradients_stay_with_their_parameters():
    layer = nn.Linear(2, 2)
    layer(torch.ones(1, 2)).sum().backward()
    move_buffers(layer, torch.device("meta"))
    assert not layer.weight.grad.is_meta
