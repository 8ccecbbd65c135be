"""The phases of a unit, and the transitions allowed between them."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """What a unit is doing."""

    IDLE = "idle"
    """Between steps, or between its forward and its backward: sharded."""
    FORWARD = "forward"
    """Inside of its forward: unsharded."""
    BACKWARD = "backward"
    """Gradients flow through it: unsharded until they have."""
    RECOMPUTE = "recompute"
    """Its forward runs again inside of its backward (activation checkpointing): unsharded, and stays so."""
    SUMMON = "summon_full_params"
    """The user has asked for its whole parameters."""


TRANSITIONS = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD, Phase.SUMMON},
    Phase.FORWARD: {Phase.IDLE},
    Phase.BACKWARD: {Phase.IDLE, Phase.RECOMPUTE},
    Phase.RECOMPUTE: {Phase.BACKWARD},
    Phase.SUMMON: {Phase.IDLE},
}
