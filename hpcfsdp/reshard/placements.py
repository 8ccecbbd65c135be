"""The blocks of a tensor on the ranks of a mesh, as ``DTensor`` placements say. Pure: for any imagined mesh."""

import functools
import itertools
import math
from collections.abc import Sequence

import numpy as np
import torch
from torch.distributed.tensor import Shard as ShardAlong
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import whole_box

_CACHED_RANKS = 1024
"""Of larger meshes nothing is cached: the parts of 64 shapes on 16,384 ranks would take hundreds of megabytes."""


def mesh_blocks(shape: Sequence[int], ranks: torch.Tensor, placements: Sequence[Placement]) -> dict[int, Box]:
    """Return the one block of each rank of a mesh, in row-major order. Empty ones begin at a dimension's end.

    The mesh is ``DeviceMesh.mesh``. Refuses placements other than ``Replicate`` and ``Shard``, one for each dimension
    of the mesh, along dimensions of the tensor.
    """
    _check_blocks(placements)
    by_place = _spans_by_place(shape, ranks, placements)
    return {rank: _block(shape, spans) for rank, spans in zip(ranks.flatten().tolist(), by_place, strict=True)}


def block_at(shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement], place: Sequence[int]) -> Box:
    """Return the one block at a place of a mesh of a shape, as ``mesh_blocks``, without those of the other ranks."""
    _check_blocks(placements)
    spans = []
    for size, mesh_dims in zip(shape, _mesh_dims(shape, mesh, placements), strict=True):
        part = [(0, size)]
        for axis, strides in mesh_dims:
            part = _strided_part(part, mesh[axis], strides, place[axis])
        spans.append(part)
    return _block(shape, spans)


def _check_blocks(placements: Sequence[Placement]) -> None:
    for placement in placements:
        if type(placement) is not ShardAlong and not placement.is_replicate():
            raise ShardingError(
                f"a DTensor with the placements {list(placements)} is not made of blocks: redistribute it to Shard "
                "and Replicate first"
            )


def _block(shape: Sequence[int], spans: Sequence[Sequence[tuple[int, int]]]) -> Box:
    return _box([of[0] if of else (size, size) for of, size in zip(spans, shape, strict=True)])


def mesh_boxes(shape: Sequence[int], ranks: torch.Tensor, placements: Sequence[Placement]) -> dict[int, list[Box]]:
    """Return the blocks of a ``DTensor`` on each rank: one or none, but for ``_StridedShard``, which can leave several.

    Several are parts of the local tensor, and are not consecutive there if sharded along an inner dimension. Blocks
    without elements are left out; a tensor without any is a block of the first rank. Placements shard one after the
    other. Refuses more or fewer of them than the mesh (``DeviceMesh.mesh``) has dimensions, pending sums, and
    dimensions that the tensor does not have.
    """
    by_place = _spans_by_place(shape, ranks, placements)
    if not math.prod(shape):
        return {int(ranks.flatten()[0]): [whole_box(shape)]}
    found = {}
    for rank, spans in zip(ranks.flatten().tolist(), by_place, strict=True):
        boxes = [_box(corners) for corners in itertools.product(*spans)]
        if boxes:
            found[rank] = boxes
    return found


