"""The ranks of a unit as one mesh with named dimensions, and the groups of ranks that it needs, each made once."""

from __future__ import annotations

import functools
import logging
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from math import prod
from typing import Any, Literal

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Placement, Replicate, Shard as ShardAlong

from hpcfsdp import _compat, accelerator, env
from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.communicator import CommOptions, Grid
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.launch.topology import Topology
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.world import current_world

log = logging.getLogger("hpcfsdp.groups")
_NO_OPTIONS = CommOptions()


class GroupCache:
    """Groups of the current process group and world, neither kept alive. They are made collectively, the first time."""

    def __init__(self) -> None:
        world = current_world()
        self._process_group = weakref.ref(dist.group.WORLD, self._forget)
        self._world = weakref.ref(world) if world is not None else None
        self._made: dict[tuple[Any, ...], Any] = {}  # meshes by the name of their group: not by the group, to let it go
        self._given: weakref.WeakKeyDictionary[Communicator, weakref.ref[Any]] = weakref.WeakKeyDictionary()
        self._global_ranks: weakref.WeakKeyDictionary[Communicator, tuple[int, ...]] = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> GroupCache:
        """Not collective. Return the one that is made for torch.distributed as it is initialised now."""
        global _current
        if dist.group.WORLD is None:
            raise RuntimeError("torch.distributed has no process group yet: call hpcfsdp.init() first")
        if _current is None or not _current._is_current():
            _current = cls()
        return _current

    def _is_current(self) -> bool:
        world = current_world()
        same_world = world is None if self._world is None else world is not None and self._world() is world
        return same_world and self._process_group() is dist.group.WORLD

    def _forget(self, _process_group: weakref.ref) -> None:
        # gloo groups that outlive torch.distributed can abort the process.
        self._made.clear()

    def _cached(self, key: tuple[Any, ...], make: Callable[[], Any]) -> Any:
        if key not in self._made:
            self._made[key] = make()
        return self._made[key]

    def subgroup(self, ranks: tuple[int, ...]) -> Communicator:
        """Return a communicator over ascending ranks of the world. Makes no new one for one rank, or for all."""
        everyone = communicator_for(None, required=True)
        if len(ranks) == everyone.size:
            return everyone
        if len(ranks) == 1:
            return self._cached(("alone",), lambda: FakeCommunicator(device=everyone.device))
        return self._cached(("subgroup", ranks), lambda: everyone.subgroup(ranks))

    def members_of(self, mesh: DeviceMesh) -> Communicator:
        """Return a communicator over all ranks of a mesh."""
        if mesh.ndim == 1:
            return communicator_for(mesh.get_group(), required=True)
        return self.subgroup(tuple(sorted(mesh.mesh.flatten().tolist())))

    def joined(self, data: Communicator, tensor: Communicator) -> tuple[Communicator, tuple[tuple[int, int], ...]]:
        """Return a communicator over the ranks of `data`, and of the subgroups that other ranks of `tensor` pass; and
        for each of its ranks, the rank in its subgroup, and the rank of that subgroup in `tensor`."""
        key = "joined", self.global_ranks(data), self.global_ranks(tensor)
        if key not in self._made:
            subgroups = tensor.all_gather_object(key[1])
            places = {rank: (place, block) for block, ranks in enumerate(subgroups) for place, rank in enumerate(ranks)}
            ranks = tuple(sorted(places))
            comm = self.subgroup(ranks)
            self.remember_ranks(comm, ranks)
            self._made[key] = comm, tuple(places[rank] for rank in ranks)
        return self._made[key]

    def host_of(self, comm: Communicator) -> Communicator | None:
        """Return a communicator of the same ranks through host memory; None if there is none."""
        world = current_world()
        if comm.device.type == "cpu":
            return comm
        if world is None or isinstance(comm, FakeCommunicator):
            return None
        ranks = self.global_ranks(comm)
        if len(ranks) == world.size:
            return world.host
        return self._cached(("host", ranks), lambda: world.host.subgroup(ranks))

    def for_gathers(self, comm: Communicator, options: CommOptions, *, name: str = "gathers") -> Communicator:
        """Return a communicator of the same ranks with `options`; of a `name` if they ask for groups of their own."""
        if isinstance(comm, TorchGroupCommunicator) and comm.size > 1 and options.of_group:
            key = name, self.global_ranks(comm), options.of_group
            comm = self._cached(key, functools.partial(comm.with_own_group, options))
        if options.memory in ("registered", "symmetric") and not accelerator.is_accelerator(comm.device):
            log.info("memory=%r has no effect on a CPU", options.memory)
        return comm.choosing(options)

    def for_reductions(self, comm: Communicator, *, narrow: bool, options: CommOptions = _NO_OPTIONS) -> Communicator:
        """Return a communicator of the same ranks whose collectives do not wait for those of `comm`.

        On an accelerator those of one communicator run in the order of their calls, which is the same on all ranks.
        Values of 16 bits or less, for which it is `narrow`, go between nodes once for each node.
        """
        if not isinstance(comm, TorchGroupCommunicator) or not accelerator.is_accelerator(comm.device) or comm.size < 2:
            return comm.choosing(options)
        if not (_separates_by_default() if options.separate_reductions is None else options.separate_reductions):
            return self.for_gathers(comm, options)
        ranks = self.global_ranks(comm)

        def divide() -> None:
            made.divide(self.topology_of(comm))

        made = self._cached(("reductions", ranks, options.of_group), lambda: comm.with_own_group(options))
        if narrow and options.sums_by == "hpcfsdp":
            self._cached(("divided", ranks, options.of_group), divide)
        return made.choosing(options)

    def within(self, comm: Communicator, ranks: Sequence[int], options: CommOptions) -> Communicator:
        """Return a communicator for gathers of some ranks of `comm`. Collective over these, the first time."""
        owner = comm.group.group_name if isinstance(comm, TorchGroupCommunicator) else weakref.ref(comm)
        made = self._cached(("within", owner, tuple(ranks)), lambda: comm.subgroup(ranks))
        return self.for_gathers(made, options)

    def topology_of(self, comm: Communicator) -> Topology:
        """Return which ranks of `comm` share a node. Collective over these, the first time."""

        def make() -> Topology:
            ranks, world = self.global_ranks(comm), current_world()
            labels = comm.all_gather_object(env.host_name()) if world is None else map(world.topology.node_rank, ranks)
            return Topology.from_labels(list(labels))

        return self._cached(("topology of", self.global_ranks(comm)), make)

    def global_ranks(self, comm: Communicator) -> tuple[int, ...]:
        """Return the ranks of `comm` in torch's default group."""
        if isinstance(comm, TorchGroupCommunicator):
            # Such objects are equal if their groups are: how long one stays in the cache may differ between ranks.
            return tuple(dist.get_process_group_ranks(comm.group))
        if comm not in self._global_ranks:
            self.remember_ranks(comm, tuple(comm.all_gather_object(dist.get_rank())))
        return self._global_ranks[comm]

    def remember_ranks(self, comm: Communicator, ranks: tuple[int, ...]) -> None:
        if not isinstance(comm, TorchGroupCommunicator):
            self._global_ranks[comm] = ranks

    def remember(self, comm: Communicator, group: dist.ProcessGroup) -> None:
        """Not collective. Remember `group` as that of `comm`, as long as both exist."""
        if not isinstance(comm, TorchGroupCommunicator):
            self._given[comm] = weakref.ref(group)

    def process_group(self, comm: Communicator) -> dist.ProcessGroup:
        """Torch's group over the ranks of `comm`, of the default backend."""
        if isinstance(comm, TorchGroupCommunicator):
            return comm.group
        given = self._given[comm]() if comm in self._given else None
        if given is not None:
            return given
        ranks = self.global_ranks(comm)
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        return self._cached(("process group", ranks), lambda: _compat.new_group_of(ranks))

    def mesh(self, comm: Communicator) -> DeviceMesh:
        """Return a mesh of one dimension: the ranks of `comm`."""
        group = self.process_group(comm)
        return self._cached(("mesh", group.group_name), lambda: DeviceMesh.from_group(group, comm.device.type))

    @_compat.outside_of_modes
    def joined_mesh(self, outer: DeviceMesh, inner: DeviceMesh, tensor: Communicator) -> DeviceMesh:
        """Return a mesh of the dimensions of two unrelated meshes. Collective over `tensor`, the ranks of `inner`."""

        def make() -> DeviceMesh:
            outers = dict(zip(self.global_ranks(tensor), tensor.all_gather_object(outer.mesh.tolist()), strict=True))
            ranks = torch.tensor([outers[rank] for rank in inner.mesh.flatten().tolist()])
            ranks = ranks.movedim(0, -1).reshape(*outer.mesh.shape, *inner.mesh.shape)
            dims = [(mesh, dim) for mesh in (outer, inner) for dim in range(mesh.ndim)]
            groups = [mesh.get_group(dim) for mesh, dim in dims]
            names = tuple(f"{'tensor' if mesh is inner else 'data'}_{dim}" for mesh, dim in dims)
            return DeviceMesh.from_group(groups, outer.device_type, mesh=ranks, mesh_dim_names=names)

        return self._cached(("joined mesh", repr((outer.mesh.tolist(), inner.mesh.tolist()))), make)

    def topology(self) -> Topology:
        """Return which of them share a node. Collective over all ranks of the world."""

        def make() -> Topology:
            everyone, world = communicator_for(None, required=True), current_world()
            known = world.topology if world is not None else everyone.topology
            # torch.distributed alone does not know nodes.
            found = known or Topology.from_labels(everyone.all_gather_object(env.host_name()))
            if found.num_nodes == 1 and everyone.rank == 0:
                size = everyone.size
                log.info("HYBRID_SHARD on one node: the model is sharded over its %d rank(s), with one replica", size)
            return found

        return self._cached(("topology",), make)


