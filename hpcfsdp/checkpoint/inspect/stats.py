"""Elements of tensors, piece by piece: as numpy numbers, and their statistics."""

import functools
import math
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader


def decoded(block: np.ndarray, dtype: str) -> np.ndarray:
    """Decode elements from ``BlockReader.read``, by torch's name of their dtype.

    bfloat16 and 8-bit floats become float32, which has all of their values; other dtypes stay, bool as uint8.
    """
    if dtype == "bfloat16":
        return (block.astype(np.uint32) << 16).view(np.float32)
    if dtype.startswith("float8"):
        return _float8_values(dtype)[block]
    return block


def json_number(value: Any) -> Any:
    """Return a number for JSON: not finite or complex ones as text."""
    value = value.item() if isinstance(value, np.generic) else value
    if isinstance(value, complex) or (isinstance(value, float) and not math.isfinite(value)):
        return str(value)
    return value


@functools.cache
def _float8_values(dtype: str) -> np.ndarray:
    """Return the values of all 256 codes of an 8-bit float, float32."""
    # e5m2 follows IEEE 754. "fn" has no infinity: all bits set is NaN, and no other code is. "uz" has no negative zero
    # either: its code is the only NaN, and its bias is one more. e8m0fnu is a power of two without a sign.
    codes = np.arange(256)
    if dtype == "float8_e8m0fnu":
        return np.where(codes == 255, np.nan, np.ldexp(1.0, codes - 127)).astype(np.float32)
    exponent_bits, mantissa_bits = int(dtype[8]), int(dtype[10])  # of "float8_e4m3"
    bias = (1 << exponent_bits - 1) - 1 + dtype.endswith("uz")
    sign = np.where(codes >> 7, -1.0, 1.0)
    exponent = codes >> mantissa_bits & (1 << exponent_bits) - 1
    mantissa = codes & (1 << mantissa_bits) - 1
    significand = mantissa + np.where(exponent > 0, 1 << mantissa_bits, 0)
    values = sign * np.ldexp(significand.astype(np.float64), np.maximum(exponent, 1) - bias - mantissa_bits)
    if dtype.endswith("uz"):
        values[0x80] = np.nan
    elif dtype.endswith("fn"):
        values[[0x7F, 0xFF]] = np.nan
    else:
        top = exponent == (1 << exponent_bits) - 1
        values[top] = np.where(mantissa[top] == 0, sign[top] * np.inf, np.nan)
    return values.astype(np.float32)


Advance = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""


def ignore(_nbytes: int) -> None:
    """Ignore progress."""


MOST_BYTES = 16 * schema.BLOCK_BYTES
"""Most bytes of a piece. Interleaved runs would otherwise be read together, however long they are."""


def iter_pieces(index: CheckpointIndex, path: str, at_least: int = schema.BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of pieces that make up a tensor, in order, of at least `at_least` bytes."""
    # A piece ends where a row does. A row is in two only where interleaved rows are longer than ``MOST_BYTES``.
    spec = index.resolve(path)
    rows = index.rows_of(path)
    if not len(rows):
        return
    starts = rows["start"].astype(np.int64)
    ends = np.maximum.accumulate(starts + schema.row_spans(rows))
    clean = np.append(starts[1:] >= ends[:-1], True)  # no later row begins before this one's end
    most = max(1, MOST_BYTES // spec.itemsize)
    begin = 0
    for end in ends[clean].tolist():
        if end < spec.numel and (end - begin) * spec.itemsize < at_least:
            continue
        for first in range(begin, end, most):
            yield first, min(most, end - first)
        begin = end


def read_pieces(
    index: CheckpointIndex, reader: BlockReader, path: str, advance: Advance = ignore
) -> Iterator[np.ndarray]:
    """Read all elements of a tensor in order, piece by piece."""
    for start, numel in iter_pieces(index, path):
        piece = reader.read(path, start, numel)
        yield piece
        advance(piece.nbytes)


def nbytes_of(index: CheckpointIndex, paths: Iterable[str]) -> int:
    """Return bytes of these tensors."""
    return sum(index.resolve(path).nbytes for path in paths)


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
    """Return statistics of a tensor, from its elements in parts of ``BlockReader.read``; one part is in memory."""
    found = Statistics()
    for block in blocks:
        if block.size:
            found = _joined(found, _of_values(decoded(block, dtype)))
    return found


def file_statistics(
    index: CheckpointIndex, reader: BlockReader, paths: Iterable[str], advance: Advance = ignore
) -> Iterator[tuple[schema.TensorSpec, Statistics]]:
    """Yield statistics of tensors of a file, one after the other; not collective.

    `advance` is called with the number of bytes read. Raise CheckpointCorruptError for damage.
    """
    for path in paths:
        spec = index.resolve(path)
        yield spec, statistics(read_pieces(index, reader, spec.path, advance), spec.dtype)


def absolute(values: np.ndarray) -> np.ndarray:
    """Return absolute values of complex numbers, float64: in float32 those of large complex64 would be infinite."""
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
    parts, exponent = wide.view(np.float64), 0
    if values.dtype.itemsize == wide.dtype.itemsize and values.dtype.kind in "fc":  # squares and sums may overflow
        exponent = math.frexp(float(np.abs(parts).max()))[1]
        parts = np.ldexp(parts, -exponent) if exponent else parts  # exact, except for negligible values
    with np.errstate(over="ignore"):  # they may be beyond the largest float
        norm = float(np.ldexp(math.sqrt(float(np.dot(parts, parts))), exponent))
        mean = np.ldexp(np.mean(parts.view(wide.dtype), keepdims=True).view(np.float64), exponent).view(wide.dtype)
    return Statistics(numel, nan, inf, low, high, mean.item(), norm)


def _joined(one: Statistics, other: Statistics) -> Statistics:
    """Return statistics of two parts of a tensor together."""
    finite, more = (part.numel - part.nan - part.inf for part in (one, other))
    counts = (one.numel + other.numel, one.nan + other.nan, one.inf + other.inf)
    if not finite or not more:
        rest = other if more else one
        return Statistics(*counts, rest.min, rest.max, rest.mean, rest.norm)
    weight = more / (finite + more)
    mean = one.mean * (1 - weight) + other.mean * weight
    norm = math.hypot(one.norm, other.norm)
    return Statistics(*counts, min(one.min, other.min), max(one.max, other.max), mean, norm)
