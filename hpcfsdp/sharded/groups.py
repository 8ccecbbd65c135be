"""Who shards with whom, and who replicates what: from the arguments of the wrapper to communicators."""

from __future__ import annotations

import logging
import weakref
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import Replicate, Shard as ShardAlong
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp import _compat, env
from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.mesh import plan_mesh
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.errors import DisagreementError, LaunchError
from hpcfsdp.flat.layout import TensorBlock
from hpcfsdp.launch.topology import Topology
from hpcfsdp.world import current_world

log = logging.getLogger("hpcfsdp.groups")

_HYBRID = (ShardingStrategy.HYBRID_SHARD, _compat.HYBRID_SHARD_ZERO2)


@dataclass(frozen=True)
class TPGroup:
    """The ranks over which the tensors of a model are cut, one block each. See ``tp_group``.

    Attributes:
        mesh: of the DTensors.
        comm: over all of its ranks.
        global_ranks: those of `comm`, as torch's default group calls them.
    """

    mesh: DeviceMesh
    comm: Communicator
    global_ranks: tuple[int, ...]


@dataclass(frozen=True)
class Holders:
    """All ranks that have parts of a unit's parameters, without replicas: for each block, those that share it.

    Attributes:
        comm: over all of them.
        places: by its ranks, the rank among the dtensor_ranks of the unit, and among the ranks that are parallel over
            tensors.
        global_ranks: those of `comm`, as torch's default group calls them.
    """

    comm: Communicator
    places: tuple[tuple[int, int], ...]
    global_ranks: tuple[int, ...]


@dataclass(frozen=True, eq=False)
class Team:
    """All ranks that have parts of a unit's parameters, replicas too.

    Attributes:
        comm: over all of them.
        copies: int64, shards x copies: the ranks that have each shard, the one that speaks for them first.
        block_copies: likewise for each of the holders; None where the model is not parallel over tensors.
    """

    comm: Communicator
    copies: np.ndarray
    block_copies: np.ndarray | None = None


