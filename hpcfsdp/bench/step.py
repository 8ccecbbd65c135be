"""A training step of the engine, of stock torch, and of no communication at all, in one run.

The work is that of the comparisons in docs/benchmarks.md: a GPT, forward, backward, AdamW, gradients forgotten.
"""

from __future__ import annotations

import gc
import warnings
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.fsdp as stock
import torch.nn.functional as F
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp.wrap import ModuleWrapPolicy
from torch.nn.parallel import DistributedDataParallel

import hpcfsdp.fsdp as ours
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.train.config import ModelConfig
from hpcfsdp.train.model import GPT, VOCABULARY, Block
from hpcfsdp.world import World

FLOOR, OWN = "floor", "hpcfsdp"
STOCK = ("ddp", "fsdp1", "fsdp2")
ENGINES = (FLOOR, *STOCK, OWN)
CONTEXT, BATCH, HEADS = 64, 2, 8


@dataclass(frozen=True)
class Measurement:
    """Steps of several engines.

    Attributes:
        times: engine -> times of a step.
        losses: engine -> this rank's loss in the last step. Equal but for rounding where engines do the same work;
            the floor learns nothing.
    """

    times: dict[str, Times]
    losses: dict[str, float]


def measure(world: World, *, layers: int, width: int, repeats: int, engines: Sequence[str] = ENGINES) -> Measurement:
    """Collective over all ranks. Steps of all engines in turn: stock torch over gloo, hpcfsdp over the world."""
    gloo = dist.new_group(backend="gloo")
    losses: dict[str, float] = {}

    def noting_loss(engine: str) -> Callable[[], None]:
        step = training_step(
            engine, None if engine == OWN else gloo, layers=layers, width=width, rank=world.rank, ranks=world.size
        )

        def run() -> None:
            losses[engine] = float(step())

        return run

    times = in_turn(world.host, {engine: noting_loss(engine) for engine in engines}, repeats=repeats, warmup=3)
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    return Measurement(times, losses)


def training_step(
    engine: str, group: Any, *, layers: int, width: int, rank: int, ranks: int
) -> Callable[[], torch.Tensor]:
    """Collective over `group`. A new model under an engine, and the function that takes one step and returns the loss.

    Args:
        engine: see ``wrap``, or "floor": the module as it is, with an optimizer for a rank's share of the parameters.
        group: what the engine takes as its process group.
        rank: chooses the data.
        ranks: among which the floor shares the parameters out.
    """
    torch.manual_seed(0)
    module = make_model(layers, width)
    model = module if engine == FLOOR else wrap(engine, module, group, unit=Block)
    params = [_share(module, ranks)] if engine == FLOOR else model.parameters()
    optimizer = torch.optim.AdamW(params, lr=1e-4)
    forget = model.zero_grad if engine == FLOOR else optimizer.zero_grad
    ids = make_batch(rank)

    def step() -> torch.Tensor:
        loss = loss_of(model, ids)
        loss.backward()
        optimizer.step()
        forget()
        return loss.detach()

    return step


def make_model(layers: int, width: int) -> GPT:
    """The GPT of the comparisons: that of ``hpcfsdp train``, but its output embedding is a parameter of its own."""
    model = GPT(ModelConfig(layers=layers, width=width, heads=HEADS, context=CONTEXT, dropout=0.0))
    model.head = nn.Linear(width, VOCABULARY, bias=False)
    return model


def make_batch(rank: int) -> torch.Tensor:
    """The bytes that a rank learns from, (sequences, one more than the context)."""
    return torch.randint(0, VOCABULARY, (BATCH, CONTEXT + 1), generator=torch.Generator().manual_seed(rank))


def loss_of(model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
    """Of predicting every byte of a batch from those before it."""
    return F.cross_entropy(model(batch[:, :-1]).flatten(0, 1), batch[:, 1:].flatten())


def wrap(engine: str, model: nn.Module, group: Any, *, unit: type[nn.Module]) -> nn.Module:
    """Collective over `group`. The model under an engine.

    Args:
        engine: "plain" (as it is), "ddp", "fsdp1", "fsdp2" or "hpcfsdp"; "fsdp1_orig" and "hpcfsdp_orig" are those
            with ``use_orig_params``.
        unit: the class of the modules that become units.
    """
    name, _, orig = engine.partition("_")
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 says that it is on its way out
        warnings.simplefilter("ignore", UserWarning)  # and that it runs on the CPU
        if name == "ddp":
            return DistributedDataParallel(model, process_group=group)
        if name == "fsdp2":
            return _fully_shard(model, DeviceMesh.from_group(group, "cpu"), unit)
        policy = ModuleWrapPolicy({unit})
        if name == "fsdp1":
            return stock.FullyShardedDataParallel(
                model, group, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=bool(orig)
            )
        if name == OWN:
            return ours.FullyShardedDataParallel(model, group, auto_wrap_policy=policy, use_orig_params=bool(orig))
    return model


def units(model: nn.Module, unit: type[nn.Module]) -> Iterable[nn.Module]:
    """The modules that become units, but for the model itself."""
    return [module for module in model.modules() if isinstance(module, unit)]


def _fully_shard(model: nn.Module, mesh: DeviceMesh, unit: type[nn.Module]) -> nn.Module:
    for module in units(model, unit):
        stock.fully_shard(module, mesh=mesh)
    return stock.fully_shard(model, mesh=mesh)


def _share(model: nn.Module, ranks: int) -> nn.Parameter:
    """As many parameter elements as a rank's optimizer has when they are sharded."""
    share = nn.Parameter(torch.zeros(sum(param.numel() for param in model.parameters()) // ranks))
    share.grad = torch.randn_like(share)
    return share
