"""The parameters and buffers of a unit: found in the module tree, named, grouped, and labelled as the unit's."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Protocol, TypeVar, cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from hpcfsdp import _compat
from hpcfsdp.engine.unit import Unit
from hpcfsdp.errors import EngineError, ShardingError
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.reshard.sharded_tensors import blocks_of, is_sharded, local_block
from hpcfsdp.units.options import NOTHING_IGNORED, Ignored, UnitOptions
from hpcfsdp.units.unit_mesh import UnitMesh

UNIT = "_hpcfsdp_unit"
"""The attribute of a module that was given to ``fully_shard`` with its unit."""


class _HasNumel(Protocol):
    @property
    def numel(self) -> int: ...


Entry = TypeVar("Entry", bound=_HasNumel)

_DEFAULTS = UnitOptions()
_UNIT_FQN = "_hpcfsdp_unit_fqn"
_HIDDEN = "_hpcfsdp_hidden"
_SHAPE = "_hpcfsdp_whole_shape"
_REPLACED = "_hpcfsdp_replaced"


def is_unit(module: nn.Module) -> bool:
    """Return whether a module has a unit of either kind."""
    return UNIT in module.__dict__ or isinstance(module.__dict__.get("_unit"), Unit)


# Labels of parameters that units own, or that a flat or another parameter has replaced


def label_modules(root: nn.Module, ignored: Collection[nn.Module]) -> None:
    """Label the modules of units within `root` as torch's FSDP does: models of transformers and torch's compiler ask.

    Ranks then make the same calls of units where a model would skip layers, or generate tokens, for each rank alone.
    """
    for module in root.modules():
        if module not in ignored:
            module._is_fsdp_managed_module = module._fsdp_use_orig_params = True  # type: ignore[assignment]


def label(param: nn.Parameter, fqn: str, shape: tuple[int, ...], *, hidden: bool = False) -> None:
    """Label a parameter as owned by a unit.

    Args:
        fqn: its name in the unit.
        shape: the shape of the whole parameter.
        hidden: whether another one has replaced it, so that an optimizer must not step it.
    """
    setattr(param, _UNIT_FQN, fqn)
    setattr(param, _SHAPE, shape)
    if hidden:
        hide(param)


def whole_shape(param: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of the whole parameter, None if no unit owns it."""
    return getattr(param, _SHAPE, None)


def unit_fqn(param: torch.Tensor) -> str | None:
    """Return the name of a parameter in its unit, None if no unit owns it."""
    return getattr(param, _UNIT_FQN, None)


def hide(param: nn.Parameter, hidden: bool = True) -> None:
    """Label a parameter as replaced by another one: an optimizer must not step it. `hidden` False undoes that."""
    setattr(param, _HIDDEN, hidden)


def hidden_fqn(param: nn.Parameter) -> str | None:
    """Return the name of a parameter that ``hide`` has labelled, None for any other."""
    return unit_fqn(param) if getattr(param, _HIDDEN, False) else None


def retire(param: nn.Parameter, fqn: str, shape: tuple[int, ...]) -> None:
    """Label a parameter as replaced, see ``label``, and refuse gradients of it: the program has kept it elsewhere."""
    label(param, fqn, shape, hidden=True)
    if param.requires_grad:
        param.register_post_accumulate_grad_hook(_refuse_gradient)


def _refuse_gradient(param: torch.Tensor) -> None:
    raise EngineError(
        f"a gradient came to {unit_fqn(param)!r} as it was before it was sharded. It would never train: a list, a "
        "closure or another module has kept it. Compute with the attribute of the module, or shard the module before "
        "the parameter is put elsewhere"
    )


class _Replaced:
    """How many parameters of this process the program has replaced by others."""

    count = 0


def label_replaced(param: nn.Parameter) -> None:
    """Label a parameter as replaced by one that the program has assigned."""
    hide(param)
    setattr(param, _REPLACED, True)
    _Replaced.count += 1


def is_replaced(param: nn.Parameter) -> bool:
    """Return whether ``label_replaced`` was called."""
    return getattr(param, _REPLACED, False)


