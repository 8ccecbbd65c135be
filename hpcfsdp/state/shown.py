"""What modules hold, while they save or load, in place of their own parameters."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from hpcfsdp.units import summon
from hpcfsdp.units.flat_unit import FlatUnit, flat_param_name
from hpcfsdp.units.guard import showing_state


class StandIn(torch.Tensor):
    """A tensor without memory that has shape and dtype of its `source`.

    Modules detach it, and put it in place of a parameter. What is computed from it has no source.
    """

    source: Any = None

    @classmethod
    def of(cls, source: Any) -> StandIn:
        """In place of a ``ShardedTensor``, a ``DTensor`` or a ``Rank0Tensor``."""
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
    """The tensor that modules hold for a value; torch warns when a ``ShardedTensor`` itself is detached."""
    if isinstance(value, (ShardedTensor, DTensor, Rank0Tensor)):
        return StandIn.of(value)
    return value.detach() if isinstance(value, torch.Tensor) else value


@contextlib.contextmanager
def orig_params_shown(unit: FlatUnit, values: Mapping[nn.Parameter, Any]) -> Iterator[None]:
    """A context in which the modules of a unit have `values` as parameters, in the places of the original ones.

    Flat parameters are hidden.
    """
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
    """Have a module hold its own tensor again, in place of what was shown or has been assigned since.

    Args:
        registry: its buffers; by default its parameters.
    """
    registry = module._parameters if registry is None else registry
    if registry.get(name) is shown:
        registry[name] = tensor
    else:
        setattr(module, name, tensor)  # as it was assigned: an LSTM keeps a list of its own


@contextlib.contextmanager
def flat_params_shown(unit: FlatUnit, values: Mapping[FlatParam, Any]) -> Iterator[None]:
    """A context in which a unit has `values` in place of its flat parameters, and no original ones."""
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


def flat_numel(layout: FlatLayout) -> int:
    """Elements of a flat parameter up to the end of its last parameter: the same for any number of ranks."""
    return layout.used_numel
