"""Mixed precision of modules: buffers, and modules that stay in full precision."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping, Set
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from hpcfsdp.engine.nested import cast_forward_inputs, tensors_in
from hpcfsdp.units.flat_unit import unit_of


def modules_outside(root: nn.Module) -> Iterator[nn.Module]:
    """`root` and the modules below it outside of units; one in two places comes twice."""
    if unit_of(root) is None:
        yield root
        for child in root.children():
            yield from modules_outside(child)


def find_full_precision(root: nn.Module, classes: tuple[type[nn.Module], ...]) -> dict[nn.Module, torch.dtype]:
    """The modules of these classes outside of units, with the dtype of their tensors; before flattening."""
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


_INPUT_DTYPE = "_hpcfsdp_input_dtype"


def _cast_up(dtype: torch.dtype, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs)) if tensor.is_floating_point()]
    module.__dict__[_INPUT_DTYPE] = dtypes[0] if dtypes else None
    return cast_forward_inputs(dtype, args, kwargs)


def _cast_back(module: nn.Module, _args: Any, outputs: Any) -> Any:
    return cast_forward_inputs(module.__dict__.pop(_INPUT_DTYPE, None), (outputs,), {})[0][0]


def cast_buffers(
    root: nn.Module,
    dtype: torch.dtype,
    classes: tuple[type[nn.Module], ...],
    *,
    ignored: Set[torch.Tensor],
    cast: dict[torch.Tensor, torch.Tensor],
) -> dict[tuple[nn.Module, str], torch.dtype]:
    """Cast the floating-point buffers below `root`, outside of units and of modules of `classes`.

    Args:
        ignored: buffers that are not cast.
        cast: buffers cast earlier, with the results; added to. So a buffer registered in several places stays one.

    Returns:
        By module and name, the original dtype of each buffer.
    """
    before: dict[tuple[nn.Module, str], torch.dtype] = {}
    modules = list(modules_outside(root))
    kept = {buffer for module in modules if isinstance(module, classes) for buffer in module.buffers()}
    for module in modules:
        for name, buffer in module._buffers.items():
            if buffer is None or not buffer.is_floating_point() or buffer in kept or buffer in ignored:
                continue
            before.setdefault((module, name), buffer.dtype)
            if buffer not in cast:
                cast[buffer] = buffer.to(dtype)
                cast.setdefault(cast[buffer], cast[buffer])
            module._buffers[name] = cast[buffer]
    return before


def ignored_classes(precision: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    """The classes of modules that stay in full precision; none without lower dtypes."""
    if precision is None or not any((precision.param_dtype, precision.reduce_dtype, precision.buffer_dtype)):
        return ()
    return tuple(precision._module_classes_to_ignore)
