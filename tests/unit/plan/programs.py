"""Functions that tests give to ``hpcfsdp plan --factory``; no tests."""

import sys

import torch
from torch import nn

not_a_function = 3


class Tower(nn.Module):
    """Two kinds of layers, and inputs that are no token ids."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(64, 64), nn.Linear(64, 64), nn.Linear(64, 64), nn.LayerNorm(64)])

    def forward(self, x, scale=1.0):
        for layer in self.layers:
            x = layer(x).relu() * scale
        return {"out": x}


class Tied(nn.Module):
    """Two units with one parameter."""

    def __init__(self):
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(8, 8), nn.Linear(8, 8)])
        self.layers[1].weight = self.layers[0].weight

    def forward(self, x):
        return self.layers[1](self.layers[0](x))


class Reads(nn.Linear):
    """Reads a value, which no tensor on the meta device has."""

    def forward(self, x):
        return super().forward(x) if x.sum().item() > 0 else x


def without_inputs():
    return Tower()


def with_inputs():
    return Tower(), {"x": torch.zeros(4, 10, 64), "scale": 2.0}


def tied():
    return Tied(), torch.zeros(2, 8)


def reads():
    return Reads(4, 4), torch.zeros(2, 4)


def fails():
    raise KeyError("no such dataset")


def exits():
    sys.exit("no licence")


def wrong():
    return "a model"


def images():
    layers = nn.Conv2d(3, 8, 4, 4), nn.Flatten(), nn.Linear(8 * 256, 4), nn.Tanh()
    return nn.Sequential(*layers), torch.zeros(2, 3, 64, 64)


def frozen():
    return nn.Linear(4, 4).requires_grad_(False), torch.zeros(2, 4)


class Experts(nn.Module):
    """Four experts, whose tokens are sorted."""

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(4, 32, 64))

    def forward(self, x, ends):
        return nn.functional.grouped_mm(x, self.weight, offs=ends)


def experts():
    return Experts(), (torch.zeros(48, 32, requires_grad=True), torch.zeros(4, dtype=torch.int32))