def rows_on_mesh(
    shape: Sequence[int], ranks: torch.Tensor, placements: Sequence[Placement]
) -> tuple[np.ndarray, np.ndarray] | None:
    """Return each rank's first row of a ``DTensor``, and the end of its rows; None unless they are consecutive.

    These are two int64 arrays in row-major order of the mesh, with equal values for a rank without rows. Takes
    milliseconds for thousands of ranks if the placements are ``Replicate`` and ``Shard(0)``. Refuses what
    ``mesh_boxes`` does.
    """
    if any(type(placement) is not ShardAlong and not placement.is_replicate() for placement in placements):
        found = mesh_boxes(shape, ranks, placements)
        boxes = [found.get(rank, []) for rank in ranks.flatten().tolist()]
        if any(len(of_rank) > 1 or (of_rank and of_rank[0].sizes[1:] != tuple(shape[1:])) for of_rank in boxes):
            return None
        corners = [(of_rank[0].offsets[0], of_rank[0].sizes[0]) if of_rank else (0, 0) for of_rank in boxes]
        begins, sizes = np.array(corners, np.int64).reshape(-1, 2).T
        return begins, begins + sizes
    mesh_dims = _mesh_dims(shape, ranks.shape, placements)
    if any(ranks.shape[axis] > 1 for of_dim in mesh_dims[1:] for axis, _ in of_dim):
        return None
    begins = np.zeros(tuple(ranks.shape), np.int64)
    ends = np.full_like(begins, shape[0])
    for axis, _ in mesh_dims[0]:
        parts = ranks.shape[axis]
        number = np.arange(parts).reshape([-1 if dim == axis else 1 for dim in range(ranks.ndim)])
        step = -(-(ends - begins) // parts)
        begins, ends = np.minimum(begins + number * step, ends), np.minimum(begins + (number + 1) * step, ends)
    return begins.reshape(-1), ends.reshape(-1)


def _spans_by_place(
    shape: Sequence[int], ranks: torch.Tensor, placements: Sequence[Placement]
) -> list[tuple[list[tuple[int, int]], ...]]:
    find = _cached_spans if ranks.numel() <= _CACHED_RANKS else _spans_on_mesh
    return find(tuple(shape), tuple(ranks.shape), tuple(placements))


def _spans_on_mesh(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[list[tuple[int, int]], ...]]:
    """Return the parts of each dimension, as (begin, end), by place of a mesh in row-major order."""
    mesh_dims = _mesh_dims(shape, mesh, placements)
    tables = [_spans(size, [(mesh[axis], n) for axis, n in of]) for size, of in zip(shape, mesh_dims, strict=True)]
    return [
        tuple(table[tuple(place[axis] for axis, _ in of)] for table, of in zip(tables, mesh_dims, strict=True))
        for place in itertools.product(*map(range, mesh))
    ]


_cached_spans = functools.lru_cache(maxsize=64)(_spans_on_mesh)  # a model has few shapes, and many tensors


def _mesh_dims(
    shape: Sequence[int], mesh: Sequence[int], placements: Sequence[Placement]
) -> list[list[tuple[int, int]]]:
    """Return the (dimension of the mesh, strides) that shard each dimension of a tensor, in order."""
    if len(placements) != len(mesh):
        raise ShardingError(
            f"{len(placements)} placement(s) were given for a mesh of {len(mesh)} dimension(s): give one for each"
        )
    mesh_dims: list[list[tuple[int, int]]] = [[] for _ in shape]
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ShardingError(
                f"a DTensor with placements {tuple(placements)} has no values of its own: redistribute it first"
            )
        if not -len(shape) <= dim < len(shape):
            raise ShardingError(f"a tensor of shape {list(shape)} has no dimension {dim} to shard along: {placement}")
        mesh_dims[dim].append((axis, getattr(placement, "split_factor", 1)))
    return mesh_dims


def _box(spans: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def _spans(size: int, divisions: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """Return the parts of a dimension at each place, as (begin, end), after divisions into (parts, strides)."""
    table: dict[tuple[int, ...], list[tuple[int, int]]] = {(): [(0, size)]}
    for parts, strides in divisions:
        table = {
            (*place, part): _strided_part(spans, parts, strides, part)
            for place, spans in table.items()
            for part in range(parts)
        }
    return table


def _strided_part(spans: Sequence[tuple[int, int]], parts: int, strides: int, part: int) -> list[tuple[int, int]]:
    """Return the same part of each stride, which are equal parts themselves."""
    found: list[tuple[int, int]] = []
    for stride in range(strides):
        for begin, end in _part(_part(spans, strides, stride), parts, part):
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
    return found


def _part(spans: Sequence[tuple[int, int]], parts: int, part: int) -> list[tuple[int, int]]:
    """Return a part as ``torch.chunk`` cuts: the last parts are smaller, or there are none."""
    total = sum(end - begin for begin, end in spans)
    step = -(-total // parts)
    first, stop = min(part * step, total), min((part + 1) * step, total)
    found = []
    for begin, end in spans:
        if max(first, 0) < min(stop, end - begin):
            found.append((begin + max(first, 0), begin + min(stop, end - begin)))
        first, stop = first - (end - begin), stop - (end - begin)
    return found
