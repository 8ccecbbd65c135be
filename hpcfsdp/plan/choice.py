"""The setups that a model could run with on a machine, the one to take, and what to change about its units."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace

from hpcfsdp.errors import UsageError
from hpcfsdp.plan.footprint import Footprint
from hpcfsdp.plan.layouts import Setup
from hpcfsdp.plan.step_time import Machine, StepTime, replay
from hpcfsdp.plan.traced_step import PlannedUnit, TracedStep


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


def candidates(steps: Sequence[TracedStep], common: Setup, machine: Machine, limits: Limits) -> tuple[Candidate, ...]:
    """Return all setups of a job, the fastest first; those that do not fit come last, the smallest first.

    Args:
        steps: of the same model, with and without checkpointed activations.
        common: what all setups have in common: front, precision, optimizer, offload, accumulation.

    Raises:
        UsageError: no setup keeps to the limits, whatever memory it takes.
    """
    chosen = [one for one in steps if limits.checkpointed in (None, one.checkpointed)]
    found = []
    for strategy, shards in _ways(common, machine, limits):
        setup = replace(
            common,
            strategy=strategy,
            shards=shards,
            replicas=limits.ranks // shards,
            nodes_of_shards=max(1, shards // machine.ranks_per_node),
        )
        for step in chosen:
            footprint, time = replay(step, setup, machine)
            fits = footprint.peak.nbytes <= limits.usable_bytes
            found.append(Candidate(setup, step.checkpointed, footprint, time, fits))
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


def _order(candidate: Candidate) -> tuple[bool, float, int, int]:
    """Return a key that sorts fast ones first; those that do not fit last, the smallest of them first."""
    peak = candidate.footprint.peak.nbytes
    return (not candidate.fits, candidate.time.seconds if candidate.fits else 0.0, peak, candidate.setup.shards)


def _ways(common: Setup, machine: Machine, limits: Limits) -> Iterator[tuple[str, int]]:
    """Yield strategies and numbers of shards: a copy lies within a node, or fills whole nodes."""
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
    steps: Sequence[TracedStep], smallest: Candidate, machine: Machine, limits: Limits
) -> tuple[int, list[str]]:
    """Return how many bytes are missing where nothing fits, and what would help."""
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
        step = next(each for each in steps if each.checkpointed is smallest.checkpointed)
        offloaded, _ = replay(step, replace(smallest.setup, offload=True), machine)
        if offloaded.peak.nbytes <= limits.usable_bytes:
            advice.append("offload shards and the optimizer to host memory (--offload), which is slower")
    if kinds["activations"] > peak.nbytes // 4:
        advice.append("fewer or shorter sequences for each rank (--batch, --sequence), with more backwards in a step")
    if kinds["gathered"] + kinds["unit gradients"] > peak.nbytes // 4:
        advice.append("smaller units (--wrap)")
    return missing, advice


_LATENCY_SHARE = 0.5
"""Of the time of a gather: a larger unit would take hardly longer."""
_EXPOSED_SHARE = 0.1
_MEMORY_SHARE = 0.4
"""Of the peak, for units that are gathered and their gradients."""
_ROOT_FACTOR = 2


def remarks(step: TracedStep, candidate: Candidate, usable_bytes: int) -> Iterator[str]:
    """Yield what is worth changing about the units, with the remedy.

    Args:
        usable_bytes: memory of a device: where most of it is left, no unit is too large.
    """
    units, time, setup = step.units, candidate.time, candidate.setup
    inner = units[:-1]
    if not inner and units[-1].numel:
        yield (
            f"the model is one unit of {units[-1].numel:,} parameters: all of them are gathered at once, and nothing "
            "overlaps: name the classes to wrap with --wrap"
        )
    waits = time.exposed_s > _EXPOSED_SHARE * time.seconds
    if setup.shards > 1 and waits:
        yield from _small_units(inner, candidate)
    if candidate.footprint.peak.nbytes > usable_bytes // 2:
        yield from _large_units(units, candidate)
    if waits:
        largest = max(
            ("gathers of parameters", time.gathers),
            ("reductions of gradients", time.reductions),
            ("all-reduces over replicas", time.replication),
            key=lambda pair: pair[1].seconds,
        )
        part = "latency" if largest[1].latency_s > largest[1].transfer_s else "bandwidth"
        yield (
            f"{time.exposed_s / time.seconds:.0%} of the step waits for communication, most of it for the {part} of "
            f"{largest[0]}: more tokens in a step of each rank hide more of it"
        )


def _small_units(inner: tuple[PlannedUnit, ...], candidate: Candidate) -> Iterator[str]:
    counts = Counter((unit.kind, unit.numel) for unit in inner if unit.numel)
    costs = {(unit.kind, unit.numel): cost for unit, cost in zip(inner, candidate.time.by_unit, strict=False)}
    for (kind, numel), count in counts.items():
        gather = costs[kind, numel].gather
        if count > 1 and gather.seconds and gather.latency_s / gather.seconds > _LATENCY_SHARE:
            together = min(count, math.ceil(gather.latency_s / max(gather.transfer_s, 1e-12)))
            yield (
                f"units of {kind} ({numel:,} parameters) are too small for {candidate.setup.shards} ranks: "
                f"{gather.latency_s / gather.seconds:.0%} of the {gather.seconds * 1e3:.1f} ms of a gather is latency: "
                f"make one unit of {together} of them, or share each copy among fewer ranks"
            )


def _large_units(units: tuple[PlannedUnit, ...], candidate: Candidate) -> Iterator[str]:
    peak = candidate.footprint.peak
    in_use = peak.bytes_by_kind["gathered"] + peak.bytes_by_kind["unit gradients"]
    *inner, root = units
    largest = max(inner, key=lambda unit: unit.numel, default=root)
    if candidate.setup.shards > 1 and inner and root.numel > _ROOT_FACTOR * largest.numel:
        yield (
            f"the model itself holds {root.numel:,} parameters outside of its units, which stay gathered for the whole "
            "step: make its embedding and its head units of their own"
        )
    elif candidate.setup.shards > 1 and inner and in_use > _MEMORY_SHARE * peak.nbytes:
        yield (
            f"units of {largest.kind} ({largest.numel:,} parameters) are large: two of them with their gradients take "
            f"{in_use / peak.nbytes:.0%} of the peak: wrap smaller modules"
        )


def program(step: TracedStep, candidate: Candidate) -> tuple[str, ...]:
    """Return the lines of Python that make this setup, with the front that was planned."""
    setup = candidate.setup
    kinds = list(dict.fromkeys(unit.kind for unit in step.units[:-1]))
    mixed = ", ".join(
        f"{name}={dtype}"
        for name, dtype in (("param_dtype", setup.precision.compute), ("reduce_dtype", setup.precision.reduce))
        if dtype is not None
    )
    hybrid = setup.replicas > 1 and setup.shards > 1
    mesh = [f"mesh = world.mesh(replicate={setup.replicas}, shard={setup.shards})"] if hybrid else []
    build = _with_class if setup.front == "class" else _with_fully_shard
    return (*mesh, *build(candidate, kinds, mixed, hybrid))


def run_config(candidate: Candidate) -> tuple[str, ...]:
    """Return the keys of ``hpcfsdp train`` that make this setup, as YAML."""
    return "mesh:", f"  replicate: {candidate.setup.replicas}"


def _with_class(candidate: Candidate, kinds: list[str], mixed: str, hybrid: bool) -> list[str]:
    setup = candidate.setup
    options = [f"sharding_strategy=ShardingStrategy.{setup.strategy}"]
    if hybrid:
        options.append("device_mesh=mesh")
    if kinds:
        options.append(f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(kinds)}}})")
    if mixed:
        options.append(f"mixed_precision=MixedPrecision({mixed})")
    if setup.offload:
        options.append("cpu_offload=CPUOffload(True)")
    if setup.granularity != 1:
        options.append(f"granularity={setup.granularity!r}")
    lines = ["model = FullyShardedDataParallel(", "    model,", *(f"    {option}," for option in options), ")"]
    if candidate.checkpointed and kinds:  # inside of the units
        lines += [
            "for unit in FullyShardedDataParallel.fsdp_modules(model):",
            f"    apply_activation_checkpointing(unit.module, check_fn={_is_one_of(kinds)})",
        ]
    return lines


def _with_fully_shard(candidate: Candidate, kinds: list[str], mixed: str, hybrid: bool) -> list[str]:
    setup = candidate.setup
    options = ["mesh=mesh" if hybrid else "mesh=world.mesh(shard=None)"]
    if mixed:
        options.append(f"mp_policy=MixedPrecisionPolicy({mixed})")
    if setup.offload:
        options.append("offload_policy=CPUOffloadPolicy()")
    lines = ["options = dict(", *(f"    {option}," for option in options), ")"]
    if kinds:
        keep = "reshard_after_forward=False, " if setup.keeps_values else ""
        if candidate.checkpointed:  # inside of the units: these are the wrappers
            lines.append(f"apply_activation_checkpointing(model, check_fn={_is_one_of(kinds)})")
        types = "CheckpointWrapper" if candidate.checkpointed else _types(kinds)
        lines += [
            "for module in list(model.modules()):",
            f"    if isinstance(module, {types}):",
            f"        fully_shard(module, {keep}**options)",
        ]
    return [*lines, "fully_shard(model, **options)"]


def _types(kinds: list[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _is_one_of(kinds: list[str]) -> str:
    return f"lambda module: isinstance(module, {_types(kinds)})"
