"""The norm of all gradients of a sharded model, and clipping by it."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence

import torch
from torch import nn

from hpcfsdp.comm import Communicator


@torch.no_grad()
def clip_grad_norm(
    groups: Iterable[tuple[Communicator | None, Sequence[nn.Parameter]]], max_norm: float, norm_type: float = 2.0
) -> torch.Tensor:
    """Collective over all `groups`. Scale gradients so that the norm of all, over all ranks, is at most a bound.

    Each element is counted once: shards do not overlap, and padding is zero.

    Args:
        groups: parameters whose gradients are this rank's part of the whole, with what connects the parts; or on all
            ranks the same, with None. In the same order on all ranks.
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
    groups = [(comm, params) for comm, params in groups if params]
    # From the parameters, which are the same on all ranks; a gradient may be missing on some.
    everything = [param for _, params in groups for param in params]
    dtype = torch.float64 if any(param.dtype == torch.float64 for param in everything) else torch.float32
    device = everything[0].device if everything else torch.device("cpu")
    totals = [_sum_of_powers(comm, params, norm_type, dtype) for comm, params in groups]
    totals = totals or [torch.zeros((), dtype=dtype)]
    gathered = torch.stack([total.to(device) for total in totals])
    if math.isinf(norm_type):
        total = gathered.amax()
    else:
        total = gathered.sum()
        total = total ** (1.0 / norm_type) if norm_type else total
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for param in everything:
        if param.grad is not None and param.grad.numel():
            param.grad.mul_(scale.to(param.grad.device, param.grad.dtype))
    return total


def _sum_of_powers(
    comm: Communicator | None, params: Sequence[nn.Parameter], p: float, dtype: torch.dtype
) -> torch.Tensor:
    """Collective over `comm`. The p-th power of the p-norm; the norm itself where p is inf."""
    device = params[0].device
    grads = [param.grad for param in params if param.grad is not None and param.grad.numel()]
    norms = [torch.linalg.vector_norm(grad, p, dtype=dtype) for grad in grads]
    if math.isinf(p):
        total = torch.stack(norms).amax() if norms else torch.zeros((), dtype=dtype, device=device)
    else:
        powers = [norm**p if p else norm for norm in norms]
        total = torch.stack(powers).sum() if powers else torch.zeros((), dtype=dtype, device=device)
    if comm is not None and comm.size > 1:
        here = total.to(comm.device)
        comm.all_reduce(here, "max" if math.isinf(p) else "sum")
        total = here.to(device)
    return total
