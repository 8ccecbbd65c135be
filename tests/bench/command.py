"""The options of ``python -m tests.bench``, and what it runs."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

from hpcfsdp.cli.arguments import Parser, number_in, positive
from hpcfsdp.cli.bench import heads_wide, measure, on_all_ranks, refuse_ranks
from hpcfsdp.errors import UsageError

ALONE: dict[str, tuple[str, dict[str, Any]]] = {
    "data": ("data.measure", {"samples": 4096, "folder": None, "repeats": 3}),
    "host": ("host.measure", {"units": 32, "repeats": 40}),
    "scale": (
        "scale.measure",
        {"world_sizes": (16, 64, 256, 1024, 4096, 16384), "layers": 4, "width": 256, "repeats": 3},
    ),
}
"""For each measurement of one process its function in this folder, and its options with their defaults."""
BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    **ALONE,
    "collectives": ("collectives.measure", {"sizes": (1, 16, 64), "repeats": 9}),
    "backends": ("backends.measure", {"layers": 6, "width": 512, "repeats": 9}),
    "memory": ("memory.measure", {"layers": 8, "width": 768, "keep_freed": False, "repeats": 5}),
    "plan-memory": ("plan_memory.measure", {"layers": 8, "width": 512, "repeats": 5}),
    "optim-state": ("optim_state.measure", {"layers": 16, "width": 2048, "repeats": 9}),
    "whole-tensors": ("muon_step.measure", {"matrices": 24, "width": 1024, "repeats": 3}),
}
REPORTS = ("all", "gpu-report")
HELP = """data: reading HDF5 files, next to a DataLoader with workers and to raw reads, in one process (without mpirun);
host: the overhead of wrapping a unit, likewise; scale: time and memory of one rank of up to 16,384, likewise;
collectives: next to gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, FSDP1 and FSDP2 on
hpcmpi and on gloo; memory: the peak of a step of hpcfsdp and of these, and the analytic one; plan-memory: of hpcfsdp,
and what hpcfsdp plan predicts; optim-state: state dicts of a model and its optimizer, by hpcfsdp and by FSDP1 over
gloo; whole-tensors: a step of Muon, by owners of matrices and by gathering all of them; all: most of these and of
hpcfsdp bench, with a summary (without mpirun, which it calls itself); gpu-report: tests, steps, saves on devices, each
part in processes of its own (likewise); again: what is missing or has failed"""


parser = Parser(
    "bench",
    "Measure hpcfsdp and its peers, for developers.",
    "python -m tests.bench host --units 8                                # one process, without mpirun",
    "mpirun -n 2 python -m tests.bench memory                            # the peak of a step of each engine",
    "python -m tests.bench all --out new.json --compare old.json         # everything, next to an earlier run",
)
parser.prog = "python -m tests.bench"
add = parser.add_argument
add("what", choices=(*BENCHMARKS, *REPORTS), metavar="WHAT", help=HELP)
for flag, text in (
    ("--repeats", "runs of each way; default: 3, backends, collectives, optim-state: 9, host: 40, (plan-)memory: 5"),
    ("--layers", "optim-state: linear, 16; of the GPT: memory, plan-memory: 8, backends: 6, scale: 4"),
    (
        "--width",
        "a multiple of 8; default: 512, optim-state: 2048, whole-tensors: 1024, memory: 768, scale: 256",
    ),
    ("--matrices", "whole-tensors: of the model; default: 24"),
    ("--split-nodes", "divide each node into N imagined ones, which exchange messages; default: 1"),
    ("--samples", "data: of 64 KiB; default: 4096"),
    ("--units", "host: of the model; default: 32"),
    ("--ranks", "all: ranks that mpirun starts, default: 2; gpu-report: devices, default: all of this node"),
):
    add(flag, type=heads_wide if flag == "--width" else positive, metavar="N", help=text)
_SIZE = number_in(1e-5, 1e6, "a size in MiB")
add("--sizes", type=_SIZE, nargs="+", metavar="MIB", help="collectives: default 1 16 64")
_KEEP = "memory: let the C library keep memory that is freed within a step, as it does by default"
add("--world-sizes", type=positive, nargs="+", metavar="N", help="scale: default 16 64 256 1024 4096 16384")
_FOLDER = "all, data: of files, on the disk to measure, default: the current one; gpu-report: default: runs/gpu"
add("--folder", metavar="DIR", help=_FOLDER)
add("--mpirun", metavar="COMMAND", help="all, gpu-report: starts ranks, with its options; default: mpirun")
add("--out", type=Path, metavar="FILE", help="all: keep every figure, as JSON")
add("--compare", type=Path, metavar="FILE", help="all: next to an earlier run, of --out; gpu-report: its report.json")
add("--figure", type=Path, metavar="FILE", help="all, scale: draw the result (svg, png, pdf)")
add("--parts", nargs="+", metavar="NAME", help="gpu-report: these parts, again; the page keeps the others")
add("--keep-freed", action="store_true", help=_KEEP)
add("--small", action="store_true", help="all, gpu-report: tiny, to try the command itself")


def main(arguments: Sequence[str]) -> int:
    """Measure, print on rank 0, and return the exit code. Collective over all processes of the job."""
    return on_all_ranks(_main, arguments)


def _main(arguments: Sequence[str]) -> int:
    options = parser.parse_args(arguments)
    what = options.what
    alone = what in (*ALONE, *REPORTS)
    if alone:
        refuse_ranks(what)
        if options.split_nodes:
            raise UsageError("bench: --split-nodes divides the ranks of a node, and this measures one process")
    if what == "all":
        from tests.bench.suite import run_all  # loads torch

        return run_all(options)
    if what == "gpu-report":
        from tests.bench.gpu_report import run_report  # as above

        return run_report(options)
    function, defaults = BENCHMARKS[what]
    given = {name: getattr(options, name) or default for name, default in defaults.items()}
    found = measure(f"tests.bench.{function}", given, options, alone=alone)
    if what == "scale" and options.figure is not None:
        from tests.bench.scale import draw_scale  # as above

        draw_scale(found.as_json, options.figure, found.heading)
    return 0
