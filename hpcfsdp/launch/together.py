"""Comparisons between all ranks of the job, before there is a ``Communicator``.

Their messages do not grow with the number of ranks: they are sent down a tree, or reduced.
"""

from __future__ import annotations

import contextlib
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from hpcfsdp import env
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi


def minima(comm: Any, values: Sequence[int]) -> list[int]:
    """Collective over `comm`. The lowest of each of the values over all ranks, which give equally many."""
    mpi, lowest = load_mpi(), array("i", values)
    comm.Allreduce(mpi.IN_PLACE, lowest, op=mpi.MIN)
    return lowest.tolist()


def is_same(comm: Any, value: Any) -> bool:
    """Collective over `comm`. Whether `value`, which can be pickled, is equal on all ranks."""
    return minima(comm, [value == comm.bcast(value)]) == [1]


@contextlib.contextmanager
def raise_lowest(comm: Any) -> Iterator[None]:
    """Collective over `comm`, at its end. If the block raises on any rank, all raise a LaunchError as the lowest does.

    The block itself must not call collectives on `comm`.
    """
    mine = None
    try:
        yield
    except Exception as error:  # of any kind, as of a broken driver: the others would wait for this rank
        mine = error
    (failed,) = minima(comm, [comm.size if mine is None else comm.rank])
    if failed < comm.size:
        who = f"rank {comm.rank} on {env.host_name()}: " if comm.size > 1 else ""
        cause = None if isinstance(mine, LaunchError) else mine
        raise error_of_all(comm.bcast(f"{who}{mine}", failed)) from cause


def error_of_all(message: str) -> LaunchError:
    """An error that all ranks raise."""
    error = LaunchError(message)
    error.raised_on_all_ranks = True
    return error