_current: GroupCache | None = None


def _separates_by_default() -> bool:
    """Return whether gathers and reductions have communicators of their own where the program does not say so.

    Several at once hang on MI250X (rccl#2191), and where a device has one queue for all of them.
    """
    if env.device_connections() != 1:
        return torch.version.hip is None
    warnings.warn(
        "CUDA_DEVICE_MAX_CONNECTIONS=1: kernels of two communicators could wait for each other in one queue, so "
        "gathers and reductions share one. Unset the variable, or pass CommOptions(separate_reductions=...)",
        stacklevel=2,
    )
    return False


def rank_names(comm: Communicator) -> tuple[int, ...]:
    """Return its ranks in torch's default group, for messages. Collective over `comm`, the first time."""
    return GroupCache.current().global_ranks(comm) if dist.is_initialized() else tuple(range(comm.size))


Dim = Literal["shard", "replicate", "tensor"]


@dataclass(frozen=True, eq=False)
class UnitMesh:
    """The ranks of a unit, along up to three dimensions.

    Along "shard" they have different shards of each parameter, along "replicate" the same, along "tensor" other blocks
    of tensor-parallel parameters. Methods with dimensions as arguments are about the ranks that differ from this one in
    these alone, and without arguments about all ranks of the unit. A dimension that the mesh does not have counts as
    one rank. Methods that communicate or make groups raise a ``RuntimeError`` before torch.distributed is initialised.
    """

    strategy: ShardingStrategy
    # "shard" unless the strategy is NO_SHARD, "replicate" under that and the hybrid ones, "tensor" for units of a
    # tensor-parallel model
    along: Mapping[Dim, Communicator]
    data: Communicator | None  # over "replicate" and "shard"; None for a pair of groups that is not the world
    grid: np.ndarray | None  # int64, replicas x shards, ranks of `data`; None if that is None
    device_mesh: DeviceMesh | None = None  # the user's: (replicate, shard), or one of them
    tensor_mesh: DeviceMesh | None = None  # of the unit's DTensors; None without "tensor"

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
        """Return the number of these ranks."""
        return prod(comm.size for comm in self._chosen(dims).values())

    def is_first(self, *dims: Dim) -> bool:
        """Return whether this rank is the first in each of these dimensions."""
        return all(comm.rank == 0 for comm in self._chosen(dims).values())

    def comm(self, *dims: Dim) -> Communicator | Grid:
        """Return a communicator over them, a ``Grid`` for both data dimensions of a pair of groups that is not the
        world. Collective over these ranks, the first time."""
        chosen = dict(self._chosen(dims))
        tensor = chosen.pop("tensor", None)
        if not chosen:
            return tensor or FakeCommunicator(device=self.shard.device)
        data: Communicator | Grid = next(iter(chosen.values()))
        if len(chosen) == 2:
            data = self.data or Grid(self.shard, self.along["replicate"])
        if tensor is None:
            return data
        return Grid(data, tensor) if isinstance(data, Grid) else GroupCache.current().joined(data, tensor)[0]

    def connect(self) -> None:
        """Make the communicators that checkpoints and state dicts need. Collective over all ranks of the unit."""
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
        """Return their ranks in torch's default group, in ``comm``'s order. Collective over these, the first time."""
        return GroupCache.current().global_ranks(self.comm(*dims))

    @cached_property
    def places(self) -> tuple[tuple[int, int], ...]:
        """Collective over these ranks, the first time. The ranks of ``comm(dtensor_dim, "tensor")`` along both."""
        return GroupCache.current().joined(self.dtensor_ranks, self.along["tensor"])[1]

    @cached_property
    def copies(self) -> np.ndarray:
        """Collective over all ranks, the first time; needs `data`. int64, shards x replicas: the ranks of ``comm()``
        that have each shard, the one that writes it first. With several blocks those of the first block."""
        return self.ranks_by_dim()[:, :, 0].T

    @cached_property
    def block_copies(self) -> np.ndarray:
        """Collective over all ranks, the first time; needs `data`. int64: for each rank of ``comm(dtensor_dim,
        "tensor")`` the ranks of ``comm()`` that have the same block and shard."""
        rows = self.ranks_by_dim() if self.dtensor_dim == "replicate" else self.ranks_by_dim().swapaxes(0, 1)
        return np.array([rows[place, :, block] for place, block in self.places])

    def ranks_by_dim(self, *dims: Dim) -> np.ndarray:
        """Return the ranks of ``comm(*dims)``: int64, replicas x shards x tensor-parallel ranks. Collective over them,
        the first time. Both data dimensions need `data`."""
        chosen = self._chosen(dims)
        data = [comm for name, comm in chosen.items() if name != "tensor"]
        grid = self.grid
        if len(data) < 2 and dims:
            ranks = np.arange(data[0].size if data else 1)
            grid = ranks[:, None] if "replicate" in chosen else ranks[None]
        if "tensor" not in chosen:
            return grid[:, :, None]
        if not data:
            return np.arange(chosen["tensor"].size)[None, None]
        comm = data[0] if len(data) == 1 and dims else self.data
        _, places = GroupCache.current().joined(comm, chosen["tensor"])
        ranks = np.zeros((comm.size, chosen["tensor"].size), np.int64)
        ranks[tuple(np.array(places).T)] = np.arange(len(places))
        return ranks[grid]

    def placed(self, block: TensorBlock | None) -> tuple[DeviceMesh, list[Placement]]:
        """Mesh and placements of a ``DTensor`` of the unit. Collective over all ranks of the unit, the first time. Rows
        are cut along the last data dimension; along "tensor" the placements are those of `block`, if any."""
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
        """Mesh and placements of rows of a parameter, or of its `block`. Collective likewise. It is cut along `dim`."""
        outer = self.torch_mesh()
        if block is None:
            return outer, [Replicate()] * (outer.ndim - 1) + [ShardAlong(dim)]
        mesh, placements = self.placed(block)
        names = mesh.mesh_dim_names
        last = outer.mesh_dim_names[-1] if outer.mesh_dim_names else None
        mine = names.index(last) if names and last in names else outer.ndim - 1
        # Blocks are cut first. The mesh cuts along its first dimension first.
        later = zip(mesh.shape[mine + 1 :], placements[mine + 1 :], strict=True)
        factor = prod(size for size, placement in later if placement.is_shard(dim))
        placements[mine] = _compat.shard_of_rows(dim, factor)
        return mesh, placements

    def refuse_options(self, options: CommOptions) -> None:
        """Not collective. Raise ValueError for options that a backend of these ranks does not have."""
        if not isinstance(options, CommOptions):
            raise TypeError(f"comm_options must be a CommOptions or None, not {options!r}")
        for dim in ("shard", "replicate"):
            comm = self.along.get(dim)
            if comm is not None and comm.size > 1 and (lacking := comm.lacking(options)):
                raise ValueError(f"comm_options: {comm!r} does not have {lacking[0]}: leave it out, or use NCCL")

    def process_group(self) -> dist.ProcessGroup:
        """Torch's process group over them. Collective over `dtensor_ranks`, the first time."""
        return GroupCache.current().process_group(self.dtensor_ranks)

    def torch_mesh(self) -> DeviceMesh:
        """Return the user's mesh, or one of these ranks. Collective over `dtensor_ranks`, the first time."""
        return self.device_mesh or GroupCache.current().mesh(self.dtensor_ranks)

    def shard_mesh(self) -> DeviceMesh:
        """Return a mesh of the ranks along ``dtensor_dim`` alone. Collective likewise."""
        mesh = self.torch_mesh()
        return mesh if mesh.ndim == 1 else mesh[mesh.mesh_dim_names[-1]]

    def with_tensor(self, tensor_mesh: DeviceMesh | None) -> UnitMesh:
        """Return the same mesh with them as "tensor". Collective over the ranks of `tensor_mesh`, the first time."""
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
