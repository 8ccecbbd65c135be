"""One measurement of ``hpcfsdp bench`` as a table: from the command's options to what it prints."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch

from hpcfsdp import world as worlds
from hpcfsdp.bench import backends, checkpoint, collectives, host, memory, optim_state, report, step
from hpcfsdp.errors import UsageError


class Table(NamedTuple):
    """A measurement as a table, notes below it, and as JSON; perhaps a second table with its columns first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    as_json: Any
    notes: Sequence[str] = ()
    second: Sequence[Sequence[str]] = ()


def measure_together(options: argparse.Namespace) -> tuple[Table | None, dict[str, Any]]:
    """Collective over all processes of the job. The table on rank 0, None on others; and facts of the run."""
    world = worlds.init("cpu")
    torch.set_num_threads(1)
    found = _TOGETHER[options.what](world, options)
    worlds.finalize()
    return found if world.rank == 0 else None, {"topology": str(world.topology), "ranks": world.size}


def measure_alone(options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """In one process. The table, and facts of the run."""
    torch.set_num_threads(1)
    found = host.measure(units=options.units, repeats=options.repeats or 40)
    notes = [f"{engine} was skipped: {reason}" for engine, reason in found.skipped.items()]
    table = Table(report.HOST, report.host_rows(found), report.host_json(found), notes)
    return table, {"ranks": host.RANKS, "units": found.units}


def _collectives(world: Any, options: argparse.Namespace) -> Table:
    sizes = options.sizes or [collectives.MIB * size for size in (1, 16, 64)]
    found = collectives.measure(world, sizes, repeats=options.repeats or 9)
    return Table(report.COLLECTIVES, report.collective_rows(found), report.collective_json(found))


def _backends(world: Any, options: argparse.Namespace) -> Table:
    found = backends.measure(world, **_shape(options, 6, 512), repeats=options.repeats or 9)
    return Table(report.BACKENDS, report.backend_rows(found), report.backend_json(found))


def _step(world: Any, options: argparse.Namespace) -> Table:
    if world.size % options.tensor or step.HEADS % options.tensor:
        raise UsageError(
            f"hpcfsdp bench: --tensor {options.tensor} has to divide the {world.size} rank(s) and the {step.HEADS} "
            "heads of attention"
        )
    found = step.measure(world, **_shape(options, 6, 512), repeats=options.repeats or 9, tensor=options.tensor)
    return Table(report.STEP, report.step_rows(found), report.step_json(found))


def _memory(world: Any, options: argparse.Namespace) -> Table:
    shape = _shape(options, 8, 768)
    found = memory.measure(world, **shape, repeats=options.repeats or 5, keep_freed=options.keep_freed)
    return Table(report.MEMORY, report.memory_rows(found), report.memory_json(found))


def _optim_state(world: Any, options: argparse.Namespace) -> Table:
    if world.size == 1:
        raise UsageError("hpcfsdp bench: optim-state compares what is sharded: start it with mpirun -n 2, or more")
    found = optim_state.measure(world, **_shape(options, 16, 2048), repeats=options.repeats or 9)
    peaks = [report.OPTIM_STATE_MEMORY, *report.optim_state_memory_rows(found.peaks)]
    return Table(report.OPTIM_STATE, report.optim_state_rows(found), report.optim_state_json(found), second=peaks)


def _checkpoint(world: Any, options: argparse.Namespace) -> Table:
    shape = {"nbytes": options.bytes, "tensors": options.tensors}
    found = checkpoint.measure(world, **shape, folder=options.folder, repeats=options.repeats or 5)
    return Table(report.CHECKPOINT, report.checkpoint_rows(found), report.checkpoint_json(found))


_TOGETHER: dict[str, Callable[[Any, argparse.Namespace], Table]] = {
    "collectives": _collectives,
    "backends": _backends,
    "step": _step,
    "memory": _memory,
    "optim-state": _optim_state,
    "checkpoint": _checkpoint,
}


def _shape(options: argparse.Namespace, layers: int, width: int) -> dict[str, int]:
    """The model that is asked for, or the usual one."""
    return {"layers": options.layers or layers, "width": options.width or width}
