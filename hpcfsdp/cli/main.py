"""``hpcfsdp <verb>``: finds the verb, and turns errors into a message on stderr and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Sequence

from hpcfsdp._version import __version__
from hpcfsdp.errors import HpcfsdpError, UsageError, nearest

# verb -> module with main(arguments) -> exit code, and one line for the help
VERBS = {
    "train": ("hpcfsdp.cli.train", "train a byte-level GPT (run it with mpirun or srun)"),
    "bench": ("hpcfsdp.cli.bench", "measure against the peers (run it with mpirun or srun)"),
    "ls": ("hpcfsdp.cli.ls", "list checkpoints in a folder, or tensors in a checkpoint"),
    "doctor": ("hpcfsdp.cli.doctor", "say what here would break a training (alone, or with mpirun or srun)"),
    "show": ("hpcfsdp.cli.show", "show what a checkpoint, or one tensor of it, holds"),
}

_USAGE = """\
usage: hpcfsdp <verb> [PATH] [options]

{verbs}

hpcfsdp <verb> --help tells the options of a verb; hpcfsdp --version the version.
Data goes to stdout, messages to stderr. Exit codes: 0 fine, 1 failure, 2 usage,
3 environment, 4 checkpoint corrupt, 75 checkpointed after a signal (run me again)."""


def usage() -> str:
    """The text of ``hpcfsdp --help``."""
    return _USAGE.format(verbs="\n".join(f"  {verb:6} {text}" for verb, (_, text) in VERBS.items()))


def main(arguments: Sequence[str]) -> int:
    """Run one command; its exit code. Errors that users can mend are printed, others propagate."""
    try:
        if not arguments:
            raise UsageError(f"which verb?\n\n{usage()}")
        verb, *rest = arguments
        if verb in ("-h", "--help", "help"):
            print(usage())
            return 0
        if verb == "--version":
            print(f"hpcfsdp {__version__}")
            return 0
        if verb not in VERBS:
            raise UsageError(f"unknown verb {verb!r}{nearest(verb, VERBS)}\n\n{usage()}")
        return importlib.import_module(VERBS[verb][0]).main(rest)
    except HpcfsdpError as error:
        print(f"hpcfsdp: {error}", file=sys.stderr)
        return error.exit_code
    except BrokenPipeError:  # the reader of our output, say `head`, has seen enough
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0


def run() -> None:
    """Entry point of the console script."""
    code = main(sys.argv[1:])
    sys.stdout.flush()
    sys.exit(code)
