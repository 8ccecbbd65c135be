"""The parameters that a unit owns: found in the module tree, grouped, named, and taken out of their modules."""

from __future__ import annotations

import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.nn.parameter import UninitializedParameter

from hpcfsdp.api import taken
from hpcfsdp.api.groups import TensorRanks
from hpcfsdp.api.ignored import Ignored
from hpcfsdp.api.tensor_parallel import block_of, leaf_of
from hpcfsdp.flat.layout import TensorBlock
from hpcfsdp.tensor.whole import is_cut


@dataclass
class OwnParam:
    """One parameter and every place in the module tree where it is registered."""

    param: nn.Parameter
    fqn: str
    places: list[tuple[nn.Module, str]]
    aliases: tuple[str, ...] = ()
    index: int = 0
    """Its place among the parameters of the unit, in the order of the model."""
    block: TensorBlock | None = None
    """What `param` is of a parameter that is cut over ranks which are parallel over tensors."""
    whole: DTensor | None = None
    """That parameter, until its modules hold `param` in its place."""
    counted_fqn: str = ""
    """Its name as it were without the ignored modules: numbered siblings of these count from the first that is left."""

    @property
    def numel(self) -> int:
        """Elements, of the largest block if there are several: the same on all ranks."""
        return self.param.numel() if self.block is None else self.block.largest_numel

    def localise(self) -> None:
        """Have modules hold the block in place of the ``DTensor``."""
        if self.whole is not None:
            for module, name in self.places:
                module._parameters[name] = self.param
            taken.take(self.whole, self.fqn, tuple(self.whole.shape))  # it may be tied to one elsewhere
            taken.hide(self.whole)
            self.whole = None  # which shares the memory that is to be given up

    def take(self) -> None:
        """Mark the parameter as one that belongs to a unit."""
        taken.take(self.param, self.fqn, tuple(self.param.shape) if self.block is None else self.block.shape)

    def deregister(self) -> None:
        """Keep the parameter as a plain attribute, so that modules find it and ``parameters()`` does not."""
        taken.hide(self.param)
        for module, name in self.places:
            del module._parameters[name]
            module.__dict__[name] = self.param

    def register(self) -> None:
        """The way back from ``deregister``."""
        taken.show(self.param)
        for module, name in self.places:
            del module.__dict__[name]
            module._parameters[name] = self.param


@dataclass
class OwnParams:
    """What one unit owns.

    Attributes:
        groups: parameters that share dtype, ``requires_grad`` and the kind of their modules, one flat parameter each:
            frozen ones cost no gradient memory, and no dtype is converted into another.
        buffers: persistent or not.
        buffer_fqns: their names within the wrapped module.
    """

    groups: list[list[OwnParam]] = field(default_factory=list)
    buffers: list[torch.Tensor] = field(default_factory=list)
    buffer_fqns: list[str] = field(default_factory=list)

    def split(self, numel: int) -> None:
        """Cut groups into runs of at most `numel` elements, or of one parameter that has more."""
        self.groups = [part for group in self.groups for part in _runs(group, numel)]

    @property
    def entries(self) -> list[OwnParam]:
        """All parameters, group by group."""
        return [entry for group in self.groups for entry in group]

    @property
    def tensors(self) -> list[torch.Tensor]:
        """All parameters, then all buffers."""
        return [entry.param for entry in self.entries] + self.buffers

    def named_values(self, left: Collection[str], *, alike_only: bool) -> dict[str, torch.Tensor]:
        """What ranks should begin with the same values of, by what messages call it.

        Args:
            left: names of parameters and buffers to leave out.
            alike_only: leave out those of which ranks that are parallel over tensors have different parts.
        """
        params = [e for e in self.entries if not alike_only or e.block is None or e.block.is_whole]
        found = {f"parameter {e.fqn!r}": e.param for e in sorted(params, key=lambda e: e.index) if e.fqn not in left}
        for fqn, buffer in zip(self.buffer_fqns, self.buffers, strict=True):
            if fqn not in left and not (alike_only and is_cut(buffer)):
                found[f"buffer {fqn!r}"] = buffer
        return found

    @property
    def params_alike(self) -> list[torch.Tensor]:
        """Those parameters of which ranks that are parallel over tensors have no different parts."""
        return [entry.param for entry in self.entries if entry.block is None or entry.block.is_whole]

    @property
    def buffers_alike(self) -> list[torch.Tensor]:
        """Those buffers, likewise."""
        return [buffer for buffer in self.buffers if not is_cut(buffer)]


def _runs(group: list[OwnParam], numel: int) -> Iterator[list[OwnParam]]:
    run: list[OwnParam] = []
    held = 0
    for entry in group:
        if run and held + entry.numel > numel:
            yield run
            run, held = [], 0
        run.append(entry)
        held += entry.numel
    yield run


