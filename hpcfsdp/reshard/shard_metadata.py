"""The metadata of ``ShardedTensor``, torch's own classes: built on each rank, merged, checked, recalculated.

These functions have the names of ``torch.distributed._shard.sharded_tensor.utils``, and are for programs that call
those. The package itself calls none of them. Errors name the rank, the shard and both values. Ranks are global ones.
"""

import copy
import itertools
from collections.abc import Sequence
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat
from hpcfsdp._compat import Shard, ShardedTensorMetadata, ShardMetadata, TensorProperties
from hpcfsdp.errors import ShardingError
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.sharded_tensors import box_of, copied
from hpcfsdp.reshard.tiling import find_fault, find_outside

_PROPERTIES = ("dtype", "layout", "requires_grad", "memory_format", "pin_memory")


def parse_and_validate_remote_device(
    pg: dist.ProcessGroup | None, remote_device: Any
) -> tuple[int | None, torch.device]:
    """Return the rank and the device of a shard's placement, as ``ShardMetadata.placement`` has it. Not collective.

    The rank is None for a device without one, the id for a worker of torch's RPC. It has to be a global rank of `pg`
    (the default group if that is None), if this rank is in it. No placement, or another rank, is a ``ShardingError``.
    """
    if remote_device is None:
        raise ShardingError("a shard has no placement (remote device is None): give it one, as 'rank:0/cpu'")
    rank, device, worker = remote_device.rank(), remote_device.device(), remote_device.worker_name()
    if rank is not None:
        members = _compat.members_of(pg)
        if members is not None and rank not in members:
            raise ShardingError(
                f"the placement {remote_device} names rank {rank}, which is not in the process group of the ranks "
                f"{list(members)}: placements have global ranks"
            )
    return rank if worker is None else _compat.id_of_worker(worker), device


def validate_output_tensor_for_gather(
    my_rank: int, dst_rank: int, size: Sequence[int], dst_tensor: torch.Tensor | None
) -> None:
    """Check that the rank that gathers, and no other, was given a tensor of the right size. Not collective."""
    if my_rank == dst_rank and dst_tensor is None:
        raise ShardingError(f"rank {dst_rank} gathers, but was given no dst_tensor: pass one of size {list(size)}")
    if my_rank != dst_rank and dst_tensor is not None:
        raise ShardingError(
            f"rank {my_rank} was given a dst_tensor of size {list(dst_tensor.shape)}, but rank {dst_rank} gathers: "
            "pass None on the others"
        )
    if dst_tensor is not None and tuple(dst_tensor.shape) != tuple(size):
        raise ShardingError(
            f"rank {dst_rank} was given a dst_tensor of size {list(dst_tensor.shape)}, but the tensor has the size "
            f"{list(size)}"
        )


def flatten_tensor_size(*size: Any) -> torch.Size:
    """Return ``f(2, 3)``, ``f((2, 3))`` and ``f([(2, 3)])`` as a ``torch.Size``."""
    dims: Any = size
    while len(dims) == 1 and isinstance(dims[0], Sequence) and not isinstance(dims[0], (str, bytes)):
        dims = dims[0]
    for dim in dims:
        if not isinstance(dim, (int, torch.SymInt)) or isinstance(dim, bool):
            raise TypeError(f"a size is a sequence of ints, and {list(dims)} holds {dim!r} ({type(dim).__name__})")
        if dim < 0:
            raise ShardingError(f"a size has no negative dimensions: {list(dims)}")
    return torch.Size(dims)


def raise_if_mismatch(expected: Any, actual: Any, prop_name: str, ranks: Any, is_local: bool = True) -> None:
    """Check that two shards of the rank `ranks`, or the two `ranks`, have one value of a property. Not collective."""
    if expected == actual:
        return
    if is_local:
        raise ShardingError(f"the local shards of rank {ranks} differ in {prop_name}: one has {expected}, one {actual}")
    first, other = ranks
    raise ShardingError(
        f"ranks hold shards of tensors that differ in {prop_name}: {expected} on rank {first}, {actual} on rank {other}"
    )


