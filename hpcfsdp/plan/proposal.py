"""A whole plan: what a program or ``hpcfsdp plan`` asks for, everything that it gets, and a picture of it."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from hpcfsdp.comm.communicator import CommOptions
from hpcfsdp.errors import UsageError, nearest
from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.plan.choice import SAME_TIME, Candidate, Disk, Request, candidates, pick, way_out
from hpcfsdp.plan.footprint import KINDS
from hpcfsdp.plan.layouts import KEEPS_VALUES, OPTIMIZERS, STRATEGIES, Setup, layouts_of
from hpcfsdp.plan.traced_step import PlannedUnit, TracedStep
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.figure import Figure


_LATENCY_SHARE = 0.5  # a larger unit would take hardly longer where latency is this part of the time of a gather
_EXPOSED_SHARE = 0.1
_MEMORY_SHARE = 0.4  # the part of the peak that gathered units and their gradients may take
_ROOT_FACTOR = 2


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a training."""

    # of a file: parameters, buffers and the optimizer's state, each once. The format adds about 1 KiB for each tensor,
    # and checksums.
    nbytes: int
    seconds: float  # in which it is written
    rank_bytes: float  # that each of the writing ranks writes
    interval_s: float  # between two of them
    share: float  # of the time that training waits for them, unless they are written in the background
    per_day: float  # files in a day
    bytes_per_day: float  # that these take without retention


def saving(step: TracedStep, setup: Setup, *, nodes: int, disk: Disk, interval_s: float) -> Saving:
    """Return what checkpoints take, every `interval_s` seconds from so many nodes."""
    values = OPTIMIZERS[setup.optimizer].values
    params = [param for unit in step.units for param in unit.params]
    nbytes = sum(param.numel * param.dtype.itemsize * (1 + values * param.trained) for param in params)
    nbytes += step.buffer_bytes
    seconds = nbytes / min(nodes * disk.node_bytes_per_s, disk.bytes_per_s)
    every = interval_s + seconds
    return Saving(
        nbytes, seconds, nbytes / setup.ranks, interval_s, seconds / every, 86400 / every, nbytes * 86400 / every
    )


OF_RUNS = ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")
"""The strategies that ``mesh.replicate`` of ``hpcfsdp train`` stands for."""


@dataclass(frozen=True)
class Proposal:
    """A plan."""

    request: Request  # that it answers
    step: TracedStep  # the step of one rank, as in `best`
    best: Candidate  # the setup to take: the fastest that fits, or the smallest if none fits
    all: tuple[Candidate, ...]  # every setup, see ``choice.candidates``
    reason: str  # why `best`
    missing_bytes: int  # 0 if it fits
    remarks: tuple[str, ...]  # about units; or what would help, if nothing fits
    program: tuple[str, ...]  # lines of Python
    saving: Saving  # its checkpoints

    @property
    def notes(self) -> tuple[str, ...]:
        """What was assumed about the model."""
        truths = self.step.truths
        asked = f"the step asks for {truths} truth value(s) of tensors, which count as true" if truths else ""
        moved = "the time to copy shards from and to host memory is not counted" if self.best.setup.offload else ""
        return tuple(filter(None, (self.request.source.note, asked, moved)))

    @cached_property
    def padding(self) -> float:
        """Elements of gaps and padding in `best`, as a share of those of all parameters."""
        groups = [group for of_unit in layouts_of(self.step.units, self.best.setup) for group in of_unit]
        numel = self.step.numel
        return sum(group.layout.padded_numel for group in groups) / numel - 1 if numel else 0.0

    @property
    def tokens_per_s(self) -> float:
        """Tokens of all ranks; 0 where the step is not known."""
        setup, seconds = self.best.setup, self.best.time.seconds
        return self.step.tokens * setup.ranks * setup.accumulation / seconds if seconds else 0.0


def propose(request: Request) -> Proposal:
    """Plan a training. It takes a few seconds for the largest models, and as long for any number of ranks."""
    _check(request)
    source, common, machine = request.source, request.common, request.machine
    both = source.loss_of is not None and request.checkpointed is None
    ways = (False, True) if both else (bool(request.checkpointed),)
    steps = [source.step(compute=common.precision.compute, param=request.param, checkpointed=way) for way in ways]
    if source.loss_of is None:
        steps = [replace(each, checkpointed=bool(request.checkpointed)) for each in steps]
    found = candidates(request, steps)
    best = pick(found)
    step = next(each for each in steps if each.checkpointed is best.checkpointed)
    missing = 0
    if best.fits:
        reason, texts = _reason(best, found, step), tuple(remarks(step, best, request.usable_bytes))
    else:
        missing, help_ = way_out(request, step, best)
        reason, texts = "nothing fits; this takes the least memory", tuple(help_)
    nodes = request.ranks // machine.ranks_per_node
    files = saving(step, best.setup, nodes=nodes, disk=request.disk, interval_s=request.interval_s)
    keys = "mesh:", f"  replicate: {best.setup.replicas}"  # of hpcfsdp train, as YAML
    lines = keys if request.of_run else program(step, best)
    return Proposal(request, step, best, found, reason, missing, texts, lines, files)


