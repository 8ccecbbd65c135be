"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hpcfsdp._compat import local_of
from hpcfsdp.comm import Communicator


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    shares: Iterable[tuple[int, Sequence[torch.Tensor]]],
    comms: Sequence[Communicator],
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Collective over `comms`. Scale gradients so that the norm of all, over all ranks, is at most a bound.

    Each element is counted once: shards do not overlap, and padding is zero.

    Args:
        params: whose gradients are scaled; the same on all ranks, but for their shapes.
        shares: parts of these gradients, each with the number of ranks that hold the same part.
        comms: one after the other they connect all ranks.
        max_norm: the bound.
        norm_type: p of the p-norm, > 0 or inf; 0 counts the elements that are not 0.

    Returns:
        The norm before clipping, a float32 scalar (float64 if a gradient is), the same on every rank.

    Raises:
        ValueError: `norm_type` is negative or NaN.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type >= 0:
        raise ValueError(f"norm_type must be 0, positive or inf, not {norm_type}")
    # From the parameters, which are the same on all ranks; a gradient may be missing on some.
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in params) else torch.float32
    device = params[0].device if params else torch.device("cpu")
    is_max = math.isinf(norm_type)
    parts = [
        _sum_of_powers(grads, norm_type, dtype).to(device) / (1 if is_max else copies)
        for copies, grads in shares
        if any(grad.numel() for grad in grads)
    ]
    # In one dtype on all ranks, which may hold different parameters.
    gathered = torch.stack(parts or [torch.zeros((), device=device)]).double()
    total = gathered.amax() if is_max else gathered.sum()
    for comm in comms:
        here = total.to(comm.device)
        comm.all_reduce(here, "max" if is_max else "sum")
        total = here.to(device)
    if norm_type and not is_max:
        total = total ** (1.0 / norm_type)
    total = total.to(dtype)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for param in params:
        if param.grad is not None and param.grad.numel():
            grad = local_of(param.grad)
            grad.mul_(scale.to(grad.device, grad.dtype))
    return total


def _sum_of_powers(grads: Sequence[torch.Tensor], p: float, dtype: torch.dtype) -> torch.Tensor:
    """The p-th power of the p-norm of gradients; the norm itself where p is inf."""
    norms = torch.stack([torch.linalg.vector_norm(grad, p, dtype=dtype) for grad in grads if grad.numel()])
    if math.isinf(p):
        return norms.amax()
    return (norms**p if p else norms).sum()
