"""Mixed precision where modules are concerned: those that stay in full precision, and buffers."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import MixedPrecision

from hpcfsdp.runtime.containers import apply_to_tensors, cast_forward_inputs
from hpcfsdp.runtime.hooks import tensors_in


def keep_full_precision(root: nn.Module, classes: tuple[type[nn.Module], ...], *, stop_at: type[nn.Module]) -> None:
    """Have the modules of these classes compute in the dtype of their parameters, amid others that do not.

    Their floating-point inputs are cast up, and what they return is cast to the dtype that came in.

    Args:
        stop_at: the type of units, which are not entered.
    """
    if isinstance(root, stop_at):
        return
    if isinstance(root, classes):
        root.register_forward_pre_hook(_cast_up, with_kwargs=True, prepend=True)
        root.register_forward_hook(_cast_back)
    for child in root.children():
        keep_full_precision(child, classes, stop_at=stop_at)


_FULL = "_hpcfsdp_full_precision"
_CAME_IN = "_hpcfsdp_came_in"


def _cast_up(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
    dtypes = [tensor.dtype for tensor in tensors_in((args, kwargs), strict=False) if tensor.is_floating_point()]
    module.__dict__[_CAME_IN] = dtypes[0] if dtypes else None
    full = module.__dict__.get(_FULL, torch.float32)
    return cast_forward_inputs(full, args, kwargs)


def _cast_back(module: nn.Module, _args: Any, outputs: Any) -> Any:
    came_in = module.__dict__.pop(_CAME_IN, None)
    if came_in is None:
        return outputs
    return apply_to_tensors(lambda tensor: tensor.to(came_in) if tensor.is_floating_point() else tensor, outputs)


def remember_full_precision(root: nn.Module, classes: tuple[type[nn.Module], ...], *, stop_at: type[nn.Module]) -> None:
    """Note the dtype that the parameters of these modules have now, before they are flattened."""
    if isinstance(root, stop_at):
        return
    if isinstance(root, classes):
        floating = [param.dtype for param in root.parameters() if param.is_floating_point()]
        root.__dict__[_FULL] = floating[0] if floating else torch.float32
    for child in root.children():
        remember_full_precision(child, classes, stop_at=stop_at)


def cast_buffers(
    root: nn.Module, dtype: torch.dtype, buffers: Iterable[torch.Tensor], classes: tuple[type[nn.Module], ...]
) -> None:
    """Cast the given floating-point buffers, wherever below `root` they stand; modules of `classes` keep theirs.

    One that is registered in several places is one afterwards, too.
    """
    kept = {buffer for module in root.modules() if isinstance(module, classes) for buffer in module.buffers()}
    changes = {buffer: buffer.to(dtype) for buffer in buffers if buffer.is_floating_point() and buffer not in kept}
    for module in root.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer in changes:
                module._buffers[name] = changes[buffer]


def ignored_classes(precision: MixedPrecision | None) -> tuple[type[nn.Module], ...]:
    """The classes of modules that stay in full precision; none where nothing is lowered."""
    if precision is None or (precision.param_dtype is None and precision.reduce_dtype is None):
        return ()
    return tuple(precision._module_classes_to_ignore)
