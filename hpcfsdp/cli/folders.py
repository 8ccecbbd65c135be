"""Checkpoints in a folder. Other jobs may write and remove files there at the same time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcfsdp.checkpoint.catalog import checkpoint_files
from hpcfsdp.errors import CheckpointError


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints in a folder or in its checkpoints/, lowest step first; at least one.

    Raises:
        CheckpointError: there is none, or the folder cannot be read.
    """
    try:
        found = checkpoint_files(folder) or checkpoint_files(folder / "checkpoints")
    except OSError as error:
        raise CheckpointError(f"{error.filename or folder}: {os.strerror(error.errno or 0)}") from error
    if not found:
        raise CheckpointError(f"{folder}: no checkpoints (step-<number>.h5) in this folder or in its checkpoints/")
    return found


def size_of(path: Path) -> int | None:
    """Bytes of a file, or of a dangling link; None for a missing file."""
    for look in (os.stat, os.lstat):
        with contextlib.suppress(OSError):
            return look(path).st_size
    return None
