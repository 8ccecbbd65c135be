"""The parameters of a model as an optimizer of whole tensors sees them: whole shapes, and how ranks share them."""

from __future__ import annotations

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
    """One parameter."""

    name: str  # in the model, without the names of wrappers
    param: nn.Parameter  # what a sharded optimizer would step: this rank's part
    shape: tuple[int, ...]  # of the whole
    share: Share | None = None  # None if each rank steps it for itself
    num_replicas: int = 1  # ranks with the same shard
    has_blocks: bool = False  # whether the whole is a block of a tensor-parallel parameter

    @property
    def numel(self) -> int:
        return math.prod(self.shape)


def whole_params(model: nn.Module, *, joins_blocks: bool) -> dict[nn.Parameter, WholeParam]:
    """Return its parameters by what an optimizer steps. Collective over all ranks of the model, the first time.

    Flat parameters, which stand for several, are not among them. Blocks of tensor-parallel ranks are joined if asked
    for; else each is a tensor of its own.
    """
    units_of(model)  # which get the ranks of others
    shares = _Shares(joins_blocks)
    found: dict[nn.Parameter, WholeParam] = {}
    for flat_unit, flat, layout in named_flat_params(model):
        if flat.use_orig_params:
            for index, leaf in enumerate(flat.leaves):
                found[leaf] = shares.flat(leaf, flat_unit.mesh, layout, index)
    names = {param: clean_fqn(name) for name, param in model.named_parameters()}
    for unit in dtensor_units_in(model):
        for each in unit.own:
            param = each.param.sharded
            found[param] = shares.dtensor(each, names.get(param, f"{unit.name}.{each.fqn}"))
    for param, name in names.items():
        if param not in found:
            found[param] = shares.plain(param, name)
    return found


def _num_replicas(mesh: UnitMesh) -> int:
    return 1 if mesh.data is None else mesh.size("replicate")


class _Shares:
    """How ranks share the parameters of a model.

    Shardings, and ranks by dimension, are kept for all parameters that have them in common: with many ranks each takes
    time and memory.
    """

    def __init__(self, joins_blocks: bool) -> None:
        self._joins_blocks = joins_blocks
        self._known: dict[tuple[Any, ...], Any] = {}

    def flat(self, leaf: nn.Parameter, mesh: UnitMesh, layout: FlatLayout, index: int) -> WholeParam:
        """Describe a parameter of a flat one."""
        slot, joins = layout.slots[index], self._joins_blocks

        def share(divides: bool) -> tuple[Communicator, Sharding]:
            dims, comm = self._among(mesh, divides)
            if (mesh, dims) not in self._known:
                self._known[mesh, dims] = RanksByDim.of(mesh.ranks_by_dim(*dims))
            return comm, FlatSharding(layout, index, self._known[mesh, dims])

        shape = slot.whole_shape if joins else slot.shape
        return WholeParam(slot.fqn, leaf, shape, share, _num_replicas(mesh), slot.is_cut and not joins)

    def dtensor(self, each: OwnDTensor, name: str) -> WholeParam:
        """Describe a parameter of a unit of ``fully_shard``."""
        mesh, param = each.mesh, each.param.sharded
        has_blocks = each.block is not None and not self._joins_blocks
        shape = tuple(param.shape) if self._joins_blocks else each.shape

        def share(divides: bool) -> tuple[Communicator, Sharding]:
            dims, comm = self._among(mesh, divides)
            if not has_blocks:
                return comm, self._block_sharding(comm, param)
            sizes = (shape[each.dim], *shape[: each.dim], *shape[each.dim + 1 :])  # chunks are of the first dimension
            boxes, ranks_by_dim = {}, mesh.ranks_by_dim(*dims)
            for shard in range(mesh.shard.size):
                box = chunk_box(sizes, mesh.shard.size, shard)
                if box is not None and box.numel:
                    offsets, numbers = ((*part[1 : each.dim + 1], part[0], *part[each.dim + 1 :]) for part in box)
                    boxes.update(dict.fromkeys(ranks_by_dim[:, shard, 0].tolist(), Box(offsets, numbers)))
            return comm, BlockSharding(shape, boxes)

        return WholeParam(name, param, shape, share, _num_replicas(mesh), has_blocks)

    def plain(self, param: nn.Parameter, name: str) -> WholeParam:
        """Describe a parameter that no unit owns."""
        if not self._joins_blocks or not is_sharded(param):
            return WholeParam(name, param, tuple(_compat.local_of(param).shape), has_blocks=is_sharded(param))
        assert isinstance(param, DTensor)
        mesh, placements = param.device_mesh, param.placements
        if any(len(of_rank) > 1 for of_rank in mesh_boxes(tuple(param.shape), mesh.mesh, placements).values()):
            raise UsageError(
                f"WholeTensors: {name!r} has the placements {list(placements)}, of which a rank has several blocks: "
                "redistribute it to Shard and Replicate"
            )

        def share(_divides: bool) -> tuple[Communicator, Sharding]:
            comm = GroupCache.current().members_of(mesh)
            return comm, self._block_sharding(comm, param)

        return WholeParam(name, param, tuple(param.shape), share)

    def _among(self, mesh: UnitMesh, divides: bool) -> tuple[tuple[Dim, ...], Communicator]:
        """Return the dimensions along which ranks share a parameter, and these ranks."""
        dims: tuple[Dim, ...] = ("shard", "replicate") if divides and _num_replicas(mesh) > 1 else ("shard",)
        if self._joins_blocks and mesh.tensor is not None:
            dims = (*dims, "tensor")
        comm = mesh.comm(*dims)
        assert isinstance(comm, Communicator)
        return dims, comm

    def _block_sharding(self, comm: Communicator, param: torch.Tensor) -> BlockSharding:
        assert isinstance(param, DTensor)
        key = comm, param.device_mesh, tuple(param.placements), tuple(param.shape)
        if key not in self._known:
            numbers = {rank: number for number, rank in enumerate(GroupCache.current().global_ranks(comm))}
            boxes = _boxes(tuple(param.shape), param.device_mesh.mesh, param.placements)
            held = {numbers[rank]: box for rank, box in boxes if rank in numbers and box.numel}
            self._known[key] = BlockSharding(tuple(param.shape), held)
        found: BlockSharding = self._known[key]
        return found


def _boxes(shape: tuple[int, ...], ranks: torch.Tensor, placements: Sequence[Placement]) -> Iterator[tuple[int, Box]]:
    """Yield each rank of a mesh with its box."""
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
    """Return what this rank has of it. Collective over the mesh of a ``DTensor`` whose gradient is placed otherwise."""
    assert param.grad is not None
    grad = _compat.wait_tensor(param.grad)
    if isinstance(param, DTensor) and isinstance(grad, DTensor) and grad.placements != param.placements:
        grad = grad.redistribute(placements=param.placements)
    return local_part(grad)
