"""Floating-point operations: of a token in a training, and what a device does of them at most."""

from __future__ import annotations

import math
import time

import torch
from torch import nn

from hpcfsdp import accelerator
from hpcfsdp.observe.held_memory import flat_params
from hpcfsdp.units.dtensor_unit import dtensor_units_in

_LONG_ENOUGH_S = 0.01
_SIZES = (256, 8192)
_REPEATS = 3


def count_elements(model: nn.Module) -> tuple[int, int]:
    """Not collective. Elements of the whole model's parameters, and of those that are trained; tied ones count once."""
    sharded_params = flat_params(model)
    if not sharded_params:  # DTensors have the whole shape
        sizes = [(param.numel(), param.requires_grad) for param in model.parameters()]
    else:
        pairs = [pair for flat in sharded_params for pair in zip(flat.layout.slots, flat.leaves, strict=True)]
        sizes = [(math.prod(slot.whole_shape), leaf.requires_grad) for slot, leaf in pairs]
    return sum(numel for numel, _ in sizes), sum(numel for numel, is_trained in sizes if is_trained)


def training_dtype(model: nn.Module) -> torch.dtype:
    """The dtype of most elements that modules compute with; float32 for a model without parameters."""
    lowered = [unit.options.mixed_precision.param_dtype for unit in dtensor_units_in(model)]
    if any(lowered):
        return next(dtype for dtype in lowered if dtype is not None)
    counts: dict[torch.dtype, int] = {}
    for values in [flat.full for flat in flat_params(model)] or list(model.parameters()):
        if values.dtype.is_floating_point:
            counts[values.dtype] = counts.get(values.dtype, 0) + values.numel()
    return max(counts, key=lambda dtype: counts[dtype], default=torch.float32)


def measured_peak(device: torch.device, dtype: torch.dtype) -> float:
    """Operations per second of one large matrix product on a device, the best of three.

    The matrices double in size until a product takes 10 ms, up to 8192 x 8192. Waits for the device.
    """
    size = _SIZES[0]
    while _product_s(device, dtype, size) < _LONG_ENOUGH_S and size < _SIZES[1]:
        size *= 2
    return 2 * size**3 / min(_product_s(device, dtype, size) for _ in range(_REPEATS))


@torch.no_grad()
def _product_s(device: torch.device, dtype: torch.dtype, size: int) -> float:
    # No random numbers: those of the program must stay as they are.
    factor = torch.full((size, size), 0.5, dtype=dtype, device=device)
    product = torch.empty_like(factor)
    torch.mm(factor, factor, out=product)
    if accelerator.is_accelerator(device):
        accelerator.synchronize(device)
    began_s = time.perf_counter()
    torch.mm(factor, factor, out=product)
    if accelerator.is_accelerator(device):
        accelerator.synchronize(device)
    return max(time.perf_counter() - began_s, 1e-9)
