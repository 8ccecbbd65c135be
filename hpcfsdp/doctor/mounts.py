"""The file system of a path, from the table of mounts."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

_NETWORK = (
    "nfs",
    "lustre",
    "gpfs",
    "beegfs",
    "weka",
    "ceph",
    "panfs",
    "pvfs2",
    "orangefs",
    "glusterfs",
    "cifs",
    "smb3",
)
"""The beginnings of the names of file systems that many nodes share."""


def file_system_of(path: str | os.PathLike[str], mounts: str | None = None) -> str | None:
    """The type of the file system that holds `path`, as "nfs4"; None if that is unknown.

    Args:
        mounts: the text of ``/proc/mounts``, by default that of this process.
    """
    if mounts is None:
        mounts = ""
        with contextlib.suppress(OSError):
            mounts = Path("/proc/mounts").read_text()
    within = Path(os.path.realpath(path))
    found: tuple[int, str | None] = (0, None)
    for line in mounts.splitlines():
        _, point, kind, *_ = line.split(" ")
        place = Path(point.replace("\\040", " "))
        if within.is_relative_to(place) and len(place.parts) >= found[0]:  # a later mount hides an earlier one
            found = len(place.parts), kind
    return found[1]


def is_shared(kind: str) -> bool:
    """Whether many nodes share a file system of this type."""
    return kind.removeprefix("fuse.").startswith(_NETWORK)