def build_metadata_from_local_shards(
    local_shards: Sequence[Shard], global_size: Sequence[int], current_rank: int, pg: dist.ProcessGroup | None
) -> ShardedTensorMetadata:
    """Return the metadata of this rank's shards of a tensor, in their order, with lists of their own. Not collective.

    There is at least one, each strided, contiguous, of the size, the rank and the device that its metadata say, within
    the tensor of `global_size`, and all alike in dtype, pinning and ``requires_grad``: otherwise a ``ShardingError``
    names the shard and both values. `current_rank` is a global rank of `pg`.
    """
    if not local_shards:
        raise ShardingError(f"rank {current_rank} has no local shards: there is no metadata to build from")
    size = flatten_tensor_size(global_size)
    first: dict[str, Any] = {}
    for number, shard in enumerate(local_shards):
        _check_local(number, shard, current_rank, pg)
        tensor = shard.tensor
        found = {"pin_memory": tensor.is_pinned(), "dtype": tensor.dtype, "requires_grad": tensor.requires_grad}
        for name, actual in found.items():
            raise_if_mismatch(first.setdefault(name, actual), actual, f"{name} (shards 0 and {number})", current_rank)
    described = [copied(shard.metadata) for shard in local_shards]
    _check_within(size, described)
    return ShardedTensorMetadata(described, size, TensorProperties(**first))


def _check_local(number: int, shard: Shard, rank: int, pg: dist.ProcessGroup | None) -> None:
    tensor, metadata = shard.tensor, shard.metadata
    what = f"local shard {number} of rank {rank}, at {list(metadata.shard_offsets)},"
    try:
        placed, device = parse_and_validate_remote_device(pg, metadata.placement)
    except ShardingError as error:
        raise ShardingError(f"{what} {error}") from None
    if tensor.layout is not torch.strided:
        raise ShardingError(f"{what} is {tensor.layout}: shards are strided tensors")
    if not tensor.is_contiguous():
        raise ShardingError(f"{what} is not contiguous (strides {tensor.stride()}): pass shard.contiguous()")
    if placed != rank:
        raise ShardingError(f"{what} is on this rank, but its metadata gives rank {placed}")
    if tensor.device != device:
        raise ShardingError(f"{what} is on {tensor.device}, but its metadata gives {device}")
    if list(tensor.shape) != list(metadata.shard_sizes):
        raise ShardingError(
            f"{what} has the size {list(tensor.shape)}, but its metadata gives {list(metadata.shard_sizes)}"
        )


def build_global_metadata(
    gathered_metadatas: Sequence[ShardedTensorMetadata | None], recalc_metadata: bool = False
) -> ShardedTensorMetadata:
    """Return new metadata of a whole tensor from those of its ranks, in order; None for ranks without. Not collective.

    With `recalc_metadata` offsets follow from the sizes along the first dimension in the order of ranks. Takes ``n log
    n`` in the number of shards. A ``ShardingError`` names the ranks that differ in a property, or list each other's
    shards, or the first shards that overlap, the first gap, or a shard that reaches beyond the tensor.
    """
    present = [(rank, metadata) for rank, metadata in enumerate(gathered_metadatas) if metadata is not None]
    if not present:
        raise ShardingError(f"none of the {len(gathered_metadatas)} rank(s) has local shards: there is no tensor")
    first_rank, first = present[0]
    for rank, metadata in present[1:]:
        ranks = [first_rank, rank]
        if not recalc_metadata:
            raise_if_mismatch(first.size, metadata.size, "global_size", ranks, is_local=False)
        for name in _PROPERTIES:
            here, there = (getattr(m.tensor_properties, name) for m in (first, metadata))
            raise_if_mismatch(here, there, name, ranks, is_local=False)
    _check_owners(present)
    shards = [copied(shard) for _, metadata in present for shard in metadata.shards_metadata]
    whole = ShardedTensorMetadata(shards, torch.Size(first.size), copy.copy(first.tensor_properties))
    if recalc_metadata:
        recalc_global_sharded_tensor_metadata(whole, 0)
    validate_tiling(whole)
    return whole


