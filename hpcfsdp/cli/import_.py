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

_EXAMPLES = (
    "hpcfsdp import model.safetensors my_model.h5        # from another program",
    "hpcfsdp import all.pt my_model.h5 --step 1000       # with the number of the step",
    "hpcfsdp import a_folder my_model.h5 --format dcp    # from torch.distributed.checkpoint",
)


def parser() -> Parser:
    """Return the parser of the command line."""
    made = Parser(
        "import",
        "Write a checkpoint with the model, and the optimizer's state if there is one, of another program. No code in "
        "its files is executed.",
        _EXAMPLES,
    )
    made.add_argument(
        "source",
        metavar="IN",
        type=Path,
        help=f"a file *.safetensors, *.safetensors.index.json or *{', *'.join(PT_SUFFIXES)}, or a folder of "
        "safetensors or of DCP",
    )
    made.add_argument("out", metavar="OUT", type=Path, help="the checkpoint file")
    made.add_argument("--format", choices=FORMATS, help="default: by the name of IN")
    made.add_argument("--step", type=int, metavar="N", help="of training; default: that of IN, or 0")
    made.add_argument(
        "--tie",
        type=_pair,
        action="append",
        default=[],
        metavar="NAME=KEPT",
        help="two names of one tensor (DCP does not store ties); may be repeated",
    )
    made.add_argument("--no-optimizer", action="store_true", help="leave the optimizer's state out")
    made.add_argument("--force", action="store_true", help="replace an existing file")
    return made


def main(arguments: Sequence[str]) -> int:
    """Import, and return the exit code."""
    options = parser().parse_args(arguments)
    # It loads torch, which takes seconds: not for --help.
    from hpcfsdp.checkpoint.convert.importing import import_checkpoint

    done = import_checkpoint(
        options.source,
        options.out,
        format=options.format,
        step=options.step,
        ties=options.tie,
        optimizer=not options.no_optimizer,
        force=options.force,
        progress=byte_progress,
    )
    facts = {
        "file": str(done.path),
        "format": done.format,
        "step": done.step,
        "tensors": done.tensors,
        "bytes": done.nbytes,
        "optimizer": done.has_optimizer,
        "tied_names": dict(done.ties),
        "extra": list(done.extra),
    }
    shown = {**facts, "bytes": f"{done.nbytes} ({readable_bytes(done.nbytes)})", "extra": ", ".join(done.extra)}
    del shown["tied_names"]
    ties = [("tied name", f"{alias} = {path}") for alias, path in done.ties]
    print_result(options.json, facts, ("what", "value"), [*shown.items(), *ties], text=("value",))
    return 0


def _pair(text: str) -> tuple[str, str]:
    alias, _, kept = text.partition("=")
    if not (alias and kept):
        raise argparse.ArgumentTypeError(f"{text!r} is not NAME=KEPT")
    return alias, kept
