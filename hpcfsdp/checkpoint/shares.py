"""Which rank of a node looks at which bytes of a checkpoint before they are loaded. Pure.

What the ranks of a node need, they check together, in long stretches of the file: disks and file systems read these
faster than the pieces of a rank, which lie apart, and what several ranks need is read and checked once. Afterwards it
is in the memory of their system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcfsdp.checkpoint.reader import CheckpointIndex
from hpcfsdp.state.tensors import StateTensor

_STRETCH_BYTES = 64 << 20
"""Longest stretch. Ranks that read near each other were faster than ranks far from each other in a file."""


def rows_to_check(
    index: CheckpointIndex, tensors: Iterable[tuple[str, StateTensor]], peers: Sequence[int], rank: int, num_ranks: int
) -> np.ndarray:
    """Rows of the table of extents, by their places in it, that one rank checks; in the order of the file.

    Args:
        tensors: that are going to be loaded, with the path of each in the file.
        peers: the ranks of this node, ascending; `rank` is one of them.
        num_ranks: on all nodes.
    """
    needed = [np.empty(0, np.int64)]
    for path, tensor in tensors:
        first, end = index.first_rows[index.resolve(path).path]
        places = np.arange(first, end)
        needed.append(places if len(peers) == num_ranks else places[_overlapping(index.extents[places], tensor, peers)])
    places = np.unique(np.concatenate(needed))
    rows = index.extents[places]
    itemsizes = np.array([spec.itemsize for spec in index.tensors.values()], np.int64)
    order = np.lexsort((rows["byte_offset"], rows["file"]))
    nbytes = (rows["numel"].astype(np.int64) * rows["count"].astype(np.int64) * itemsizes[rows["tensor"]])[order]
    # A row belongs to the stretch in which its middle lies. The ranks take stretches in turn.
    turns = max(1, -(-int(nbytes.sum()) // (len(peers) * _STRETCH_BYTES)))
    stretches = (np.cumsum(nbytes) - nbytes // 2 - 1) * (turns * len(peers)) // max(1, nbytes.sum())
    return places[order][stretches % len(peers) == peers.index(rank)]


def _overlapping(rows: np.ndarray, tensor: StateTensor, peers: Sequence[int]) -> np.ndarray:
    """Of each row whether it has elements that a rank of this node needs."""
    ours = np.isin(tensor.runs.holders, peers).any(axis=1)
    edges = tensor.runs.edges
    # What every rank has whole counts in the runs as rank 0's; it is among this rank's own.
    own = [(piece.start, piece.start + piece.numel) for piece in tensor.pieces if piece.numel]
    begins = np.sort(np.append(edges[:-1][ours], [begin for begin, _ in own])).astype(np.int64)
    ends = np.sort(np.append(edges[1:][ours], [end for _, end in own])).astype(np.int64)
    first = rows["start"].astype(np.int64)
    last = (
        first + (rows["count"].astype(np.int64) - 1) * rows["stride"].astype(np.int64) + rows["numel"].astype(np.int64)
    )
    # Of the stretches that begin before a row ends, some do not end before it begins.
    return np.searchsorted(begins, last) > np.searchsorted(ends, first, side="right")
