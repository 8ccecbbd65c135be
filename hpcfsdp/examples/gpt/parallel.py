"""The part of the model and of the data on each rank: shards, replicas, and tensor-parallel layers."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcfsdp import World
from hpcfsdp.examples.gpt.run_config import MeshConfig, num_replicas
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.fsdp import FullyShardedDataParallel, ShardingStrategy
from hpcfsdp.wrap import ModuleWrapPolicy


@dataclass(frozen=True)
class Share:
    """The part of the data that a rank computes with.

    Attributes:
        rank: number of the part, 0 to `size` - 1.
        size: number of parts.
        copies: ranks that compute with the same part. A sum over all ranks counts each part that often.
    """

    rank: int
    size: int
    copies: int = 1


def make_mesh(config: MeshConfig, world: World) -> DeviceMesh | None:
    """Return a mesh of "shard" and the dimensions of `config`; None without any. Collective over all ranks."""
    replicas = num_replicas(config, world.num_nodes)
    if replicas == config.tensor == 1:
        return None
    dimensions: dict[str, int | str | None] = {"replicate": config.replicate} if replicas > 1 else {}
    dimensions["shard"] = None
    if config.tensor > 1:
        dimensions["tensor"] = config.tensor
    return world.mesh(**dimensions)


def share_of(mesh: DeviceMesh | None, world: World) -> Share:
    """Return this rank's part of the data, one for each shard of each replica: tensor-parallel ranks have the same."""
    if mesh is None:
        return Share(world.rank, world.size)
    sizes = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    copies = sizes.get("tensor", 1)
    rank = mesh.get_local_rank("shard")
    if "replicate" in sizes:
        rank += mesh.get_local_rank("replicate") * sizes["shard"]
    return Share(rank, world.size // copies, copies)


def shard(
    model: GPT, mesh: DeviceMesh | None, world: World, *, use_orig_params: bool = False
) -> FullyShardedDataParallel:
    """Return the model with a unit for each block, tensor-parallel if the mesh is. Collective over all ranks."""
    options: dict[str, Any] = {}
    if mesh is not None:
        if "tensor" in mesh.mesh_dim_names:
            parallelize(model.to(world.device), mesh["tensor"])
        options = {"device_mesh": mesh["shard"]}
        if "replicate" in mesh.mesh_dim_names:
            options["device_mesh"] = mesh["replicate", "shard"]
            options["sharding_strategy"] = ShardingStrategy.HYBRID_SHARD
    policy = ModuleWrapPolicy({Block})
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, use_orig_params=use_orig_params, **options)


def to_device(windows: np.ndarray, device: torch.device) -> torch.Tensor:
    """Return bytes as numbers of tokens. The copy to an accelerator does not hold up the program."""
    rows = torch.from_numpy(windows)
    if device.type != "cpu":
        rows = rows.pin_memory()
    return rows.to(device, non_blocking=True).long()


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Divide the blocks of a model over its ranks, in place, before wrapping. Collective over `mesh`, of one dimension.

    Attention is divided by heads, feed-forward networks by hidden units: the first layer of each by columns, the second
    by rows, so that one sum over ranks completes each of the two. Embeddings, the head (tied to one of them) and norms
    stay whole on every rank.
    """
    plan = {
        "blocks.*.attention.qkv": ColwiseParallel(),
        "blocks.*.attention.merge": RowwiseParallel(),
        "blocks.*.up": ColwiseParallel(),
        "blocks.*.down": RowwiseParallel(),
    }
    parallelize_module(model, mesh, plan)
    for block in model.blocks:
        block.attention.tensor_rank = mesh.get_local_rank()