def num_replaced() -> int:
    """Return the number of calls of ``label_replaced``."""
    return _Replaced.count


@dataclass
class OwnParam:
    """One parameter, and every place in the module tree where it is registered.

    Attributes:
        index: among the parameters of the unit, in the order of the model.
        block: the part of a tensor-parallel parameter that `param` is.
        whole: that parameter, until its modules hold `param` instead.
        counted_fqn: the name as if ignored modules did not exist, with numbered siblings counted without them.
    """

    param: nn.Parameter
    fqn: str
    places: list[tuple[nn.Module, str]]
    aliases: tuple[str, ...] = ()
    index: int = 0
    block: TensorBlock | None = None
    whole: DTensor | None = None
    counted_fqn: str = ""

    @property
    def given(self) -> nn.Parameter:
        """The parameter that the user has given."""
        return cast(nn.Parameter, self.param if self.whole is None else self.whole)

    @property
    def numel(self) -> int:
        """The number of elements, of the largest block: the same on all ranks."""
        return self.param.numel() if self.block is None else self.block.largest_numel

    def replace_dtensor(self) -> None:
        """Have modules hold the block instead of the ``DTensor``."""
        if self.whole is not None:
            for module, name in self.places:
                module._parameters[name] = self.param
            retire(self.whole, self.fqn, tuple(self.whole.shape))  # another module may hold it too
            self.whole = None  # it shares memory that will be freed

    def label(self) -> None:
        """Label the parameter as owned by a unit."""
        label(self.param, self.fqn, tuple(self.param.shape) if self.block is None else self.block.shape)

    def deregister(self) -> None:
        """Make the parameter a plain attribute of its modules, which ``parameters()`` does not list."""
        hide(self.param)
        for module, name in self.places:
            del module._parameters[name]
            module.__dict__[name] = self.param

    def register(self) -> None:
        """Undo ``deregister``."""
        hide(self.param, False)
        for module, name in self.places:
            del module.__dict__[name]
            module._parameters[name] = self.param


