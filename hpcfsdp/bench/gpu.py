"""Steps on an accelerator: time, memory, launches and communication, of the engine and of stock torch, in one run.

Several processes communicate over the backend of their devices. One process stands for one rank of several: it computes
what that rank would. hpcfsdp then works on its fake communicator, which copies as many bytes as a rank would receive,
and torch on its "fake" process group, which moves none.
"""

from __future__ import annotations

import datetime
import gc
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
import torch.distributed as dist

from hpcfsdp import _compat, accelerator
from hpcfsdp.bench.step import FLOOR, NAMES, OWN, OWN_ROWS, STOCK, make_model, quiet, training_step
from hpcfsdp.bench.tables import Ratio, Table, ratio_cell, time_cells, times_json
from hpcfsdp.bench.timing import Times, in_turn
from hpcfsdp.bench.trace import Activity, traced
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
class Figures:
    """Of one engine.

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


@dataclass(frozen=True)
class Measurement:
    """Steps of several engines.

    Attributes:
        about: the date, the hardware, versions, and the size of the step.
        figures: engine -> its figures.
        skipped: engine -> why it was not measured.
    """

    about: str
    figures: dict[str, Figures]
    skipped: dict[str, str]


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
) -> Measurement:
    """Collective over all ranks. Steps of all engines in turn.

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
        contest = _Contest(world.host, device, {**options, "rank": world.rank, "ranks": world.size})
        return Measurement(_about(world.size, False, device, shape, dtype, repeats), *contest.run(None, repeats))
    _compat.init_fake_group(imagined_ranks, device)
    try:
        contest = _Contest(FakeCommunicator(), device, {**options, "rank": 0, "ranks": imagined_ranks})
        own = FakeCommunicator(0, imagined_ranks, device=device)
        return Measurement(_about(imagined_ranks, True, device, shape, dtype, repeats), *contest.run(own, repeats))
    finally:
        dist.destroy_process_group()


def table(found: Measurement) -> Table:
    """A row for each engine, with its time as a multiple of the floor, and hpcfsdp's time as a multiple of it."""
    own = found.figures[OWN]
    rows, as_json = [], {}
    for engine, one in found.figures.items():
        doing = one.activity
        rows.append(
            (
                engine,
                *time_cells(one.times),
                ratio_cell(one.times, found.figures[FLOOR].times),
                ratio_cell(own.times, one.times),
                f"{one.peak_bytes / (1 << 30):.2f} GiB",
                *(("",) * 4 if doing is None else _cells(doing)),
            )
        )
        as_json[engine] = {
            **times_json({engine: one.times})[engine],
            "hpcfsdp_ratio": own.times.ratio_to(one.times),
            "peak_bytes": one.peak_bytes,
            "activity": None if doing is None else asdict(doing),
            "loss": one.loss,
        }
    columns = (
        *("engine", "step", "min-max", "x floor", "hpcfsdp / it", "peak memory"),
        *("launches", "host waits", "exposed communication", "idle"),
    )
    notes = [f"{engine} was skipped: {reason}" for engine, reason in found.skipped.items()]
    return Table(
        columns,
        rows,
        {"about": found.about, "engines": as_json, "skipped": found.skipped},
        notes,
        heading=found.about,
        ratios=[
            Ratio.of_times(f"{NAMES[OWN]} on a device: step time / {NAMES[engine]}", own.times, one.times)
            for engine, one in found.figures.items()
            if engine not in (OWN, OWN_ROWS)
        ],
    )


class _Contest:
    """The engines on one device. All methods are collective over `comm`."""

    def __init__(self, comm: Communicator, device: torch.device, options: dict[str, Any]) -> None:
        self._comm, self._device, self._options = comm, device, options

    def run(self, own: Communicator | None, repeats: int) -> tuple[dict[str, Figures], dict[str, str]]:
        """Figures of all engines, and why others were left out.

        Args:
            own: hpcfsdp's communicator where it is not that of the world.
        """
        steps: dict[str, Callable[[], object]] = {}
        found: dict[str, tuple[int, Activity | None]] = {}
        losses: dict[str, torch.Tensor] = {}
        skipped: dict[str, str] = {}
        for engine in (FLOOR, *STOCK, OWN, OWN_ROWS) if own is None else _IMAGINED:
            group = own if engine == OWN else dist.group.WORLD
            try:
                with quiet():
                    steps[engine], *found[engine] = self._prepared(engine, group, losses)
            except RuntimeError as error:  # no memory, or something that the device or its group does not know
                if engine == OWN:
                    raise
                skipped[engine] = str(error).splitlines()[0]
        finish = lambda: accelerator.synchronize(self._device)  # noqa: E731
        times = in_turn(self._comm, steps, repeats=repeats, warmup=1, calls=_CALLS, finish=finish)
        figures = {
            engine: Figures(times[engine], *of_engine, float(losses[engine])) for engine, of_engine in found.items()
        }
        del steps
        gc.collect()  # models in circles hold the group
        return figures, skipped

    def _prepared(
        self, engine: str, group: Any, losses: dict[str, torch.Tensor]
    ) -> tuple[Callable[[], object], int, Activity | None]:
        """A step of an engine, the peak of its memory, and what the device does in it."""
        gc.collect()
        accelerator.synchronize(self._device)
        before = torch.accelerator.memory_allocated(self._device)  # of the engines before this one
        take = training_step(engine, group, **self._options)

        def step() -> None:
            losses[engine] = take()

        for _ in range(_WARMUP):
            step()
        accelerator.synchronize(self._device)
        torch.accelerator.reset_peak_memory_stats(self._device)
        step()
        accelerator.synchronize(self._device)
        peak = torch.accelerator.max_memory_allocated(self._device) - before
        return step, max(self._comm.all_gather_object(peak)), traced(step, _TRACED, self._device)


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
    """A line for the table: when, on what, and of what size."""
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