@dataclass(frozen=True)
class Groups:
    """The communicators of one unit.

    Attributes:
        strategy: never None.
        shard: the ranks among which each parameter is divided; of size 1 under ``NO_SHARD``.
        replicate: the ranks that hold the same shard, over which gradients are reduced once more; None where each
            shard exists once by the strategy. All ranks of `shard` have one rank here, and the other way round.
        everyone: all ranks of the unit, ``shard x replicate`` of them: for what has to be compared or agreed. None
            for a pair of groups that do not make up the whole world: then it takes one call over each of the two.
    """

    strategy: ShardingStrategy
    shard: Communicator
    replicate: Communicator | None
    everyone: Communicator | None
    copies: np.ndarray | None = field(default=None, compare=False)
    """int64, shards x replicas: the ranks in `everyone` that have each shard; None where `everyone` is."""
    device_mesh: DeviceMesh | None = field(default=None, compare=False)
    """What the user gave. Its last dimension is `shard`, and under ``NO_SHARD`` its only one is `replicate`."""
    tensor: TPGroup | None = field(default=None, compare=False)
    """The ranks that the model is parallel over tensors with, each of which has these groups with others; None where
    it is not."""

    @property
    def is_hybrid(self) -> bool:
        return self.strategy in _HYBRID

    @property
    def num_replicas(self) -> int:
        """How often each shard exists."""
        return 1 if self.replicate is None else self.replicate.size

    @property
    def num_ranks(self) -> int:
        """All that have parts of the unit."""
        return self.shard.size * self.num_replicas * (1 if self.tensor is None else self.tensor.comm.size)

    @property
    def is_first_replica(self) -> bool:
        """Whether this rank is one of those that speak for all replicas."""
        return self.replicate is None or self.replicate.rank == 0

    @property
    def is_first(self) -> bool:
        """Whether this rank is the first of all ranks of the unit, and of those that are parallel over tensors."""
        return self.shard.rank == 0 and self.is_first_replica and (self.tensor is None or self.tensor.comm.rank == 0)

    def connecting(self) -> list[Communicator]:
        """The communicators that together connect all ranks of the unit, those of other blocks of it, too.

        They are the lines of a grid; none where there is one rank.
        """
        comms = [self.shard, self.replicate] if self.everyone is None else [self.everyone]
        comms += [] if self.tensor is None else [self.tensor.comm]
        return [comm for comm in comms if comm is not None and comm.size > 1]

    def names_of(self, comm: Communicator) -> tuple[int, ...]:
        """Collective over `comm`, one of ``connecting``, the first time. What its ranks are called in messages."""
        return _Made.current().global_ranks(comm) if dist.is_initialized() else tuple(range(comm.size))

    @property
    def dtensor_ranks(self) -> Communicator:
        """The ranks that a distributed tensor of the unit lies on: those of `shard`, under ``NO_SHARD`` all of them."""
        return self.replicate if self.strategy is ShardingStrategy.NO_SHARD and self.replicate else self.shard

    def global_ranks(self) -> tuple[int, ...]:
        """Collective over `dtensor_ranks`, the first time. What they are called in torch's default group.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return _Made.current().global_ranks(self.dtensor_ranks)

    def all_global_ranks(self) -> tuple[int, ...]:
        """Collective over the unit's groups, the first time. All ranks of `shard` and of `replicate`, as above."""
        made = _Made.current()
        comms = [self.everyone] if self.everyone is not None else [c for c in (self.shard, self.replicate) if c]
        return tuple(rank for comm in comms for rank in made.global_ranks(comm))

    def holders(self) -> Holders:
        """Collective over the ranks that it has, the first time. For units of a model that is parallel over tensors.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        assert self.tensor is not None
        return _Made.current().holders(self.dtensor_ranks, self.tensor)

    def team(self) -> Team | None:
        """Collective over all ranks that have parts of the unit, the first time.

        None for a pair of groups that do not make up the world.

        Raises:
            RuntimeError: torch.distributed has not been initialised, and the model is parallel over tensors.
        """
        if self.everyone is None or self.copies is None:
            return None
        return Team(self.everyone, self.copies) if self.tensor is None else _Made.current().team(self)

    def source_ranks(self) -> tuple[int, ...]:
        """Collective over them, the first time. The ranks that distributed tensors of the unit lie on, as above."""
        return self.global_ranks() if self.tensor is None else self.holders().global_ranks

    def placed(self, block: TensorBlock | None) -> tuple[DeviceMesh, list[Placement]]:
        """Collective over the ranks that have the unit, the first time. How a ``DTensor`` of the unit is placed.

        Rows are cut over the ranks of `shard`, and over those that are parallel over tensors whatever the block says.

        Args:
            block: of the parameter; None for one that is not cut over these.
        """
        mesh = self.mesh()
        data: list[Placement] = [Replicate()] * (mesh.ndim - 1) + [ShardAlong(0)]
        if self.tensor is None:
            return mesh, data
        across = [Replicate()] * self.tensor.mesh.ndim if block is None else list(block.placements)
        joined = _compat.common_mesh(mesh, self.tensor.mesh)
        if joined is None:
            return _Made.current().joined_mesh(mesh, self.tensor), data + across
        names = (*mesh.mesh_dim_names, *self.tensor.mesh.mesh_dim_names)
        placed = dict(zip(names, data + across, strict=True))
        return joined, [placed[name] for name in joined.mesh_dim_names]

    def process_group(self) -> dist.ProcessGroup:
        """Collective over `dtensor_ranks`, the first time. Torch's process group over them.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return _Made.current().process_group(self.dtensor_ranks)

    def mesh(self) -> DeviceMesh:
        """Collective over `dtensor_ranks`, the first time. The user's mesh, or one of a single dimension, these ranks.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return self.device_mesh or _Made.current().mesh(self.dtensor_ranks)


def resolve_groups(
    process_group: Any, device_mesh: DeviceMesh | None, sharding_strategy: ShardingStrategy | None
) -> Groups:
    """Collective over all ranks that are to be in the groups. The communicators for the wrapper's arguments.

    ``FULL_SHARD`` and ``SHARD_GRAD_OP`` shard over `process_group`, a 1-D `device_mesh`, or all ranks. ``NO_SHARD``
    replicates over them. The hybrid strategies take a pair (shard, replicate) of groups, a 2-D mesh with the dimensions
    (replicate, shard), or nothing: then they shard within each node and replicate across nodes. Nodes are those of the
    world, and without ``hpcfsdp.init`` ranks whose hosts have one name; visible devices are never counted. These
    groups are made once, however many units ask for them.

    Args:
        process_group: a ``ProcessGroup`` of torch or a ``Communicator``, a pair of them, or the ``Groups`` of an outer
            unit, which are used again, also under another strategy.
        device_mesh: instead of `process_group`.
        sharding_strategy: None for ``FULL_SHARD``, or that of the ``Groups``.

    Raises:
        TypeError: an argument of a type that is none of these.
        ValueError: `process_group` and `device_mesh` are both given, or do not fit the strategy.
        LaunchError: nodes hold different numbers of ranks, or ranks lie on them in no order that groups can follow.
        DisagreementError: a pair of groups is no grid: ranks that share one have different places in the other.
        RuntimeError: there is no process group yet.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh were both given: pass one of them")
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch DeviceMesh, not {type(device_mesh).__name__}")
    strategy = _strategy(process_group, sharding_strategy)
    if isinstance(process_group, Groups):
        return _regrouped(process_group, strategy)
    if strategy in _HYBRID:
        return _hybrid(process_group, device_mesh, strategy)
    if isinstance(process_group, (tuple, list)):
        raise ValueError(
            f"a pair (shard, replicate) of process groups was given under {strategy.name}, which takes one group; for "
            "a pair use HYBRID_SHARD"
        )
    if device_mesh is not None:
        if device_mesh.ndim != 1:
            raise ValueError(
                f"{strategy.name} takes a device_mesh of one dimension, not {device_mesh.ndim}: pass one of them, as "
                "mesh['shard'], or use HYBRID_SHARD, which takes (replicate, shard)"
            )
        process_group = device_mesh.get_group()
    return _plain(_communicator(process_group), strategy, device_mesh)


