"""``FSDP_USE_FULL_PREC_IN_EVAL``: in eval mode units compute in the dtype that their parameters are kept in."""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING

import torch
from torch import nn

if TYPE_CHECKING:
    from hpcfsdp.api.wrapper import FullyShardedDataParallel


def follow_eval_mode(root: FullyShardedDataParallel, units: Iterable[FullyShardedDataParallel]) -> None:
    """Collective over the units' ranks, which are at rest. Have each compute as the mode of its module asks.

    Args:
        root: the unit that is called; buffers go by its mode, as in torch's FSDP.
    """
    for wrapper in units:
        full, mixed = not wrapper.module.training, wrapper.mixed_precision
        casts = mixed.cast_root_forward_inputs if wrapper is root else mixed.cast_forward_inputs
        wrapper._unit.input_dtype = mixed.param_dtype if casts and not full else None
        if full == wrapper._computes_in_full:
            continue
        if wrapper._root is not None:
            wrapper._root.rest()
        for flat in wrapper._unit.flats:
            flat.compute_in(flat.dtypes.kept if full else flat.dtypes.compute)
        wrapper._computes_in_full = full
    _cast_buffers(root, full=not root.module.training)


def _cast_buffers(root: FullyShardedDataParallel, *, full: bool) -> None:
    """Give buffers that mixed precision has cast the dtypes that they had before, or the way back."""
    lowered: dict[tuple[nn.Module, str], torch.dtype] = root.__dict__.setdefault("_lowered_buffers", {})
    if full == bool(lowered):
        return
    wanted = dict(root._buffer_dtypes) if full else dict(lowered)
    lowered.clear()
    cast: dict[torch.Tensor, torch.Tensor] = {}
    for (module, name), dtype in wanted.items():
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.is_floating_point():
            if full:
                lowered[module, name] = buffer.dtype
            module._buffers[name] = cast.setdefault(buffer, buffer.to(dtype))
