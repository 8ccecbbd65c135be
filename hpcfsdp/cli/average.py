"""``hpcfsdp average A B ... --out C``: a checkpoint with the mean of the weights of others."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_result
from hpcfsdp.output.progress_bar import byte_progress
from hpcfsdp.text.terminal import readable_bytes

parser = Parser(
    "average",
    "Write a checkpoint with the mean of the models of others, block by block. It has no optimizer.",
    "hpcfsdp average run/checkpoints/step-*.h5 -o mean.h5     # equal weights",
    "hpcfsdp average a.h5 b.h5 -o mean.h5 --weights 1 3",
    "hpcfsdp average step-*.h5 -o mean.h5 --decay 0.5         # each counts half as much as the next",
    "hpcfsdp average step.h5 -o ema.h5 --state ema            # the averages that the optimizer's state holds",
)
add = parser.add_argument
add("sources", metavar="CHECKPOINT", type=Path, nargs="+", help="checkpoint files, in the order of training")
add("-o", "--out", metavar="OUT", type=Path, required=True, help="the checkpoint file")
add("--weights", type=float, nargs="+", metavar="W", help="of each file; default: equal ones")
add("--decay", type=float, metavar="D", help="each file counts D times as much as the next one")
add("--state", metavar="KEY", help="average this of the optimizer's state in place of the parameters")
add("--force", action="store_true", help="replace an existing file")


def main(arguments: Sequence[str]) -> int:
    """Average, and return the exit code."""
    options = parser.parse_args(arguments)
    # It loads torch, which takes seconds: not for --help.
    from hpcfsdp.checkpoint.convert.average import average_checkpoints

    given = {name: getattr(options, name) for name in ("weights", "decay", "state", "force")}
    done = average_checkpoints(options.sources, options.out, **given, progress=byte_progress)
    facts = {"file": str(done.path), "step": done.step, "tensors": done.tensors, "bytes": done.nbytes}
    weights = [f"{weight:.4g}" for weight in done.weights]
    shown = {**facts, "bytes": f"{done.nbytes} ({readable_bytes(done.nbytes)})", "weights": " ".join(weights)}
    print_result(
        options.json, {**facts, "weights": list(done.weights)}, ("what", "value"), list(shown.items()), text=("value",)
    )
    return 0