def _strategy(process_group: Any, given: ShardingStrategy | None) -> ShardingStrategy:
    if given is None:
        return process_group.strategy if isinstance(process_group, Groups) else ShardingStrategy.FULL_SHARD
    if not isinstance(given, ShardingStrategy):
        raise TypeError(f"sharding_strategy must be a ShardingStrategy, not {given!r}")
    return given


def _plain(comm: Communicator, strategy: ShardingStrategy, mesh: DeviceMesh | None = None) -> Groups:
    if strategy is ShardingStrategy.NO_SHARD:
        return Groups(strategy, FakeCommunicator(device=comm.device), comm, comm, np.arange(comm.size)[None, :], mesh)
    return Groups(strategy, comm, None, comm, np.arange(comm.size)[:, None], mesh)


def _grid(
    strategy: ShardingStrategy,
    shard: Communicator,
    replicate: Communicator,
    everyone: Communicator | None,
    mesh: DeviceMesh | None = None,
) -> Groups:
    """Collective over `everyone`."""
    copies = None
    if everyone is not None:
        copies = np.zeros((shard.size, replicate.size), np.int64)  # in a fake world all ranks have one place
        for rank, (replica, part) in enumerate(everyone.all_gather_object((replicate.rank, shard.rank))):
            copies[part, replica] = rank
    return Groups(strategy, shard, replicate, everyone, copies, mesh)


