"""DTensors of a model that no flat parameter holds: the ranks of the model, and which of them have which rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp import _compat
from hpcfsdp.errors import CheckpointError
from hpcfsdp.reshard.placements import rows_on_mesh
from hpcfsdp.reshard.whole import is_cut
from hpcfsdp.state.tensors import NO_RUNS, LocalPiece, Runs, StateTensor, unsharded
from hpcfsdp.units.dtensor_unit import dtensor_units_in
from hpcfsdp.units.flat_unit import units_in


class DTensorRanks:
    """The ranks of a model whose parameters may be DTensors.

    They are those of the smallest slice of a mesh that has the dimensions of all of its DTensors: a parameter on one of
    these dimensions alone is the same along the others.
    """

    def __init__(self, model: nn.Module) -> None:
        """Not collective."""
        meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
        # Modules hold whole parameters after a forward.
        meshes.update(each.param.sharded.device_mesh for unit in dtensor_units_in(model) for each in unit.rows)
        self._meshes = _joined(meshes)
        self._groups = {m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)}
        self._has_units = bool(units_in(model))
        self._known: dict[Any, tuple[Runs, int] | None] = {}

    def group(self) -> dist.ProcessGroup | None:
        """Collective over them, the first time for a mesh of several dimensions. Their group; None for all ranks.

        Raises:
            CheckpointError: parts of the model are on different ranks.
        """
        mine = [mesh for mesh in self._meshes if mesh.get_coordinate() is not None]
        ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in mine}
        ranks |= {tuple(dist.get_process_group_ranks(group)) for group in self._groups}
        if len(ranks) > 1:
            one, other = sorted(ranks)[:2]
            raise CheckpointError(
                f"one part of the model is on the ranks {list(one)}, another one on {list(other)}: save and load each "
                "on its own"
            )
        if not ranks or len(*ranks) == dist.get_world_size():
            return None
        groups = [*self._groups, *(_compat.group_of_mesh(mesh) for mesh in mine)]
        return min(groups, key=lambda group: group.group_name)

    def state_tensor(self, name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
        """Not collective. A parameter, buffer or state of the model that no flat parameter holds, for a file.

        Rows are written by the ranks that have them. Other cuts are made whole.
        """
        found = None if self._has_units or not is_cut(tensor) else self._rows_of(tensor)
        if found is None:
            return unsharded(name, tensor, aliases)
        runs, start = found
        local = _compat.local_of(tensor).detach()
        pieces = (LocalPiece(start, local),) if local.numel() else ()
        return StateTensor(name, tuple(tensor.shape), tensor.dtype, runs, pieces, aliases)

    def _rows_of(self, tensor: DTensor) -> tuple[Runs, int] | None:
        """The runs of a ``DTensor``, and this rank's first element; None unless each rank has consecutive rows."""
        key = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
        if key not in self._known:  # a model has few shapes, and an optimizer's state has those of the model
            self._known[key] = self._divide(*key)
        return self._known[key]

    def _divide(
        self, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> tuple[Runs, int] | None:
        copies = self._copies(mesh)
        if copies is None or any(placement.is_partial() for placement in placements):
            return None
        rows = rows_on_mesh(shape, mesh.mesh, placements)
        if rows is None:
            return None
        begins, ends = rows
        place = np.flatnonzero(mesh.mesh.flatten().numpy() == dist.get_rank())
        per_row = math.prod(shape[1:])
        start = int(begins[place[0]]) * per_row if len(place) else 0
        if not math.prod(shape):
            return NO_RUNS, start
        filled = np.flatnonzero(ends > begins)
        order = filled[np.argsort(begins[filled], kind="stable")]
        starts, counts = np.unique(begins[order], return_counts=True)
        if np.ptp(counts) or np.any(np.append(starts[1:], shape[0]) != ends[order][:: counts[0]]):
            return None
        edges = np.append(starts, shape[0]) * per_row
        return Runs(edges, copies[order].reshape(len(starts), -1)), start

    def _copies(self, mesh: DeviceMesh) -> np.ndarray | None:
        """By place of a mesh the ranks of the model that have the same, int64; None for a mesh of other ranks."""
        for whole in self._meshes:
            names, own = whole.mesh_dim_names, mesh.mesh_dim_names
            if whole == mesh:
                return self._numbers[whole.mesh.numpy().reshape(-1, 1)]
            if names and own and set(own) < set(names) and whole[own] == mesh:
                ranks = whole.mesh.movedim([names.index(name) for name in own], list(range(len(own))))
                return self._numbers[ranks.reshape(mesh.size(), -1).numpy()]
        return None

    @cached_property
    def _numbers(self) -> np.ndarray:
        """The ranks in a checkpoint by those in torch's default group, int64."""
        group = self.group()
        ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        numbers = np.full(dist.get_world_size(), -1, np.int64)
        numbers[list(ranks)] = np.arange(len(ranks))
        return numbers


def _joined(meshes: Iterable[DeviceMesh]) -> list[DeviceMesh]:
    """Slices of one mesh joined into one slice, with the dimensions of all of them; others as they are."""
    slices: dict[DeviceMesh, set[str]] = {}
    found = []
    for mesh in meshes:
        root = _compat.root_mesh(mesh)
        if set(mesh.mesh_dim_names or ()) <= set(root.mesh_dim_names or ()) and mesh.mesh_dim_names:
            slices.setdefault(root, set()).update(mesh.mesh_dim_names)
        else:
            found.append(mesh)
    for root, names in slices.items():
        in_order = tuple(name for name in root.mesh_dim_names if name in names)
        found.append(root if len(in_order) == root.ndim else root[in_order])
    return found
