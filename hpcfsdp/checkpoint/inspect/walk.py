"""Divides a tensor into pieces to read, each checksum in one piece. Pure."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.reader import BlockReader

Advance = Callable[[int], None]
"""Called with the number of bytes that were read since its last call."""


def ignore(_nbytes: int) -> None:
    """Ignores progress."""


MOST_BYTES = 16 * schema.BLOCK_BYTES
"""Most bytes of a piece. Interleaved runs would otherwise be read together, however long they are."""


def iter_pieces(index: CheckpointIndex, path: str, at_least: int = schema.BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of pieces that make up a tensor, in order, of at least `at_least` bytes.

    A piece ends where a row of the table of extents does. A row is in two pieces only where interleaved rows are longer
    than ``MOST_BYTES``.
    """
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
    """Reads all elements of a tensor in order, piece by piece."""
    for start, numel in iter_pieces(index, path):
        piece = reader.read(path, start, numel)
        yield piece
        advance(piece.nbytes)


def nbytes_of(index: CheckpointIndex, paths: Iterable[str]) -> int:
    """Bytes of these tensors."""
    return sum(index.resolve(path).nbytes for path in paths)
