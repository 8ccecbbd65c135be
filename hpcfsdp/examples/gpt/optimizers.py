"""The optimizer of a run, AdamW, or Muon for the matrices of blocks and AdamW for all else; and its learning rate."""

from __future__ import annotations

import math
from typing import Any

import torch

from hpcfsdp import World, param_info
from hpcfsdp.examples.gpt.run_config import OptimConfig, RunConfig
from hpcfsdp.fsdp import FullyShardedDataParallel
from hpcfsdp.optim import Muon, WholeTensors


def make_optimizer(config: RunConfig, model: FullyShardedDataParallel, world: World) -> torch.optim.Optimizer:
    """Return the optimizer of a sharded model. Collective over all ranks."""
    optim = config.optim
    if config.optimizer == "adamw":
        return torch.optim.AdamW(model.parameters(), lr=optim.lr, **_adamw(optim))
    matrices, others = [], []
    for info in param_info(model).values():  # parameters themselves have the shapes of shards
        (matrices if info.name.startswith("blocks.") and len(info.shape) == 2 else others).append(info.param)
    groups = [
        {"params": matrices, "algorithm": "muon", "lr": optim.muon_lr, "weight_decay": optim.weight_decay},
        {"params": others, "algorithm": "adamw", "lr": optim.lr, **_adamw(optim)},
    ]
    dtype = torch.float32 if world.device.type == "cpu" else torch.bfloat16
    return WholeTensors(model, groups, Muon, ns_dtype=dtype)


def set_options(optimizer: torch.optim.Optimizer, config: OptimConfig) -> None:
    """Not collective. Set what stays the same from step to step, as a checkpoint may have brought other values."""
    for group in optimizer.param_groups:
        is_muon = group.get("algorithm") == "muon"
        group.update({"weight_decay": config.weight_decay} if is_muon else _adamw(config))


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the rate of step `step` (0 to `steps` - 1): linear warm-up to `lr`, then half a cosine to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))


def set_rate(optimizer: torch.optim.Optimizer, config: OptimConfig, rate: float) -> None:
    """Not collective. Set the learning rate of a step, that of Muon in proportion."""
    for group in optimizer.param_groups:
        group["lr"] = rate * (config.muon_lr / config.lr if group.get("algorithm") == "muon" else 1)


def _adamw(config: OptimConfig) -> dict[str, Any]:
    return {"betas": (config.beta1, config.beta2), "weight_decay": config.weight_decay}
