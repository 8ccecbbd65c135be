"""Functions of a sharding engine for DTensors, under the names of ``torch.distributed.tensor.parallel.fsdp``.

They are for programs that call torch's, also within torch's FSDP. The package itself calls none of them: it splits and
joins DTensors by ``reshard.sharded_tensors``. Blocks are exact, also of tensors that the number of ranks does not
divide, and on meshes of any dimensions.
"""

import contextlib
import copy
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard as ShardAlong

from hpcfsdp import _compat
from hpcfsdp._compat import ChunkShardingSpec, Shard, ShardedTensor, ShardedTensorMetadata, ShardMetadata
from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.boxes import chunk_box
from hpcfsdp.reshard.sharded_tensors import (
    Placed,
    all_boxes,
    as_dtensor,
    blocks_of,
    copied,
    create_chunk_sharded_tensor,
    local_block,
    metadata_of_boxes,
    ranks_of_tensor,
)


def chunk_tensor(
    tensor: torch.Tensor,
    rank: int,
    world_size: int,
    num_devices_per_node: int,
    pg: dist.ProcessGroup,
    device: torch.device | None = None,
) -> ShardedTensor:
    """Return a tensor in chunks of rows over a process group; new memory, detached, on `device` if it is given.

    Of a ``DTensor``, or a ``ShardedTensor`` with exactly one shard here, the block is chunked: the result has the
    shards of the outer one, which are chunked tensors. A ``DTensor`` that has nothing on this rank has no shard here.
    Devices of other ranks follow from `num_devices_per_node`. Collective over the mesh of a ``DTensor`` the first time,
    where it has several dimensions; else not collective. A ``ShardingError`` if `rank` and `world_size` are not those
    of `pg`, or the tensor has no dimension, or a ``DTensor`` no block on each rank.
    """
    if (dist.get_rank(pg), dist.get_world_size(pg)) != (rank, world_size):
        raise ShardingError(
            f"rank {rank} of {world_size} was given, and this is rank {dist.get_rank(pg)} of "
            f"{dist.get_world_size(pg)} in the process group"
        )
    if isinstance(tensor, ShardedTensor):
        shards = tensor.local_shards()
        if len(shards) != 1:
            raise ShardingError(
                f"a ShardedTensor with {len(shards)} shards on this rank cannot be chunked: it must have exactly one"
            )
        [shard] = shards
        inner = _chunked(shard.tensor, pg, num_devices_per_node, device)
        return _nested(inner, tensor.metadata(), _compat.group_of_shards(tensor))
    if isinstance(tensor, DTensor):
        group = get_dt_pg(tensor)
        whole = create_sharded_tensor_md_from_dt(tensor, group)
        return _nested(_chunked(_compat.local_of(tensor), pg, num_devices_per_node, device), whole, group)
    return _chunked(tensor, pg, num_devices_per_node, device)


def _chunked(
    tensor: torch.Tensor, pg: dist.ProcessGroup, num_devices_per_node: int, device: torch.device | None
) -> ShardedTensor:
    if not tensor.ndim:
        raise ShardingError("a tensor without dimensions has no rows to be chunked: every rank keeps it whole")
    ranks = dist.get_process_group_ranks(pg)
    box = chunk_box(tensor.shape, len(ranks), dist.get_rank(pg))
    local, device = None, torch.device(device or tensor.device)
    if box is not None:
        local = torch.empty(box.sizes, dtype=tensor.dtype, device=device).copy_(tensor.detach()[box.slices])
        device = local.device  # which has a number
    return create_chunk_sharded_tensor(local, tensor.shape, tensor.dtype, device, pg, ranks, num_devices_per_node)


def _nested(inner: ShardedTensor, whole: ShardedTensorMetadata, group: dist.ProcessGroup) -> ShardedTensor:
    """Return a tensor with the metadata `whole`, and `inner` in place of this rank's shard, if it has one."""
    properties, places = copy.copy(whole.tensor_properties), list(map(copied, whole.shards_metadata))
    properties.requires_grad = False
    mine = [Shard(inner, place) for place in places if place.placement.rank() == dist.get_rank()]
    return _compat.sharded_tensor(mine, ShardedTensorMetadata(places, whole.size, properties), group)


