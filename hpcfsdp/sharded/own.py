"""What a unit owns, and what it leaves alone: parameters and buffers, with the places where modules hold them."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.flat.layout import TensorBlock
from hpcfsdp.sharded import managed
from hpcfsdp.tensor.whole import is_cut


@dataclass(frozen=True)
class Ignored:
    """What is neither sharded nor gathered nor reduced nor cast.

    Attributes:
        modules: those given and all inside of them, down to units, which remain units.
        params: those given, and those of the modules.
        buffers: of the modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()
    buffers: frozenset[torch.Tensor] = frozenset()

    def __bool__(self) -> bool:
        return bool(self.modules or self.params)


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
            managed.mark(self.whole, self.fqn, tuple(self.whole.shape))  # it may be tied to one elsewhere
            managed.hide(self.whole)
            self.whole = None  # which shares the memory that is to be given up

    def take(self) -> None:
        """Mark the parameter as one that belongs to a unit."""
        managed.mark(self.param, self.fqn, tuple(self.param.shape) if self.block is None else self.block.shape)

    def deregister(self) -> None:
        """Keep the parameter as a plain attribute, so that modules find it and ``parameters()`` does not."""
        managed.hide(self.param)
        for module, name in self.places:
            del module._parameters[name]
            module.__dict__[name] = self.param

    def register(self) -> None:
        """The way back from ``deregister``."""
        managed.show(self.param)
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
