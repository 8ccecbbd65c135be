"""How a command reports its failure: a message on stderr, and with ``--json`` an object on stdout, too."""

from __future__ import annotations

import contextlib
import json
import sys
from collections.abc import Sequence
from typing import Any

from hpcfsdp.errors import HpcfsdpError
from hpcfsdp.hang.departure import abort
from hpcfsdp.text.terminal import shown_message


def report(error: Exception, arguments: Sequence[str]) -> None:
    """Print the error to stderr; and to stdout, as JSON, if the arguments of the verb ask for JSON."""
    with contextlib.suppress(OSError):
        print(f"hpcfsdp: {shown_message(str(error))}", file=sys.stderr, flush=True)
    print_object(error, arguments)


def print_object(error: Exception, arguments: Sequence[str]) -> None:
    """Print ``{"error": {...}}`` to stdout, if the arguments ask for JSON and stdout takes it."""
    if "--json" in arguments and sys.stdout is not None:
        with contextlib.suppress(OSError, HpcfsdpError):
            json.dump({"error": as_json(error, arguments)}, sys.stdout, indent=2)
            print(flush=True)


def as_json(error: Exception, paths: Sequence[object] = ()) -> dict[str, Any]:
    """Return an error for JSON: message, kind, exit_code, and the one of `paths` that the message begins with."""
    message = str(error)
    named = [str(path) for path in paths if message.startswith(f"{path}: ")]
    kind, exit_code = getattr(error, "kind", "internal"), getattr(error, "exit_code", 1)
    return {"message": message, "kind": kind, "exit_code": exit_code, "path": max(named, key=len, default=None)}


def end_together(error: HpcfsdpError, comm: Any, arguments: Sequence[str]) -> int:
    """Report the error once where all ranks raise it; otherwise end the job, since the other ranks wait for this one.

    Collective over `comm` if all ranks raise the error. Returns the exit code.
    """
    if error.raised_on_all_ranks:
        if comm.rank == 0:
            report(error, arguments)
        # A launcher may kill the other ranks as soon as one ends with an error: the message has to be out before.
        comm.Barrier()
    else:
        print_object(error, arguments)
        abort(str(error), error.exit_code)
    return error.exit_code
