"""Statistics of tensors, a block at a time."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import numpy as np

from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.numbers import decoded
from hpcfsdp.checkpoint.inspect.walk import Advance, ignore, read_pieces


@dataclass(frozen=True)
class Statistics:
    """Statistics of one tensor, computed in float64.

    Attributes:
        nan, inf: numbers of NaN and infinite elements (a complex number with a NaN part is NaN).
        min, max: of the finite elements, exact; of complex ones the absolute values in float64; None without any.
        mean: of the finite elements; complex for complex ones; None without any.
        norm: the Euclidean norm of the finite elements.
    """

    numel: int = 0
    nan: int = 0
    inf: int = 0
    min: int | float | None = None
    max: int | float | None = None
    mean: float | complex | None = None
    norm: float = 0.0


def statistics(blocks: Iterable[np.ndarray], dtype: str) -> Statistics:
    """Statistics of a tensor, from its elements in parts of ``BlockReader.read``; one part is in memory."""
    found = Statistics()
    for block in blocks:
        if block.size:
            found = _joined(found, _of_values(decoded(block, dtype)))
    return found


def file_statistics(
    index: CheckpointIndex,
    reader: BlockReader,
    paths: Iterable[str],
    advance: Advance = ignore,
) -> Iterator[tuple[TensorSpec, Statistics]]:
    """Statistics of tensors of a file, one after the other; not collective.

    `advance` is called with the number of bytes read. Raises CheckpointCorruptError for damage.
    """
    for path in paths:
        spec = index.resolve(path)
        yield spec, statistics(read_pieces(index, reader, spec.path, advance), spec.dtype)


def absolute(values: np.ndarray) -> np.ndarray:
    """Absolute values of complex numbers, float64: in float32 those of large complex64 would be infinite."""
    with np.errstate(over="ignore"):  # of complex128 they can be more than the largest float
        return np.abs(values.astype(np.complex128))


def _of_values(values: np.ndarray) -> Statistics:
    numel = values.size
    finite = np.isfinite(values)
    nan = inf = 0
    if not finite.all():
        nan = int(np.isnan(values).sum())
        values = values[finite]
        inf = numel - values.size - nan
    if not values.size:
        return Statistics(numel, nan, inf)
    sized = absolute(values) if np.iscomplexobj(values) else values
    low, high = sized.min().item(), sized.max().item()
    wide = values.astype(np.complex128 if np.iscomplexobj(values) else np.float64)
    mean, norm = _mean_and_norm(wide, values.dtype.itemsize == wide.dtype.itemsize and values.dtype.kind in "fc")
    return Statistics(numel, nan, inf, low, high, mean, norm)


def _mean_and_norm(values: np.ndarray, any_size: bool) -> tuple[float | complex, float]:
    """Mean and norm of float64 or complex128; `any_size`: squares and sums may overflow or underflow."""
    parts = values.view(np.float64)
    exponent = math.frexp(float(np.abs(parts).max()))[1] if any_size else 0
    if exponent:
        parts = np.ldexp(parts, -exponent)  # exact, except for negligible values
    norm = _scaled(math.sqrt(float(np.dot(parts, parts))), exponent)
    mean = parts.view(values.dtype).mean().item()
    if isinstance(mean, complex):
        return complex(_scaled(mean.real, exponent), _scaled(mean.imag, exponent)), norm
    return _scaled(mean, exponent), norm


def _scaled(value: float, exponent: int) -> float:
    try:
        return math.ldexp(value, exponent)
    except OverflowError:  # a norm beyond the largest float
        return math.copysign(math.inf, value)


def _joined(one: Statistics, other: Statistics) -> Statistics:
    """Statistics of two parts of a tensor together."""
    finite, more = (part.numel - part.nan - part.inf for part in (one, other))
    counts = (one.numel + other.numel, one.nan + other.nan, one.inf + other.inf)
    if not finite or not more:
        rest = other if more else one
        return Statistics(*counts, rest.min, rest.max, rest.mean, rest.norm)
    weight = more / (finite + more)
    mean = one.mean * (1 - weight) + other.mean * weight
    norm = math.hypot(one.norm, other.norm)
    return Statistics(*counts, min(one.min, other.min), max(one.max, other.max), mean, norm)
