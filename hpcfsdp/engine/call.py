"""The record of one forward call of a unit, for its backward."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from hpcfsdp.params.gradient import FlatGrad

Leaf = tuple[FlatGrad, int]
"""A leaf: the gradient of its flat parameter, and its index there."""


@dataclass(eq=False)
class Call:
    """Lives as long as the graph that the call made: hooks on its outputs hold it, those on its inputs do not.

    Attributes:
        inputs: nodes through which gradients leave the call towards earlier modules.
        has_backward: whether its outputs may get gradients.
        is_open: whether its inputs cannot show when its backward is complete.
        accumulators: nodes that add to the gradients of the unit's leaves.
        versions: ``FlatParam.versions`` at the forward, by the unit's gradients.
        inputs_pending: how many of `inputs` have not had their gradient in this backward.
        ends_at_inputs: whether gradients leave it in this backward; a module may detach its inputs.
        backward: the root's number of the last backward through the call; several may go through one graph.
    """

    inputs: list[Any] = field(default_factory=list)
    has_backward: bool = False
    is_open: bool = False
    accumulators: list[tuple[Leaf, Any]] = field(default_factory=list)
    versions: list[list[int]] = field(default_factory=list)
    inputs_pending: int = 0
    ends_at_inputs: bool = False
    backward: int = 0
