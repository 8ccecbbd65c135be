"""Which rank has which part of the model and of the data: shards, replicas, and layers that are cut."""

from __future__ import annotations

from dataclasses import dataclass

from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module

from hpcfsdp.api.wrapper import FullyShardedDataParallel
from hpcfsdp.comm.mesh import Extent
from hpcfsdp.examples.gpt.run_config import MeshConfig, num_replicas
from hpcfsdp.examples.gpt.transformer import GPT, Block
from hpcfsdp.world import World
from hpcfsdp.wrap import ModuleWrapPolicy


@dataclass(frozen=True)
class Share:
    """Which part of the data a rank computes with.

    Attributes:
        rank: of this part, 0 to `size` - 1.
        size: parts that there are.
        copies: ranks that compute with the same part: a sum over all ranks counts each that often.
    """

    rank: int
    size: int
    copies: int = 1


def make_mesh(config: MeshConfig, world: World) -> DeviceMesh | None:
    """Collective over all ranks. The dimensions that are asked for beside "shard"; None if there are none.

    Raises:
        LaunchError: nodes of different sizes, or in an order that no mesh can follow.
    """
    replicas = num_replicas(config, world.num_nodes)
    if replicas == config.tensor == 1:
        return None
    dimensions: dict[str, Extent] = {}
    if replicas > 1:
        dimensions["replicate"] = config.replicate
    dimensions["shard"] = None
    if config.tensor > 1:
        dimensions["tensor"] = config.tensor
    return world.mesh(**dimensions)


def share_of(mesh: DeviceMesh | None, world: World) -> Share:
    """This rank's part of the data: replicas and shards have parts of their own, ranks that cut layers have one."""
    if mesh is None:
        return Share(world.rank, world.size)
    extents = dict(zip(mesh.mesh_dim_names, mesh.shape, strict=True))
    copies = extents.get("tensor", 1)
    rank = mesh.get_local_rank("shard")
    if "replicate" in extents:
        rank += mesh.get_local_rank("replicate") * extents["shard"]
    return Share(rank, world.size // copies, copies)


def shard(model: GPT, mesh: DeviceMesh | None, world: World) -> FullyShardedDataParallel:
    """Collective over all ranks. The model, its layers cut if the mesh says so, with a unit for each block."""
    policy = ModuleWrapPolicy({Block})
    if mesh is None:
        return FullyShardedDataParallel(model, auto_wrap_policy=policy)
    if "tensor" in mesh.mesh_dim_names:
        parallelize(model.to(world.device), mesh["tensor"])
    if "replicate" in mesh.mesh_dim_names:
        hybrid = ShardingStrategy.HYBRID_SHARD
        data = mesh["replicate", "shard"]
        return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=data, sharding_strategy=hybrid)
    return FullyShardedDataParallel(model, auto_wrap_policy=policy, device_mesh=mesh["shard"])


def parallelize(model: GPT, mesh: DeviceMesh) -> None:
    """Collective over `mesh`, of one dimension. Cut the blocks of a model that is not wrapped yet, in place.

    Attention is cut by heads, and feed-forward networks by hidden units: the first layer of each by columns, the
    second by rows, so that one sum over ranks completes each of the two. Embeddings, the head, which is tied to one
    of them, and norms stay whole on every rank.
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
