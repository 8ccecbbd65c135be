"""Arithmetic on tensors that are here: what turns moved bytes into a reduction, for every dtype and operation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch

from hpcfsdp.comm.communicator import ReduceOp

_CHUNK_NUMEL = 1 << 17
"""Elements reduced at a time where that takes several steps: the running total stays in the core's own cache while one
source after the other is added to it (512 KiB of float32)."""

_COMBINE = {
    "sum": torch.add,
    "average": torch.add,
    "product": torch.mul,
    "min": torch.minimum,
    "max": torch.maximum,
    "band": torch.bitwise_and,
    "bor": torch.bitwise_or,
    "bxor": torch.bitwise_xor,
}
# A sum of bools says whether any is true, as torch's other backends have it; adding bytes would wrap around.
_COMBINE_BOOL = _COMBINE | {
    "sum": torch.bitwise_or,
    "max": torch.bitwise_or,
    "product": torch.bitwise_and,
    "min": torch.bitwise_and,
}


@dataclass(frozen=True)
class Reduction:
    """How values are reduced, and what they are summed in."""

    op: ReduceOp
    accumulate: torch.dtype
    size: int

    @property
    def divisor(self) -> int:
        return self.size if self.op == "average" else 1


@torch.no_grad()
def reduce_into(
    output: torch.Tensor,
    sources: Sequence[torch.Tensor],
    op: ReduceOp,
    accumulate: torch.dtype,
    *,
    divisor: int = 1,
) -> None:
    """`output` becomes the reduction of `sources`, in their order, computed in `accumulate`.

    Args:
        output: 1-D, n elements, any dtype. May be one of the sources.
        sources: one or more 1-D tensors of n elements, any dtypes.
        divisor: the result is divided by it: the number of ranks, for an average.
    """
    combine = (_COMBINE_BOOL if accumulate is torch.bool else _COMBINE)[op]
    # Without a detour: the first step reads two sources, so the output may be one of these, but not a later one.
    direct = {output.dtype, *(source.dtype for source in sources)} == {accumulate}
    direct = direct and all(source.data_ptr() != output.data_ptr() for source in sources[2:])
    numel = output.numel()
    chunk = numel if direct and len(sources) <= 2 else min(_CHUNK_NUMEL, numel)
    scratch = None if direct else torch.empty(chunk, dtype=accumulate, device=output.device)
    for begin in range(0, numel, max(chunk, 1)):
        end = min(begin + chunk, numel)
        first, *others = (source[begin:end].to(accumulate) for source in sources)
        total = output[begin:end] if scratch is None else scratch[: end - begin]
        for other in others:
            first = combine(first, other, out=total)
        if divisor != 1:
            first = torch.div(first, divisor, rounding_mode=_rounding(first), out=total)
        if first.data_ptr() != output[begin:end].data_ptr():
            output[begin:end].copy_(first)


@torch.no_grad()
def divide_(total: torch.Tensor, divisor: int) -> None:
    """Make an average of a sum, in place; that of integers is rounded towards zero."""
    if divisor != 1:
        total.div_(divisor, rounding_mode=_rounding(total))


def _rounding(total: torch.Tensor) -> str | None:
    return None if total.is_floating_point() or total.is_complex() else "trunc"
