"""Checkpoint files of a directory, by the step in their names. Opens no file."""

from __future__ import annotations

import contextlib
import glob
import re
from pathlib import Path

ABANDONED_AFTER_S = 3600.0

_STEP_NAME = re.compile(r"step-(\d+)\.h5")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """The path of the checkpoint of a step."""
    return Path(directory) / f"step-{step:08d}.h5"


def partial_path(path: Path, token: str) -> Path:
    """Where a save writes before the file gets its name.

    The token is unique to the save; ``latest`` ignores the file.
    """
    return path.with_name(f".{path.name}.{token}.partial")


def abandoned_partials(path: Path, now_s: float) -> list[Path]:
    """Partial files of `path` that were last written more than ``ABANDONED_AFTER_S`` before `now_s` (Unix time)."""
    found = []
    for part in path.parent.glob(f".{glob.escape(path.name)}.*.partial"):
        with contextlib.suppress(FileNotFoundError):  # its saver has finished or removed it since
            if now_s - part.stat().st_mtime > ABANDONED_AFTER_S:
                found.append(part)
    return sorted(found)


def step_of(path: Path) -> int:
    """The step in a checkpoint's name; raises ValueError for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: is not called step-<number>.h5")
    return int(match[1])


def checkpoint_files(directory: str | Path) -> list[Path]:
    """Files named ``step-<number>.h5``, lowest step first; empty where the directory is missing.

    Raises:
        OSError: the directory cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in a directory, None where there is none."""
    files = checkpoint_files(directory)
    return files[-1] if files else None
