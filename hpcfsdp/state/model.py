"""A model's parameters and buffers as named state tensors, sharded or not."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import torch
from torch import nn

from hpcfsdp.comm import Communicator, communicator_for
from hpcfsdp.engine.phase import Phase
from hpcfsdp.errors import CheckpointError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.sharded.unit import ShardedUnit, unit_of
from hpcfsdp.sharded.unit_mesh import UnitMesh
from hpcfsdp.state.ranks import largest_mesh, units_of
from hpcfsdp.state.shards import LocalShards
from hpcfsdp.state.tensors import StateTensor, unsharded
from hpcfsdp.state.wrappers import CleanNames, group_of

EXTRA_STATE = "_extra_state"
"""The last part of the name of a module's state beside tensors, as torch has it."""

_IN_STATE_DICTS = CleanNames()
"""There only what hpcfsdp, torch.compile and checkpoint_wrapper put into names is left out."""


def communicator_of(model: nn.Module) -> Communicator:
    """Collective over them, the first time. All ranks that a model is on; the world's for one that knows of none."""
    units = units_of(model)
    if not units:
        return communicator_for(group_of(model), required=False)
    for unit in units:
        unit.mesh.connect()
    mesh = largest_mesh(units)
    return mesh.shard if mesh.data is None else mesh.comm()


def device_of(model: nn.Module) -> torch.device:
    """Where the model computes: the device of its first parameter that has memory, the CPU without any."""
    return next((param.device for param in model.parameters() if not param.is_meta), torch.device("cpu"))


def named_flat_params(
    model: nn.Module, name_of: Callable[[str, str], str] = _IN_STATE_DICTS
) -> Iterator[tuple[ShardedUnit, FlatParam, FlatLayout]]:
    """Each flat parameter, whose it is, and its layout under the names that parameters have in the whole model.

    Args:
        name_of: see ``FlatLayout.known_as``; by default the names that a state dict has.
    """
    paths: dict[ShardedUnit, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        unit = unit_of(module)
        if unit is not None:
            paths.setdefault(unit, []).append(path)
    for unit, known_as in paths.items():
        for flat in unit.flats:
            flat.adopt_user_data()  # what is read or written next is the shard, not what a user has put in its place
            yield unit, flat, flat.layout.known_as(tuple(known_as), name_of)


def flat_params(model: nn.Module) -> Iterator[tuple[FlatParam, FlatLayout, UnitMesh]]:
    """Each flat parameter, its layout under the names that parameters have in a checkpoint, and who has it.

    Raises:
        CheckpointError: the ranks that hold all of a parameter are not those that checkpoint the model, or its
            parameters are summoned.
    """
    units = units_of(model)
    largest = largest_mesh(units).comm() if units else None
    for wrapper, flat, layout in named_flat_params(model, CleanNames.of(model)):
        if wrapper.phase is Phase.SUMMON:
            raise CheckpointError(
                f"{wrapper.name}: its parameters are whole within summon_full_params, and what is changed there "
                "is put back at its end: save and load outside of it"
            )
        if wrapper.mesh.data is None:
            raise CheckpointError(
                "the model is sharded over a pair of process groups that do not make up the world: it is not known "
                "which ranks hold it together; pass a device_mesh, or groups of all ranks"
            )
        comm = wrapper.mesh.comm()
        if (comm.size, comm.rank) != (largest.size, largest.rank):
            raise CheckpointError(
                f"{wrapper.name} has process groups of its own, over {comm.size} ranks, and the model is on "
                f"{largest.size}: its parameters may differ between groups, which one name in a file cannot tell; "
                "save this unit apart from the others, or give all units the same ranks"
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
    found += [unsharded(name, tensor, tuple(aliases)) for tensor, (name, *aliases) in plain_tensors(model).items()]
    taken: set[str] = set()
    for tensor in found:
        for name in (tensor.name, *tensor.aliases):
            if name in taken:
                raise CheckpointError(f"two tensors of the model are called {name!r} without the names of wrappers")
            taken.add(name)
    return found


def plain_tensors(model: nn.Module) -> dict[torch.Tensor, list[str]]:
    """Parameters that no unit owns, and persistent buffers, with all their names without those of wrappers."""
    flats = [flat for wrapper in units_of(model) for flat in wrapper.flats]
    flat_shards = {shard for flat in flats for shard in (flat.parameter, *flat.leaves)}
    name_of = CleanNames.of(model)
    whole: dict[torch.Tensor, list[str]] = {}
    for path, module in model.named_modules(remove_duplicate=False):
        own = [*module._parameters.items(), *_persistent_buffers(module)]
        for name, tensor in own:
            if tensor is not None and tensor not in flat_shards:
                whole.setdefault(tensor, []).append(name_of(path, name))
    return whole


def stateful_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Modules with a state beside tensors, ``get_extra_state``, by the name that it has in a checkpoint."""
    name_of = CleanNames.of(model)
    found: dict[str, nn.Module] = {}
    for path, module in model.named_modules():
        if has_extra_state(module):
            found[name_of(path, EXTRA_STATE)] = module
    return found


def has_extra_state(module: nn.Module) -> bool:
    """Whether a module's class has a ``get_extra_state`` of its own."""
    return type(module).get_extra_state is not nn.Module.get_extra_state


def _persistent_buffers(module: nn.Module) -> Iterator[tuple[str, torch.Tensor | None]]:
    return ((n, b) for n, b in module._buffers.items() if n not in module._non_persistent_buffers_set)
