"""Shards gathered into the tensors of a state dict, and filled from them.

Tensors are whole on all ranks, whole on rank 0, or in chunks of rows.
"""

import contextlib
import contextvars
import functools
import itertools
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.output.profile import Phase, profile
from hpcfsdp.params.layout import Box, Run
from hpcfsdp.reshard.boxes import chunk_box, whole_box
from hpcfsdp.reshard.placements import mesh_blocks
from hpcfsdp.reshard.redistribute import BoxesOf, ShardedBlocks, batches
from hpcfsdp.reshard.sharded_tensors import (
    all_boxes,
    create_chunk_dtensor,
    create_chunk_sharded_tensor,
    is_distributed,
    is_sharded,
    local_blocks,
    properties_of,
    ranks_of_tensor,
)
from hpcfsdp.reshard.tiling import find_fault
from hpcfsdp.state.settings import StateDictFormat
from hpcfsdp.state.tensors import LocalShards, Rank0Tensor, shape_and_dtype
from hpcfsdp.units.unit_mesh import Dim, UnitMesh


@torch.no_grad()
def gather(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, device: torch.device, form: StateDictFormat
) -> list[Any]:
    """Return what a state dict shows of `parts`, by slot; None for nothing. Collective over a replica of the unit.

    Results are new memory. Beyond it this allocates one gathered flat parameter where all ranks get whole tensors, and
    otherwise a few parameters. Ranks that `form` leaves out need not call this if they are of another replica.

    Args:
        dtype, device: of the parts. Chunks of a sharded result are stored there, too, unless they are offloaded.
    """
    target, found = form.device(device), {}
    if form.sharded and mesh.strategy is not ShardingStrategy.NO_SHARD:
        found = _gather_chunks(mesh, parts, dtype, target, form)
    elif form.rank0_only:
        if form.is_made_by(mesh):
            blocks = parts.over(mesh, "shard", "tensor")
            found = _gather_boxes(blocks, parts, parts.present, _all_on_first(blocks), dtype, target)
    elif mesh.tensor is None:
        found = _gather_everywhere(mesh.shard, parts, dtype, target)
    else:
        found = _gather_everywhere(mesh.shard, parts, dtype, mesh.tensor.device)
        found = {index: _join_blocks(mesh.tensor, parts, index, block).to(target) for index, block in found.items()}
    return [found.get(index) for index in range(len(parts.layout.slots))]


def _all_on_first(blocks: ShardedBlocks) -> BoxesOf:
    """Return the boxes of a distribution in which the first rank has everything."""
    slots = blocks.layout.slots
    return lambda rank, index: [whole_box(slots[index].whole_shape)] if blocks.places[rank] == (0, 0) else ()


def _gather_boxes(
    blocks: ShardedBlocks,
    parts: LocalShards,
    chosen: Collection[int],
    boxes: BoxesOf,
    dtype: torch.dtype,
    target: torch.device,
) -> dict[int, torch.Tensor]:
    """Return this rank's box of each of the `chosen` slots, if any. Collective over the ranks of `blocks`."""
    found = {
        index: torch.empty(box.sizes, dtype=dtype, device=target)
        for index in chosen
        for box in boxes(blocks.comm.rank, index)
    }
    if chosen:
        shards = {index: parts.tensors[index] for index in chosen}
        blocks.gather(shards, boxes, {index: tensor.view(-1) for index, tensor in found.items()}, dtype)
    return found


def _gather_everywhere(
    comm: Communicator, parts: LocalShards, dtype: torch.dtype, target: torch.device
) -> dict[int, torch.Tensor]:
    """Return whole tensors, or whole blocks of them, on all ranks. Collective over the shards."""
    layout, present = parts.layout, parts.present
    if not present:
        return {}
    if comm.size == 1:
        found = {index: torch.empty(layout.slots[index].shape, dtype=dtype, device=target) for index in present}
        for index, piece in parts.pieces(0).items():
            found[index].copy_(piece.tensor.view(found[index].shape))
        return found
    shard, full = parts.assembled(comm.rank, comm.device, dtype), _scratch(layout.padded_numel, dtype, comm.device)
    comm.all_gather_into_tensor(full, shard)
    with profile(Phase.DEVICE_TO_HOST, full.nbytes) if target.type != full.device.type else contextlib.nullcontext():
        chosen = ((index, layout.slots[index]) for index in present)
        return {index: full[slot.offset : slot.end].view(slot.shape).to(target, copy=True) for index, slot in chosen}