def _check(request: Request) -> None:
    per_node = request.machine.ranks_per_node
    if request.ranks < 1 or per_node < 1:
        raise UsageError("plan: --ranks and --ranks-per-node must be positive")
    if request.ranks % per_node:
        raise UsageError(
            f"plan: --ranks {request.ranks} is not a multiple of --ranks-per-node {per_node}: give whole nodes, for "
            f"example --ranks {-(-request.ranks // per_node) * per_node}"
        )
    for strategy in request.strategies:
        if strategy not in STRATEGIES:
            raise UsageError(
                f"plan: there is no strategy {strategy!r}{nearest(strategy, STRATEGIES)}; take one of "
                f"{', '.join(STRATEGIES)}"
            )
        if request.of_run and strategy not in OF_RUNS:
            raise UsageError(f"plan: hpcfsdp train has no key for {strategy}: take one of {', '.join(OF_RUNS)}")
    if request.memory_bytes <= 0 or not 0 <= request.headroom < 1:
        raise UsageError("plan: --device-memory must be positive, and --headroom from 0 to below 1")


def _reason(best: Candidate, found: tuple[Candidate, ...], step: TracedStep) -> str:
    """Return why a setup is the best, next to the usual ones."""
    if not step.flops:
        return "of those that fit, it communicates in the shortest time"
    fastest = found[0].time.seconds
    parts = ["the fastest of those that fit"]
    if best.time.seconds > fastest:
        better = "a single copy takes the least memory" if best.setup.replicas == 1 else "its copies lie on fewer ranks"
        parts = [f"within {SAME_TIME:.0%} of the fastest, and {better}"]
    others = [each for each in found if each.setup.strategy == "FULL_SHARD" and each is not best and each.fits]
    if others and best.setup.replicas > 1:
        slower = others[0].time.seconds / best.time.seconds
        parts.append(f"FULL_SHARD over all ranks takes {slower:.2f}x as long")
    if best.setup.kept_over:
        unlike = replace(best.setup, kept_over=0)
        freed = [each for each in found if each.setup == unlike and each.checkpointed is best.checkpointed]
        kept = "each node" if best.setup.reshard_after_forward == "node" else f"{best.setup.kept_over} ranks"
        parts.append(f"values stay on {kept} from a forward to its backward")
        if freed:
            parts[-1] += f": to gather them again takes {freed[0].time.seconds / best.time.seconds:.2f}x as long"
    plain = [each for each in found if not each.checkpointed and each.setup == best.setup]
    if best.checkpointed and plain and not plain[0].fits:
        parts.append("it does not fit without checkpointed activations")
    return "; ".join(parts)


def remarks(step: TracedStep, candidate: Candidate, usable_bytes: int) -> Iterator[str]:
    """Yield what is worth changing about the units; where most of a device's `usable_bytes` are left, none is large."""
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
    chosen, usual = setup.comm_options, CommOptions()
    options = [f"{name}={value!r}" for name, value in vars(chosen).items() if value != getattr(usual, name)]
    build = _with_class if setup.front == "class" else _with_fully_shard
    made = build(candidate, kinds, mixed, hybrid)
    if options:
        made.insert(1, f"    comm_options=CommOptions({', '.join(options)}),")
        made[1:3] = reversed(made[1:3])  # the model comes first
    return (*mesh, *made)


def _with_class(candidate: Candidate, kinds: list[str], mixed: str, hybrid: bool) -> list[str]:
    setup = candidate.setup
    options = [f"sharding_strategy=ShardingStrategy.{setup.strategy}"]
    if hybrid:
        options.append("device_mesh=mesh")
    if kinds:
        options.append(f"auto_wrap_policy=ModuleWrapPolicy({{{', '.join(kinds)}}})")
    if mixed:
        options.append(f"mixed_precision=MixedPrecision({mixed})")
    if setup.kept_over:
        options.append(_reshard_argument(setup))
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
        keep = setup.strategy in KEEPS_VALUES or setup.kept_over
        kept = f"{_reshard_argument(setup)}, " if keep else ""
        if candidate.checkpointed:  # inside of the units: these are the wrappers
            lines.append(f"apply_activation_checkpointing(model, check_fn={_is_one_of(kinds)})")
        types = "CheckpointWrapper" if candidate.checkpointed else _types(kinds)
        lines += [
            "for module in list(model.modules()):",
            f"    if isinstance(module, {types}):",
            f"        fully_shard(module, {kept}**options)",
        ]
    return [*lines, "fully_shard(model, **options)"]


def _reshard_argument(setup: Setup) -> str:
    value = setup.reshard_after_forward
    return f'reshard_after_forward="{value}"' if isinstance(value, str) else f"reshard_after_forward={value}"


def _types(kinds: list[str]) -> str:
    return kinds[0] if len(kinds) == 1 else f"({', '.join(kinds)})"


