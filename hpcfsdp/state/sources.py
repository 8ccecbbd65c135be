"""Values that a model loads into its tensors: checked on each rank, and described for ranks to compare."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.reshard.sharded_tensors import all_boxes, check_readable, is_distributed
from hpcfsdp.state.scatter import check_blocks, lies_on_dtensor_ranks
from hpcfsdp.state.shown import StandIn
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from hpcfsdp.units.unit_mesh import UnitMesh


def is_extra_state(key: str) -> bool:
    """Whether a name in a state dict is that of a module's extra state, which is an object even if it is a tensor."""
    return key.rpartition(".")[2] == "_extra_state"


def source_of(key: str, now: torch.Tensor) -> Any:
    """The value to load where a module has put `now`.

    Raises:
        StateDictError: it was computed from a tensor that this rank does not have.
    """
    source = now.source if isinstance(now, StandIn) else now
    if source is None:
        raise StateDictError(
            f"{key!r}: a hook computes it from a tensor of which this rank has only a part: load a full state dict, "
            "or do the hook's work in a load_state_dict post-hook of the module"
        )
    return source


def check_source(
    key: str, source: Any, target: torch.Tensor | None, shape: Sequence[int], mesh: UnitMesh | None
) -> None:
    """Check that a value can be loaded. Not collective, once the ranks of `mesh` know each other's names.

    Args:
        source: a tensor, ``ShardedTensor``, ``DTensor`` or ``Rank0Tensor``.
        target: the tensor that it is loaded into; None for a part of a flat parameter.
        shape: that of the whole.
        mesh: over which the parameter is sharded, None where it is not.

    Raises:
        StateDictError: it has another shape, no values that can be read here, or is on other ranks.
    """
    found, _ = shape_and_dtype(source)
    if tuple(found) != tuple(shape):
        raise StateDictError(
            f"{key!r}: its module has replaced a tensor of shape {list(shape)} with one of {list(found)}, but a "
            "sharded model keeps the shapes that it was built with"
        )
    check_readable(key, source)
    if mesh is not None:
        if is_distributed(source):
            check_blocks(key, source, mesh.ranks(mesh.dtensor_dim, "tensor"))
    elif isinstance(source, ShardedTensor):
        raise StateDictError(
            f"{key!r} is not sharded in the model, and cannot be loaded from a ShardedTensor: pass the whole tensor"
        )
    elif isinstance(source, DTensor) and source.device_mesh.get_coordinate() is None:
        raise StateDictError(f"{key!r} is a DTensor on a mesh without this rank: gather it, or load it for these ranks")
    elif isinstance(target, DTensor) and any(placement.is_partial() for placement in target.placements):
        raise StateDictError(
            f"{key!r} is a DTensor with Partial placements in the model, and nothing can be loaded into it: "
            "redistribute it first"
        )


def facts_of(source: Any, mesh: UnitMesh | None) -> str:
    """A description of a value that must be the same on all ranks, as they move values together.

    Blocks are listed for the ranks of the shard dimension, in their order: replicas have theirs on other ranks.
    """
    shape, dtype = shape_and_dtype(source)
    kind = type(source).__name__ if is_distributed(source) or isinstance(source, Rank0Tensor) else "tensor"
    facts = f"a {kind} {list(shape)} of {str(dtype).removeprefix('torch.')}"
    if is_distributed(source) and mesh is not None and math.prod(shape):
        boxes, ranks, where = all_boxes(source), mesh.ranks(mesh.dtensor_dim, "tensor"), ""
        if mesh.tensor is not None and lies_on_dtensor_ranks(mesh, source):
            ranks, where = mesh.ranks(mesh.dtensor_dim), " on the ranks that have the same block"
        facts += f" in blocks {digest_of([boxes.get(rank) for rank in ranks])}{where}"
    elif isinstance(source, DTensor):
        facts += f" with {source.placements} on a mesh of {list(source.device_mesh.mesh.shape)}"
    return facts


def digest_of(value: Any) -> str:
    """A short text that is the same for values with the same ``repr``."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
