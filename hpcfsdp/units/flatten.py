"""The parameters that a unit will own: found in the module tree, grouped and named."""

from __future__ import annotations

import warnings
from collections.abc import Mapping, Sequence
from types import MappingProxyType

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from hpcfsdp import _compat
from hpcfsdp.units import managed
from hpcfsdp.units.flat_unit import is_unit, units_in
from hpcfsdp.units.own import NOTHING_IGNORED, Ignored, OwnParam, OwnParams
from hpcfsdp.units.tensor_parallel import block_of, leaf_of
from hpcfsdp.units.unit_mesh import UnitMesh


def own_params(
    root: nn.Module | Sequence[nn.Module],
    *,
    ignored: Ignored = NOTHING_IGNORED,
    full_precision: tuple[type[nn.Module], ...] = (),
    mesh: UnitMesh | None = None,
    others: Mapping[nn.Parameter, UnitMesh] = MappingProxyType({}),
    device: torch.device | None = None,
) -> OwnParams:
    """Parameters and buffers below `root`, without those of units inside.

    Args:
        root: a module; or several, whose numbers then begin the names.
        full_precision: types of modules with parameters that are not grouped with others.
        mesh: the ranks of the unit; needed for the blocks of DTensors.
        others: those of parameters that are sharded over other ranks.
        device: to which the parameters will be moved; None to leave them.

    Raises:
        ShardingError: a DTensor has placements that are no blocks of it.
        ValueError: they are on several devices, or on one on which the ranks of the unit cannot communicate; or one is
            tied to a parameter of another unit.
    """
    found: dict[nn.Parameter, OwnParam] = {}
    is_apart: dict[nn.Parameter, bool] = {}
    buffers: dict[torch.Tensor, str] = {}

    def visit(module: nn.Module, prefix: str, counted: str) -> None:
        if is_unit(module):
            return
        for name, param in [*module._parameters.items(), *_hidden_in(module)]:
            if param is None or param in ignored.params:
                continue
            if managed.unit_fqn(param) is not None:
                raise ValueError(
                    f"parameter {prefix + name!r} is tied to {managed.unit_fqn(param)!r}, which belongs to a unit "
                    "that is already wrapped: wrap the smallest module that holds both instead"
                )
            _check_kind(param, prefix + name, module)
            is_apart[param] = is_apart.get(param, False) or isinstance(module, full_precision)
            if param not in found:
                found[param] = _own_param(param, prefix + name, len(found), others.get(param, mesh))
                found[param].counted_fqn = counted + name
            entry = found[param]
            if entry.places:
                entry.aliases += (prefix + name,)
            if (module, name) not in entry.places:  # a module may be registered in several places
                entry.places.append((module, name))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in ignored.buffers:
                _refuse_subclass(buffer, f"the buffer {prefix + name!r}")
                buffers.setdefault(buffer, prefix + name)
        number = 0
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.", f"{counted}{number if name.isdecimal() else name}.")
            number += child not in ignored.modules

    roots = {"": root} if isinstance(root, nn.Module) else {f"{index}.": each for index, each in enumerate(root)}
    for prefix, each in roots.items():
        visit(each, prefix, prefix)
    devices = {entry.param.device: entry.fqn for entry in found.values()}
    if len(devices) > 1 and device is None:
        places = ", ".join(f"{fqn!r} on {device}" for device, fqn in devices.items())
        raise ValueError(
            f"the parameters of one unit are on several devices ({places}): move them to one, or pass device_id"
        )
    here = device or next(iter(devices), None)
    there = None if mesh is None else mesh.dtensor_ranks.device
    if here is not None and there is not None and here.type != there.type:
        kinds = " + ".join(type(each).__name__ for each in roots.values())
        raise ValueError(
            f"the parameters of {kinds} are on {here}, and its ranks communicate on {there.type}: pass "
            f"device_id={there.type!r}, or a process group or mesh for {here.type}"
        )
    groups: dict[tuple[torch.dtype, bool, bool], list[OwnParam]] = {}
    for param, entry in found.items():
        kind = (param.dtype, param.requires_grad, is_apart[param])
        groups.setdefault(kind, []).append(entry)
    return OwnParams(list(groups.values()), list(buffers), list(buffers.values()))


def _own_param(param: nn.Parameter, fqn: str, index: int, mesh: UnitMesh | None) -> OwnParam:
    if not isinstance(param, DTensor):
        return OwnParam(param, fqn, [], index=index)
    assert mesh is not None and mesh.tensor is not None
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        warnings.warn(
            f"hooks of the DTensor {fqn!r} will not be called, because its unit replaces it by this rank's block: "
            "register them after wrapping, with use_orig_params=True",
            stacklevel=5,
        )
    return OwnParam(leaf_of(param), fqn, [], index=index, block=block_of(fqn, param, mesh), whole=param)


def _check_kind(param: nn.Parameter, fqn: str, module: nn.Module) -> None:
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"parameter {fqn!r} of a lazy {type(module).__name__} has no shape yet: run a forward of the module before "
            "wrapping it"
        )
    _refuse_subclass(param, f"the parameter {fqn!r}")


def _refuse_subclass(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that computes, or keeps its values, in a way of its own."""
    kind, plain = type(tensor), nn.Parameter
    only_named = issubclass(kind, plain) and all(
        getattr(kind, name) is getattr(plain, name) for name in ("__torch_function__", "__torch_dispatch__")
    )
    if kind not in (torch.Tensor, plain, DTensor) and not only_named:
        raise NotImplementedError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor: in shards its values "
            "would be those of a plain tensor. Convert it before sharding (dequantize, for instance), or leave it out: "
            "ignored_states of FullyShardedDataParallel, ignored_params of fully_shard"
        )


def _hidden_in(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a module that another unit of the model owns, see ``OwnParam.deregister``."""
    attributes = module.__dict__.items()
    return [
        (name, value) for name, value in attributes if isinstance(value, nn.Parameter) and managed.hidden_fqn(value)
    ]


def move_buffers(root: nn.Module, device: torch.device, *, ignored: Ignored = NOTHING_IGNORED) -> None:
    """Move buffers outside of units to a device, except ignored ones and those on the meta device.

    Of the parameters only the shards will go there, with their units: a model may be larger than a device.
    """
    params = list(root.parameters())
    left = {*params, *(param.grad for param in params), *ignored.params, *ignored.buffers}

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta or tensor in left else tensor.to(device)

    def visit(module: nn.Module) -> None:
        if is_unit(module):
            return
        if type(module)._apply is _compat.apply_to_module:
            for name, buffer in module._buffers.items():
                if buffer is not None:
                    module._buffers[name] = moved(buffer)
        elif units_in(module):
            _compat.apply_to_module(module, moved, recurse=False)
        else:
            module._apply(moved)  # it may move more than registered tensors
            return
        for child in module.children():
            visit(child)

    visit(root)
