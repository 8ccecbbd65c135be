"""``hpcfsdp bench WHAT``: measure against the peers, all in one run. Start it with mpirun or srun.

Tables are Markdown: they read well, and go into docs/benchmarks.md as they are.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser, print_json, print_markdown
from hpcfsdp.launch.bootstrap import load_mpi


def main(arguments: Sequence[str]) -> int:
    """Collective over all processes of the job. Measure, print on rank 0, and return the exit code."""
    parser = Parser("bench", "Measure against the peers in one run, on as many ranks as mpirun starts.")
    parser.add_argument(
        "what",
        choices=("collectives", "backends"),
        metavar="WHAT",
        help="collectives: against gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, "
        "FSDP1 and FSDP2 on hpcmpi and on gloo",
    )
    parser.add_argument("--repeats", type=_positive, default=9, metavar="N", help="runs of each way; default: 9")
    parser.add_argument("--sizes", type=_megabytes, nargs="+", metavar="MIB", help="collectives: default 1 16 64")
    parser.add_argument("--layers", type=_positive, default=6, metavar="N", help="backends: of the GPT; default: 6")
    parser.add_argument("--width", type=_positive, default=512, metavar="N", help="backends: default: 512")
    options = parser.parse_args(arguments)
    load_mpi()  # before torch
    import torch

    import hpcfsdp
    from hpcfsdp.bench import backends, collectives, report

    world = hpcfsdp.init("cpu")
    torch.set_num_threads(1)
    if options.what == "collectives":
        sizes = options.sizes or [collectives.MIB * size for size in (1, 16, 64)]
        found = collectives.measure(world, sizes, repeats=options.repeats)
        columns, rows, measured = report.COLLECTIVES, report.collective_rows(found), report.collective_json(found)
    else:
        found = backends.measure(world, layers=options.layers, width=options.width, repeats=options.repeats)
        columns, rows, measured = report.BACKENDS, report.backend_rows(found), report.backend_json(found)
    if world.rank == 0:
        if options.json:
            print_json(
                {"host": env.host_name(), "topology": str(world.topology), "ranks": world.size, "measured": measured}
            )
        else:
            print_markdown(columns, rows)
    hpcfsdp.finalize()
    return 0


def _megabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text} MiB is no size")
    return int(size * (1 << 20))


def _positive(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return count
