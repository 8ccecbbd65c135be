"""A warning where each rank clips by the norm of its own shard, as ``torch.nn.utils.clip_grad_norm_`` does.

That function calls nothing of this package, so its effect is recognised: the gradients of the shard are changed in
place, and their norm is the same in each step, while their direction is not. Scaling by a norm over all ranks does not
have this effect.
"""

from __future__ import annotations

import math
import warnings
import weakref
from collections.abc import Iterable
from dataclasses import dataclass

import torch

from hpcfsdp import _compat
from hpcfsdp.params.gradient import is_changed, is_noted
from hpcfsdp.units.clip import of_one_kind

_ENOUGH = 3
"""Consecutive steps with gradients of one norm."""
_AT_MOST = 50
"""Steps that are examined: a norm costs a pass over the gradients."""
_SAME = 1e-4
"""Relative tolerance; two norms are this close by chance once in 10,000 steps."""


@dataclass
class _Seen:
    """The gradients of an optimizer's last step, and how many steps were alike or examined."""

    norm: float = 0.0
    direction: float = 0.0
    in_a_row: int = 0
    looked_at: int = 0


_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, _Seen] = weakref.WeakKeyDictionary()


@torch.no_grad()
def look_for_local_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Not collective, before a step. Warn once if this rank alone has clipped the gradients."""
    seen = _seen.get(optimizer)
    if seen is not None and seen.looked_at >= _AT_MOST:
        return
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    shard = next((grad for grad in grads if is_noted(grad)), None)
    if shard is None or not is_changed(shard):
        return
    seen = _seen.setdefault(optimizer, _Seen())
    seen.looked_at += 1
    norm, total = _norm_and_sum(grads)
    direction = total / norm if norm else 0.0
    alike = norm > 0 and abs(norm - seen.norm) <= _SAME * norm and abs(direction - seen.direction) > _SAME
    seen.in_a_row = seen.in_a_row + 1 if alike else 1
    seen.norm, seen.direction = norm, direction
    if seen.in_a_row >= _ENOUGH:
        seen.looked_at = _AT_MOST
        warnings.warn(
            f"the gradients of this rank's shards had the norm {norm:.4g} in each of {_ENOUGH} steps, as after "
            "torch.nn.utils.clip_grad_norm_. That function sees only this rank's shards and scales each rank "
            "differently: call model.clip_grad_norm_(max_norm) on the wrapped model instead",
            stacklevel=6,
        )


def _norm_and_sum(grads: Iterable[torch.Tensor]) -> tuple[float, float]:
    squares = total = 0.0
    here = [_compat.local_of(grad) for grad in grads if grad.layout is torch.strided]
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in here]
    for group in of_one_kind(real):
        norms = _compat.norm_of_each(group, 2.0, dtype=torch.float64)
        sums = [grad.sum(dtype=torch.float64) for grad in group]
        values = torch.stack([*norms, *sums]).tolist()  # at once: the host waits for the device
        squares += sum(norm**2 for norm in values[: len(group)])
        total += sum(values[len(group) :])
    return math.sqrt(squares), total
