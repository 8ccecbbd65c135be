"""What stays the same in a run: its ranks, its model, its floating-point operations, and what its devices can do."""

from __future__ import annotations

import math
import sys
import time
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp import accelerator, env
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.comm import Communicator
from hpcfsdp.launch.together import versions
from hpcfsdp.observe.held_memory import flat_params
from hpcfsdp.units.dtensor_unit import dtensor_units_in
from hpcfsdp.units.flat_unit import units_in
from hpcfsdp.world import current_world

_RANK_BYTES, _HOST_BYTES = 8, 64
_MOST_HOSTS = 16

_measured: dict[tuple[torch.device, torch.dtype], float] = {}  # peak rates, by this process


@dataclass(frozen=True)
class Facts:
    """What all records of a run are computed with."""

    rank: int  # of the world
    copies: int  # ranks that compute with the same tokens
    elements: int | None  # of the whole model's parameters; None without a model
    flops_per_token: float | None  # None where it is not known
    peak_flops: float  # of all ranks together
    hosts: Mapping[int, str]  # by rank of the world, on rank 0 of the model alone


def agree_on_facts(
    comm: Communicator,
    model: nn.Module | None,
    device: torch.device,
    flops_per_token: float | None,
    peak_flops: float | None,
) -> Facts:
    """Return the facts, the same on all ranks but for `hosts`. Collective over `comm`, the ranks of the model.

    The peak rate of the devices is measured unless ranks give it.
    """
    world = current_world()
    rank = world.rank if world is not None else comm.rank
    elements, trained = (None, 0) if model is None else count_elements(model)
    dtype = torch.float32 if model is None else training_dtype(model)
    units = [] if model is None else [*units_in(model), *dtensor_units_in(model)]
    return Facts(
        rank,
        max((unit.mesh.size("tensor") for unit in units), default=1),
        elements,
        flops_per_token or 6.0 * trained or None,
        _peak_of_all(comm, device, dtype, peak_flops),
        _hosts(comm, rank),
    )


def _hosts(comm: Communicator, rank: int) -> dict[int, str]:
    """Return the host of each rank of the world on the first rank; empty elsewhere. Collective over `comm`."""
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
    """Return the facts of the event "start". Not collective."""
    world, hosts = current_world(), list(dict.fromkeys(facts.hosts.values()))
    is_device = accelerator.is_accelerator(device)
    if isinstance(resumed_from, CheckpointInfo):
        resumed_from = resumed_from.path if resumed_from.source == "file" else resumed_from.source
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


def count_elements(model: nn.Module) -> tuple[int, int]:
    """Return the elements of all parameters, and of those that are trained; tied ones count once. Not collective."""
    pairs = [pair for flat in flat_params(model) for pair in zip(flat.layout.slots, flat.leaves, strict=True)]
    sizes = [(math.prod(slot.whole_shape), leaf.requires_grad) for slot, leaf in pairs]
    if not sizes:  # DTensors have the whole shape
        sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    return sum(numel for numel, _ in sizes), sum(numel for numel, is_trained in sizes if is_trained)


def training_dtype(model: nn.Module) -> torch.dtype:
    """Return the dtype of most elements that modules compute with; float32 for a model without parameters."""
    lowered = [unit.options.mixed_precision.param_dtype for unit in dtensor_units_in(model)]
    counts: Counter[torch.dtype] = Counter()
    for values in [flat.full for flat in flat_params(model)] or list(model.parameters()):
        if values.dtype.is_floating_point:
            counts[values.dtype] += values.numel()
    return next(filter(None, lowered), max(counts, key=counts.__getitem__, default=torch.float32))


def _peak_of_all(comm: Communicator, device: torch.device, dtype: torch.dtype, given: float | None) -> float:
    """Return the peak rate of the devices of all ranks together. Collective over `comm`.

    Ranks that know none, as a spare that has taken the place of another rank, count as the mean of the others.
    """
    known = _measured.get((device, dtype)) if given is None else given
    peaks = torch.tensor([known or 0.0, known is not None], dtype=torch.float64, device=comm.device)
    comm.all_reduce(peaks, "sum")
    if not peaks[1]:
        _measured[device, dtype] = measured_peak(device, dtype)
        return _peak_of_all(comm, device, dtype, None)
    return (peaks[0] / peaks[1] * comm.size).item()


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Return the operations per second of one large matrix product on a device, the best of three.

    The matrices double in size until a product takes 10 ms, up to 8192 x 8192. Waits for the device.
    """
    size = 256
    while _product_s(device, dtype, size) < 0.01 and size < 8192:
        size *= 2
    return 2 * size**3 / min(_product_s(device, dtype, size) for _ in range(3))


@torch.no_grad()
def _product_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    # No random numbers: those of the program must stay as they are.
    factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    for _ in range(2):  # the first one loads kernels
        began_s = time.perf_counter()
        torch.mm(factor, factor, out=product)
        if accelerator.is_accelerator(device):
            accelerator.synchronize(device)
    return max(time.perf_counter() - began_s, 1e-9)
