"""Whole parameters on demand: ``summon_full_params``, its parts, and ``walk_full_params``, one unit at a time.

Gathered values are copies in the dtype of the shards. Each rank has its own: other ranks do not see what one rank
writes before it is written back.
"""

import contextlib
import warnings
from collections.abc import Iterable, Iterator
from dataclasses import dataclass

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp.comm import raise_together_over
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.errors import EngineError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.params.flat_param import FlatParam, set_grad
from hpcfsdp.units.flat_unit import FlatUnit, TensorView, clean_path, flat_param_name, units_in
from hpcfsdp.units.own import hide, unit_fqn
from hpcfsdp.units.unit_mesh import describe_mesh


@dataclass(frozen=True)
class UnshardArgs:
    """The options of ``unshard_params``."""

    writeback: bool = True
    rank0_only: bool = False
    offload_to_cpu: bool = False
    with_grads: bool = False


@dataclass
class _Unsharded:
    """One flat parameter while it is unsharded."""

    flat: FlatParam
    at_rest: list[tuple[torch.Tensor, torch.Tensor | None]]  # data and gradients of the leaves before
    full: torch.Tensor | None  # 1-D, whole, as the gradient; None where this rank does not hold it
    grad: torch.Tensor | None


def validate_unshard_params_args(args: UnshardArgs, unit: FlatUnit) -> None:
    """Refuse a unit that is in use or summoned; warn of a copy per rank. Collective under `with_grads`."""
    unit.check_at_rest("summon_full_params")
    if args.with_grads and unit.root is not None and any(grad.held is not None for grad in unit.grads):
        with raise_together_over(unit.mesh.subgroups()):
            unit.root.refuse_held("summon_full_params with with_grads=True")
    if args.offload_to_cpu and not args.rank0_only and unit.comm.size > 1:
        warnings.warn(
            "offload_to_cpu without rank0_only puts one copy of the whole model into host memory for each rank of "
            "the node: rank0_only=True makes only one copy",
            stacklevel=2,
        )


