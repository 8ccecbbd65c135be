"""``hpcfsdp import IN OUT``: a checkpoint from safetensors, a .pt file or a DCP folder. Executes no code of theirs."""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path

from hpcfsdp.checkpoint.convert.export import FORMATS, PT_SUFFIXES
from hpcfsdp.cli.arguments import Parser
from hpcfsdp.cli.printing import print_result
from hpcfsdp.output.progress_bar import byte_progress
from hpcfsdp.text.terminal import readable_bytes


def _pair(text: str) -> tuple[str, str]:
    alias, _, kept = text.partition("=")
    if not (alias and kept):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEPT")
    return alias, kept


parser = Parser(
    "import",
    "Write a checkpoint with the model, and the optimizer's state if there is one, of another program. No code in "
    "its files is executed.",
    "hpcfsdp import model.safetensors my_model.h5        # from another program",
    "hpcfsdp import all.pt my_model.h5 --step 1000       # with the number of the step",
    "hpcfsdp import a_folder my_model.h5 --format dcp    # from torch.distributed.checkpoint",
)
add = parser.add_argument
_FILES = f"*.safetensors, *.safetensors.index.json or *{', *'.join(PT_SUFFIXES)}"
add("source", metavar="IN", type=Path, help=f"a file {_FILES}, or a folder of safetensors or of DCP")
add("out", metavar="OUT", type=Path, help="the checkpoint file")
add("--format", choices=FORMATS, help="default: by the name of IN")
add("--step", type=int, metavar="N", help="of training; default: that of IN, or 0")
_TIE = "two names of one tensor (DCP does not store ties); may be repeated"
add("--tie", type=_pair, action="append", default=[], dest="ties", metavar="NAME=KEPT", help=_TIE)
add("--no-optimizer", action="store_false", dest="optimizer", help="leave the optimizer's state out")
add("--force", action="store_true", help="replace an existing file")


def main(arguments: Sequence[str]) -> int:
    """Import, and return the exit code."""
    options = parser.parse_args(arguments)
    # It loads torch, which takes seconds: not for --help.
    from hpcfsdp.checkpoint.convert.importing import import_checkpoint

    given = {name: getattr(options, name) for name in ("format", "step", "ties", "optimizer", "force")}
    done = import_checkpoint(options.source, options.out, **given, progress=byte_progress)
    facts = {"file": str(done.path), "format": done.format, "step": done.step, "tensors": done.tensors}
    facts |= {"bytes": done.nbytes, "optimizer": done.has_optimizer}
    facts |= {"tied_names": dict(done.ties), "extra": list(done.extra)}
    shown = {**facts, "bytes": f"{done.nbytes} ({readable_bytes(done.nbytes)})", "extra": ", ".join(done.extra)}
    del shown["tied_names"]
    ties = [("tied name", f"{alias} = {path}") for alias, path in done.ties]
    print_result(options.json, facts, ("what", "value"), [*shown.items(), *ties], text=("value",))
    return 0
