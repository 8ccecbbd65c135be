"""Who has what of a tensor, as layouts, ``DTensor``, ``ShardedTensor`` and files say it, and from each to the others.

All of it is pure, made from shapes and metadata for any number of imagined ranks. In between, a distribution is the
blocks of each rank: ascending ones that lie in its memory one after the other, without those that have no elements; a
tensor without any is a block of the first rank. Ranks are called what the meshes and the metadata call them.
"""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Container, Iterable, Mapping, Sequence

import torch
from torch.distributed.tensor import Replicate, Shard as ShardAlong
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp._compat import ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.flat.layout import Box, FlatLayout, ShardExtent
from hpcfsdp.reshard.move import MovePlan
from hpcfsdp.reshard.runs import Run, held_runs, run_boxes, whole_box
from hpcfsdp.reshard.tiling import find_outside
from hpcfsdp.tensor.metadata import validate_tiling

Held = Mapping[int, Sequence[Box]]
"""By rank, in the order of the ranks, the blocks that it has."""


def layout_boxes(layouts: Sequence[FlatLayout], fqn: str, ranks: torch.Tensor | None = None) -> dict[int, list[Box]]:
    """What each rank has of a parameter that is laid out flat: of a block, if it is cut, and always a run of that.

    Args:
        layouts: of each of the ranks that are parallel over tensors, see ``FlatLayout.of_tensor_rank``; else the one.
        fqn: the name of the parameter, or an alias.
        ranks: the mesh, (shards, tensor ranks) in its last dimensions; ranks along others have the same. By default
            those from 0 on.

    Raises:
        ShardingError: the mesh has not a place for each shard.
    """
    sizes = layouts[0].num_shards, len(layouts)
    ranks = torch.arange(math.prod(sizes)) if ranks is None else ranks
    if not ranks.numel() or ranks.numel() % math.prod(sizes):
        raise ShardingError(
            f"{fqn!r} is laid out for {sizes[0]} shard(s) by {sizes[1]} tensor rank(s), and the mesh of "
            f"{list(ranks.shape)} is not made up of these: pass the mesh that the layout was made for"
        )
    by_place = []
    for layout in layouts:
        slot = layout.by_name[fqn]
        offsets = (0,) * len(slot.shape) if slot.block is None else slot.block.box.offsets
        of_shard: dict[int, list[Box]] = {}
        for extent in layout.param_extents(fqn):
            parts = run_boxes(slot.shape, extent.start, extent.numel)
            of_shard[extent.shard_rank] = [_moved(box, offsets) for box in parts]
        by_place.append(of_shard)
    found = {
        rank: by_place[tensor_rank].get(shard_rank, [])
        for replica in ranks.reshape(-1, *sizes).tolist()
        for shard_rank, of_tensor_ranks in enumerate(replica)
        for tensor_rank, rank in enumerate(of_tensor_ranks)
    }
    return _with_elements(layouts[0].by_name[fqn].whole_shape, found)


def mesh_boxes(shape: Sequence[int], ranks: torch.Tensor, placements: Sequence[Placement]) -> dict[int, list[Box]]:
    """What each rank has of a ``DTensor``: one block, or none, but for ``_StridedShard``, which can leave it several.

    Several are parts of the local tensor, and do not lie one after the other if they are cut along an inner dimension.

    Args:
        shape: of the whole.
        ranks: the mesh, as ``DeviceMesh.mesh``.
        placements: for each of its dimensions, which cut one after the other.

    Raises:
        ShardingError: there are more or fewer of them, one is no cut (a sum that is pending), or it is along a
            dimension that the tensor does not have.
    """
    if len(placements) != ranks.ndim:
        raise ShardingError(f"{len(placements)} placement(s) are for a mesh of as many dimensions, not {ranks.ndim}")
    by_place = _boxes_by_place(tuple(shape), tuple(ranks.shape), tuple(placements))
    return _with_elements(shape, dict(zip(ranks.flatten().tolist(), map(list, by_place), strict=True)))


