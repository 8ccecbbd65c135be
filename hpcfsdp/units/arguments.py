"""Checks of the wrapper's arguments, before anything is changed."""

from __future__ import annotations

import warnings
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision

from hpcfsdp import accelerator
from hpcfsdp.units.flat_unit import unit_of
from hpcfsdp.units.unit_mesh import UnitMesh
from hpcfsdp.world import current_world


def check_module(module: Any) -> None:
    """Refuse an object that is no module, or a module that is sharded already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps a torch.nn.Module, not {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError("the module is already a FullyShardedDataParallel: wrap a module once")
    for name, inner in module.named_modules():
        if isinstance(inner, FSDPModule):
            what = f"{name!r}, a {type(inner).__name__}," if name else f"the {type(inner).__name__}"
            raise ValueError(
                f"{what} is already sharded with torch's fully_shard: shard a model with either fully_shard or hpcfsdp"
            )


def warn_of_container(module: nn.Module) -> None:
    """Warn about a container without a forward that owns parameters of a unit."""
    if isinstance(module, (nn.ModuleList, nn.ModuleDict)):
        warnings.warn(
            f"a {type(module).__name__} has no forward in which its parameters could be gathered: wrap the modules in "
            "it, or the module that calls them",
            stacklevel=3,
        )


def check_types(cpu_offload: Any, mixed_precision: Any, backward_prefetch: Any) -> None:
    """Refuse values that are not torch's configuration classes, and dtypes that are not floating-point."""
    for name, value, kind in (
        ("cpu_offload", cpu_offload, CPUOffload),
        ("mixed_precision", mixed_precision, MixedPrecision),
        ("backward_prefetch", backward_prefetch, BackwardPrefetch),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__} or None, not {value!r}")
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(mixed_precision, name, None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mixed_precision: {name} must be a floating-point torch.dtype or None, not {dtype!r}")


def check_readers(module: nn.Module) -> None:
    """Refuse units inside of modules that read their children's parameters without calling the children."""
    for name, reader in module.named_modules():
        if isinstance(reader, (nn.MultiheadAttention, nn.TransformerEncoderLayer)):
            inside = [child for child, m in reader.named_modules() if unit_of(m) is not None]
            if inside:
                kind, where = type(reader).__name__, f" {name!r}" if name else ""
                raise ValueError(
                    f"{inside[0]!r} is a unit inside of the {kind}{where}, which reads its children's parameters "
                    f"without calling the children, and would read NaN: wrap the whole {kind}, for example with "
                    "ModuleWrapPolicy"
                )


def target_device(mesh: UnitMesh, device_id: int | torch.device | None) -> torch.device | None:
    """The device to compute on, None for that of the module."""
    if isinstance(device_id, int):
        if device_id >= accelerator.device_count():
            raise ValueError(f"device_id={device_id}: this process sees {accelerator.device_count()} device(s)")
        return torch.device(accelerator.device_type(), device_id)
    if device_id is not None:
        return torch.device(device_id)
    ranks, world = mesh.dtensor_ranks, current_world()
    by_default = accelerator.is_accelerator(ranks.device) or (world is not None and ranks is world.communicator)
    return ranks.device if by_default else None