def _regrouped(groups: Groups, strategy: ShardingStrategy) -> Groups:
    """The groups of another unit for this strategy."""
    if strategy is groups.strategy:
        return groups
    if strategy in _HYBRID and groups.is_hybrid:
        return replace(groups, strategy=strategy)
    if strategy not in _HYBRID and groups.everyone is not None:
        mesh = groups.device_mesh if groups.device_mesh is not None and groups.device_mesh.ndim == 1 else None
        return replace(_plain(groups.everyone, strategy, mesh), tensor=groups.tensor)
    raise ValueError(
        f"{strategy.name} does not fit the process groups of {groups.strategy.name} that the outer unit has: give this "
        "unit a process_group or a device_mesh of its own"
    )


def _hybrid(process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy) -> Groups:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"{strategy.name} takes a device_mesh of two dimensions (replicate, shard), not {device_mesh.ndim}, "
                "for example hpcfsdp.init().mesh(replicate='nodes', shard='node')"
            )
        replicate, shard = (_communicator(device_mesh.get_group(place)) for place in (0, 1))
        return _grid(strategy, shard, replicate, _members_of(device_mesh), device_mesh)
    if process_group is None:
        shard, replicate = _node_groups()
        return _grid(strategy, shard, replicate, communicator_for(None, required=True))
    if not isinstance(process_group, (tuple, list)) or len(process_group) != 2:
        given = type(process_group).__name__
        if isinstance(process_group, (tuple, list)):
            given += f" of {len(process_group)}"
        raise ValueError(
            f"{strategy.name} takes a pair (shard, replicate) of process groups, not {given}; without one it shards "
            "within each node and replicates across nodes"
        )
    if None in process_group:
        raise ValueError(f"{strategy.name} was given {process_group}: both groups of the pair (shard, replicate) count")
    shard, replicate = (_communicator(group) for group in process_group)
    _check_grid(shard, replicate)
    everyone = _default_or_none()
    if everyone is not None and everyone.size != shard.size * replicate.size:
        everyone = None
    return _grid(strategy, shard, replicate, everyone)


def _communicator(group: Any) -> Communicator:
    """The communicator for a process group, which is remembered as the one that it belongs to."""
    comm = communicator_for(group, required=True)
    if isinstance(group, dist.ProcessGroup):
        _Made.current().remember(comm, group)
    return comm


def _default_or_none() -> Communicator | None:
    """The communicator over all ranks, where there is one."""
    if current_world() is None and not dist.is_initialized():
        return None
    return communicator_for(None, required=True)


def _check_grid(shard: Communicator, replicate: Communicator) -> None:
    """Collective over both. Ranks that shard one replica must be one replica, and the other way round."""
    rows = shard.all_gather_object((replicate.rank, replicate.size))
    columns = replicate.all_gather_object((shard.rank, shard.size))
    for name, places, other in (("shard", rows, "replicate"), ("replicate", columns, "shard")):
        if len(set(places)) > 1:
            raise DisagreementError(
                f"the process groups (shard, replicate) make no grid: the ranks of this rank's {name} group are "
                + ", ".join(f"{place} of {size}" for place, size in places)
                + f" in their {other} groups, and should be the same in all of them"
            )


