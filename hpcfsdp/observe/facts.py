"""What stays the same in a run: its ranks, its model, and what its devices can do."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp import accelerator, env
from hpcfsdp.comm import Communicator
from hpcfsdp.launch.together import versions
from hpcfsdp.observe import flops
from hpcfsdp.units.dtensor_unit import dtensor_units_in
from hpcfsdp.units.flat_unit import units_in
from hpcfsdp.world import current_world

_RANK_BYTES, _HOST_BYTES = 8, 64
_MOST_HOSTS = 16


@dataclass(frozen=True)
class Facts:
    """What all records of a run are computed with.

    Attributes:
        rank: of the world.
        copies: ranks that compute with the same tokens.
        elements: of the whole model's parameters; None without a model.
        flops_per_token: None where it is not known.
        peak_flops: of all ranks together.
        hosts: by rank of the world, on rank 0 of the model alone.
    """

    rank: int
    copies: int
    elements: int | None
    flops_per_token: float | None
    peak_flops: float
    hosts: Mapping[int, str]


def agree_on_facts(
    comm: Communicator,
    model: nn.Module | None,
    device: torch.device,
    flops_per_token: float | None,
    peak_flops: float | None,
) -> Facts:
    """Collective over `comm`, the ranks of the model. Measures the peak rate of the device unless it is given."""
    world = current_world()
    rank = world.rank if world is not None else comm.rank
    elements, trained = (None, 0) if model is None else flops.count_elements(model)
    if peak_flops is None:
        dtype = torch.float32 if model is None else flops.training_dtype(model)
        peak_flops = flops.measured_peak(device, dtype)
    peak = torch.tensor([peak_flops], dtype=torch.float64, device=comm.device)
    comm.all_reduce(peak, "sum")
    units = [] if model is None else [*units_in(model), *dtensor_units_in(model)]
    return Facts(
        rank,
        max((unit.mesh.size("tensor") for unit in units), default=1),
        elements,
        flops_per_token or 6.0 * trained or None,
        float(peak.item()),
        _hosts(comm, rank),
    )


def _hosts(comm: Communicator, rank: int) -> dict[int, str]:
    """Collective. On the first rank the host of each rank of the world, of the same few bytes each; empty elsewhere."""
    name = env.host_name().encode()[:_HOST_BYTES].ljust(_HOST_BYTES, b"\0")
    own = bytearray(rank.to_bytes(_RANK_BYTES, "little") + name)
    mine = torch.frombuffer(own, dtype=torch.uint8).to(comm.device)
    names = [torch.empty_like(mine) for _ in range(comm.size)] if comm.rank == 0 else None
    comm.gather(names, mine, 0)
    found = [bytes(each.tolist()) for each in names or ()]
    return {
        int.from_bytes(each[:_RANK_BYTES], "little"): each[_RANK_BYTES:].rstrip(b"\0").decode(errors="replace")
        for each in found
    }


def start_facts(comm: Communicator, facts: Facts, device: torch.device, resumed_from: Any) -> dict[str, Any]:
    """Not collective. The facts of the event "start"."""
    world, hosts = current_world(), list(dict.fromkeys(facts.hosts.values()))
    is_device = accelerator.is_accelerator(device)
    return {
        "world_size": comm.size,
        "num_nodes": world.num_nodes if world is not None else len(hosts),
        "device": accelerator.describe(device).name if is_device else f"cpu, {torch.get_num_threads()} thread(s)",
        "hosts": hosts[:_MOST_HOSTS],
        "topology": str(world.topology) if world is not None else "",
        "command": list(sys.argv),
        "versions": {name: version for name, version in versions().items() if version},
        "job": env.scheduler_job().number,
        "parameters": facts.elements,
        "flops_per_token": facts.flops_per_token,
        "peak_flops": facts.peak_flops / comm.size,
        "resumed_from": None if resumed_from is None else str(resumed_from),
    }
