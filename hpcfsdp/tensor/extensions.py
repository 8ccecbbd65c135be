"""What a sharding engine needs to know of DTensors, under the names of ``torch.distributed.tensor.parallel.fsdp``.

Blocks are exact: for tensors that no number of ranks divides, and on meshes of any dimensions. The engine itself goes
by plans (``state.blocks``); these are for programs that called torch's.
"""

from __future__ import annotations

import contextlib
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch.distributed._shard.sharding_spec import ChunkShardingSpec
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard as ShardAlong

from hpcfsdp import _compat
from hpcfsdp._compat import Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.flat.layout import Box
from hpcfsdp.tensor.runs import chunk_box
from hpcfsdp.tensor.sharded import all_boxes, create_chunk_sharded_tensor


class Placed(NamedTuple):
    """How the tensor lies that a block is part of: what ``pre_flatten_transform`` keeps for the way back."""

    mesh: DeviceMesh
    placements: tuple[Any, ...]
    shape: torch.Size
    stride: tuple[int, ...]


class DTensorExtensions:
    """The steps in which an engine that shards plain tensors goes from DTensors to their blocks, and back."""

    def __init__(self, device_handle: Any = None) -> None:
        """
        Args:
            device_handle: the module of the device, as ``torch.cuda``; None for a device without streams.
        """
        self.device_handle = device_handle
        self.compute_stream: Any = None
        """Where blocks become DTensors; None for the current stream."""

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Placed | None]:
        """Not collective. This rank's block of a ``DTensor``, and how it is placed; any other tensor, and None."""
        if not isinstance(tensor, DTensor):
            return tensor, None
        placed = Placed(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        return _compat.local_of(tensor), placed

    def post_unflatten_transform(self, tensor: torch.Tensor, placed: Placed | None) -> torch.Tensor:
        """Not collective. The ``DTensor`` whose block `tensor` is; gradients come to `tensor`, placed like it."""
        if placed is None:
            return tensor
        with self._on_compute_stream():
            mesh, placements, shape, stride = placed
            return DTensor.from_local(tensor, mesh, placements, run_check=False, shape=shape, stride=stride)

    def chunk_tensor(
        self,
        tensor: torch.Tensor,
        rank: int,
        world_size: int,
        num_devices_per_node: int,
        pg: dist.ProcessGroup,
        device: torch.device | None = None,
    ) -> ShardedTensor:
        """Not collective. See ``chunk_tensor``."""
        return chunk_tensor(tensor, rank, world_size, num_devices_per_node, pg, device)

    def chunk_dtensor(self, tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
        """Collective over the mesh where rows are cut twice. See ``chunk_dtensor``."""
        return chunk_dtensor(tensor, rank, device_mesh)

    def pre_load_state_dict_transform(self, tensor: ShardedTensor) -> tuple[ShardedTensor, list[Shard]]:
        """Not collective. See ``pre_load_state_dict``."""
        return pre_load_state_dict(tensor)

    def all_gather_dtensor(self, tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
        """Collective over the mesh. See ``all_gather_dtensor``."""
        return all_gather_dtensor(tensor, parent_mesh)

    def _on_compute_stream(self) -> Any:
        if self.compute_stream is None or self.device_handle is None:
            return contextlib.nullcontext()
        return self.device_handle.stream(self.compute_stream)


def chunk_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    device: torch.device | None = None,
) -> ShardedTensor:
    """A tensor in chunks of rows over a process group. Not collective.

    Args:
        tensor: whole on each rank of `pg`. Of a ``DTensor``, or a ``ShardedTensor`` with one shard here, it is the
            block that is chunked: the result has the shards of the outer one, which are chunked tensors.
        rank, world_size: this rank's place in `pg`, and its size.
        num_devices_per_node: by which the devices of other ranks are told.
        device: where the chunk is to lie; by default where the tensor does.

    Raises:
        ShardingError: the rank and the size are not those of the group, or a ``ShardedTensor`` has not one shard here.
    """
    if (dist.get_rank(pg), dist.get_world_size(pg)) != (rank, world_size):
        raise ShardingError(
            f"rank {rank} of {world_size} was given, and this is rank {dist.get_rank(pg)} of "
            f"{dist.get_world_size(pg)} in the process group"
        )
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        if len(shards) != 1:
            raise ShardingError(f"a ShardedTensor with {len(shards)} shards on this rank cannot be chunked: one can")
        [shard] = shards
        inner = _chunked(shard.tensor, pg, num_devices_per_node, device)
        return _nested(inner, shard.metadata, tensor.metadata(), tensor._process_group)
    if isinstance(tensor, DTensor):
        inner = _chunked(_compat.local_of(tensor), pg, num_devices_per_node, device)
        group = get_dt_pg(tensor)
        metadata = create_shard_md_from_dt(tensor, dist.get_rank())
        return _nested(inner, metadata, create_sharded_tensor_md_from_dt(tensor, group), group)
    return _chunked(tensor, pg, num_devices_per_node, device)


def _chunked(
    tensor: torch.Tensor, pg: dist.ProcessGroup, num_devices_per_node: int, device: torch.device | None
) -> ShardedTensor:
    ranks = dist.get_process_group_ranks(pg)
    box = chunk_box(tensor.shape, len(ranks), dist.get_rank(pg))
    device = device or tensor.device
    local = None if box is None else tensor.detach()[box.slices].to(device, copy=True).contiguous()
    return create_chunk_sharded_tensor(local, tensor.shape, tensor.dtype, device, pg, ranks, num_devices_per_node)


def _nested(
    inner: ShardedTensor, place: ShardMetadata, whole: ShardedTensorMetadata, group: dist.ProcessGroup
) -> ShardedTensor:
    properties = TensorProperties(
        dtype=whole.tensor_properties.dtype,
        layout=whole.tensor_properties.layout,
        requires_grad=False,
        memory_format=whole.tensor_properties.memory_format,
        pin_memory=whole.tensor_properties.pin_memory,
    )
    described = ShardedTensorMetadata(list(whole.shards_metadata), whole.size, properties)
    return _compat.sharded_tensor([Shard(inner, place)], described, group)


def chunk_dtensor(tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
    """A tensor in chunks of rows over the last dimension of a mesh, and as it is over those of tensor parallelism.

    Collective over the root of the mesh where the rows are cut along both; else without a message.

    Args:
        tensor: whole on each rank of `device_mesh`, or a ``DTensor`` on other dimensions of the same root mesh.
        rank: this rank's place in the last dimension of `device_mesh`.
        device_mesh: a part of a larger mesh.

    Returns:
        On the root mesh, new memory: ``Shard(0)`` in the last dimension of `device_mesh`, the placements of `tensor` in
        its own ones, ``Replicate`` elsewhere.

    Raises:
        ShardingError: the mesh is not a part of a larger one, or the rank another one.
    """
    root = _compat.root_mesh(device_mesh)
    if root.ndim < 2 or root == device_mesh:
        raise ShardingError(
            f"the mesh {device_mesh} is not a part of a larger one: take it from a mesh of at least two dimensions, as "
            "mesh['shard']"
        )
    place = device_mesh.get_local_rank(device_mesh.ndim - 1)
    if rank != place:
        raise ShardingError(f"rank {rank} was given, and this rank is {place} in the last dimension of {device_mesh}")
    placements: list[Any] = [Replicate()] * root.ndim
    if isinstance(tensor, DTensor):
        names = tensor.device_mesh.mesh_dim_names or ()
        if _compat.root_mesh(tensor.device_mesh) != root or not names or set(names) & set(device_mesh.mesh_dim_names):
            raise ShardingError(
                f"the DTensor lies on {tensor.device_mesh}, which is not another part of the mesh that {device_mesh} is"
            )
        for name, placement in zip(names, tensor.placements, strict=True):
            placements[root.mesh_dim_names.index(name)] = placement
    local, shape, stride = _compat.local_of(tensor).detach(), tensor.shape, tensor.stride()
    cut = root.mesh_dim_names.index(device_mesh.mesh_dim_names[-1])
    found = DTensor.from_local(local.clone(), root, placements, run_check=False, shape=shape, stride=stride)
    return found.redistribute(root, [ShardAlong(0) if dim == cut else p for dim, p in enumerate(placements)])


def pre_load_state_dict(tensor: ShardedTensor) -> tuple[ShardedTensor, list[Shard]]:
    """The chunked tensor within a shard, as ``chunk_tensor`` nests them, or `tensor`; and its local shards.

    Not collective.
    """
    shards = tensor.local_shards()
    if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
        tensor = shards[0].tensor
        shards = tensor.local_shards()
    return tensor, list(shards)


def all_gather_dtensor(tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
    """Collective over the mesh. This rank's block, gathered over all of its dimensions but the last one.

    Args:
        parent_mesh: that of `tensor`.

    Raises:
        ShardingError: it is another one.
    """
    if parent_mesh != tensor.device_mesh:
        raise ShardingError(f"the tensor lies on {tensor.device_mesh}, and is to be gathered on {parent_mesh}")
    placements = [Replicate()] * (tensor.device_mesh.ndim - 1) + [tensor.placements[-1]]
    return tensor.redistribute(placements=placements).to_local()


def get_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """How far the blocks of a ``DTensor`` are from each other, 0 where it is not cut, and the size of the one here.

    Not collective. Where no number of ranks divides a dimension the last blocks are smaller: see ``get_box_for``.
    """
    first = get_box_for(tensor, 0)[1]
    cut = {placement.dim % tensor.ndim for placement in tensor.placements if placement.is_shard()}
    return torch.Size([size if dim in cut else 0 for dim, size in enumerate(first)]), get_local_box(tensor)[1]


def get_box_for(tensor: DTensor, idx: int) -> tuple[torch.Size, torch.Size]:
    """Where the block of a place of the mesh begins, and its size. Not collective.

    Args:
        idx: of the place, in row-major order; the coordinate in a mesh of one dimension.

    Raises:
        ShardingError: the mesh does not have this place.
    """
    boxes = _boxes(tensor)
    if not 0 <= idx < len(boxes):
        raise ShardingError(f"there is no place {idx} in a mesh of {len(boxes)}")
    return torch.Size(boxes[idx].offsets), torch.Size(boxes[idx].sizes)


def get_local_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """Where this rank's block begins, and its size. Not collective.

    Raises:
        ShardingError: this rank is not in the mesh.
    """
    place = (tensor.device_mesh.mesh.flatten() == dist.get_rank()).nonzero()
    if not len(place):
        raise ShardingError(f"rank {dist.get_rank()} has no block of a DTensor on {tensor.device_mesh}")
    return get_box_for(tensor, int(place[0]))


def _boxes(tensor: DTensor) -> Sequence[Box]:
    mesh = tuple(tensor.device_mesh.mesh.shape)
    return [Box(*block) for block in _compat.blocks_on_mesh(tuple(tensor.shape), mesh, tuple(tensor.placements))]


def create_shard_md_from_dt(dt: DTensor, current_rank: int) -> ShardMetadata:
    """This rank's block as the metadata of a shard. Not collective.

    Args:
        current_rank: under which the shard is placed.
    """
    offsets, sizes = get_local_box(dt)
    return ShardMetadata(list(offsets), list(sizes), f"rank:{current_rank}/{_compat.local_of(dt).device}")


def create_sharded_tensor_md_from_dt(dt: DTensor, dt_pg: dist.ProcessGroup) -> ShardedTensorMetadata:
    """The blocks of a ``DTensor`` as the metadata of a ``ShardedTensor``, each once. Not collective.

    A block that several ranks have is placed on this rank if it is one of them, else on the first; torch places all
    blocks but its own on one other rank. Ranks are global ones.

    Args:
        dt_pg: the ranks of the mesh.

    Raises:
        ShardingError: the group has other ranks.
    """
    members, mesh = dist.get_process_group_ranks(dt_pg), dt.device_mesh.mesh.flatten().tolist()
    if set(members) != set(mesh):
        raise ShardingError(f"the DTensor lies on the ranks {mesh}, and the process group has {members}")
    me, device = dist.get_rank(), _compat.local_of(dt).device
    owners: dict[Box, int] = {}
    for rank, boxes in all_boxes(dt).items():
        for box in boxes:
            owners[box] = rank if rank == me else owners.get(box, rank)
    shards = [ShardMetadata(list(b.offsets), list(b.sizes), f"rank:{r}/{device}") for b, r in sorted(owners.items())]
    properties = TensorProperties(dtype=dt.dtype, layout=dt.layout, requires_grad=dt.requires_grad)
    return ShardedTensorMetadata(shards, dt.size(), properties)


def get_dt_pg(dt: DTensor) -> dist.ProcessGroup:
    """The process group of a ``DTensor``'s mesh, over all of its dimensions.

    Collective over the mesh the first time, where it has several.
    """
    return _compat.group_of_mesh(dt.device_mesh)


def rewrite_spec_if_needed(spec: Any, tensor: torch.Tensor, rank: int) -> Any:
    """A sharding spec whose placement of `rank` has the device of `tensor`; the spec itself where it does.

    Not collective. Specs other than ``ChunkShardingSpec`` name no devices, and are returned as they are.
    """
    if not isinstance(spec, ChunkShardingSpec):
        return spec
    mine = f"rank:{rank}/{tensor.device}"
    placements = [mine if p.rank() == rank and p.device() != tensor.device else p for p in spec.placements]
    return ChunkShardingSpec(dim=spec.dim, placements=placements) if mine in placements else spec
