"""Steps on an accelerator: time, memory, launches and communication, of the engine and of stock torch, in one run.

Several processes communicate over the backend of their devices. One process stands for one rank of several: it computes
what that rank would. hpcfsdp then works on its fake communicator, which copies as many bytes as a rank would receive,
and torch on its "fake" process group, which moves none.
"""

from __future__ import annotations

import datetime
import functools
import gc
import json
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.bench.harness import Ratio, Table, Times, in_turn, ratio_cell, time_cells, times_json
from hpcfsdp.bench.step import FLOOR, NAMES, OWN, OWN_ROWS, STOCK, make_model, quiet, training_step
from hpcfsdp.checkpoint.format.index import merge_ranges
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import UsageError
from hpcfsdp.world import World

DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}
_IMAGINED = (FLOOR, "fsdp1", "fsdp2", OWN)
"""Engines of one process: DDP reads results that torch's fake group does not have."""
_CALLS = 4
"""Steps in a run. The program may run ahead of the device within it."""
_WARMUP, _TRACED = 3, 2


class EngineFigures(NamedTuple):
    """What one engine takes for a step.

    Attributes:
        peak_bytes: on the device, with parameters, gradients and the optimizer's state; of the rank with the most.
        activity: of rank 0 in a step; None where torch's profiler does not know the device.
        loss: of rank 0 in the last step.
    """

    times: Times
    peak_bytes: int
    activity: Activity | None
    loss: float


def measure(
    world: World | None = None,
    *,
    layers: int,
    width: int,
    context: int,
    batch: int,
    dtype: str,
    repeats: int,
    imagined_ranks: int,
) -> Table:
    """Measure steps of all engines in turn. Collective over all ranks.

    Without a world this process alone makes torch's default group, computes the part of one of `imagined_ranks`, and
    destroys the group. Each rank has `batch` sequences of `context` tokens in a step.
    """
    if accelerator.device_type() is None:
        raise UsageError("bench: gpu measures on an accelerator, and this process sees none")
    device = accelerator.current_device() if world is None else world.device
    ranks = imagined_ranks if world is None else world.size
    options = {"layers": layers, "width": width, "context": context, "batch": batch, "device": device, "ranks": ranks}
    options |= {"dtype": DTYPES[dtype], "rank": 0 if world is None else world.rank}
    with torch.device("meta"):
        size = sum(param.numel() for param in make_model(layers, width, context).parameters())
    hardware = accelerator.describe(device)
    software = {"torch": torch.__version__, **accelerator.versions(device)}
    about = (
        f"{datetime.date.today()}, {1 if world is None else ranks} x {hardware.name} "
        f"({hardware.nbytes / (1 << 30):.0f} GiB), {', '.join(map(' '.join, software.items()))}. "
        f"{f'One process as rank 0 of {ranks}' if world is None else f'{ranks} ranks'}, {layers} layers of width "
        f"{width} ({size / 1e6:.0f} million parameters), {batch} x {context} tokens on each rank, {dtype}; {repeats} "
        f"runs of {_CALLS} steps."
    )
    if world is not None:
        return table(about, *_measured(world.host, None, options, repeats))
    _compat.init_fake_group(ranks, device)
    try:
        own = FakeCommunicator(0, ranks, device=device)
        found = table(about, *_measured(FakeCommunicator(), own, options, repeats))
        return found._replace(facts=[("ranks", ranks)])
    finally:
        dist.destroy_process_group()


def table(about: str, figures: Mapping[str, EngineFigures], skipped: Mapping[str, str]) -> Table:
    """Return a row for each engine, with its time as a multiple of the floor, and hpcfsdp's time as a multiple of it.

    `about` is the date, the hardware, versions, and the size of the step; `skipped` says why engines are missing.
    """
    own = figures[OWN]
    as_json = times_json({engine: one.times for engine, one in figures.items()}, own.times)
    rows = []
    for engine, one in figures.items():
        doing, cells = one.activity, ("",) * 4
        if doing is not None:
            exposed_part, idle_part = (f"{100 * s / doing.seconds:.1f}%" for s in (doing.exposed_s, doing.idle_s))
            exposed_part = exposed_part if doing.communication_s > 0 else ""
            cells = f"{doing.launches:.0f}", f"{doing.synchronisations:.1f}", exposed_part, idle_part
        ratios = ratio_cell(one.times, figures[FLOOR].times), ratio_cell(own.times, one.times)
        rows.append((engine, *time_cells(one.times), *ratios, f"{one.peak_bytes / (1 << 30):.2f} GiB", *cells))
        as_json[engine] |= {"peak_bytes": one.peak_bytes, "activity": doing and doing._asdict(), "loss": one.loss}
    columns = (
        *("engine", "step", "min-max", "x floor", "hpcfsdp / it", "peak memory"),
        *("launches", "host waits", "exposed communication", "idle"),
    )
    notes = [f"{engine} was skipped: {reason}" for engine, reason in skipped.items()]
    compared = [
        Ratio.of_times(f"{NAMES[OWN]} on a device: step time / {NAMES[engine]}", own.times, one.times)
        for engine, one in figures.items()
        if engine not in (OWN, OWN_ROWS)
    ]
    value = {"about": about, "engines": as_json, "skipped": skipped}
    return Table(columns, rows, value, notes, heading=about, ratios=compared)