@dataclass
class OwnParams:
    """The parameters and buffers of one unit.

    Attributes:
        groups: parameters with the same dtype, ``requires_grad`` and kind of module; each becomes a flat parameter.
        buffers: persistent or not.
        buffer_fqns: their names within the wrapped module.
    """

    groups: list[list[OwnParam]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    buffer_fqns: list[str] = field(default_factory=list)

    def split(self, numel: int) -> None:
        """Cut groups into runs of at most `numel` elements, or of one parameter that has more."""
        self.groups = [part for group in self.groups for part in parts_of(group, numel)]

    @property
    def entries(self) -> list[OwnParam]:
        """All parameters, group by group."""
        return [entry for group in self.groups for entry in group]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters, then all buffers."""
        return [entry.param for entry in self.entries] + self.buffers

    def named_values(self, excluded: Collection[str], *, alike_only: bool) -> dict[str, torch.Tensor]:
        """Parameters and buffers that should have the same values on all ranks, by their names in messages.

        Args:
            excluded: names to leave out.
            alike_only: leave out those with different blocks on tensor-parallel ranks.
        """
        params = [e for e in self.entries if not alike_only or e.block is None or e.block.is_whole]
        found = {
            f"parameter {e.fqn!r}": e.param for e in sorted(params, key=lambda e: e.index) if e.fqn not in excluded
        }
        for fqn, buffer in zip(self.buffer_fqns, self.buffers, strict=True):
            if fqn not in excluded and not (alike_only and is_sharded(buffer)):
                found[f"buffer {fqn!r}"] = buffer
        return found

    @property
    def params_alike(self) -> list[torch.Tensor]:
        """Parameters that are the same on all tensor-parallel ranks."""
        return [entry.param for entry in self.entries if entry.block is None or entry.block.is_whole]

    @property
    def buffers_alike(self) -> list[torch.Tensor]:
        """Buffers that are the same on all tensor-parallel ranks."""
        return [buffer for buffer in self.buffers if not is_sharded(buffer)]


def parts_of(entries: Sequence[Entry], most: int | None) -> Iterator[list[Entry]]:
    """Return consecutive parts of parameters, each of at most `most` elements, or of one parameter that has more."""
    part: list[Entry] = []
    held = 0
    for entry in entries:
        if part and most is not None and held + entry.numel > most:
            yield part
            part, held = [], 0
        part.append(entry)
        held += entry.numel
    if part:
        yield part


def own_params(
    roots: Sequence[nn.Module],
    options: UnitOptions = _DEFAULTS,
    *,
    mesh: UnitMesh | None = None,
    others: Mapping[nn.Parameter, UnitMesh] = MappingProxyType({}),
) -> OwnParams:
    """Not collective. Return parameters and buffers below modules, without those of units inside.

    Args:
        roots: the modules; the numbers of several begin the names.
        options: those of the unit. Parameters of modules that stay in full precision are not grouped with others.
        mesh: the ranks of the unit; needed for the blocks of DTensors.
        others: those of parameters that are sharded over other ranks.

    Raises:
        ShardingError: a DTensor has placements that are no blocks of it.
        ValueError: they are on several devices, or on one on which the ranks of the unit cannot communicate; or one is
            tied to a parameter of another unit.
    """
    ignored, device = options.ignored, options.device
    found: dict[nn.Parameter, OwnParam] = {}
    is_apart: dict[nn.Parameter, bool] = {}
    buffers: dict[torch.Tensor, str] = {}

    def visit(module: nn.Module, prefix: str, counted: str) -> None:
        if is_unit(module):
            return
        for name, param in [*module._parameters.items(), *_hidden_in(module)]:
            if param is None or param in ignored.params:
                continue
            if unit_fqn(param) is not None:
                raise ValueError(
                    f"parameter {prefix + name!r} is tied to {unit_fqn(param)!r}, which belongs to a unit "
                    "that is already wrapped: wrap the smallest module that holds both instead"
                )
            _check_kind(param, prefix + name, module)
            is_apart[param] = is_apart.get(param, False) or isinstance(module, options.full_precision)
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

    for index, root in enumerate(roots):
        prefix = f"{index}." if len(roots) > 1 else ""
        visit(root, prefix, prefix)
    devices = {entry.param.device: entry.fqn for entry in found.values()}
    if len(devices) > 1 and device is None:
        places = ", ".join(f"{fqn!r} on {device}" for device, fqn in devices.items())
        raise ValueError(
            f"the parameters of one unit are on several devices ({places}): move them to one, or pass device_id"
        )
    here = device or next(iter(devices), None)
    there = None if mesh is None else mesh.dtensor_ranks.device
    if here is not None and there is not None and here.type != there.type:
        kinds = " + ".join(type(each).__name__ for each in roots)
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
    leaf = nn.Parameter(local_block(param), requires_grad=param.requires_grad)
    leaf.__dict__.update(param.__dict__)
    return OwnParam(leaf, fqn, [], index=index, block=_block_of(fqn, param, mesh), whole=param)


def _block_of(fqn: str, param: DTensor, unit_mesh: UnitMesh) -> TensorBlock:
    """Not collective. The blocks of a parameter on all ranks of the mesh.

    Raises:
        ShardingError: a placement that is no block of values, or along a dimension that the parameter does not have.
    """
    try:
        blocks = blocks_of(param)
    except ShardingError as error:
        raise ShardingError(f"parameter {fqn!r}: {error}") from None
    boxes = tuple(blocks[rank] for rank in unit_mesh.ranks("tensor"))
    return TensorBlock(tuple(param.shape), boxes, unit_mesh.tensor.rank, tuple(param.placements))


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
    return [(name, value) for name, value in attributes if isinstance(value, nn.Parameter) and hidden_fqn(value)]


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
        elif any(isinstance(inner.__dict__.get("_unit"), Unit) for inner in module.modules()):  # wrappers refuse it
            _compat.apply_to_module(module, moved, recurse=False)
        else:
            module._apply(moved)  # it may move more than registered tensors
            return
        for child in module.children():
            visit(child)

    visit(root)
