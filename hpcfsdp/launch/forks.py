"""A warning where a process forks after MPI has started, as a DataLoader does for its workers by default on Linux."""

from __future__ import annotations

import os
import warnings
from typing import Any

from mpi4py import MPI

_process = 0
"""The process that is watched; one that has been forked is not."""


def install(comm: Any) -> None:
    """Not collective. Warn the first time that this process forks; new programs (``subprocess``, "spawn") are fine."""
    global _process
    if comm.size == 1 or _process:
        return
    _process = os.getpid()
    os.register_at_fork(before=_warn_once)


def _warn_once() -> None:
    global _process
    if os.getpid() != _process or MPI.Is_finalized():
        return
    _process = -1
    warnings.warn(
        "this process forks after MPI has started: MPI may hang or fail in the child, and in this process, too. For a "
        'DataLoader with workers give multiprocessing_context="spawn" or "forkserver", or num_workers=0',
        RuntimeWarning,
        stacklevel=2,
    )
