"""A model's state dict: whole, sharded or local, under the names that the model has without wrappers."""

from __future__ import annotations

import contextlib
from collections import OrderedDict
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictSettings, StateDictType
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.api import unshard
from hpcfsdp.api.groups import Groups
from hpcfsdp.api.precision import modules_outside
from hpcfsdp.api.wrapper import FullyShardedDataParallel
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import StateDictError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.state.model import clean_fqn
from hpcfsdp.state.settings import kind_of, settings_of
from hpcfsdp.state.stand_in import StandIn
from hpcfsdp.state.transfer import Form, Parts, collect, keeping_scratch
from hpcfsdp.tensor.runs import Box
from hpcfsdp.tensor.sharded import create_sharded_tensor


@dataclass
class _Call:
    """One call of ``state_dict``, which units inside of the one that is called have their turns in.

    Attributes:
        keep_vars: what is not sharded is shown itself, and not a copy.
        values: of units that have had their turn, which a second place in the model shows again.
        copies: of buffers and ignored parameters.
    """

    settings: StateDictSettings
    keep_vars: bool
    values: dict[FullyShardedDataParallel, Mapping[nn.Parameter, Any]] = field(default_factory=dict)
    copies: dict[tuple[torch.Tensor, torch.dtype], torch.Tensor] = field(default_factory=dict)

    def kind_of(self, unit: FullyShardedDataParallel) -> StateDictType:
        """What the unit gives."""
        return kind_of(unit, self.settings.state_dict_type)

    def form_of(self, unit: FullyShardedDataParallel) -> Form:
        config = self.settings.state_dict_config
        sharded = self.kind_of(unit) is StateDictType.SHARDED_STATE_DICT
        return Form(
            sharded,
            rank0_only=getattr(config, "rank0_only", False),
            offload_to_cpu=config.offload_to_cpu,
            dtensor=getattr(config, "_use_dtensor", False),
        )

    def copy(self, tensor: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
        """What is shown of a tensor that is not sharded."""
        device = torch.device("cpu") if self.settings.state_dict_config.offload_to_cpu else tensor.device
        if self.keep_vars and (tensor.dtype, tensor.device) == (dtype, device):
            return tensor
        if (tensor, dtype) not in self.copies:
            self.copies[tensor, dtype] = tensor.detach().to(device, dtype, copy=True)
        return self.copies[tensor, dtype]


class _Found(OrderedDict):
    """What one unit's modules have saved, by names that wrappers may have added to."""

    def __init__(self, call: _Call) -> None:
        super().__init__()
        self.call = call
        self._metadata: OrderedDict[str, Any] = OrderedDict()


@torch.no_grad()
def save(
    unit: FullyShardedDataParallel, destination: dict[str, Any] | None, prefix: str, *, keep_vars: bool
) -> dict[str, Any]:
    """Collective over the ranks of the unit, and of those inside. See ``StateDictMethods.state_dict``.

    The wrapped module's own ``state_dict`` does it, so that whatever others have registered or overridden there works:
    for the time of the call the modules have what is to be saved as their parameters and buffers.
    """
    for hook in list(unit._state_dict_pre_hooks.values()):
        hook(unit, prefix, keep_vars)
    if destination is None:
        destination = OrderedDict()
        destination._metadata = OrderedDict()  # type: ignore[attr-defined]
    inside = isinstance(destination, _Found)
    call = destination.call if isinstance(destination, _Found) else _begin(unit, keep_vars)
    found = _Found(call)
    with contextlib.nullcontext() if inside else _outermost(unit, call), _shown(unit, call):
        unit.module.state_dict(destination=found, prefix=prefix, keep_vars=keep_vars)
    if inside or call.form_of(unit).is_shown_by(unit._groups):
        _merge(found, destination, prefix)
    metadata = getattr(destination, "_metadata", {}).get(prefix[:-1], {})
    for hook in list(unit._state_dict_hooks.values()):
        changed = hook(unit, destination, prefix, metadata)
        destination = destination if changed is None else changed
    return destination


def _begin(unit: FullyShardedDataParallel, keep_vars: bool) -> _Call:
    """Collective over the shards. Refuse what cannot be saved."""
    units = FullyShardedDataParallel.fsdp_modules(unit)
    for inner in units:
        unshard.check_at_rest(inner, "state_dict")
    with raise_together(unit._groups.shard):
        call = _Call(settings_of(unit), keep_vars)
        for inner in units:
            call.kind_of(inner)
            for flat in inner._unit.flats:
                flat.take_back()
    return call


def _merge(found: _Found, destination: dict[str, Any], prefix: str) -> None:
    """Add what has been found to `destination`, by clean names."""
    added: set[str] = set()
    for key, value in found.items():
        clean = prefix + clean_fqn(key[len(prefix) :])
        if clean in added:
            raise StateDictError(f"two tensors of the model are called {clean!r} without the names of wrappers")
        added.add(clean)
        destination[clean] = _source(clean, value)
    metadata = getattr(destination, "_metadata", None)
    if metadata is not None:
        for path, facts in found._metadata.items():
            metadata[(prefix + clean_fqn(path[len(prefix) :])).rstrip(".")] = facts


def _source(key: str, value: Any) -> Any:
    if not isinstance(value, StandIn):
        return value
    if value.source is None:
        raise StateDictError(
            f"{key!r}: a hook has computed it from a parameter of which this rank has a part: save a full state "
            "dict, or compute it from that"
        )
    return value.source


@contextlib.contextmanager
def _outermost(root: FullyShardedDataParallel, call: _Call) -> Iterator[None]:
    """Collective over the shards. A context around the whole of a call."""
    with _readable(root, call), keeping_scratch():
        yield


@contextlib.contextmanager
def _readable(root: FullyShardedDataParallel, call: _Call) -> Iterator[None]:
    """Collective over the shards. A context in which ranks may read each other's shards where they share memory.

    Nobody leaves it, and goes on to write, before all have read.
    """
    flats = [
        flat
        for unit in FullyShardedDataParallel.fsdp_modules(root)
        for flat in unit._unit.flats
        if call.kind_of(unit) is StateDictType.FULL_STATE_DICT
        and call.form_of(unit).is_made_by(unit._groups)
        and _shows_shards(flat)
    ]
    for flat in flats:
        flat.publish()
    comms = dict.fromkeys(flat.comm for flat in flats)
    for comm in comms:
        comm.meet("state_dict")
    try:
        yield
    finally:
        for comm in comms:
            comm.meet("end of state_dict")


def _shows_shards(flat: FlatParam) -> bool:
    """Whether all shards stand in memory that this rank can read, as they are kept."""
    return flat.is_resident and flat.dtypes.compute == flat.layout.dtype


@contextlib.contextmanager
def _shown(unit: FullyShardedDataParallel, call: _Call) -> Iterator[None]:
    """Collective over the unit's process groups. A context in which its modules have what is to be saved."""
    if call.kind_of(unit) is StateDictType.LOCAL_STATE_DICT:
        shown = flat_params_shown(unit, lambda flat: _local(unit, flat, call))
    else:
        shown = orig_params_shown(unit, _values(unit, call))
    with shown, _plain_shown(unit, call):
        yield


@contextlib.contextmanager
def orig_params_shown(unit: FullyShardedDataParallel, values: Mapping[nn.Parameter, Any]) -> Iterator[None]:
    """A context in which the modules of a unit have `values` as parameters, in the places of the original ones.

    Flat parameters are hidden.
    """
    unshard.deregister_flat_param(unit)
    unshard.register_orig_params(unit)
    places = [(place, entry.param) for entry in unit._own.entries for place in entry.places]
    try:
        for (module, name), param in places:
            module._parameters[name] = values[param]
        for module, names in unit._param_names.items():
            # What was registered again stands behind parameters that had never left.
            for name in (*names, *(name for name in module._parameters if name not in names)):
                if name in module._parameters:
                    module._parameters[name] = module._parameters.pop(name)
        yield
    finally:
        for (module, name), param in places:
            put_back(module, name, param, values[param])
        unshard.deregister_orig_params(unit)
        unshard.register_flat_param(unit)


def put_back(module: nn.Module, name: str, tensor: Any, shown: Any, registry: dict[str, Any] | None = None) -> None:
    """Have a module hold its own tensor again, in place of what was shown or has been assigned since.

    Args:
        registry: its buffers; by default its parameters.
    """
    registry = module._parameters if registry is None else registry
    if registry.get(name) is shown:
        registry[name] = tensor
    else:
        setattr(module, name, tensor)  # as it was assigned: an LSTM keeps a list of its own


@contextlib.contextmanager
def flat_params_shown(unit: FullyShardedDataParallel, show: Any) -> Iterator[None]:
    """A context in which a unit has ``show(flat)`` for each flat parameter, and no original ones."""
    owner: nn.Module = unit._flat_owner
    before = {module: dict(module._parameters) for e in unit._own.entries for module, _ in e.places}
    before[owner] = dict(owner._parameters)
    try:
        for entry in unit._own.entries:
            for module, name in entry.places:
                module._parameters.pop(name, None)
        for index, flat in enumerate(unit._unit.flats):
            owner._parameters[unshard.flat_param_name(index)] = show(flat)
        yield
    finally:
        for module, params in before.items():
            module._parameters.clear()
            module._parameters.update(params)


@contextlib.contextmanager
def _plain_shown(unit: FullyShardedDataParallel, call: _Call) -> Iterator[None]:
    """A context in which the modules of a unit have copies of buffers, and of parameters that it does not own."""
    sharded = {place for entry in unit._own.entries for place in entry.places}
    sharded |= {(unit._flat_owner, unshard.flat_param_name(index)) for index in range(len(unit._unit.flats))}
    shown: list[tuple[dict[str, Any], str, torch.Tensor, torch.Tensor]] = []
    if call.form_of(unit).is_shown_by(unit._groups):
        for module in dict.fromkeys(modules_outside(unit.module, stop_at=FullyShardedDataParallel)):
            for name, param in module._parameters.items():
                if param is not None and (module, name) not in sharded:
                    shown.append((module._parameters, name, param, call.copy(param, param.dtype)))
            for name, buffer in module._buffers.items():
                if buffer is not None and name not in module._non_persistent_buffers_set:
                    dtype = unit._buffer_dtypes.get((module, name), buffer.dtype)
                    shown.append((module._buffers, name, buffer, call.copy(buffer, dtype)))
    try:
        for registry, name, _, copy in shown:
            registry[name] = copy
        yield
    finally:
        for registry, name, tensor, copy in shown:
            if registry.get(name) is copy:  # else a hook has put another one there, to stay
                registry[name] = tensor


def _values(unit: FullyShardedDataParallel, call: _Call) -> Mapping[nn.Parameter, Any]:
    """Collective over the unit's process groups. What is saved for each parameter; without memory where nothing is."""
    if unit not in call.values:
        form, found = call.form_of(unit), {}
        for flat in unit._unit.flats:
            values = _values_of(unit._groups, flat, form)
            for leaf, slot, value in zip(flat.leaves, flat.layout.slots, values, strict=True):
                found[leaf] = _without_memory(slot.shape, flat.layout.dtype) if value is None else _shown_for(value)
        call.values[unit] = found
    return call.values[unit]


def _values_of(groups: Groups, flat: FlatParam, form: Form) -> list[Any]:
    if not form.sharded and _shows_shards(flat):
        if not form.is_shown_by(groups):
            return [None] * len(flat.leaves)
        device = form.device(flat.device)
        return [view.to(device, copy=True) for view in flat.views(flat.full)]
    if not form.is_made_by(groups):
        return [None] * len(flat.leaves)
    parts = Parts.of_shard(flat.layout, flat.parameter.data)
    return collect(groups, parts, flat.layout.dtype, flat.device, form)


def _without_memory(shape: tuple[int, ...], dtype: torch.dtype) -> torch.Tensor:
    return torch.empty(shape, dtype=dtype, device="meta")


def _shown_for(value: Any) -> torch.Tensor:
    """What modules are shown of a value; torch warns when a ``ShardedTensor`` is detached."""
    return StandIn.of(value) if isinstance(value, (ShardedTensor, DTensor)) else value


def flat_numel(layout: FlatLayout) -> int:
    """Elements of a flat parameter up to the end of its last parameter: the same for any number of ranks."""
    return layout.slots[-1].end


def _local(unit: FullyShardedDataParallel, flat: FlatParam, call: _Call) -> StandIn:
    """A flat parameter as a 1-D ``ShardedTensor`` whose shards are the ranks' memory, without padding at the end."""
    numel, shard_numel, groups = flat_numel(flat.layout), flat.layout.shard_numel, unit._groups
    boxes = {}
    for place, rank in enumerate(groups.global_ranks()):
        begin, end = min(place * shard_numel, numel), min((place + 1) * shard_numel, numel)
        if begin < end:
            boxes[rank] = Box((begin,), (end - begin,))
    begin = flat.comm.rank * shard_numel
    mine = flat.parameter.data[: max(0, min(shard_numel, numel - begin))]
    device = call.form_of(unit).device(mine.device)
    local = mine.to(device) if mine.numel() else None
    group = groups.process_group()
    return StandIn.of(create_sharded_tensor(local, (numel,), flat.layout.dtype, device, group, boxes))
