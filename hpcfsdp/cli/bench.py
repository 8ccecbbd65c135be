"""``hpcfsdp bench WHAT``: measure hpcfsdp and its peers in one run. Start it with mpirun or srun; ``host``, ``scale``
and ``all`` alone, and ``gpu`` either way.

Tables are Markdown, for docs/explanation/benchmarks.md.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser, positive, size_in_bytes
from hpcfsdp.cli.failure import end_together
from hpcfsdp.cli.printing import plain_value, print_json
from hpcfsdp.errors import HpcfsdpError, UsageError
from hpcfsdp.hang.departure import OUTPUT_GRACE_S
from hpcfsdp.launch.job import load_mpi

if TYPE_CHECKING:
    from hpcfsdp.bench.harness import Table

_HELP = """collectives: next to gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, FSDP1 and
FSDP2 on hpcmpi and on gloo; step: steps of hpcfsdp, of these over gloo, and without communication; memory: the peak of
such a step, and the analytic one; optim-state: state dicts of a model and its optimizer, by hpcfsdp and by FSDP1 over
gloo; whole-tensors: a step of Muon, by owners of matrices and by gathering all of them; checkpoint: saving and
loading, by hpcfsdp, torch's DCP, safetensors, h5py and raw files on one disk; gpu: steps on the accelerators of all
ranks, or on one as a rank of several imagined ones (without mpirun), with memory, launches and communication; host: the
overhead of wrapping a unit, in one process (without mpirun); scale: time and memory of one rank of up to 16,384, in one
process (without mpirun); all: every one of these that needs no option, with a summary (without mpirun, which it calls
itself)"""


_KINDS = (
    "collectives",
    "backends",
    "step",
    "memory",
    "optim-state",
    "whole-tensors",
    "checkpoint",
    "gpu",
    "host",
    "scale",
    "all",
)
_ALONE = ("host", "scale", "all")

_EXAMPLES = (
    "mpirun -n 4 hpcfsdp bench collectives --sizes 1 16     # next to gloo and plain MPI",
    "mpirun -n 2 hpcfsdp bench step --layers 2 --width 128  # a step of each engine",
    "hpcfsdp bench host --units 8                           # one process, without mpirun",
    "mpirun -n 4 hpcfsdp bench checkpoint --folder /scratch --bytes 4GiB",
    "hpcfsdp bench all --out new.json --compare old.json     # everything, next to an earlier run",
)


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser("bench", "Measure hpcfsdp and its peers in one run, on as many ranks as mpirun starts.", _EXAMPLES)
    made.add_argument("what", choices=_KINDS, metavar="WHAT", help=_HELP)
    # hpcfsdp.bench.run has the defaults.
    for flag, kind, metavar, text in (
        ("--repeats", positive, "N", "runs of each way; default: 9, host: 40, memory, checkpoint: 5, whole-tensors: 3"),
        (
            "--layers",
            positive,
            "N",
            "backends, step: of the GPT, default: 6; memory: 8; gpu: 24; optim-state: linear, 16",
        ),
        (
            "--width",
            _heads_wide,
            "N",
            "the same: a multiple of 8; default: 512, memory: 768, gpu, optim-state: 2048; whole-tensors: 1024",
        ),
        ("--matrices", positive, "N", "whole-tensors: of the model; default: 24"),
        ("--split-nodes", positive, "N", "divide each node into N imagined ones, which exchange messages; default: 1"),
        ("--tensor", positive, "N", "step: tensor-parallel ranks; default: 1"),
        ("--context", positive, "N", "gpu: tokens of a sequence; default: 1024"),
        ("--batch", positive, "N", "gpu: sequences of a step on each rank; default: 8"),
        ("--imagined-ranks", positive, "N", "gpu, in one process: ranks of which it is the first; default: 8"),
        ("--tensors", positive, "N", "checkpoint: number of parameters; default: 300"),
        ("--folder", str, "DIR", "checkpoint: on the disk to measure; default: the current one"),
        ("--units", positive, "N", "host: of the model; default: 32"),
    ):
        made.add_argument(flag, type=kind, metavar=metavar, help=text)
    made.add_argument(
        "--bytes",
        type=size_in_bytes,
        dest="nbytes",
        metavar="SIZE",
        help="checkpoint: of all; default: 1GiB",
    )
    made.add_argument(
        "--world-sizes", type=positive, nargs="+", metavar="N", help="scale: default 16 64 256 1024 4096 16384"
    )
    made.add_argument("--ranks", type=positive, metavar="N", help="all: ranks that mpirun starts; default: 2")
    made.add_argument("--mpirun", metavar="COMMAND", help="all: starts ranks, with its options; default: mpirun")
    made.add_argument("--out", type=Path, metavar="FILE", help="all: keep every figure, as JSON")
    made.add_argument("--compare", type=Path, metavar="FILE", help="all: next to an earlier run, of --out")
    made.add_argument("--figure", type=Path, metavar="FILE", help="all, scale: draw the result (svg, png, pdf)")
    made.add_argument("--small", action="store_true", help="all: two tiny benchmarks, to try the command itself")
    made.add_argument("--fused", action="store_true", help="step: AdamW steps all parameters in one call")
    made.add_argument("--dtype", choices=("bf16", "fp32"), help="gpu: of computation; default: bf16")
    made.add_argument("--sizes", type=_megabytes, nargs="+", metavar="MIB", help="collectives: default 1 16 64")
    made.add_argument(
        "--keep-freed",
        action="store_true",
        help="memory: let the C library keep memory that is freed within a step, as it does by default",
    )
    return made


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
    options = parser().parse_args(arguments)
    launched = env.launcher_size()
    processes = 1 if launched is None else launched[1]
    one_process = options.what if options.what in _ALONE else "--imagined-ranks" if options.imagined_ranks else None
    if one_process and processes > 1:
        raise UsageError(f"bench: {one_process} measures one process, and the launcher started {processes}")
    alone = options.what in _ALONE or (options.what == "gpu" and processes == 1)
    if alone and options.split_nodes:
        raise UsageError("bench: --split-nodes divides the ranks of a node, and this measures one process")
    if options.what == "all":
        from hpcfsdp.cli.bench_all import run_all  # loads torch

        return run_all(options)
    if not alone:
        load_mpi()
    from hpcfsdp.bench import run  # loads torch, which has to come after MPI

    measure = run.measure_alone if alone else run.measure_together
    found, facts = measure(options)
    if found is not None:
        _print(found, options, facts)
        if options.what == "scale" and options.figure is not None:
            from hpcfsdp.bench.scale import draw_scale  # as above

            draw_scale(found.as_json, options.figure, found.heading)
    return 0


def _print(found: Table, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    if options.json:
        ratios = [ratio._asdict() for ratio in found.ratios]
        report = {"host": env.host_name(), **facts, "measured": found.as_json, "ratios": ratios}
        print_json(plain_value({**report, "text": "\n".join(found.lines())}))
        return
    for line in found.lines():
        print(line)


def _megabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text} MiB is not a size")
    return int(size * (1 << 20))


def _heads_wide(text: str) -> int:
    width = positive(text)
    if width % 8:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8, the heads of attention")
    return width
