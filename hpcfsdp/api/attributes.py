"""Attributes of torch's class that programs read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp import _compat
from hpcfsdp.engine.unit import TrainingState
from hpcfsdp.hang.calls import public_call
from hpcfsdp.units.flat_unit import FlatUnit


class PublicAttributes:
    """Read-only attributes of the wrapper. They come before those of the wrapped module."""

    _unit: FlatUnit

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """The requested strategy, also on one rank; never None."""
        return self._unit.mesh.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Never None."""
        return self._unit.options.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Never None."""
        return self._unit.options.cpu_offload

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        return self._unit.options.backward_prefetch

    @property
    def forward_prefetch(self) -> bool:
        return self._unit.options.forward_prefetch

    @property
    def limit_all_gathers(self) -> bool:
        return self._unit.options.limit_all_gathers

    @property
    @public_call("process_group")
    def process_group(self) -> dist.ProcessGroup:
        """The process group over which the unit is sharded, or replicated under ``NO_SHARD``.

        It is the given ``ProcessGroup``, or that of the mesh. For a ``Communicator``, and for hybrid strategies without
        groups, the first access makes one of the default backend, and is collective over its ranks.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return self._unit.mesh.process_group()

    @property
    def rank(self) -> int:
        """The rank of this process in `process_group`."""
        return self._unit.mesh.dtensor_ranks.rank

    @property
    def world_size(self) -> int:
        """The number of ranks in `process_group`."""
        return self._unit.mesh.dtensor_ranks.size

    @property
    def compute_device(self) -> torch.device:
        """The device of the computation."""
        sharded_params = self._unit.sharded_params
        return sharded_params[0].device if sharded_params else self._unit.mesh.dtensor_ranks.device

    @property
    def training_state(self) -> Any:
        """One of torch's ``TrainingState``."""
        states = _compat.training_states()
        if self._unit.is_idle:
            return states.IDLE
        return (
            states.SUMMON_FULL_PARAMS if self._unit.training_state is TrainingState.SUMMON else states.FORWARD_BACKWARD
        )

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit, this rank's shards; with `use_orig_params` no optimizer steps them."""
        return [flat.parameter for flat in self._unit.sharded_params]
