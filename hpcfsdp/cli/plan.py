"""``hpcfsdp plan``: memory, traffic and time of a training before it runs. One process, without MPI."""

from __future__ import annotations

import argparse
import math
import re
import textwrap
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpcfsdp.cli.arguments import Parser, positive, size_in_bytes
from hpcfsdp.cli.printing import Brief, plain_value, print_json, print_line, print_table
from hpcfsdp.errors import UsageError
from hpcfsdp.text.terminal import readable_bytes

if TYPE_CHECKING:
    from hpcfsdp.plan.choice import Candidate, Request
    from hpcfsdp.plan.models import ModelSource
    from hpcfsdp.plan.proposal import Proposal
_SHOWN = 8
_LEAST_MEMORY = 1 << 20
_NOT_OF_RUNS = ("fully_shard", "yes", True)
"""Values of options for which ``hpcfsdp train`` has no key."""
_DTYPES = {"fp32": "float32", "bf16": "bfloat16", "fp16": "float16"}


def _granularity(text: str) -> int | str:
    return text if text in ("row", "whole") else positive(text)


def _count(text: str) -> float:
    found = re.fullmatch(r"(\d+(?:\.\d+)?(?:[eE]\+?\d+)?)([KMBT]?)", text)
    value = float(found[1]) * 1000.0 ** " KMBT".index(found[2] or " ") if found else 0.0
    if not 1 <= value < 1e16:
        raise argparse.ArgumentTypeError(f"{text} is not a number of parameters, such as 7e9 or 7B")
    return value


def _reshard(text: str) -> int | str:
    return text if text in ("yes", "node") else positive(text)


parser = Parser(
    "plan",
    "Predict the memory of the worst rank, the traffic and the time of a step, and the size of checkpoints, for "
    "all strategies and meshes, and recommend one. Needs neither MPI nor an accelerator. The model is given in one "
    "of four ways: a run.yaml of hpcfsdp train, --params and --layers, --factory, or --config.",
    "hpcfsdp plan --params 7e9 --layers 32 --ranks 64 --ranks-per-node 8 --device-memory 80GiB",
    "hpcfsdp plan --params 70e9 --layers 80 --ranks 16384 --device h100 --json > plan.json",
    "hpcfsdp plan run.yaml --ranks 16 --ranks-per-node 4 --device a100",
    "hpcfsdp plan --factory my_project.models:make --wrap Block --ranks 32 --device mi250x",
    "hpcfsdp plan --config Llama-3.1-8B/config.json --ranks 64 --sequence 8192 --plot plan.svg",
    "hpcfsdp plan --params 7B --layers 32 --ranks 64 --links links.json    # of hpcfsdp doctor --json",
)
add = parser.add_argument
add("path", metavar="RUN_YAML", nargs="?", help="configuration of hpcfsdp train")
add("--params", type=_count, metavar="N", help="parameters of a decoder-only transformer, as 7e9 or 7B")
add("--layers", type=positive, metavar="N", help="its blocks")
add("--width", type=positive, metavar="N", help="its embedding; default: what fits the parameters")
add("--heads", type=positive, metavar="N", help="its attention heads; default: of 128 elements")
add("--vocabulary", type=positive, metavar="N", help="its tokens; default: 32000")
add("--factory", metavar="MODULE:FUNCTION", help="a function that returns a module, or a module and its inputs")
add("--config", metavar="JSON", help="config.json of a transformers model, or its folder")
add("--wrap", metavar="CLASS,...", help="classes that become units; default: the largest list of equal modules")
add("--batch", type=positive, metavar="N", help="sequences of a backward on each rank; default: 1")
add("--sequence", type=positive, metavar="N", help="tokens of a sequence; default: 4096")
add("--accumulation", type=positive, metavar="N", help="backwards in a step; default: 1, or that of RUN_YAML")
add("--ranks", type=positive, metavar="N", required=True, help="of the job")
add("--ranks-per-node", type=positive, metavar="N", help="default: 8, or all ranks if there are fewer")
add("--device", metavar="NAME", default="h100", help="a100, h100, h200, b200, mi250x, mi300x, pvc, cpu; default: h100")
add("--device-memory", type=size_in_bytes, metavar="SIZE", help="of one rank's device; default: that of --device")
add("--headroom", type=float, metavar="SHARE", default=0.1, help="of it to leave free; default: 0.1")
add("--peak-tflops", type=float, metavar="N", help="of one rank; default: those of --device")
add("--efficiency", type=float, metavar="SHARE", default=0.5, help="of the peak while computing; default: 0.5")
add("--dtype", choices=tuple(_DTYPES), help="to compute in; default: bf16, for RUN_YAML fp32")
add("--param-dtype", choices=tuple(_DTYPES), default="fp32", help="of parameters and optimizer; default: fp32")
add("--reduce-dtype", choices=tuple(_DTYPES), help="of gradients between ranks; default: that of --dtype")
add("--optimizer", metavar="NAME", default="adamw", help="adamw, adamw-fused, sgd-momentum, sgd, none")
add("--front", choices=("class", "fully_shard"), default="class", help="FullyShardedDataParallel, or fully_shard")
add("--sums-by", choices=("hpcfsdp", "backend"), default="hpcfsdp", help="who adds up gradients over ranks")
add("--one-communicator", action="store_true", help="reductions share that of gathers, as by default on AMD")
add("--granularity", type=_granularity, metavar="BLOCK", help="row, whole, or elements that stay on one rank")
add("--strategy", metavar="NAME", help="plan this one alone, such as HYBRID_SHARD")
add("--shard", type=positive, metavar="N", help="plan so many ranks for each copy of the model alone")
_KEPT = "plan this way of what a forward frees alone: yes, node (it stays there), or over how many ranks it stays"
add("--reshard-after-forward", type=_reshard, metavar="HOW", help=_KEPT)
add("--recompute", choices=("yes", "no"), help="plan with or without checkpointed activations alone")
add("--offload", action="store_true", help="keep shards and optimizer in host memory")
add("--link-within", metavar="LINK", help="within nodes: GB/s,microseconds of a rank, or a name as nvlink4, xgmi")
add("--link-between", metavar="LINK", help="between nodes: the same, as 22,8, or a name as ndr, hdr, slingshot")
add("--links", metavar="JSON", type=Path, help="measured by hpcfsdp doctor, or bench plan, with --json")
_WRITTEN = "written by a node in a second; default: 2GB"
add("--node-disk", type=size_in_bytes, metavar="SIZE", default=2 * 10**9, help=_WRITTEN)
add("--disk", type=size_in_bytes, metavar="SIZE", default=100 * 10**9, help="the same by all nodes; default: 100GB")
add("--save-every", type=float, metavar="MINUTES", default=60.0, help="between checkpoints; default: 60")
add("--memory-checkpoints", action="store_true", help="count the memory of CheckpointManager(memory_every=...)")
add("--no-activations", action="store_true", help="plan parameters alone: do not run the model on the meta device")
add("--plot", metavar="SVG", type=Path, help="draw memory and times (also .png or .pdf)")