def _check_owners(present: Sequence[tuple[int, ShardedTensorMetadata]]) -> None:
    """Check that each rank lists shards of its own, all on one rank, which no other one lists."""
    owners: dict[Any, tuple[int, ShardMetadata]] = {}
    for rank, metadata in present:
        shards = metadata.shards_metadata
        places = [shard.placement for shard in shards]
        holders = [(None, None) if place is None else (place.rank(), place.worker_name()) for place in places]
        for shard, holder in zip(shards, holders, strict=True):
            if holder == (None, None):
                raise ShardingError(
                    f"{_describe(shard)}, which rank {rank} of the group lists, has no rank in its metadata"
                )
            if holder != holders[0]:
                raise ShardingError(
                    f"rank {rank} of the group lists {_describe(shards[0])} and {_describe(shard)}: a rank must "
                    "list only its own shards"
                )
            lister, other = owners.setdefault(holder, (rank, shard))
            if lister != rank:
                raise ShardingError(
                    f"{_describe(shard)} is listed by rank {rank} of the group, but {_describe(other)} of the same "
                    f"placement by rank {lister}: one of them has the wrong rank in its metadata"
                )


def validate_tiling(metadata: ShardedTensorMetadata) -> None:
    """Check that the shards of a tensor have each of its elements once. Not collective; ``n log n`` in the shards."""
    blocks = _check_within(metadata.size, metadata.shards_metadata)
    fault = find_fault(metadata.size, blocks)
    if fault is None:
        return
    element = list(fault.element)
    if not fault.blocks:
        raise ShardingError(
            f"no shard has element {element} of a tensor of size {list(metadata.size)}: the shards do not cover the "
            "tensor"
        )
    one, other = (metadata.shards_metadata[number] for number in fault.blocks)
    raise ShardingError(f"{_describe(one)} and {_describe(other)} overlap: both have element {element}")


def recalc_global_sharded_tensor_metadata(
    global_sharded_tensor_metadata: ShardedTensorMetadata, sharded_dim: int
) -> None:
    """Compute the offsets of shards, and the size of the tensor, from the sizes of shards in the order of ranks.

    In place, and not collective. Shards of one rank follow each other as they are listed; the list keeps its order. A
    negative `sharded_dim` counts from the last one. Shards without a rank, or of sizes that do not fit, are refused.
    """
    shards = global_sharded_tensor_metadata.shards_metadata
    if not shards:
        raise ShardingError("there are no shards to find offsets for")
    first = shards[0]
    dims = len(first.shard_sizes)
    if not -dims <= sharded_dim < dims:
        raise ShardingError(
            f"{_describe(first)} has {dims} dimension(s), but no dimension {sharded_dim} to shard along"
        )
    sharded_dim %= dims
    for shard in shards:
        if shard.placement is None or shard.placement.rank() is None:
            raise ShardingError(
                f"{_describe(shard)} has no rank in its metadata, so its place among the others is not known"
            )
        if min(shard.shard_sizes, default=0) < 0:
            raise ShardingError(f"{_describe(shard)} has a negative size")
        across = [size for dim, size in enumerate(shard.shard_sizes) if dim != sharded_dim]
        if len(shard.shard_sizes) != dims or across != [s for d, s in enumerate(first.shard_sizes) if d != sharded_dim]:
            raise ShardingError(
                f"{_describe(first)} and {_describe(shard)} differ in another dimension than {sharded_dim}"
            )
    in_order = sorted(shards, key=lambda shard: shard.placement.rank())  # stable
    ends = list(itertools.accumulate((shard.shard_sizes[sharded_dim] for shard in in_order), initial=0))
    for shard, begin in zip(in_order, ends[:-1], strict=True):
        shard.shard_offsets = [begin if dim == sharded_dim else 0 for dim in range(dims)]
    size = list(first.shard_sizes)
    size[sharded_dim] = ends[-1]
    global_sharded_tensor_metadata.size = torch.Size(size)


def _check_within(size: torch.Size, shards: Sequence[ShardMetadata]) -> list[Box]:
    """Return the blocks of shards. Raises a ``ShardingError`` if one reaches beyond the tensor."""
    blocks = [box_of(shard) for shard in shards]
    outside = find_outside(size, blocks)
    if outside is not None:
        raise ShardingError(f"{_describe(shards[outside])} is not within a tensor of size {list(size)}")
    return blocks


def _describe(shard: ShardMetadata) -> str:
    return f"the shard at {list(shard.shard_offsets)} of size {list(shard.shard_sizes)} on {shard.placement}"
