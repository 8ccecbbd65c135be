"""In which pieces to read a tensor, so that each of its checksums is needed once. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.checkpoint.reader import BlockReader

MOST_BYTES = 16 * schema.BLOCK_BYTES
"""Of a piece. Strided runs lie between each other, and would have to be read together however long they are."""


def pieces(index: CheckpointIndex, path: str, at_least: int = schema.BLOCK_BYTES) -> Iterator[tuple[int, int]]:
    """(first element, number of elements) of pieces that make up a tensor, in order.

    A piece ends where a row of the table of extents does. Rows lie in two pieces only where runs between each other
    are longer than ``MOST_BYTES``.

    Args:
        at_least: bytes of a piece; short rows are put together.
    """
    spec = index.resolve(path)
    rows = index.rows_of(path)
    if not len(rows):
        return
    starts = rows["start"].astype(np.int64)
    spans = (rows["count"].astype(np.int64) - 1) * rows["stride"].astype(np.int64) + rows["numel"].astype(np.int64)
    ends = np.maximum.accumulate(starts + spans)
    clean = np.append(starts[1:] >= ends[:-1], True)  # no row reaches beyond this one's end
    most = max(1, MOST_BYTES // spec.itemsize)
    begin = 0
    for end in ends[clean].tolist():
        if end < spec.numel and (end - begin) * spec.itemsize < at_least:
            continue
        for first in range(begin, end, most):
            yield first, min(most, end - first)
        begin = end


def read_pieces(index: CheckpointIndex, reader: BlockReader, path: str) -> Iterator[np.ndarray]:
    """All elements of a tensor in order, piece by piece, as ``BlockReader.read`` gives them."""
    for start, numel in pieces(index, path):
        yield reader.read(path, start, numel)


def nbytes_of(index: CheckpointIndex, paths: Iterable[str]) -> int:
    """Bytes of these tensors."""
    return sum(index.resolve(path).nbytes for path in paths)
