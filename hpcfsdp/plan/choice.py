"""What to plan, the setups that a model could run with on a machine, and the one to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

import torch

from hpcfsdp.errors import UsageError
from hpcfsdp.plan.footprint import Footprint
from hpcfsdp.plan.layouts import KEEPS_VALUES, Setup
from hpcfsdp.plan.models import ModelSource
from hpcfsdp.plan.step_time import Machine, StepTime, replay
from hpcfsdp.plan.traced_step import TracedStep


@dataclass(frozen=True)
class Disk:
    """A parallel file system."""

    node_bytes_per_s: float = 2e9  # that one node writes
    bytes_per_s: float = 100e9  # that all nodes write together at most


@dataclass(frozen=True)
class Request:
    """What to plan."""

    source: ModelSource  # the model
    ranks: int  # of the job; a multiple of ``machine.ranks_per_node``
    machine: Machine  # its nodes, links and devices
    memory_bytes: int  # of a device
    headroom: float = 0.1  # the part of it that is left to the driver, to communication libraries and to fragmentation
    # front, precision, optimizer, offload, accumulation and granularity of all setups
    common: Setup = field(default_factory=Setup)
    param: torch.dtype | None = None  # the dtype of the parameters; None for that of the model
    # strategies, shards, kept_over, checkpointed: to consider no others; empty or None for all
    strategies: tuple[str, ...] = ()
    shards: int | None = None
    kept_over: int | None = None  # the same of ``Setup.kept_over``
    checkpointed: bool | None = None
    # disk, interval_s: for checkpoints
    disk: Disk = field(default_factory=Disk)
    interval_s: float = 3600.0
    of_run: bool = False  # whether ``hpcfsdp train`` runs it: then the setup is given by keys of its configuration

    @property
    def usable_bytes(self) -> int:
        """Memory of a device without what is left free."""
        return int(self.memory_bytes * (1 - self.headroom))


@dataclass(frozen=True)
class Candidate:
    """A setup with what it takes."""

    setup: Setup
    checkpointed: bool  # whether units compute their forward again in the backward
    footprint: Footprint
    time: StepTime
    fits: bool  # whether its peak is within the memory that a rank may use


def candidates(request: Request, steps: Sequence[TracedStep]) -> tuple[Candidate, ...]:
    """Return all setups of a job with each of `steps`, the fastest first; last come those that do not fit, by size."""
    found = []
    for strategy, shards, kept_over in _ways(request):
        setup = replace(
            request.common,
            strategy=strategy,
            shards=shards,
            replicas=request.ranks // shards,
            nodes_of_shards=max(1, shards // request.machine.ranks_per_node),
            kept_over=kept_over,
            node_bytes=request.memory_bytes * request.machine.ranks_per_node if request.machine.on_cpu else 0,
        )
        for step in steps:
            footprint, time = replay(step, setup, request.machine)
            fits = footprint.peak.nbytes <= request.usable_bytes
            found.append(Candidate(setup, step.checkpointed, footprint, time, fits))
    if not found:
        raise UsageError(
            f"plan: {' or '.join(request.strategies) or 'no strategy'} with {request.shards or 'any number of'} ranks "
            f"for a copy is not possible on {request.ranks} ranks: the number must divide the ranks, and a hybrid "
            "strategy needs several copies of several ranks each"
        )

    def order(each: Candidate) -> tuple[bool, float, int, int]:
        seconds = each.time.seconds if each.fits else 0.0
        return not each.fits, seconds, each.footprint.peak.nbytes, each.setup.shards

    return tuple(sorted(found, key=order))


SAME_TIME = 0.02  # relative differences in time that the model cannot resolve


def pick(found: Sequence[Candidate]) -> Candidate:
    """Return the setup to take, of those that are about as fast as the first.

    That of one copy if it is among them: it takes the least memory, and no mesh. Otherwise one whose copies lie on the
    fewest ranks, which depends least on the network. Activations are checkpointed only if that saves time or is needed.
    """
    first = found[0]
    if not first.fits:
        return first
    alike = [each for each in found if each.fits and each.time.seconds <= (1 + SAME_TIME) * first.time.seconds]
    return min(
        alike,
        key=lambda each: (each.setup.replicas > 1, each.setup.shards, each.checkpointed, each.footprint.peak.nbytes),
    )


def _ways(request: Request) -> Iterator[tuple[str, int, int]]:
    """Yield strategies, numbers of shards, and ranks over which values stay from a forward to its backward.

    A copy lies within a node, or fills whole nodes; then its values may stay on each node.
    """
    ranks, per_node = request.ranks, request.machine.ranks_per_node
    sizes = [n for n in range(1, ranks + 1) if ranks % n == 0 and (per_node % n == 0 or n % per_node == 0)]
    if request.shards is not None:
        if ranks % request.shards:
            raise UsageError(f"plan: --shard {request.shards} does not divide the {ranks} ranks")
        sizes = [request.shards]
    for shards in sizes:
        if shards == ranks:
            strategies = ["FULL_SHARD", "SHARD_GRAD_OP"][: 1 if ranks == 1 else 2]
        elif shards == 1:
            strategies = ["NO_SHARD"] if request.common.front == "class" else []
        else:
            strategies = ["HYBRID_SHARD", "_HYBRID_SHARD_ZERO2"]
        for strategy in strategies:
            if not request.strategies or strategy in request.strategies:
                yield from ((strategy, shards, kept) for kept in _keepers(request, strategy, shards))


def _keepers(request: Request, strategy: str, shards: int) -> Iterator[int]:
    per_node, asked = request.machine.ranks_per_node, request.kept_over
    if strategy in KEEPS_VALUES or request.of_run:
        yield from () if asked else (0,)
    elif asked is not None:  # on devices each rank would keep all of its own
        is_way = asked < shards and shards % max(asked, 1) == 0 and (asked != 1 or request.machine.on_cpu)
        yield from (asked,) if is_way else ()
    else:
        yield from (0, per_node) if shards > per_node > 1 else (0,)


def way_out(request: Request, step: TracedStep, smallest: Candidate) -> tuple[int, list[str]]:
    """Return how many bytes are missing where nothing fits, and what would help; `step` is that of `smallest`."""
    peak = smallest.footprint.peak
    advice = []
    kinds = peak.bytes_by_kind
    shared = kinds["parameters"] + kinds["optimizer"] + kinds["gradients"]
    if peak.what == "optimizer step":
        shared += kinds["scratch"]
    room = request.usable_bytes - (peak.nbytes - shared)
    fully = smallest.setup.shards == request.ranks
    if room > 0 and fully:
        per_node = request.machine.ranks_per_node
        needed = -(-request.ranks * shared // room)
        needed = -(-needed // per_node) * per_node
        advice.append(f"about {needed} ranks instead of {request.ranks}")
    elif not fully:
        advice.append("share each copy among more ranks (--shard)")
    else:
        advice.append("more ranks alone do not help: units and activations of one rank are too large")
    if request.checkpointed is False and kinds["activations"] > peak.nbytes // 4:
        advice.append("checkpoint activations (--recompute yes)")
    if not smallest.setup.offload:
        offloaded, _ = replay(step, replace(smallest.setup, offload=True), request.machine)
        if offloaded.peak.nbytes <= request.usable_bytes:
            advice.append("offload shards and the optimizer to host memory (--offload), which is slower")
    if kinds["activations"] > peak.nbytes // 4:
        advice.append("fewer or shorter sequences for each rank (--batch, --sequence), with more backwards in a step")
    if kinds["gathered"] + kinds["unit gradients"] > peak.nbytes // 4:
        advice.append("smaller units (--wrap)")
    return peak.nbytes - request.usable_bytes, advice
