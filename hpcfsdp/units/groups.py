"""The mesh of a unit from the user's arguments: groups, pairs of groups, meshes, or nothing."""

from collections.abc import Collection, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator, communicator_for, raise_together_over
from hpcfsdp.comm.mesh import plan_mesh
from hpcfsdp.errors import DisagreementError, LaunchError, ShardingError
from hpcfsdp.units.flat_unit import units_in
from hpcfsdp.units.own import unit_fqn
from hpcfsdp.units.unit_mesh import GroupCache, UnitMesh, describe_mesh
from hpcfsdp.world import current_world

_HYBRID = (ShardingStrategy.HYBRID_SHARD, _compat.hybrid_shard_zero2())


def resolve_mesh(
    process_group: Any, device_mesh: DeviceMesh | None, sharding_strategy: ShardingStrategy | None
) -> UnitMesh:
    """Return the mesh for the wrapper's arguments, without "tensor". Collective over its ranks.

    ``FULL_SHARD`` and ``SHARD_GRAD_OP`` shard over `process_group`, a 1-D `device_mesh`, or all ranks. ``NO_SHARD``
    replicates over them. The hybrid strategies take a pair (shard, replicate) of groups, a 2-D mesh with the dimensions
    (replicate, shard), or nothing: then they shard within each node and replicate across nodes. Nodes are those of the
    world; without ``hpcfsdp.init`` ranks with one host name are a node. Groups are made once for all units.

    `process_group` may also be a ``Communicator``, a pair of them, or the ``UnitMesh`` of an outer unit, also under
    another strategy. `sharding_strategy` None is ``FULL_SHARD``, or that of the ``UnitMesh``.
    """
    if process_group is not None and device_mesh is not None:
        raise ValueError("process_group and device_mesh were both given: pass one of them")
    if device_mesh is not None and not isinstance(device_mesh, DeviceMesh):
        raise TypeError(f"device_mesh must be a torch DeviceMesh, not {type(device_mesh).__name__}")
    of_outer = isinstance(process_group, UnitMesh)
    strategy = process_group.strategy if of_outer else ShardingStrategy.FULL_SHARD
    strategy = strategy if sharding_strategy is None else sharding_strategy
    if not isinstance(strategy, ShardingStrategy):
        raise TypeError(f"sharding_strategy must be a ShardingStrategy, not {strategy!r}")
    if of_outer:
        return _for_strategy(process_group, strategy)
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
                f"{strategy.name} takes a device_mesh of one dimension, not {device_mesh.ndim}: pass one dimension "
                "of it, such as mesh['shard'], or use HYBRID_SHARD, which takes (replicate, shard)"
            )
        process_group = device_mesh.get_group()
    return _plain(_communicator(process_group), strategy, device_mesh)


def _plain(comm: Communicator, strategy: ShardingStrategy, device_mesh: DeviceMesh | None = None) -> UnitMesh:
    ranks = np.arange(comm.size)
    if strategy is ShardingStrategy.NO_SHARD:
        return UnitMesh(strategy, {"replicate": comm}, comm, ranks[:, None], device_mesh)
    return UnitMesh(strategy, {"shard": comm}, comm, ranks[None, :], device_mesh)


def _of_two(
    strategy: ShardingStrategy,
    shard: Communicator,
    replicate: Communicator,
    data: Communicator | None,
    device_mesh: DeviceMesh | None = None,
) -> UnitMesh:
    """Make the mesh of a unit. Collective over `data`."""
    grid = None
    if data is not None:
        grid = np.zeros((replicate.size, shard.size), np.int64)  # in a fake world all ranks have one place
        for rank, place in enumerate(data.all_gather_object((replicate.rank, shard.rank))):
            grid[place] = rank
    return UnitMesh(strategy, {"shard": shard, "replicate": replicate}, data, grid, device_mesh)


def _for_strategy(mesh: UnitMesh, strategy: ShardingStrategy) -> UnitMesh:
    """Return the mesh of another unit for this strategy."""
    if strategy is mesh.strategy:
        return mesh
    if strategy in _HYBRID and mesh.is_hybrid:
        return replace(mesh, strategy=strategy)
    if strategy not in _HYBRID and mesh.data is not None:
        given = mesh.device_mesh if mesh.device_mesh is not None and mesh.device_mesh.ndim == 1 else None
        return _plain(mesh.data, strategy, given).with_tensor(mesh.tensor_mesh)
    raise ValueError(
        f"{strategy.name} does not fit the process groups of the outer unit, which uses {mesh.strategy.name}: give "
        "this unit a process_group or a device_mesh of its own"
    )