def chunk_dtensor(tensor: torch.Tensor, rank: int, device_mesh: DeviceMesh) -> DTensor:
    """Chunk rows over the last dimension of a mesh that is a part of a larger one. Return new memory, detached.

    The result is on the root mesh: ``Shard(0)`` in the last dimension of `device_mesh`, where this rank has the place
    `rank`, the placements of a ``DTensor`` in its own dimensions, ``Replicate`` elsewhere. Collective over the root of
    the mesh where the rows are sharded along both; else without a message. A ``ShardingError`` if the mesh or the rank
    is another one, or the tensor has no dimension, or is on the dimensions of `device_mesh`.
    """
    root, last = _root_and_last(device_mesh)
    place = device_mesh.get_local_rank(device_mesh.ndim - 1)
    if rank != place:
        raise ShardingError(f"rank {rank} was given, and this rank is {place} in the last dimension of {device_mesh}")
    if not tensor.ndim:
        raise ShardingError("a tensor without dimensions has no rows to be chunked: every rank keeps it whole")
    placements: list[Any] = [Replicate()] * root.ndim
    if isinstance(tensor, DTensor):
        for dim, placement in _on_other_dims(tensor, root, device_mesh):
            placements[dim] = placement
    local, shape, stride = _compat.local_of(tensor).detach(), tensor.shape, tensor.stride()
    found = as_dtensor(local, Placed(root, tuple(placements), shape, stride))
    found = found.redistribute(root, [ShardAlong(0) if dim == last else p for dim, p in enumerate(placements)])
    chunk = _compat.wait_tensor(_compat.local_of(found))
    if chunk.untyped_storage().data_ptr() == local.untyped_storage().data_ptr():
        chunk = chunk.clone()
    return _compat.dtensor(chunk, root, found.placements, shape, stride)


def _root_and_last(mesh: DeviceMesh | None) -> tuple[DeviceMesh, int]:
    """Return the mesh that a mesh is a part of, and which dimension of it the last one of the part is."""
    root = None if mesh is None else _compat.root_mesh(mesh)
    names = (root and root.mesh_dim_names) or ()
    if mesh is None or root.ndim < 2 or root == mesh or not set(mesh.mesh_dim_names or ("",)) <= set(names):
        raise ShardingError(
            f"{mesh} is not a part of a larger mesh: take it from a mesh with named dimensions, such as "
            "mesh['shard'] of hpcfsdp.init().mesh(shard=None, tensor=2)"
        )
    return root, names.index(mesh.mesh_dim_names[-1])


def _on_other_dims(tensor: DTensor, root: DeviceMesh, mesh: DeviceMesh) -> list[tuple[int, Any]]:
    """Return the placements of a ``DTensor``, with the dimensions of the root mesh that they are for."""
    own_mesh, chunked = tensor.device_mesh, mesh.mesh_dim_names
    names = own_mesh.mesh_dim_names or ("",)
    others = [name for name in root.mesh_dim_names if name not in chunked]
    # Torch's operators return tensors on any mesh that is equal, which may be a part of another root.
    if not set(names) <= set(others) or root[names] != own_mesh:
        raise ShardingError(
            f"the DTensor is on {own_mesh}: to be chunked along {chunked}, it must be on {others} of {root}"
        )
    return list(zip(map(root.mesh_dim_names.index, names), tensor.placements, strict=True))


def pre_load_state_dict(tensor: ShardedTensor) -> tuple[ShardedTensor, list[Shard]]:
    """Return the tensor within the one shard, as ``chunk_tensor`` nests them, or itself, with its own shards."""
    shards = tensor.local_shards()
    if len(shards) == 1 and isinstance(shards[0].tensor, ShardedTensor):
        tensor = shards[0].tensor
        shards = tensor.local_shards()
    return tensor, list(shards)


def all_gather_dtensor(tensor: DTensor, parent_mesh: DeviceMesh | None) -> torch.Tensor:
    """Return this rank's block, gathered over all dimensions of its mesh but the last. Collective over the mesh."""
    if parent_mesh != tensor.device_mesh:
        raise ShardingError(
            f"the tensor is on {tensor.device_mesh}, but should be gathered on {parent_mesh}: pass the mesh that it "
            "is on"
        )
    placements = [Replicate()] * (tensor.device_mesh.ndim - 1) + [tensor.placements[-1]]
    return _compat.wait_tensor(tensor.redistribute(placements=placements).to_local())


