"""Operations on sharded ``DTensor``s that torch's own rules leave out, or compute for each rank alone.

- Initialisation: torch has each rank draw its own part, on a CPU with the generator of all, so that ranks with one
  seed draw equal parts; and a view of rows, as an embedding takes to set its padding to zero, is a copy. Here each rank
  draws the whole tensor and keeps its part, and views of rows of one rank are views there.
- Clipping of a list of gradients on several meshes, or next to plain ones.
- Numbers that an optimizer reads, and the parts of complex parameters that it steps.
"""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor, Replicate, Shard

from hpcfsdp import _compat
from hpcfsdp.reshard.sharded_tensors import fill_block, full_tensor, is_sharded

_meshes: set[DeviceMesh] = set()


def complete_operations_on(mesh: DeviceMesh) -> None:
    """Not collective. Compute these operations on ``DTensor``s on this mesh as one process would, from now on."""
    if not _meshes:
        aten = torch.ops.aten
        draws = [aten.normal_.default, aten.uniform_.default, aten.bernoulli_.float, aten.bernoulli_.Tensor]
        draws += [aten.exponential_.default, aten.cauchy_.default, aten.log_normal_.default, aten.geometric_.default]
        draws += [aten.random_.default, aten.random_.to, getattr(aten.random_, "from")]
        likes = [aten.rand_like.default, aten.randn_like.default]
        likes += [aten.randint_like.default, aten.randint_like.low_dtype]
        handlers = dict.fromkeys(draws, _fill) | dict.fromkeys(likes, _like)
        handlers |= {aten.eye.m_out: _eye, aten.index_put_.default: _put, aten.fill_.Tensor: _fill_value}
        handlers |= {aten.view_as_real.default: _parts, aten.any.default: _any, _compat.READ_VALUE: _read}
        handlers |= {aten.select.int: _select, aten.slice.Tensor: _slice}
        handlers |= {aten.split.Tensor: _split, aten.split_with_sizes.default: _split, aten.diagonal.default: _diagonal}
        handlers |= dict.fromkeys(_compat.CLIPPING, _by_mesh)
        _compat.handle_dtensor_ops(handlers)
    _meshes.add(mesh)


def _is_ours(tensor: Any) -> bool:
    if not isinstance(tensor, DTensor) or tensor.device_mesh not in _meshes or tensor.is_meta:
        return False
    return is_sharded(tensor) and type(_compat.local_of(tensor)) is torch.Tensor  # a subclass computes by itself


def _whole_like(tensor: DTensor) -> torch.Tensor:
    return torch.empty(tensor.shape, dtype=tensor.dtype, device=_compat.local_of(tensor).device)


# Handlers return NotImplemented for other tensors, and what torch does well.


