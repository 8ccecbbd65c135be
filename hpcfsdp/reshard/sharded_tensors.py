"""``ShardedTensor`` and ``DTensor``, torch's own classes, made from local blocks, and read as blocks."""

import copy
import itertools
from collections.abc import Iterable, Mapping, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
import xxhash
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp import _compat, accelerator
from hpcfsdp._compat import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import chunk_box
from hpcfsdp.reshard.placements import block_at, mesh_blocks, mesh_boxes


def is_distributed(value: Any) -> bool:
    """Return whether a value is a ``ShardedTensor`` or a ``DTensor``."""
    return isinstance(value, (ShardedTensor, DTensor))


def metadata_of_boxes(
    shape: Sequence[int],
    boxes: Iterable[tuple[int, Box]],
    properties: TensorProperties,
    device: torch.device,
    devices_per_node: int | None = None,
) -> ShardedTensorMetadata:
    """Return the metadata of a tensor whose shards are `boxes`, each with its global rank. Not collective.

    Each element is in one box. Of a GPU the number follows from the rank's place on its node, where there are
    `devices_per_node`, by default as many as here.
    """
    shards = [
        ShardMetadata(list(box.offsets), list(box.sizes), placement_of(rank, device, devices_per_node))
        for rank, box in boxes
    ]
    return ShardedTensorMetadata(shards, torch.Size(shape), properties)


def placement_of(rank: int, device: torch.device, devices_per_node: int | None = None) -> str:
    """Return the placement of a rank's shard, as torch writes it, if this rank's is on `device`. Not collective."""
    if device.type in ("cpu", "meta"):  # a rank has one
        return f"rank:{rank}/{device.type}"
    visible = devices_per_node or accelerator.device_count()
    index = device.index if rank == dist.get_rank() else rank % max(1, visible)
    return f"rank:{rank}/{device.type}:{index}"


def box_of(shard: ShardMetadata) -> Box:
    """Return the block of a shard in its tensor."""
    return Box(tuple(shard.shard_offsets), tuple(shard.shard_sizes))


def copied(shard: ShardMetadata) -> ShardMetadata:
    """Return a copy with lists of its own. Not constructed: torch refuses invalid ones without naming them."""
    copied = copy.copy(shard)
    copied.shard_offsets, copied.shard_sizes = list(shard.shard_offsets), list(shard.shard_sizes)
    return copied


def create_sharded_tensor(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    boxes: Mapping[int, Box],
    devices_per_node: int | None = None,
) -> ShardedTensor:
    """Return a tensor of `shape` with at most one block on each rank of `group`, by global rank. Not collective.

    `local` is this rank's block, on `device`, None if it has none. The rest is as for ``metadata_of_boxes``.
    """
    properties = TensorProperties(dtype=dtype, pin_memory=local is not None and local.is_pinned())
    whole = metadata_of_boxes(shape, boxes.items(), properties, device, devices_per_node)
    mine = [Shard(local, shard) for shard in whole.shards_metadata if shard.placement.rank() == dist.get_rank()]
    return _compat.sharded_tensor(mine, whole, group)


def create_chunk_sharded_tensor(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    group: dist.ProcessGroup,
    ranks: Sequence[int],
    devices_per_node: int | None = None,
) -> ShardedTensor:
    """Return a tensor of `shape` whose rows are chunked over `ranks`, the global ranks of `group`. Not collective."""
    chunks = ((rank, chunk_box(shape, len(ranks), chunk)) for chunk, rank in enumerate(ranks))
    boxes = {rank: box for rank, box in chunks if box is not None}
    return create_sharded_tensor(local, shape, dtype, device, group, boxes, devices_per_node)


def create_chunk_dtensor(
    local: torch.Tensor | None,
    shape: Sequence[int],
    dtype: torch.dtype,
    device: torch.device,
    mesh: DeviceMesh,
    placements: Sequence[Placement],
) -> DTensor:
    """Return a tensor of `shape` with one block on this rank of a mesh, None if it is empty. Not collective."""
    if local is None:
        box = block_at(shape, mesh.shape, placements, mesh.get_coordinate())
        local = torch.empty(box.sizes, dtype=dtype, device=device)
    strides = torch.empty(shape, device="meta").stride()
    return _compat.dtensor(local, mesh, placements, shape, strides)


def local_blocks(tensor: ShardedTensor | DTensor) -> list[tuple[Box, torch.Tensor]]:
    """Return this rank's blocks of a distributed tensor, in the order of ``all_boxes``."""
    if isinstance(tensor, ShardedTensor):
        blocks = {box_of(shard.metadata): shard.tensor for shard in tensor.local_shards()}
        return sorted(blocks.items())
    local, boxes = tensor.to_local(), all_boxes(tensor).get(dist.get_rank(), [])
    if len(boxes) == 1:
        return [(boxes[0], local)]
    return [(box, local[places]) for box, places in zip(boxes, _places(boxes), strict=True)]


def check_readable(key: str, value: Any) -> None:
    """Check that a tensor, or the local part of a distributed one, has dense values to be copied. Not collective."""
    if isinstance(value, ShardedTensor):
        blocks = [shard.tensor for shard in value.local_shards()]
    elif isinstance(value, DTensor):
        blocks = [value.to_local()]
    else:
        blocks = [value] if isinstance(value, torch.Tensor) else []
    for block in blocks:
        if block.is_meta:
            raise StateDictError(f"{key!r} is on the meta device, and has no values: load the file onto a real one")
        if block.is_nested or block.layout is not torch.strided:
            layout = "nested" if block.is_nested else str(block.layout).removeprefix("torch.")
            raise StateDictError(f"{key!r} is {layout}, and the model has dense tensors: convert it with to_dense()")
        if block.is_quantized:
            raise StateDictError(f"{key!r} is quantized ({block.dtype}): pass its values, which dequantize() gives")


