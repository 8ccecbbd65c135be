"""Marks on parameters that units own, or that a flat or another parameter has replaced, and on modules of units."""

from __future__ import annotations

from collections.abc import Collection

import torch
from torch import nn

from hpcfsdp.errors import EngineError

_UNIT_FQN = "_hpcfsdp_unit_fqn"
_HIDDEN = "_hpcfsdp_hidden"
_SHAPE = "_hpcfsdp_whole_shape"
_REPLACED = "_hpcfsdp_replaced"


def mark_modules(root: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Mark the modules of units within `root` as torch's FSDP does: models of transformers and torch's compiler ask.

    Ranks then make the same calls of units where a model would skip layers, or generate tokens, for each rank alone.
    """
    for module in root.modules():
        if module not in ignored:
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # type: ignore[assignment]


def mark(param: nn.Parameter, fqn: str, shape: tuple[int, ...]) -> None:
    """Mark a parameter as owned by a unit, with its name there and the shape of the whole parameter."""
    setattr(param, _UNIT_FQN, fqn)
    setattr(param, _SHAPE, shape)


def whole_shape(param: torch.Tensor) -> tuple[int, ...] | None:
    """The shape of the whole parameter, None if no unit owns it."""
    return getattr(param, _SHAPE, None)


def hide(param: nn.Parameter) -> None:
    """Mark a parameter as replaced by another one: an optimizer must not step it."""
    setattr(param, _HIDDEN, True)


def retire(param: nn.Parameter, fqn: str, shape: tuple[int, ...]) -> None:
    """Mark a parameter as replaced by another one, and refuse gradients of it: the program has kept it elsewhere."""
    mark(param, fqn, shape)
    hide(param)
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(_refuse_gradient)


def _refuse_gradient(param: torch.Tensor) -> None:
    raise EngineError(
        f"a gradient came to {unit_fqn(param)!r} as it was before it was sharded. It would never train: a list, a "
        "closure or another module has kept it. Compute with the attribute of the module, or shard the module before "
        "the parameter is put elsewhere"
    )


def show(param: nn.Parameter) -> None:
    """Undo ``hide``."""
    setattr(param, _HIDDEN, False)


def unit_fqn(param: torch.Tensor) -> str | None:
    """The name of a parameter in its unit, None if no unit owns it."""
    return getattr(param, _UNIT_FQN, None)


def hidden_fqn(param: nn.Parameter) -> str | None:
    """The name of a parameter marked by ``hide``, None for any other."""
    return unit_fqn(param) if getattr(param, _HIDDEN, False) else None


def replace(param: nn.Parameter) -> None:
    """Mark a parameter as replaced by one that the user has assigned."""
    hide(param)
    setattr(param, _REPLACED, True)


def is_replaced(param: nn.Parameter) -> bool:
    """Whether ``replace`` was called."""
    return getattr(param, _REPLACED, False)