class _Made:
    """What has been made for the process group and the world that are current, neither of which is held."""

    def __init__(self) -> None:
        world = current_world()
        self._process_group = weakref.ref(dist.group.WORLD, self._forget)
        self._world = weakref.ref(world) if world is not None else None
        self._subgroups: dict[tuple[int, ...], Communicator] = {}
        self._process_groups: dict[tuple[int, ...], dist.ProcessGroup] = {}
        self._holders: dict[tuple[tuple[int, ...], tuple[int, ...]], Holders] = {}
        self._teams: dict[tuple[tuple[int, ...], tuple[int, ...], ShardingStrategy], Team] = {}
        self._meshes: dict[str, DeviceMesh] = {}  # by the name of the group, which must not be held either
        self._given: weakref.WeakKeyDictionary[Communicator, weakref.ref[dist.ProcessGroup]]
        self._given = weakref.WeakKeyDictionary()
        self._global_ranks: weakref.WeakKeyDictionary[Communicator, tuple[int, ...]] = weakref.WeakKeyDictionary()
        self._topology: Topology | None = None

    @classmethod
    def current(cls) -> _Made:
        global _made
        if dist.group.WORLD is None:
            raise RuntimeError("torch.distributed has no process group yet: call hpcfsdp.init() first")
        if _made is None or not _made._is_current():
            _made = cls()
        return _made

    def _is_current(self) -> bool:
        world = current_world()
        same_world = world is None if self._world is None else world is not None and self._world() is world
        return same_world and self._process_group() is dist.group.WORLD

    def _forget(self, _process_group: weakref.ref) -> None:
        # Groups of gloo that outlive the end of torch.distributed can end the process with an abort.
        self._subgroups.clear()
        self._process_groups.clear()
        self._meshes.clear()
        self._holders.clear()
        self._teams.clear()

    def subgroup(self, everyone: Communicator, ranks: tuple[int, ...]) -> Communicator:
        """Collective over `ranks` of `everyone`, all ranks, the first time. None is made for one rank, or for all."""
        if len(ranks) == everyone.size:
            return everyone
        if ranks not in self._subgroups:
            alone = len(ranks) == 1
            self._subgroups[ranks] = FakeCommunicator(device=everyone.device) if alone else everyone.subgroup(ranks)
        return self._subgroups[ranks]

    def global_ranks(self, comm: Communicator) -> tuple[int, ...]:
        """Collective over `comm`, the first time. Its ranks in torch's default group."""
        if isinstance(comm, TorchGroupCommunicator):
            # Such objects are equal if their groups are: how long one is remembered may differ between ranks.
            return tuple(dist.get_process_group_ranks(comm.group))
        if comm not in self._global_ranks:
            self._global_ranks[comm] = tuple(comm.all_gather_object(dist.get_rank()))
        return self._global_ranks[comm]

    def holders(self, dtensor_ranks: Communicator, tensor: TPGroup) -> Holders:
        """Collective over all ranks that have these with each other, the first time."""
        key = self.global_ranks(dtensor_ranks), tensor.global_ranks
        if key not in self._holders:
            lines = tensor.comm.all_gather_object(key[0])
            places = {rank: (place, block) for block, line in enumerate(lines) for place, rank in enumerate(line)}
            ranks = tuple(sorted(places))
            comm = self.subgroup(communicator_for(None, required=True), ranks)
            self._holders[key] = Holders(comm, tuple(places[rank] for rank in ranks), ranks)
        return self._holders[key]

    def team(self, groups: Groups) -> Team:
        """Collective over all ranks of a unit of a model that is parallel over tensors, the first time."""
        key = self.global_ranks(groups.everyone), groups.tensor.global_ranks, groups.strategy
        if key not in self._teams:
            lines = groups.tensor.comm.all_gather_object(key[0])
            ranks = tuple(sorted(rank for line in lines for rank in line))
            places = {rank: place for place, rank in enumerate(ranks)}
            holders = self.holders(groups.dtensor_ranks, groups.tensor)
            one_each = groups.dtensor_ranks is groups.everyone
            having = np.arange(groups.everyone.size)[:, None] if one_each else groups.copies
            self._teams[key] = Team(
                self.subgroup(communicator_for(None, required=True), ranks),
                np.array([[places[lines[0][copy]] for copy in copies] for copies in groups.copies]),
                np.array([[places[lines[block][copy]] for copy in having[place]] for place, block in holders.places]),
            )
        return self._teams[key]

    def remember(self, comm: Communicator, group: dist.ProcessGroup) -> None:
        """Have `group` be that of `comm`, as long as both live."""
        if not isinstance(comm, TorchGroupCommunicator):
            self._given[comm] = weakref.ref(group)

    def process_group(self, comm: Communicator) -> dist.ProcessGroup:
        """Collective over `comm`, the first time. Torch's group over its ranks, of the default backend."""
        if isinstance(comm, TorchGroupCommunicator):
            return comm.group
        given = self._given[comm]() if comm in self._given else None
        if given is not None:
            return given
        ranks = self.global_ranks(comm)
        if ranks == tuple(range(dist.get_world_size())):
            return dist.group.WORLD
        if ranks not in self._process_groups:
            self._process_groups[ranks] = _compat.new_group_of(ranks)
        return self._process_groups[ranks]

    def mesh(self, comm: Communicator) -> DeviceMesh:
        """Collective over `comm`, the first time. A mesh of one dimension, its ranks."""
        group = self.process_group(comm)
        if group.group_name not in self._meshes:
            self._meshes[group.group_name] = DeviceMesh.from_group(group, comm.device.type)
        return self._meshes[group.group_name]

    def joined_mesh(self, outer: DeviceMesh, tensor: TPGroup) -> DeviceMesh:
        """Collective over ``tensor.comm``, the first time. A mesh of the dimensions of both, which are not of one."""
        key = repr((outer.mesh.tolist(), tensor.mesh.mesh.tolist()))
        if key not in self._meshes:
            lines = dict(zip(tensor.global_ranks, tensor.comm.all_gather_object(outer.mesh.tolist()), strict=True))
            inner = tensor.mesh.mesh
            ranks = torch.tensor([lines[rank] for rank in inner.flatten().tolist()])
            ranks = ranks.movedim(0, -1).reshape(*outer.mesh.shape, *inner.shape)
            dims = [(mesh, dim) for mesh in (outer, tensor.mesh) for dim in range(mesh.ndim)]
            groups = [mesh.get_group(dim) for mesh, dim in dims]
            names = tuple(f"{'tensor' if mesh is tensor.mesh else 'data'}_{dim}" for mesh, dim in dims)
            self._meshes[key] = DeviceMesh.from_group(groups, outer.device_type, mesh=ranks, mesh_dim_names=names)
        return self._meshes[key]

    def topology(self, everyone: Communicator) -> Topology:
        """Collective over `everyone`, all ranks, the first time. Which of them share a node."""
        if self._topology is None:
            world = current_world()
            known = world.topology if world is not None else getattr(everyone, "topology", None)
            # torch.distributed alone knows nothing of nodes.
            self._topology = known or Topology.from_labels(everyone.all_gather_object(env.host_name()))
            if self._topology.num_nodes == 1 and everyone.rank == 0:
                log.info(
                    "HYBRID_SHARD on one node: each of its %d rank(s) holds a part, and there is one replica",
                    everyone.size,
                )
        return self._topology


