"""``FSDP_USE_FULL_PREC_IN_EVAL``: in eval mode units compute in the dtype of their shards."""

from __future__ import annotations

import torch

from hpcfsdp.units.flat_unit import FlatUnit, units_in


def follow_eval_mode(root: FlatUnit) -> None:
    """Collective over the units' ranks, at rest. Set each unit's dtypes by the mode of its module.

    Args:
        root: the unit that is called. Its mode decides about all buffers, as in torch's FSDP.
    """
    for unit in units_in(root.wrapper):
        full, mixed = not unit.module.training, unit.mixed_precision
        casts = mixed.cast_root_forward_inputs if unit is root else mixed.cast_forward_inputs
        unit.input_dtype = mixed.param_dtype if casts and not full else None
        if full == unit.computes_in_full:
            continue
        if unit.root is not None:
            unit.root.rest()
        for flat in unit.sharded_params:
            flat.compute_in(flat.dtypes.param if full else flat.dtypes.compute)
        unit.computes_in_full = full
    _cast_buffers(root, full=not root.module.training)


def _cast_buffers(root: FlatUnit, *, full: bool) -> None:
    """Give buffers that mixed precision has cast their original dtypes if `full`, else the lower ones again."""
    lowered = root.lowered_buffers
    if full == bool(lowered):
        return
    wanted = dict(root.buffer_dtypes) if full else dict(lowered)
    lowered.clear()
    cast: dict[torch.Tensor, torch.Tensor] = {}
    for (module, name), dtype in wanted.items():
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.is_floating_point():
            if full:
                lowered[module, name] = buffer.dtype
            module._buffers[name] = cast.setdefault(buffer, buffer.to(dtype))
