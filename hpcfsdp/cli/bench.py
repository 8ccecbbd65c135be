"""``hpcfsdp bench WHAT``: measure against the peers, all in one run. Start it with mpirun or srun; ``host`` alone.

Tables are Markdown: they read well, and go into docs/benchmarks.md as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Sequence
from typing import Any

from hpcfsdp import env
from hpcfsdp.cli.reporting import Parser, plain_value, print_json, print_markdown
from hpcfsdp.errors import UsageError
from hpcfsdp.launch.job import load_mpi

_TOGETHER = ("collectives", "backends", "step", "memory", "optim-state", "checkpoint")
"""What is measured on several ranks."""
_HELP = """collectives: against gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, FSDP1 and
FSDP2 on hpcmpi and on gloo; step: steps of hpcfsdp, of these over gloo, and of no communication at all; memory: the
peak of such a step beside what it has to be; optim-state: state dicts of a model and its optimizer, of hpcfsdp and of
FSDP1 over gloo; checkpoint: saving and loading, of hpcfsdp, torch's DCP, safetensors, h5py and raw files on one disk;
host: what wrapping costs a unit, in one process (without mpirun)"""


def main(arguments: Sequence[str]) -> int:
    """Collective over all processes of the job. Measure, print on rank 0, and return the exit code."""
    parser = Parser("bench", "Measure against the peers in one run, on as many ranks as mpirun starts.")
    parser.add_argument("what", choices=(*_TOGETHER, "host"), metavar="WHAT", help=_HELP)
    parser.add_argument(
        "--repeats", type=_positive, metavar="N", help="runs of each way; default: 9, host: 40, memory, checkpoint: 5"
    )
    parser.add_argument("--sizes", type=_megabytes, nargs="+", metavar="MIB", help="collectives: default 1 16 64")
    parser.add_argument(
        "--layers",
        type=_positive,
        metavar="N",
        help="backends, step, memory: of the GPT; default: 6, memory: 8; optim-state: linear ones, default: 16",
    )
    parser.add_argument(
        "--width",
        type=_heads_wide,
        metavar="N",
        help="the same: a multiple of 8; default: 512, memory: 768, optim-state: 2048",
    )
    parser.add_argument(
        "--tensor", type=_positive, default=1, metavar="N", help="step: ranks that layers are cut over; default: 1"
    )
    parser.add_argument(
        "--bytes", type=_bytes, default=1 << 30, metavar="SIZE", help="checkpoint: of all parameters; default: 1GiB"
    )
    parser.add_argument(
        "--tensors", type=_positive, default=300, metavar="N", help="checkpoint: how many parameters; default: 300"
    )
    parser.add_argument(
        "--folder", metavar="DIR", help="checkpoint: on the disk that is measured; default: the current one"
    )
    parser.add_argument("--units", type=_positive, default=32, metavar="N", help="host: of the model; default: 32")
    parser.add_argument(
        "--keep-freed",
        action="store_true",
        help="memory: let the C library keep what is freed within a step, as it does by default",
    )
    options = parser.parse_args(arguments)
    return _alone(options) if options.what == "host" else _together(options)


def _together(options: argparse.Namespace) -> int:
    """Collective over all processes of the job."""
    load_mpi()
    from hpcfsdp.bench import run  # loads torch, which MPI has to come before

    found, facts = run.measure_together(options)
    if found is not None:
        _print(found, options, facts)
    return 0


def _alone(options: argparse.Namespace) -> int:
    launched = env.launcher_size()
    if launched is not None and launched[1] > 1:
        raise UsageError(f"hpcfsdp bench: host measures one process, and the launcher started {launched[1]}")
    from hpcfsdp.bench import run  # loads torch

    found, facts = run.measure_alone(options)
    _print(found, options, facts)
    return 0


def _print(found: Any, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    if options.json:
        print_json(plain_value({"host": env.host_name(), **facts, "measured": found.as_json}))
        return
    print_markdown(found.columns, found.rows)
    for note in found.notes:
        print(f"\n{note}")
    if found.second:
        columns, *rows = found.second
        print()
        print_markdown(columns, rows)


def _megabytes(text: str) -> int:
    try:
        size = float(text)
    except ValueError:
        size = 0.0
    if not 0 < size < 1e6:
        raise argparse.ArgumentTypeError(f"{text} MiB is no size")
    return int(size * (1 << 20))


def _bytes(text: str) -> int:
    found = re.fullmatch(r"(\d+)\s*([KMGT]i?)?B?", text)
    size = int(found[1]) if found else 0
    if size < 1:
        raise argparse.ArgumentTypeError(f"{text} is no size, as 1GiB or 256MiB are")
    prefix = found[2] or ""
    return size * (1024 if prefix.endswith("i") else 1000) ** " KMGT".index(prefix[:1] or " ")


def _positive(text: str) -> int:
    count = int(text) if text.isdecimal() else 0
    if count < 1:
        raise argparse.ArgumentTypeError(f"{text} is not positive")
    return count


def _heads_wide(text: str) -> int:
    width = _positive(text)
    if width % 8:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8, the heads of attention")
    return width
