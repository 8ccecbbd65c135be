"""The child of ``hpcfsdp doctor``: starts MPI, and reports facts as lines of JSON.

Run as ``python -m hpcfsdp.doctor.probe [--without-mpi] LIMIT_S FD``. It inherits the launcher's variables, so it
has the rank of its parent. It may die at any point; the parent uses the facts that it has reported until then.
"""

from __future__ import annotations

import contextlib
import ctypes
import faulthandler
import json
import os
import signal
import sys
import traceback
from collections.abc import Iterator
from typing import Any

from hpcfsdp.doctor import installed
from hpcfsdp.doctor.child import DUMP_SIGNAL
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi

_PR_SET_PDEATHSIG = 1


def main(arguments: list[str]) -> None:
    """Report on the packages, and unless ``--without-mpi`` is given on MPI and on all ranks."""
    *flags, limit_s, fd = arguments
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    os.set_inheritable(int(fd), False)
    try:
        with os.fdopen(int(fd), "w") as pipe:
            for facts in _facts("--without-mpi" in flags, float(limit_s)):
                print(json.dumps(facts), file=pipe, flush=True)
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not through MPI: it would end the job before the parents have reported, or wait for other ranks


def _facts(without_mpi: bool, limit_s: float) -> Iterator[dict[str, Any]]:
    """Yield facts; "stage" is the step that begins now: the child may die in it. With MPI collective over all ranks."""
    if not without_mpi:
        yield {"stage": "initialising MPI"}
        try:
            mpi = load_mpi()  # before torch, as Cray systems require
        except (ImportError, RuntimeError) as error:
            yield {"mpi_error": {"kind": type(error).__name__, "text": str(error)}}
            without_mpi = True
    if without_mpi:
        yield from installed.steps(initialise_mpi=False)
        yield {"complete": True}
        return
    yield {"world": {"rank": mpi.COMM_WORLD.rank, "size": mpi.COMM_WORLD.size}}
    yield {"stage": "loading torch and h5py"}
    if mpi.COMM_WORLD.rank == 0:
        yield from installed.steps(initialise_mpi=True)
    from hpcfsdp.doctor import all_ranks  # loads torch, which has to come after MPI

    yield from all_ranks.steps(limit_s)
    yield {"complete": True, "stage": "waiting for the report of rank 0"}
    verdict = None
    if mpi.COMM_WORLD.rank == 0:
        line = sys.stdin.readline()  # the exit code of the command, from the parent, when it has printed its report
        verdict = int(line) if line.strip() else LaunchError.exit_code
    yield {"verdict": mpi.COMM_WORLD.bcast(verdict)}


if __name__ == "__main__":
    main(sys.argv[1:])
