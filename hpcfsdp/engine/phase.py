"""The phases of a unit, and the transitions allowed between them."""

from __future__ import annotations

from enum import Enum


class Phase(Enum):
    """The state of a unit."""

    IDLE = "idle"
    """Between steps, or between its forward and its backward: sharded."""
    FORWARD = "forward"
    """Its forward runs: unsharded."""
    BACKWARD = "backward"
    """Its backward runs: unsharded."""
    RECOMPUTE = "recompute"
    """Its forward runs again within its backward (activation checkpointing): stays unsharded."""
    SUMMON = "summon_full_params"
    """Its parameters are whole for the user."""


TRANSITIONS = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD, Phase.SUMMON},
    Phase.FORWARD: {Phase.IDLE},
    Phase.BACKWARD: {Phase.IDLE, Phase.RECOMPUTE},
    Phase.RECOMPUTE: {Phase.BACKWARD},
    Phase.SUMMON: {Phase.IDLE},
}
