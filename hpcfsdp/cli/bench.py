"""``hpcfsdp bench WHAT``: measure hpcfsdp and its peers in one run. Start it with mpirun or srun, ``gpu`` also alone.

Tables are Markdown, for docs/explanation/benchmarks.md. Benchmarks for developers are in ``tests/bench``.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import time
from collections.abc import Callable, Mapping, Sequence
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

_BENCHMARKS: dict[str, tuple[str, dict[str, Any]]] = {
    "step": ("step.measure", {"layers": 6, "width": 512, "tensor": 1, "fused": False, "repeats": 9}),
    "plan": ("planned.measure", {"layers": 8, "width": 512, "repeats": 5}),
    "checkpoint": ("checkpoint.measure", {"nbytes": 1 << 30, "tensors": 300, "folder": None, "repeats": 5}),
    "gpu": (
        "gpu.measure",
        {"layers": 24, "width": 2048, "context": 1024, "batch": 8, "dtype": "bf16", "repeats": 9, "imagined_ranks": 8},
    ),
}
"""For each measurement its function in ``hpcfsdp.bench``, and its options with their defaults."""
_HELP = """step: steps of hpcfsdp, of stock DDP, FSDP1 and FSDP2 over gloo, and without communication; plan: time of
hpcfsdp's steps, and what hpcfsdp plan predicts of them; checkpoint: saving and loading, by hpcfsdp, torch's DCP,
safetensors, h5py and raw files on one disk; gpu: steps on the accelerators of all ranks, or on one as a rank of several
imagined ones (without mpirun), with memory, launches and communication"""


def heads_wide(text: str) -> int:
    width = positive(text)
    if width % 8:
        raise argparse.ArgumentTypeError(f"{text} is not a multiple of 8, the heads of attention")
    return width


parser = Parser(
    "bench",
    "Measure hpcfsdp and its peers in one run, on as many ranks as mpirun starts.",
    "mpirun -n 2 hpcfsdp bench step --layers 2 --width 128  # a step of each engine",
    "mpirun -n 4 hpcfsdp bench checkpoint --folder /scratch --bytes 4GiB",
    "hpcfsdp bench gpu --imagined-ranks 64                   # one GPU as one of 64 ranks",
)
add = parser.add_argument
add("what", choices=tuple(_BENCHMARKS), metavar="WHAT", help=_HELP)
for flag, text in (
    ("--repeats", "runs of each way; default: 9, plan, checkpoint: 5"),
    ("--layers", "step: of the GPT, default: 6; plan: 8; gpu: 24"),
    ("--width", "the same: a multiple of 8; default: 512, gpu: 2048"),
    ("--split-nodes", "divide each node into N imagined ones, which exchange messages; default: 1"),
    ("--tensor", "step: tensor-parallel ranks; default: 1"),
    ("--context", "gpu: tokens of a sequence; default: 1024"),
    ("--batch", "gpu: sequences of a step on each rank; default: 8"),
    ("--imagined-ranks", "gpu, in one process: ranks of which it is the first; default: 8"),
    ("--tensors", "checkpoint: number of parameters; default: 300"),
):
    add(flag, type=heads_wide if flag == "--width" else positive, metavar="N", help=text)
add("--folder", metavar="DIR", help="checkpoint: on the disk to measure; default: the current one")
add("--bytes", type=size_in_bytes, dest="nbytes", metavar="SIZE", help="checkpoint: of all; default: 1GiB")
add("--on-devices", action="store_true", help="checkpoint: models lie on accelerators, one for each rank")
add("--fused", action="store_true", help="step: AdamW steps all parameters in one call")
add("--dtype", choices=("bf16", "fp32"), help="gpu: of computation; default: bf16")


def main(arguments: Sequence[str]) -> int:
    """Measure, print on rank 0, and return the exit code. Collective over all processes of the job."""
    return on_all_ranks(_main, arguments)


def on_all_ranks(command: Callable[[Sequence[str]], int], arguments: Sequence[str]) -> int:
    """Run a command on all processes of the job, and end them together if it fails. Return the exit code."""
    try:
        return command(arguments)
    except HpcfsdpError as error:
        if _processes() == 1:
            raise
        if isinstance(error, UsageError):  # wrong arguments are wrong on every rank, and MPI may not run yet
            if not env.launcher_rank():
                raise
            time.sleep(OUTPUT_GRACE_S)  # the launcher ends rank 0 as soon as another rank ends
            return error.exit_code
        return end_together(error, load_mpi().COMM_WORLD, arguments)


def _main(arguments: Sequence[str]) -> int:
    options = parser.parse_args(arguments)
    what = options.what
    if options.imagined_ranks:
        refuse_ranks("--imagined-ranks")
    alone = what == "gpu" and _processes() == 1
    if alone and options.split_nodes:
        raise UsageError("bench: --split-nodes divides the ranks of a node, and this measures one process")
    if options.on_devices:
        load_mpi()
        from hpcfsdp import accelerator  # loads torch, which has to come after MPI

        if accelerator.device_type() is None:
            raise UsageError("bench: --on-devices, and this process sees no accelerator (hpcfsdp doctor says why)")
    function, defaults = _BENCHMARKS[what]
    given = {name: getattr(options, name) or default for name, default in defaults.items()}
    device = None if what == "gpu" or options.on_devices else "cpu"
    measure(f"hpcfsdp.bench.{function}", given, options, alone=alone, device=device)
    return 0


def _processes() -> int:
    launched = env.launcher_size()
    return 1 if launched is None else launched[1]


def refuse_ranks(what: str) -> None:
    """Raise a UsageError if the launcher has started several processes: `what` measures one."""
    if _processes() > 1:
        raise UsageError(f"bench: {what} measures one process, and the launcher started {_processes()}")


def measure(
    function: str, given: Mapping[str, Any], options: argparse.Namespace, *, alone: bool, device: str | None = "cpu"
) -> Table:
    """Call the function of a dotted name with what it is `given`, print its table on rank 0, and return it.

    Not collective if it is `alone`, in one process without MPI; otherwise over all ranks, which may use the device.
    """
    if not alone:
        load_mpi()
    import torch  # which has to come after MPI

    module, _, name = function.rpartition(".")
    call = getattr(importlib.import_module(module), name)
    if alone:
        torch.set_num_threads(1)
        found = call(**given)
        _print(found, options, {})
        return found
    from hpcfsdp import world as worlds  # as torch
    from hpcfsdp.bench.step import quiet

    world = worlds.init(device, split_nodes=options.split_nodes or 1)
    torch.set_num_threads(1)
    with quiet():
        found = call(world, **given)
    gc.collect()  # a group of gloo that outlives its destruction aborts the process, and models in circles hold it
    worlds.finalize()
    if not world.rank:
        _print(found, options, {"topology": str(world.topology), "ranks": world.size})
    return found


def _print(found: Table, options: argparse.Namespace, facts: dict[str, Any]) -> None:
    if options.json:
        ratios = [ratio._asdict() for ratio in found.ratios]
        report = {"host": env.host_name(), **facts, **dict(found.facts), "measured": found.as_json, "ratios": ratios}
        print_json(plain_value({**report, "text": "\n".join(found.lines())}))
        return
    for line in found.lines():
        print(line)