class DTensorExtensions:
    """The steps in which an engine that shards plain tensors goes from DTensors to their blocks, and back."""

    def __init__(self, device_handle: Any = None) -> None:
        """Take the module of the device, as ``torch.cuda``; None for a device without streams."""
        self.device_handle = device_handle
        self.compute_stream: Any = None  # the stream on which blocks become DTensors; None for the current one

    chunk_tensor = staticmethod(chunk_tensor)
    chunk_dtensor = staticmethod(chunk_dtensor)
    pre_load_state_dict_transform = staticmethod(pre_load_state_dict)
    all_gather_dtensor = staticmethod(all_gather_dtensor)

    def pre_flatten_transform(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Placed | None]:
        """Not collective. Return this rank's block of a ``DTensor``, and how it is placed; any other tensor, and None.

        The block is a tensor of its own in the same memory, and wants a gradient if the ``DTensor`` does.
        """
        if not isinstance(tensor, DTensor):
            return tensor, None
        placed = Placed(tensor.device_mesh, tuple(tensor.placements), tensor.shape, tensor.stride())
        return local_block(tensor), placed

    @_compat.run_as_written
    def post_unflatten_transform(self, tensor: torch.Tensor, param_extension: Placed | None) -> torch.Tensor:
        """Not collective. Return the ``DTensor`` with `tensor` as its block; gradients come to `tensor`, placed alike.

        With None in place of what ``pre_flatten_transform`` has returned, `tensor` itself is returned.
        """
        if param_extension is None:
            return tensor
        with self._on_compute_stream():
            whole = as_dtensor(tensor, param_extension)
            if tensor.requires_grad:
                tensor.register_hook(self._await_grad)
        _compat.mark_as_flattened(whole)
        return whole

    def _await_grad(self, grad: torch.Tensor) -> torch.Tensor:
        with self._on_compute_stream():
            return _compat.wait_tensor(grad)

    def _on_compute_stream(self) -> Any:
        if self.compute_stream is None or self.device_handle is None:
            return contextlib.nullcontext()
        return self.device_handle.stream(self.compute_stream)


def get_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """Return how far a ``DTensor``'s blocks are apart, 0 where it is not sharded, and this one's size. Not collective.

    Where the ranks do not divide a dimension the last blocks are smaller, or empty: see ``get_box_for``.
    """
    first = get_box_for(tensor, 0)[1]
    sharded = {placement.dim % tensor.ndim for placement in tensor.placements if placement.is_shard()}
    return torch.Size([size if dim in sharded else 0 for dim, size in enumerate(first)]), get_local_box(tensor)[1]


def get_box_for(tensor: DTensor, idx: int) -> tuple[torch.Size, torch.Size]:
    """Return where the block at `idx` of the mesh, in row-major order, begins, and its size. Not collective."""
    boxes = list(blocks_of(tensor).values())
    if not 0 <= idx < len(boxes):
        raise ShardingError(f"there is no place {idx} in a mesh of {len(boxes)}")
    return torch.Size(boxes[idx].offsets), torch.Size(boxes[idx].sizes)


def get_local_box(tensor: DTensor) -> tuple[torch.Size, torch.Size]:
    """Return where this rank's block begins, and its size. Not collective."""
    ranks = ranks_of_tensor(tensor)
    if dist.get_rank() not in ranks:
        raise ShardingError(f"rank {dist.get_rank()} has no block of a DTensor on the ranks {ranks}")
    return get_box_for(tensor, ranks.index(dist.get_rank()))


def create_shard_md_from_dt(dt: DTensor, current_rank: int) -> ShardMetadata:
    """Return this rank's block as the metadata of a shard on `current_rank`. Not collective."""
    offsets, sizes = get_local_box(dt)
    return ShardMetadata(list(offsets), list(sizes), f"rank:{current_rank}/{_compat.local_of(dt).device}")


def create_sharded_tensor_md_from_dt(dt: DTensor, dt_pg: dist.ProcessGroup) -> ShardedTensorMetadata:
    """Return the blocks of a ``DTensor`` as the metadata of a ``ShardedTensor``, each once. Not collective.

    A block that several ranks of `dt_pg` have is placed on this rank if it is one of them, else on the first; torch
    places all blocks but the first on one other rank. Ranks are global ones. Blocks without elements are left out.
    """
    members, ranks = dist.get_process_group_ranks(dt_pg), ranks_of_tensor(dt)
    if set(members) != set(ranks):
        raise ShardingError(f"the DTensor is on the ranks {ranks}, and the process group has {members}")
    me, device = dist.get_rank(), _compat.local_of(dt).device
    owners: dict[Box, int] = {}
    blocks_of(dt)  # which it has to be made of
    for rank, boxes in all_boxes(dt).items():
        for box in boxes:
            owners[box] = rank if rank == me else owners.get(box, rank)
    properties = _compat.TensorProperties(dtype=dt.dtype, layout=dt.layout, requires_grad=dt.requires_grad)
    return metadata_of_boxes(dt.shape, [(rank, box) for box, rank in sorted(owners.items())], properties, device)


def get_dt_pg(dt: DTensor) -> dist.ProcessGroup:
    """Return the process group of a ``DTensor``'s mesh. Collective the first time, if that has several dimensions."""
    return _compat.group_of_mesh(dt.device_mesh)


def rewrite_spec_if_needed(spec: Any, tensor: torch.Tensor, rank: int) -> Any:
    """Return a sharding spec with the device of `tensor` in its placement of `rank`; itself if nothing changes."""
    if not isinstance(spec, ChunkShardingSpec):
        return spec
    mine = f"rank:{rank}/{tensor.device}"
    placements = [mine if p.rank() == rank and p.device() != tensor.device else p for p in spec.placements]
    return ChunkShardingSpec(dim=spec.dim, placements=placements) if mine in placements else spec
