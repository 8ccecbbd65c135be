"""The setups that a model could run with on a machine, and the one to take."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcfsdp.errors import UsageError
from hpcfsdp.plan.footprint import Footprint
from hpcfsdp.plan.layouts import Setup
from hpcfsdp.plan.step_time import Machine, StepTime, replay as replayed
from hpcfsdp.plan.workload import Workload


@dataclass(frozen=True)
class Candidate:
    """A setup with what it takes.

    Attributes:
        checkpointed: whether units compute their forward again in the backward.
        fits: whether its peak is within the memory that a rank may use.
    """

    setup: Setup
    checkpointed: bool
    footprint: Footprint
    time: StepTime
    fits: bool


@dataclass(frozen=True)
class Limits:
    """What candidates have to keep to.

    Attributes:
        ranks: of the job.
        usable_bytes: memory of a device without what is left free.
        strategies: the only ones to consider; empty for all.
        shards: the only number of ranks that share a copy; None for all.
        checkpointed: the only way to consider; None for both.
    """

    ranks: int
    usable_bytes: int
    strategies: tuple[str, ...] = ()
    shards: int | None = None
    checkpointed: bool | None = None


def candidates(workloads: Sequence[Workload], common: Setup, machine: Machine, limits: Limits) -> tuple[Candidate, ...]:
    """All setups of a job, the fastest first; those that do not fit come last, the smallest first.

    Args:
        workloads: of the same model, with and without checkpointed activations.
        common: what all setups have in common: front, precision, optimizer, offload, accumulation.

    Raises:
        UsageError: no setup keeps to the limits, whatever memory it takes.
    """
    chosen = [one for one in workloads if limits.checkpointed in (None, one.checkpointed)]
    found = []
    for strategy, shards in _ways(common, machine, limits):
        setup = replace(
            common,
            strategy=strategy,
            shards=shards,
            replicas=limits.ranks // shards,
            nodes_of_shards=max(1, shards // machine.ranks_per_node),
        )
        for workload in chosen:
            footprint, time = replayed(workload, setup, machine)
            fits = footprint.peak.nbytes <= limits.usable_bytes
            found.append(Candidate(setup, workload.checkpointed, footprint, time, fits))
    if not found:
        raise UsageError(
            f"plan: {' or '.join(limits.strategies) or 'no strategy'} with {limits.shards or 'any number of'} ranks "
            f"for a copy is not possible on {limits.ranks} ranks: the number must divide the ranks, and a hybrid "
            "strategy needs several copies of several ranks each"
        )
    return tuple(sorted(found, key=_order))


SAME_TIME = 0.02
"""Relative differences in time that the model cannot resolve."""


def pick(found: Sequence[Candidate]) -> Candidate:
    """The setup to take, of those that are about as fast as the first.

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


def _order(candidate: Candidate) -> tuple[bool, float, int, int]:
    """Fast ones first; those that do not fit last, the smallest of them first."""
    peak = candidate.footprint.peak.nbytes
    return (not candidate.fits, candidate.time.seconds if candidate.fits else 0.0, peak, candidate.setup.shards)


def _ways(common: Setup, machine: Machine, limits: Limits) -> Iterator[tuple[str, int]]:
    """Strategies and numbers of shards: a copy lies within a node, or fills whole nodes."""
    ranks, per_node = limits.ranks, machine.ranks_per_node
    sizes = [n for n in _divisors(ranks) if per_node % n == 0 or n % per_node == 0]
    if limits.shards is not None:
        if ranks % limits.shards:
            raise UsageError(f"plan: --shard {limits.shards} does not divide the {ranks} ranks")
        sizes = [limits.shards]
    for shards in sizes:
        for strategy in _strategies(shards, ranks, common):
            if not limits.strategies or strategy in limits.strategies:
                yield strategy, shards


def _strategies(shards: int, ranks: int, common: Setup) -> tuple[str, ...]:
    if shards == ranks:
        return ("FULL_SHARD",) if ranks == 1 else ("FULL_SHARD", "SHARD_GRAD_OP")
    if shards == 1:
        return ("NO_SHARD",) if common.front == "class" else ()
    return ("HYBRID_SHARD", "_HYBRID_SHARD_ZERO2")


def _divisors(number: int) -> list[int]:
    small = [n for n in range(1, int(number**0.5) + 1) if number % n == 0]
    return sorted({*small, *(number // n for n in small)})


def way_out(
    workloads: Sequence[Workload], smallest: Candidate, machine: Machine, limits: Limits
) -> tuple[int, list[str]]:
    """How many bytes are missing where nothing fits, and what would help."""
    peak = smallest.footprint.peak
    missing = peak.nbytes - limits.usable_bytes
    advice = []
    kinds = peak.bytes_by_kind
    shared = kinds["parameters"] + kinds["optimizer"] + kinds["gradients"]
    if peak.what == "optimizer step":
        shared += kinds["scratch"]
    room = limits.usable_bytes - (peak.nbytes - shared)
    fully = smallest.setup.shards == limits.ranks
    if room > 0 and fully:
        needed = -(-limits.ranks * shared // room)
        needed = -(-needed // machine.ranks_per_node) * machine.ranks_per_node
        advice.append(f"about {needed} ranks instead of {limits.ranks}")
    elif not fully:
        advice.append("share each copy among more ranks (--shard)")
    else:
        advice.append("more ranks alone do not help: units and activations of one rank are too large")
    if limits.checkpointed is False and kinds["activations"] > peak.nbytes // 4:
        advice.append("checkpoint activations (--recompute yes)")
    if not smallest.setup.offload:
        workload = next(each for each in workloads if each.checkpointed is smallest.checkpointed)
        offloaded, _ = replayed(workload, replace(smallest.setup, offload=True), machine)
        if offloaded.peak.nbytes <= limits.usable_bytes:
            advice.append("offload shards and the optimizer to host memory (--offload), which is slower")
    if kinds["activations"] > peak.nbytes // 4:
        advice.append("fewer or shorter sequences for each rank (--batch, --sequence), with more backwards in a step")
    if kinds["gathered"] + kinds["unit gradients"] > peak.nbytes // 4:
        advice.append("smaller units (--wrap)")
    return missing, advice
