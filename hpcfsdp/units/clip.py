"""The norm of all gradients of a sharded model, clipping by it, and a warning where ranks clip by themselves."""

import math
import warnings
import weakref
from collections.abc import Iterable, Sequence

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import EngineError
from hpcfsdp.params.gradient import is_changed, is_noted, note_unchanged
from hpcfsdp.reshard.sharded_tensors import full_tensor
from hpcfsdp.units.flat_unit import FlatUnit, units_in
from hpcfsdp.units.unit_mesh import UnitMesh


def clip_model_grads(root: FlatUnit, max_norm: float, norm_type: float) -> torch.Tensor:
    """Clip the gradients of its whole model. Collective over the root unit's ranks. Ignored parameters count once."""
    num_ranks, num_blocks = root.mesh.size("replicate", "shard"), root.mesh.size("tensor")
    shares: dict[int, list[torch.Tensor]] = {}
    params: dict[nn.Parameter, None] = {}
    managed: set[nn.Parameter] = set()
    for unit in units_in(root.wrapper):
        if unit.mesh.size("replicate", "shard") > num_ranks:
            raise EngineError(
                f"{unit.name} is sharded over more ranks than the root ({num_ranks}), so the root cannot compute the "
                "norm of all gradients: wrap the root over all ranks"
            )
        for flat in unit.sharded_params:
            managed.update((flat.parameter, *flat.leaves))
            params.update(dict.fromkeys(flat.stepped))
            for copies, grad in flat.grad_parts(num_blocks):
                shares.setdefault(unit.mesh.size("replicate") * copies, []).append(grad)
    for param in root.wrapper.parameters():
        if param not in managed:
            params[param] = None
            if param.grad is not None:
                copies, grad = _replicated_grad(param, root.mesh)
                shares.setdefault(num_ranks * copies, []).append(grad)
    norm = clip_grad_norm(list(params), shares.items(), root.mesh.subgroups(), max_norm, norm_type)
    for param in params:
        note_unchanged(param.grad)
    return norm


def _replicated_grad(param: nn.Parameter, unit_mesh: UnitMesh) -> tuple[int, torch.Tensor]:
    """Return how many tensor-parallel ranks have the same gradient of a parameter outside of units, and the gradient.

    Of a ``DTensor`` on the unit's mesh it is this rank's block, of others whole, collectively over their mesh.
    """
    num_blocks = unit_mesh.size("tensor")
    if not isinstance(param, DTensor) or param.device_mesh != unit_mesh.tensor_mesh:
        return num_blocks, full_tensor(param.grad)
    if param.grad.placements != param.placements:
        param.grad = param.grad.redistribute(placements=param.placements)
    cut = [size for size, where in zip(param.device_mesh.mesh.shape, param.placements, strict=True) if where.is_shard()]
    return num_blocks // math.prod(cut), _compat.local_of(param.grad)


@torch.no_grad()
def clip_grad_norm(
    params: Sequence[nn.Parameter],
    shares: Iterable[tuple[int, Sequence[torch.Tensor]]],
    comms: Sequence[Communicator],
    max_norm: float,
    norm_type: float = 2.0,
) -> torch.Tensor:
    """Scale gradients so that their norm, over all ranks, is at most `max_norm`. Collective over `comms`.

    Each element counts once: shards do not overlap, and padding is zero.

    Args:
        params: with the gradients to scale; the same on all ranks, but for their shapes.
        shares: parts of these gradients, each with the number of ranks that hold the same part.
        comms: one after the other they connect all ranks.
        norm_type: p of the p-norm, > 0 or inf; 0 counts the elements that are not 0.

    Returns:
        The norm before clipping, a float32 scalar (float64 if a gradient is, or complex128), the same on every rank.
    """
    norm_type, max_norm = float(norm_type), float(max_norm)
    if not norm_type >= 0:
        raise ValueError(f"norm_type must be 0, positive or inf, not {norm_type}")
    # From the parameters, which are the same on all ranks; a gradient may be missing on some.
    is_double = any(param.dtype in (torch.float64, torch.complex128) for param in params)
    dtype = torch.float64 if is_double else torch.float32
    device = params[0].device if params else torch.device("cpu")
    is_max = math.isinf(norm_type)
    parts = [
        _sum_of_powers(grads, norm_type, dtype).to(device) / (1 if is_max else copies)
        for copies, grads in shares
        if any(grad.numel() for grad in grads)
    ]
    # In one dtype on all ranks, which may hold different parameters.
    gathered = torch.stack(parts or [torch.zeros((), device=device)]).double()
    total = gathered.amax() if is_max else gathered.sum()
    for comm in comms:
        here = total.to(comm.device)
        comm.all_reduce(here, "max" if is_max else "sum")
        total = here.to(device)
    if norm_type and not is_max:
        total = total ** (1.0 / norm_type)
    total = total.to(dtype)
    scale = (max_norm / (total + 1e-6)).clamp(max=1.0)
    for grads in of_one_kind(_compat.local_of(param.grad) for param in params if param.grad is not None):
        _compat.multiply_each_(grads, scale.to(grads[0].device, grads[0].dtype.to_real()))
    return total


