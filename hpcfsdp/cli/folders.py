"""Checkpoints in the folders that verbs are given, which other jobs may be writing to and removing from."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcfsdp.checkpoint.catalog import checkpoint_files
from hpcfsdp.errors import CheckpointError


def checkpoints_in(folder: Path) -> list[Path]:
    """The checkpoints of a folder, or of the run that has it, lowest step first; at least one.

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
    """Bytes of a file; of a link that leads nowhere those of the link; None where nothing has that name any more."""
    for look in (os.stat, os.lstat):
        with contextlib.suppress(OSError):
            return look(path).st_size
    return None
