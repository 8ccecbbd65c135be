"""A step of Muon on a sharded model: by owners of whole matrices, and by gathering every matrix on every rank.

The model is a row of square matrices, each a unit, so that each is cut over all ranks: what moves least well. Gradients
are given, and only the step is timed. All ways must come to the same parameters.
"""

from __future__ import annotations

import gc
from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.bench.step import quiet, wrap
from hpcfsdp.bench.tables import Ratio, Table, ratio_cell, time_cells, times_json
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.optim.muon import orthogonalize
from hpcfsdp.world import World

OWN, ROWS, GATHERED, FLOOR = "hpcfsdp", "hpcfsdp_rows", "fsdp2, full_tensor", "share without communication"
COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS, MOMENTUM, LR, DECAY = 5, 0.95, 0.02, 0.1
_TOLERANCE = 1e-4
"""Of parameters between ways: orders of sums differ."""


class Measurement(NamedTuple):
    """Steps of Muon.

    Attributes:
        times: way -> times of a step.
        sums: way -> the sum of absolute values of the parameters afterwards; the floor has a part of them.
    """

    times: dict[str, Times]
    sums: dict[str, float]


class GatheredMuon(torch.optim.Optimizer):
    """Muon as programs write it for FSDP2: every rank gathers each matrix, computes all of it, and keeps its rows."""

    def __init__(self, params: object) -> None:
        super().__init__(params, {})  # type: ignore[arg-type]

    @torch.no_grad()
    def step(self, closure: None = None) -> None:  # type: ignore[override]
        for param in self.param_groups[0]["params"]:
            state = self.state[param]
            momentum = state.setdefault("momentum_buffer", torch.zeros_like(param.grad))
            momentum.lerp_(param.grad, 1 - MOMENTUM)
            whole = param.grad.lerp(momentum, MOMENTUM).full_tensor()
            update = orthogonalize(whole, coefficients=COEFFICIENTS, steps=STEPS, eps=1e-7, dtype=torch.float32)
            rows = update.chunk(param.device_mesh.size())[param.device_mesh.get_local_rank()]
            local = param.to_local()
            local.mul_(1 - LR * DECAY)
            local.add_(rows, alpha=-LR)


def measure(world: World, *, matrices: int, width: int, repeats: int) -> Measurement:
    """Collective over all ranks. Steps of all ways in turn: stock torch over gloo, hpcfsdp over the world.

    Raises:
        HpcfsdpError: the ways come to different parameters.
        UsageError: there is one rank, or the ranks do not divide the matrices.
    """
    if world.size == 1:
        raise UsageError("bench: whole-tensors compares sharded matrices: start it with mpirun -n 2, or more")
    if matrices % world.size:
        raise UsageError(f"bench: --matrices {matrices} has to be a multiple of the {world.size} ranks")
    with quiet():
        gloo = dist.new_group(backend="gloo")
        models = {
            GATHERED: wrap("fsdp2", _model(matrices, width), gloo, unit=nn.Linear),
            OWN: wrap("hpcfsdp_orig", _model(matrices, width), None, unit=nn.Linear),
            ROWS: wrap("hpcfsdp_rows", _model(matrices, width), None, unit=nn.Linear),
            FLOOR: _model(matrices // world.size, width),
        }
    options = {"lr": LR, "weight_decay": DECAY, "momentum": MOMENTUM, "ns_steps": STEPS, "ns_dtype": torch.float32}
    optimizers = {
        GATHERED: GatheredMuon(models[GATHERED].parameters()),
        OWN: WholeTensors(models[OWN], models[OWN].parameters(), Muon, **options),
        ROWS: WholeTensors(models[ROWS], models[ROWS].parameters(), Muon, **options),
        FLOOR: Muon(models[FLOOR].parameters(), **options),
    }
    for param in (param for model in models.values() for param in model.parameters()):
        param.grad = torch.sin(param.detach() * 1e3)  # of the values alone, and so the same however it is sharded
    ways: dict[str, Callable[[], object]] = {name: optimizer.step for name, optimizer in optimizers.items()}
    times = in_turn(world.host, ways, repeats=repeats)
    sums = {}
    for name, model in models.items():
        total = torch.tensor([sum(float(_local(param).abs().sum()) for param in model.parameters())])
        world.host.all_reduce(total, "sum")
        sums[name] = float(total)
    del models, optimizers, ways
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    for name in (OWN, ROWS):
        if abs(sums[name] - sums[GATHERED]) > _TOLERANCE * sums[GATHERED]:
            raise HpcfsdpError(
                f"{name} comes to parameters of a sum of {sums[name]}, {GATHERED} to {sums[GATHERED]}: they did not "
                "do the same work, and their times are not comparable"
            )
    return Measurement(times, sums)


def table(found: Measurement) -> Table:
    """A row for each way, as a multiple of the floor, and hpcfsdp's time as a multiple of it."""
    own, floor = found.times[OWN], found.times[FLOOR]
    rows = [
        (name, *time_cells(times), f"{times.ratio_to(floor):.2f}x", ratio_cell(own, times))
        for name, times in found.times.items()
    ]
    ratios = [
        Ratio.of_times(f"{name}: step of Muon / {other}", found.times[engine], found.times[peer])
        for engine, name in ((OWN, "class"), (ROWS, "fully_shard"))
        for peer, other in ((GATHERED, "FSDP2 with full_tensor"), (FLOOR, "floor"))
    ]
    as_json = {name: {**one, "sum": found.sums[name]} for name, one in times_json(found.times).items()}
    return Table(("way", "step", "min-max", "x floor", "hpcfsdp / it"), rows, as_json, ratios=ratios)


def _model(matrices: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(matrices)))


def _local(tensor: torch.Tensor) -> torch.Tensor:
    tensor = tensor.detach()
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor
