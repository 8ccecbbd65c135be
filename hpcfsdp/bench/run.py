"""One measurement of ``hpcfsdp bench``, from the command's options to its table."""

from __future__ import annotations

import argparse
import gc
from collections.abc import Callable
from typing import Any

import torch

from hpcfsdp import world as worlds
from hpcfsdp.bench import checkpoint, collectives, gpu, host, memory, muon_step, optim_state, scale, step
from hpcfsdp.bench.harness import MIB, Table

_BENCHMARKS: dict[str, tuple[Callable[..., Table], dict[str, Any]]] = {
    "collectives": (collectives.measure, {"sizes": [MIB * size for size in (1, 16, 64)], "repeats": 9}),
    "backends": (step.measure_backends, {"layers": 6, "width": 512, "repeats": 9}),
    "step": (step.measure, {"layers": 6, "width": 512, "tensor": 1, "fused": False, "repeats": 9}),
    "memory": (memory.measure, {"layers": 8, "width": 768, "keep_freed": False, "repeats": 5}),
    "optim-state": (optim_state.measure, {"layers": 16, "width": 2048, "repeats": 9}),
    "whole-tensors": (muon_step.measure, {"matrices": 24, "width": 1024, "repeats": 3}),
    "checkpoint": (checkpoint.measure, {"nbytes": 1 << 30, "tensors": 300, "folder": None, "repeats": 5}),
    "gpu": (
        gpu.measure,
        {"layers": 24, "width": 2048, "context": 1024, "batch": 8, "dtype": "bf16", "repeats": 9, "imagined_ranks": 8},
    ),
    "host": (host.measure, {"units": 32, "repeats": 40}),
    "scale": (
        scale.measure,
        {"world_sizes": (16, 64, 256, 1024, 4096, 16384), "layers": 4, "width": 256, "repeats": 3},
    ),
}
"""For each measurement its function, and its options with their defaults."""


def measure_together(options: argparse.Namespace) -> tuple[Table | None, dict[str, Any]]:
    """Return the table on rank 0, None on others; and facts of the run. Collective over all processes of the job."""
    measure, arguments = _chosen(options)
    world = worlds.init(None if measure is gpu.measure else "cpu", split_nodes=options.split_nodes or 1)
    torch.set_num_threads(1)
    with step.quiet():
        table = measure(world, **arguments)
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    worlds.finalize()
    return table if world.rank == 0 else None, {"topology": str(world.topology), "ranks": world.size}


def measure_alone(options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """Return the table, and facts of the run. In one process."""
    measure, arguments = _chosen(options)
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    if measure is gpu.measure:
        facts = {"ranks": arguments["imagined_ranks"]}
    elif measure is host.measure:
        facts = {"ranks": host.RANKS, "units": arguments["units"]}
    return measure(**arguments), facts


def _chosen(options: argparse.Namespace) -> tuple[Callable[..., Table], dict[str, Any]]:
    """Return the function that measures, and its options."""
    measure, defaults = _BENCHMARKS[options.what]
    return measure, {name: getattr(options, name) or default for name, default in defaults.items()}
