"""Tensors of a state dict scattered into shards, whether all ranks have them, rank 0 alone, or each a part."""

from __future__ import annotations

import functools
from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.layout import Box, Run
from hpcfsdp.reshard.blocks import BoxesOf, ShardedBlocks
from hpcfsdp.reshard.boxes import whole_box
from hpcfsdp.reshard.move import batches
from hpcfsdp.reshard.sharded_tensors import all_boxes, is_distributed, local_blocks, properties_of, ranks_of_tensor
from hpcfsdp.reshard.tiling import find_fault
from hpcfsdp.state.shards import LocalShards
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from hpcfsdp.units.unit_mesh import Dim, UnitMesh


@torch.no_grad()
def scatter(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> None:
    """Collective over the ranks of `mesh`, unless all of `values` are plain tensors. The way back from ``gather``.

    Args:
        parts: filled, converting to their dtype. What belongs to no slot is left alone.
        values: for each slot a tensor that every rank has whole, a ``ShardedTensor`` or ``DTensor`` over
            ``mesh.dtensor_ranks``, a ``Rank0Tensor``, or None to leave it alone; on all ranks alike, of the slot's
            shape.

    Raises:
        StateDictError: a distributed tensor is on other ranks, or not all of it on these, or it is a ``DTensor`` of
            a placement that is no block of values. Raised by all ranks, before anything is filled.
    """
    values = [_local_if_replicated(mesh, value) for value in values]
    tables: dict[tuple[Dim, ...], dict[int, list[list[Box]]]] = {}
    for index, (slot, value) in enumerate(zip(parts.layout.slots, values, strict=True)):
        if is_distributed(value):
            across = mesh.tensor is not None and not lies_on_dtensor_ranks(mesh, value)
            dims: tuple[Dim, ...] = (mesh.dtensor_dim, "tensor") if across else (mesh.dtensor_dim,)
            tables.setdefault(dims, {})[index] = _boxes_by_rank(slot.fqn, value, mesh.ranks(*dims))
    for run in parts.runs(mesh.shard.rank):
        value, slot = values[run.index], parts.layout.slots[run.index]
        if isinstance(value, torch.Tensor) and not is_distributed(value):
            own = value[slot.block.box.slices] if slot.is_cut else value
            _place(parts, run).copy_(_flat(own)[run.start : run.start + run.numel])
    for dims, boxes in tables.items():
        blocks = parts.over(mesh, *dims)
        _scatter_boxes(blocks, parts, values, boxes, lambda rank, index, boxes=boxes: boxes[index][rank])
    from_rank0 = [index for index, value in enumerate(values) if isinstance(value, Rank0Tensor)]
    if from_rank0:
        _scatter_from_rank0(mesh, parts, values, from_rank0)


def _scatter_from_rank0(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any], chosen: Collection[int]) -> None:
    """Collective over the ranks of `mesh`. Fill the first replica from its first rank, then the others from it."""
    if mesh.is_first("replicate"):
        blocks, slots = parts.over(mesh, "shard", "tensor"), parts.layout.slots

        def boxes(rank: int, index: int) -> Sequence[Box]:
            return [whole_box(slots[index].whole_shape)] if blocks.places[rank] == (0, 0) else ()

        _scatter_boxes(blocks, parts, values, chosen, boxes)
    if mesh.size("replicate") > 1:
        _copy_from_first_replica(mesh, parts, chosen)