@functools.lru_cache(maxsize=64)  # a model has few shapes, and many tensors
def _boxes_by_place(
    shape: tuple[int, ...], mesh: tuple[int, ...], placements: tuple[Placement, ...]
) -> list[tuple[Box, ...]]:
    """The blocks of each place of a mesh, in row-major order."""
    cuts: list[list[tuple[int, int]]] = [[] for _ in shape]  # by dimension, (that of the mesh, strides)
    for axis, placement in enumerate(placements):
        if placement.is_replicate():
            continue
        dim = getattr(placement, "dim", None)
        if dim is None:
            raise ShardingError(
                f"a DTensor with placements {tuple(placements)} has no values of its own: redistribute it first"
            )
        if not -len(shape) <= dim < len(shape):
            raise ShardingError(f"a tensor of shape {list(shape)} has no dimension {dim} to be cut along: {placement}")
        cuts[dim].append((axis, getattr(placement, "split_factor", 1)))
    tables = [_spans(size, [(mesh[axis], n) for axis, n in of]) for size, of in zip(shape, cuts, strict=True)]
    found = []
    for place in itertools.product(*map(range, mesh)):
        spans = [table[tuple(place[axis] for axis, _ in of)] for table, of in zip(tables, cuts, strict=True)]
        found.append(tuple(_box(corners) for corners in itertools.product(*spans)))
    return found


def metadata_boxes(metadata: ShardedTensorMetadata, ranks: Container[int] | None = None) -> dict[int, list[Box]]:
    """What each rank has of a ``ShardedTensor``.

    Args:
        ranks: those that there are; None for any.

    Raises:
        ShardingError: a shard is on no rank, or on none of these; shards overlap, leave a gap, or reach beyond.
    """
    held = [shard for shard in metadata.shards_metadata if 0 not in shard.shard_sizes]
    validate_tiling(ShardedTensorMetadata(held, metadata.size, metadata.tensor_properties))
    found: dict[int, list[Box]] = {}
    for shard in metadata.shards_metadata:
        rank = None if shard.placement is None else shard.placement.rank()
        if rank is None or (ranks is not None and rank not in ranks):
            raise ShardingError(
                f"the shard at {shard.shard_offsets} of size {shard.shard_sizes} is placed on {shard.placement}, which "
                + ("is no rank" if rank is None else f"is none of the ranks {ranks}")
            )
        found.setdefault(rank, []).append(Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes)))
    return _with_elements(metadata.size, {rank: sorted(found[rank]) for rank in sorted(found)})


def extent_boxes(shape: Sequence[int], extents: Iterable[ShardExtent]) -> dict[int, list[Box]]:
    """What each rank has that writes stretches of a tensor, or has written them; in any order.

    Raises:
        ShardingError: they overlap, leave a gap, or reach beyond the tensor.
    """
    found: dict[int, list[Box]] = {}
    for rank, start, numel in _stretches(shape, ((e.shard_rank, e.start, e.numel) for e in extents)):
        found.setdefault(rank, []).extend(run_boxes(shape, start, numel))
    return _with_elements(shape, {rank: found[rank] for rank in sorted(found)})


def each_once(held: Held) -> dict[int, list[Box]]:
    """Of equal blocks that several ranks have, those of the first one; ranks that have nothing else are left out."""
    seen: set[Box] = set()
    found: dict[int, list[Box]] = {}
    for rank, boxes in held.items():
        new = [box for box in boxes if box not in seen]
        seen.update(new)
        if new:
            found[rank] = new
    return found


def boxes_metadata(
    shape: Sequence[int],
    held: Held,
    properties: TensorProperties,
    placement: Callable[[int], str] = "rank:{}/cpu".format,
) -> ShardedTensorMetadata:
    """The metadata of a ``ShardedTensor`` with these blocks as shards.

    Args:
        shape: of the whole.
        held: without replicas, see ``each_once``.
        placement: of the shards of a rank.

    Raises:
        ShardingError: blocks overlap, leave a gap, or reach beyond the tensor.
    """
    shards = [
        ShardMetadata(list(box.offsets), list(box.sizes), placement(rank))
        for rank, boxes in held.items()
        for box in boxes
    ]
    metadata = ShardedTensorMetadata(shards, torch.Size(shape), properties)
    validate_tiling(metadata)
    return metadata


