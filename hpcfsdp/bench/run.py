"""One measurement of ``hpcfsdp bench``, from the command's options to its table."""

from __future__ import annotations

import argparse
from typing import Any

import torch

from hpcfsdp import world as worlds
from hpcfsdp.bench import (
    backends,
    checkpoint,
    collectives,
    gpu,
    host,
    memory,
    muon_step,
    optim_state,
    scale,
    step,
)
from hpcfsdp.bench.tables import MIB, Table

_MODULES: dict[str, tuple[Any, dict[str, Any]]] = {
    "collectives": (collectives, {"sizes": [MIB * size for size in (1, 16, 64)], "repeats": 9}),
    "backends": (backends, {"layers": 6, "width": 512, "repeats": 9}),
    "step": (step, {"layers": 6, "width": 512, "tensor": 1, "fused": False, "repeats": 9}),
    "memory": (memory, {"layers": 8, "width": 768, "keep_freed": False, "repeats": 5}),
    "optim-state": (optim_state, {"layers": 16, "width": 2048, "repeats": 9}),
    "whole-tensors": (muon_step, {"matrices": 24, "width": 1024, "repeats": 3}),
    "checkpoint": (checkpoint, {"nbytes": 1 << 30, "tensors": 300, "folder": None, "repeats": 5}),
    "gpu": (
        gpu,
        {"layers": 24, "width": 2048, "context": 1024, "batch": 8, "dtype": "bf16", "repeats": 9, "imagined_ranks": 8},
    ),
    "host": (host, {"units": 32, "repeats": 40}),
    "scale": (
        scale,
        {"world_sizes": (16, 64, 256, 1024, 4096, 16384), "layers": 4, "width": 256, "repeats": 3},
    ),
}
"""For each measurement its module, and its options with their defaults."""


def measure_together(options: argparse.Namespace) -> tuple[Table | None, dict[str, Any]]:
    """Collective over all processes of the job. The table on rank 0, None on others; and facts of the run."""
    module, arguments = _chosen(options)
    world = worlds.init(None if module is gpu else "cpu", split_nodes=options.split_nodes or 1)
    torch.set_num_threads(1)
    found = module.table(module.measure(world, **arguments))
    worlds.finalize()
    return found if world.rank == 0 else None, {"topology": str(world.topology), "ranks": world.size}


def measure_alone(options: argparse.Namespace) -> tuple[Table, dict[str, Any]]:
    """In one process. The table, and facts of the run."""
    module, arguments = _chosen(options)
    torch.set_num_threads(1)
    facts: dict[str, Any] = {}
    if module is gpu:
        facts = {"ranks": arguments["imagined_ranks"]}
    elif module is host:
        facts = {"ranks": host.RANKS, "units": arguments["units"]}
    return module.table(module.measure(**arguments)), facts


def _chosen(options: argparse.Namespace) -> tuple[Any, dict[str, Any]]:
    """The module, and its options."""
    module, defaults = _MODULES[options.what]
    return module, {name: getattr(options, name) or default for name, default in defaults.items()}
