"""What a unit owns: its parameters and buffers, found in the module tree, and labelled; and what was chosen for it."""

import warnings
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any, cast

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.engine.unit import Unit
from hpcfsdp.errors import EngineError, ShardingError
from hpcfsdp.params.extension_params import has_gather_hooks
from hpcfsdp.params.granularity import Granularity, GranularityOf
from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.reshard.sharded_tensors import blocks_of, is_sharded, local_block
from hpcfsdp.units.keepers import ReshardChoice
from hpcfsdp.units.unit_mesh import UnitMesh

UNIT = "_hpcfsdp_unit"  # the attribute of a module that was given to ``fully_shard`` with its unit


@dataclass(frozen=True)
class Ignored:
    """What is neither sharded nor gathered nor reduced nor cast."""

    modules: frozenset[nn.Module] = frozenset()  # the given ones and all below them, down to units, which remain units
    params: frozenset[nn.Parameter] = frozenset()  # the given ones, and those of the modules
    buffers: frozenset[torch.Tensor] = frozenset()  # those of the modules


NOTHING_IGNORED = Ignored()


@dataclass(frozen=True)
class UnitOptions:
    """The arguments of ``FullyShardedDataParallel``, or of ``fully_shard``, that hold for a unit."""

    device: torch.device | None = None  # to compute on; None for that of the parameters
    ignored: Ignored = NOTHING_IGNORED
    mixed_precision: MixedPrecision = field(default_factory=MixedPrecision)
    cpu_offload: CPUOffload = field(default_factory=CPUOffload)
    backward_prefetch: BackwardPrefetch | None = BackwardPrefetch.BACKWARD_PRE
    forward_prefetch: bool = False
    limit_all_gathers: bool = True
    use_orig_params: bool = False
    granularity: Granularity | GranularityOf = 1
    param_init_fn: Callable[[nn.Module], Any] | None = None
    sync_module_states: bool = False
    comm_options: CommOptions = field(default_factory=CommOptions)
    reshard_after_forward: ReshardChoice | None = None  # None: what the strategy says
    pin_memory: bool = False  # offloaded shards of ``fully_shard``

    @property
    def full_precision(self) -> tuple[type[nn.Module], ...]:
        """The classes of modules that stay in full precision; none without lower dtypes."""
        mixed = self.mixed_precision
        lowers = any((mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype))
        return tuple(mixed._module_classes_to_ignore) if lowers else ()

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``FullyShardedDataParallel`` for units inside of one with these options."""
        given = {**vars(self), "device_id": self.device, "ignored_states": self.ignored}
        return {name: value for name, value in given.items() if name not in ("device", "ignored", "pin_memory")}


_DEFAULTS = UnitOptions()


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
    """Label a parameter as owned by a unit: with its name there, and its whole shape. ``hide`` it if `hidden`."""
    param._hpcfsdp_unit_fqn, param._hpcfsdp_whole_shape = fqn, shape
    if hidden:
        hide(param)


def whole_shape(param: torch.Tensor) -> tuple[int, ...] | None:
    """Return the shape of the whole parameter, None if no unit owns it."""
    return getattr(param, "_hpcfsdp_whole_shape", None)


def unit_fqn(param: torch.Tensor) -> str | None:
    """Return the name of a parameter in its unit, None if no unit owns it."""
    return getattr(param, "_hpcfsdp_unit_fqn", None)


def hide(param: nn.Parameter, hidden: bool = True) -> None:
    """Label a parameter as replaced by another one: an optimizer must not step it. `hidden` False undoes that."""
    param._hpcfsdp_hidden = hidden


def hidden_fqn(param: nn.Parameter) -> str | None:
    """Return the name of a parameter that ``hide`` has labelled, None for any other."""
    return unit_fqn(param) if getattr(param, "_hpcfsdp_hidden", False) else None


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


num_replaced = 0  # how many parameters of this process the program has replaced by others


def label_replaced(param: nn.Parameter) -> None:
    """Label a parameter as replaced by one that the program has assigned."""
    global num_replaced
    hide(param)
    param._hpcfsdp_replaced = True
    num_replaced += 1


def is_replaced(param: nn.Parameter) -> bool:
    """Return whether ``label_replaced`` was called."""
    return getattr(param, "_hpcfsdp_replaced", False)


@dataclass
class OwnParam:
    """One parameter, and every place in the module tree where it is registered."""

    param: nn.Parameter
    fqn: str
    places: list[tuple[nn.Module, str]]
    aliases: tuple[str, ...] = ()
    index: int = 0  # among the parameters of the unit, in the order of the model
    block: TensorBlock | None = None  # the part of a tensor-parallel parameter that `param` is
    whole: DTensor | None = None  # that parameter, until its modules hold `param` instead
    counted_fqn: str = ""  # as if ignored modules did not exist, with numbered siblings counted without them

    @property
    def given(self) -> nn.Parameter:
        """The parameter that the user has given."""
        return cast(nn.Parameter, self.param if self.whole is None else self.whole)

    @property
    def shape(self) -> tuple[int, ...]:
        """That of the whole parameter, while `param` is not flat."""
        return tuple(self.param.shape) if self.block is None else self.block.shape

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
    """The parameters and buffers of one unit."""

    # Of one dtype, requires_grad and kind of module; each group becomes a flat parameter.
    groups: list[list[OwnParam]] = field(default_factory=list)
    buffers: dict[str, torch.Tensor] = field(default_factory=dict)  # by names within the module, persistent or not

    @property
    def entries(self) -> list[OwnParam]:
        """All parameters, group by group."""
        return [entry for group in self.groups for entry in group]

    def alike(self, is_tensor: bool = True) -> tuple[list[OwnParam], dict[str, torch.Tensor]]:
        """Return what is the same on all tensor-parallel ranks; everything unless `is_tensor`."""
        params = [e for e in self.entries if not is_tensor or e.block is None or e.block.is_whole]
        return params, {fqn: each for fqn, each in self.buffers.items() if not (is_tensor and is_sharded(each))}


def parts_of(entries: Sequence[Any], most: int | None) -> Iterator[list[Any]]:
    """Yield consecutive parts of parameters, each of at most `most` elements, or of one parameter that has more."""
    part: list[Any] = []
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
    takes_hooks: bool = False,
) -> OwnParams:
    """Not collective. Return parameters and buffers below modules, without those of units inside.

    Args:
        roots: the modules; the numbers of several begin the names.
        options: those of the unit. Parameters of modules that stay in full precision are not grouped with others.
        mesh: the ranks of the unit; needed for the blocks of DTensors.
        others: those of parameters that are sharded over other ranks.
        takes_hooks: whether parameters may say themselves how they are gathered, if not now, then when they are.
    """
    ignored, full_precision = options.ignored, options.full_precision
    found: dict[nn.Parameter, OwnParam] = {}
    is_apart: dict[nn.Parameter, bool] = {}
    buffers: dict[torch.Tensor, str] = {}

    def visit(module: nn.Module, prefix: str, counted: str) -> None:
        if is_unit(module):
            return
        # Parameters that another unit of the model owns may be attributes, see `OwnParam.deregister`.
        attributes = [each for each in module.__dict__.items() if isinstance(each[1], nn.Parameter)]
        hidden = [(name, value) for name, value in attributes if hidden_fqn(value)]
        for name, param in [*module._parameters.items(), *hidden]:
            if param is None or param in ignored.params:
                continue
            if unit_fqn(param) is not None:
                raise ValueError(
                    f"parameter {prefix + name!r} is tied to {unit_fqn(param)!r}, which belongs to a unit "
                    "that is already wrapped: wrap the smallest module that holds both instead"
                )
            is_apart[param] = is_apart.get(param, False) or isinstance(module, full_precision)
            if param not in found:
                refuse_lazy(param, f"the parameter {prefix + name!r}", module)
                if not (takes_hooks and has_gather_hooks(_compat.local_of(param), or_later=True)):
                    refuse_subclass(param, f"the parameter {prefix + name!r}")
                found[param] = _own_param(param, prefix + name, len(found), others.get(param, mesh))
                found[param].counted_fqn = counted + name
            entry = found[param]
            if entry.places:
                entry.aliases += (prefix + name,)
            if (module, name) not in entry.places:  # a module may be registered in several places
                entry.places.append((module, name))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in ignored.buffers:
                refuse_lazy(buffer, f"the buffer {prefix + name!r}", module)
                refuse_subclass(buffer, f"the buffer {prefix + name!r}")
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
    if len(devices) > 1 and options.device is None:
        places = ", ".join(f"{fqn!r} on {device}" for device, fqn in devices.items())
        raise ValueError(
            f"the parameters of one unit are on several devices ({places}): move them to one, or pass device_id"
        )
    if mesh is not None:
        kinds = " + ".join(type(each).__name__ for each in roots)
        check_device(kinds, devices, options.device, mesh.dtensor_ranks)
    groups: dict[tuple[torch.dtype, bool, bool], list[OwnParam]] = {}
    for param, entry in found.items():
        groups.setdefault((param.dtype, param.requires_grad, is_apart[param]), []).append(entry)
    return OwnParams(list(groups.values()), {name: buffer for buffer, name in buffers.items()})


def check_device(
    kinds: str, devices: Mapping[torch.device, str], wanted: torch.device | None, ranks: Communicator
) -> None:
    """Raise ValueError unless the parameters of modules of some `kinds` are where the ranks communicate, or will be.

    Args:
        devices: those of the parameters, each with the name of one.
        wanted: the device to compute on; None: that of the parameters.
    """
    there, here = ranks.device, wanted or next(iter(devices), None)
    if here is not None and here.type != there.type:
        raise ValueError(
            f"the parameters of {kinds} are on {here}, and its ranks communicate on {there.type}: pass "
            f"device_id={there.type!r}, or a process group or mesh for {here.type}"
        )
    places = {each: f"parameter {fqn!r} of {kinds} is on" for each, fqn in devices.items()}
    places |= {wanted: f"device_id of {kinds} is"} if wanted else {}
    for each, what in places.items():
        if each.type == there.type and None not in (each.index, there.index) and each != there:
            rank = getattr(ranks, "world_ranks", range(ranks.size))[ranks.rank]
            raise ValueError(
                f"rank {rank}: {what} {each}, but this rank communicates on {there}: build the module there, "
                f"or move it before it is wrapped (model.to({str(there)!r}), with hpcfsdp.init: world.device), and "
                "leave torch's current device as it is"
            )


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
    try:
        blocks = blocks_of(param)
    except ShardingError as error:
        raise ShardingError(f"parameter {fqn!r}: {error}") from None
    boxes = tuple(blocks[rank] for rank in mesh.ranks("tensor"))
    block = TensorBlock(tuple(param.shape), boxes, mesh.tensor.rank, tuple(param.placements))
    return OwnParam(leaf, fqn, [], index=index, block=block, whole=param)


def refuse_lazy(tensor: torch.Tensor, what: str, module: nn.Module) -> None:
    """Refuse a tensor that has no shape."""
    if isinstance(tensor, UninitializedParameter):
        raise ValueError(
            f"{what} of a lazy {type(module).__name__} has no shape yet: run a forward of the module before wrapping it"
        )


def refuse_subclass(tensor: torch.Tensor, what: str) -> None:
    """Refuse a tensor that computes, or keeps its values, in a way of its own."""
    kind, plain = type(_compat.local_of(tensor)), nn.Parameter
    only_named = issubclass(kind, plain) and all(
        getattr(kind, name) is getattr(plain, name) for name in ("__torch_function__", "__torch_dispatch__")
    )
    if kind not in (torch.Tensor, plain, DTensor) and not only_named:
        raise NotImplementedError(
            f"{what} is a {kind.__module__}.{kind.__qualname__}, a subclass of torch.Tensor: in shards its values "
            "would be those of a plain tensor. Convert it before sharding (dequantize, for instance), leave it out "
            "(ignored_states of FullyShardedDataParallel, ignored_params of fully_shard), or give it the methods "
            "fsdp_pre_all_gather and fsdp_post_all_gather, which fully_shard calls"
        )


def move_buffers(root: nn.Module, device: torch.device, *, ignored: Ignored = NOTHING_IGNORED) -> None:
    """Move buffers outside of units to a device, except ignored ones and those on the meta device; no parameters."""
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
