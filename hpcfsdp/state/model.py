"""A model's ranks, and its parameters and buffers as named state tensors, sharded or not."""

import contextlib
import itertools
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from functools import cached_property
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import FSDPModule, FullyShardedDataParallel as TorchFSDP
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement
from torch.nn.parallel import DistributedDataParallel

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.communicator import Grid
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import CheckpointError, StateDictError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.reshard.placements import rows_on_mesh
from hpcfsdp.reshard.sharded_tensors import is_sharded
from hpcfsdp.state.subclasses import inner_state
from hpcfsdp.state.tensors import NO_RUNS, LocalPiece, LocalShards, Runs, StateTensor, unsharded
from hpcfsdp.state.wrappers import CleanNames
from hpcfsdp.units.build import join_tp_group
from hpcfsdp.units.dtensor_unit import dtensor_units_in
from hpcfsdp.units.flat_unit import FlatUnit, unit_of, units_in
from hpcfsdp.units.unit_mesh import GroupCache, UnitMesh


class DTensorRanks:
    """The ranks of a model whose parameters may be DTensors.

    They are those of the smallest slice of a mesh that has the dimensions of all of its DTensors: a parameter on one of
    these dimensions alone is the same along the others.
    """

    def __init__(self, model: nn.Module) -> None:
        meshes = {param.device_mesh for param in model.parameters() if isinstance(param, DTensor)}
        # Modules hold whole parameters after a forward.
        meshes.update(each.param.sharded.device_mesh for unit in dtensor_units_in(model) for each in unit.own)
        self._meshes = _joined(meshes)
        self._groups = {m.process_group for m in model.modules() if isinstance(m, DistributedDataParallel)}
        self._has_units = bool(units_in(model))
        self._known: dict[Any, tuple[Runs, int] | None] = {}

    def group(self) -> dist.ProcessGroup | None:
        """Return their group; None for all ranks. Collective over them, the first time for meshes of several dims."""
        mine = [mesh for mesh in self._meshes if mesh.get_coordinate() is not None]
        ranks = {tuple(sorted(mesh.mesh.flatten().tolist())) for mesh in mine}
        ranks |= {tuple(dist.get_process_group_ranks(group)) for group in self._groups}
        if len(ranks) > 1:
            one, other = sorted(ranks)[:2]
            raise CheckpointError(
                f"one part of the model is on ranks {list(one)}, another on {list(other)}: save and load each alone"
            )
        if not ranks or len(*ranks) == dist.get_world_size():
            return None
        groups = [*self._groups, *(_compat.group_of_mesh(mesh) for mesh in mine)]
        return min(groups, key=lambda group: group.group_name)

    def state_tensor(self, name: str, tensor: torch.Tensor, aliases: tuple[str, ...] = ()) -> StateTensor:
        """Not collective. Return a tensor outside of flat parameters for a file, whole or in rows as they lie."""
        if self._has_units or not is_sharded(tensor):
            return unsharded(name, tensor, aliases)
        key = tuple(tensor.shape), tensor.device_mesh, tuple(tensor.placements)
        if key not in self._known:  # a model has few shapes, and an optimizer's state has those of the model
            self._known[key] = self._divide(*key)
        if self._known[key] is None:
            return unsharded(name, tensor, aliases)
        runs, start = self._known[key]
        local = _compat.local_of(tensor).detach()
        pieces = (LocalPiece(start, local),) if local.numel() else ()
        return StateTensor(name, tuple(tensor.shape), tensor.dtype, runs, pieces, aliases)

    def _divide(
        self, shape: tuple[int, ...], mesh: DeviceMesh, placements: tuple[Placement, ...]
    ) -> tuple[Runs, int] | None:
        """Return the runs of a ``DTensor``, and this rank's first element; None unless ranks have consecutive rows."""
        copies = self._copies(mesh)
        if copies is None or any(placement.is_partial() for placement in placements):
            return None
        if (rows := rows_on_mesh(shape, mesh.mesh, placements)) is None:
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
        """Return the ranks that have the same, int64, by place of a mesh; None for a mesh of other ranks."""
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
    """Return slices of one mesh as one slice with the dimensions of all of them; others as they are."""
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


