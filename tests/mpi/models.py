"""Small models, and training of a plain and a sharded one on the same global batches."""

import copy

import pytest
import torch
from torch import nn

from hpcfsdp import checkpoint
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.wrap import ModuleWrapPolicy
from tests.unit.params.gathering import values_bytes

ORIGINAL = pytest.mark.parametrize("original", [False, True], ids=["flat", "original"])
"""Both settings of ``use_orig_params``."""
WIDTH, BATCH = 13, 12  # an odd width: shards end inside of rows; the batch is divisible by 1, 2, 3 and 4 ranks


class Block(nn.Module):
    def __init__(self, dropout=0.0):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 29), nn.Linear(29, WIDTH)
        self.dropout = dropout

    def forward(self, x):
        hidden = torch.nn.functional.gelu(self.up(self.norm(x)))
        return x + torch.nn.functional.dropout(self.down(hidden), self.dropout, self.training)


class Net(nn.Module):
    """Two wrapped blocks between layers that belong to the root; the head is tied to the embedding."""

    def __init__(self, dropout=0.0):
        super().__init__()
        self.embed = nn.Embedding(11, WIDTH)
        self.blocks = nn.ModuleList([Block(dropout), Block(dropout)])
        self.norm = nn.LayerNorm(WIDTH)
        self.head = nn.Linear(WIDTH, 11, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("scale", torch.tensor([1.5]))
        self.register_buffer("scratch", torch.zeros(2), persistent=False)

    def forward(self, ids):
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x)) * self.scale


def make_net(dropout=0.0, seed=0):
    torch.manual_seed(seed)
    return Net(dropout)


def shard(module, group=None, **arguments):
    return FullyShardedDataParallel(module, group, auto_wrap_policy=ModuleWrapPolicy({Block}), **arguments)


def batch(step):
    generator = torch.Generator().manual_seed(1000 + step)
    ids = torch.randint(0, 11, (BATCH, 8), generator=generator)
    return ids[:, :-1], ids[:, 1:]


def loss_of(model, ids, targets):
    return torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), targets.flatten())


def adamw(model):
    return torch.optim.AdamW(model.parameters(), lr=1e-2, weight_decay=0.1)


def train_plain(model, optimizer, steps, clip=0.5):
    losses = []
    for step in steps:
        loss = loss_of(model, *batch(step))
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), clip)
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


def train_sharded(model, optimizer, steps, comm, clip=0.5, after=None):
    """Each rank takes its part of each batch; the losses are those of the whole batch."""
    losses = []
    for step in steps:
        ids, targets = (part.chunk(comm.size)[comm.rank] for part in batch(step))
        loss = loss_of(model, ids, targets)
        if after is not None:
            after("forward")
        loss.backward()
        if after is not None:
            after("backward")
        model.clip_grad_norm_(clip)
        optimizer.step()
        optimizer.zero_grad()
        mean = loss.detach().clone()
        comm.all_reduce(mean, "average")
        losses.append(mean.item())
    return losses


def whole_parameters(model, path):
    """All parameters and buffers of a sharded model, through a checkpoint that a plain copy loads."""
    checkpoint.save(path, model=model)
    plain = Net()
    with torch.random.fork_rng():
        checkpoint.load(path, model=plain)
    return {name: tensor.clone() for name, tensor in plain.state_dict().items()}


def plain_copy(model):
    return copy.deepcopy(model)


def units(model):
    return [wrapper._unit for wrapper in FullyShardedDataParallel.fsdp_modules(model)]


def unsharded_bytes(model):
    return sum(values_bytes(flat) for unit in units(model) for flat in unit.sharded_params)


def both_step(plain, sharded, comm, make_input, steps=4, call=lambda model, x: model(x)):
    """Train both on the same global batches; the losses of each step."""
    optimizers = [torch.optim.AdamW(m.parameters(), 1e-2, weight_decay=0) for m in (plain, sharded)]
    results = []
    for step in range(steps):
        x = make_input(step)
        expected = call(plain, x).square().mean()
        expected.backward()
        got = call(sharded, x.chunk(comm.size)[comm.rank]).square().mean()
        got.backward()
        for optimizer in optimizers:
            optimizer.step()
            optimizer.zero_grad()
        mean = got.detach().clone()
        comm.all_reduce(mean, "average")
        results.append((expected.item(), mean.item()))
    return results


def vectors(step, *shape):
    return torch.randn(12, *(shape or (WIDTH,)), generator=torch.Generator().manual_seed(step))
