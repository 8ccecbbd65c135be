"""Parameters and buffers that a unit owns, with their places in modules, and those that it ignores."""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass, field
from typing import cast

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp.params.layout import TensorBlock
from hpcfsdp.reshard.whole import is_cut
from hpcfsdp.units import managed


@dataclass(frozen=True)
class Ignored:
    """Modules, parameters and buffers that are neither sharded nor gathered nor reduced nor cast.

    Attributes:
        modules: the given ones and all below them, down to units, which remain units.
        params: the given ones, and those of the modules.
        buffers: of the modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()
    buffers: frozenset[torch.Tensor] = frozenset()


NOTHING_IGNORED = Ignored()


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
        """Elements, of the largest block: the same on all ranks."""
        return self.param.numel() if self.block is None else self.block.largest_numel

    def replace_dtensor(self) -> None:
        """Have modules hold the block instead of the ``DTensor``."""
        if self.whole is not None:
            for module, name in self.places:
                module._parameters[name] = self.param
            managed.retire(self.whole, self.fqn, tuple(self.whole.shape))  # another module may hold it too
            self.whole = None  # it shares memory that will be freed

    def mark(self) -> None:
        """Mark the parameter as owned by a unit."""
        managed.mark(self.param, self.fqn, tuple(self.param.shape) if self.block is None else self.block.shape)

    def deregister(self) -> None:
        """Make the parameter a plain attribute of its modules, which ``parameters()`` does not list."""
        managed.hide(self.param)
        for module, name in self.places:
            del module._parameters[name]
            module.__dict__[name] = self.param

    def register(self) -> None:
        """Undo ``deregister``."""
        managed.show(self.param)
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
        self.groups = [part for group in self.groups for part in _runs(group, numel)]

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
            if fqn not in excluded and not (alike_only and is_cut(buffer)):
                found[f"buffer {fqn!r}"] = buffer
        return found

    @property
    def params_alike(self) -> list[torch.Tensor]:
        """Parameters that are the same on all tensor-parallel ranks."""
        return [entry.param for entry in self.entries if entry.block is None or entry.block.is_whole]

    @property
    def buffers_alike(self) -> list[torch.Tensor]:
        """Buffers that are the same on all tensor-parallel ranks."""
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
