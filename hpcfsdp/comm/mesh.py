"""Meshes of ranks that follow the nodes: planned from a ``Topology``, made as torch's ``DeviceMesh``."""

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from hpcfsdp import _compat
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.topology import Topology

Extent = int | Literal["nodes", "node"] | None


@dataclass(frozen=True)
class MeshPlan:
    """Named dimensions over all ranks, the outermost first, and the ranks in row-major order.

    With more than one dimension they run through one node after the other, so that the last dimensions are within nodes
    wherever their product divides the ranks of a node.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]

    @_compat.outside_of_modes
    def lines(self, dimension: int) -> list[tuple[int, ...]]:
        """Return the groups of ranks along a dimension, each in the order of its coordinate."""
        ranks = torch.tensor(self.ranks, dtype=torch.int64).view(self.shape)
        return [tuple(line) for line in ranks.movedim(dimension, -1).reshape(-1, self.shape[dimension]).tolist()]


def plan_mesh(topology: Topology, dimensions: Mapping[str, Extent]) -> MeshPlan:
    """Return the mesh with these dimensions on these nodes, or raise a LaunchError. See ``World.mesh``."""
    if not dimensions:
        raise LaunchError("a mesh needs at least one dimension, for example shard=None")
    known: dict[str, int | None] = {}  # with numbers in place of "node" and "nodes"
    for name, extent in dimensions.items():
        if extent in ("nodes", "node"):
            if topology.ranks_per_node is None:
                sizes = [len(node) for node in topology.nodes]
                raise LaunchError(
                    f"mesh dimension {name}={extent!r} needs nodes of one size, but they hold {sizes} ranks: start the "
                    "same number on each (srun --ntasks-per-node), or give numbers"
                )
            known[name] = topology.num_nodes if extent == "nodes" else topology.ranks_per_node
        elif extent is None or (isinstance(extent, int) and not isinstance(extent, bool) and extent >= 1):
            known[name] = extent
        else:
            raise LaunchError(f"mesh dimension {name}={extent!r}: give a positive number, 'nodes', 'node' or None")
    written = " x ".join(f"{name}={'?' if extent is None else extent}" for name, extent in known.items())
    open_names = [name for name, extent in known.items() if extent is None]
    if len(open_names) > 1:
        raise LaunchError(f"mesh {written}: only one dimension may be None (all remaining ranks)")
    product = prod(extent for extent in known.values() if extent is not None)
    if open_names and topology.size % product == 0:
        known[open_names[0]] = topology.size // product
    elif open_names or product != topology.size:
        raise LaunchError(
            f"mesh {written}: {product} does not {'divide' if open_names else 'equal'} the {topology.size} rank(s) of "
            f"this job ({topology})"
        )
    shape = tuple(extent for extent in known.values() if extent is not None)
    plan = _ordered(topology, tuple(known), shape, written)
    for dimension, (name, extent) in enumerate(dimensions.items()):
        wanted = {"node": 1, "nodes": topology.num_nodes}.get(extent)
        for line in plan.lines(dimension):
            if wanted is not None and len({topology.node_rank(rank) for rank in line}) != wanted:
                raise LaunchError(
                    f"mesh {written}: {name}={extent!r} does not follow the nodes in this place (ranks {line} would be "
                    "one line of it): dimensions within nodes come last, those across nodes first"
                )
    return plan


def _ordered(topology: Topology, names: tuple[str, ...], shape: tuple[int, ...], written: str) -> MeshPlan:
    """Return the plan with ascending ranks in every line.

    torch sorts the ranks of each group: in another order a coordinate would not be the rank in its group.
    """
    plan = MeshPlan(names, shape, tuple(rank for node in topology.nodes for rank in node))
    if all(list(line) == sorted(line) for dimension in range(len(shape)) for line in plan.lines(dimension)):
        return plan
    per_node = topology.ranks_per_node
    if len(shape) > 1 and (per_node is None or per_node % shape[-1] == 0):
        raise LaunchError(
            f"mesh {written}: this mesh cannot follow the order of the ranks on the nodes ({topology.nodes}); "
            "start them block by block (srun --distribution=block)"
        )
    return MeshPlan(names, shape, tuple(range(topology.size)))  # no line could be within a node anyway


@_compat.outside_of_modes
def make_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Return the plan as a ``DeviceMesh``, with a process group for each of its lines. Collective over all ranks."""
    ranks = torch.tensor(plan.ranks, dtype=torch.int64).view(plan.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=plan.names)