def _measured(
    comm: Communicator, own: Communicator | None, options: dict[str, Any], repeats: int
) -> tuple[dict[str, EngineFigures], dict[str, str]]:
    """Return figures of all engines, and why others were left out. Collective over `comm`.

    `own` is hpcfsdp's communicator where it is not that of the world, `options` are those of ``training_step``.
    """
    steps: dict[str, Callable[[], object]] = {}
    found: dict[str, tuple[int, Activity | None]] = {}
    losses: dict[str, torch.Tensor] = {}
    skipped: dict[str, str] = {}
    for engine in (FLOOR, *STOCK, OWN, OWN_ROWS) if own is None else _IMAGINED:
        group = own if engine == OWN else dist.group.WORLD
        try:
            with quiet():
                steps[engine], *found[engine] = _prepared(comm, engine, group, options, losses)
        except RuntimeError as error:  # no memory, or something that the device or its group does not know
            if engine == OWN:
                raise
            skipped[engine] = str(error).splitlines()[0]
    finish = functools.partial(accelerator.synchronize, options["device"])
    times = in_turn(comm, steps, repeats=repeats, warmup=1, calls=_CALLS, finish=finish)
    figures = {engine: EngineFigures(times[engine], *one, float(losses[engine])) for engine, one in found.items()}
    del steps
    gc.collect()  # models in circles hold the group
    return figures, skipped


def _prepared(
    comm: Communicator, engine: str, group: Any, options: dict[str, Any], losses: dict[str, torch.Tensor]
) -> tuple[Callable[[], object], int, Activity | None]:
    """Return a step of an engine, which notes its loss, the peak of its memory, and what the device does in it."""
    device = options["device"]
    gc.collect()
    accelerator.synchronize(device)
    before = torch.accelerator.memory_allocated(device)  # of the engines before this one
    take = training_step(engine, group, **options)

    def step() -> None:
        losses[engine] = take()

    for _ in range(_WARMUP):
        step()
    accelerator.synchronize(device)
    torch.accelerator.reset_peak_memory_stats(device)
    step()
    accelerator.synchronize(device)
    peak = torch.accelerator.max_memory_allocated(device) - before
    return step, max(comm.all_gather_object(peak)), traced(step, _TRACED, device)


TimeRange = tuple[float, float]
"""Begin and end of a piece of work."""
_STEPS = "hpcfsdp steps"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_APIS = ("_runtime", "_driver")
_COMMUNICATION = "ccl"
"""The names of the kernels of NCCL, RCCL, oneCCL, HCCL hold it."""


class Activity(NamedTuple):
    """What a device did, for each step.

    Attributes:
        launches: of kernels, copies and fills of memory.
        synchronisations: calls in which the host waited for the device.
        seconds: from the first work on the device to the last, under the profiler, which slows steps down.
        communication_s: in which a kernel that communicates ran.
        exposed_s: the part of it in which no other kernel ran.
        idle_s: in which nothing ran.
    """

    launches: float
    synchronisations: float
    seconds: float
    communication_s: float
    exposed_s: float
    idle_s: float


def length(spans: Iterable[TimeRange]) -> float:
    """Return how much time is in any of the intervals."""
    return sum(end - begin for begin, end in merge_ranges(spans))


def exposed(spans: Sequence[TimeRange], others: Sequence[TimeRange]) -> float:
    """Return how much time is in any of the intervals, and in none of the others."""
    return length([*spans, *others]) - length(others)


def activity(events: Iterable[Mapping[str, Any]], steps: int) -> Activity | None:
    """Sum up the events of a trace (Chrome's format, microseconds) of so many steps.

    None where it has no kernels: the profiler does not know this device.
    """
    spans: dict[str, list[TimeRange]] = {kind: [] for kind in ("mark", "wait", "work", "sending", "computing")}
    for event in events:
        if event.get("ph") != "X":
            continue
        kind, name = str(event.get("cat")), event["name"]
        span = event["ts"], event["ts"] + event["dur"]
        if name == _STEPS and kind == "user_annotation":
            spans["mark"].append(span)
        elif kind.endswith(_HOST_APIS) and "synchronize" in name.lower():
            spans["wait"].append(span)
        elif kind in _ON_DEVICE:
            spans["work"].append(span)
        if kind == "kernel":
            spans["sending" if _COMMUNICATION in name.lower() else "computing"].append(span)
    sending, computing, work = spans["sending"], spans["computing"], spans["work"]
    if not (sending or computing):
        return None
    waits = sum(any(begin <= at < end for begin, end in spans["mark"]) for at, _ in spans["wait"])
    seconds = max(end for _, end in work) - min(begin for begin, _ in work)
    times = seconds, length(sending), exposed(sending, computing), seconds - length(work)
    return Activity(len(work) / steps, waits / steps, *(each / steps / 1e6 for each in times))


def traced(step: Callable[[], object], steps: int, device: torch.device) -> Activity | None:
    """Profile steps. Return None where the profiler gives no times of kernels on the device."""
    accelerator.synchronize(device)
    with torch.profiler.profile(activities=torch.profiler.supported_activities()) as profile:
        with torch.profiler.record_function(_STEPS):
            for _ in range(steps):
                step()
        accelerator.synchronize(device)
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "trace.json")
        profile.export_chrome_trace(str(path))
        return activity(json.loads(path.read_text())["traceEvents"], steps)
