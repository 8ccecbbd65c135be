"""``hpcfsdp bench WHAT``: measure hpcfsdp and its peers in one run. Start it with mpirun or srun; ``host``, ``scale``
and ``all`` alone, and ``gpu`` either way.

Tables are Markdown, for docs/explanation/benchmarks.md.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser, number_in, positive, size_in_bytes
from hpcfsdp.cli.failure import end_together
from hpcfsdp.cli.printing import plain_value, print_json
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.hang.departure import OUTPUT_GRACE_S
from hpcfsdp.launch.job import load_mpi

if TYPE_CHECKING:
    from hpcfsdp.bench.harness import Table

_BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "collectives": ("collectives.measure", {"sizes": (1, 16, 64), "repeats": 9}),
    "backends": ("step.measure_backends", {"layers": 6, "width": 512, "repeats": 9}),
    "step": ("step.measure", {"layers": 6, "width": 512, "tensor": 1, "fused": False, "repeats": 9}),
    "plan": ("planned.measure", {"layers": 8, "width": 512, "repeats": 5}),
    "memory": ("memory.measure", {"layers": 8, "width": 768, "keep_freed": False, "repeats": 5}),
    "optim-state": ("optim_state.measure", {"layers": 16, "width": 2048, "repeats": 9}),
    "whole-tensors": ("muon_step.measure", {"matrices": 24, "width": 1024, "repeats": 3}),
    "checkpoint": ("checkpoint.measure", {"nbytes": 1 << 30, "tensors": 300, "folder": None, "repeats": 5}),
    "gpu": (
        "gpu.measure",
        {"layers": 24, "width": 2048, "context": 1024, "batch": 8, "dtype": "bf16", "repeats": 9, "imagined_ranks": 8},
    ),
    "host": ("host.measure", {"units": 32, "repeats": 40}),
    "scale": (
        "scale.measure",
        {"world_sizes": (16, 64, 256, 1024, 4096, 16384), "layers": 4, "width": 256, "repeats": 3},
    ),
}
"""For each measurement its function in ``hpcfsdp.bench``, and its options with their defaults."""
_ALONE = ("host", "scale", "all")
_HELP = """collectives: next to gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, FSDP1 and
FSDP2 on hpcmpi and on gloo; step: steps of hpcfsdp, of these over gloo, and without communication; memory: the peak of
such a step, and the analytic one; plan: time and memory of hpcfsdp's steps, and what hpcfsdp plan predicts of them on
this machine; optim-state: state dicts of a model and its optimizer, by hpcfsdp and by FSDP1 over
gloo; whole-tensors: a step of Muon, by owners of matrices and by gathering all of them; checkpoint: saving and
loading, by hpcfsdp, torch's DCP, safetensors, h5py and raw files on one disk; gpu: steps on the accelerators of all
ranks, or on one as a rank of several imagined ones (without mpirun), with memory, launches and communication; host: the
overhead of wrapping a unit, in one process (without mpirun); scale: time and memory of one rank of up to 16,384, in one
process (without mpirun); all: every one of these that needs no option, with a summary (without mpirun, which it calls
itself)"""


def _heads_wide(text: str) -> int:
    width = positive(text)
    if width % 8:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8, the heads of attention")
    return width


parser = Parser(
    "bench",
    "Measure hpcfsdp and its peers in one run, on as many ranks as mpirun starts.",
    "mpirun -n 4 hpcfsdp bench collectives --sizes 1 16     # next to gloo and plain MPI",
    "mpirun -n 2 hpcfsdp bench step --layers 2 --width 128  # a step of each engine",
    "hpcfsdp bench host --units 8                           # one process, without mpirun",
    "mpirun -n 4 hpcfsdp bench checkpoint --folder /scratch --bytes 4GiB",
    "hpcfsdp bench gpu --report runs/gpu                     # the first hour on a GPU: tests, steps, memory, saves",
    "hpcfsdp bench all --out new.json --compare old.json     # everything, next to an earlier run",
)
add = parser.add_argument
add("what", choices=(*_BENCHMARKS, "all"), metavar="WHAT", help=_HELP)
_WIDTH = "the same: a multiple of 8; default: 512, memory: 768, gpu, optim-state: 2048; whole-tensors: 1024"
for flag, text in (
    ("--repeats", "runs of each way; default: 9, host: 40, memory, plan, checkpoint: 5, whole-tensors: 3"),
    ("--layers", "backends, step: of the GPT, default: 6; memory, plan: 8; gpu: 24; optim-state: linear, 16"),
    ("--width", _WIDTH),
    ("--matrices", "whole-tensors: of the model; default: 24"),
    ("--split-nodes", "divide each node into N imagined ones, which exchange messages; default: 1"),
    ("--tensor", "step: tensor-parallel ranks; default: 1"),
    ("--context", "gpu: tokens of a sequence; default: 1024"),
    ("--batch", "gpu: sequences of a step on each rank; default: 8"),
    ("--imagined-ranks", "gpu, in one process: ranks of which it is the first; default: 8"),
    ("--tensors", "checkpoint: number of parameters; default: 300"),
    ("--units", "host: of the model; default: 32"),
    ("--ranks", "all: ranks that mpirun starts; default: 2; gpu --report: devices, default: all of this node"),
):
    add(flag, type=_heads_wide if flag == "--width" else positive, metavar="N", help=text)
add("--folder", metavar="DIR", help="checkpoint: on the disk to measure; default: the current one")
add("--bytes", type=size_in_bytes, dest="nbytes", metavar="SIZE", help="checkpoint: of all; default: 1GiB")
add("--on-devices", action="store_true", help="checkpoint: models lie on accelerators, one for each rank")
_REPORT = "gpu: tests, steps, saves on devices, each part in processes of its own; again: what is missing or failed"
add("--report", type=Path, metavar="DIR", help=_REPORT)
add("--parts", nargs="+", metavar="NAME", help="gpu --report: these parts, again; the page keeps the others")
add("--world-sizes", type=positive, nargs="+", metavar="N", help="scale: default 16 64 256 1024 4096 16384")
add("--mpirun", metavar="COMMAND", help="all, --report: starts ranks, with its options; default: mpirun")
add("--out", type=Path, metavar="FILE", help="all: keep every figure, as JSON")
add("--compare", type=Path, metavar="FILE", help="all, gpu --report: next to an earlier run, of --out or report.json")
add("--figure", type=Path, metavar="FILE", help="all, scale: draw the result (svg, png, pdf)")
add("--small", action="store_true", help="all, --report: tiny, to try the command itself")
add("--fused", action="store_true", help="step: AdamW steps all parameters in one call")
add("--dtype", choices=("bf16", "fp32"), help="gpu: of computation; default: bf16")
_SIZE = number_in(1e-5, 1e6, "a size in MiB")
add("--sizes", type=_SIZE, nargs="+", metavar="MIB", help="collectives: default 1 16 64")
_KEEP = "memory: let the C library keep memory that is freed within a step, as it does by default"
add("--keep-freed", action="store_true", help=_KEEP)


def main(arguments: Sequence[str]) -> int:
    """Measure, print on rank 0, and return the exit code. Collective over all processes of the job."""
    try:
        return _main(arguments)
    except HpcfsdpError as error:
        launched = env.launcher_size()
        if launched is None or launched[1] == 1:
            raise
        if isinstance(error, UsageError):  # wrong arguments are wrong on every rank, and MPI may not run yet
            if not env.launcher_rank():
                raise
            time.sleep(OUTPUT_GRACE_S)  # the launcher ends rank 0 as soon as another rank ends
            return error.exit_code
        return end_together(error, load_mpi().COMM_WORLD, arguments)


def _main(arguments: Sequence[str]) -> int:
    options = parser.parse_args(arguments)
    what, launched = options.what, env.launcher_size()
    processes = 1 if launched is None else launched[1]
    single = {what: what in _ALONE, "--imagined-ranks": options.imagined_ranks, "--report": options.report}
    one_process = next((name for name, given in single.items() if given), None)
    if options.report and what != "gpu":
        raise UsageError(f"bench: --report is for gpu, not for {what}")
    if one_process and processes > 1:
        raise UsageError(f"bench: {one_process} measures one process, and the launcher started {processes}")
    alone = what in _ALONE or (what == "gpu" and processes == 1)
    if alone and options.split_nodes:
        raise UsageError("bench: --split-nodes divides the ranks of a node, and this measures one process")
    if what == "all" or options.report:
        from hpcfsdp.cli import bench_all, bench_gpu  # load torch

        return bench_all.run_all(options) if what == "all" else bench_gpu.run_report(options)
    if not alone:
        load_mpi()
    import torch  # which has to come after MPI

    module, name = _BENCHMARKS[what][0].split(".")
    measure = getattr(importlib.import_module(f"hpcfsdp.bench.{module}"), name)
    given = {name: getattr(options, name) or default for name, default in _BENCHMARKS[what][1].items()}
    facts = {}
    if alone:
        torch.set_num_threads(1)
        found = measure(**given)
    else:
        from hpcfsdp import accelerator, world as worlds  # as torch
        from hpcfsdp.bench.step import quiet

        if options.on_devices and accelerator.device_type() is None:
            raise UsageError("bench: --on-devices, and this process sees no accelerator (hpcfsdp doctor says why)")
        world = worlds.init(
            None if what == "gpu" or options.on_devices else "cpu", split_nodes=options.split_nodes or 1
        )
        torch.set_num_threads(1)
        with quiet():
            found = measure(world, **given)
        gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
        worlds.finalize()
        if world.rank:
            return 0
        facts = {"topology": str(world.topology), "ranks": world.size}
    _print(found, options, facts)
    if what == "scale" and options.figure is not None:
        from hpcfsdp.bench.scale import draw_scale  # as above

        draw_scale(found.as_json, options.figure, found.heading)
    return 0


def _print(found: Table, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    if options.json:
        ratios = [ratio._asdict() for ratio in found.ratios]
        report = {"host": env.host_name(), **facts, **dict(found.facts), "measured": found.as_json, "ratios": ratios}
        print_json(plain_value({**report, "text": "\n".join(found.lines())}))
        return
    for line in found.lines():
        print(line)