def _hybrid(process_group: Any, device_mesh: DeviceMesh | None, strategy: ShardingStrategy) -> UnitMesh:
    if device_mesh is not None:
        if device_mesh.ndim != 2:
            raise ValueError(
                f"{strategy.name} takes a device_mesh of two dimensions (replicate, shard), not {device_mesh.ndim}, "
                "for example hpcfsdp.init().mesh(replicate='nodes', shard='node')"
            )
        replicate, shard = (_communicator(device_mesh.get_group(place)) for place in (0, 1))
        return _of_two(strategy, shard, replicate, GroupCache.current().members_of(device_mesh), device_mesh)
    if process_group is None:
        everyone, cache = communicator_for(None, required=True), GroupCache.current()
        topology = cache.topology()
        if topology.ranks_per_node is None:
            raise LaunchError(
                f"HYBRID_SHARD shards within each node and replicates across nodes, which needs nodes of one size, but "
                f"they are {topology}: start the same number of ranks on each (srun --ntasks-per-node), or pass "
                "process_group=(shard, replicate) or a device_mesh"
            )
        plan = plan_mesh(topology, {"replicate": "nodes", "shard": "node"})
        mine = [next(ranks for ranks in plan.lines(dimension) if everyone.rank in ranks) for dimension in (0, 1)]
        replicate, shard = map(cache.subgroup, mine)
        cache.process_group(shard)  # programs read it later, on some ranks alone
        return _of_two(strategy, shard, replicate, everyone)
    if not isinstance(process_group, (tuple, list)) or len(process_group) != 2:
        given = type(process_group).__name__
        given += f" of {len(process_group)}" if isinstance(process_group, (tuple, list)) else ""
        raise ValueError(
            f"{strategy.name} takes a pair (shard, replicate) of process groups, not {given}; without a pair it "
            "shards within each node and replicates across nodes"
        )
    if None in process_group:
        raise ValueError(f"{strategy.name} needs both groups of a pair (shard, replicate), not {process_group}")
    shard, replicate = (_communicator(group) for group in process_group)
    _check_grid(shard, replicate)
    has_world = current_world() is not None or dist.is_initialized()
    everyone = communicator_for(None, required=True) if has_world else None
    covered = everyone is not None and everyone.size == shard.size * replicate.size
    return _of_two(strategy, shard, replicate, everyone if covered else None)


def _communicator(group: Any) -> Communicator:
    """Return the communicator for a process group, remembered with that group."""
    comm = communicator_for(group, required=True)
    if isinstance(group, dist.ProcessGroup):
        GroupCache.current().remember(comm, group)
    return comm


def _check_grid(shard: Communicator, replicate: Communicator) -> None:
    """Refuse groups that are not the rows and columns of a grid. Collective over both."""
    rows = shard.all_gather_object((replicate.rank, replicate.size))
    columns = replicate.all_gather_object((shard.rank, shard.size))
    for name, places, other in (("shard", rows, "replicate"), ("replicate", columns, "shard")):
        if len(set(places)) > 1:
            raise DisagreementError(
                f"the process groups (shard, replicate) do not form a grid: the ranks of this rank's {name} group are "
                + ", ".join(f"{place} of {size}" for place, size in places)
                + f" in their {other} groups, but must have the same place and size in all of them"
            )


def with_dtensors(mesh: UnitMesh, module: nn.Module, ignored: Collection[torch.Tensor] = ()) -> UnitMesh:
    """Return `mesh` with the ranks of the DTensors of `module`, if any, as "tensor". Collective over both."""
    sharing = mesh.ranks("replicate", "shard") if dist.is_initialized() else ()
    with raise_together_over(mesh.subgroups()):
        tensor_mesh = _tensor_mesh(module, sharing, ignored)
    return mesh.with_tensor(tensor_mesh)


def _tensor_mesh(module: nn.Module, sharing: Sequence[int], ignored: Collection[torch.Tensor]) -> DeviceMesh | None:
    # Rows that units inside have are DTensors, too.
    dtensors = [(fqn, param) for fqn, param in module.named_parameters() if isinstance(param, DTensor)]
    named = [(fqn, param) for fqn, param in dtensors if unit_fqn(param) is None]
    # Those that are ignored may be on any ranks; they count only where there are no others.
    if any(param not in ignored for _, param in named):
        named = [(fqn, param) for fqn, param in named if param not in ignored]
    else:  # the unit itself is not tensor-parallel, but others of the model are
        apart = [each for each in named if each[1].device_mesh.get_coordinate() is not None]
        named = [(fqn, param) for fqn, param in apart if len(_shared(param.device_mesh, sharing)) == 1][:1]
    inner = {unit.name: unit.mesh.tensor_mesh for unit in units_in(module) if unit.mesh.tensor_mesh is not None}
    meshes = [(f"the unit {name}", mesh) for name, mesh in inner.items()]
    meshes += [(repr(fqn), param.device_mesh) for fqn, param in named]
    if not meshes:
        return None
    what, mesh = meshes[0]
    for other, its_mesh in meshes:
        if its_mesh != mesh:
            raise ShardingError(
                f"{what} is on the ranks {describe_mesh(mesh)}, and {other} on {describe_mesh(its_mesh)}: "
                "parallelize the whole model over one mesh"
            )
    if mesh.get_coordinate() is None:
        raise ShardingError(
            f"{what} is a DTensor on the ranks {describe_mesh(mesh)}, and this rank is not one of them: wrap it on "
            "those ranks alone, or parallelize it over a mesh that includes this rank"
        )
    check_apart(what, mesh, type(module).__name__, sharing)
    return mesh


def _shared(mesh: DeviceMesh, sharing: Sequence[int]) -> list[int]:
    return sorted(set(mesh.mesh.flatten().tolist()).intersection(sharing))


def check_apart(what: str, mesh: DeviceMesh, unit: str, sharing: Sequence[int]) -> None:
    """Refuse a unit that is sharded over tensor-parallel ranks: `mesh` and `sharing` share more than one rank."""
    both = _shared(mesh, sharing)
    if len(both) > 1:
        raise ShardingError(
            f"{what} is tensor-parallel over the ranks {describe_mesh(mesh)}, and {unit} would also be sharded over "
            f"{both} of them: make one mesh, such as hpcfsdp.init().mesh(shard=None, tensor=2), parallelize over "
            "mesh['tensor'], and pass device_mesh=mesh['shard']"
        )
