"""Checkpoint files of a directory, by the step in their names, and files that saves have left. Open none of them."""

import contextlib
import glob
import hashlib
import os
import re
import secrets
from pathlib import Path

from hpcfsdp.launch import lock

ABANDONED_AFTER_S = 3600.0  # after its last write, where it cannot be seen that the process has ended
_MADE_BY = re.compile(r"\.[0-9a-f]{8}([0-9a-f]{8})([0-9a-f]{6})([0-9a-f]{10})\.partial")

_STEP_NAME = re.compile(r"step-(\d+)\.h5")


def checkpoint_path(directory: str | Path, step: int) -> Path:
    """Return the path of the checkpoint of a step."""
    return Path(directory) / f"step-{step:08d}.h5"


def new_token() -> str:
    """Return unique to a save: 8 random hexadecimal digits, then digits of this process, for ``was_abandoned``."""
    pid = os.getpid()
    return f"{secrets.token_hex(4)}{_system()}{pid:06x}{int(lock.started(pid) or 0):010x}"


def partial_path(path: Path, token: str) -> Path:
    """Return the path that a save, with its unique token, writes to before the file gets its name."""
    return path.with_name(f".{path.name}.{token}.partial")


def partials_of(path: Path) -> list[Path]:
    """Return all partial files of `path`, and folders in place of files."""
    return sorted(path.parent.glob(f".{glob.escape(path.name)}.*.partial"))


def abandoned_partials(path: Path, now_s: float) -> list[Path]:
    """Partial files of `path` that their savers have abandoned by `now_s` (Unix time)."""
    return [part for part in partials_of(path) if was_abandoned(part, now_s)]


def was_abandoned(part: Path, now_s: float) -> bool:
    """Return whether a file's process has ended on this system, or its last write is ``ABANDONED_AFTER_S`` ago."""
    made_by = _MADE_BY.search(part.name)
    if made_by is not None and lock.system() and made_by[1] == _system() and (started := int(made_by[3], 16)):
        runs = lock.runs(int(made_by[2], 16), str(started))
        if runs is not None:
            return not runs
    with contextlib.suppress(FileNotFoundError):  # its saver has finished or removed it since
        inside = part.iterdir() if part.is_dir() else ()
        written_s: float = max(each.stat().st_mtime for each in (part, *inside))
        return now_s - written_s > ABANDONED_AFTER_S
    return False


def _system() -> str:
    """Name the boot of the system and its pid namespace, in which the number of a process is unique."""
    return hashlib.blake2b(lock.system().encode(), digest_size=4).hexdigest()


def step_of(path: Path) -> int:
    """Return the step in a checkpoint's name; raise ValueError for any other name."""
    match = _STEP_NAME.fullmatch(path.name)
    if match is None:
        raise ValueError(f"{path}: is not called step-<number>.h5")
    return int(match[1])


def checkpoint_files(directory: str | Path) -> list[Path]:
    """Return files named ``step-<number>.h5``, lowest step first; empty where the directory is missing.

    Raises:
        OSError: the directory cannot be read.
    """
    directory = Path(directory)
    if not directory.is_dir():
        return []
    found = [(int(match[1]), path) for path in directory.iterdir() if (match := _STEP_NAME.fullmatch(path.name))]
    return [path for _, path in sorted(found)]


def latest(directory: str | Path) -> Path | None:
    """Return the checkpoint of the highest step in a directory, None where there is none."""
    return next(reversed(checkpoint_files(directory)), None)
