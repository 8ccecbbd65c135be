"""The child of ``hpcfsdp doctor``: starts MPI, and reports what it finds there as lines of JSON.

Run as ``python -m hpcfsdp.doctor.probe [--without-mpi] LIMIT_S FD``. It inherits the launcher's variables, so that it
is the rank which its parent was started as. It may die at any point; what it has said until then counts.
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
from typing import Any

from hpcfsdp.doctor import installed
from hpcfsdp.doctor.child import DUMP_SIGNAL
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi

_PR_SET_PDEATHSIG = 1


class Report:
    """The way to the parent."""

    def __init__(self, fd: int) -> None:
        self._pipe = os.fdopen(fd, "w")
        os.set_inheritable(fd, False)

    def say(self, **facts: Any) -> None:
        """Report facts. ``stage`` says what is begun now, so that the parent knows where we died."""
        self._pipe.write(f"{json.dumps(facts)}\n")
        self._pipe.flush()


def main(arguments: list[str]) -> None:
    """Report on the packages, and unless that is refused on MPI and on all ranks."""
    *flags, limit_s, fd = arguments
    _die_with_the_parent()
    faulthandler.register(DUMP_SIGNAL, all_threads=False)
    report = Report(int(fd))
    if "--without-mpi" in flags:
        for facts in installed.steps(initialise_mpi=False):
            report.say(**facts)
        report.say(complete=True)
        return
    try:
        _with_mpi(report, float(limit_s))
    except BaseException:
        traceback.print_exc()
        sys.stderr.flush()
        os._exit(1)  # not through MPI: it would end the job before the parents have told anything, or wait for the rest


def _with_mpi(report: Report, limit_s: float) -> None:
    report.say(stage="initialising MPI")
    try:
        mpi = load_mpi()  # before torch, which Cray systems want
    except (ImportError, RuntimeError) as error:
        report.say(mpi_error={"kind": type(error).__name__, "text": str(error)})
        for facts in installed.steps(initialise_mpi=False):
            report.say(**facts)
        report.say(complete=True)
        return
    report.say(world={"rank": mpi.COMM_WORLD.rank, "size": mpi.COMM_WORLD.size})
    report.say(stage="loading torch and h5py")
    if mpi.COMM_WORLD.rank == 0:
        for facts in installed.steps(initialise_mpi=True):
            report.say(**facts)
    from hpcfsdp.doctor import all_ranks  # loads torch, which MPI has to come before

    for facts in all_ranks.steps(limit_s):
        report.say(**facts)
    report.say(complete=True, stage="waiting for the report of rank 0")
    verdict = _verdict_of_the_parent() if mpi.COMM_WORLD.rank == 0 else None
    report.say(verdict=mpi.COMM_WORLD.bcast(verdict))


def _verdict_of_the_parent() -> int:
    """The exit code of the command, which only the parent of rank 0 knows; it has printed by then."""
    line = sys.stdin.readline()
    return int(line) if line.strip() else LaunchError.exit_code


def _die_with_the_parent() -> None:
    with contextlib.suppress(OSError, AttributeError):
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)


if __name__ == "__main__":
    main(sys.argv[1:])
