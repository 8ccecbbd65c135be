"""A model's state dict: whole, sharded or local, under the names that the model has without wrappers."""

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.comm.communicator import Grid
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import Box
from hpcfsdp.reshard.sharded_tensors import create_sharded_tensor, full_tensor
from hpcfsdp.state.settings import StateDictFormat, kind_of, settings_of
from hpcfsdp.state.shown import StandIn, digest_of, flat_params_shown, orig_params_shown, shown_for, source_of
from hpcfsdp.state.tensors import LocalShards
from hpcfsdp.state.transfer import gather, keeping_scratch
from hpcfsdp.state.wrappers import clean_fqn, with_clean_names
from hpcfsdp.units.flat_unit import FlatUnit, flat_param_name, units_in
from hpcfsdp.units.mixed_precision import modules_outside
from hpcfsdp.units.unit_mesh import UnitMesh


@dataclass
class _Call:
    """One call of ``state_dict``, of a unit and of all units inside."""

    settings: StateDictSettings
    keep_vars: bool
    # By unit, the tensor shown for each of its parameters, or flat parameters under ``LOCAL_STATE_DICT``.
    values: dict[FlatUnit, Mapping[Any, torch.Tensor]] = field(default_factory=dict)
    # Of buffers and ignored parameters that are shown on another device or in another dtype.
    copies: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = field(default_factory=dict)
    # Those of them that are DTensors, whole; units that give sharded tensors show them as they are.
    gathered: dict[torch.Tensor, torch.Tensor] = field(default_factory=dict)

    def kind_of(self, unit: FlatUnit) -> StateDictType:
        return kind_of(unit, self.settings.state_dict_type)

    def form_of(self, unit: FlatUnit) -> StateDictFormat:
        sharded = self.kind_of(unit) is StateDictType.SHARDED_STATE_DICT
        return StateDictFormat.of(self.settings.state_dict_config, sharded=sharded)

    def shown(self, unit: FlatUnit, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """Return the tensor that a unit shows for one that it does not shard."""
        if self.kind_of(unit) is StateDictType.FULL_STATE_DICT:
            tensor = self.gathered.get(tensor, tensor)
        device = torch.device("cpu") if self.settings.state_dict_config.offload_to_cpu else tensor.device
        if (tensor.dtype, tensor.device) == (dtype, device):
            return tensor
        if (tensor, dtype) not in self.copies:
            self.copies[tensor, dtype] = tensor.detach().to(device, dtype)
        return self.copies[tensor, dtype]


class _UnitStateDict(OrderedDict):
    """The state dict of one unit's modules, by names that may have names of wrappers in them."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call, self._metadata = call, OrderedDict[str, Any]()


@torch.no_grad()
def save_model(unit: FlatUnit, destination: dict[str, Any] | None, prefix: str, *, keep_vars: bool) -> dict[str, Any]:
    """Do ``StateDictMethods.state_dict``. Collective over the ranks of the unit, and of those inside.

    It calls the wrapped module's own ``state_dict``, so hooks and overridden methods work: during the call the modules
    hold the values to be saved as their parameters and buffers. The values of all units are gathered before, so that
    no rank waits for another whose modules fail.
    """
    if isinstance(destination, _UnitStateDict):
        _run_pre_hooks(unit, prefix, keep_vars=keep_vars)
        return _save(unit, destination.call, destination, prefix)
    units = units_in(unit.wrapper)
    # Not over replicas: one rank may save by itself what is not sharded.
    comm = max((inner.mesh.comm("shard", "tensor") for inner in units), key=lambda ranks: ranks.size)
    with raise_together(comm):
        for inner in units:
            inner.check_at_rest("state_dict")
        _run_pre_hooks(unit, prefix, keep_vars=keep_vars)
        call = _Call(settings_of(unit.wrapper), keep_vars)
        asked = [(call.kind_of(inner).name, call.form_of(inner)) for inner in units]
        for inner in units:
            for flat in inner.sharded_params:
                flat.adopt_user_data()
    _check_alike(comm, units, asked)
    full = [inner for inner in units if call.kind_of(inner) is StateDictType.FULL_STATE_DICT]
    with _shards_published(full, call), keeping_scratch():
        for inner in units:
            call.values[inner] = _values(inner, call)
            if inner in full:  # on all ranks: meshes may span replicas
                tensors = (tensor for _, _, tensor, _ in _plain(inner) if isinstance(tensor, DTensor))
                call.gathered.update((tensor, full_tensor(tensor)) for tensor in dict.fromkeys(tensors))
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    with raise_together(comm):
        return _save(unit, call, destination, prefix)


def _save(unit: FlatUnit, call: _Call, destination: dict[str, Any], prefix: str) -> dict[str, Any]:
    """Not collective. Call the ``state_dict`` of a unit's modules while they hold the values to be saved."""
    found, is_local = _UnitStateDict(call), call.kind_of(unit) is StateDictType.LOCAL_STATE_DICT
    params_shown = flat_params_shown if is_local else orig_params_shown
    with params_shown(unit, call.values[unit]), _plain_shown(unit, call):
        _compat.save_to_state_dict(unit.wrapper, found, prefix, call.keep_vars)  # what is registered on itself
        unit.module.state_dict(destination=found, prefix=prefix, keep_vars=call.keep_vars)
    versions = getattr(destination, "_metadata", {})
    if isinstance(destination, _UnitStateDict) or call.form_of(unit).is_shown_by(unit.mesh):
        remedy = "save a full state dict, or compute it afterwards from the full one"
        for name, value in with_clean_names(found, prefix).items():
            destination[name] = source_of(name, value, "a parameter", remedy)
        versions.update({clean_fqn(path, prefix).rstrip("."): facts for path, facts in found._metadata.items()})
    metadata = versions.get(prefix[:-1], {})
    for hook in list(unit.wrapper._state_dict_hooks.values()):
        changed = hook(unit.wrapper, destination, prefix, metadata)
        if changed is None:
            continue
        if getattr(hook, "_from_public_api", False):  # as torch has it; other hooks may replace the whole
            raise StateDictError(f"a hook of {unit.name} after state_dict returned a value: change the dict in place")
        destination = changed
    return destination


def _run_pre_hooks(unit: FlatUnit, prefix: str, *, keep_vars: bool) -> None:
    for hook in list(unit.wrapper._state_dict_pre_hooks.values()):
        hook(unit.wrapper, prefix, keep_vars)


def _check_alike(comm: Communicator | Grid, units: list[FlatUnit], asked: list[tuple[str, StateDictFormat]]) -> None:
    """Check that all ranks are set to the same state dict for each unit. Collective over `comm`."""
    mine = digest_of(asked)
    if set(comm.all_gather_object(mine)) == {mine}:
        return
    everyone = comm.all_gather_object(asked)
    for rank, other in enumerate(everyone):
        for unit, first, there in zip(units, everyone[0], other, strict=True):
            if first == there:
                continue
            raise StateDictError(
                f"ranks have different state_dict_type settings: {unit.name} gives {first} on rank 0, and {there} on "
                f"rank {rank}: call set_state_dict_type with the same arguments on all ranks"
            ).on_all_ranks()


@contextlib.contextmanager
def _shards_published(units: list[FlatUnit], call: _Call) -> Iterator[None]:
    """Return a context in which ranks may read each other's shards where they share memory. Collective over the shards.

    No rank leaves it, and goes on to write, before all have read.
    """
    made = (unit for unit in units if call.form_of(unit).is_made_by(unit.mesh) and unit.mesh.tensor is None)
    flats = [flat for unit in made for flat in unit.sharded_params if _shows_shards(flat)]
    for flat in flats:
        flat.publish()
    comms = dict.fromkeys(flat.comm for flat in flats)
    for comm in comms:
        comm.labelled_barrier("state_dict")
    try:
        yield
    finally:
        for comm in comms:
            comm.labelled_barrier("end of state_dict")


def _shows_shards(flat: FlatParam) -> bool:
    """Return whether all shards stand in memory that this rank can read, as they are kept."""
    return flat.shares_gathered and flat.dtypes.compute == flat.layout.dtype


@contextlib.contextmanager
def _plain_shown(unit: FlatUnit, call: _Call) -> Iterator[None]:
    """Return a context in which modules have buffers, and parameters that no unit owns, as they are shown."""
    shown: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
    if call.form_of(unit).is_shown_by(unit.mesh):
        shown = [(*place, tensor, call.shown(unit, tensor, dtype)) for *place, tensor, dtype in _plain(unit)]
    try:
        for registry, name, _, stand in shown:
            registry[name] = stand
        yield
    finally:
        for registry, name, tensor, stand in shown:
            if registry.get(name) is stand:  # else a hook has put another one there, to stay
                registry[name] = tensor


def _plain(unit: FlatUnit) -> Iterator[tuple[dict[str, Any], str, torch.Tensor, torch.dtype]]:
    """Return what the modules of a unit save that it does not shard: where and under which name they hold which tensor,
    and the dtype in which it is saved."""
    sharded = {place for entry in unit.own.entries for place in entry.places}
    sharded |= {(unit.flat_owner, flat_param_name(index)) for index in range(len(unit.sharded_params))}
    for module in dict.fromkeys((unit.wrapper, *modules_outside(unit.module))):
        for name, param in module._parameters.items():
            if param is not None and (module, name) not in sharded:
                yield module._parameters, name, param, param.dtype
        for name, buffer in module._buffers.items():
            if buffer is not None and name not in module._non_persistent_buffers_set:
                yield module._buffers, name, buffer, unit.buffer_dtypes.get((module, name), buffer.dtype)


def _values(unit: FlatUnit, call: _Call) -> Mapping[Any, torch.Tensor]:
    """Return what its modules are shown while they save. Collective over the unit's process groups."""
    if call.kind_of(unit) is StateDictType.LOCAL_STATE_DICT:
        return {flat: StandIn.of(_local(unit, flat, call)) for flat in unit.sharded_params}
    form, found = call.form_of(unit), {}
    for flat in unit.sharded_params:
        dtype, values = flat.layout.dtype, _values_of(unit.mesh, flat, form)
        for leaf, slot, value in zip(flat.leaves, flat.layout.slots, values, strict=True):
            if value is None:  # not for this rank: NaN, as at rest, so that hooks find a tensor
                blank = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
                value = torch.full((), blank, dtype=dtype, device=flat.device).expand(slot.whole_shape)
            found[leaf] = shown_for(value)
    return found


def _values_of(mesh: UnitMesh, flat: FlatParam, form: StateDictFormat) -> list[Any]:
    is_readable = not form.sharded and _shows_shards(flat) and mesh.tensor is None
    if not (form.is_shown_by(mesh) if is_readable else form.is_made_by(mesh)):
        return [None] * len(flat.leaves)
    if is_readable:
        return [view.to(form.device(flat.device), copy=True) for view in flat.views(flat.full)]
    parts = LocalShards.of_shard(flat.layout, flat.parameter.data)
    return gather(mesh, parts, flat.layout.dtype, flat.device, form)


def _local(unit: FlatUnit, flat: FlatParam, call: _Call) -> ShardedTensor:
    """Return a flat parameter, unpadded, as a 1-D ``ShardedTensor``. Collective over the shards, the first time."""
    numel, shard_numel, mesh = flat.layout.used_numel, flat.layout.shard_numel, unit.mesh
    boxes, mine = {}, None
    for place, rank in enumerate(mesh.ranks(mesh.dtensor_dim)):
        begin, end = min(place * shard_numel, numel), min((place + 1) * shard_numel, numel)
        if begin < end or not (place or numel):  # of nothing the first rank has an empty block
            boxes[rank] = Box((begin,), (end - begin,))
            if place == flat.comm.rank:
                mine = flat.parameter.data[: end - begin]
    device = call.form_of(unit).device(flat.parameter.device)
    local = None if mine is None else mine.to(device)
    return create_sharded_tensor(local, (numel,), flat.layout.dtype, device, mesh.process_group(), boxes)
