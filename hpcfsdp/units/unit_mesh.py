"""The ranks of a unit as one mesh with named dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Literal

import numpy as np
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Replicate, Shard as ShardAlong
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.grid import Grid
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.units.group_cache import GroupCache

Dim = Literal["shard", "replicate", "tensor"]


@dataclass(frozen=True, eq=False)
class UnitMesh:
    """The ranks of a unit, along up to three dimensions.

    Along "shard" they have different shards of each parameter, along "replicate" the same, along "tensor" other blocks
    of tensor-parallel parameters. Methods with dimensions as arguments are about the ranks that differ from this one in
    these alone, and without arguments about all ranks of the unit. A dimension that the mesh does not have counts as
    one rank. Methods that communicate or make groups raise a ``RuntimeError`` before torch.distributed is initialised.

    Attributes:
        strategy: never None.
        along: the communicator of each dimension: "shard" unless the strategy is ``NO_SHARD``, "replicate" under that
            and the hybrid ones, "tensor" for units of a tensor-parallel model.
        data: over "replicate" and "shard"; None for a pair of groups that is not the world.
        grid: int64, replicas x shards, ranks of `data`; None if that is None.
        device_mesh: the user's: (replicate, shard), or one of them.
        tensor_mesh: of the unit's DTensors; None without "tensor".
    """

    strategy: ShardingStrategy
    along: Mapping[Dim, Communicator]
    data: Communicator | None
    grid: np.ndarray | None
    device_mesh: DeviceMesh | None = None
    tensor_mesh: DeviceMesh | None = None

    @cached_property
    def shard(self) -> Communicator:
        """The ranks over which each parameter is sharded; this one alone under ``NO_SHARD``."""
        return self.along.get("shard") or FakeCommunicator(device=self.along["replicate"].device)

    @property
    def replicate(self) -> Communicator | None:
        """The ranks with the same shard, over which gradients are reduced once more."""
        return self.along.get("replicate")

    @property
    def replicas(self) -> Communicator | None:
        """The same, if there are several."""
        return self.replicate if self.size("replicate") > 1 else None

    @property
    def tensor(self) -> Communicator | None:
        """The tensor-parallel ranks."""
        return self.along.get("tensor")

    @property
    def dtensor_dim(self) -> Dim:
        """The dimension along which rows of a distributed tensor are cut: "shard", under ``NO_SHARD`` "replicate"."""
        return "shard" if "shard" in self.along else "replicate"

    @property
    def dtensor_ranks(self) -> Communicator:
        """The ranks along ``dtensor_dim``."""
        return self.along[self.dtensor_dim]

    @property
    def is_hybrid(self) -> bool:
        return "shard" in self.along and "replicate" in self.along

    @property
    def keeps_values(self) -> bool:
        """Whether gathered values stay between forward and backward."""
        kept = ShardingStrategy.SHARD_GRAD_OP, _compat.hybrid_shard_zero2(), ShardingStrategy.NO_SHARD
        return self.strategy in kept

    def size(self, *dims: Dim) -> int:
        """The number of these ranks."""
        return prod(comm.size for comm in self._chosen(dims).values())

    def is_first(self, *dims: Dim) -> bool:
        """Whether this rank is the first in each of these dimensions."""
        return all(comm.rank == 0 for comm in self._chosen(dims).values())

    def comm(self, *dims: Dim) -> Communicator | Grid:
        """Collective over these ranks, the first time. A communicator over them.

        For both data dimensions of a pair of groups that is not the world it is a ``Grid``.
        """
        chosen = dict(self._chosen(dims))
        tensor = chosen.pop("tensor", None)
        if not chosen:
            return tensor or FakeCommunicator(device=self.shard.device)
        line: Communicator | Grid = next(iter(chosen.values()))
        if len(chosen) == 2:
            line = self.data or Grid(self.shard, self.along["replicate"])
        if tensor is None:
            return line
        return Grid(line, tensor) if isinstance(line, Grid) else GroupCache.current().joined(line, tensor)[0]

    def connect(self) -> None:
        """Collective over all ranks of the unit. Make the communicators that checkpoints and state dicts need."""
        if self.tensor is not None and self.data is not None:
            self.comm()
            self.comm(self.dtensor_dim, "tensor")

    def subgroups(self) -> list[Communicator]:
        """Communicators that together connect all ranks of the unit, without those of one rank."""
        return [comm for comm in (*self.data_subgroups(), self.tensor) if comm is not None and comm.size > 1]

    def data_subgroups(self) -> list[Communicator]:
        """Communicators that together connect the ranks that share the unit's parameters, also alone."""
        return [self.data] if self.data is not None else [self.along["shard"], self.along["replicate"]]

    def ranks(self, *dims: Dim) -> tuple[int, ...]:
        """Collective over these ranks, the first time. Their numbers in torch's default group, in ``comm``'s order."""
        return GroupCache.current().global_ranks(self.comm(*dims))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Collective over these ranks, the first time. The ranks of ``comm(dtensor_dim, "tensor")`` along both."""
        return GroupCache.current().joined(self.dtensor_ranks, self.along["tensor"])[1]

    @cached_property
    def copies(self) -> np.ndarray:
        """Collective over all ranks, the first time; needs `data`. int64, shards x replicas: the ranks of ``comm()``
        that have each shard, the one that writes it first. With several blocks those of the first block."""
        return self._cube[:, :, 0].T

    @cached_property
    def block_copies(self) -> np.ndarray:
        """Collective over all ranks, the first time; needs `data`. int64: for each rank of ``comm(dtensor_dim,
        "tensor")`` the ranks of ``comm()`` that have the same block and shard."""
        rows = self._cube if self.dtensor_dim == "replicate" else self._cube.swapaxes(0, 1)
        return np.array([rows[place, :, block] for place, block in self.places])

    @cached_property
    def _cube(self) -> np.ndarray:
        """Replicas x shards x tensor-parallel ranks: the ranks of ``comm()``."""
        return self.ranks_by_dim()

    def ranks_by_dim(self, *dims: Dim) -> np.ndarray:
        """Collective over these ranks, the first time. The ranks of ``comm(*dims)``: int64, replicas x shards x
        tensor-parallel ranks. Both data dimensions need `data`."""
        chosen = self._chosen(dims)
        data = [comm for name, comm in chosen.items() if name != "tensor"]
        if len(data) == 2 or not dims:
            assert self.grid is not None
            grid = self.grid
        else:
            line = np.arange(data[0].size if data else 1)
            grid = line[:, None] if "replicate" in chosen else line[None]
        if "tensor" not in chosen:
            return grid[:, :, None]
        if not data:
            return np.arange(chosen["tensor"].size)[None, None]
        line_comm = data[0] if len(data) == 1 and dims else self.data
        _, places = GroupCache.current().joined(line_comm, chosen["tensor"])
        ranks = np.zeros((line_comm.size, chosen["tensor"].size), np.int64)
        ranks[tuple(np.array(places).T)] = np.arange(len(places))
        return ranks[grid]

    def placed(self, block: TensorBlock | None) -> tuple[DeviceMesh, list[Placement]]:
        """Collective over all ranks of the unit, the first time. Mesh and placements of a ``DTensor`` of the unit.

        Rows are cut along the last data dimension; along "tensor" the placements are those of `block`.

        Args:
            block: of the parameter; None for one that is not cut over tensor-parallel ranks.
        """
        outer, inner = self.torch_mesh(), self.tensor_mesh
        data: list[Placement] = [Replicate()] * (outer.ndim - 1) + [ShardAlong(0)]
        if inner is None:
            return outer, data
        across = [Replicate()] * inner.ndim if block is None else list(block.placements)
        joined = _compat.common_mesh(outer, inner)
        if joined is None:
            return GroupCache.current().joined_mesh(outer, inner, self.along["tensor"]), data + across
        placed = dict(zip((*outer.mesh_dim_names, *inner.mesh_dim_names), data + across, strict=True))
        return joined, [placed[name] for name in joined.mesh_dim_names]

    def placed_rows(self, block: TensorBlock | None, dim: int) -> tuple[DeviceMesh, list[Placement]]:
        """Collective over all ranks of the unit, the first time. Mesh and placements of rows of a parameter.

        Args:
            block: of which each rank has rows; None for a parameter that is not tensor-parallel.
            dim: along which it is cut.
        """
        outer = self.torch_mesh()
        data: list[Placement] = [Replicate()] * (outer.ndim - 1) + [ShardAlong(dim)]
        if block is None:
            return outer, data
        mesh, placements = self.placed(block)
        names = mesh.mesh_dim_names
        last = outer.mesh_dim_names[-1] if outer.mesh_dim_names else None
        mine = names.index(last) if names and last in names else outer.ndim - 1
        # Blocks are cut first. The mesh cuts along its first dimension first.
        later = zip(mesh.shape[mine + 1 :], placements[mine + 1 :], strict=True)
        factor = prod(size for size, placement in later if placement.is_shard(dim))
        placements[mine] = _compat.shard_of_rows(dim, factor)
        return mesh, placements

    def process_group(self) -> dist.ProcessGroup:
        """Collective over `dtensor_ranks`, the first time. Torch's process group over them."""
        return GroupCache.current().process_group(self.dtensor_ranks)

    def torch_mesh(self) -> DeviceMesh:
        """Collective over `dtensor_ranks`, the first time. The user's mesh, or one of these ranks."""
        return self.device_mesh or GroupCache.current().mesh(self.dtensor_ranks)

    def with_tensor(self, tensor_mesh: DeviceMesh | None) -> UnitMesh:
        """Collective over the ranks of `tensor_mesh`, the first time. The same mesh with them as "tensor"."""
        along = {name: comm for name, comm in self.along.items() if name != "tensor"}
        if tensor_mesh is not None:
            cache = GroupCache.current()
            along["tensor"] = cache.members_of(tensor_mesh)
            cache.global_ranks(along["tensor"])  # not collective from here on
        return replace(self, along=along, tensor_mesh=tensor_mesh)

    def _chosen(self, dims: tuple[Dim, ...]) -> Mapping[Dim, Communicator]:
        return {name: comm for name, comm in self.along.items() if name in dims} if dims else self.along


def describe_mesh(mesh: DeviceMesh) -> str:
    """Return the ranks and dimensions of a mesh, for a message."""
    return f"{mesh.mesh.tolist()}" + (f" {mesh.mesh_dim_names}" if mesh.mesh_dim_names else "")
