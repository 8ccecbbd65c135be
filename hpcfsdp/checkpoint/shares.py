"""Which rank of a node looks at which bytes of a checkpoint before they are loaded. Pure.

What the ranks of a node need, they check together, in long stretches of the file: disks and file systems read these
faster than the pieces of a rank, which lie apart, and what several ranks need is read and checked once. Afterwards it
is in the memory of their system.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from hpcfsdp.checkpoint.index import CheckpointIndex
from hpcfsdp.state.tensors import StateTensor

_STRETCH_BYTES = 64 << 20
"""Longest stretch. Ranks that read near each other were faster than ranks far from each other in a file."""


def rows_needed(
    index: CheckpointIndex, tensors: Iterable[tuple[str, StateTensor]], peers: Sequence[int], num_ranks: int
) -> np.ndarray:
    """Rows of the table of extents, by their places in it, that are needed on a node; in the order of the file.

    All that this rank needs is among them. Ranks of a node that load the same most often find the same rows; where
    parameters are laid out in other ways for some of them, they may not.

    Args:
        tensors: that are going to be loaded, with the path of each in the file.
        peers: the ranks of this node, this one among them.
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


def share_of(index: CheckpointIndex, places: np.ndarray, number: int, count: int) -> np.ndarray:
    """Those of some rows that one of so many ranks checks.

    Args:
        places: the same on these ranks, in the order of the file.
        number: of the rank among them, from 0 on.
    """
    rows = index.extents[places]
    itemsizes = np.array([spec.itemsize for spec in index.tensors.values()], np.int64)
    nbytes = rows["numel"].astype(np.int64) * rows["count"].astype(np.int64) * itemsizes[rows["tensor"]]
    # A row belongs to the stretch in which its middle lies. The ranks take stretches in turn.
    turns = max(1, -(-int(nbytes.sum()) // (count * _STRETCH_BYTES)))
    stretches = (np.cumsum(nbytes) - nbytes // 2 - 1) * (turns * count) // max(1, nbytes.sum())
    return places[stretches % count == number]


def _overlapping(rows: np.ndarray, tensor: StateTensor, is_peer: np.ndarray) -> np.ndarray:
    """Of each row whether it has elements that a rank of this node needs.

    Args:
        is_peer: by rank, whether it is on this node.
    """
    ours = is_peer[tensor.runs.holders].any(axis=1)
    edges = tensor.runs.edges
    # What every rank has whole counts in the runs as rank 0's; it is among this rank's own.
    own = [(piece.start, piece.start + piece.numel) for piece in tensor.pieces if piece.numel]
    begins = np.sort(np.append(edges[:-1][ours], [begin for begin, _ in own]).astype(np.int64))
    ends = np.sort(np.append(edges[1:][ours], [end for _, end in own]).astype(np.int64))
    first, numel, count, stride = (rows[name].astype(np.int64) for name in ("start", "numel", "count", "stride"))
    last = first + (count - 1) * stride + numel
    # Of the stretches that begin before a row ends, some do not end before it begins.
    return np.searchsorted(begins, last) > np.searchsorted(ends, first, side="right")