def boxes_placements(
    shape: Sequence[int], held: Held, ranks: torch.Tensor, *, once: bool = False
) -> tuple[Placement, ...]:
    """The placements of a ``DTensor`` of which ranks have these blocks; the way back from ``mesh_boxes``.

    Where several do, as in a mesh dimension of one rank, ``Replicate`` comes before ``Shard``, and low dimensions
    before high ones.

    Args:
        ranks: the mesh, as ``DeviceMesh.mesh``.
        once: blocks are named for the first rank that has them, see ``each_once``: a dimension of the mesh in which
            only the first ranks have anything is one of replicas.

    Raises:
        ShardingError: a rank is not in the mesh, or has several blocks; or the blocks are not those of ``Shard`` and
            ``Replicate``: names the first rank whose block does not fit those of the ranks before it.
    """
    strangers = sorted(set(held) - set(ranks.flatten().tolist()))
    if strangers:
        raise ShardingError(f"rank(s) {strangers} have blocks, and are not in the mesh of {list(ranks.shape)} ranks")
    several = next((rank for rank, boxes in held.items() if len(boxes) > 1), None)
    if several is not None:
        raise ShardingError(
            f"rank {several} has {_describe(held[several])}, and a rank of a mesh has one block at most"
        )
    origin = held.get(int(ranks.flatten()[0]), [])
    placements: list[Placement] = []
    sizes = list(shape)
    for axis, size in enumerate(ranks.shape):
        # Chunks get smaller: the first rank in each dimension has a block, and so has the second of any that is cut.
        line = ranks.movedim(axis, -1).reshape(-1, size)[0].tolist()
        placement = _placement_between(origin, held.get(line[1], []), sizes, once) if size > 1 else Replicate()
        if isinstance(placement, ShardAlong):
            sizes[placement.dim] = -(-sizes[placement.dim] // size)
        placements.append(placement)
    expected = mesh_boxes(shape, ranks, placements)
    expected = each_once(expected) if once else expected
    for rank in ranks.flatten().tolist():
        has, should = list(held.get(rank, [])), expected.get(rank, [])
        if has != should:
            raise ShardingError(
                f"the blocks are no cut of a tensor of shape {list(shape)} over a mesh of {list(ranks.shape)}: as the "
                f"first ranks are placed, {placements}, rank {rank} would have {_describe(should)}, and has "
                f"{_describe(has)}"
            )
    return tuple(placements)


def boxes_extents(fqn: str, shape: Sequence[int], held: Held) -> tuple[ShardExtent, ...]:
    """The stretches of a tensor that each rank has, as long as can be, in ascending order; for a file.

    Blocks that are cut along inner dimensions are a stretch for each row.

    Args:
        fqn: the name of the tensor.
        held: without replicas, see ``each_once``.

    Returns:
        With offsets in memory that has a rank's stretches one after the other.

    Raises:
        ShardingError: blocks overlap, leave a gap, or reach beyond the tensor.
    """
    blocks = [(rank, box) for rank, boxes in held.items() for box in boxes]
    outside = find_outside(shape, [box for _, box in blocks])
    if outside is not None:
        rank, box = blocks[outside]
        raise ShardingError(f"{_describe([box])} on rank {rank} is not within a tensor of shape {list(shape)}")
    runs = ((rank, run) for rank, boxes in held.items() for run in held_runs(0, shape, boxes))
    offsets: dict[int, int] = {}
    found = []
    for rank, start, numel in _stretches(shape, ((rank, run.start, run.numel) for rank, run in runs)):
        found.append(ShardExtent(fqn, rank, start, numel, offsets.get(rank, 0)))
        offsets[rank] = offsets.get(rank, 0) + numel
    return tuple(found)


def plan_moves(place: int, ranks: Sequence[int], shape: Sequence[int], sources: Held, targets: Held) -> MovePlan:
    """What one of `ranks` keeps, sends and receives for a tensor to come from one distribution into another.

    The tensor has the index 0, and a rank's blocks are its memory: of a layout, the run of the parameter by itself.

    Args:
        place: of the rank whose plan it is.
        ranks: by their place in the communicator that values will be moved over.
        sources: have all of the tensor; blocks that several ranks have come from the first.

    Raises:
        ShardingError: a rank that is none of these has blocks.
    """
    for held in (sources, targets):
        strangers = sorted(set(held) - set(ranks))
        if strangers:
            raise ShardingError(
                f"rank(s) {strangers} have blocks, and are none of the {len(ranks)} ranks that move them"
            )
    first = each_once(sources)

    def given(at: int) -> list[Run]:
        return held_runs(0, shape, sources.get(ranks[at], ()), first.get(ranks[at], ()))

    def wanted(at: int) -> list[Run]:
        return held_runs(0, shape, targets.get(ranks[at], ()))

    return MovePlan.make(place, len(ranks), given, wanted)


def _stretches(shape: Sequence[int], stretches: Iterable[tuple[int, int, int]]) -> list[tuple[int, int, int]]:
    """(rank, first element, number) in ascending order, those of one rank joined, that have each element once."""
    found: list[tuple[int, int, int]] = []
    end, total = 0, math.prod(shape)
    for rank, start, numel in sorted((s for s in stretches if s[2]), key=lambda stretch: stretch[1]):
        if start < 0 or numel < 0 or start + numel > total:
            raise ShardingError(f"{numel} element(s) from {start} on, on rank {rank}, are not in {list(shape)}")
        if start > end:
            break
        if start < end:
            raise ShardingError(f"element {start} of {list(shape)} is on the ranks {found[-1][0]} and {rank}")
        end = start + numel
        if found and found[-1][0] == rank:
            start = found.pop()[1]
        found.append((rank, start, end - start))
    if end < total:
        raise ShardingError(f"element {end} of {list(shape)} is on no rank, the first that is missing")
    return found


def _with_elements(shape: Sequence[int], found: Mapping[int, list[Box]]) -> dict[int, list[Box]]:
    if not math.prod(shape):
        return {next(iter(found), 0): [whole_box(shape)]}
    kept = {rank: [box for box in boxes if box.numel] for rank, boxes in found.items()}
    return {rank: boxes for rank, boxes in kept.items() if boxes}


def _moved(box: Box, offsets: Sequence[int]) -> Box:
    return Box(tuple(a + b for a, b in zip(box.offsets, offsets, strict=True)), box.sizes)


def _box(spans: Sequence[tuple[int, int]]) -> Box:
    return Box(tuple(begin for begin, _ in spans), tuple(end - begin for begin, end in spans))


def _spans(size: int, cuts: Sequence[tuple[int, int]]) -> dict[tuple[int, ...], list[tuple[int, int]]]:
    """What each place has of a dimension, as (begin, end), that is cut into (parts, strides) one after the other."""
    table: dict[tuple[int, ...], list[tuple[int, int]]] = {(): [(0, size)]}
    for parts, strides in cuts:
        table = {
            (*place, part): _strided_part(spans, parts, strides, part)
            for place, spans in table.items()
            for part in range(parts)
        }
    return table


def _strided_part(spans: Sequence[tuple[int, int]], parts: int, strides: int, part: int) -> list[tuple[int, int]]:
    """The same part of each stride, which are equal parts themselves."""
    found: list[tuple[int, int]] = []
    for stride in range(strides):
        for begin, end in _part(_part(spans, strides, stride), parts, part):
            if found and found[-1][1] == begin:
                begin = found.pop()[0]
            found.append((begin, end))
    return found


def _part(spans: Sequence[tuple[int, int]], parts: int, part: int) -> list[tuple[int, int]]:
    """As ``torch.chunk`` cuts: the last parts are smaller, or there are none."""
    total = sum(end - begin for begin, end in spans)
    step = -(-total // parts)
    first, stop = min(part * step, total), min((part + 1) * step, total)
    found = []
    for begin, end in spans:
        if max(first, 0) < min(stop, end - begin):
            found.append((begin + max(first, 0), begin + min(stop, end - begin)))
        first, stop = first - (end - begin), stop - (end - begin)
    return found


def _placement_between(one: Sequence[Box], other: Sequence[Box], sizes: Sequence[int], once: bool) -> Placement:
    """The placement in a dimension of a mesh whose first two ranks have these blocks, as far as they tell it.

    Args:
        sizes: of the blocks before they are cut along it.
    """
    if not other and not once and 1 in sizes:  # one row for all of them
        return ShardAlong(sizes.index(1))
    if len(one) == len(other) == 1:
        for dim, (here, there) in enumerate(zip(one[0].offsets, other[0].offsets, strict=True)):
            if here != there:
                return ShardAlong(dim)
    return Replicate()


def _describe(boxes: Sequence[Box]) -> str:
    said = [f"the block at {list(box.offsets)} of size {list(box.sizes)}" for box in boxes]
    return " and ".join(said) or "nothing"