def _sum_of_powers(grads: Sequence[torch.Tensor], p: float, dtype: torch.dtype) -> torch.Tensor:
    """Return the p-th power of the p-norm of gradients; the norm itself where p is inf."""
    norms: dict[torch.Tensor, torch.Tensor] = {}
    for group in of_one_kind(grads):
        computed = dtype.to_complex() if group[0].is_complex() else dtype
        norms.update(zip(group, _compat.norm_of_each(group, p, dtype=computed), strict=True))
    stacked = torch.stack([norms[grad] for grad in grads if grad.numel()])
    if math.isinf(p):
        return stacked.amax()
    return (stacked**p if p else stacked).sum()


def of_one_kind(grads: Iterable[torch.Tensor]) -> Iterable[list[torch.Tensor]]:
    """Return gradients with elements, in groups of one device and dtype: a device handles a group by few kernels."""
    groups: dict[tuple[torch.device, torch.dtype], list[torch.Tensor]] = {}
    for grad in grads:
        if grad.numel():
            groups.setdefault((grad.device, grad.dtype), []).append(grad)
    return groups.values()


_ENOUGH = 3  # consecutive steps with gradients of one norm
_AT_MOST = 50  # steps that are examined: a norm costs a pass over the gradients
_SAME = 1e-4  # relative tolerance; two norms are this close by chance once in 10,000 steps

_seen: weakref.WeakKeyDictionary[torch.optim.Optimizer, tuple[float, float, int, int]] = weakref.WeakKeyDictionary()
"""By optimizer, norm and direction of the last step's gradients, and how many steps were alike, and examined."""


@torch.no_grad()
def look_for_local_clipping(optimizer: torch.optim.Optimizer) -> None:
    """Not collective, before a step. Warn once if this rank alone has clipped the gradients."""
    last_norm, last_direction, in_a_row, examined = _seen.get(optimizer, (0.0, 0.0, 0, 0))
    if examined >= _AT_MOST:
        return
    grads = [param.grad for group in optimizer.param_groups for param in group["params"] if param.grad is not None]
    shard = next((grad for grad in grads if is_noted(grad)), None)
    if shard is None or not is_changed(shard):
        return
    norm, total = _norm_and_sum(grads)
    direction = total / norm if norm else 0.0
    alike = norm > 0 and abs(norm - last_norm) <= _SAME * norm and abs(direction - last_direction) > _SAME
    in_a_row = in_a_row + 1 if alike else 1
    _seen[optimizer] = norm, direction, in_a_row, _AT_MOST if in_a_row >= _ENOUGH else examined + 1
    if in_a_row >= _ENOUGH:
        warnings.warn(
            f"the gradients of this rank's shards had the norm {norm:.4g} in each of {_ENOUGH} steps, as after "
            "torch.nn.utils.clip_grad_norm_. That function sees only this rank's shards and scales each rank "
            "differently: call model.clip_grad_norm_(max_norm) on the wrapped model instead",
            stacklevel=6,
        )


def _norm_and_sum(grads: Iterable[torch.Tensor]) -> tuple[float, float]:
    squares = total = 0.0
    here = [_compat.local_of(grad) for grad in grads if grad.layout is torch.strided]
    real = [torch.view_as_real(grad) if grad.is_complex() else grad for grad in here]
    for group in of_one_kind(real):
        norms = _compat.norm_of_each(group, 2.0, dtype=torch.float64)
        sums = [grad.sum(dtype=torch.float64) for grad in group]
        values = torch.stack([*norms, *sums]).tolist()  # at once: the host waits for the device
        squares += sum(norm**2 for norm in values[: len(group)])
        total += sum(values[len(group) :])
    return math.sqrt(squares), total