def properties_of(tensor: torch.Tensor) -> tuple[tuple[int, ...], torch.dtype]:
    """Return shape and dtype of a tensor, whole if it is distributed. ``ShardedTensor`` warns of other questions."""
    if isinstance(tensor, ShardedTensor):
        metadata = tensor.metadata()
        return tuple(metadata.size), metadata.tensor_properties.dtype
    return tuple(tensor.shape), tensor.dtype


def ranks_of_tensor(tensor: ShardedTensor | DTensor) -> list[int]:
    """Return the global ranks of a distributed tensor, also those without elements."""
    if isinstance(tensor, ShardedTensor):
        return dist.get_process_group_ranks(_compat.group_of_shards(tensor))
    return tensor.device_mesh.mesh.flatten().tolist()


def all_boxes(tensor: ShardedTensor | DTensor) -> dict[int, list[Box]]:
    """Return the blocks of a distributed tensor, replicas too, by global rank in ascending order. Not collective."""
    found: dict[int, list[Box]] = {}
    if isinstance(tensor, ShardedTensor):
        for shard in tensor.metadata().shards_metadata:
            found.setdefault(shard.placement.rank(), []).append(box_of(shard))
        return {rank: sorted(boxes) for rank, boxes in found.items()}
    return mesh_boxes(tensor.shape, tensor.device_mesh.mesh, tensor.placements)


def _places(boxes: Sequence[Box]) -> list[tuple[slice, ...]]:
    """Return the places of blocks in a local tensor that consists of them, side by side in each dimension."""
    begins: list[dict[int, int]] = []
    for dim in range(len(boxes[0].offsets) if boxes else 0):
        sizes = dict(sorted((box.offsets[dim], box.sizes[dim]) for box in boxes))
        begins.append(dict(zip(sizes, itertools.accumulate(sizes.values(), initial=0), strict=False)))
    return [
        tuple(slice(at[begin], at[begin] + size) for at, begin, size in zip(begins, *box, strict=True)) for box in boxes
    ]


class Placed(NamedTuple):
    """How the tensor of a block is placed: ``pre_flatten_transform`` returns it for the way back."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


def local_block(tensor: DTensor) -> torch.Tensor:
    """Return this rank's block in its memory, which wants a gradient if `tensor` does. Not collective."""
    return _compat.local_of(tensor).detach().requires_grad_(tensor.requires_grad)


def as_dtensor(block: torch.Tensor, placed: Placed) -> DTensor:
    """Return the ``DTensor`` of `block`, to which gradients come, redistributed to its placements. Not collective."""
    mesh, placements, shape, stride = placed
    return DTensor.from_local(block, mesh, placements, run_check=False, shape=shape, stride=stride)


def blocks_of(tensor: DTensor) -> dict[int, Box]:
    """Return the block of each rank of a ``DTensor``'s mesh, in row-major order, as ``mesh_blocks``. Not collective."""
    return mesh_blocks(tensor.shape, tensor.device_mesh.mesh, tensor.placements)


def is_sharded(tensor: torch.Tensor) -> bool:
    """Return whether it is a ``DTensor`` with different parts on ranks, or with pending sums."""
    return isinstance(tensor, DTensor) and not all(placement.is_replicate() for placement in tensor.placements)


def full_tensor(tensor: torch.Tensor) -> torch.Tensor:
    """Return it whole; any other tensor as it is here. Collective over the mesh of a sharded ``DTensor``."""
    return tensor.detach().full_tensor() if is_sharded(tensor) else _compat.local_of(tensor).detach()


@torch.no_grad()
def fill_block(target: torch.Tensor, whole: torch.Tensor) -> None:
    """Not collective. Copy this rank's part of a tensor that it has whole into a ``DTensor``, or all of it."""
    if isinstance(target, DTensor):
        for box, block in local_blocks(target.detach()):
            block.copy_(whole[box.slices])
    else:
        target.detach().copy_(whole)


def as_bytes(tensor: torch.Tensor) -> np.ndarray:
    """Not collective. Return the memory of a contiguous tensor on the CPU: uint8, 1-D, not copied.

    ``Tensor.numpy`` would mark its storage for good: ``resize_`` of a buffer fails afterwards.
    """
    place = {"data": (tensor.data_ptr(), False), "shape": (tensor.nbytes,), "typestr": "|u1", "version": 3}
    holder = SimpleNamespace(__array_interface__=place, tensor=tensor)  # which the array keeps
    return np.asarray(holder) if tensor.nbytes else np.empty(0, np.uint8)


@torch.no_grad()
def checksum(tensor: torch.Tensor) -> int:
    """Not collective. Return a checksum of a tensor's bits, 0 for one without plain memory."""
    if isinstance(tensor, DTensor) and not is_sharded(tensor):  # if it is sharded, ranks hold different blocks
        tensor = tensor.to_local()
    plain = type(tensor) in (torch.Tensor, nn.Parameter)
    if not plain or tensor.layout is not torch.strided or tensor.is_meta or tensor.is_quantized:
        return 0
    data = tensor.detach().resolve_conj().resolve_neg().contiguous().view(-1).view(torch.uint8)
    if data.device.type != "cpu" and data.numel() > 1 << 16:
        return int(data.sum(dtype=torch.int64))  # only a number leaves the device
    return xxhash.xxh3_64_intdigest(as_bytes(data.cpu()))
