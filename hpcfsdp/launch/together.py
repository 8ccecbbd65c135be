"""Comparisons between all ranks of the job, before there is a ``Communicator``: values, errors, versions of software.

Their messages do not grow with the number of ranks: they are sent down a tree, or reduced.
"""

import contextlib
import importlib.metadata
import logging
import sys
from array import array
from collections.abc import Iterator, Sequence
from typing import Any

from hpcfsdp import env
from hpcfsdp._version import __version__
from hpcfsdp.errors import LaunchError
from hpcfsdp.launch.job import load_mpi

log = logging.getLogger("hpcfsdp.launch")

_LOADED = ("torch", "mpi4py", "numpy")
_NEEDED = ("hpcfsdp", "torch", "Python")
"""Ranks with different ones order or pack their messages differently, and wait for each other, or compute with them."""
_SHOWN_HOSTS = 8


def minima(comm: Any, values: Sequence[int]) -> list[int]:
    """Return the lowest of each of the values over all ranks, which give equally many. Collective over `comm`."""
    mpi, lowest = load_mpi(), array("i", values)
    comm.Allreduce(mpi.IN_PLACE, lowest, op=mpi.MIN)
    return lowest.tolist()


def is_same(comm: Any, value: Any) -> bool:
    """Return whether `value`, which can be pickled, is equal on all ranks. Collective over `comm`."""
    return minima(comm, [value == comm.bcast(value)]) == [1]


@contextlib.contextmanager
def raise_lowest(comm: Any) -> Iterator[None]:
    """Raise a LaunchError on all ranks, as the lowest does, if the block raises. Collective over `comm`, at its end.

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
        raise LaunchError(comm.bcast(f"{who}{mine}", failed)).on_all_ranks() from cause


def versions() -> dict[str, str | None]:
    """Return the version of each package on this rank; None for one that is missing or not loaded. Loads none."""
    found: dict[str, str | None] = {"hpcfsdp": __version__, "Python": "{}.{}".format(*sys.version_info)}
    found |= {name: getattr(sys.modules.get(name), "__version__", None) for name in _LOADED}
    found |= {"Python's release": sys.version.split()[0], "h5py": None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["h5py"] = importlib.metadata.version("h5py")
    return found


def compare_versions(comm: Any) -> None:
    """Raise on all ranks if hpcfsdp, torch, or the minor version of Python differ. Collective over `comm`, all ranks.

    Rank 0 logs other differences, which may be fine.
    """
    mine = versions()
    if is_same(comm, mine):
        return
    everyone = comm.allgather((env.host_name(), mine))
    texts = {name: text for name in mine if (text := _difference(name, everyone))}
    hint = "start all ranks with one environment, which all nodes see, or which was copied to each of them"
    wrong = [text for name, text in texts.items() if name in _NEEDED]
    if wrong:
        raise LaunchError(f"the software of the ranks differs: {'; '.join(wrong)}: {hint}").on_all_ranks()
    if comm.rank == 0:
        log.warning("the software of the ranks differs: %s: %s", "; ".join(texts.values()), hint)


def _difference(name: str, everyone: list[tuple[str, dict[str, str | None]]]) -> str:
    """Say where the version of a package is another one than on rank 0; "" if all ranks have the same."""
    first_host, first = everyone[0]
    others = [(rank, host) for rank, (host, found) in enumerate(everyone) if found[name] != first[name]]
    if not others:
        return ""
    rank, host = others[0]
    hosts = list(dict.fromkeys(host for _, host in others))
    listed = ", ".join(hosts[:_SHOWN_HOSTS]) + (", ..." if len(hosts) > _SHOWN_HOSTS else "")
    return (
        f"{name} is {first[name] or 'missing'} on rank 0 ({first_host}), but {everyone[rank][1][name] or 'missing'} on "
        f"rank {rank} ({host}); {len(others)} rank(s) differ from rank 0, on {listed}"
    )
