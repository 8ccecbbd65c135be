"""What modules hold in place of their own parameters while they save or load, and the values that they are given."""

from __future__ import annotations

import contextlib
import hashlib
import math
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.reshard.sharded_tensors import all_boxes, check_readable, is_distributed
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from hpcfsdp.state.transfer import check_blocks, lies_on_dtensor_ranks
from hpcfsdp.units import summon
from hpcfsdp.units.flat_unit import FlatUnit, flat_param_name
from hpcfsdp.units.guard import showing_state
from hpcfsdp.units.unit_mesh import UnitMesh


class StandIn(torch.Tensor):
    """A tensor without memory that has shape and dtype of its `source`.

    Modules detach it, and put it in place of a parameter. What is computed from it has no source.
    """

    source: Any = None

    @classmethod
    def of(cls, source: Any) -> StandIn:
        """Make one for a ``ShardedTensor``, a ``DTensor`` or a ``Rank0Tensor``."""
        shape, dtype = shape_and_dtype(source)
        made = torch.empty(shape, dtype=dtype, device="meta").as_subclass(cls)
        made.source = source
        return made

    @classmethod
    def __torch_function__(cls, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_function__(func, types, args, kwargs)
        if func is torch.Tensor.detach:
            result.source = args[0].source
        return result


def shown_for(value: Any) -> Any:
    """Return the tensor that modules hold for a value; torch warns when a ``ShardedTensor`` itself is detached."""
    if isinstance(value, (ShardedTensor, DTensor, Rank0Tensor)):
        return StandIn.of(value)
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def orig_params_shown(unit: FlatUnit, values: Mapping[nn.Parameter, Any]) -> Iterator[None]:
    """Return a context in which the modules of a unit have `values` as original parameters, and no flat ones."""
    summon.deregister_flat_param(unit)
    summon.register_orig_params(unit)
    places = [(place, entry.param) for entry in unit.own.entries for place in entry.places]
    try:
        for (module, name), param in places:
            module._parameters[name] = values[param]
        for module, names in unit.param_names.items():
            # What was registered again stands behind parameters that had never left.
            for name in (*names, *(name for name in module._parameters if name not in names)):
                if name in module._parameters:
                    module._parameters[name] = module._parameters.pop(name)
        with showing_state(unit):
            yield
    finally:
        for (module, name), param in places:
            put_back(module, name, param, values[param])
        summon.deregister_orig_params(unit)
        summon.register_flat_param(unit)


def put_back(module: nn.Module, name: str, tensor: Any, shown: Any, registry: dict[str, Any] | None = None) -> None:
    """Have a module hold its own tensor again, in place of what was shown, or has been assigned since."""
    registry = module._parameters if registry is None else registry
    if registry.get(name) is shown:
        registry[name] = tensor
    else:
        setattr(module, name, tensor)  # as it was assigned: an LSTM keeps a list of its own


@contextlib.contextmanager
def flat_params_shown(unit: FlatUnit, values: Mapping[FlatParam, Any]) -> Iterator[None]:
    """Return a context in which a unit has `values` in place of its flat parameters, and no original ones."""
    owner: nn.Module = unit.flat_owner
    before = {module: dict(module._parameters) for e in unit.own.entries for module, _ in e.places}
    before[owner] = dict(owner._parameters)
    try:
        for entry in unit.own.entries:
            for module, name in entry.places:
                module._parameters.pop(name, None)
        for index, flat in enumerate(unit.sharded_params):
            owner._parameters[flat_param_name(index)] = values[flat]
        with showing_state(unit):
            yield
    finally:
        for module, params in before.items():
            module._parameters.clear()
            module._parameters.update(params)


def is_extra_state(key: str) -> bool:
    """Return whether a name is that of a module's extra state, which is an object even if it is a tensor."""
    return key.rpartition(".")[2] == "_extra_state"


def source_of(key: str, now: Any, what: str, remedy: str) -> Any:
    """Return the value that `now` stands for, or `now` itself. Refuse what was computed from `what`, in part here."""
    if not isinstance(now, StandIn):
        return now
    if now.source is None:
        raise StateDictError(f"{key!r}: a hook computes it from {what} of which this rank has only a part: {remedy}")
    return now.source


def check_source(
    key: str, source: Any, target: torch.Tensor | None, shape: Sequence[int], mesh: UnitMesh | None
) -> None:
    """Check that a tensor of any kind can be loaded. Not collective, once the ranks of `mesh` know each other's names.

    Args:
        target: the tensor that it is loaded into; None for a part of a flat parameter.
        shape: that of the whole.
        mesh: over which the parameter is sharded, None where it is not.
    """
    found, _ = shape_and_dtype(source)
    if tuple(found) != tuple(shape):
        raise StateDictError(
            f"{key!r}: its module has replaced a tensor of shape {list(shape)} with one of {list(found)}, but a "
            "sharded model keeps the shapes that it was built with"
        )
    check_readable(key, source)
    if mesh is not None:
        if is_distributed(source):
            check_blocks(key, source, mesh.ranks(mesh.dtensor_dim, "tensor"))
    elif isinstance(source, ShardedTensor):
        raise StateDictError(f"{key!r} is not sharded in the model: pass the whole tensor, and not a ShardedTensor")
    elif isinstance(source, DTensor) and source.device_mesh.get_coordinate() is None:
        raise StateDictError(f"{key!r} is a DTensor on a mesh without this rank: gather it, or load it for these ranks")
    elif isinstance(target, DTensor) and any(placement.is_partial() for placement in target.placements):
        raise StateDictError(
            f"{key!r} is a DTensor with Partial placements in the model: redistribute it before you load into it"
        )


def facts_of(source: Any, mesh: UnitMesh | None) -> str:
    """Return a description of a value that must be the same on all ranks, as they move values together.

    Blocks are listed for the ranks of the shard dimension, in their order: replicas have theirs on other ranks.
    """
    shape, dtype = shape_and_dtype(source)
    kind = type(source).__name__ if is_distributed(source) or isinstance(source, Rank0Tensor) else "tensor"
    facts = f"a {kind} {list(shape)} of {str(dtype).removeprefix('torch.')}"
    if is_distributed(source) and mesh is not None and math.prod(shape):
        boxes, ranks, where = all_boxes(source), mesh.ranks(mesh.dtensor_dim, "tensor"), ""
        if mesh.tensor is not None and lies_on_dtensor_ranks(mesh, source):
            ranks, where = mesh.ranks(mesh.dtensor_dim), " on the ranks that have the same block"
        facts += f" in blocks {digest_of([boxes.get(rank) for rank in ranks])}{where}"
    elif isinstance(source, DTensor):
        facts += f" with {source.placements} on a mesh of {list(source.device_mesh.mesh.shape)}"
    return facts


def digest_of(value: Any) -> str:
    """Return a short text that is the same for values with the same ``repr``."""
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
