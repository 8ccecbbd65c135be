"""``hpcfsdp bench WHAT``: measure against the peers, all in one run. Start it with mpirun or srun; ``host`` alone.

Tables are Markdown: they read well, and go into docs/benchmarks.md as they are.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

from hpcfsdp import env
from hpcfsdp.cli.arguments import Parser, plain_value, print_json, print_markdown
from hpcfsdp.errors import UsageError
from hpcfsdp.launch.bootstrap import load_mpi

_HELP = """collectives: against gloo, plain MPI calls and the speed of memory; backends: steps of stock DDP, FSDP1 and
FSDP2 on hpcmpi and on gloo; step: steps of hpcfsdp, of these over gloo, and of no communication at all; memory: the
peak of such a step beside what it has to be; optim-state: state dicts of a model and its optimizer, of hpcfsdp and of
FSDP1 over gloo; checkpoint: saving and loading, of hpcfsdp, torch's DCP, safetensors, h5py and raw files on one disk;
host: what wrapping costs a unit, in one process (without mpirun)"""


class _Found(NamedTuple):
    """A measurement as a table, notes below it, and as JSON; perhaps a second table with its columns first."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    as_json: Any
    notes: Sequence[str] = ()
    second: Sequence[Sequence[str]] = ()


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
    load_mpi()  # before torch
    import torch

    import hpcfsdp

    world = hpcfsdp.init("cpu")
    torch.set_num_threads(1)
    found = _TOGETHER[options.what](world, options)
    if world.rank == 0:
        _tell(found, options, {"topology": str(world.topology), "ranks": world.size})
    hpcfsdp.finalize()
    return 0


def _alone(options: argparse.Namespace) -> int:
    launched = env.launcher_size()
    if launched is not None and launched[1] > 1:
        raise UsageError(f"hpcfsdp bench: host measures one process, and the launcher started {launched[1]}")
    import torch

    from hpcfsdp.bench import host, report

    torch.set_num_threads(1)
    found = host.measure(units=options.units, repeats=options.repeats or 40)
    notes = [f"{engine} was skipped: {reason}" for engine, reason in found.skipped.items()]
    table = _Found(report.HOST, report.host_rows(found), report.host_json(found), notes)
    _tell(table, options, {"ranks": host.RANKS, "units": found.units})
    return 0


def _tell(found: _Found, options: argparse.Namespace, facts: dict[str, Any]) -> None:
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


def _collectives(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import collectives, report

    sizes = options.sizes or [collectives.MIB * size for size in (1, 16, 64)]
    found = collectives.measure(world, sizes, repeats=options.repeats or 9)
    return _Found(report.COLLECTIVES, report.collective_rows(found), report.collective_json(found))


def _backends(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import backends, report

    found = backends.measure(world, **_shape(options, 6, 512), repeats=options.repeats or 9)
    return _Found(report.BACKENDS, report.backend_rows(found), report.backend_json(found))


def _step(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import report, step

    if world.size % options.tensor or step.HEADS % options.tensor:
        raise UsageError(
            f"hpcfsdp bench: --tensor {options.tensor} has to divide the {world.size} rank(s) and the {step.HEADS} "
            "heads of attention"
        )
    found = step.measure(world, **_shape(options, 6, 512), repeats=options.repeats or 9, tensor=options.tensor)
    return _Found(report.STEP, report.step_rows(found), report.step_json(found))


def _memory(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import memory, report

    shape = _shape(options, 8, 768)
    found = memory.measure(world, **shape, repeats=options.repeats or 5, keep_freed=options.keep_freed)
    return _Found(report.MEMORY, report.memory_rows(found), report.memory_json(found))


def _optim_state(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import optim_state, report

    if world.size == 1:
        raise UsageError("hpcfsdp bench: optim-state compares what is sharded: start it with mpirun -n 2, or more")
    found = optim_state.measure(world, **_shape(options, 16, 2048), repeats=options.repeats or 9)
    peaks = [report.OPTIM_STATE_MEMORY, *report.optim_state_memory_rows(found.peaks)]
    return _Found(report.OPTIM_STATE, report.optim_state_rows(found), report.optim_state_json(found), second=peaks)


def _checkpoint(world: Any, options: argparse.Namespace) -> _Found:
    from hpcfsdp.bench import checkpoint, report

    shape = {"nbytes": options.bytes, "tensors": options.tensors}
    found = checkpoint.measure(world, **shape, folder=options.folder, repeats=options.repeats or 5)
    return _Found(report.CHECKPOINT, report.checkpoint_rows(found), report.checkpoint_json(found))


_TOGETHER: dict[str, Callable[[Any, argparse.Namespace], _Found]] = {
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