def _fill(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation that fills its first argument with random numbers."""
    if not _is_ours(args[0]):
        return NotImplemented
    whole = _whole_like(args[0])
    op(whole, *args[1:], **kwargs)
    fill_block(args[0], whole)
    return args[0]


def _by_mesh(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation of clipping on gradients on several meshes, such as of experts and ignored parameters."""
    tensors, groups, norms = args[0], {}, {}
    if op is _compat.CLIPPING[0] and math.inf in args[1:]:  # which torch does not compute of ranks without rows
        tensors = [_not_empty(tensor) for tensor in tensors]
        if any(given is not taken for given, taken in zip(args[0], tensors, strict=True)):
            return op(tensors, *args[1:], **kwargs)
    for index, tensor in enumerate(tensors):
        groups.setdefault(getattr(tensor, "device_mesh", None), []).append(index)
    if len(groups) < 2:
        return NotImplemented
    others = [full_tensor(other) if isinstance(other, torch.Tensor) else other for other in args[1:]]
    for indices in groups.values():
        found = op([tensors[index] for index in indices], *others, **kwargs)
        if found:
            norms.update(zip(indices, full_tensor(torch.stack(list(found))), strict=True))
    return [norms[index] for index in sorted(norms)] or None  # others have no results


def _not_empty(tensor: torch.Tensor) -> torch.Tensor:
    """Return a tensor with an element of zero on this rank if it has none here."""
    if not isinstance(tensor, DTensor) or _compat.local_of(tensor).numel():
        return tensor
    return _compat.dtensor_like(tensor, _compat.local_of(tensor).new_zeros(1))


def _like(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Compute an operation that makes a tensor of random numbers in the shape of its first argument."""
    if not _is_ours(args[0]):
        return NotImplemented
    whole = op(_whole_like(args[0]), *args[1:], **kwargs)
    made = torch.empty_like(args[0], dtype=whole.dtype)
    fill_block(made, whole)
    return made


def _eye(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    out = kwargs["out"]
    if not _is_ours(out) or tuple(args) != tuple(out.shape):
        return NotImplemented
    fill_block(out, op(*args, out=_whole_like(out)))
    return out


def _any(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Ask all ranks of the mesh within ``torch.nn.init``, whose functions draw again while any element is outside."""
    tensor = args[0]
    if not _is_ours(tensor) or not _compat.is_initialising():
        return NotImplemented
    mesh, found = tensor.device_mesh, op(_compat.local_of(tensor)).to(torch.int32)
    for dim, placement in enumerate(tensor.placements):
        if not placement.is_replicate():
            dist.all_reduce(found, dist.ReduceOp.MAX, mesh.get_group(dim))
    return _compat.dtensor(found.bool(), mesh, [Replicate()] * mesh.ndim, (), ())


def _read(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return the number that all parts give, within an optimizer, whose ranks step together; elsewhere as torch."""
    if not _is_ours(args[0]) or not _compat.is_in_step():
        return NotImplemented
    return op(full_tensor(args[0]))


def _parts(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return real and imaginary parts, which optimizers step. Torch copies them where ranks have different sizes."""
    tensor = args[0]
    if not _is_ours(tensor):
        return NotImplemented
    strides = [*(2 * stride for stride in tensor.stride()), 1]
    parts = op(_compat.local_of(tensor))
    return _compat.dtensor(parts, tensor.device_mesh, tensor.placements, [*tensor.shape, 2], strides)


def _fill_value(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Fill with a tensor without dimensions, the same on all ranks, also a row that ``_shown`` has made."""
    if getattr(args[0], "device_mesh", None) not in _meshes or isinstance(args[1], DTensor):
        return NotImplemented
    op(_compat.local_of(args[0]), args[1])
    return args[0]


def _put(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Assign to chosen elements; ranks pass the same indices and values. Collective over the mesh."""
    is_known = getattr(args[0], "device_mesh", None) in _meshes
    if not is_known or any(isinstance(each, DTensor) for each in (*args[1], args[2])):
        return NotImplemented
    whole = full_tensor(args[0])  # the memory itself, if nothing is sharded
    op(whole, *args[1:], **kwargs)
    if is_sharded(args[0]):
        fill_block(args[0], whole)
    return args[0]


def _select(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return one row. Collective over the mesh."""
    tensor, dim, index = args
    begin = index + tensor.shape[dim] * (index < 0)
    shape = [size for place, size in enumerate(tensor.shape) if place != dim % tensor.dim()]
    return _shown(tensor, dim, (begin, begin + 1), shape, lambda local, first: op(local, dim, begin - first))


def _slice(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    """Return some rows. Collective over the mesh."""
    tensor, dim, start, stop, step = (*args, *(0, None, None, 1)[len(args) - 1 :])
    begin, end, step = slice(start, stop, step).indices(tensor.shape[dim])
    if begin >= end or (begin, end) == (0, tensor.shape[dim]):
        return NotImplemented
    shape = list(tensor.shape)
    shape[dim] = len(range(begin, end, step))
    view = _shown(tensor, dim, (begin, end), shape, lambda local, at: op(local, dim, begin - at, end - at, step))
    if view is NotImplemented:
        _warn_of_copy(tensor, dim)
    return view


def _split(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    _warn_of_copy(args[0], args[2] if len(args) > 2 else 0)
    return NotImplemented


def _diagonal(op: Any, args: Sequence[Any], kwargs: Mapping[str, Any]) -> Any:
    _, _, *dims = (*args, *(0, 0, 1)[len(args) - 1 :])
    for dim in dims:
        _warn_of_copy(args[0], dim)
    return NotImplemented


def _warn_of_copy(tensor: Any, dim: int) -> None:
    if _is_ours(tensor) and not torch.is_grad_enabled() and _mesh_dim_along(tensor, dim) is not None:
        warnings.warn(
            f"a view of a DTensor of shape {tuple(tensor.shape)} takes rows of several ranks, along dimension {dim}: "
            "torch makes a copy, and in-place changes of it are lost. Change the rows of each rank, in "
            "param.to_local(), or initialise the module before it is sharded",
            stacklevel=4,
        )


def _mesh_dim_along(tensor: DTensor, dim: int) -> int | None:
    """Return the dimension of the mesh along which a dimension of the tensor is sharded, if nothing else is."""
    sharded = [place for place, placement in enumerate(tensor.placements) if not placement.is_replicate()]
    is_plain = len(sharded) == 1 and tensor.placements[sharded[0]] == Shard(dim % tensor.dim())
    return sharded[0] if is_plain else None


def _shown(tensor: DTensor, dim: int, rows: tuple[int, int], shape: Sequence[int], view: Callable[..., Any]) -> Any:
    """Return the same tensor on all ranks, if one of them has all of these rows, and they are to be a view.

    That of this rank is a `view` of its block, given the block's first row: there stays what all ranks do to the rows.
    """
    mesh_dim = None if torch.is_grad_enabled() or not _is_ours(tensor) else _mesh_dim_along(tensor, dim)
    if mesh_dim is None or not 0 <= rows[0] < rows[1] <= tensor.shape[dim]:
        return NotImplemented
    mesh, local = tensor.device_mesh, _compat.local_of(tensor)
    of_a_rank = -(-tensor.shape[dim] // mesh.size(mesh_dim))
    owner = rows[0] // of_a_rank
    if (rows[1] - 1) // of_a_rank != owner:
        return NotImplemented
    group = mesh.get_group(mesh_dim)
    is_here = mesh.get_local_rank(mesh_dim) == owner
    mine = view(local, owner * of_a_rank) if is_here else local.new_empty(shape)
    sent = mine.contiguous()
    dist.broadcast(sent, dist.get_global_rank(group, owner), group)
    return _compat.dtensor(mine, mesh, [Replicate()] * mesh.ndim, tuple(shape), sent.stride())