def own_params(
    root: nn.Module,
    *,
    stop_at: type[nn.Module],
    ignored: Ignored | None = None,
    apart: tuple[type[nn.Module], ...] = (),
    tensor: TensorRanks | None = None,
) -> OwnParams:
    """Parameters and buffers below `root` that lie in no submodule of the type `stop_at`.

    Args:
        ignored: what not to own.
        apart: types of modules whose parameters are not grouped with those of others.
        tensor: the ranks of DTensors among them, of which it takes this rank's blocks.

    Raises:
        ShardingError: a DTensor has placements that are no blocks of it.
        ValueError: they lie on several devices, or one is tied to a parameter that another unit has taken.
    """
    found: dict[nn.Parameter, OwnParam] = {}
    is_apart: dict[nn.Parameter, bool] = {}
    left = ignored or Ignored()
    buffers: dict[torch.Tensor, str] = {}

    def visit(module: nn.Module, prefix: str, counted: str) -> None:
        if isinstance(module, stop_at):
            return
        for name, param in [*module._parameters.items(), *_taken_from(module)]:
            if param is None or param in left.params:
                continue
            if taken.unit_fqn(param) is not None:
                raise ValueError(
                    f"parameter {prefix + name!r} is tied to {taken.unit_fqn(param)!r}, which belongs to a unit that "
                    "is wrapped already: wrap the smallest module that holds both instead"
                )
            _check_kind(param, prefix + name, module)
            is_apart[param] = is_apart.get(param, False) or isinstance(module, apart)
            if param not in found:
                found[param] = _own_param(param, prefix + name, len(found), tensor)
                found[param].counted_fqn = counted + name
            entry = found[param]
            if entry.places:
                entry.aliases += (prefix + name,)
            if (module, name) not in entry.places:  # a module may be registered in several places
                entry.places.append((module, name))
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer not in left.buffers:
                buffers.setdefault(buffer, prefix + name)
        number = 0
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.", f"{counted}{number if name.isdecimal() else name}.")
            number += child not in left.modules

    visit(root, "", "")
    devices = {entry.param.device: entry.fqn for entry in found.values()}
    if len(devices) > 1:
        places = ", ".join(f"{fqn!r} on {device}" for device, fqn in devices.items())
        raise ValueError(
            f"the parameters of one unit lie on several devices ({places}): move them to one, or pass device_id"
        )
    groups: dict[tuple[torch.dtype, bool, bool], list[OwnParam]] = {}
    for param, entry in found.items():
        kind = (param.dtype, param.requires_grad, is_apart[param])
        groups.setdefault(kind, []).append(entry)
    return OwnParams(list(groups.values()), list(buffers), list(buffers.values()))


def _own_param(param: nn.Parameter, fqn: str, index: int, tensor: TensorRanks | None) -> OwnParam:
    if not isinstance(param, DTensor):
        return OwnParam(param, fqn, [], index=index)
    assert tensor is not None
    if param._backward_hooks or param._post_accumulate_grad_hooks:
        warnings.warn(
            f"hooks of the DTensor {fqn!r} will not be called: its unit keeps this rank's block in its place; register "
            "them after wrapping, with use_orig_params=True",
            stacklevel=5,
        )
    return OwnParam(leaf_of(param), fqn, [], index=index, block=block_of(fqn, param, tensor), whole=param)


def _check_kind(param: nn.Parameter, fqn: str, module: nn.Module) -> None:
    if isinstance(param, UninitializedParameter):
        raise ValueError(
            f"parameter {fqn!r} of a lazy {type(module).__name__} has no shape yet: run a forward of the module before "
            "wrapping it"
        )


def _taken_from(module: nn.Module) -> list[tuple[str, nn.Parameter]]:
    """Parameters of a module that a wrapper elsewhere in the model has taken, see ``OwnParam.deregister``."""
    attributes = module.__dict__.items()
    return [(name, value) for name, value in attributes if isinstance(value, nn.Parameter) and taken.hidden_fqn(value)]


def move_outside(
    root: nn.Module, device: torch.device, *, stop_at: type[nn.Module], ignored: Ignored | None = None
) -> None:
    """Move what lies in no submodule of the type `stop_at` to a device; those have been moved already.

    What is ignored stays, and what is on the meta device.
    """
    left = ignored or Ignored()

    def moved(tensor: torch.Tensor) -> torch.Tensor:
        return tensor if tensor.is_meta or tensor in left.params or tensor in left.buffers else tensor.to(device)

    def visit(module: nn.Module) -> None:
        if isinstance(module, stop_at):
            return
        if not any(isinstance(inner, stop_at) for inner in module.modules()):
            module._apply(moved)  # a class may have its own, which moves more than tensors that torch knows of
            return
        nn.Module._apply(module, moved, recurse=False)
        for child in module.children():
            visit(child)

    visit(root)
