"""Divides the verification of a checkpoint among the ranks of a node before it is loaded. Pure.

The ranks verify what the node needs together, in long ranges of the file: disks read these faster than the scattered
pieces of one rank, and bytes that several ranks need are read and verified once. Afterwards they are in the page cache.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.state.tensors import StateTensor

_RANGE_BYTES = 64 << 20
"""The longest range. Ranks that read near each other were faster than ranks far from each other in a file."""


def rows_needed(
    index: CheckpointIndex, tensors: Iterable[tuple[str, StateTensor]], peers: Sequence[int], num_ranks: int
) -> np.ndarray:
    """Rows of the table of extents, by their places in it, that a node needs; in the order of the file.

    They include all rows that this rank needs. Ranks of a node usually find the same rows, but may not where
    parameters are laid out differently for some of them.

    Args:
        tensors: to load, with the path of each in the file.
        peers: the ranks of this node, including this one.
        num_ranks: on all nodes.
    """
    is_peer = np.zeros(num_ranks, bool)
    is_peer[list(peers)] = True
    needed = [np.empty(0, np.int64)]
    for path, tensor in tensors:
        first, end = index.first_rows[index.resolve(path).path]
        places = np.arange(first, end)
        needed.append(places if is_peer.all() else places[_overlapping(index.extents[first:end], tensor, is_peer)])
    places = np.unique(np.concatenate(needed))
    rows = index.extents[places]
    return places[np.lexsort((rows["byte_offset"], rows["file"]))]


def select_share(index: CheckpointIndex, places: np.ndarray, number: int, count: int) -> np.ndarray:
    """The rows that rank `number` of `count` verifies. `places` are equal on these ranks, in the order of the file."""
    rows = index.extents[places]
    itemsizes = np.array([spec.itemsize for spec in index.tensors.values()], np.int64)
    nbytes = rows["numel"].astype(np.int64) * rows["count"].astype(np.int64) * itemsizes[rows["tensor"]]
    # A row belongs to the range with its middle. The ranks take ranges in turn.
    turns = max(1, -(-int(nbytes.sum()) // (count * _RANGE_BYTES)))
    ranges = (np.cumsum(nbytes) - nbytes // 2 - 1) * (turns * count) // max(1, nbytes.sum())
    return places[ranges % count == number]


def _overlapping(rows: np.ndarray, tensor: StateTensor, is_peer: np.ndarray) -> np.ndarray:
    """For each row, whether it has elements that a rank of this node needs. `is_peer` is by rank."""
    ours = is_peer[tensor.runs.ranks].any(axis=1)
    edges = tensor.runs.edges
    # What every rank has whole counts in the runs as rank 0's; it is among this rank's own.
    own = [(piece.start, piece.start + piece.numel) for piece in tensor.pieces if piece.numel]
    begins = np.sort(np.append(edges[:-1][ours], [begin for begin, _ in own]).astype(np.int64))
    ends = np.sort(np.append(edges[1:][ours], [end for _, end in own]).astype(np.int64))
    first = rows["start"].astype(np.int64)
    last = first + schema.row_spans(rows)
    # Of the needed ranges that begin before a row ends, some do not end before it begins.
    return np.searchsorted(begins, last) > np.searchsorted(ends, first, side="right")