def _scatter_boxes(
    blocks: ShardedBlocks,
    parts: LocalShards,
    values: Sequence[Any],
    chosen: Collection[int],
    boxes: BoxesOf,
) -> None:
    """Collective over the ranks of `blocks`. Fill the `chosen` slots from values that have `boxes` on ranks."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in sorted(chosen):
        by_dtype.setdefault(shape_and_dtype(values[index])[1], []).append(index)
    for dtype, alike in by_dtype.items():
        shards = {index: parts.tensors[index] for index in alike}
        blocks.scatter(lambda index: _stored(values[index]), boxes, shards, dtype)


def _copy_from_first_replica(mesh: UnitMesh, parts: LocalShards, chosen: Collection[int]) -> None:
    """Collective over ``mesh.replicate``. The runs of `chosen` slots, a batch at a time."""
    replicate, runs = mesh.replicate, [run for run in parts.runs(mesh.shard.rank) if run.index in chosen]
    by_dtype: dict[torch.dtype, list[Run]] = {}
    for run in runs:
        by_dtype.setdefault(parts.tensors[run.index].dtype, []).append(run)
    groups = batches([slot.numel for slot in parts.layout.slots])
    for group, alike in ((group, alike) for group in groups for alike in by_dtype.values()):
        places = [_place(parts, run) for run in alike if run.index in group]
        if places:
            packed = torch.cat(places).to(replicate.device)
            replicate.broadcast(packed, 0)
            for place, values in zip(places, packed.split([place.numel() for place in places]), strict=True):
                place.copy_(values)


def lies_on_dtensor_ranks(mesh: UnitMesh, value: ShardedTensor | DTensor) -> bool:
    """Whether a distributed tensor is on ``mesh.dtensor_ranks`` alone: other tensor-parallel ranks have one like it.

    Not collective, once these ranks know each other's names.
    """
    return set(mesh.ranks(mesh.dtensor_dim)).issuperset(ranks_of_tensor(value))


def check_blocks(key: str, value: ShardedTensor | DTensor, ranks: Sequence[int]) -> None:
    """Check that the ranks that share a unit have all of a distributed tensor. Not collective.

    Args:
        ranks: those of the world, see ``UnitMesh.ranks``.

    Raises:
        StateDictError: they have not all of it, or it is a ``DTensor`` that is not made of blocks.
    """
    try:
        boxes = all_boxes(value)
    except ValueError as error:
        raise StateDictError(f"{key!r}: {error}") from None
    if not _is_tiled(properties_of(value)[0], frozenset(box for rank in ranks for box in boxes.get(rank, ()))):
        raise StateDictError(
            f"{key!r}: its {type(value).__name__} is on the ranks {sorted(boxes)}, but the ranks of the model "
            f"({sorted(ranks)}) do not hold all of it: load it for these ranks, or gather it"
        )


@functools.lru_cache(maxsize=256)  # a model has few shapes, and many tensors
def _is_tiled(shape: tuple[int, ...], boxes: frozenset[Box]) -> bool:
    return find_fault(shape, list(boxes)) is None


def _boxes_by_rank(key: str, value: ShardedTensor | DTensor, ranks: Sequence[int]) -> list[list[Box]]:
    """The boxes of a distributed tensor, for each of `ranks`; of replicas, those of the first rank alone."""
    check_blocks(key, value, ranks)
    everywhere, seen, found = all_boxes(value), set[Box](), []
    for rank in ranks:
        boxes = everywhere.get(rank, [])
        found.append([] if seen.issuperset(boxes) else boxes)
        seen.update(boxes)
    return found


def _local_if_replicated(mesh: UnitMesh, value: Any) -> Any:
    """The plain tensor of a ``DTensor`` that every rank has whole, which needs no communication; else the value."""
    if isinstance(value, DTensor) and all(placement.is_replicate() for placement in value.placements):
        members = set(value.device_mesh.mesh.flatten().tolist())
        if members.issuperset(mesh.ranks(mesh.dtensor_dim)):
            return value.to_local()
    return value


def _stored(value: Any) -> torch.Tensor | None:
    """This rank's memory of a distributed tensor, block after block, or of a ``Rank0Tensor``; 1-D."""
    if isinstance(value, Rank0Tensor):
        return None if value.tensor is None else _flat(value.tensor)
    blocks = [_flat(block) for _, block in local_blocks(value)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)


def _place(parts: LocalShards, run: Run) -> torch.Tensor:
    """The memory of a run, as a view."""
    return parts.tensors[run.index][run.offset : run.offset + run.numel]
