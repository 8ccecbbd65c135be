"""All ranks of a model, for what has to be compared before anything moves."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from torch import nn

from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.grid import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.sharded.build import join_tp_group
from hpcfsdp.sharded.unit import ShardedUnit, units_in
from hpcfsdp.sharded.unit_mesh import UnitMesh


def units_of(model: nn.Module) -> list[ShardedUnit]:
    """Collective over the ranks of the model, the first time. Its units, outer ones first.

    Those that have nothing to do with tensor parallelism know of the ranks that others are parallel with, as they do
    where an outer unit holds them all.
    """
    units = units_in(model)
    tensor_mesh = next((unit.mesh.tensor_mesh for unit in units if unit.mesh.tensor is not None), None)
    for unit in units:
        if tensor_mesh is not None and unit.mesh.tensor is None:
            join_tp_group(unit, tensor_mesh, sync_module_states=False)
    return units


def largest_mesh(units: Iterable[ShardedUnit]) -> UnitMesh:
    """The mesh with the most ranks."""
    return max((unit.mesh for unit in units), key=lambda mesh: mesh.size())


def ranks_of_model(model: nn.Module, group: Any = None) -> Communicator | Grid:
    """Collective over them, the first time. The ranks that make and load state dicts of a model together: those of its
    largest unit.

    Args:
        group: those of a process group instead.

    Raises:
        StateDictError: there is no unit in the model.
    """
    units = units_of(model)
    if not units:
        raise StateDictError(
            f"there is no FullyShardedDataParallel in this {type(model).__name__}: wrap the model first, or use the "
            "optimizer's own state_dict and load_state_dict"
        )
    if group is not None:
        return communicator_for(group, required=True)
    return largest_mesh(units).comm()
