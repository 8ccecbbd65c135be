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
from hpcfsdp.examples.gpt.parallel import parallelize
from hpcfsdp.examples.gpt.run_config import ModelConfig
from hpcfsdp.examples.gpt.transformer import GPT, VOCABULARY, Block
from hpcfsdp.world import World

FLOOR, OWN = "floor", "hpcfsdp"
STOCK = ("ddp", "fsdp1", "fsdp2")
ENGINES = (FLOOR, *STOCK, OWN)
IN_TWO_DIMENSIONS = (FLOOR, "fsdp1", "fsdp2", OWN)
"""Those that shard layers which are cut over other ranks."""
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


def measure(
    world: World, *, layers: int, width: int, repeats: int, tensor: int = 1, engines: Sequence[str] | None = None
) -> Measurement:
    """Collective over all ranks. Steps of all engines in turn: stock torch over gloo, hpcfsdp over the world.

    Args:
        tensor: ranks that layers are cut over, which compute with the same sequences; the others shard.
        engines: all that can do it by default.
    """
    own, gloo = (None, dist.new_group(backend="gloo")) if tensor == 1 else _meshes(world, tensor)
    rank = world.rank if own is None else own.get_local_rank("shard")
    losses: dict[str, float] = {}

    def noting_loss(engine: str) -> Callable[[], None]:
        group = own if engine == OWN else gloo
        shape = {"layers": layers, "width": width, "tensor": tensor}
        step = training_step(engine, group, **shape, rank=rank, ranks=world.size // tensor)

        def run() -> None:
            losses[engine] = float(step())

        return run

    engines = engines or (ENGINES if tensor == 1 else IN_TWO_DIMENSIONS)
    times = in_turn(world.host, {engine: noting_loss(engine) for engine in engines}, repeats=repeats, warmup=3)
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    return Measurement(times, losses)


def training_step(
    engine: str, group: Any, *, layers: int, width: int, rank: int, ranks: int, tensor: int = 1
) -> Callable[[], torch.Tensor]:
    """Collective over `group`. A new model under an engine, and the function that takes one step and returns the loss.

    Args:
        engine: see ``wrap``, or "floor": the module as it is, with an optimizer for a rank's share of the parameters.
        group: what the engine takes as its process group; a mesh ("shard", "tensor") where layers are cut.
        rank: chooses the data.
        ranks: among which the floor shares the parameters out.
        tensor: ranks that layers are cut over.
    """
    torch.manual_seed(0)
    module = make_model(layers, width)
    if engine == FLOOR:
        _keep_first_block(module, tensor)
    elif tensor > 1:
        parallelize(module, group["tensor"])
        group = group["shard"]
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
        group: its process group, or a mesh of one dimension.
        unit: the class of the modules that become units.
    """
    name, _, orig = engine.partition("_")
    mesh = group if isinstance(group, DeviceMesh) else None
    where = {"process_group": group} if mesh is None else {"device_mesh": mesh}
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", FutureWarning)  # FSDP1 says that it is on its way out
        warnings.simplefilter("ignore", UserWarning)  # and that it runs on the CPU
        if name == "ddp":
            return DistributedDataParallel(model, process_group=group)
        if name == "fsdp2":
            return _fully_shard(model, mesh or DeviceMesh.from_group(group, "cpu"), unit)
        policy = ModuleWrapPolicy({unit})
        if name == "fsdp1":
            return stock.FullyShardedDataParallel(
                model, **where, auto_wrap_policy=policy, device_id=torch.device("cpu"), use_orig_params=bool(orig)
            )
        if name == OWN:
            return ours.FullyShardedDataParallel(model, **where, auto_wrap_policy=policy, use_orig_params=bool(orig))
    return model


def units(model: nn.Module, unit: type[nn.Module]) -> Iterable[nn.Module]:
    """The modules that become units, but for the model itself."""
    return [module for module in model.modules() if isinstance(module, unit)]


def _fully_shard(model: nn.Module, mesh: DeviceMesh, unit: type[nn.Module]) -> nn.Module:
    for module in units(model, unit):
        stock.fully_shard(module, mesh=mesh)
    return stock.fully_shard(model, mesh=mesh)


def _meshes(world: World, tensor: int) -> tuple[DeviceMesh, DeviceMesh]:
    """Collective over all ranks. A mesh ("shard", "tensor") over the world, and the same one over gloo."""
    mesh = world.mesh(shard=None, tensor=tensor)
    groups = []
    for dimension, size in enumerate(mesh.shape):
        for line in mesh.mesh.movedim(dimension, -1).reshape(-1, size).tolist():
            group = dist.new_group(line, backend="gloo")
            if world.rank in line:
                groups.append(group)
    return mesh, DeviceMesh.from_group(groups, "cpu", mesh=mesh.mesh, mesh_dim_names=mesh.mesh_dim_names)


def _keep_first_block(model: GPT, tensor: int) -> None:
    """Leave of each layer what one rank has of it where it is cut over `tensor` ranks."""
    for block in model.blocks:
        layers = (block.attention.qkv, 0), (block.attention.merge, 1), (block.up, 0), (block.down, 1)
        for layer, dimension in layers:
            layer.weight = nn.Parameter(layer.weight.detach().chunk(tensor, dimension)[0].contiguous())
            if dimension == 0:
                layer.bias = nn.Parameter(layer.bias.detach().chunk(tensor)[0].contiguous())


def _share(model: nn.Module, ranks: int) -> nn.Parameter:
    """As many parameter elements as a rank's optimizer has when they are sharded."""
    share = nn.Parameter(torch.zeros(sum(param.numel() for param in model.parameters()) // ranks))
    share.grad = torch.randn_like(share)
    return share
