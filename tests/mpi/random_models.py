"""Models drawn at random: branches and chains of blocks, some frozen, of which each rank uses other parameters.

All ranks call the same modules. Within a block a rank may leave out a layer, or put an embedding of its own in place of
the input, so that no gradient leaves through it. The plain model runs once for each rank, with what that rank uses.
"""

import copy
import random

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.utils.checkpoint import checkpoint

WIDTH = 5


class Block(nn.Module):
    """Two layers and an embedding.

    Attributes:
        uses: by rank, the parts that its forward uses, of "b" (the second layer) and "null" (the embedding, in place of
            the input).
        rank: that computes.
    """

    def __init__(self, draw, ranks):
        super().__init__()
        self.a, self.b = nn.Linear(WIDTH, WIDTH), nn.Linear(WIDTH, WIDTH)
        self.null = nn.Parameter(torch.randn(WIDTH))
        kind = draw.choice(["plain", "plain", "reused", "recomputed", "tied"])
        if kind == "tied":
            self.b.weight = self.a.weight
        self.is_recomputed, self.is_reused = kind == "recomputed", kind == "reused"
        self.uses = [{part for part in ("b", "null") if draw.random() < 0.3} for _ in range(ranks)]
        self.rank = 0
        params = list(self.parameters())
        for frozen in draw.sample(params, min(draw.choice([0, 0, 0, 1, 2, 5]), len(params))):
            frozen.requires_grad_(False)
        if not any(param.requires_grad for param in self.parameters()):
            self.uses = [
                used - {"null"} for used in self.uses
            ]  # whether its outputs have gradients is alike on all ranks

    def forward(self, x):
        if "null" in self.uses[self.rank]:
            x = self.null.expand(x.shape)
        y = checkpoint(self.a, x, use_reentrant=False) if self.is_recomputed else self.a(x)
        if self.is_reused:
            y = self.a(torch.tanh(y))
        return torch.tanh(y + self.b(x) if "b" in self.uses[self.rank] else y)


class Chain(nn.Sequential):
    pass


class Branch(nn.Module):
    def __init__(self, *towers):
        super().__init__()
        self.towers = nn.ModuleList(towers)

    def forward(self, x):
        return sum(tower(x) for tower in self.towers)


class Top(nn.Module):
    def __init__(self, inner, stem):
        super().__init__()
        self.inner, self.stem, self.head = inner, stem, nn.Linear(WIDTH, 3)

    def forward(self, x):
        return self.head(self.inner(x if self.stem is None else self.stem(x)))


def make(seed, ranks):
    """A model, and the modules in it to be units, inner ones first."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    units = []

    def grow(depth):
        if depth == 0:
            units.append(Block(draw, ranks))
            return units[-1]
        made = draw.choice([Chain, Branch])(*(grow(depth - 1) for _ in range(draw.randint(2, 3))))
        if draw.random() < 0.4:
            units.append(made)
        return made

    model = Top(grow(draw.randint(1, 2)), nn.Linear(WIDTH, WIDTH) if draw.random() < 0.5 else None).double()
    return model, units


def data_of(rank, step):
    return torch.randn(2, WIDTH, generator=torch.Generator().manual_seed(97 * step + rank), dtype=torch.float64)


def loss_of(model, rank, step, device="cpu"):
    for module in model.modules():
        if isinstance(module, Block):
            module.rank = (rank + step) % len(module.uses)  # in each step a rank uses other parameters
    return model(data_of(rank, step).to(device)).square().mean()


def trained(model, ranks, steps=3):
    """The parameters of the plain model after so many steps on the data of all ranks."""
    model = copy.deepcopy(model)
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for step in range(steps):
        for rank in range(ranks):
            (loss_of(model, rank, step) / ranks).backward()
        optimizer.step()
        optimizer.zero_grad()
    return model.state_dict()


def train(model, rank, device="cpu", steps=3, apart=None):
    """Train a sharded model on the data of a rank.

    Args:
        apart: the context of the first of two backwards in each step, None for one backward.
    """
    optimizer = torch.optim.SGD([param for param in model.parameters() if param.requires_grad], lr=0.1)
    for step in range(steps):
        if apart is not None:
            with apart():
                loss_of(model, rank, step + 1, device).backward()
        loss_of(model, rank, step, device).backward()
        optimizer.step()
        optimizer.zero_grad()


def check(model, expected):
    """Collective. Compare the parameters of a sharded model with those of the plain one."""
    found = model.state_dict()
    for name, value in expected.items():
        got = found[name].full_tensor() if isinstance(found[name], DTensor) else found[name]
        torch.testing.assert_close(
            got.cpu(), value, rtol=1e-9, atol=1e-11, msg=lambda text, name=name: f"{name}: {text}"
        )
