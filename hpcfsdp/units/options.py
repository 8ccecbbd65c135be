"""What a program chooses for a unit."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision

from hpcfsdp.params.granularity import Granularity, GranularityOf


@dataclass(frozen=True)
class Ignored:
    """Modules, parameters and buffers that are neither sharded nor gathered nor reduced nor cast.

    Attributes:
        modules: the given ones and all below them, down to units, which remain units.
        params: the given ones, and those of the modules.
        buffers: those of the modules.
    """

    modules: frozenset[nn.Module] = frozenset()
    params: frozenset[nn.Parameter] = frozenset()
    buffers: frozenset[torch.Tensor] = frozenset()


NOTHING_IGNORED = Ignored()


@dataclass(frozen=True)
class UnitOptions:
    """The arguments of ``FullyShardedDataParallel``, or of ``fully_shard``, that hold for a unit.

    Most are those of the same name.

    Attributes:
        device: the device to compute on; None for that of the parameters.
        pin_memory: whether offloaded shards of ``fully_shard`` are in pinned memory.
    """

    device: torch.device | None = None
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
    pin_memory: bool = False

    @property
    def full_precision(self) -> tuple[type[nn.Module], ...]:
        """The classes of modules that stay in full precision; none without lower dtypes."""
        mixed = self.mixed_precision
        if not any((mixed.param_dtype, mixed.reduce_dtype, mixed.buffer_dtype)):
            return ()
        return tuple(mixed._module_classes_to_ignore)

    def arguments(self) -> dict[str, Any]:
        """Return the arguments of ``FullyShardedDataParallel`` for units inside of one with these options."""
        given = {**vars(self), "device_id": self.device, "ignored_states": self.ignored}
        return {name: value for name, value in given.items() if name not in ("device", "ignored", "pin_memory")}
