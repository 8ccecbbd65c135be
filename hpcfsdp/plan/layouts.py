"""The layout of each unit under a setup, by the classes that the engine itself uses, and sizes in bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Literal

import torch

from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.errors import UsageError
from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.granularity import Granularity
from hpcfsdp.params.layout import FlatLayout, round_up
from hpcfsdp.params.sharded_params import Dtypes
from hpcfsdp.plan.meta_trace import ALLOCATED_BYTES
from hpcfsdp.plan.traced_step import Param, PlannedUnit
from hpcfsdp.units.build import CHUNK_NUMEL, CHUNK_NUMEL_OF_NODES
from hpcfsdp.units.own import parts_of

Front = Literal["class", "fully_shard"]
STRATEGIES = ("FULL_SHARD", "SHARD_GRAD_OP", "NO_SHARD", "HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")
KEEPS_VALUES = ("SHARD_GRAD_OP", "NO_SHARD", "_HYBRID_SHARD_ZERO2")
"""Strategies that keep gathered values between forward and backward."""


@dataclass(frozen=True)
class Precision:
    """The dtypes of a step, as torch's ``MixedPrecision`` names them."""

    compute: torch.dtype | None = None  # of the computation and of gathered values; None for that of the parameters
    reduce: torch.dtype | None = None  # of gradients between ranks; None for that of the computation
    keep_low_precision_grads: bool = False  # the optimizer gets gradients in the reduce dtype

    def dtypes(self, param: torch.dtype) -> Dtypes:
        """Return the dtypes of parameters that have one dtype."""
        return Dtypes.plan(
            param, param=self.compute, reduce=self.reduce, keep_low_precision_grads=self.keep_low_precision_grads
        )


@dataclass(frozen=True)
class Setup:
    """How ranks share a model."""

    strategy: str = "FULL_SHARD"  # the name of torch's ``ShardingStrategy``
    shards: int = 1  # ranks that share a copy of the model
    replicas: int = 1  # copies; those of ``NO_SHARD`` are all ranks
    front: Front = "class"  # the class, or ``fully_shard``
    precision: Precision = Precision()  # of the step
    optimizer: str = "adamw"  # a key of ``OPTIMIZERS``
    offload: bool = False  # keep shards, gradients and the optimizer's state in host memory
    accumulation: int = 1  # backwards before a step, each of which reduces its gradients
    granularity: Granularity = 1  # what of each parameter stays on one rank, of the class
    comm_options: CommOptions = CommOptions()  # noqa: RUF009 (frozen)
    memory_copies: int = 0  # of a rank's part of a checkpoint in host memory: 2 on one node, 4 on several; 0 for none
    nodes_of_shards: int = 1  # nodes over which the ranks of a copy lie
    # ``reshard_after_forward``: the ranks over which values stay from a forward to its backward; 0: the strategy's way
    kept_over: int = 0
    # Memory of a node whose CPUs compute: its ranks share that of gathered values. 0: each rank has a device.
    node_bytes: int = 0

    def __post_init__(self) -> None:
        if self.strategy not in STRATEGIES:
            raise UsageError(f"plan: there is no strategy {self.strategy!r}: take one of {', '.join(STRATEGIES)}")
        if self.shards < 1 or self.replicas < 1 or self.accumulation < 1:
            raise UsageError("plan: numbers of shards, replicas and backwards are positive")
        if self.strategy == "NO_SHARD" and self.shards > 1:
            raise UsageError("plan: under NO_SHARD each rank has the whole model: shards is 1")
        if self.optimizer not in OPTIMIZERS:
            raise UsageError(f"plan: unknown optimizer {self.optimizer!r}: take one of {', '.join(OPTIMIZERS)}")
        if self.kept_over and self.shards % self.kept_over:
            raise UsageError(
                f"plan: values cannot stay over {self.kept_over} of {self.shards} rank(s): they must divide"
            )

    @property
    def ranks(self) -> int:
        return self.shards * self.replicas

    @property
    def neighbours(self) -> int:
        """Ranks of a copy on each of its nodes."""
        return self.shards // self.nodes_of_shards

    @property
    def stays_in_node(self) -> bool:
        """Whether memory that the ranks of a node share keeps the values from a forward to its backward."""
        return bool(self.node_bytes) and 0 < self.kept_over <= self.neighbours

    @property
    def reshard_after_forward(self) -> bool | int | str:
        """What a program passes for it."""
        if not self.kept_over:
            return self.strategy not in KEEPS_VALUES
        return "node" if self.kept_over == self.neighbours else self.kept_over

    @property
    def label(self) -> str:
        """The strategy, for tables, with what stays after a forward."""
        return f"{self.strategy}, {self.reshard_after_forward}" if self.kept_over else self.strategy

    @property
    def chunk_numel(self) -> int | None:
        """Most elements that are gathered and reduced together, as ``units.build.chunk_numel``; None for any number."""
        if not self.node_bytes or self.neighbours == 1 or self.granularity != 1:
            return None
        return CHUNK_NUMEL if self.nodes_of_shards == self.replicas == 1 else CHUNK_NUMEL_OF_NODES

    @property
    def sums_by_node(self) -> bool:
        """Whether sums of hpcfsdp in 16 bits go between nodes once for each node, by communicators of their own."""
        separate = self.comm_options.separate_reductions is not False
        return separate and self.shards > self.nodes_of_shards > 1


