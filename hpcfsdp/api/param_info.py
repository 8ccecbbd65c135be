"""Names, shapes and dtypes of a model's parameters without sharding, for parameter groups by shape."""

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn

from hpcfsdp.errors import EngineError
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units.flat_unit import units_in


@dataclass(frozen=True)
class ParamInfo:
    """One parameter of the model as it was before wrapping.

    Attributes:
        name: the name in the plain model, without the names of wrappers.
        shape: the whole shape, of all ranks together.
        dtype: the dtype of the shard.
        param: the parameter that an optimizer steps: itself, or without `use_orig_params` the flat parameter around it,
            which is common to several.
    """

    name: str
    shape: torch.Size
    dtype: torch.dtype
    param: nn.Parameter

    @property
    def numel(self) -> int:
        """The number of elements, of all ranks together."""
        return self.shape.numel()

    @property
    def requires_grad(self) -> bool:
        """Whether the parameter is trained."""
        return self.param.requires_grad


def param_info(model: nn.Module) -> dict[str, ParamInfo]:
    """Not collective. Return the parameters by name, in the plain model's order; the same on all ranks but for `param`.

    It includes parameters outside of units, so it works for plain modules. A tied parameter has its first name alone.
    """
    names: dict[nn.Module, tuple[str, ...]] = {}
    sharded: dict[tuple[nn.Module, str], tuple[torch.Size, torch.dtype, nn.Parameter, nn.Parameter]] = {}
    for unit in units_in(model):
        names.update(unit.param_names)
        for group, flat in zip(unit.own.groups, unit.sharded_params, strict=True):
            for entry, slot in zip(group, flat.layout.slots, strict=True):
                stepped = entry.param if flat.use_orig_params else flat.parameter
                found = torch.Size(slot.whole_shape), flat.layout.dtype, stepped, entry.param
                sharded.update(dict.fromkeys(entry.places, found))
    sharded_params = {shard for _, _, shard, _ in sharded.values()}
    infos: dict[nn.Parameter, ParamInfo] = {}
    for path, module in model.named_modules():
        for name in names.get(module, tuple(module._parameters)):
            plain = module._parameters.get(name)
            if (module, name) in sharded:
                shape, dtype, stepped, leaf = sharded[module, name]
            elif plain is None or plain in sharded_params:
                continue
            else:
                shape, dtype, stepped, leaf = plain.shape, plain.dtype, plain, plain
            fqn = clean_fqn(f"{path}.{name}" if path else name)
            infos.setdefault(leaf, ParamInfo(fqn, shape, dtype, stepped))
    return {info.name: info for info in infos.values()}


def param_groups(
    model: nn.Module, weight_decay: float, decays: Callable[[ParamInfo], bool] = lambda info: len(info.shape) >= 2
) -> list[dict[str, Any]]:
    """Not collective. Divide the trained parameters into two optimizer groups, with and without weight decay.

    Args:
        model: plain or sharded.
        weight_decay: of the first group; that of the second is 0.
        decays: whether a parameter belongs to the first group; by default matrices do, biases and norms do not.

    Raises:
        EngineError: parts of one flat parameter belong to different groups.
    """
    groups: dict[bool, dict[nn.Parameter, str]] = {True: {}, False: {}}
    for name, info in param_info(model).items():
        if info.requires_grad:
            own = bool(decays(info))
            if info.param in groups[not own]:
                raise EngineError(
                    f"{groups[not own][info.param]!r} and {name!r} belong to different groups but are parts of one "
                    "flat parameter: wrap the model with use_orig_params=True"
                )
            groups[own].setdefault(info.param, name)
    return [{"params": list(params), "weight_decay": weight_decay if own else 0.0} for own, params in groups.items()]
