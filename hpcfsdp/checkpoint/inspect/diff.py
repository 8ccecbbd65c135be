"""What two checkpoints differ in, a block at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.checkpoint.inspect.names import matching
from hpcfsdp.checkpoint.inspect.numbers import decoded
from hpcfsdp.checkpoint.inspect.walk import pieces
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointError

Advance = Callable[[int], None]


class _Absent:
    """Stands for a value that one side does not have."""

    def __repr__(self) -> str:
        return "(absent)"


ABSENT = _Absent()


@dataclass(frozen=True)
class ChangedTensor:
    """A tensor that both files have, of one shape and dtype, with different elements.

    Attributes:
        different: elements that differ in any bit. NaN is the same as NaN of the same bits; 0 is not -0.
        largest: the largest absolute difference, of complex numbers the absolute value of it; None where all
            differences are NaN.
        where: index of the first element with it, or, without it, of the first that differs.
        nan: elements that differ in being NaN, or in which NaN; they have no part in `largest`.
    """

    path: str
    numel: int
    different: int
    largest: int | float | None
    where: tuple[int, ...]
    nan: int


@dataclass(frozen=True)
class Difference:
    """What the files A and B differ in.

    Attributes:
        added, removed: paths that only B has, and only A has.
        reshaped: (path, tensor in A, tensor in B), of other shape or dtype. Their elements are not compared.
        retied: (path, what it is a further name of in A, and in B); the path itself where it is a tensor of its own.
        changed: tensors with other elements.
        values: (name, value in A, value in B) of all that is no tensor: step, configuration, groups of the optimizer,
            extra values, metrics, random numbers; ``ABSENT`` where a side has none. When, by how many ranks and by
            which version a file was written is no part of what it holds.
    """

    added: tuple[str, ...] = ()
    removed: tuple[str, ...] = ()
    reshaped: tuple[tuple[str, TensorSpec, TensorSpec], ...] = ()
    retied: tuple[tuple[str, str, str], ...] = ()
    changed: tuple[ChangedTensor, ...] = ()
    values: tuple[tuple[str, Any, Any], ...] = ()

    @property
    def same(self) -> bool:
        """Whether nothing differs."""
        return self == Difference()


def compare(
    a: CheckpointIndex, b: CheckpointIndex, patterns: Iterable[str] = (), advance: Advance = lambda nbytes: None
) -> Difference:
    """What two checkpoints differ in; not collective.

    Args:
        patterns: compare only tensors that match one of them in either file, see ``names.matching``, and no values.
        advance: is told the bytes of each file that have been gone through.

    Raises:
        CheckpointError: a pattern matches nothing in either file, or a file has been replaced.
        CheckpointCorruptError: a tensor's bytes are not those that were written.
    """
    patterns = list(patterns)
    in_a, in_b = _chosen(a, b, patterns)
    both = [path for path in in_a if path in in_b]
    pairs = {path: (a.resolve(path), b.resolve(path)) for path in both}
    alike = {path: None for path, (one, other) in pairs.items() if (one.shape, one.dtype) == (other.shape, other.dtype)}
    return Difference(
        added=tuple(path for path in in_b if path not in in_a),
        removed=tuple(path for path in in_a if path not in in_b),
        reshaped=tuple((path, *pairs[path]) for path in both if path not in alike),
        retied=tuple(
            (path, pairs[path][0].path, pairs[path][1].path) for path in both if a.links.get(path) != b.links.get(path)
        ),
        changed=tuple(_changed(a, b, _once(a, b, alike), advance)),
        values=() if patterns else tuple(_value_differences(_values(a), _values(b))),
    )


def to_compare(a: CheckpointIndex, b: CheckpointIndex, patterns: Iterable[str] = ()) -> int:
    """Bytes of each file that ``compare`` goes through, at most."""
    in_a, in_b = _chosen(a, b, list(patterns))
    return sum(a.resolve(path).nbytes for path in _once(a, b, [path for path in in_a if path in in_b]))


def _chosen(a: CheckpointIndex, b: CheckpointIndex, patterns: list[str]) -> tuple[dict[str, None], dict[str, None]]:
    """Paths to compare in each file, in its order. Each pattern has to match in one of them."""
    if not patterns:
        return dict.fromkeys(matching(a)), dict.fromkeys(matching(b))
    found: dict[str, None] = {}
    for pattern in patterns:
        errors = []
        for index in (a, b):
            try:
                found |= dict.fromkeys(matching(index, [pattern]))
            except CheckpointError as error:
                errors.append(error)
        if len(errors) == 2:
            raise errors[0]
    chosen_a, chosen_b = ({path: None for path in matching(index) if path in found} for index in (a, b))
    return chosen_a, chosen_b


def _once(a: CheckpointIndex, b: CheckpointIndex, paths: Iterable[str]) -> list[str]:
    """Without paths that stand for one pair of tensors once more."""
    by_pair: dict[tuple[str, str], str] = {}
    for path in paths:
        by_pair.setdefault((a.links.get(path, path), b.links.get(path, path)), path)
    return list(by_pair.values())


def _changed(a: CheckpointIndex, b: CheckpointIndex, paths: list[str], advance: Advance) -> Iterator[ChangedTensor]:
    with BlockReader(a) as reader_a, BlockReader(b) as reader_b:
        for path in paths:

            def blocks(path: str = path) -> Iterator[tuple[np.ndarray, np.ndarray]]:
                for start, numel in pieces(a, path):
                    one, other = reader_a.read(path, start, numel), reader_b.read(path, start, numel)
                    yield one, other
                    advance(one.nbytes)

            found = compare_tensor(path, a.resolve(path), blocks())
            if found is not None:
                yield found


def compare_tensor(
    path: str, spec: TensorSpec, blocks: Iterable[tuple[np.ndarray, np.ndarray]]
) -> ChangedTensor | None:
    """How the elements of two tensors differ; None if they are the same, bit by bit.

    Args:
        blocks: the elements of both, in order, in whatever parts, as ``BlockReader.read`` gives them.
    """
    different = nan = begin = 0
    largest: int | float | None = None
    first = where = -1
    for one, other in blocks:
        places = np.flatnonzero(_bits(one) != _bits(other))
        if len(places):
            first = begin + int(places[0]) if first < 0 else first
            gaps = _absolute_difference(decoded(one[places], spec.dtype), decoded(other[places], spec.dtype))
            different += len(places)
            known = ~np.isnan(gaps)
            nan += len(gaps) - int(known.sum())
            if known.any():
                most = int(np.flatnonzero(known)[np.argmax(gaps[known])])
                if largest is None or gaps[most].item() > largest:
                    largest, where = gaps[most].item(), begin + int(places[most])
        begin += one.size
    if not different:
        return None
    place = np.unravel_index(first if largest is None else where, spec.shape) if spec.shape else ()
    return ChangedTensor(path, spec.numel, different, largest, tuple(int(i) for i in place), nan)


def _bits(block: np.ndarray) -> np.ndarray:
    """Elements as words, two for a complex one of 16 bytes: those of which one differs count once."""
    if block.dtype.itemsize <= 8:
        return block.view(f"u{block.dtype.itemsize}")
    return block.view(np.dtype([("real", "u8"), ("imag", "u8")]))


def _absolute_difference(one: np.ndarray, other: np.ndarray) -> np.ndarray:
    """Of integers exact, uint64; otherwise float64."""
    if one.dtype.kind in "iu":
        low, high = np.minimum(one, other), np.maximum(one, other)
        return high.astype(np.uint64) - low.astype(np.uint64)  # of negative ones too: it wraps around twice
    wide = np.complex128 if np.iscomplexobj(one) else np.float64
    with np.errstate(invalid="ignore", over="ignore"):
        return np.abs(one.astype(wide) - other.astype(wide))


def _values(index: CheckpointIndex) -> dict[str, Any]:
    """All that is no tensor, by name."""
    info = index.info
    found: dict[str, Any] = {"step": info.step, "config": info.config, "extra": info.extra}
    if index.param_groups is not None:
        found["optimizer group"] = index.param_groups
    if index.scalars is not None:
        found["optimizer scalars"] = index.scalars
    found["metrics"] = {name: list(series) for name, series in index.metrics.items()}
    found["random numbers"] = index.rng
    return found


def _value_differences(one: Any, other: Any, name: str = "") -> Iterator[tuple[str, Any, Any]]:
    """(name, one, other) of the innermost values that differ."""
    if isinstance(one, dict) and isinstance(other, dict):
        for key in dict.fromkeys([*one, *other]):
            place = f"{name}.{key}" if name else str(key)
            yield from _value_differences(one.get(key, ABSENT), other.get(key, ABSENT), place)
    elif isinstance(one, list) and isinstance(other, list) and len(one) == len(other):
        for number, (left, right) in enumerate(zip(one, other, strict=True)):
            yield from _value_differences(left, right, f"{name}[{number}]")
    elif not _same_value(one, other):
        yield name, one, other


def _same_value(one: Any, other: Any) -> bool:
    if isinstance(one, np.ndarray) and isinstance(other, np.ndarray):
        return (one.dtype, one.shape, one.tobytes()) == (other.dtype, other.shape, other.tobytes())
    if type(one) is not type(other):
        return False
    return one == other or (isinstance(one, float) and schema.to_json(one) == schema.to_json(other))  # NaN is NaN
