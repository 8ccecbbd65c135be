"""A step of Muon on a sharded model: by owners of whole matrices, and by gathering every matrix on every rank.

The model is a row of square matrices, each a unit, so that each is cut over all ranks: what moves least well. Gradients
are given, and only the step is timed. All ways must come to the same parameters.
"""

from __future__ import annotations

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp._compat import local_of
from hpcfsdp.bench.harness import Ratio, Table, in_turn, ratio_cell, time_cells, times_json
from hpcfsdp.bench.step import wrap
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.optim import Muon, WholeTensors
from hpcfsdp.optim.muon import orthogonalize
from hpcfsdp.world import World

OWN, ROWS, GATHERED, FLOOR = "hpcfsdp", "hpcfsdp_rows", "fsdp2, full_tensor", "share without communication"
COEFFICIENTS = (3.4445, -4.775, 2.0315)
STEPS, MOMENTUM, LR, DECAY = 5, 0.95, 0.02, 0.1
_TOLERANCE = 1e-4
"""Parameters may differ by so much between ways: orders of sums differ."""


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


def measure(world: World, *, matrices: int, width: int, repeats: int) -> Table:
    """Time steps of all ways: stock torch over gloo, hpcfsdp over the world. Collective over all ranks.

    Raise an HpcfsdpError if the ways come to different parameters.
    """
    if world.size == 1:
        raise UsageError("bench: whole-tensors compares sharded matrices: start it with mpirun -n 2, or more")
    if matrices % world.size:
        raise UsageError(f"bench: --matrices {matrices} has to be a multiple of the {world.size} ranks")
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
    times = in_turn(world.host, {name: each.step for name, each in optimizers.items()}, repeats=repeats)
    sums = {}
    for name, model in models.items():
        total = torch.tensor([sum(float(local_of(param.detach()).abs().sum()) for param in model.parameters())])
        world.host.all_reduce(total, "sum")
        sums[name] = float(total)
    for name in (OWN, ROWS):
        if abs(sums[name] - sums[GATHERED]) > _TOLERANCE * sums[GATHERED]:
            raise HpcfsdpError(
                f"{name} comes to parameters of a sum of {sums[name]}, {GATHERED} to {sums[GATHERED]}: they did not "
                "do the same work, and their times are not comparable"
            )
    rows = [
        (name, *time_cells(one), f"{one.ratio_to(times[FLOOR]):.2f}x", ratio_cell(times[OWN], one))
        for name, one in times.items()
    ]
    ratios = [
        Ratio.of_times(f"{name}: step of Muon / {other}", times[engine], times[peer])
        for engine, name in ((OWN, "class"), (ROWS, "fully_shard"))
        for peer, other in ((GATHERED, "FSDP2 with full_tensor"), (FLOOR, "floor"))
    ]
    as_json = {name: {**one, "sum": sums[name]} for name, one in times_json(times).items()}
    return Table(("way", "step", "min-max", "x floor", "hpcfsdp / it"), rows, as_json, ratios=ratios)


def _model(matrices: int, width: int) -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(*(nn.Linear(width, width, bias=False) for _ in range(matrices)))
