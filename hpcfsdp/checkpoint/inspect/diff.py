"""Compare two checkpoints, a block at a time."""

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.inspect.names import match_names, matching
from hpcfsdp.checkpoint.inspect.stats import Advance, decoded, ignore, iter_pieces


class _Absent:
    """A value that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor of the same shape and dtype in both files, with different elements."""

    path: str
    numel: int
    different: int  # elements that differ in any bit. NaN equals NaN of the same bits; 0 differs from -0.
    largest: int | float | None  # absolute difference, for complex numbers its absolute value; None where all are NaN
    where: tuple[int, ...]  # index of the first element with it, or else of the first that differs
    nan: int  # elements whose difference is NaN, or where one side alone is NaN; `largest` ignores them


@dataclass(frozen=True)
class Tolerance:
    """How far two floats a and b may be apart and count as equal: |a - b| <= absolute + relative * |a|.

    Integers, and numbers that are not finite, are equal only to themselves. With both at 0, only equal bits are equal.
    """

    relative: float = 0.0
    absolute: float = 0.0

    @property
    def is_exact(self) -> bool:
        """Whether only equal bits are equal."""
        return self.relative == self.absolute == 0

    def allows(self, a: np.ndarray, b: np.ndarray, gaps: np.ndarray) -> np.ndarray:
        """Return which of the elements are equal, bool; `gaps` are their absolute differences."""
        if a.dtype.kind not in "fc":
            return a == b
        with np.errstate(invalid="ignore", over="ignore"):
            # In 64 bits: a tolerance may be too small or too large for float16.
            size = np.abs(a.astype(np.result_type(a, np.float64)))
            near = np.isfinite(gaps) & (gaps <= self.absolute + self.relative * size)
            return near | (a == b) | (np.isnan(a) & np.isnan(b))


EXACT = Tolerance()


@dataclass(frozen=True)
class ChangedArray:
    """Numbers of one array that differ between the files, beside tensors: metrics, random numbers."""

    numel: int
    different: int
    largest: int | float | None  # absolute difference; None if it is not a number


@dataclass(frozen=True)
class Difference:
    """The differences of the files A and B.

    Attributes:
        added, removed: paths that only B has, and only A has.
        reshaped: (path, tensor in A, tensor in B), of other shape or dtype. Their elements are not compared.
        retied: (path, its target in A, in B); the path itself where it is a tensor of its own.
        changed: tensors with other elements.
        values: (name, value in A, value in B) of everything but tensors: step, configuration, groups of the optimizer,
            extra values, metrics, random numbers; ``ABSENT`` where a side has none. Date, number of ranks and version
            of the writer are not compared.
        compared: tensors whose elements were compared.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, schema.TensorSpec, schema.TensorSpec], ...] = ()
    retied: tuple[tuple[str, str, str], ...] = ()
    changed: tuple[ChangedTensor, ...] = ()
    values: tuple[tuple[str, Any, Any], ...] = ()
    compared: int = field(default=0, compare=False)

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self == Difference()


def compare(
    a: CheckpointIndex,
    b: CheckpointIndex,
    patterns: Iterable[str] = (),
    advance: Advance = ignore,
    tolerance: Tolerance = EXACT,
) -> Difference:
    """Compare two checkpoints; not collective.

    Args:
        patterns: compare only tensors that match one of them in either file, see ``names.matching``, and no values.
        advance: called with the number of bytes of each file that were compared.
        tolerance: within which elements of tensors, and floats among the values, are equal.

    Raises:
        CheckpointError: a pattern matches nothing in either file, or a file has been replaced.
        CheckpointCorruptError: a tensor's bytes do not have their checksum.
    """
    patterns = list(patterns)
    in_a, in_b = _chosen(a, b, patterns)
    both = [path for path in in_a if path in in_b]
    pairs = {path: (a.resolve(path), b.resolve(path)) for path in both}
    alike = {path: None for path, (one, other) in pairs.items() if (one.shape, one.dtype) == (other.shape, other.dtype)}
    once = _once(a, b, alike)
    return Difference(
        added=tuple(path for path in in_b if path not in in_a),
        removed=tuple(path for path in in_a if path not in in_b),
        reshaped=tuple((path, *pairs[path]) for path in both if path not in alike),
        retied=tuple(
            (path, pairs[path][0].path, pairs[path][1].path) for path in both if a.links.get(path) != b.links.get(path)
        ),
        changed=tuple(_changed(a, b, once, advance, tolerance)),
        values=() if patterns else tuple(_value_differences(_values(a), _values(b), tolerance)),
        compared=len(once),
    )


def to_compare(a: CheckpointIndex, b: CheckpointIndex, patterns: Iterable[str] = ()) -> int:
    """Return bytes of each file that ``compare`` goes through, at most."""
    in_a, in_b = _chosen(a, b, list(patterns))
    return sum(a.resolve(path).nbytes for path in _once(a, b, [path for path in in_a if path in in_b]))


def _chosen(a: CheckpointIndex, b: CheckpointIndex, patterns: list[str]) -> tuple[dict[str, None], dict[str, None]]:
    """Return paths to compare in each file, in its order. Each pattern has to match in one of them."""
    known_a, known_b = dict.fromkeys(matching(a)), dict.fromkeys(matching(b))
    if not patterns:
        return known_a, known_b
    found: set[str] = set()
    for pattern in patterns:
        here = match_names(pattern, known_a | known_b)
        found.update(here or matching(a, [pattern]))  # which raises, and names the nearest
    chosen_a, chosen_b = (dict.fromkeys(path for path in known if path in found) for known in (known_a, known_b))
    return chosen_a, chosen_b


def _once(a: CheckpointIndex, b: CheckpointIndex, paths: Iterable[str]) -> list[str]:
    """Remove paths of the same pair of tensors."""
    by_pair: dict[tuple[str, str], str] = {}
    for path in paths:
        by_pair.setdefault((a.links.get(path, path), b.links.get(path, path)), path)
    return list(by_pair.values())


def _changed(
    a: CheckpointIndex, b: CheckpointIndex, paths: list[str], advance: Advance, tolerance: Tolerance
) -> Iterator[ChangedTensor]:
    with BlockReader(a) as reader_a, BlockReader(b) as reader_b:
        for path in paths:
            blocks = ((reader_a.read(path, *piece), reader_b.read(path, *piece)) for piece in iter_pieces(a, path))
            found = compare_tensor(path, a.resolve(path), blocks, tolerance, advance)
            if found is not None:
                yield found


def compare_tensor(
    path: str,
    spec: schema.TensorSpec,
    blocks: Iterable[tuple[np.ndarray, np.ndarray]],
    tolerance: Tolerance = EXACT,
    advance: Advance = ignore,
) -> ChangedTensor | None:
    """Compare two tensors, in parts of ``BlockReader.read``; return None if they are equal within the tolerance."""
    different = nan = begin = 0
    largest: int | float | None = None
    first = where = -1
    for one, other in blocks:
        places = np.flatnonzero(_bits(one) != _bits(other))
        left, right = decoded(one[places], spec.dtype), decoded(other[places], spec.dtype)
        gaps = absolute_difference(left, right)
        if not tolerance.is_exact:
            unequal = ~tolerance.allows(left, right, gaps)
            places, gaps = places[unequal], gaps[unequal]
        if len(places):
            first = begin + int(places[0]) if first < 0 else first
            different += len(places)
            known = ~np.isnan(gaps)
            nan += len(gaps) - int(known.sum())
            if known.any():
                most = int(np.flatnonzero(known)[np.argmax(gaps[known])])
                if largest is None or gaps[most].item() > largest:
                    largest, where = gaps[most].item(), begin + int(places[most])
        begin += one.size
        advance(one.nbytes)
    if not different:
        return None
    place = np.unravel_index(first if largest is None else where, spec.shape) if spec.shape else ()
    return ChangedTensor(path, spec.numel, different, largest, tuple(int(i) for i in place), nan)


def _bits(block: np.ndarray) -> np.ndarray:
    """Return elements as words, two for a complex number of 16 bytes, which count once."""
    if block.dtype.itemsize <= 8:
        return block.view(f"u{block.dtype.itemsize}")
    return block.view(np.dtype([("real", "u8"), ("imag", "u8")]))


def absolute_difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Return the absolute differences of elements, NaN where one is NaN: of integers exact, uint64; else float64."""
    if one.dtype.kind in "iu":
        low, high = np.minimum(one, other), np.maximum(one, other)
        return high.astype(np.uint64) - low.astype(np.uint64)  # of negative ones too: it wraps around twice
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(one.astype(wide) - other.astype(wide))


