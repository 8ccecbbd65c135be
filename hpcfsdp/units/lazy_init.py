"""The outermost unit of a model: when it is first called, it makes the ``Root`` for all units inside."""

from __future__ import annotations

import itertools
import uuid
from collections.abc import Sequence

import torch
import torch.distributed as dist

from hpcfsdp.engine.root import Root
from hpcfsdp.errors import EngineError
from hpcfsdp.units.flat_unit import FlatUnit, ModelUnit, clean_path
from hpcfsdp.units.group_cache import GroupCache
from hpcfsdp.units.mixed_precision import cast_buffers
from hpcfsdp.units.optimizer_check import watch_root

_numbers = itertools.count(1)


@torch.inference_mode(False)  # the first call may be in inference mode, and training follows
@torch.no_grad()
def become_root(unit: ModelUnit) -> Root:
    """Collective over the unit's ranks. Make a unit the root of the units inside.

    Raises:
        EngineError: the model has fewer elements than ranks.
    """
    units = list(unit.inner_units())
    for each in units:
        each.prepare()
        each.check_ready()
    unit.confirm()
    if isinstance(unit, FlatUnit):
        _check_size(units, unit.mesh.shard.size)
    names = {module: name for name, module in unit.wrapper.named_modules()}
    cast: dict[torch.Tensor, torch.Tensor] = {}
    # A module in several units has its buffers cast once, and a unit may have been a root before.
    dtypes = {place: dtype for each in units for place, dtype in each.buffer_dtypes.items()}
    for each in units:
        mixed = each.options.mixed_precision
        each.is_root = each is unit
        each.choose_reshard()
        each.name = clean_path(names.get(each.wrapper, "")) or each.name
        each.inside = frozenset(inner for inner in each.inner_units() if inner is not each)
        cast_inputs = mixed.cast_root_forward_inputs if each is unit else mixed.cast_forward_inputs
        each.input_dtype = mixed.param_dtype if cast_inputs else None
        if mixed.buffer_dtype is not None:
            dtypes = {**cast_buffers(each.module, each.options, cast), **dtypes}
    host = GroupCache.current().host_of(unit.comm) if dist.is_initialized() else None
    label, number = (host or unit.comm).broadcast_object((uuid.uuid4().hex, next(_numbers)))
    lines = None if unit.mesh.data is None else (unit.mesh.shard, unit.mesh.replicas)
    root = Root(units, unit.comm, label, number=number, host=host, streams=unit.streams, lines=lines)
    watch_root(root)
    for each in units:
        each.root = root
        each.buffer_dtypes = dtypes
    return root


def _check_size(units: Sequence[ModelUnit], ranks: int) -> None:
    # The largest block counts: all ranks find the same number.
    slots = [slot for each in units for flat in each.sharded_params for slot in flat.layout.slots]
    numel = sum(slot.numel if slot.block is None else slot.block.largest_numel for slot in slots)
    if 0 < numel < ranks:
        raise EngineError(
            f"the model has {numel} parameter element(s) for {ranks} ranks: some ranks would hold none of it; start "
            "fewer ranks or use a larger model"
        )