EXTRA_STATE = "_extra_state"
"""The last part of the name of a module's extra state, as in torch."""

_IN_STATE_DICTS = CleanNames()
"""State dicts leave out only the names that hpcfsdp, torch.compile and checkpoint_wrapper add."""


def units_of(model: nn.Module) -> list[FlatUnit]:
    """Return its units, outer ones first. Collective over the ranks of the model, the first time.

    Units without tensor parallelism get the tensor-parallel ranks of the others, as they do inside of an outer unit.
    """
    units = units_in(model)
    tensor_mesh = next((unit.mesh.tensor_mesh for unit in units if unit.mesh.tensor is not None), None)
    for unit in units:
        if tensor_mesh is not None and unit.mesh.tensor is None:
            join_tp_group(unit, tensor_mesh, sync_module_states=False)
    return units


def largest_mesh(units: Iterable[FlatUnit]) -> UnitMesh:
    """Return the mesh with the most ranks."""
    return max((unit.mesh for unit in units), key=lambda mesh: mesh.size())


def ranks_of_model(model: nn.Module, group: Any = None) -> Communicator | Grid:
    """Return the ranks of its largest unit, or of a `group`, which make state dicts. Collective, the first time."""
    units = units_of(model)
    if not units:
        raise StateDictError(
            f"there is no FullyShardedDataParallel in this {type(model).__name__}: wrap the model first, or use the "
            "optimizer's own state_dict and load_state_dict"
        )
    if group is not None:
        return communicator_for(group, required=True)
    return largest_mesh(units).comm()


def communicator_of(model: nn.Module) -> Communicator:
    """Return all ranks of a model; those of the world for a plain model. Collective over them, the first time.

    It works through host memory, unless there is a device and no world: what is exchanged there need not wait for it.
    """
    units = units_of(model)
    for unit in units:
        unit.mesh.connect()
    if not units:
        comm = communicator_for(DTensorRanks(model).group(), required=False)
    else:
        mesh = largest_mesh(units)
        comm = mesh.shard if mesh.data is None else mesh.comm()
    return (GroupCache.current().host_of(comm) if dist.is_initialized() else None) or comm


def hold_shards(model: nn.Module) -> None:
    """Have modules given to ``fully_shard`` hold their shards. Collective after a forward alone, or ``unshard``."""
    for path, module in model.named_modules():
        if isinstance(module, TorchFSDP):
            raise CheckpointError(
                f"{path or 'the model'} is torch's FullyShardedDataParallel, and only torch knows the layout of its "
                "shards: wrap the model in hpcfsdp.FullyShardedDataParallel or with fully_shard, or save the result "
                "of torch.distributed.checkpoint.state_dict.get_state_dict with torch.distributed.checkpoint.save "
                "and an hpcfsdp.checkpoint.HDF5Writer"
            )
        if isinstance(module, FSDPModule):
            module.reshard()  # after a forward without a backward the outermost one is whole


def device_of(model: nn.Module) -> torch.device:
    """Return where the model computes, also if it is offloaded; the CPU without any parameter that has memory."""
    units = (unit for module in model.modules() if (unit := unit_of(module)) is not None)
    for flat in (flat for unit in units for flat in unit.sharded_params):
        return flat.device
    return next((param.device for param in model.parameters() if not param.is_meta), torch.device("cpu"))


