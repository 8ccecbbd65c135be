"""The arithmetic of reductions on this rank, for every dtype and operation."""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch

Tensors = Sequence[torch.Tensor]
OptionalTensors = Sequence[torch.Tensor | None]
ReduceOp = Literal["sum", "average", "product", "min", "max", "band", "bor", "bxor"]

_CHUNK_NUMEL = 1 << 17
"""Elements reduced at a time on a CPU where that takes several steps. The running total stays in the core's own cache
while the sources are added to it (512 KiB of float32)."""

_COMBINE = {"sum": torch.add, "average": torch.add, "product": torch.mul, "min": torch.minimum, "max": torch.maximum}
_COMBINE |= {"band": torch.bitwise_and, "bor": torch.bitwise_or, "bxor": torch.bitwise_xor}
# A sum of bools is true if any is true, as with torch's other backends; adding bytes would wrap around.
_COMBINE_BOOL = _COMBINE | dict.fromkeys(("sum", "max"), torch.bitwise_or)
_COMBINE_BOOL |= dict.fromkeys(("product", "min"), torch.bitwise_and)

_NARROW = {
    *(torch.float16, torch.bfloat16),
    *(torch.float8_e4m3fn, torch.float8_e5m2, torch.float8_e4m3fnuz, torch.float8_e5m2fnuz, torch.float8_e8m0fnu),
}
# torch has these dtypes but hardly any arithmetic for them; wider signed ones wrap around to the same bits.
_WITHOUT_ARITHMETIC = {torch.uint16: torch.int32, torch.uint32: torch.int64, torch.uint64: torch.int64}
_WITHOUT_ARITHMETIC[torch.complex32] = torch.complex64


def accumulate_dtype(dtype: torch.dtype, op: str = "sum") -> torch.dtype:
    """Return the dtype in which values of `dtype` are reduced by `op`."""
    if dtype in _NARROW:
        return torch.float32
    if op == "average" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64  # an average fits where the sum that it is made of does not
    return _WITHOUT_ARITHMETIC.get(dtype, dtype)


def refuse_op(op: str, dtype: torch.dtype) -> str | None:
    """Return why values of `dtype` cannot be reduced by `op`, None where they can."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    if op not in _COMBINE:
        return f"unknown reduction {op!r}"
    if op == "average" and dtype in (torch.bool, torch.uint64):
        return f"{dtype} has no average: sum, and divide in a dtype of your choice"
    if op in ("band", "bor", "bxor") and not whole:
        return f"{op} needs whole numbers or bool, not {dtype}"
    if op in ("min", "max") and (dtype.is_complex or dtype is torch.uint64):
        return f"{dtype} has no order that torch can compute with: {op} is not defined"
    return None


@dataclass(frozen=True)
class Reduction:
    """A reduction over `size` ranks, with sums in the dtype `accumulate`."""

    op: ReduceOp
    accumulate: torch.dtype
    size: int

    @property
    def divisor(self) -> int:
        return self.size if self.op == "average" else 1


@torch.no_grad()
def reduce_into(
    output: torch.Tensor, sources: Tensors, op: ReduceOp, accumulate: torch.dtype, *, divisor: int = 1
) -> None:
    """`output` becomes the reduction of `sources`, in their order, computed in `accumulate`, divided by `divisor`.

    All are 1-D of n elements, of any dtypes. The output may be one of the sources.
    """
    combine = (_COMBINE_BOOL if accumulate is torch.bool else _COMBINE)[op]
    # Without a detour: the first step reads two sources, so the output may be one of these, but not a later one.
    direct = {output.dtype, *(source.dtype for source in sources)} == {accumulate}
    direct = direct and all(source.data_ptr() != output.data_ptr() for source in sources[2:])
    numel = output.numel()
    on_host = output.device.type == "cpu"
    chunk = min(_CHUNK_NUMEL, numel) if on_host and not (direct and len(sources) <= 2) else numel
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
def reduce_rows(output: torch.Tensor, rows: torch.Tensor, reduction: Reduction) -> None:
    """`output` (n elements) becomes the reduction of the rows of a tensor (size x n)."""
    if rows.device.type == "cpu" or reduction.op not in ("sum", "average") or reduction.accumulate is torch.bool:
        reduce_into(output, list(rows), reduction.op, reduction.accumulate, divisor=reduction.divisor)
        return
    # One kernel, and no loop over parts that would stay in the cache of a core.
    if rows.dtype.itemsize == 1:
        rows = rows.to(reduction.accumulate)  # torch has hardly any arithmetic for fp8
    total = output if output.dtype == reduction.accumulate else torch.empty_like(output, dtype=reduction.accumulate)
    if reduction.op == "average" and reduction.accumulate.is_floating_point:
        torch.mean(rows, 0, dtype=reduction.accumulate, out=total)
    else:
        torch.sum(rows, 0, dtype=reduction.accumulate, out=total)
        divide_(total, reduction.divisor)
    if total is not output:
        output.copy_(total)


@torch.no_grad()
def divide_(total: torch.Tensor, divisor: float) -> None:
    """Make an average of a sum, in place; that of integers is rounded towards zero."""
    if divisor != 1:
        total.div_(divisor, rounding_mode=_rounding(total))


def _rounding(total: torch.Tensor) -> str | None:
    return None if total.is_floating_point() or total.is_complex() else "trunc"
