"""The layout of each unit under a setup, by the classes that the engine itself uses, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Literal

import torch

from hpcfsdp.errors import UsageError
from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.granularity import Granularity
from hpcfsdp.params.layout import FlatLayout, round_up
from hpcfsdp.params.sharded_params import Dtypes
from hpcfsdp.plan.meta_trace import ALLOCATED_BYTES
from hpcfsdp.plan.traced_step import Param, PlannedUnit

Front = Literal["class", "fully_shard"]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
KEEPS_VALUES = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies that keep gathered values between forward and backward."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, as torch's ``MixedPrecision`` names them.

    Attributes:
        compute: of the computation and of gathered values; None for that of the parameters.
        reduce: of gradients between ranks; None for that of the computation.
        keep_low_precision_grads: the optimizer gets gradients in the reduce dtype.
    """

    compute: torch.dtype | None = None
    reduce: torch.dtype | None = None
    keep_low_precision_grads: bool = False

    def dtypes(self, param: torch.dtype) -> Dtypes:
        """Return the dtypes of parameters that have one dtype."""
        return Dtypes.plan(
            param, param=self.compute, reduce=self.reduce, keep_low_precision_grads=self.keep_low_precision_grads
        )


@dataclass(frozen=True)
class Setup:
    """How ranks share a model.

    Attributes:
        strategy: the name of torch's ``ShardingStrategy``.
        shards: ranks that share a copy of the model.
        replicas: copies; those of ``NO_SHARD`` are all ranks.
        front: the class, or ``fully_shard``.
        precision: of the step.
        optimizer: a key of ``OPTIMIZERS``.
        offload: keep shards, gradients and the optimizer's state in host memory.
        accumulation: backwards before a step, each of which reduces its gradients.
        granularity: what of each parameter stays on one rank, of the class.
        nodes_of_shards: nodes over which the ranks of a copy lie, for reductions in 16 bits.
    """

    strategy: str = "FULL_SHARD"
    shards: int = 1
    replicas: int = 1
    front: Front = "class"
    precision: Precision = Precision()
    optimizer: str = "adamw"
    offload: bool = False
    accumulation: int = 1
    granularity: Granularity = 1
    nodes_of_shards: int = 1

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"plan: there is no strategy {self.strategy!r}: take one of {', '.join(STRATEGIES)}")
        if self.shards < 1 or self.replicas < 1 or self.accumulation < 1:
            raise UsageError("plan: numbers of shards, replicas and backwards are positive")
        if self.strategy == "NO_SHARD" and self.shards > 1:
            raise UsageError("plan: under NO_SHARD each rank has the whole model: shards is 1")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"plan: unknown optimizer {self.optimizer!r}: take one of {', '.join(OPTIMIZERS)}")

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    @property
    def keeps_values(self) -> bool:
        """Whether gathered values stay between forward and backward."""
        return self.strategy in KEEPS_VALUES


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer holds and takes.

    Attributes:
        values: tensors of its state for each parameter, of the parameter's dtype.
        scratch: tensors of the size of the parameters that its step takes for a moment.
        on_device: scalars for each parameter on the device.
    """

    values: int
    scratch: int
    on_device: int = 0


OPTIMIZERS = {
    "adamw": Optimizer(2, 1),
    "adamw-fused": Optimizer(2, 0, 1),
    "sgd-momentum": Optimizer(1, 0),
    "sgd": Optimizer(0, 0),
    "none": Optimizer(0, 0),
}
"""torch's, with their defaults on an accelerator: "adamw" computes a square root of all parameters at once."""


def allocated(numel: int, dtype: torch.dtype) -> int:
    """Return bytes that an allocator gives for so many elements."""
    return round_up(numel * dtype.itemsize, ALLOCATED_BYTES)


@dataclass(frozen=True)
class PlannedGroup:
    """Parameters of a unit that are gathered together.

    Attributes:
        members: their indices in the unit.
        params: the same.
        dtypes: of them.
        layout: of all ranks.
        stepped: elements of each tensor that the optimizer steps on the rank that has most.
        trained: whether they get gradients.
    """

    members: tuple[int, ...]
    params: tuple[Param, ...]
    dtypes: Dtypes
    layout: FlatLayout | DTensorLayout
    stepped: tuple[int, ...]
    trained: bool

    @property
    def padded_numel(self) -> int:
        """Elements of all shards: what is sent and reduced."""
        return self.layout.padded_numel

    @property
    def gathered_numel(self) -> int:
        """Elements that modules compute with, with gaps."""
        return self.layout.whole_numel if isinstance(self.layout, DTensorLayout) else self.layout.padded_numel

    @cached_property
    def shard_bytes(self) -> int:
        """The size of a rank's shard."""
        return allocated(self.layout.shard_numel, self.dtypes.param)


def groups_of(unit: PlannedUnit, setup: Setup) -> tuple[PlannedGroup, ...]:
    """Return the groups of a unit: by dtype, and by whether they are trained."""
    found: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, param in enumerate(unit.params):
        found.setdefault((param.dtype, param.trained), []).append(index)
    return tuple(
        _group(members, [unit.params[index] for index in members], setup, dtype, trained)
        for (dtype, trained), members in found.items()
    )


def _group(
    members: Sequence[int], params: Sequence[Param], setup: Setup, dtype: torch.dtype, trained: bool
) -> PlannedGroup:
    dtypes = setup.precision.dtypes(dtype)
    layout: FlatLayout | DTensorLayout
    stepped: tuple[int, ...]
    if setup.front == "class":
        layout = FlatLayout.plan(
            ((p.fqn, p.shape, ()) for p in params),
            dtype,
            setup.shards,
            itemsize=dtypes.itemsize,
            granularity=None if setup.granularity == 1 else {p.fqn: setup.granularity for p in params},
        )
        stepped = (layout.shard_numel,)
    else:
        shapes = [param.shape or (1,) for param in params]
        given = [(param.fqn, shape, 0, (), None) for param, shape in zip(params, shapes, strict=True)]
        layout = DTensorLayout.plan(given, dtype, setup.shards, itemsize=dtypes.itemsize)
        stepped = tuple(slot.chunk_numel for slot in layout.slots)  # of rank 0: no rank has more
    return PlannedGroup(tuple(members), tuple(params), dtypes, layout, stepped, trained)


class Layouts:
    """The groups of all units of a model; those of units that are alike are made once."""

    def __init__(self, units: Sequence[PlannedUnit], setup: Setup) -> None:
        alike: dict[tuple[Param, ...], tuple[PlannedGroup, ...]] = {}
        self.groups: list[tuple[PlannedGroup, ...]] = []
        for unit in units:
            if unit.params not in alike:
                alike[unit.params] = groups_of(unit, setup)
            self.groups.append(alike[unit.params])
        self.setup = setup

    @property
    def padding(self) -> float:
        """Elements of gaps and padding, as a share of those of all parameters."""
        groups = [group for of_unit in self.groups for group in of_unit]
        numel = sum(param.numel for group in groups for param in group.params)
        return sum(group.padded_numel for group in groups) / numel - 1 if numel else 0.0
