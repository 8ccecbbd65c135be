"""Attributes of torch's class that programs read."""

from __future__ import annotations

from typing import Any

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, MixedPrecision, ShardingStrategy

from hpcfsdp import _compat
from hpcfsdp.engine.phase import Phase
from hpcfsdp.launch.calls import public_call
from hpcfsdp.sharded.unit import ShardedUnit


class PublicAttributes:
    """What the wrapper inherits. They can be read only, and come before those of the wrapped module."""

    _unit: ShardedUnit
    _given: dict[str, Any]
    """Arguments of the constructor that are shown as they were given."""

    def _show(self, **given: Any) -> None:
        """Called by the constructor."""
        self._given = given

    @property
    def sharding_strategy(self) -> ShardingStrategy:
        """Never None. That which was asked for, on one rank too."""
        return self._unit.mesh.strategy

    @property
    def mixed_precision(self) -> MixedPrecision:
        """Never None."""
        return self._unit.mixed_precision

    @property
    def cpu_offload(self) -> CPUOffload:
        """Never None."""
        return self._given["cpu_offload"] or CPUOffload()

    @property
    def backward_prefetch(self) -> BackwardPrefetch | None:
        return self._given["backward_prefetch"]

    @property
    def forward_prefetch(self) -> bool:
        return self._given["forward_prefetch"]

    @property
    def limit_all_gathers(self) -> bool:
        return self._given["limit_all_gathers"]

    @property
    @public_call("process_group")
    def process_group(self) -> dist.ProcessGroup:
        """That over which the unit is sharded, under ``NO_SHARD`` that over which it is replicated.

        A ``ProcessGroup`` that was given, or was the mesh's, itself. For a ``Communicator``, and for hybrid strategies
        without groups, one of the default backend, which is made the first time: then it is collective over the ranks.

        Raises:
            RuntimeError: torch.distributed has not been initialised.
        """
        return self._unit.mesh.process_group()

    @property
    def rank(self) -> int:
        """Of this process in `process_group`."""
        return self._unit.mesh.dtensor_ranks.rank

    @property
    def world_size(self) -> int:
        """Of `process_group`."""
        return self._unit.mesh.dtensor_ranks.size

    @property
    def compute_device(self) -> torch.device:
        """Where the module computes."""
        flats = self._unit.flats
        return flats[0].device if flats else self._unit.mesh.dtensor_ranks.device

    @property
    def training_state(self) -> Any:
        """One of torch's ``TrainingState``."""
        states = _compat.TrainingState
        if self._unit.phase is Phase.IDLE:
            return states.IDLE
        return states.SUMMON_FULL_PARAMS if self._unit.phase is Phase.SUMMON else states.FORWARD_BACKWARD

    @property
    def params(self) -> list[nn.Parameter]:
        """The flat parameters of this unit, this rank's shards; with `use_orig_params` no optimizer steps them."""
        return [flat.parameter for flat in self._unit.flats]