def main(arguments: Sequence[str]) -> int:
    """Plan, print, and return the exit code."""
    options = parser.parse_args(arguments)
    request = _request(options)  # after the options are known to be right: torch takes a second

    from hpcfsdp.plan.proposal import as_json, propose  # with torch, as above

    proposal = propose(request)
    if options.plot is not None:
        from hpcfsdp.output.figure_file import write_figure  # with matplotlib
        from hpcfsdp.plan.proposal import draw  # the same

        write_figure(draw(proposal), options.plot)
    if options.json:
        print_json(plain_value(as_json(proposal)))
    else:
        _print(proposal)
    return 0


def _request(options: argparse.Namespace) -> Request:
    given = [name for name in ("path", "params", "factory", "config") if getattr(options, name) is not None]
    if len(given) != 1:
        raise UsageError(
            "plan: give the model in one way: RUN_YAML, --params with --layers, --factory, or --config"
            + (f", not {' and '.join(given)}" if given else "")
        )
    if options.params is not None and options.layers is None:
        raise UsageError("plan: --params needs --layers")
    _refuse_unused(options, given[0])
    for name in ("headroom", "efficiency", "peak_tflops", "save_every"):
        value = getattr(options, name)
        if value is not None and not ((math.isfinite(value) and value > 0) or (name == "headroom" and value == 0)):
            raise UsageError(f"plan: --{name.replace('_', '-')} must be a positive number, not {value:g}")
    if options.device_memory is not None and options.device_memory < _LEAST_MEMORY:
        size = options.device_memory
        raise UsageError(f"plan: --device-memory is {size} byte(s), too little for a device: did you mean {size}GiB?")
    if options.efficiency > 1:
        raise UsageError(f"plan: --efficiency is a share of the peak, at most 1, not {options.efficiency:g}")
    per_node = options.ranks_per_node or min(8, options.ranks)

    import torch  # takes a second

    from hpcfsdp.comm.communicator import CommOptions  # with torch
    from hpcfsdp.plan.choice import Disk, Request  # with torch
    from hpcfsdp.plan.layouts import Precision, Setup  # the same
    from hpcfsdp.plan.links import Links, device_named, link_of, measured_links, measured_rates  # the same
    from hpcfsdp.plan.proposal import OF_RUNS
    from hpcfsdp.plan.step_time import Machine

    device = device_named(options.device)
    rates: tuple[float, float] | None = None
    links = Links(link_of(options.link_within or device.within), link_of(options.link_between or device.between))
    if options.links is not None:
        measured, rates = measured_links(options.links, links), measured_rates(options.links)
        links = Links(
            links.within if options.link_within else measured.within,
            links.between if options.link_between else measured.between,
        )
    source, accumulation, in_memory = _source(options, per_node)
    compute = getattr(torch, _DTYPES[options.dtype or ("fp32" if options.path else "bf16")])
    param = getattr(torch, _DTYPES[options.param_dtype])
    reduce = getattr(torch, _DTYPES[options.reduce_dtype]) if options.reduce_dtype else None
    peak = options.peak_tflops * 1e12 if options.peak_tflops else device.flops[8 * compute.itemsize]
    reached = peak * options.efficiency
    flops, memory_rate = rates or (reached, device.memory_bytes_per_s)
    kept = {"yes": 0, "node": per_node}.get(options.reshard_after_forward, options.reshard_after_forward)
    common = Setup(
        front=options.front,
        precision=Precision(None if compute == param else compute, reduce),
        optimizer=options.optimizer,
        offload=options.offload,
        accumulation=accumulation,
        memory_copies=0 if not in_memory else 2 if options.ranks <= per_node else 4,
        granularity=options.granularity or 1,
        comm_options=CommOptions(
            sums_by=options.sums_by, separate_reductions=False if options.one_communicator else None
        ),
    )
    strategies = () if options.strategy is None else (options.strategy,)
    checkpointed = None if options.recompute is None else options.recompute == "yes"
    if options.path is not None:  # what hpcfsdp train can do
        strategies, checkpointed = strategies or OF_RUNS, False
    return Request(
        source,
        options.ranks,
        Machine(per_node, links, reached if options.peak_tflops else flops, memory_rate, options.device == "cpu"),
        options.device_memory or device.memory_bytes,
        options.headroom,
        common,
        param,
        strategies,
        options.shard,
        kept,
        checkpointed,
        Disk(options.node_disk, options.disk),
        60 * options.save_every,
        of_run=options.path is not None,
    )


