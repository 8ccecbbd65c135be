"""Shards gathered into the tensors of a state dict: whole on all ranks, whole on rank 0, or in chunks of rows."""

from __future__ import annotations

import contextlib
import contextvars
from collections.abc import Collection, Iterator, Sequence
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy

from hpcfsdp.comm import Communicator
from hpcfsdp.output.profile import Phase, profile
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.blocks import BoxesOf, ShardedBlocks
from hpcfsdp.reshard.boxes import chunk_box, whole_box
from hpcfsdp.reshard.placements import mesh_blocks
from hpcfsdp.reshard.sharded_tensors import create_chunk_dtensor, create_chunk_sharded_tensor
from hpcfsdp.state.settings import StateDictFormat
from hpcfsdp.state.shards import LocalShards
from hpcfsdp.units.unit_mesh import UnitMesh


@torch.no_grad()
def gather(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, device: torch.device, form: StateDictFormat
) -> list[Any]:
    """Collective over a replica of the unit. What a state dict shows of `parts`, for each slot; None for nothing.

    Results are new memory. Beyond it this allocates one gathered flat parameter where all ranks get whole tensors, and
    otherwise a few parameters.

    Args:
        dtype, device: of the parts. Chunks of a sharded result are stored there, too, unless they are offloaded.
        form: ranks that it leaves out get None for all slots, and need not call this if they are of another replica.
    """
    target = form.device(device)
    if form.sharded and mesh.strategy is not ShardingStrategy.NO_SHARD:
        found = _gather_chunks(mesh, parts, dtype, target, form)
    elif form.rank0_only:
        found = _gather_to_rank0(mesh, parts, dtype, target) if form.is_made_by(mesh) else {}
    elif mesh.tensor is None:
        found = _gather_everywhere(mesh.shard, parts, dtype, target)
    else:
        found = _gather_everywhere(mesh.shard, parts, dtype, mesh.tensor.device)
        found = {index: _join_blocks(mesh.tensor, parts, index, block).to(target) for index, block in found.items()}
    return [found.get(index) for index in range(len(parts.layout.slots))]


def _gather_to_rank0(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, target: torch.device
) -> dict[int, torch.Tensor]:
    """Collective over the first replica. Whole tensors on its first rank, nothing on the others."""
    blocks, slots = parts.over(mesh, "shard", "tensor"), parts.layout.slots

    def boxes(rank: int, index: int) -> Sequence[Box]:
        return [whole_box(slots[index].whole_shape)] if blocks.places[rank] == (0, 0) else ()

    return _gather_boxes(blocks, parts, parts.present, boxes, dtype, target)


def _gather_boxes(
    blocks: ShardedBlocks,
    parts: LocalShards,
    chosen: Collection[int],
    boxes: BoxesOf,
    dtype: torch.dtype,
    target: torch.device,
) -> dict[int, torch.Tensor]:
    """Collective over the ranks of `blocks`. The one box that this rank gets of each of the `chosen` slots, if any."""
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
    """Collective over the shards. Whole tensors, or whole blocks of them, on all ranks."""
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
    """Collective over the tensor-parallel ranks. The whole of a slot that they may have cut into blocks."""
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
    """A context in which memory for what is gathered is allocated once, as large as the largest flat parameter.

    New memory costs the host as much as the copy that comes after.
    """
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
    """Collective over a replica. Each tensor as this rank's chunk of its rows; one without dimensions as it is."""
    slots, present = parts.layout.slots, parts.present

    def chunk(rank: int, index: int) -> Sequence[Box]:
        shape = slots[index].shape
        box = chunk_box(shape, mesh.shard.size, rank) if shape else Box((), ())
        return () if box is None else (box,)

    uncut, cut = ([index for index in present if slots[index].is_cut is is_cut] for is_cut in (False, True))
    local = _gather_boxes(parts.over(mesh, "shard"), parts, uncut, chunk, dtype, target)
    if cut:
        local |= _gather_boxes(
            parts.over(mesh, "shard", "tensor"), parts, cut, _chunks_of_blocks(mesh, parts, cut), dtype, target
        )
    found: dict[int, Any] = {}
    for index in present:
        shape = slots[index].whole_shape
        described = local.get(index), shape, dtype, target
        if not shape:
            found[index] = local[index]
        elif mesh.device_mesh is not None or mesh.tensor is not None or form.dtensor:
            found[index] = create_chunk_dtensor(*described, *mesh.placed(slots[index].block))
        else:
            ranks = mesh.ranks("shard")
            found[index] = create_chunk_sharded_tensor(*described, mesh.process_group(), ranks)
    return found


def _chunks_of_blocks(mesh: UnitMesh, parts: LocalShards, cut: Collection[int]) -> BoxesOf:
    """Collective over the ranks of the unit, the first time. The chunks of parameters that are cut twice."""
    ranks, tables = mesh.ranks("shard", "tensor"), {}
    for index in cut:
        slot = parts.layout.slots[index]
        device_mesh, placements = mesh.placed(slot.block)
        tables[index] = mesh_blocks(slot.whole_shape, device_mesh.mesh, placements)
    return lambda rank, index: [tables[index][ranks[rank]]]
