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
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.bench.harness import Ratio, Table, Times, in_turn, ratio_cell, time_cells, times_json
from hpcfsdp.bench.step import FLOOR, NAMES, OWN, OWN_ROWS, STOCK, make_model, quiet, training_step
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


@dataclass(frozen=True)
class EngineFigures:
    """What one engine takes for a step.

    Attributes:
        times: of a step.
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

    Args:
        world: None: this process alone makes torch's default group, and destroys it.
        context: tokens of a sequence.
        batch: sequences of a step, on each rank.
        dtype: "bf16" or "fp32".
        imagined_ranks: without a world: for how many ranks this one computes its part.
    """
    if accelerator.device_type() is None:
        raise UsageError("bench: gpu measures on an accelerator, and this process sees none")
    device = accelerator.current_device() if world is None else world.device
    shape = {"layers": layers, "width": width, "context": context, "batch": batch}
    options = {**shape, "dtype": DTYPES[dtype], "device": device}
    if world is not None:
        found = _measured(world.host, None, {**options, "rank": world.rank, "ranks": world.size}, repeats)
        return table(_about(world.size, False, device, shape, dtype, repeats), *found)
    _compat.init_fake_group(imagined_ranks, device)
    try:
        own = FakeCommunicator(0, imagined_ranks, device=device)
        found = _measured(FakeCommunicator(), own, {**options, "rank": 0, "ranks": imagined_ranks}, repeats)
        return table(_about(imagined_ranks, True, device, shape, dtype, repeats), *found)
    finally:
        dist.destroy_process_group()


def table(about: str, figures: Mapping[str, EngineFigures], skipped: Mapping[str, str]) -> Table:
    """Return a row for each engine, with its time as a multiple of the floor, and hpcfsdp's time as a multiple of it.

    Args:
        about: the date, the hardware, versions, and the size of the step.
        skipped: engine -> why it was not measured.
    """
    own = figures[OWN]
    rows, as_json = [], {}
    for engine, one in figures.items():
        doing = one.activity
        rows.append(
            (
                engine,
                *time_cells(one.times),
                ratio_cell(one.times, figures[FLOOR].times),
                ratio_cell(own.times, one.times),
                f"{one.peak_bytes / (1 << 30):.2f} GiB",
                *(("",) * 4 if doing is None else _cells(doing)),
            )
        )
        as_json[engine] = {
            **times_json({engine: one.times}, own.times)[engine],
            "peak_bytes": one.peak_bytes,
            "activity": None if doing is None else asdict(doing),
            "loss": one.loss,
        }
    columns = (
        *("engine", "step", "min-max", "x floor", "hpcfsdp / it", "peak memory"),
        *("launches", "host waits", "exposed communication", "idle"),
    )
    notes = [f"{engine} was skipped: {reason}" for engine, reason in skipped.items()]
    return Table(
        columns,
        rows,
        {"about": about, "engines": as_json, "skipped": skipped},
        notes,
        heading=about,
        ratios=[
            Ratio.of_times(f"{NAMES[OWN]} on a device: step time / {NAMES[engine]}", own.times, one.times)
            for engine, one in figures.items()
            if engine not in (OWN, OWN_ROWS)
        ],
    )


def _measured(
    comm: Communicator, own: Communicator | None, options: dict[str, Any], repeats: int
) -> tuple[dict[str, EngineFigures], dict[str, str]]:
    """Return figures of all engines, and why others were left out. Collective over `comm`.

    Args:
        own: hpcfsdp's communicator where it is not that of the world.
        options: of ``training_step``.
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


def _cells(doing: Activity) -> Sequence[str]:
    def part(seconds: float) -> str:
        return f"{100 * seconds / doing.seconds:.1f}%"

    communicates = doing.communication_s > 0
    return (
        f"{doing.launches:.0f}",
        f"{doing.synchronisations:.1f}",
        part(doing.exposed_s) if communicates else "",
        part(doing.idle_s),
    )


def _about(ranks: int, imagined: bool, device: torch.device, shape: dict[str, int], dtype: str, repeats: int) -> str:
    """Return a line for the table: when, on what, and of what size."""
    hardware = accelerator.describe(device)
    versions = [f"{name} {version}" for name, version in accelerator.versions(device).items()]
    with torch.device("meta"):
        model = make_model(shape["layers"], shape["width"], shape["context"])
    size = sum(param.numel() for param in model.parameters())
    return (
        f"{datetime.date.today()}, {1 if imagined else ranks} x {hardware.name} ({hardware.nbytes / (1 << 30):.0f} "
        f"GiB), {', '.join([f'torch {torch.__version__}', *versions])}. "
        f"{f'One process as rank 0 of {ranks}' if imagined else f'{ranks} ranks'}, {shape['layers']} layers of width "
        f"{shape['width']} ({size / 1e6:.0f} million parameters), {shape['batch']} x {shape['context']} tokens on each "
        f"rank, {dtype}; {repeats} runs of {_CALLS} steps."
    )


TimeRange = tuple[float, float]
"""Begin and end of a piece of work."""
_STEPS = "hpcfsdp steps"
_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_HOST_APIS = ("_runtime", "_driver")
_COMMUNICATION = "ccl"
"""The names of the kernels of NCCL, RCCL, oneCCL, HCCL hold it."""


@dataclass(frozen=True)
class Activity:
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


def merged(spans: Iterable[TimeRange]) -> list[TimeRange]:
    """Return the time that is in any of the intervals, as intervals in order that do not meet."""
    found: list[TimeRange] = []
    for begin, end in sorted(spans):
        if found and begin <= found[-1][1]:
            found[-1] = found[-1][0], max(found[-1][1], end)
        elif begin < end:
            found.append((begin, end))
    return found


def length(spans: Iterable[TimeRange]) -> float:
    """Return how much time is in any of the intervals."""
    return sum(end - begin for begin, end in merged(spans))


def exposed(spans: Sequence[TimeRange], others: Sequence[TimeRange]) -> float:
    """Return how much time is in any of the intervals, and in none of the others."""
    return length([*spans, *others]) - length(others)


def activity(events: Iterable[Mapping[str, Any]], steps: int) -> Activity | None:
    """Sum up the events of a trace (Chrome's format, microseconds) of so many steps.

    None where it has no kernels: the profiler does not know this device.
    """
    complete = [event for event in events if event.get("ph") == "X"]
    marks = [
        _interval(event) for event in complete if event["name"] == _STEPS and event.get("cat") == "user_annotation"
    ]
    work = [event for event in complete if event.get("cat") in _ON_DEVICE]
    if not any(event["cat"] == "kernel" for event in work):
        return None
    waits = [
        event
        for event in complete
        if str(event.get("cat")).endswith(_HOST_APIS)
        and "synchronize" in event["name"].lower()
        and any(begin <= event["ts"] < end for begin, end in marks)
    ]
    sending, computing = [], []
    for event in work:
        if event["cat"] == "kernel":
            (sending if _COMMUNICATION in event["name"].lower() else computing).append(_interval(event))
    spans = [_interval(event) for event in work]
    seconds = max(end for _, end in spans) - min(begin for begin, _ in spans)
    return Activity(
        len(work) / steps,
        len(waits) / steps,
        *(each / steps / 1e6 for each in (seconds, length(sending), exposed(sending, computing))),
        (seconds - length(spans)) / steps / 1e6,
    )


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


def _interval(event: Mapping[str, Any]) -> TimeRange:
    return event["ts"], event["ts"] + event["dur"]