def _refuse_unused(options: argparse.Namespace, given: str) -> None:
    """Options that would have no effect on the model in question."""
    of_numbers = ("layers", "width", "heads", "vocabulary")
    unused = [] if given == "params" else [name for name in of_numbers if getattr(options, name) is not None]
    if given == "path":
        of_run = ("batch", "sequence", "accumulation", "wrap", "reshard_after_forward")
        unused += [name for name in of_run if getattr(options, name) is not None]
        unused += [name for name in ("front", "recompute", "offload") if getattr(options, name) in _NOT_OF_RUNS]
        unused += ["granularity"] if options.granularity else []
    if options.front == "fully_shard" and options.granularity:
        raise UsageError("plan: --granularity has no effect with --front fully_shard, which cuts rows: leave it out")
    if given == "params" and options.wrap:
        unused.append("wrap")
    if unused:
        names = ", ".join(f"--{name.replace('_', '-')}" for name in unused)
        where = {"path": "RUN_YAML", "params": "--params"}.get(given, f"--{given}")
        raise UsageError(f"plan: {names} has no effect with {where}: leave it out")


def _source(options: argparse.Namespace, per_node: int) -> tuple[ModelSource, int, bool]:
    """Return the model, the backwards in a step, and whether there are checkpoints in memory."""
    from hpcfsdp.plan import models  # with torch

    batch, sequence = options.batch or 1, options.sequence or 4096
    wrap = tuple(filter(None, (options.wrap or "").split(",")))
    accumulation, in_memory = options.accumulation or 1, options.memory_checkpoints
    if options.path is not None:
        source, run = models.from_run(options.path, options.ranks, per_node)
        accumulation, in_memory = run.train.accumulation, in_memory or run.checkpoint.memory_every > 0
    elif options.params is not None:
        sizes = {"width": options.width, "heads": options.heads, "vocabulary": options.vocabulary or 32000}
        shape = models.shape_of(options.params, options.layers, **sizes)
        source = models.from_numbers(shape, batch=batch, sequence=sequence)
    elif options.factory is not None:
        source = models.from_factory(options.factory, batch=options.batch, sequence=options.sequence, wrap=wrap)
    else:
        source = models.from_transformers(options.config, batch=batch, sequence=sequence, wrap=wrap)
    if options.no_activations:
        source = replace(source, loss_of=None, tokens=0, note="activations and computation are not counted")
    return source, accumulation, in_memory