def _join_blocks(comm: Communicator, parts: LocalShards, index: int, local: torch.Tensor) -> torch.Tensor:
    """Return the whole of a slot that they may have divided into blocks. Collective over the tensor-parallel ranks."""
    slot, block = parts.layout.slots[index], parts.layout.slots[index].block
    if not slot.is_cut:
        return local
    boxes = [box if rank in block.owners else Box((0,), (0,)) for rank, box in enumerate(block.boxes)]
    outputs = [local.new_empty(box.sizes) for box in boxes]
    comm.all_gather(outputs, local.contiguous() if comm.rank in block.owners else local.new_empty(0))
    whole = local.new_empty(block.shape)
    for rank in block.owners:
        whole[block.boxes[rank].slices].copy_(outputs[rank])
    return whole


@contextlib.contextmanager
def keeping_scratch() -> Iterator[None]:
    """Return a context in which memory to gather in is allocated once: new one costs as much as the copy."""
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


_kept: contextvars.ContextVar[dict[torch.device, torch.Tensor] | None] = contextvars.ContextVar("scratch", default=None)


def _scratch(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    kept, nbytes = _kept.get(), numel * dtype.itemsize
    if kept is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if device not in kept or kept[device].numel() < nbytes:
        kept[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return kept[device][:nbytes].view(dtype)


def _gather_chunks(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, target: torch.device, form: StateDictFormat
) -> dict[int, Any]:
    """Return each tensor as this rank's chunk of rows, one without dimensions as it is. Collective over a replica."""
    slots, present = parts.layout.slots, parts.present

    def chunk(rank: int, index: int) -> Sequence[Box]:
        shape = slots[index].shape
        box = chunk_box(shape, mesh.shard.size, rank) if shape else Box((), ())
        return () if box is None else (box,)

    whole, divided = ([i for i in present if slots[i].is_cut is is_cut] for is_cut in (False, True))
    local = _gather_boxes(parts.over(mesh, "shard"), parts, whole, chunk, dtype, target)
    if divided:
        blocks, ranks, tables = parts.over(mesh, "shard", "tensor"), mesh.ranks("shard", "tensor"), {}
        for index in divided:
            device_mesh, placements = mesh.placed(slots[index].block)
            tables[index] = mesh_blocks(slots[index].whole_shape, device_mesh.mesh, placements)
        local |= _gather_boxes(blocks, parts, divided, lambda rank, i: [tables[i][ranks[rank]]], dtype, target)
    found: dict[int, Any] = {}
    for index in present:
        described = local.get(index), slots[index].whole_shape, dtype, target
        if not slots[index].whole_shape:
            found[index] = local[index]
        elif mesh.device_mesh is not None or mesh.tensor is not None or form.dtensor:
            found[index] = create_chunk_dtensor(*described, *mesh.placed(slots[index].block))
        else:
            shard_ranks = mesh.ranks("shard")
            found[index] = create_chunk_sharded_tensor(*described, mesh.process_group(), shard_ranks)
    return found


@torch.no_grad()
def scatter(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> None:
    """Do the opposite of ``gather``. Collective over the ranks of `mesh`, unless all of `values` are plain tensors.

    All ranks refuse distributed tensors that are not on these ranks, or have no blocks of values, before they fill any.

    Args:
        parts: filled, converting to their dtype. What belongs to no slot is left alone.
        values: for each slot a tensor of its shape that every rank has whole, or a distributed one on
            ``mesh.dtensor_ranks``, or a ``Rank0Tensor``, or None to leave it alone; on all ranks alike.
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
            parts.memory_of(run).copy_(_flat(own)[run.start : run.start + run.numel])
    for dims, boxes in tables.items():
        blocks = parts.over(mesh, *dims)
        _scatter_boxes(blocks, parts, values, boxes, lambda rank, index, boxes=boxes: boxes[index][rank])
    from_rank0 = [index for index, value in enumerate(values) if isinstance(value, Rank0Tensor)]
    if from_rank0 and mesh.is_first("replicate"):
        blocks = parts.over(mesh, "shard", "tensor")
        _scatter_boxes(blocks, parts, values, from_rank0, _all_on_first(blocks))
    if from_rank0 and mesh.size("replicate") > 1:
        _copy_from_first_replica(mesh, parts, from_rank0)


def _scatter_boxes(
    blocks: ShardedBlocks, parts: LocalShards, values: Sequence[Any], chosen: Collection[int], boxes: BoxesOf
) -> None:
    """Fill the `chosen` slots from values that have `boxes` on ranks. Collective over the ranks of `blocks`."""
    by_dtype: dict[torch.dtype, list[int]] = {}
    for index in sorted(chosen):
        by_dtype.setdefault(shape_and_dtype(values[index])[1], []).append(index)
    for dtype, alike in by_dtype.items():
        shards = {index: parts.tensors[index] for index in alike}
        blocks.scatter(lambda index: _stored(values[index]), boxes, shards, dtype)


def _copy_from_first_replica(mesh: UnitMesh, parts: LocalShards, chosen: Collection[int]) -> None:
    """Copy the runs of `chosen` slots, a batch at a time. Collective over ``mesh.replicate``."""
    replicate, by_dtype = mesh.replicate, dict[torch.dtype, list[Run]]()
    for run in (run for run in parts.runs(mesh.shard.rank) if run.index in chosen):
        by_dtype.setdefault(parts.tensors[run.index].dtype, []).append(run)
    groups = batches([slot.numel for slot in parts.layout.slots])
    for group, alike in itertools.product(groups, by_dtype.values()):
        places = [parts.memory_of(run) for run in alike if run.index in group]
        if places:
            packed = torch.cat(places).to(replicate.device)
            replicate.broadcast(packed, 0)
            for place, values in zip(places, packed.split([place.numel() for place in places]), strict=True):
                place.copy_(values)


def lies_on_dtensor_ranks(mesh: UnitMesh, value: ShardedTensor | DTensor) -> bool:
    """Return whether a tensor is on ``mesh.dtensor_ranks`` alone. Not collective, once their names are known."""
    return set(mesh.ranks(mesh.dtensor_dim)).issuperset(ranks_of_tensor(value))


def check_blocks(key: str, value: ShardedTensor | DTensor, ranks: Sequence[int]) -> None:
    """Check that `ranks` of the world, see ``UnitMesh.ranks``, have all of a distributed tensor. Not collective."""
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
    """Return the boxes of a distributed tensor, for each of `ranks`; of replicas, those of the first rank alone."""
    check_blocks(key, value, ranks)
    everywhere, seen, found = all_boxes(value), set[Box](), []
    for rank in ranks:
        boxes = everywhere.get(rank, [])
        found.append([] if seen.issuperset(boxes) else boxes)
        seen.update(boxes)
    return found


def _local_if_replicated(mesh: UnitMesh, value: Any) -> Any:
    """Return the plain tensor of a ``DTensor`` that every rank has whole; any other value as it is."""
    is_replicated = isinstance(value, DTensor) and not is_sharded(value)
    if is_replicated and set(ranks_of_tensor(value)).issuperset(mesh.ranks(mesh.dtensor_dim)):
        return value.to_local()
    return value


def _stored(value: Any) -> torch.Tensor | None:
    """Return this rank's memory of a distributed tensor, block after block, or of a ``Rank0Tensor``; 1-D."""
    if isinstance(value, Rank0Tensor):
        return None if value.tensor is None else _flat(value.tensor)
    blocks = [_flat(block) for _, block in local_blocks(value)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else None


def _flat(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.detach().reshape(-1)
