"""Shards a LightningModule: as a whole, or its children where it steps its optimizers itself."""

from __future__ import annotations

import inspect
from collections.abc import Mapping
from typing import Any

import lightning.pytorch as pl
import torch
import torchmetrics
from torch import nn

from hpcfsdp.errors import EngineError, UsageError, nearest
from hpcfsdp.fsdp import CPUOffload, FullyShardedDataParallel, MixedPrecision, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy

_KEPT = "_hpcfsdp_sharded"
"""Where a LightningModule keeps its wrapper and the options of it: several Trainers may use one module."""

Options = Mapping[str, Any]
_MIXED = {"bf16-mixed": torch.bfloat16, "16-mixed": torch.float16}


def checked_options(options: Options) -> dict[str, Any]:
    """Return arguments for ``FullyShardedDataParallel``; a set of classes, a strategy's name and a bool are converted.

    Raises UsageError where there is no such argument, or no such sharding strategy.
    """
    known = set(inspect.signature(FullyShardedDataParallel).parameters) - {"module"}
    if name := next((name for name in options if name not in known), None):
        raise UsageError(
            f"HpcfsdpStrategy({name}=...): FullyShardedDataParallel has no such argument{nearest(name, known)}"
        )
    found = {"sync_module_states": True, "use_orig_params": True, **options}
    if isinstance(found.get("auto_wrap_policy"), (set, frozenset)):
        found["auto_wrap_policy"] = ModuleWrapPolicy(found["auto_wrap_policy"])
    if isinstance(found.get("cpu_offload"), bool):
        found["cpu_offload"] = CPUOffload(offload_params=found["cpu_offload"])
    strategy = found.get("sharding_strategy")
    if isinstance(strategy, str):
        if strategy not in ShardingStrategy.__members__:
            raise UsageError(
                f"HpcfsdpStrategy(sharding_strategy={strategy!r}): use one of {', '.join(ShardingStrategy.__members__)}"
            )
        found["sharding_strategy"] = ShardingStrategy[strategy]
    return found


def dtypes_of(precision: Any) -> dict[str, Any]:
    """Return the option for one of Lightning's precision plugins; {} where it leaves the dtypes as they are."""
    dtype = _MIXED.get(getattr(precision, "precision", ""))
    return {} if dtype is None else {"mixed_precision": MixedPrecision(param_dtype=dtype, reduce_dtype=torch.float32)}


def metrics_to(module: nn.Module, device: torch.device) -> None:
    """Move metrics to a device: their values are no buffers."""
    for inner in module.modules():
        if isinstance(inner, torchmetrics.Metric):
            inner.to(device)


def shard(module: pl.LightningModule, options: Options) -> tuple[nn.Module, list[FullyShardedDataParallel]]:
    """Return the model that computes steps, and its outermost sharded modules. Collective over all ranks once.

    With automatic optimization the whole LightningModule is one root. With manual optimization a step runs backward
    inside of ``training_step``, so each child of the LightningModule is a root, and the model is the module itself.
    Raises UsageError where the module was sharded before with other options, and EngineError under manual optimization
    for parameters of its own.
    """
    if _KEPT not in vars(module):
        root = FullyShardedDataParallel(module, **options) if module.automatic_optimization else None
        if root is None:
            _shard_children(module, options)
        vars(module)[_KEPT] = (root, dict(options))
    root, before = vars(module)[_KEPT]
    for name in sorted((set(before) | set(options)) - {"auto_wrap_policy", "param_init_fn"}):  # these have no equality
        if before.get(name) != options.get(name):
            raise UsageError(
                f"this {type(module).__name__} was sharded before with {name}={before.get(name)!r}, and this Trainer's "
                f"strategy or precision asks for {options.get(name)!r}: give both the same, or build the module anew"
            )
    if root is not None:
        return root, [root]
    wrapped = [each for each in module.modules() if isinstance(each, FullyShardedDataParallel)]
    inner = {each for one in wrapped for each in one.module.modules()}
    return module, [each for each in wrapped if each not in inner]


def _shard_children(module: nn.Module, options: Options) -> None:
    own = [name for name, _ in module.named_parameters(recurse=False)]
    if own:
        raise EngineError(
            f"{type(module).__name__} has the parameter {own[0]!r} itself, and steps its optimizers itself "
            "(automatic_optimization=False), so its children are sharded one by one: put the parameter into a child "
            "module with a forward of its own"
        )
    wrapped: dict[nn.Module, nn.Module] = {}
    names = [name for name, _ in module.named_modules(remove_duplicate=False) if name and "." not in name]
    for name in names:
        child = getattr(module, name)
        if isinstance(child, FullyShardedDataParallel) or next(child.parameters(), None) is None:
            continue
        if isinstance(child, (nn.ModuleList, nn.ModuleDict)):  # they have no forward
            _shard_children(child, options)
            continue
        if child not in wrapped:
            wrapped[child] = FullyShardedDataParallel(child, **options)
        setattr(module, name, wrapped[child])
