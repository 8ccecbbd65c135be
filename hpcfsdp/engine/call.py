"""One forward call of a unit: what its module is given, what it leaves behind, and what its backward has to know."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from hpcfsdp.engine.objects import Visit, warn_of_opaque
from hpcfsdp.flat.gradient import FlatGrad

Leaf = tuple[FlatGrad, int]
"""A leaf by the gradient that it has a part in, and its index there."""
Hook = Callable[[torch.Tensor], None]


class Call:
    """One forward call of a unit, as far as its backward has to know.

    Lives as long as the graph that the call made: the hooks on its outputs hold it, those on its inputs do not.
    """

    __slots__ = (
        "__weakref__",
        "accumulators",
        "backward",
        "ends_at_inputs",
        "has_backward",
        "inputs",
        "inputs_pending",
        "is_open",
        "versions",
    )

    def __init__(self) -> None:
        self.inputs: list[Any] = []
        """Nodes through which gradients leave the call towards what was computed before it."""
        self.has_backward = False
        """Whether gradients may come to its outputs."""
        self.is_open = False
        """Whether the inputs cannot tell when its backward is through."""
        self.accumulators: list[tuple[Leaf, Any]] = []
        """Nodes that add to the gradients of the unit's leaves."""
        self.versions: list[list[int]] = []
        """Of what it computed with, see ``FlatParam.versions``, by the unit's gradients."""
        self.inputs_pending = 0
        self.ends_at_inputs = False
        """Whether gradients leave it in this backward; a module may detach what it is given."""
        self.backward = 0
        """The engine's number of the last backward that has come to it: a graph may be gone through several times."""


class Arguments:
    """What a module computes with in place of the tensors that it was called with, while it runs.

    Each tensor with a gradient to come is replaced by a view that only this call uses: its gradient is complete when
    the call is through, also where others use the tensor. Objects that can be written to show the views as long as the
    module runs, and their own tensors before and after: the module, and others, may keep them and write to them.
    """

    def __init__(self, unit: str, dtype: torch.dtype | None, hook: Hook | None) -> None:
        """
        Args:
            unit: its name, for messages.
            dtype: floating-point tensors are cast to it, except for those in objects of unknown types.
            hook: for the gradients of the views; None for no views.
        """
        self._unit = unit
        self._dtype = dtype
        self._hook = hook
        self._views: list[tuple[torch.Tensor, Any]] = []
        self._given: dict[tuple[int, bool], torch.Tensor] = {}
        self._originals: dict[int, torch.Tensor] = {}  # by the id of what was given in place of each
        self._nodes: dict[int, Any] = {}  # what computed each original, by its id
        self._holders: list[Any] = []

    def lend(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """The arguments to call the module with. ``restore`` has to follow."""
        visit = Visit(self._give)
        self._holders = visit.holders
        try:
            args, kwargs = visit(args), {name: visit(value) for name, value in kwargs.items()}
        except BaseException:
            self.restore()
            raise
        if self._hook is not None:
            warn_of_opaque(visit.opaque, self._unit)
        return args, kwargs

    def restore(self) -> list[torch.Tensor]:
        """The module has run. Give objects their own tensors back.

        Returns:
            Tensors that need gradients, and that the module has put into these objects, or changed there.
        """
        written: dict[int, torch.Tensor] = {}

        def keep(tensor: torch.Tensor, _in_object: bool) -> torch.Tensor:
            tensor = self._originals.get(id(tensor), tensor)
            if needs_hook(tensor) and not self.is_unchanged(tensor):
                written[id(tensor)] = tensor
            return tensor

        visit = Visit(keep)
        for holder in self._holders:
            visit(holder)
        self._holders = []
        return list(written.values())

    def nodes(self) -> tuple[list[Any], bool]:
        """The nodes of the views, and whether an operation in place has taken one of them out of the graph."""
        nodes = [node for _, node in self._views]
        return nodes, any(view.grad_fn is not node for view, node in self._views)

    def is_view(self, tensor: torch.Tensor) -> bool:
        """Whether the module was given this tensor in place of another one."""
        return id(tensor) in self._originals

    def is_unchanged(self, tensor: torch.Tensor) -> bool:
        """Whether the module was given a view of this tensor, and has not changed it."""
        return id(tensor) in self._nodes and self._nodes[id(tensor)] is tensor.grad_fn

    def _give(self, tensor: torch.Tensor, in_object: bool) -> torch.Tensor:
        if id(tensor) in self._originals:  # two ways lead to the place where it lies
            return tensor
        cast = self._dtype is not None and not in_object and tensor.is_floating_point()
        given = self._given.get((id(tensor), cast))  # what is passed twice stays one tensor
        if given is not None:
            return given
        given = tensor.to(self._dtype) if cast else tensor
        if self._hook is not None and given.requires_grad:
            given = given.view_as(given)
            given.register_hook(self._hook)
            self._views.append((given, given.grad_fn))
        if given is not tensor:
            self._given[id(tensor), cast] = given
            self._originals[id(given)] = tensor
            self._nodes[id(tensor)] = tensor.grad_fn
        return given


def needs_hook(tensor: torch.Tensor) -> bool:
    """Whether a gradient may come to a tensor that some unit has computed."""
    return tensor.requires_grad and not tensor.is_leaf