def _print(proposal: Proposal) -> None:
    request, step, best = proposal.request, proposal.step, proposal.best
    machine = request.machine
    print_line(f"model      {step.name}: {step.numel:,} parameters, {len(step.units)} units")
    for note in proposal.notes:
        print_line(f"note       {note}")
    print_line(
        f"machine    {request.ranks // machine.ranks_per_node} nodes x {machine.ranks_per_node} ranks, "
        f"{readable_bytes(request.memory_bytes)} each, {machine.flops / 1e12:.3g} TFLOP/s reached"
    )
    for name, link in (("within", machine.links.within), ("between", machine.links.between)):
        print_line(
            f"links      {name} nodes {link.bytes_per_s / 1e9:.3g} GB/s, {link.latency_s * 1e6:.3g} us ({link.source})"
        )
    print_line()
    _print_memory(best)
    print_line()
    _print_traffic(best)
    print_line()
    _print_step(proposal)
    print_line()
    usable = request.memory_bytes * (1 - request.headroom)
    setup = best.setup
    print_line(
        f"{'recommended' if best.fits else 'does not fit'}: {setup.label}, {setup.replicas} replica(s) x "
        f"{setup.shards} shard(s), {'with' if best.checkpointed else 'without'} checkpointed activations"
        f"{', offloaded' if setup.offload else ''}"
    )
    for part in proposal.reason.split("; "):
        print_line(f"  {part}")
    if setup.granularity != 1:
        print_line(f"  granularity {setup.granularity}: padding of {proposal.padding:.1%} of the parameters")
    peak = readable_bytes(best.footprint.peak.nbytes)
    if best.fits:
        print_line(f"  takes {peak} of {readable_bytes(int(usable))} ({request.headroom:.0%} are left free)")
    else:
        print_line(f"  takes {peak}, {readable_bytes(proposal.missing_bytes)} more than may be used; it would help:")
    for remark in proposal.remarks:
        for line in textwrap.wrap(remark, 80, initial_indent="  - ", subsequent_indent="    "):
            print_line(line)
    print_line()
    for line in proposal.program:
        print_line(f"  {line}")
    print_line()
    _print_candidates(proposal)


def _print_memory(best: Candidate) -> None:
    rest, peak, host = best.footprint.at_rest, best.footprint.peak, best.footprint.host
    kinds = {kind: (rest.bytes_by_kind[kind], size, host.get(kind, 0)) for kind, size in peak.bytes_by_kind.items()}
    kinds |= {kind: (0, 0, size) for kind, size in host.items() if kind not in kinds}
    kinds["total"] = rest.nbytes, peak.nbytes, sum(host.values())
    columns = ["memory of the worst rank", "between steps", "peak", *(["host"] if host else [])]
    rows = [[kind, *map(readable_bytes, sizes)][: len(columns)] for kind, sizes in kinds.items()]
    print_table(columns, rows, right=columns[1:])
    print_line(f"the peak is at: {peak.what}")


def _print_traffic(best: Candidate) -> None:
    time = best.time
    kinds = (
        ("all-gathers", time.gathers),
        ("reduce-scatters", time.reductions),
        ("all-reduces over replicas", time.replication),
        ("total", time.traffic),
    )
    columns = ["traffic of a rank, a step", "calls", "within nodes", "between", "seconds"]
    rows = []
    for name, cost in kinds:
        sizes = readable_bytes(round(cost.within_bytes)), readable_bytes(round(cost.between_bytes))
        rows += [[name, str(cost.calls), *sizes, _seconds(cost.seconds)]] if cost.calls else []
    print_table(columns, rows, right=columns[1:])


def _print_step(proposal: Proposal) -> None:
    time, files, step = proposal.best.time, proposal.saving, proposal.step
    if step.flops:
        print_line(
            f"step       {_seconds(time.seconds)} s: computation {_seconds(time.compute_s)}, exposed communication "
            f"{_seconds(time.exposed_s)}, optimizer {_seconds(time.optimizer_s)}"
        )
        print_line(f"speed      {proposal.tokens_per_s:,.0f} tokens/s")
    else:
        print_line(f"step       {_seconds(time.traffic.seconds)} s of communication; computation is not known")
    print_line(
        f"checkpoint {readable_bytes(files.nbytes)} in {_seconds(files.seconds)} s; every "
        f"{files.interval_s / 60:g} min {files.share:.2%} of the time, {files.per_day:.0f} a day, "
        f"{readable_bytes(round(files.bytes_per_day))}"
    )


def _print_candidates(proposal: Proposal) -> None:
    rows = []
    for each in proposal.all[:_SHOWN]:
        setup, peak = each.setup, readable_bytes(each.footprint.peak.nbytes)
        recompute, fits = ("yes" if value else "no" for value in (each.checkpointed, each.fits))
        mesh = setup.label, str(setup.replicas), str(setup.shards)
        rows.append([*mesh, recompute, peak, _seconds(each.time.seconds), fits])
    columns = ["strategy", "replicas", "shards", "recompute", "peak", "step s", "fits"]
    print_table(columns, rows, right=columns[1:6])


def _seconds(value: float) -> str:
    return Brief(f"{value:.4g}", f"{value:.3g}")