@dataclass(frozen=True)
class Optimizer:
    """What an optimizer holds and takes."""

    values: int  # tensors of its state for each parameter, of the parameter's dtype
    scratch: int  # tensors of the size of the parameters that its step takes for a moment
    on_device: int = 0  # scalars for each parameter on the device
    # loop_scratch, loop_passes: on a CPU, where torch steps one tensor after the other: tensors of the size of one that
    # it takes for a moment, and values that it reads or writes for each element
    loop_scratch: int = 0
    loop_passes: int = 0


OPTIMIZERS = {
    "adamw": Optimizer(2, 1, loop_scratch=2, loop_passes=20),
    "adamw-fused": Optimizer(2, 0, 1, loop_passes=7),
    "sgd-momentum": Optimizer(1, 0, loop_passes=8),
    "sgd": Optimizer(0, 0, loop_passes=3),
    "none": Optimizer(0, 0),
}
"""torch's, with their defaults: on an accelerator "adamw" computes a square root of all parameters at once."""


def allocated(numel: int, dtype: torch.dtype) -> int:
    """Return bytes that an allocator gives for so many elements."""
    return round_up(numel * dtype.itemsize, ALLOCATED_BYTES)


@dataclass(frozen=True)
class PlannedGroup:
    """Parameters of a unit that are gathered together."""

    members: tuple[int, ...]  # their indices in the unit
    params: tuple[Param, ...]  # the same
    dtypes: Dtypes  # of them
    layout: FlatLayout | DTensorLayout  # of all ranks
    stepped: tuple[int, ...]  # elements of each tensor that the optimizer steps on the rank that has most
    trained: bool  # whether they get gradients

    @property
    def gathered_numel(self) -> int:
        """Elements that modules compute with, with gaps."""
        return self.layout.whole_numel if isinstance(self.layout, DTensorLayout) else self.layout.padded_numel


def groups_of(params: Sequence[Param], setup: Setup) -> tuple[PlannedGroup, ...]:
    """Return the groups of a unit's parameters: by dtype, by whether they are trained, and by size on CPUs."""
    found: dict[tuple[torch.dtype, bool], list[int]] = {}
    for index, param in enumerate(params):
        found.setdefault((param.dtype, param.trained), []).append(index)
    groups = []
    for indices in found.values():
        following = iter(indices)
        for part in parts_of([params[index] for index in indices], setup.chunk_numel):
            groups.append(_group({next(following): param for param in part}, setup))
    return tuple(groups)


def _group(members: Mapping[int, Param], setup: Setup) -> PlannedGroup:
    params = tuple(members.values())
    dtype, trained = params[0].dtype, params[0].trained
    dtypes = setup.precision.dtypes(dtype)
    if setup.comm_options.sums_by == "backend":
        dtypes = replace(dtypes, accumulate=dtypes.reduce)
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
    return PlannedGroup(tuple(members), params, dtypes, layout, stepped, trained)


def layouts_of(units: Sequence[PlannedUnit], setup: Setup) -> list[tuple[PlannedGroup, ...]]:
    """Return the groups of each unit; those of units that are alike are made once."""
    alike = {params: groups_of(params, setup) for params in dict.fromkeys(unit.params for unit in units)}
    return [alike[unit.params] for unit in units]
