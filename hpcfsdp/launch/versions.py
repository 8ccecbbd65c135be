"""The software of a rank, which must be the same on all ranks."""

from __future__ import annotations

import contextlib
import importlib.metadata
import logging
import sys
from typing import Any

from hpcfsdp import env
from hpcfsdp._version import __version__
from hpcfsdp.launch.together import error_of_all, is_same

log = logging.getLogger("hpcfsdp.launch")

_LOADED = ("torch", "mpi4py", "numpy")
_NEEDED = ("hpcfsdp", "torch", "Python")
"""Ranks with different ones order or pack their messages differently, and wait for each other, or compute with them."""
_SHOWN_HOSTS = 8


def versions() -> dict[str, str | None]:
    """The version of each package on this rank; None for one that is missing or not loaded. h5py is not loaded."""
    found: dict[str, str | None] = {"hpcfsdp": __version__, "Python": "{}.{}".format(*sys.version_info)}
    found |= {name: getattr(sys.modules.get(name), "__version__", None) for name in _LOADED}
    found |= {"Python's release": sys.version.split()[0], "h5py": None}
    with contextlib.suppress(importlib.metadata.PackageNotFoundError):
        found["h5py"] = importlib.metadata.version("h5py")
    return found


def compare(comm: Any) -> None:
    """Collective over `comm`, all ranks of the job. Compare their software; rank 0 logs differences that may be fine.

    Raises:
        LaunchError: on all ranks, if hpcfsdp, torch, or the minor version of Python differ.
    """
    mine = versions()
    if is_same(comm, mine):
        return
    everyone = comm.allgather((env.host_name(), mine))
    texts = {name: text for name in mine if (text := _difference(name, everyone))}
    hint = "start all ranks with one environment, which all nodes see, or which was copied to each of them"
    wrong = [text for name, text in texts.items() if name in _NEEDED]
    if wrong:
        raise error_of_all(f"the software of the ranks differs: {'; '.join(wrong)}: {hint}")
    if comm.rank == 0:
        log.warning("the software of the ranks differs: %s: %s", "; ".join(texts.values()), hint)


def _difference(name: str, everyone: list[tuple[str, dict[str, str | None]]]) -> str:
    """Where the version of a package is another one than on rank 0; empty if all ranks have the same."""
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