def named_flat_params(
    model: nn.Module, name_of: Callable[[str, str], str] = _IN_STATE_DICTS
) -> Iterator[tuple[FlatUnit, FlatParam, FlatLayout]]:
    """Return each flat parameter, its unit, and its layout by names in the model, see ``FlatLayout.known_as``."""
    paths: dict[FlatUnit, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        if (unit := unit_of(module)) is not None:
            paths.setdefault(unit, []).append(path)
    for unit, known_as in paths.items():
        for flat in unit.sharded_params:
            flat.adopt_user_data()  # which may have been assigned in place of the shard
            yield unit, flat, flat.layout.known_as(tuple(known_as), name_of)


def flat_params(model: nn.Module) -> Iterator[tuple[FlatParam, FlatLayout, UnitMesh]]:
    """Return each flat parameter, its layout under the names that parameters have in a checkpoint, and its mesh."""
    units = units_of(model)
    largest = largest_mesh(units).comm() if units else None
    for wrapper, flat, layout in named_flat_params(model, CleanNames.of(model)):
        if wrapper.training_state is TrainingState.SUMMON:
            raise CheckpointError(
                f"{wrapper.name}: its parameters are whole within summon_full_params, which writes them back when it "
                "ends: save and load outside of summon_full_params"
            )
        if wrapper.mesh.data is None:
            raise CheckpointError(
                "the model is sharded over a pair of process groups that do not cover all ranks of the job, so "
                "hpcfsdp cannot determine which ranks hold the whole model: pass a device_mesh, or groups of all ranks"
            )
        comm = wrapper.mesh.comm()
        if (comm.size, comm.rank) != (largest.size, largest.rank):
            raise CheckpointError(
                f"{wrapper.name} has process groups of its own, over {comm.size} ranks, but the model is on "
                f"{largest.size}. Its parameters may differ between groups, and a file has one tensor for each name: "
                "save this unit on its own, or give all units the same ranks"
            )
        yield flat, layout, wrapper.mesh


def model_tensors(model: nn.Module) -> list[StateTensor]:
    """Return every parameter and persistent buffer, in the order of the model; not collective."""
    found: list[StateTensor] = []
    for flat, layout, mesh in flat_params(model):
        parts = LocalShards.of_shard(layout, flat.parameter.data)
        fqns = [slot.fqn for slot in layout.slots]
        found += parts.in_file(mesh, fqns, with_aliases=True, are_read_by_others=flat.shares_gathered)
    ranks, plain = DTensorRanks(model), plain_tensors(model)
    holders = {each.param.sharded: each for unit in dtensor_units_in(model) for each in unit.own if each.inner}
    for tensor, (name, *aliases) in plain.items():
        if tensor in holders:
            found += inner_state(holders[tensor], name, tuple(aliases), ranks.state_tensor)
        else:
            found.append(ranks.state_tensor(name, tensor, tuple(aliases)))
    names: set[str] = set()
    for tensor in found:
        for name in (tensor.name, *tensor.aliases):
            if name in names:
                raise CheckpointError(f"two tensors are called {name!r} once names of wrappers are removed: rename one")
            names.add(name)
    return found


def plain_tensors(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Return parameters that no unit owns, and persistent buffers, with all their names without those of wrappers."""
    sharded_params = [flat for wrapper in units_of(model) for flat in wrapper.sharded_params]
    flat_shards = {shard for flat in sharded_params for shard in (flat.parameter, *flat.leaves)}
    name_of = CleanNames.of(model)
    whole: dict[torch.Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        for name, tensor in persistent_tensors(module):
            if tensor not in flat_shards:
                whole.setdefault(tensor, []).append(name_of(path, name))
    return whole


def stateful_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return modules with an extra state, by the name that it has in a checkpoint."""
    name_of = CleanNames.of(model)
    return {name_of(path, EXTRA_STATE): module for path, module in model.named_modules() if has_extra_state(module)}


def has_extra_state(module: nn.Module) -> bool:
    """Return whether a module's class has a ``get_extra_state`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


@contextlib.contextmanager
def materialized(model: nn.Module, chosen: Collection[str], device: torch.device) -> Iterator[None]:
    """Give meta tensors called as one of `chosen` uninitialised memory, unless the block raises; not collective."""
    exchanged: list[tuple[torch.Tensor, torch.Tensor]] = []
    try:
        for tensor, names in plain_tensors(model).items():
            if tensor.is_meta and not set(names).isdisjoint(chosen):
                exchanged.append((tensor, _exchange(tensor, names[0], device)))
        yield
    except BaseException:
        for tensor, other in exchanged:
            torch.utils.swap_tensors(tensor, other)
        raise


def _exchange(tensor: torch.Tensor, name: str, device: torch.device) -> torch.Tensor:
    """Give a tensor memory. Return what it was."""
    other = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    try:
        # Whoever holds the tensor, an optimizer or another module, goes on holding the right one.
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise CheckpointError(f"{name!r} is on the meta device and cannot be given memory: {error}") from error
    return other


def persistent_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """Return a module's own parameters and persistent buffers."""
    return [
        (name, tensor)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]
