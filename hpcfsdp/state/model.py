"""A model's ranks, and its parameters and buffers as named state tensors, sharded or not."""

from __future__ import annotations

import contextlib
import itertools
from collections.abc import Callable, Collection, Iterable, Iterator
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.comm.grid import Grid
from hpcfsdp.engine.phase import Phase
from hpcfsdp.errors import CheckpointError, StateDictError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.dtensors import DTensorRanks
from hpcfsdp.state.shards import LocalShards
from hpcfsdp.state.tensors import StateTensor
from hpcfsdp.state.wrappers import CleanNames
from hpcfsdp.units.build import join_tp_group
from hpcfsdp.units.flat_unit import FlatUnit, unit_of, units_in
from hpcfsdp.units.group_cache import GroupCache
from hpcfsdp.units.unit_mesh import UnitMesh

EXTRA_STATE = "_extra_state"
"""The last part of the name of a module's extra state, as in torch."""

_IN_STATE_DICTS = CleanNames()
"""State dicts leave out only the names that hpcfsdp, torch.compile and checkpoint_wrapper add."""


def units_of(model: nn.Module) -> list[FlatUnit]:
    """Collective over the ranks of the model, the first time. Its units, outer ones first.

    Units without tensor parallelism get the tensor-parallel ranks of the others, as they do inside of an outer unit.
    """
    units = units_in(model)
    tensor_mesh = next((unit.mesh.tensor_mesh for unit in units if unit.mesh.tensor is not None), None)
    for unit in units:
        if tensor_mesh is not None and unit.mesh.tensor is None:
            join_tp_group(unit, tensor_mesh, sync_module_states=False)
    return units


def largest_mesh(units: Iterable[FlatUnit]) -> UnitMesh:
    """The mesh with the most ranks."""
    return max((unit.mesh for unit in units), key=lambda mesh: mesh.size())


def ranks_of_model(model: nn.Module, group: Any = None) -> Communicator | Grid:
    """Collective over them, the first time. The ranks that make and load state dicts of a model together: those of
    its largest unit.

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


def communicator_of(model: nn.Module) -> Communicator:
    """Collective over them, the first time. All ranks of a model; those of the world for a plain model.

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


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: its units, or its first parameter that has memory; the CPU without any.

    Offloaded parameters are in host memory.
    """
    units = (unit for module in model.modules() if (unit := unit_of(module)) is not None)
    for flat in (flat for unit in units for flat in unit.sharded_params):
        return flat.device
    return next((param.device for param in model.parameters() if not param.is_meta), torch.device("cpu"))


def named_flat_params(
    model: nn.Module, name_of: Callable[[str, str], str] = _IN_STATE_DICTS
) -> Iterator[tuple[FlatUnit, FlatParam, FlatLayout]]:
    """Each flat parameter, its unit, and its layout under the names that parameters have in the whole model.

    Args:
        name_of: see ``FlatLayout.known_as``; by default the names that a state dict has.
    """
    paths: dict[FlatUnit, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None:
            paths.setdefault(unit, []).append(path)
    for unit, known_as in paths.items():
        for flat in unit.sharded_params:
            flat.adopt_user_data()  # which may have been assigned in place of the shard
            yield unit, flat, flat.layout.known_as(tuple(known_as), name_of)


def flat_params(model: nn.Module) -> Iterator[tuple[FlatParam, FlatLayout, UnitMesh]]:
    """Each flat parameter, its layout under the names that parameters have in a checkpoint, and its mesh.

    Raises:
        CheckpointError: the ranks that hold all of a parameter are not those that checkpoint the model, or its
            parameters are summoned.
    """
    units = units_of(model)
    largest = largest_mesh(units).comm() if units else None
    for wrapper, flat, layout in named_flat_params(model, CleanNames.of(model)):
        if wrapper.phase is Phase.SUMMON:
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
    """Every parameter and persistent buffer, in the order of the model; not collective.

    Parameters that no unit owns, and buffers, count as replicated.

    Raises:
        CheckpointError: two tensors would have the same name.
    """
    found: list[StateTensor] = []
    for flat, layout, mesh in flat_params(model):
        parts = LocalShards.of_shard(layout, flat.parameter.data)
        names = [slot.fqn for slot in layout.slots]
        found += parts.in_file(mesh, names, with_aliases=True, are_read_by_others=flat.is_resident)
    ranks = DTensorRanks(model)
    found += [
        ranks.state_tensor(name, tensor, tuple(aliases)) for tensor, (name, *aliases) in plain_tensors(model).items()
    ]
    names: set[str] = set()
    for tensor in found:
        for name in (tensor.name, *tensor.aliases):
            if name in names:
                raise CheckpointError(
                    f"two tensors of the model are called {name!r} once the names of wrappers are removed: rename one"
                )
            names.add(name)
    return found


def plain_tensors(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Parameters that no unit owns, and persistent buffers, with all their names without those of wrappers."""
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
    """Modules with an extra state, by the name that it has in a checkpoint."""
    name_of = CleanNames.of(model)
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if has_extra_state(module):
            found[name_of(path, EXTRA_STATE)] = module
    return found


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module's class has a ``get_extra_state`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


@contextlib.contextmanager
def materialized(model: nn.Module, chosen: Collection[str], device: torch.device) -> Iterator[None]:
    """Give tensors on the meta device memory that is not initialised; not collective.

    If the block raises, they are on the meta device again.

    Args:
        chosen: names of the tensors, without wrappers' names; any of the names of one that is tied.
        device: of the memory.

    Raises:
        CheckpointError: a tensor cannot be exchanged, for something else refers to it.
    """
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
    """What was the tensor, which has memory now."""
    other: torch.Tensor = torch.empty_like(tensor, device=device, requires_grad=False)
    if isinstance(tensor, nn.Parameter):
        other = nn.Parameter(other, requires_grad=tensor.requires_grad)
    try:
        # Whoever holds the tensor, an optimizer or another module, goes on holding the right one.
        torch.utils.swap_tensors(tensor, other)
    except RuntimeError as error:
        raise CheckpointError(f"{name!r} is on the meta device and cannot be given memory: {error}") from error
    return other


def persistent_tensors(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    return [
        (name, tensor)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]
