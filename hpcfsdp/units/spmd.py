"""Parameters that are ``DTensor``s on a mesh with data-parallel dimensions among its own: torch's ``dp_mesh_dims``.

They are replicated along these dimensions. The engine shards what a rank has of them along the others, and modules
compute with ``DTensor``s on the whole mesh, whose gradients are partial sums along the data-parallel dimensions.
"""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import DataParallelMeshDims
from torch.distributed.tensor import DTensor, Placement

from hpcfsdp import _compat
from hpcfsdp.units.own import retire

_PLACED = "_hpcfsdp_spmd"  # the attribute of a parameter with its `SpmdPlaced`


@dataclass(frozen=True)
class SpmdPlaced:
    """Where a parameter is on the whole mesh."""

    mesh: DeviceMesh
    placements: tuple[Placement, ...]
    shape: torch.Size
    stride: tuple[int, ...]
    data: frozenset[int]  # data-parallel dimensions of the mesh

    def of(self, local: torch.Tensor) -> torch.Tensor:
        """Not collective. Return the ``DTensor`` of what this rank has, to which gradients come as partial sums."""
        return _OnMesh.apply(local, self)


def spmd_placed(param: torch.Tensor) -> SpmdPlaced | None:
    """Return where a parameter is on a mesh with data-parallel dimensions; None for any other."""
    return getattr(param, _PLACED, None)


class _OnMesh(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, local: torch.Tensor, placed: SpmdPlaced) -> torch.Tensor:
        ctx.placed = placed
        made: torch.Tensor = _compat.dtensor(local, placed.mesh, placed.placements, placed.shape, placed.stride)
        return made

    @staticmethod
    def backward(ctx: Any, grad: Any) -> tuple[torch.Tensor, None]:
        placed = ctx.placed
        pairs = enumerate(zip(grad.placements, placed.placements, strict=True))
        wanted = tuple(there if dim in placed.data else here for dim, (there, here) in pairs)
        if wanted != grad.placements:
            grad = grad.redistribute(placements=wanted)
        return _compat.wait_tensor(_compat.local_of(grad)), None


def take_local(
    modules: Sequence[nn.Module], mesh: DeviceMesh | None, dims: DataParallelMeshDims, ignored: Collection[nn.Parameter]
) -> DeviceMesh:
    """Replace parameters by what the engine shards: ``DTensor``s on the other dimensions, or plain ones.

    Return the mesh of one or two dimensions to shard over. Collective over `mesh` if several dimensions become one.
    Raise ValueError for names that the mesh does not have, and for a parameter that is not on the mesh, or not
    replicated along its data-parallel dimensions.
    """
    if not isinstance(dims, DataParallelMeshDims):
        raise TypeError(f"dp_mesh_dims must be torch's DataParallelMeshDims, not {dims!r}")
    names = (*dims.replicate_names, *dims.shard_names)
    known = () if mesh is None else mesh.mesh_dim_names or ()
    if mesh is None or not known:
        raise ValueError("dp_mesh_dims needs mesh=, the whole mesh, with names of its dimensions (mesh_dim_names)")
    if len(set(names)) < len(names) or not set(names) <= set(known):
        raise ValueError(f"dp_mesh_dims names {list(names)}: give each once, of the dimensions {list(known)} of mesh=")
    if not dims.shard_names:
        raise NotImplementedError(
            "dp_mesh_dims without shard= keeps parameters whole: use torch's replicate, or DistributedDataParallel"
        )
    _replace(modules, mesh, names, ignored)
    parts = [_one_dim(mesh, part) for part in (dims.replicate_names, dims.shard_names) if part]
    if len(parts) == 1:
        return parts[0]
    return mesh[names] if len(names) == 2 else _compat.joined_meshes(parts)


def _one_dim(mesh: DeviceMesh, names: Sequence[str]) -> DeviceMesh:
    return mesh[names[0]] if len(names) == 1 else _compat.flattened(mesh[tuple(names)], "_".join(names))


@torch.no_grad()
def _replace(
    modules: Sequence[nn.Module], mesh: DeviceMesh, along: Sequence[str], ignored: Collection[nn.Parameter]
) -> None:
    names = mesh.mesh_dim_names or ()
    data = frozenset(map(names.index, along))
    others = [dim for dim in range(mesh.ndim) if dim not in data]
    rest = mesh[tuple(names[dim] for dim in others)] if others else None
    made: dict[nn.Parameter, nn.Parameter] = {}
    places = [
        (module, name, path, param)
        for root in modules
        for path, module in root.named_modules()
        for name, param in module._parameters.items()
        if param is not None and param not in ignored and spmd_placed(param) is None
    ]
    for _, name, path, param in places:
        where = f"{path}.{name}" if path else name
        if not isinstance(param, DTensor) or param.device_mesh != mesh:
            raise ValueError(
                f"the parameter {where!r} is {'on another mesh' if isinstance(param, DTensor) else 'no DTensor'}: with "
                "dp_mesh_dims all parameters must be DTensors on mesh= (distribute_module), or in ignored_params"
            )
        if cut := [names[dim] for dim in data if not param.placements[dim].is_replicate()]:
            raise ValueError(
                f"the parameter {where!r} is {param.placements[names.index(cut[0])]} along {cut[0]!r}, a data-parallel "
                "dimension: it must be replicated there, as fully_shard cuts it"
            )
    for module, name, path, param in places:
        if param not in made:
            placed = SpmdPlaced(mesh, tuple(param.placements), param.shape, tuple(param.stride()), data)
            local = _compat.local_of(param).detach()
            if rest is not None:
                placements = [param.placements[dim] for dim in others]
                local = _compat.dtensor(local, rest, placements, placed.shape, placed.stride)
            new = made[param] = nn.Parameter(local, requires_grad=param.requires_grad)
            new.__dict__.update(param.__dict__)
            setattr(new, _PLACED, placed)
            _compat.move_hooks(param, new)
            retire(param, f"{path}.{name}" if path else name, tuple(param.shape))
        module._parameters[name] = made[param]
