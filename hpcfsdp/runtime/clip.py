"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable

import torch
from torch import nn

from hpcfsdp.comm import Communicator


@torch.no_grad()
def clip_grad_norm(
    shards: Iterable[nn.Parameter], comm: Communicator, max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Collective over `comm`. Scale gradients so that the norm of all of them, over all ranks, is at most `max_norm`.

    Each element is counted once: shards do not overlap, and padding is zero.

    Args:
        shards: parameters whose gradients are this rank's part of the whole.
        max_norm: upper bound.
        norm_type: p of the p-norm, > 0 or inf.

    Returns:
        The norm before clipping, a float32 scalar (float64 if a gradient is), the same on every rank.

    Raises:
        ValueError: `norm_type` is not positive.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type > 0:
        raise ValueError(f"norm_type must be positive or inf, not {norm_type}")
    params = list(shards)
    grads = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    # From the parameters, which are the same on all ranks; a gradient may be missing on some.
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
    device = params[0].device if params else torch.device("cpu")
    norms = [torch.linalg.vector_norm(grad, norm_type, dtype=dtype) for grad in grads]
    if math.isinf(norm_type):
        total = torch.stack(norms).amax() if norms else torch.zeros((), dtype=dtype, device=device)
        comm.all_reduce(total, "max")
    else:
        powers = [norm**norm_type for norm in norms]
        total = torch.stack(powers).sum() if powers else torch.zeros((), dtype=dtype, device=device)
        comm.all_reduce(total, "sum")
        total = total ** (1.0 / norm_type)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grad in grads:
        grad.mul_(scale.to(grad.dtype))
    return total
