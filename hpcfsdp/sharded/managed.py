"""Which parameters are no parameters of a model any more, because a unit shards what they stood for."""

from __future__ import annotations

from torch import nn

_UNIT_FQN = "_hpcfsdp_unit_fqn"
_HIDDEN = "_hpcfsdp_hidden"
_SHAPE = "_hpcfsdp_whole_shape"
_REPLACED = "_hpcfsdp_replaced"


def mark(param: nn.Parameter, fqn: str, shape: tuple[int, ...]) -> None:
    """Mark a parameter as one that a unit has.

    Args:
        fqn: its name in the unit.
        shape: of the whole parameter.
    """
    setattr(param, _UNIT_FQN, fqn)
    setattr(param, _SHAPE, shape)


def whole_shape(param: nn.Parameter) -> tuple[int, ...] | None:
    """The shape of the whole parameter, None if no unit has it."""
    return getattr(param, _SHAPE, None)


def hide(param: nn.Parameter) -> None:
    """Mark a parameter as one that something else stands for now: nothing is gained by an optimizer that steps it."""
    setattr(param, _HIDDEN, True)


def show(param: nn.Parameter) -> None:
    """The way back from ``hide``."""
    setattr(param, _HIDDEN, False)


def unit_fqn(param: nn.Parameter) -> str | None:
    """The name that a parameter has in a unit, None if no unit has it."""
    return getattr(param, _UNIT_FQN, None)


def hidden_fqn(param: nn.Parameter) -> str | None:
    """The name of a parameter that something else stands for now, None for any other."""
    return unit_fqn(param) if getattr(param, _HIDDEN, False) else None


def replace(param: nn.Parameter) -> None:
    """Mark a parameter as one in whose place the user has assigned another."""
    hide(param)
    setattr(param, _REPLACED, True)


def is_replaced(param: nn.Parameter) -> bool:
    """Whether the user has assigned another parameter in its place."""
    return getattr(param, _REPLACED, False)
