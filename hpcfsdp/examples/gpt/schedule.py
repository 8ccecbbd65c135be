"""The learning rate of each step."""

import math

from hpcfsdp.examples.gpt.run_config import OptimConfig


def learning_rate(step: int, steps: int, config: OptimConfig) -> float:
    """Return the rate of step `step` (0 to `steps` - 1): linear warm-up to `lr`, then half a cosine to `min_lr`."""
    if step < config.warmup_steps:
        return config.lr * (step + 1) / config.warmup_steps
    done = (step - config.warmup_steps) / max(1, steps - 1 - config.warmup_steps)
    return config.min_lr + (config.lr - config.min_lr) * 0.5 * (1 + math.cos(math.pi * min(1.0, done)))
