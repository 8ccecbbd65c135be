"""A whole plan: what a program or ``hpcfsdp plan`` asks for, everything that it gets, and a picture of it."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import torch

from hpcfsdp.errors import UsageError, nearest
from hpcfsdp.output.figure_file import new_figure
from hpcfsdp.plan.choice import (
    SAME_TIME,
    Candidate,
    Limits,
    candidates,
    pick,
    program,
    remarks,
    run_config,
    way_out,
)
from hpcfsdp.plan.footprint import KINDS
from hpcfsdp.plan.layouts import OPTIMIZERS, STRATEGIES, Layouts, Setup
from hpcfsdp.plan.models import ModelSource
from hpcfsdp.plan.step_time import Machine
from hpcfsdp.plan.traced_step import TracedStep
from hpcfsdp.text.terminal import shown

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure


@dataclass(frozen=True)
class Disk:
    """A parallel file system.

    Attributes:
        node_bytes_per_s: that one node writes.
        bytes_per_s: that all nodes write together at most.
    """

    node_bytes_per_s: float = 2e9
    bytes_per_s: float = 100e9


@dataclass(frozen=True)
class Saving:
    """Checkpoints of a training.

    Attributes:
        nbytes: of a file: parameters, buffers and the optimizer's state, each once. The format adds about 1 KiB for
            each tensor, and checksums.
        seconds: in which it is written.
        rank_bytes: that each of the writing ranks writes.
        interval_s: between two of them.
        share: of the time that training waits for them, unless they are written in the background.
        per_day: files in a day.
        bytes_per_day: that these take without retention.
    """

    nbytes: int
    seconds: float
    rank_bytes: float
    interval_s: float
    share: float
    per_day: float
    bytes_per_day: float


def saving(step: TracedStep, setup: Setup, *, nodes: int, disk: Disk, interval_s: float) -> Saving:
    """Return what checkpoints take, every `interval_s` seconds from so many nodes."""
    values = OPTIMIZERS[setup.optimizer].values
    nbytes = step.buffer_bytes
    for unit in step.units:
        for param in unit.params:
            nbytes += param.numel * param.dtype.itemsize * (1 + values * param.trained)
    seconds = nbytes / min(nodes * disk.node_bytes_per_s, disk.bytes_per_s)
    every = interval_s + seconds
    return Saving(
        nbytes,
        seconds,
        nbytes / setup.ranks,
        interval_s,
        seconds / every,
        86400 / every,
        nbytes * 86400 / every,
    )


OF_RUNS = ("FULL_SHARD", "HYBRID_SHARD", "NO_SHARD")
"""The strategies that ``mesh.replicate`` of ``hpcfsdp train`` stands for."""


@dataclass(frozen=True)
class Request:
    """What to plan.

    Attributes:
        source: the model.
        ranks: of the job; a multiple of ``machine.ranks_per_node``.
        machine: its nodes, links and devices.
        memory_bytes: of a device.
        headroom: the part of it that is left to the driver, to communication libraries and to fragmentation.
        common: front, precision, optimizer, offload, accumulation and granularity of all setups.
        param: the dtype of the parameters; None for that of the model.
        strategies, shards, checkpointed: to consider no others; empty or None for all.
        disk, interval_s: for checkpoints.
        of_run: whether ``hpcfsdp train`` runs it: then the setup is given by keys of its configuration.
    """

    source: ModelSource
    ranks: int
    machine: Machine
    memory_bytes: int
    headroom: float = 0.1
    common: Setup = field(default_factory=Setup)
    param: torch.dtype | None = None
    strategies: tuple[str, ...] = ()
    shards: int | None = None
    checkpointed: bool | None = None
    disk: Disk = field(default_factory=Disk)
    interval_s: float = 3600.0
    of_run: bool = False


@dataclass(frozen=True)
class Proposal:
    """A plan.

    Attributes:
        request: that it answers.
        step: the step of one rank, as in `best`.
        best: the setup to take: the fastest that fits, or the smallest if none fits.
        all: every setup, see ``choice.candidates``.
        reason: why `best`.
        missing_bytes: 0 if it fits.
        remarks: about units; or what would help, if nothing fits.
        program: lines of Python.
        saving: its checkpoints.
    """

    request: Request
    step: TracedStep
    best: Candidate
    all: tuple[Candidate, ...]
    reason: str
    missing_bytes: int
    remarks: tuple[str, ...]
    program: tuple[str, ...]
    saving: Saving

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
        return Layouts(self.step.units, self.best.setup).padding

    @property
    def tokens_per_s(self) -> float:
        """Of all ranks; 0 where the step is not known."""
        setup, seconds = self.best.setup, self.best.time.seconds
        return self.step.tokens * setup.ranks * setup.accumulation / seconds if seconds else 0.0


def propose(request: Request) -> Proposal:
    """Plan a training. Pure, and the same for any number of ranks; takes a few seconds for the largest models.

    Raises:
        UsageError: counts do not divide, or the model cannot be made or traced.
    """
    _check(request)
    source, common, machine = request.source, request.common, request.machine
    ways = (
        (False, True) if source.loss_of is not None and request.checkpointed is None else (bool(request.checkpointed),)
    )
    steps = [source.step(compute=common.precision.compute, param=request.param, checkpointed=way) for way in ways]
    if source.loss_of is None:
        steps = [replace(each, checkpointed=bool(request.checkpointed)) for each in steps]
    usable = int(request.memory_bytes * (1 - request.headroom))
    limits = Limits(request.ranks, usable, request.strategies, request.shards, request.checkpointed)
    found = candidates(steps, common, machine, limits)
    best = pick(found)
    step = next(each for each in steps if each.checkpointed is best.checkpointed)
    missing = 0
    if best.fits:
        reason, texts = _reason(best, found, step), tuple(remarks(step, best, usable))
    else:
        missing, help_ = way_out(steps, best, machine, limits)
        reason, texts = "nothing fits; this takes the least memory", tuple(help_)
    nodes = request.ranks // machine.ranks_per_node
    files = saving(step, best.setup, nodes=nodes, disk=request.disk, interval_s=request.interval_s)
    lines = run_config(best) if request.of_run else program(step, best)
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
    plain = [each for each in found if not each.checkpointed and each.setup == best.setup]
    if best.checkpointed and plain and not plain[0].fits:
        parts.append("it does not fit without checkpointed activations")
    return "; ".join(parts)


def as_json(proposal: Proposal) -> dict[str, Any]:
    """Return a proposal as plain values for JSON: bytes, seconds, names."""
    request, step, best = proposal.request, proposal.step, proposal.best
    machine = request.machine
    sizes: dict[tuple[str, int], int] = {}
    for unit in step.units:
        sizes[unit.kind, unit.numel] = sizes.get((unit.kind, unit.numel), 0) + 1
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
    _draw_memory(figure.add_subplot(1, 2, 1), proposal)
    _draw_times(figure.add_subplot(1, 2, 2), proposal)
    return figure


def _draw_memory(axes: Axes, proposal: Proposal) -> None:
    course, request = proposal.best.footprint.course, proposal.request
    kinds = [kind for kind in KINDS if any(moment.bytes_by_kind[kind] for moment in course)]
    heights = [[moment.bytes_by_kind[kind] / _GIB for moment in course] for kind in kinds]
    axes.stackplot(range(len(course)), heights, labels=kinds, step="mid")
    axes.axhline(request.memory_bytes / _GIB, color="black", linewidth=1, label="device memory")
    axes.set_xlabel("events of a step")
    axes.set_ylabel("GiB of the rank with the most")
    axes.set_title("memory", fontsize="medium")
    axes.legend(fontsize="x-small", loc="upper right")


def _draw_times(axes: Axes, proposal: Proposal) -> None:
    shown = proposal.all[:_MOST_BARS]
    names = [
        f"{setup.strategy} {setup.replicas} x {setup.shards}{', recomputed' if each.checkpointed else ''}"
        for each, setup in ((each, each.setup) for each in shown)
    ]
    left = [0.0] * len(shown)
    for label, values in (
        ("computation", [each.time.compute_s for each in shown]),
        ("exposed communication", [each.time.exposed_s for each in shown]),
        ("optimizer", [each.time.optimizer_s for each in shown]),
    ):
        axes.barh(names, values, left=left, label=label, alpha=0.9)
        left = [before + value for before, value in zip(left, values, strict=True)]
    for place, each in enumerate(shown):
        if not each.fits:
            axes.annotate("does not fit", (left[place], place), fontsize="xx-small", va="center")
    axes.invert_yaxis()
    axes.tick_params(axis="y", labelsize="xx-small")
    axes.set_xlabel("seconds of a step")
    axes.set_title("setups: replicas x shards", fontsize="medium")
    axes.legend(fontsize="x-small")