@contextlib.contextmanager
@public_call("summon_full_params")
def unshard_params(
    module: nn.Module,
    recurse: bool = True,
    writeback: bool = True,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[None]:
    """Gather whole parameters of the units in `module` within a context. Collective over the process groups.

    In the context each parameter is an ``nn.Parameter`` of its original shape, and ``named_parameters()`` gives
    original names. Parameters may be changed in place, by ``.data``, or by assigning another parameter to the module.
    In a tensor-parallel model they are ``DTensor`` with this rank's block, and assignments to their ``.data`` have no
    effect. Each rank writes back its own shard of its own copy; changes of padding are lost. After an exception within
    the context all parameters are sharded again.

    Args:
        recurse: also gather the units inside of `module`; otherwise only `module` itself, which must be a unit.
        writeback: keep changes, those of gradients too if `with_grads`. With `rank0_only` rank 0's changes are
            scattered, and those of other ranks are lost.
        rank0_only: only rank 0 (of the first replica) gets whole parameters; those of other ranks stay sharded.
        offload_to_cpu: put the whole parameters into host memory.
        with_grads: gather ``param.grad``, too.

    Raises:
        EngineError: a forward or backward is running, or a unit is summoned already; ``no_sync`` holds gradients under
            `with_grads`; a parameter that is written back has another shape than before.
    """
    args = UnshardArgs(writeback, rank0_only, offload_to_cpu, with_grads)
    units = units_in(module)
    if not recurse:
        units = [unit for unit in units if unit.wrapper is module]
    for unit in units:
        validate_unshard_params_args(args, unit)
    with contextlib.ExitStack() as stack:
        for unit in units:
            stack.enter_context(unshard_params_for_summon(unit, args))
        yield


@public_call("walk_full_params")
def walk_full_params(
    module: nn.Module,
    writeback: bool = False,
    rank0_only: bool = False,
    offload_to_cpu: bool = False,
    with_grads: bool = False,
) -> Iterator[tuple[str, nn.Module]]:
    """Iterate over the units of a model, one whole at a time. Collective over the process groups, at each step.

    It is for models that are larger than the memory of one device. `writeback`, `rank0_only`, `offload_to_cpu` and
    `with_grads` are those of ``unshard_params``.

    Yields:
        The name of the unit's module within `module`, without those of wrappers, and the module.
    """
    names = {inner: name for name, inner in module.named_modules()}
    args = UnshardArgs(writeback, rank0_only, offload_to_cpu, with_grads)
    for unit in units_in(module):
        validate_unshard_params_args(args, unit)
        with unshard_params_for_summon(unit, args):
            yield clean_path(names[unit.wrapper]), unit.module


@contextlib.contextmanager
def unshard_params_for_summon(unit: FlatUnit, args: UnshardArgs) -> Iterator[None]:
    """Return a context in which the parameters of one unit are whole. Collective over the wrapper's process groups."""
    unit.enter_state(TrainingState.SUMMON)
    try:
        unsharded = unshard_fsdp_state_params(unit, args)
        try:
            with unflatten_as_params(unit, unsharded):
                yield
        finally:
            try:
                if args.writeback:
                    for whole in unsharded:
                        before = whole.flat.parameter.data.clone() if unit.owes_grads else None
                        writeback_to_local_shard(whole, args)
                        if before is not None and _any_rank(whole.flat, not before.equal(whole.flat.parameter.data)):
                            # A backward at other values than the forward would be wrong.
                            torch.autograd.graph.increment_version(whole.flat.stepped)
            finally:
                for whole in unsharded:
                    _set_leaves(whole.flat, whole.at_rest)
    finally:
        unit.leaves.forget_accumulators()
        unit.enter_state(TrainingState.IDLE)


@torch.no_grad()
def unshard_fsdp_state_params(unit: FlatUnit, args: UnshardArgs) -> list[_Unsharded]:
    """Gather the flat parameters of one unit, and their gradients. Collective over the wrapper's process groups."""
    unsharded = []
    for flat in unit.sharded_params:
        flat.adopt_user_data()
        at_rest = [(leaf.data, leaf.grad) for leaf in flat.leaves]
        full = _gathered(flat, flat.parameter.data, args)
        grad = _gathered(flat, _shard_grad(flat), args) if args.with_grads and _has_grad(flat) else None
        unsharded.append(_Unsharded(flat, at_rest, full, grad))
    return unsharded


@contextlib.contextmanager
def unflatten_as_params(unit: FlatUnit, unsharded: list[_Unsharded]) -> Iterator[None]:
    """Return a context in which the original parameters show the whole values, registered in their modules."""
    present = [(whole.flat, whole) for whole in unsharded if whole.full is not None]
    for flat, whole in present:
        grads = [None] * len(flat.leaves) if whole.grad is None else flat.views(whole.grad)
        _set_leaves(flat, zip(flat.views(whole.full), grads, strict=True))
    deregister_flat_param(unit)
    register_orig_params(unit)
    leaves = {leaf for flat, _ in present for leaf in flat.leaves}
    try:
        with _dtensors_shown([view for view in unit.views if view.leaf in leaves]):
            yield
    finally:
        _adopt_replaced(unit)
        deregister_orig_params(unit)
        register_flat_param(unit)


def deregister_flat_param(unit: FlatUnit) -> None:
    """Hide the flat parameters from ``parameters()``."""
    for flat in unit.sharded_params:
        for name, param in list(unit.flat_owner._parameters.items()):
            if param is flat.parameter:
                del unit.flat_owner._parameters[name]


def register_flat_param(unit: FlatUnit) -> None:
    """Show the flat parameters in ``parameters()``, without `use_orig_params`."""
    for index, flat in enumerate(unit.sharded_params):
        if not flat.use_orig_params:
            unit.flat_owner._parameters[flat_param_name(index)] = flat.parameter


def register_orig_params(unit: FlatUnit) -> None:
    """Show the original parameters in ``parameters()``, in their original order."""
    if not unit.options.use_orig_params:
        for entry in sorted(unit.own.entries, key=lambda entry: entry.index):
            entry.register()


def deregister_orig_params(unit: FlatUnit) -> None:
    """Hide the original parameters from ``parameters()``, without `use_orig_params`."""
    if not unit.options.use_orig_params:
        for entry in unit.own.entries:
            entry.deregister()


@torch.no_grad()
def writeback_to_local_shard(whole: _Unsharded, args: UnshardArgs) -> None:
    """Write the values of the leaves into the shard. Collective over the process groups under `rank0_only`."""
    flat = whole.flat
    _store(whole, flat.parameter.data, [leaf.data for leaf in flat.leaves], args)
    if not args.with_grads or not _has_grad(flat):
        return
    zero = torch.zeros((), dtype=flat.layout.dtype, device=flat.device)
    pairs = zip(flat.leaves, flat.layout.slots, strict=True)
    shard = _shard_grad(flat)
    _store(whole, shard, [zero.expand(slot.shape) if leaf.grad is None else leaf.grad for leaf, slot in pairs], args)
    if flat.use_orig_params:
        for (_, grad), part in zip(whole.at_rest, flat.shard_views(shard), strict=True):
            if grad is not None:
                grad.copy_(part)


def _gathered(flat: FlatParam, shard: torch.Tensor, args: UnshardArgs) -> torch.Tensor | None:
    """Return the whole values; None on ranks that do not get them. Collective over the shards."""
    comm, shard = flat.comm, shard.to(flat.comm.device)
    target = torch.device("cpu") if args.offload_to_cpu else flat.device
    if args.rank0_only and flat.replicas is not None and flat.replicas.rank != 0:
        return None
    full = None if args.rank0_only and comm.rank != 0 else shard.new_empty(flat.layout.padded_numel)
    if args.rank0_only:
        comm.gather(None if full is None else list(full.chunk(comm.size)), shard.contiguous(), 0)
    else:
        comm.all_gather_into_tensor(full, shard.contiguous())
    return None if full is None else full.to(target)


def _store(whole: _Unsharded, shard: torch.Tensor, values: list[torch.Tensor], args: UnshardArgs) -> None:
    """Write this rank's runs of whole values into a tensor laid out like the shard. Collective under `rank0_only`."""
    flat, layout = whole.flat, whole.flat.layout
    problem = None
    for value, slot in zip(values, layout.slots, strict=True) if whole.full is not None else ():
        if value.shape != slot.shape:
            problem = problem or (
                f"{slot.fqn!r} has shape {tuple(value.shape)} at the end of summon_full_params, and had "
                f"{tuple(slot.shape)}: shapes of sharded parameters cannot be changed"
            )
    if args.rank0_only:  # the others will wait for rank 0's values
        if flat.replicas is None or flat.replicas.rank == 0:
            problem = flat.comm.broadcast_object(problem)
        if flat.replicas is not None:
            problem = flat.replicas.broadcast_object(problem)
    if problem is not None:
        raise EngineError(problem)
    if not args.rank0_only:
        by_name = dict(zip((slot.fqn for slot in layout.slots), values, strict=True))
        for run in layout.runs(flat.comm.rank):
            part = by_name[layout.slots[run.index].fqn].reshape(-1)[run.start : run.start + run.numel]
            shard[run.offset : run.offset + run.numel].copy_(part)
        return
    comm = flat.comm
    received = torch.empty(layout.shard_numel, dtype=shard.dtype, device=comm.device)
    if flat.replicas is None or flat.replicas.rank == 0:
        full = None
        if comm.rank == 0:
            full = torch.zeros(layout.padded_numel, dtype=shard.dtype, device=comm.device)
            for value, view in zip(values, flat.views(full), strict=True):
                view.copy_(value)
        comm.scatter(received, None if full is None else list(full.chunk(comm.size)), 0)
    if flat.replicas is not None:
        flat.replicas.broadcast(received, 0)
    shard.copy_(received)


def _set_leaves(flat: FlatParam, shown: Iterable[tuple[torch.Tensor, torch.Tensor | None]]) -> None:
    for leaf, (value, grad) in zip(flat.leaves, shown, strict=True):
        leaf.grad = None
        leaf.data = value
        set_grad(leaf, grad)


def _adopt_replaced(unit: FlatUnit) -> None:
    """Copy the values of assigned parameters into the original ones, and have modules hold these again."""
    for entry in unit.own.entries:
        for module, name in entry.places:
            now = module._parameters.get(name)
            if now is not entry.param:
                if now is not None:
                    entry.param.grad = None  # it may be of another shape
                    entry.param.data = now.data.to(entry.param)
                    entry.param.grad = None if now.grad is None else now.grad.to(entry.param)
                module._parameters[name] = entry.param
                module.__dict__.pop(name, None)


def _has_grad(flat: FlatParam) -> bool:
    """Return whether any rank has a gradient. Collective over the shards."""
    return _any_rank(flat, any(leaf.grad is not None for leaf in flat.leaves) or flat.parameter.grad is not None)


def _any_rank(flat: FlatParam, here: bool) -> bool:
    """Return whether `here` is true on any rank. Collective over the shards."""
    found = torch.tensor([here], dtype=torch.uint8, device=flat.comm.device)
    flat.comm.all_reduce(found, "max")
    return bool(found)


def _shard_grad(flat: FlatParam) -> torch.Tensor:
    """Return the gradient of the shard as one tensor; zero where there is none."""
    if not flat.use_orig_params:
        return flat.parameter.grad if flat.parameter.grad is not None else torch.zeros_like(flat.parameter)
    shard = torch.zeros_like(flat.parameter)
    for leaf, part in zip(flat.leaves, flat.shard_views(shard), strict=True):
        if leaf.grad is not None and leaf.grad.shape == part.shape:
            part.copy_(leaf.grad)
    return shard


@contextlib.contextmanager
def _dtensors_shown(views: Iterable[TensorView]) -> Iterator[None]:
    """Return a context in which modules hold ``DTensor`` parameters in the memory of leaves, their blocks.

    What was assigned instead is copied into the leaves, collectively over the mesh if its placements are others.
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
        replaced: list[tuple[TensorView, nn.Parameter, nn.Parameter | None]] = []
        for view, param in shown:  # modules hold the leaves again
            hide(param)
            held = [module._parameters.get(name) for module, name in reversed(view.places)]
            replaced.append((view, param, next((now for now in held if now is not None and now is not param), None)))
            for module, name in view.places:
                module._parameters[name] = view.leaf
                module.__dict__.pop(name, None)
        for view, param, assigned in replaced:
            leaf, now = view.leaf, param if assigned is None else assigned
            if assigned is None:
                leaf.requires_grad_(param.requires_grad)
            values, grad = _local(view, now.detach()), None
            if values.data_ptr() != leaf.data_ptr() or values.shape != leaf.shape:
                leaf.data = values.to(leaf)
            if now.grad is not None:
                grad = _local(view, now.grad)
            if grad is None or leaf.grad is None or grad.data_ptr() != leaf.grad.data_ptr():
                set_grad(leaf, grad)


def _shown(view: TensorView, block: torch.Tensor) -> DTensor:
    """Return a ``DTensor`` in the memory of a block, on any device."""
    return _compat.dtensor(_compat.at_its_storage(block), *view.placed)


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
