"""The unit of a wrapper: ranks compare what they wrap, parameters become flat ones and leave their modules."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, MixedPrecision, ShardingStrategy

from hpcfsdp import _compat
from hpcfsdp.api import unshard
from hpcfsdp.api.assigned import watch_assignments
from hpcfsdp.api.flatten import OwnParams
from hpcfsdp.api.groups import Groups
from hpcfsdp.api.same_model import check_same_model, warn_of_values
from hpcfsdp.api.tensor_parallel import TensorView
from hpcfsdp.comm import Communicator, raise_together_over
from hpcfsdp.engine.unit import Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.flat.precision import Dtypes
from hpcfsdp.flat.sync import sync_params_and_buffers

if TYPE_CHECKING:
    from hpcfsdp.api.wrapper import FullyShardedDataParallel

_CHUNK_NUMEL = 1 << 20
"""Of a flat parameter where ranks read each other's memory: the buffers of gradients are as large as the largest one,
and what is in the cache when it is written there is read from the cache. Other transports want large messages."""
_KEEPS_VALUES = (ShardingStrategy.SHARD_GRAD_OP, ShardingStrategy._HYBRID_SHARD_ZERO2, ShardingStrategy.NO_SHARD)
_WARNED = "this has been warned of"


def sync_values(own: OwnParams, comms: Iterable[Communicator], groups: Groups) -> None:
    """Collective over the unit's ranks. Have all begin with the values of the first."""
    for comm in comms:
        sync_params_and_buffers(comm, own.tensors)
    if groups.tensor is not None:
        sync_params_and_buffers(groups.tensor.comm, own.params_alike + own.buffers_alike)


def make_unit(
    wrapper: FullyShardedDataParallel, apart: tuple[type[nn.Module], ...], made: frozenset[str] | None
) -> tuple[Unit, str | None]:
    """Collective over the unit's ranks. The unit of what the wrapper owns.

    Args:
        apart: types of modules that compute in full precision.
        made: names of parameters that got their values here; None if all ranks have the same values.

    Returns:
        The unit, and what ranks begin with different values of, see ``check_same_model``.
    """
    own, groups, original = wrapper._own, wrapper._groups, wrapper._use_orig_params
    if any(comm.shares_memory for comm in wrapper._comms()):
        own.split(_CHUNK_NUMEL)
    layouts = [
        FlatLayout.plan(
            ((p.fqn, p.param.shape, p.aliases) for p in group),
            group[0].param.dtype,
            groups.shard.size,
            {p.fqn: p.block for p in group if p.block is not None},
        )
        for group in own.groups
    ]
    differing = _compare(own, layouts, groups, made)
    flats = []
    for index, (group, layout) in enumerate(zip(own.groups, layouts, strict=True)):
        for entry in group:
            entry.localise()
            entry.take()  # while it has its shape
        flat = FlatParam(
            [entry.param for entry in group],
            layout,
            groups.shard,
            replicas=groups.replicate if groups.num_replicas > 1 else None,
            dtypes=_dtypes(wrapper.mixed_precision, layout.dtype, isinstance(group[0].places[0][0], apart)),
            use_orig_params=original,
            offload=wrapper._offload,
            always_whole=groups.strategy is ShardingStrategy.NO_SHARD,
        )
        for entry in group:
            if not original:
                entry.deregister()
        if not original:
            wrapper._flat_owner.register_parameter(unshard.flat_param_name(index), flat.parameter)
        flats.append(flat)
    name = type(wrapper._flat_owner).__name__
    for entry in own.entries:
        for module, _ in entry.places:
            _compat.refuse_parallelizing(module, functools.partial(_too_late, name, entry.fqn))
    views = [
        TensorView(entry.param, entry.block, groups.tensor.mesh, entry.places, original)
        for entry in own.entries
        if entry.block is not None
    ]
    unit = Unit(name, flats, views, reshard_after_forward=groups.strategy not in _KEEPS_VALUES)
    for flat, group in zip(flats, own.groups, strict=True):
        watch_assignments(unit, flat, group)
    unit.prefetch_forward = wrapper.forward_prefetch
    if wrapper.backward_prefetch is not None:
        unit.prefetch_backward = "pre" if wrapper.backward_prefetch is BackwardPrefetch.BACKWARD_PRE else "post"
    return unit, differing


def warn_of_units(root: FullyShardedDataParallel, stacklevel: int) -> str | None:
    """Warn once of values that differ between ranks in units within `root`; what is to be remembered of it."""
    found = {name: unit._differing for name, unit in root.named_modules() if getattr(unit, "_differing", None)}
    if found and _WARNED not in found.values():
        name, what = next(iter(found.items()))
        unit = ".".join(part for part in name.split(".") if part != "_fsdp_wrapped_module")
        warn_of_values(f"in the unit {unit!r}, {what}" if unit else what, stacklevel=stacklevel)
    return _WARNED if found else None


def _compare(own: OwnParams, layouts: Sequence[FlatLayout], groups: Groups, made: frozenset[str] | None) -> str | None:
    """Collective over the unit's ranks. What they begin with different values of; they have the same parameters."""
    trained = [group[0].param.requires_grad for group in own.groups]
    counted = {entry.fqn: entry.counted_fqn for entry in own.entries}
    comms, differing = groups.connecting(), None
    for comm in comms:
        is_tensor = groups.tensor is not None and comm is groups.tensor.comm  # where each has another block
        alike = [layout.of_tensor_rank(0) for layout in layouts] if is_tensor else layouts
        # Parts that were drawn by several ranks are no less random; replicas of one part have to be the same.
        are_parts = not is_tensor and (groups.num_replicas == 1 or comm is groups.shard)
        left = made if made is not None and are_parts else frozenset()
        values = None if made is None else own.named_values(left, alike_only=is_tensor)
        with raise_together_over(other for other in comms if other is not comm):
            names = groups.names_of(comm)
            found = check_same_model(comm, alike, trained, names, counted_fqns=counted, values=values)
        differing = differing or found
    return differing


def _dtypes(mixed: MixedPrecision, kept: torch.dtype, full_precision: bool) -> Dtypes:
    if full_precision:
        return Dtypes.plan(kept)
    return Dtypes.plan(
        kept,
        param=mixed.param_dtype,
        reduce=mixed.reduce_dtype,
        keep_low_precision_grads=mixed.keep_low_precision_grads,
    )


def _too_late(unit: str, fqn: str) -> EngineError:
    return EngineError(
        f"{fqn!r} of the unit {unit} was to be parallelized over tensors after it had been wrapped, when it is "
        "sharded: call parallelize_module first, and wrap its result"
    )