_made: _Made | None = None


def _members_of(mesh: DeviceMesh) -> Communicator:
    """Collective over the ranks of a mesh, the first time. A communicator over them all."""
    everyone = communicator_for(None, required=True)
    return _Made.current().subgroup(everyone, tuple(sorted(mesh.mesh.flatten().tolist())))


def tp_group(mesh: DeviceMesh) -> TPGroup:
    """Collective over the ranks of `mesh`, the first time. What DTensors on it are parallel over."""
    comm = communicator_for(mesh.get_group(), required=True) if mesh.ndim == 1 else _members_of(mesh)
    return TPGroup(mesh, comm, _Made.current().global_ranks(comm))


def _node_groups() -> tuple[Communicator, Communicator]:
    """Collective over all ranks, the first time. The ranks of this node, and those of this local rank on all nodes."""
    everyone, made = communicator_for(None, required=True), _Made.current()
    topology = made.topology(everyone)
    if topology.ranks_per_node is None:
        raise LaunchError(
            f"HYBRID_SHARD shards within each node and replicates across nodes, which needs nodes of one size, but "
            f"they are {topology}: start the same number of ranks on each (srun --ntasks-per-node), or pass "
            "process_group=(shard, replicate) or a device_mesh"
        )
    plan = plan_mesh(topology, {"replicate": "nodes", "shard": "node"})
    replicate, shard = (
        made.subgroup(everyone, next(line for line in plan.lines(dimension) if everyone.rank in line))
        for dimension in (0, 1)
    )
    made.process_group(shard)  # programs read it, and not on all ranks at once
    return shard, replicate
