"""The phases of a unit, the transitions allowed between them, and what the units under one root share."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

from hpcfsdp import _compat

if TYPE_CHECKING:
    from hpcfsdp.runtime.unit import Unit


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


TRANSITIONS = {
    Phase.IDLE: {Phase.FORWARD, Phase.BACKWARD},
    Phase.FORWARD: {Phase.IDLE},
    Phase.BACKWARD: {Phase.IDLE, Phase.RECOMPUTE},
    Phase.RECOMPUTE: {Phase.BACKWARD},
}


@dataclass
class Engine:
    """What all units under one root share.

    Attributes:
        units: in the order in which the modules were registered, the root first.
        in_backward: whether a backward pass has begun and its end has been asked for.
    """

    units: list[Unit] = field(default_factory=list)
    in_backward: bool = False

    def recover(self) -> None:
        """Bring all units back to rest if a backward pass was broken off by an exception."""
        if self.in_backward and not _compat.in_backward():
            self.in_backward = False
            for unit in self.units:
                unit.reset()
