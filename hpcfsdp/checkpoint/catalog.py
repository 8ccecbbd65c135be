"""Checkpoint files in a directory, by the step in their names. Opens none of them."""

from __future__ import annotations

import re
from pathlib import Path

_STEP_NAME = re.compile(r"step-(\d+)\.h5")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """The name under which a run keeps the checkpoint of a step."""
    return Path(directory) / f"step-{step:08d}.h5"


def partial_path(path: Path) -> Path:
    """Where a checkpoint is written before it gets its final name; ``ls`` and ``latest`` pass over it."""
    return path.with_name(f".{path.name}.partial")


def checkpoint_files(directory: str | Path) -> list[Path]:
    """Files named ``step-<number>.h5``, lowest step first; empty where the directory is missing."""
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(directory: str | Path) -> Path | None:
    """The checkpoint of the highest step in a directory, None where there is none."""
    files = checkpoint_files(directory)
    return files[-1] if files else None