def _values(index: CheckpointIndex) -> dict[str, Any]:
    """Everything but tensors, by name."""
    info = index.info
    found: dict[str, Any] = {"step": info.step, "config": info.config, "extra": index.extra, "data": info.data}
    optimizer = {"optimizer group": index.param_groups, "optimizer scalars": index.scalars}
    found |= {name: value for name, value in optimizer.items() if value is not None}
    found["metrics"] = {name: {"steps": steps, "values": values} for name, (steps, values) in index.metrics.items()}
    found["random numbers"] = index.rng
    return found


def _value_differences(one: Any, other: Any, tolerance: Tolerance, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, one, other) of the innermost values that differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            place = f"{name}.{key}" if name else str(key)
            yield from _value_differences(one.get(key, ABSENT), other.get(key, ABSENT), tolerance, place)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _value_differences(left, right, tolerance, f"{name}[{number}]")
    elif not _same_value(one, other, tolerance):
        yield name, one, other


def array_difference(one: Any, other: Any) -> ChangedArray | None:
    """Return the difference of two arrays of numbers with one shape and dtype; None for anything else."""
    if not (isinstance(one, np.ndarray) and isinstance(other, np.ndarray)):
        return None
    if (one.dtype, one.shape) != (other.dtype, other.shape) or one.dtype.kind not in "iufc":
        return None
    gaps = absolute_difference(one, other)
    known = gaps[~np.isnan(gaps)]
    different = np.count_nonzero(_bits(np.ascontiguousarray(one)) != _bits(np.ascontiguousarray(other)))
    return ChangedArray(one.size, int(different), known.max().item() if known.size else None)


def _same_value(one: Any, other: Any, tolerance: Tolerance) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        if (one.dtype, one.shape) != (other.dtype, other.shape):
            return False
        if one.tobytes() == other.tobytes():
            return True
        near = not tolerance.is_exact and one.dtype.kind in "fc"
        return near and bool(tolerance.allows(one, other, absolute_difference(one, other)).all())
    if type(one) is float is type(other) and not tolerance.is_exact:
        left, right = np.array(one), np.array(other)
        return bool(tolerance.allows(left, right, absolute_difference(left, right)))
    if type(one) is not type(other):
        return False
    return one == other or (isinstance(one, float) and schema.to_json(one) == schema.to_json(other))  # NaN is NaN
