"""Remarks about units that are too small or too large, and the lines of a program that express a setup."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator

from hpcfsdp.plan.choice import Candidate
from hpcfsdp.plan.workload import PlannedUnit, Workload

_LATENCY_SHARE = 0.5
"""Of the time of a gather: a larger unit would take hardly longer."""
_EXPOSED_SHARE = 0.1
_MEMORY_SHARE = 0.4
"""Of the peak, for units that are gathered and their gradients."""
_ROOT_FACTOR = 2


def remarks(workload: Workload, candidate: Candidate, usable_bytes: int) -> Iterator[str]:
    """What is worth changing about the units, with the remedy.

    Args:
        usable_bytes: memory of a device: where most of it is left, no unit is too large.
    """
    units, time, setup = workload.units, candidate.time, candidate.setup
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
            ("gathers", time.gathers),
            ("reductions", time.reductions),
            ("replicas", time.replication),
            key=lambda pair: pair[1].seconds,
        )
        part = "latency" if largest[1].latency_s > largest[1].transfer_s else "bandwidth"
        yield (
            f"{time.exposed_s / time.seconds:.0%} of the step waits for communication, most of it for the {part} of "
            f"{_WORDS[largest[0]]}: more tokens in a step of each rank hide more of it"
        )


_WORDS = {
    "gathers": "gathers of parameters",
    "reductions": "reductions of gradients",
    "replicas": "all-reduces over replicas",
}


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


def program(workload: Workload, candidate: Candidate) -> tuple[str, ...]:
    """The lines of Python that make this setup, with the front that was planned."""
    setup = candidate.setup
    kinds = list(dict.fromkeys(unit.kind for unit in workload.units[:-1]))
    mixed = ", ".join(
        f"{name}={dtype}"
        for name, dtype in (("param_dtype", setup.precision.compute), ("reduce_dtype", setup.precision.reduce))
        if dtype is not None
    )
    hybrid = setup.replicas > 1 and setup.shards > 1
    mesh = [f"mesh = world.mesh(replicate={setup.replicas}, shard={setup.shards})"] if hybrid else []
    build = _with_class if setup.front == "class" else _with_rows
    return (*mesh, *build(candidate, kinds, mixed, hybrid))


def run_config(candidate: Candidate) -> tuple[str, ...]:
    """The keys of ``hpcfsdp train`` that make this setup, as YAML."""
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


def _with_rows(candidate: Candidate, kinds: list[str], mixed: str, hybrid: bool) -> list[str]:
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
