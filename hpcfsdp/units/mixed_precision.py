"""Mixed precision of modules: buffers, modules that stay in full precision, and full precision in eval mode."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from hpcfsdp.engine.nested import cast_forward_inputs, tensors_in
from hpcfsdp.units.flat_unit import FlatUnit, unit_of, units_in
from hpcfsdp.units.own import UnitOptions


def modules_outside(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and the modules below it outside of units; one in two places comes twice."""
    if unit_of(root) is None:
        yield root
        for child in root.children():
            yield from modules_outside(child)


def find_full_precision(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[nn.Module, torch.dtype]:
    """Return the modules of these classes outside of units, with the dtype of their tensors; before flattening."""
    found = {}
    for module in modules_outside(root):
        if isinstance(module, classes):
            tensors = [*module.parameters(), *module.buffers()]
            found[module] = next((each.dtype for each in tensors if each.is_floating_point()), torch.float32)
    return found


def keep_full_precision(modules: Mapping[nn.Module, torch.dtype]) -> None:
    """Have each of these modules compute in its dtype: cast floating-point inputs to it, and outputs back."""
    for module, dtype in modules.items():
        module.register_forward_pre_hook(functools.partial(_cast_up, dtype), with_kwargs=True, prepend=True)
        module.register_forward_hook(_cast_back)


def _cast_up(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    module.__dict__["_hpcfsdp_input_dtype"] = dtypes[0] if dtypes else None
    return cast_forward_inputs(dtype, args, kwargs)


def _cast_back(module: nn.Module, _args: Any, outputs: Any) -> Any:
    return cast_forward_inputs(module.__dict__.pop("_hpcfsdp_input_dtype", None), (outputs,), {})[0][0]


def cast_buffers(
    root: nn.Module, options: UnitOptions, cast: dict[torch.Tensor, torch.Tensor]
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Cast the floating-point buffers outside of units. Return their dtypes before; add the results to `cast`."""
    before: dict[tuple[nn.Module, str], torch.dtype] = {}
    modules = list(modules_outside(root))
    full = options.full_precision
    kept = options.ignored.buffers.union(*(module.buffers() for module in modules if isinstance(module, full)))
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer in kept:
                continue
            before.setdefault((module, name), buffer.dtype)
            if buffer not in cast:  # a buffer registered in several places stays one
                cast[buffer] = buffer.to(options.mixed_precision.buffer_dtype)
                cast.setdefault(cast[buffer], cast[buffer])
            module._buffers[name] = cast[buffer]
    return before


def follow_eval_mode(root: FlatUnit) -> None:
    """Have units compute in the dtype of their shards in eval mode. Collective over the units' ranks, at rest."""
    for unit in units_in(root.wrapper):
        full, mixed = not unit.module.training, unit.options.mixed_precision
        casts = mixed.cast_root_forward_inputs if unit is root else mixed.cast_forward_inputs
        unit.input_dtype = mixed.param_dtype if casts and not full else None
        if full == unit.computes_in_full:
            continue
        if unit.root is not None:
            unit.root.rest()
        for flat in unit.sharded_params:
            flat.compute_in(flat.dtypes.param if full else flat.dtypes.compute)
        unit.computes_in_full = full
    # As in torch's FSDP, the mode of the unit that is called decides about the dtypes of all buffers.
    full, lowered = not root.module.training, root.lowered_buffers
    if full == bool(lowered):
        return
    wanted = dict(root.buffer_dtypes if full else lowered)
    lowered.clear()
    cast: dict[torch.Tensor, torch.Tensor] = {}
    for (module, name), dtype in wanted.items():
        buffer = module._buffers.get(name)
        if buffer is not None and buffer.is_floating_point():
            if full:
                lowered[module, name] = buffer.dtype
            module._buffers[name] = cast.setdefault(buffer, buffer.to(dtype))
