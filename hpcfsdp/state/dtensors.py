"""DTensors of a model that no flat parameter holds: the ranks of the model, and which of them have which rows."""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import cached_property

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp import _compat
from hpcfsdp.errors import CheckpointError
from hpcfsdp.sharded.row_unit import row_units_in
from hpcfsdp.sharded.unit import units_in
from hpcfsdp.state.tensors import LocalPiece, Runs, StateTensor, unsharded
from hpcfsdp.tensor.sharded import all_boxes
from hpcfsdp.tensor.whole import is_cut


class DTensorRanks:
    """The ranks of a model whose parameters may be DTensors.

    They are those of the smallest slice of a mesh that has the dimensions of all of its DTensors: a parameter on one of
    these dimensions alone is the same along the others.
    """

    def __init__(self, model: nn.Module) -> None:
        """Not collective."""
        meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
        # Modules hold whole parameters after a forward.
        meshes.update(each.param.sharded.device_mesh for unit in row_units_in(model) for each in unit.rows)
        self._meshes = _joined(meshes)
        self._groups = {m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)}
        self._has_units = bool(units_in(model))

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
        runs = None if self._has_units or not is_cut(tensor) else self._runs(tensor)
        if runs is None:
            return unsharded(name, tensor, aliases)
        boxes = all_boxes(tensor).get(dist.get_rank(), [])
        start = boxes[0].offsets[0] * math.prod(tensor.shape[1:]) if boxes else 0
        local = _compat.local_of(tensor).detach()
        pieces = (LocalPiece(start, local),) if boxes and local.numel() else ()
        return StateTensor(name, tuple(tensor.shape), tensor.dtype, runs, pieces, aliases)

    @cached_property
    def _numbers(self) -> dict[int, int]:
        """The ranks in a checkpoint by those in torch's default group."""
        group = self.group()
        ranks = range(dist.get_world_size()) if group is None else dist.get_process_group_ranks(group)
        return {rank: number for number, rank in enumerate(ranks)}

    def _runs(self, tensor: DTensor) -> Runs | None:
        """The runs of a ``DTensor`` of which each rank has consecutive rows; None for any other."""
        copies = self._copies(tensor.device_mesh)
        if copies is None or any(placement.is_partial() for placement in tensor.placements):
            return None
        ends: dict[int, int] = {}
        holders: dict[int, list[int]] = {}
        for rank, boxes in all_boxes(tensor).items():
            if len(boxes) != 1 or boxes[0].sizes[1:] != tuple(tensor.shape[1:]):
                return None
            begin = boxes[0].offsets[0]
            holders.setdefault(begin, []).extend(self._numbers[copy] for copy in copies[rank])
            ends[begin] = begin + boxes[0].sizes[0]
        starts = sorted(holders)
        if len({len(ranks) for ranks in holders.values()}) != 1 or starts[1:] != [ends[begin] for begin in starts[:-1]]:
            return None
        per_row = math.prod(tensor.shape[1:])
        return Runs.of([begin * per_row for begin in starts] + [tensor.numel()], [holders[begin] for begin in starts])

    def _copies(self, mesh: DeviceMesh) -> dict[int, list[int]] | None:
        """For each rank of a mesh the ranks of the model that have the same; None for a mesh of other ranks."""
        for whole in self._meshes:
            names, own = whole.mesh_dim_names, mesh.mesh_dim_names
            if whole == mesh:
                return {rank: [rank] for rank in mesh.mesh.flatten().tolist()}
            if names and own and set(own) < set(names) and whole[own] == mesh:
                ranks = whole.mesh.movedim([names.index(name) for name in own], list(range(len(own))))
                table = ranks.reshape(mesh.size(), -1).tolist()
                return {rank: copies for copies in table for rank in copies}
        return None


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
