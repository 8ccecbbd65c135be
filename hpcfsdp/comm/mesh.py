"""Meshes of ranks that follow the nodes: planned from a ``Topology``, made as torch's ``DeviceMesh``."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from typing import Literal

import torch
from torch.distributed.device_mesh import DeviceMesh

from hpcfsdp.comm.topology import Topology
from hpcfsdp.errors import LaunchError

Extent = int | Literal["nodes", "node"] | None


@dataclass(frozen=True)
class MeshPlan:
    """Named dimensions over all ranks.

    Attributes:
        names: of the dimensions, the outermost first.
        shape: ranks along each dimension; the product is the number of all ranks.
        ranks: all ranks in row-major order. They run through one node after the other, so that the last dimensions
            lie within nodes wherever their product divides the ranks of a node.
    """

    names: tuple[str, ...]
    shape: tuple[int, ...]
    ranks: tuple[int, ...]


def plan_mesh(topology: Topology, dimensions: Mapping[str, Extent]) -> MeshPlan:
    """The mesh with these dimensions on these nodes.

    Args:
        dimensions: name -> number of ranks along it, the outermost first. "nodes": the number of nodes; "node": the
            ranks of a node; None, for one dimension at most: what the others leave.

    Raises:
        LaunchError: the product is not the number of ranks, "nodes" or "node" is asked of nodes of different sizes, or
            an extent is no positive number.
    """
    if not dimensions:
        raise LaunchError("a mesh needs at least one dimension, for example shard=None")
    known: dict[str, int | None] = {}
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
        raise LaunchError(f"mesh {written}: only one dimension may be None (what the others leave)")
    product = prod(extent for extent in known.values() if extent is not None)
    if open_names and topology.size % product == 0:
        known[open_names[0]] = topology.size // product
    elif open_names or product != topology.size:
        raise LaunchError(
            f"mesh {written}: {product} does not {'divide' if open_names else 'equal'} the {topology.size} rank(s) of "
            f"this job ({topology})"
        )
    return MeshPlan(
        names=tuple(known),
        shape=tuple(extent for extent in known.values() if extent is not None),
        ranks=tuple(rank for node in topology.nodes for rank in node),
    )


def make_mesh(plan: MeshPlan, device_type: str) -> DeviceMesh:
    """Collective over all ranks. The plan as a ``DeviceMesh``, with a process group for each line of each dimension."""
    ranks = torch.tensor(plan.ranks, dtype=torch.int64).view(plan.shape)
    return DeviceMesh(device_type, ranks, mesh_dim_names=plan.names)
