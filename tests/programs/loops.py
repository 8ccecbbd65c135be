"""A training loop as users write it, run on a plain model in one process, and on a sharded one by all ranks.

Dropout and whatever else is random is on where a library has it on: each forward starts from a seed of its own, which
belongs to the step and to the rank of its data, in one process as on many ranks.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpcfsdp.fsdp import FullyShardedDataParallel as FSDP
from hpcfsdp.wrap import ModuleWrapPolicy

STEPS = 3


@dataclasses.dataclass(frozen=True)
class Program:
    """A model, and data to train it on."""

    make: Callable[[], nn.Module]
    """The model with random weights."""
    batch: Callable[[torch.Generator], Any]
    """One rank's data of one step."""
    units: tuple[str, ...]
    """Names of the classes that become units: no release of a library keeps its classes in one place."""
    loss: Callable[[nn.Module, Any], torch.Tensor] = lambda model, batch: model(**batch).loss
    lr: float = 1e-3

    def build(self):
        torch.manual_seed(0)
        return self.make().train()

    def unit_types(self, model):
        types = {type(module) for module in model.modules() if type(module).__name__ in self.units}
        assert {kind.__name__ for kind in types} == set(self.units)
        return types

    def policy(self, model):
        return ModuleWrapPolicy(self.unit_types(model))

    def optimizer(self, model):
        # Epsilon above rounding errors: the bias of keys, which the softmax does not feel, has no other gradient.
        return torch.optim.AdamW([p for p in model.parameters() if p.requires_grad], lr=self.lr, eps=1e-4)

    def seeded_loss(self, model, step, rank):
        """The loss of one rank's data of one step."""
        seed = 1000 * step + rank
        batch = self.batch(torch.Generator().manual_seed(seed))
        torch.manual_seed(seed)
        return self.loss(model, batch)


@dataclasses.dataclass(frozen=True)
class Trained:
    losses: list[float]
    norms: list[float]
    state: dict[str, torch.Tensor]
    """Whole parameters and buffers, copied."""


def alone(program, ranks, *, model=None, steps=STEPS, parts=1):
    """Train the plain model on the data of all ranks."""
    model = model or program.build()
    optimizer, losses, norms = program.optimizer(model), [], []
    for step in range(steps):
        total = 0.0
        for part in range(parts):
            for rank in range(ranks):
                loss = program.seeded_loss(model, step * parts + part, rank) / (ranks * parts)
                loss.backward()
                total += loss.item()
        losses.append(total)
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, copied(model.state_dict()))


def together(program, world, model, *, optimizer=None, steps=range(STEPS), parts=1):
    """Collective over all ranks. Train a sharded model, each rank on its own data."""
    optimizer, losses, norms = optimizer or program.optimizer(model), [], []
    for step in steps:
        total = 0.0
        for part in range(parts - 1):
            with model.no_sync():
                loss = program.seeded_loss(model, step * parts + part, world.rank) / parts
                loss.backward()
            total += loss.item()
        loss = program.seeded_loss(model, step * parts + parts - 1, world.rank) / parts
        loss.backward()
        losses.append(world.comm.allreduce(total + loss.item()) / world.size)
        norms.append(model.clip_grad_norm_(1.0).item())
        optimizer.step()
        optimizer.zero_grad()
    return Trained(losses, norms, copied(model.state_dict()))


def copied(state):
    return {name: value.clone() for name, value in state.items() if isinstance(value, torch.Tensor)}


def shard(program, model=None, **options):
    """Collective over all ranks."""
    model = model or program.build()
    options.setdefault("auto_wrap_policy", program.policy(model))
    return FSDP(model, **options)


def close(got, expected):
    torch.testing.assert_close(got.losses, expected.losses, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.norms, expected.norms, rtol=1e-5, atol=0)
    torch.testing.assert_close(got.state, expected.state, rtol=1e-5, atol=1e-6)
