"""All benchmarks with their peers, those of ``hpcfsdp bench`` too, each in processes of its own: ``make bench``."""

from __future__ import annotations

import argparse
import shlex
import sys
import tempfile
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

from hpcfsdp import accelerator
from hpcfsdp.cli.printing import print_json, print_note
from hpcfsdp.errors import UsageError
from tests.bench.command import BENCHMARKS
from tests.bench.runs import (
    about,
    draw_ratios,
    exit_code,
    lines,
    load,
    new_run,
    ratios,
    result_of,
    save,
    with_changes,
)


class Benchmark(NamedTuple):
    """One benchmark of the suite: its title is the same in every run, the arguments are those of ``hpcfsdp bench``
    or ``python -m tests.bench``.

    `scale` are ranks as a multiple of those of the suite; 0 for one process without mpirun.
    """

    title: str
    arguments: tuple[str, ...]
    scale: int = 1


STEP = ("step", "--layers", "8", "--width", "384")
PARTS = (
    Benchmark("step", STEP),
    Benchmark("step, fused AdamW", (*STEP, "--fused")),
    Benchmark("step, large layers", ("step", "--layers", "3", "--width", "768")),
    Benchmark("step, two imagined nodes", (*STEP, "--split-nodes", "2")),
    Benchmark("step, tensor-parallel", (*STEP, "--tensor", "2"), 2),
    Benchmark("torch on hpcmpi", ("backends", "--layers", "8", "--width", "384")),
    Benchmark("collectives", ("collectives", "--sizes", "1", "16")),
    Benchmark("collectives, two imagined nodes", ("collectives", "--sizes", "1", "16", "--split-nodes", "2")),
    Benchmark("memory", ("memory",)),
    Benchmark("state dicts", ("optim-state",)),
    Benchmark("Muon", ("whole-tensors",)),
    Benchmark("checkpoint, 300 tensors", ("checkpoint", "--bytes", "1GiB", "--tensors", "300")),
    Benchmark("checkpoint, 4,000 tensors", ("checkpoint", "--bytes", "1GiB", "--tensors", "4000")),
    Benchmark("host", ("host",), 0),
)
ON_DEVICES = (Benchmark("device", ("gpu",), 0),)
"""Further parts where there is an accelerator."""
SMALL = (
    Benchmark("step", ("step", "--layers", "1", "--width", "16", "--repeats", "2")),
    Benchmark("host", ("host", "--units", "2", "--repeats", "2"), 0),
)
"""What ``--small`` runs, to try the suite: its figures have no meaning."""


def run_all(options: argparse.Namespace) -> int:
    """Run the suite and print it; the exit code is 1 if a part has failed."""
    before = None if options.compare is None else load(options.compare)
    for path in (options.out, options.figure):
        if path is not None and not path.absolute().parent.is_dir():
            raise UsageError(f"bench: {path}: there is no folder {path.absolute().parent}")
    parts = SMALL if options.small else (*PARTS, *(ON_DEVICES if accelerator.device_count() else ()))
    extra = [] if options.repeats is None else ["--repeats", str(options.repeats)]
    extra += [] if options.folder is None else ["--folder", options.folder]
    found = run(parts, options.mpirun or "mpirun", options.ranks or 2, print_note, extra)
    if options.out is not None:
        save(options.out, found)
    if options.json:
        print_json(with_changes(found, before))
    else:
        for line in lines(found, before):
            print(line)
    if options.figure is not None and (drawn := list(ratios(found))):
        draw_ratios(drawn, Path(options.figure), about(found))
    return exit_code(found)


def run(
    parts: Sequence[Benchmark], mpirun: str, ranks: int, announce: Callable[[str], None], extra: Sequence[str] = ()
) -> dict[str, Any]:
    """Run all parts, one after the other, each on so many ranks that `mpirun` starts, and with the `extra` arguments.

    `announce` gets the command line of a part before it starts. Return the machine, its software, and all output as
    JSON, by title. A part that fails has an "error".
    """
    found = new_run(ranks)
    for part in parts:
        program = ["tests.bench"] if part.arguments[0] in BENCHMARKS else ["hpcfsdp", "bench"]
        command = [*program, *part.arguments, *extra]
        starts = [*shlex.split(mpirun), "-n", str(ranks * part.scale)] if part.scale else []
        started = [*starts, sys.executable, "-m", *command, "--json"]
        announce(shlex.join(started))
        shown = command if program[0] == "hpcfsdp" else ["python", "-m", *command]
        with tempfile.TemporaryDirectory() as folder:
            found["parts"][part.title] = {"command": shown, **result_of(started, Path(folder, "output"))}
    return found
