"""Parameters of a tensor-parallel model: DTensors with blocks that units shard."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import set_grad
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.reshard.sharded_tensors import Placed, as_dtensor, full_tensor
from hpcfsdp.units.own import hide, unit_fqn
from hpcfsdp.units.unit_mesh import UnitMesh, describe_mesh


def replicated_grad(param: nn.Parameter, unit_mesh: UnitMesh) -> tuple[int, torch.Tensor]:
    """Return the gradient of a parameter outside of units, with the number of tensor-parallel ranks that have the same.

    For a ``DTensor`` on the unit's mesh this rank's block, for others the whole gradient. Collective over the mesh of
    other DTensors, and where the gradient's placements are not those of the parameter.
    """
    num_blocks = unit_mesh.size("tensor")
    if not isinstance(param, DTensor) or param.device_mesh != unit_mesh.tensor_mesh:
        return num_blocks, full_tensor(param.grad)
    if param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)
    cut = [size for size, where in zip(param.device_mesh.mesh.shape, param.placements, strict=True) if where.is_shard()]
    return num_blocks // math.prod(cut), _compat.local_of(param.grad)


@dataclass
class TensorView:
    """The ``DTensor`` that modules hold instead of a leaf while they compute; the leaf is its block.

    Attributes:
        places: modules, and the names of the leaf there.
        is_registered: whether the leaf is a parameter of its modules, or an attribute alone.
    """

    leaf: nn.Parameter
    block: TensorBlock
    mesh: DeviceMesh
    places: list[tuple[nn.Module, str]]
    is_registered: bool

    @property
    def placed(self) -> Placed:
        """Mesh, placements, shape and stride of the whole."""
        return Placed(self.mesh, self.block.placements, torch.Size(self.block.shape), self.block.stride)

    def show(self) -> None:
        """Not collective. Have modules hold a new ``DTensor`` in each call, since it is part of the graph."""
        view = as_dtensor(self.leaf, self.placed)
        for module, name in self.places:
            module.__dict__[name] = view  # found before registered parameters

    def hide(self) -> None:
        """Have modules hold the leaf."""
        for module, name in self.places:
            if self.is_registered:
                module.__dict__.pop(name, None)
            else:
                module.__dict__[name] = self.leaf


@contextlib.contextmanager
def dtensors_shown(views: Iterable[TensorView]) -> Iterator[None]:
    """Not collective. Return a context in which modules hold ``DTensor`` parameters instead of leaves, their blocks.

    They share the memory of the leaves and of their gradients. Assignments to ``.data`` of a ``DTensor`` are lost. The
    values of parameters assigned instead of them are copied into the leaves, collectively over the mesh if their
    placements are others.
    """
    shown: list[tuple[TensorView, nn.Parameter]] = []
    try:
        for view in views:
            leaf = view.leaf
            param = nn.Parameter(_shown(view, leaf.data), requires_grad=leaf.requires_grad)
            param.__dict__.update(leaf.__dict__)
            shown.append((view, param))
            _compat.set_grad_of_any_dtype(param, None if leaf.grad is None else _shown(view, leaf.grad))
            for module, name in view.places:
                module._parameters[name] = param
        yield
    finally:
        replaced = [(view, param, _put_back(view, param)) for view, param in shown]
        for view, param, now in replaced:
            if now is None:
                view.leaf.requires_grad_(param.requires_grad)
            _adopt(view, param if now is None else now)


def _shown(view: TensorView, block: torch.Tensor) -> DTensor:
    """Return a ``DTensor`` in the memory of a block, on any device."""
    return _compat.dtensor(_compat.at_its_storage(block), *view.placed)


def _put_back(view: TensorView, shown: nn.Parameter) -> nn.Parameter | None:
    """Have modules hold the leaf again. Returns the parameter that was assigned instead of `shown`, if any."""
    hide(shown)
    assigned = None
    for module, name in view.places:
        now = module._parameters.get(name)
        assigned = now if now is not None and now is not shown else assigned
        module._parameters[name] = view.leaf
        module.__dict__.pop(name, None)
    return assigned


def _adopt(view: TensorView, param: nn.Parameter) -> None:
    """Give the leaf the values and the gradient of `param`."""
    values = _local(view, param.detach())
    if values.data_ptr() != view.leaf.data_ptr() or values.shape != view.leaf.shape:
        view.leaf.data = values.to(view.leaf)
    grad = None if param.grad is None else _local(view, param.grad)
    if grad is None or view.leaf.grad is None or grad.data_ptr() != view.leaf.grad.data_ptr():
        set_grad(view.leaf, grad)


def _local(view: TensorView, tensor: torch.Tensor) -> torch.Tensor:
    if isinstance(tensor, DTensor):
        if tensor.device_mesh != view.mesh:
            raise EngineError(
                f"{unit_fqn(view.leaf)!r} was given a DTensor on the ranks {describe_mesh(tensor.device_mesh)} "
                f"within summon_full_params, and is on {describe_mesh(view.mesh)}: give it one on the same mesh"
            )
        if tensor.placements != view.block.placements:
            tensor = tensor.redistribute(view.mesh, view.block.placements)
        return _compat.local_of(tensor)
    if tuple(tensor.shape) == view.block.shape:
        tensor = tensor[view.block.box.slices]
    return tensor
