"""Checks a table of extents against tensors and files. Pure."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np

from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.errors import CheckpointCorruptError
from hpcfsdp.reshard.tiling import MOST_ELEMENTS, TilingError, byte_ranges, first_untiled


def merge_ranges(ranges: Iterable[tuple[int, int]]) -> list[tuple[int, int]]:
    """Merges ranges that touch or overlap; ascending."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(ranges):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(end, found[-1][1])
        else:
            found.append((begin, end))
    return found


def check_extents(
    path: Path,
    specs: dict[str, TensorSpec],
    rows: np.ndarray,
    regions: list[tuple[int, int]],
    size: int,
    part_sizes: Sequence[int] = (),
) -> dict[str, tuple[int, int]]:
    """Proves that the extents tile every tensor, and neither leave the files nor overlap; the rows of each tensor.

    Args:
        regions: (first byte, end) of everything but tensors.
        size: of the file; `part_sizes` of the files next to it.
    """
    paths = list(specs)
    of = rows["tensor"].astype(np.int64)
    if len(rows) and (of.max() >= len(paths) or np.any(np.diff(of) < 0)):
        raise CheckpointCorruptError(f"{path}: damaged: its table of extents is out of order")
    nbytes = sum(spec.nbytes for spec in specs.values())
    if nbytes >= _BEYOND_ANY_FILE or np.any(rows["byte_offset"] >= _BEYOND_ANY_FILE):
        raise CheckpointCorruptError(f"{path}: damaged: it has sizes or places beyond any file")
    try:
        untiled = first_untiled(rows, [spec.numel for spec in specs.values()])
    except TilingError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {paths[error.tensor]}: {error}") from None
    if untiled is not None:
        raise CheckpointCorruptError(f"{path}: damaged: the runs of {paths[untiled]} do not tile it")
    _check_lengths(path, specs, rows)
    sizes = np.array([size, *part_sizes], np.int64)
    if len(rows) and rows["file"].max() >= len(sizes):
        raise CheckpointCorruptError(f"{path}: damaged: its table of extents has files that it does not name")
    _check_places(path, specs, rows, regions, sizes)
    edges = np.searchsorted(of, np.arange(len(paths) + 1)).tolist()
    return {name: (edges[index], edges[index + 1]) for index, name in enumerate(paths)}


def _check_lengths(path: Path, specs: dict[str, TensorSpec], rows: np.ndarray) -> None:
    """Raises if a row has more bytes than a block: a reader reads rows whole to verify them."""
    itemsizes = np.array([spec.itemsize for spec in specs.values()], np.int64)
    lengths = rows["count"].astype(np.int64) * rows["numel"].astype(np.int64) * itemsizes[rows["tensor"]]
    long = np.flatnonzero(lengths > schema.BLOCK_BYTES)
    if len(long):
        name = list(specs)[rows["tensor"][long[0]]]
        raise CheckpointCorruptError(
            f"{path}: damaged: {name} has an extent of {lengths[long[0]]} bytes; there are {schema.BLOCK_BYTES} at most"
        )


_BEYOND_ANY_FILE = MOST_ELEMENTS
"""Bytes. Sums of two of them are exact in int64."""


def _check_places(
    path: Path, specs: dict[str, TensorSpec], rows: np.ndarray, regions: list[tuple[int, int]], sizes: np.ndarray
) -> None:
    """Raises unless all elements are within their files, and no two byte ranges overlap."""
    paths, itemsizes = list(specs), np.array([spec.itemsize for spec in specs.values()], np.int64)
    ends = rows["byte_offset"].astype(np.int64) + schema.row_spans(rows) * itemsizes[rows["tensor"]]
    beyond = np.flatnonzero(ends > sizes[rows["file"]])
    if len(beyond):
        tensor, file = paths[rows["tensor"][beyond[0]]], int(rows["file"][beyond[0]])
        where = f"part {file}'s" if file else "the file's"
        raise CheckpointCorruptError(f"{path}: truncated: {tensor} ends beyond {where} {sizes[file]} bytes")
    for file in np.unique(rows["file"]).tolist():
        try:
            begins, ends = elements_in(rows, itemsizes, file)
        except TilingError as error:
            raise CheckpointCorruptError(f"{path}: damaged: {error}") from None
        if not file:
            begins = np.append(begins, [begin for begin, _ in regions])
            ends = np.append(ends, [end for _, end in regions])
            order = np.argsort(begins, kind="stable")
            begins, ends = begins[order], ends[order]
        if np.any(begins[1:] < ends[:-1]):
            raise CheckpointCorruptError(f"{path}: damaged: two of its byte ranges overlap")


def elements_in(rows: np.ndarray, itemsizes: np.ndarray, file: int) -> tuple[np.ndarray, np.ndarray]:
    """First bytes and ends of the ranges of file number `file` that are elements, ascending; see ``byte_ranges``."""
    rows = rows[rows["file"] == file]
    tensors, sizes = rows["tensor"], itemsizes[rows["tensor"]]
    begins, counts = rows["byte_offset"].astype(np.int64), rows["count"].astype(np.int64)
    numels, strides = (rows[name].astype(np.int64) * sizes for name in ("numel", "stride"))
    # Elements at their distances in the tensor, from one first byte on, cannot overlap.
    base = begins - rows["start"].astype(np.int64) * sizes
    order = np.lexsort((base, tensors))
    changes = (np.diff(tensors[order].astype(np.int64), prepend=-1) != 0) | (np.diff(base[order], prepend=-1) != 0)
    owners = np.empty(len(rows), np.int64)
    owners[order] = np.cumsum(changes)
    return byte_ranges(begins, numels, counts, strides, owners)