def _is_one_of(kinds: list[str]) -> str:
    return f"lambda module: isinstance(module, {_types(kinds)})"


def as_json(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as plain values for JSON: bytes, seconds, names."""
    request, step, best = proposal.request, proposal.step, proposal.best
    machine = request.machine
    sizes = Counter((unit.kind, unit.numel) for unit in step.units)
    return {
        "model": {
            "name": step.name,
            "parameters": step.numel,
            "units": [{"kind": kind, "parameters": numel, "count": count} for (kind, numel), count in sizes.items()],
            "tokens_per_rank": step.tokens,
            "flops_per_rank": step.flops * best.setup.accumulation,
            "saved_bytes": step.saved_bytes,
            "notes": list(proposal.notes),
        },
        "machine": {
            "ranks": request.ranks,
            "ranks_per_node": machine.ranks_per_node,
            "nodes": request.ranks // machine.ranks_per_node,
            "device_memory_bytes": request.memory_bytes,
            "headroom": request.headroom,
            "flops": machine.flops,
            "links": asdict(machine.links),
        },
        "fits": best.fits,
        "missing_bytes": proposal.missing_bytes,
        "recommendation": {
            **candidate_json(best),
            "granularity": best.setup.granularity,
            "padding": proposal.padding,
            "reason": proposal.reason,
            "remarks": list(proposal.remarks),
            "program": list(proposal.program),
        },
        "tokens_per_s": proposal.tokens_per_s,
        "checkpoint": asdict(proposal.saving),
        "candidates": [candidate_json(each) for each in proposal.all],
    }


def candidate_json(candidate: Candidate) -> dict[str, Any]:
    """Return one setup as plain values."""
    setup, time, memory = candidate.setup, candidate.time, candidate.footprint
    return {
        "strategy": setup.strategy,
        "reshard_after_forward": setup.reshard_after_forward,
        "front": setup.front,
        "shards": setup.shards,
        "replicas": setup.replicas,
        "activation_checkpointing": candidate.checkpointed,
        "offload": setup.offload,
        "fits": candidate.fits,
        "memory": {
            "peak_bytes": memory.peak.nbytes,
            "peak_at": memory.peak.what,
            "peak_by_kind": _named(memory.peak.bytes_by_kind),
            "at_rest_bytes": memory.at_rest.nbytes,
            "at_rest_by_kind": _named(memory.at_rest.bytes_by_kind),
            "host_by_kind": _named(memory.host),
        },
        "step": {
            "seconds": time.seconds,
            "compute_s": time.compute_s,
            "optimizer_s": time.optimizer_s,
            "exposed_communication_s": time.exposed_s,
        },
        "traffic": {
            name: {**asdict(cost), "seconds": cost.seconds}
            for name, cost in (
                ("gathers", time.gathers),
                ("reductions", time.reductions),
                ("replication", time.replication),
                ("total", time.traffic),
            )
        },
    }


def _named(by_kind: Any) -> dict[str, int]:
    return {kind.replace(" ", "_"): nbytes for kind, nbytes in by_kind.items()}


_GIB = 1 << 30
_MOST_BARS = 16


def draw(proposal: Proposal) -> Figure:
    """Return a figure with two panels."""
    figure = new_figure(12.0, 5.0)
    figure.suptitle(shown(proposal.step.name), parse_math=False)
    axes = figure.add_subplot(1, 2, 1)
    course, request = proposal.best.footprint.course, proposal.request
    kinds = [kind for kind in KINDS if any(moment.bytes_by_kind[kind] for moment in course)]
    heights = [[moment.bytes_by_kind[kind] / _GIB for moment in course] for kind in kinds]
    axes.stackplot(range(len(course)), heights, labels=kinds, step="mid")
    axes.axhline(request.memory_bytes / _GIB, color="black", linewidth=1, label="device memory")
    axes.set_xlabel("events of a step")
    axes.set_ylabel("GiB of the rank with the most")
    axes.set_title("memory", fontsize="medium")
    axes.legend(fontsize="x-small", loc="upper right")
    axes, bars = figure.add_subplot(1, 2, 2), proposal.all[:_MOST_BARS]
    names = [
        f"{setup.label} {setup.replicas} x {setup.shards}{', recomputed' if each.checkpointed else ''}"
        for each, setup in ((each, each.setup) for each in bars)
    ]
    left = [0.0] * len(bars)
    for label, values in (
        ("computation", [each.time.compute_s for each in bars]),
        ("exposed communication", [each.time.exposed_s for each in bars]),
        ("optimizer", [each.time.optimizer_s for each in bars]),
    ):
        axes.barh(names, values, left=left, label=label, alpha=0.9)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, each in enumerate(bars):
        if not each.fits:
            axes.annotate("does not fit", (left[place], place), fontsize="xx-small", va="center")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set_xlabel("seconds of a step")
    axes.set_title("setups: replicas x shards", fontsize="medium")
    axes.legend(fontsize="x-small")
    return figure
