"""Checkpoints in a folder. Other jobs may write and remove files there at the same time."""

from __future__ import annotations

import contextlib
import os
from pathlib import Path

from hpcfsdp.checkpoint.format.access import is_checkpoint, is_hdf5, unreadable
from hpcfsdp.checkpoint.format.catalog import checkpoint_files
from hpcfsdp.checkpoint.retention import is_part
from hpcfsdp.cli.printing import print_note
from hpcfsdp.errors import CheckpointError

_HDF5_SUFFIXES = (".h5", ".hdf5")


def checkpoints_in(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder and in its checkpoints/, at least one, whatever their names.

    Their content decides. Those named after steps come first, lowest step first, then others by name, also damaged
    files called ``*.h5``. A note on stderr names HDF5 files of other programs.

    Raises:
        CheckpointError: there is none, or the folder cannot be read.
    """
    try:
        places = [place for place in (folder / "checkpoints", folder) if place == folder or place.is_dir()]
        listings = [_list_one(place) for place in places]
    except OSError as error:
        raise unreadable(error.filename or folder, error) from error
    for path in (path for _, foreign in listings for path in foreign):
        print_note(f"{path}: not a checkpoint of hpcfsdp, left out")
    found = [path for checkpoints, _ in listings for path in checkpoints]
    if not found:
        raise CheckpointError(f"{folder}: no checkpoints in this folder or in its checkpoints/").of_kind("missing")
    return found


def _list_one(folder: Path) -> tuple[list[Path], list[Path]]:
    """Return the checkpoints in one folder, and HDF5 files of other programs."""
    named = checkpoint_files(folder)
    checkpoints, foreign = list(named), []
    for path in sorted(set(folder.iterdir()) - set(named)):
        if path.name.startswith(".") or is_part(path):
            continue
        try:
            if not path.is_file():
                continue
            if is_checkpoint(path):
                checkpoints.append(path)
            elif path.suffix in _HDF5_SUFFIXES:
                (foreign if is_hdf5(path) else checkpoints).append(path)
        except OSError:  # not readable, or gone since; a checkpoint by its name is listed with the error
            if path.suffix in _HDF5_SUFFIXES and size_of(path) is not None:
                checkpoints.append(path)
    return checkpoints, foreign


def size_of(path: Path) -> int | None:
    """Return bytes of a file, or of a dangling link; None for a missing file."""
    for look in (os.stat, os.lstat):
        with contextlib.suppress(OSError):
            return look(path).st_size
    return None
