"""Groups of ranks, each made once: communicators, torch's process groups and meshes."""

from __future__ import annotations

import logging
import weakref
from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpcfsdp import _compat, accelerator, env
from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.comm.torch_group import TorchGroupCommunicator
from hpcfsdp.launch.topology import Topology
from hpcfsdp.world import current_world

log = logging.getLogger("hpcfsdp.groups")


class GroupCache:
    """Groups made for the current process group and the current world. It keeps neither of these alive.

    Methods are collective over the ranks that they name, the first time.
    """

    def __init__(self) -> None:
        world = current_world()
        self._process_group = weakref.ref(dist.group.WORLD, self._forget)
        self._world = weakref.ref(world) if world is not None else None
        self._made: dict[tuple[Any, ...], Any] = {}  # meshes by the name of their group: not by the group, to let it go
        self._given: weakref.WeakKeyDictionary[Communicator, weakref.ref[dist.ProcessGroup]]
        self._given = weakref.WeakKeyDictionary()
        self._global_ranks: weakref.WeakKeyDictionary[Communicator, tuple[int, ...]] = weakref.WeakKeyDictionary()

    @classmethod
    def current(cls) -> GroupCache:
        """Not collective.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
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
        """A communicator over ascending ranks of the world. Makes no new one for one rank, or for all."""
        everyone = communicator_for(None, required=True)
        if len(ranks) == everyone.size:
            return everyone
        if len(ranks) == 1:
            return self._cached(("alone",), lambda: FakeCommunicator(device=everyone.device))
        return self._cached(("subgroup", ranks), lambda: everyone.subgroup(ranks))

    def members_of(self, mesh: DeviceMesh) -> Communicator:
        """A communicator over all ranks of a mesh."""
        if mesh.ndim == 1:
            return communicator_for(mesh.get_group(), required=True)
        return self.subgroup(tuple(sorted(mesh.mesh.flatten().tolist())))

    def joined(self, line: Communicator, tensor: Communicator) -> tuple[Communicator, tuple[tuple[int, int], ...]]:
        """A communicator over the ranks of `line`, and of the lines that the other ranks of `tensor` pass.

        Also, for each of its ranks, the rank in its line, and the rank of that line in `tensor`.
        """
        key = "joined", self.global_ranks(line), self.global_ranks(tensor)
        if key not in self._made:
            lines = tensor.all_gather_object(key[1])
            places = {rank: (place, block) for block, ranks in enumerate(lines) for place, rank in enumerate(ranks)}
            ranks = tuple(sorted(places))
            comm = self.subgroup(ranks)
            self.remember_ranks(comm, ranks)
            self._made[key] = comm, tuple(places[rank] for rank in ranks)
        return self._made[key]

    def host_of(self, comm: Communicator) -> Communicator | None:
        """A communicator of the same ranks through host memory; None if there is none."""
        world = current_world()
        if comm.device.type == "cpu":
            return comm
        if world is None or isinstance(comm, FakeCommunicator):
            return None
        ranks = self.global_ranks(comm)
        if len(ranks) == world.size:
            return world.host
        return self._cached(("host", ranks), lambda: world.host.subgroup(ranks))

    def for_reductions(self, comm: Communicator, *, narrow: bool) -> Communicator:
        """A communicator of the same ranks whose collectives do not wait for those of `comm`.

        On an accelerator those of one communicator run in the order of their calls. How gathers and reductions follow
        each other depends on the gradients of a rank, and may differ between ranks.

        Args:
            narrow: for values of 16 bits or less, which go between nodes once for each node.
        """
        if not isinstance(comm, TorchGroupCommunicator) or not accelerator.is_accelerator(comm.device) or comm.size < 2:
            return comm
        ranks, world = self.global_ranks(comm), current_world()

        def divide() -> None:
            labels = comm.all_gather_object(env.host_name()) if world is None else map(world.topology.node_rank, ranks)
            made.divide(Topology.from_labels(list(labels)))

        made = self._cached(("reductions", ranks), lambda: comm.subgroup(range(comm.size)))
        if narrow:
            self._cached(("divided", ranks), divide)
        return made

    def global_ranks(self, comm: Communicator) -> tuple[int, ...]:
        """The ranks of `comm` in torch's default group."""
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
        """A mesh of one dimension: the ranks of `comm`."""
        group = self.process_group(comm)
        return self._cached(("mesh", group.group_name), lambda: DeviceMesh.from_group(group, comm.device.type))

    @_compat.outside_of_modes
    def joined_mesh(self, outer: DeviceMesh, inner: DeviceMesh, tensor: Communicator) -> DeviceMesh:
        """Collective over `tensor`, the ranks of `inner`. A mesh of the dimensions of two unrelated meshes."""

        def make() -> DeviceMesh:
            lines = dict(zip(self.global_ranks(tensor), tensor.all_gather_object(outer.mesh.tolist()), strict=True))
            ranks = torch.tensor([lines[rank] for rank in inner.mesh.flatten().tolist()])
            ranks = ranks.movedim(0, -1).reshape(*outer.mesh.shape, *inner.mesh.shape)
            dims = [(mesh, dim) for mesh in (outer, inner) for dim in range(mesh.ndim)]
            groups = [mesh.get_group(dim) for mesh, dim in dims]
            names = tuple(f"{'tensor' if mesh is inner else 'data'}_{dim}" for mesh, dim in dims)
            return DeviceMesh.from_group(groups, outer.device_type, mesh=ranks, mesh_dim_names=names)

        return self._cached(("joined mesh", repr((outer.mesh.tolist(), inner.mesh.tolist()))), make)

    def topology(self) -> Topology:
        """Collective over all ranks of the world. Which of them share a node."""
        return self._cached(("topology",), _topology)


_current: GroupCache | None = None


def _topology() -> Topology:
    everyone, world = communicator_for(None, required=True), current_world()
    known = world.topology if world is not None else getattr(everyone, "topology", None)
    # torch.distributed alone does not know nodes.
    found = known or Topology.from_labels(everyone.all_gather_object(env.host_name()))
    if found.num_nodes == 1 and everyone.rank == 0:
        log.info("HYBRID_SHARD on one node: the model is sharded over its %d rank(s), with one replica", everyone.size)
    return found


def rank_names(comm: Communicator) -> tuple[int, ...]:
    """Collective over `comm`, the first time. Its ranks in torch's default group, for messages."""
    return GroupCache.current().global_ranks(comm) if dist.is_initialized() else tuple(range(comm.size))
