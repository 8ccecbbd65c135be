"""The parameters of a model as an optimizer of whole tensors sees them: whole shapes, and how ranks share them."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.distributed.tensor.placement_types import Placement

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import UsageError
from hpcfsdp.params.layout import Box, FlatLayout
from hpcfsdp.reshard.boxes import chunk_box
from hpcfsdp.reshard.owners import BlockSharding, FlatSharding, RanksByDim, Sharding
from hpcfsdp.reshard.placements import mesh_boxes, rows_on_mesh
from hpcfsdp.reshard.sharded_tensors import is_sharded
from hpcfsdp.state.model import named_flat_params, units_of
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units.dtensor_unit import OwnDTensor, dtensor_units_in
from hpcfsdp.units.unit_mesh import Dim, GroupCache, UnitMesh

Share = Callable[[bool], tuple[Communicator, Sharding]]
"""Collective over the ranks that it gives, the first time. The ranks among which a parameter has an owner, and how they
share it: all that have parts of it (True), or those of one replica (False)."""


@dataclass(frozen=True, eq=False)
class WholeParam:
    """One parameter.

    Attributes:
        name: in the model, without the names of wrappers.
        param: what a sharded optimizer would step: this rank's part.
        shape: of the whole.
        share: None if each rank steps it for itself.
        num_replicas: ranks with the same shard.
        has_blocks: whether the whole is a block of a tensor-parallel parameter.
    """

    name: str
    param: nn.Parameter
    shape: tuple[int, ...]
    share: Share | None = None
    num_replicas: int = 1
    has_blocks: bool = False

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


Known = dict[tuple[Any, ...], Any]
"""Shardings, and ranks by dimension, that parameters have in common: with many ranks each takes time and memory."""


def whole_params(model: nn.Module, *, joins_blocks: bool) -> dict[nn.Parameter, WholeParam]:
    """Collective over all ranks of the model, the first time. Return its parameters by what an optimizer steps.

    Flat parameters, which stand for several, are not among them.

    Args:
        joins_blocks: whether the blocks of tensor-parallel ranks are joined, or each is a tensor of its own.
    """
    units_of(model)  # which get the ranks of others
    known: Known = {}
    found = {whole.param: whole for whole in _of_sharded_params(model, joins_blocks, known)}
    names = {param: clean_fqn(name) for name, param in model.named_parameters()}
    for unit in dtensor_units_in(model):
        for each in unit.own:
            param = each.param.sharded
            found[param] = _of_dtensor(each, names.get(param, f"{unit.name}.{each.fqn}"), joins_blocks, known)
    for param, name in names.items():
        if param not in found:
            found[param] = _of_plain(param, name, joins_blocks, known)
    return found


def _num_replicas(mesh: UnitMesh) -> int:
    return 1 if mesh.data is None else mesh.size("replicate")


def _dims(mesh: UnitMesh, *, divides: bool, joins_blocks: bool) -> tuple[Dim, ...]:
    dims: tuple[Dim, ...] = ("shard", "replicate") if divides and _num_replicas(mesh) > 1 else ("shard",)
    return (*dims, "tensor") if joins_blocks and mesh.tensor is not None else dims


def _comm(mesh: UnitMesh, dims: tuple[Dim, ...]) -> Communicator:
    comm = mesh.comm(*dims)
    assert isinstance(comm, Communicator)
    return comm


def _of_sharded_params(model: nn.Module, joins_blocks: bool, known: Known) -> Iterator[WholeParam]:
    for unit, flat, layout in named_flat_params(model):
        if not flat.use_orig_params:
            continue
        for index, (leaf, slot) in enumerate(zip(flat.leaves, layout.slots, strict=True)):
            yield WholeParam(
                slot.fqn,
                leaf,
                slot.whole_shape if joins_blocks else slot.shape,
                functools.partial(_share_of_flat, unit.mesh, layout, index, joins_blocks, known),
                _num_replicas(unit.mesh),
                slot.is_cut and not joins_blocks,
            )


def _share_of_flat(
    mesh: UnitMesh, layout: FlatLayout, index: int, joins_blocks: bool, known: Known, divides: bool
) -> tuple[Communicator, Sharding]:
    dims = _dims(mesh, divides=divides, joins_blocks=joins_blocks)
    if (mesh, dims) not in known:
        known[mesh, dims] = RanksByDim.of(mesh.ranks_by_dim(*dims))
    return _comm(mesh, dims), FlatSharding(layout, index, known[mesh, dims])


def _of_dtensor(each: OwnDTensor, name: str, joins_blocks: bool, known: Known) -> WholeParam:
    shape = tuple(each.param.sharded.shape) if joins_blocks else each.shape
    has_blocks = each.block is not None and not joins_blocks
    share = functools.partial(_share_of_dtensor, each, shape, joins_blocks, known)
    return WholeParam(name, each.param.sharded, shape, share, _num_replicas(each.mesh), has_blocks)


def _share_of_dtensor(
    each: OwnDTensor, shape: tuple[int, ...], joins_blocks: bool, known: Known, divides: bool
) -> tuple[Communicator, Sharding]:
    mesh, param = each.mesh, each.param.sharded
    dims = _dims(mesh, divides=divides, joins_blocks=joins_blocks)
    comm = _comm(mesh, dims)
    if joins_blocks or each.block is None:
        return comm, _block_sharding(comm, param, known)
    sizes = (shape[each.dim], *shape[: each.dim], *shape[each.dim + 1 :])  # chunks are of the first dimension
    boxes, ranks_by_dim = {}, mesh.ranks_by_dim(*dims)
    for shard in range(mesh.shard.size):
        box = chunk_box(sizes, mesh.shard.size, shard)
        if box is not None and box.numel:
            offsets, numbers = ((*part[1 : each.dim + 1], part[0], *part[each.dim + 1 :]) for part in box)
            boxes.update(dict.fromkeys(ranks_by_dim[:, shard, 0].tolist(), Box(offsets, numbers)))
    return comm, BlockSharding(shape, boxes)


def _of_plain(param: nn.Parameter, name: str, joins_blocks: bool, known: Known) -> WholeParam:
    """Return a parameter that no unit owns."""
    if not joins_blocks or not is_sharded(param):
        return WholeParam(name, param, tuple(_compat.local_of(param).shape), has_blocks=is_sharded(param))
    assert isinstance(param, DTensor)
    boxes = mesh_boxes(tuple(param.shape), param.device_mesh.mesh, param.placements)
    if any(len(of_rank) > 1 for of_rank in boxes.values()):
        raise UsageError(
            f"WholeTensors: {name!r} has the placements {list(param.placements)}, of which a rank has several blocks: "
            "redistribute it to Shard and Replicate"
        )
    return WholeParam(name, param, tuple(param.shape), functools.partial(_share_of_plain, param, known))


def _share_of_plain(param: nn.Parameter, known: Known, _divides: bool) -> tuple[Communicator, Sharding]:
    assert isinstance(param, DTensor)
    comm = GroupCache.current().members_of(param.device_mesh)
    return comm, _block_sharding(comm, param, known)


def _block_sharding(comm: Communicator, param: torch.Tensor, known: Known) -> BlockSharding:
    assert isinstance(param, DTensor)
    key = comm, param.device_mesh, tuple(param.placements), tuple(param.shape)
    if key not in known:
        numbers = {rank: number for number, rank in enumerate(GroupCache.current().global_ranks(comm))}
        boxes = _boxes(tuple(param.shape), param.device_mesh.mesh, param.placements)
        held = {numbers[rank]: box for rank, box in boxes if rank in numbers and box.numel}
        known[key] = BlockSharding(tuple(param.shape), held)
    found: BlockSharding = known[key]
    return found


def _boxes(shape: tuple[int, ...], ranks: torch.Tensor, placements: Sequence[Placement]) -> Iterator[tuple[int, Box]]:
    """Return each rank of a mesh with its box."""
    rows = rows_on_mesh(shape, ranks, placements) if shape else None
    if rows is None:
        yield from ((rank, of_rank[0]) for rank, of_rank in mesh_boxes(shape, ranks, placements).items())
        return
    rest = (0,) * (len(shape) - 1)
    for rank, begin, end in zip(ranks.flatten().tolist(), rows[0].tolist(), rows[1].tolist(), strict=True):
        yield rank, Box((begin, *rest), (end - begin, *shape[1:]))


def local_part(param: torch.Tensor) -> torch.Tensor:
    """Return this rank's elements of a parameter, or of a tensor like it, in their shape here."""
    return _compat.local_of(param).detach()


def local_grad(param: torch.Tensor) -> torch.Tensor:
    """Collective over the mesh of a ``DTensor`` whose gradient is placed otherwise, as a pending sum. Return this
    rank's elements of a parameter's gradient."""
    assert param.grad is not None
    grad = _compat.wait_tensor(param.grad)
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_part(grad)
