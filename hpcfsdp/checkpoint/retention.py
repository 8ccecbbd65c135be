"""Choose which checkpoints of a folder stay, and remove the others. Needs neither MPI nor torch."""

from __future__ import annotations

import contextlib
import operator
import os
import re
import threading
from collections import Counter
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format.catalog import abandoned_partials, checkpoint_files, step_of
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.parts import abandoned_parts, remove_checkpoint
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import CheckpointError, UsageError

_PARTIAL_NAME = re.compile(r"\.(.+)\.[^.]+\.partial")

_reading: Counter[Path] = Counter()
_reading_changes = threading.Lock()


@dataclass(frozen=True)
class Removal:
    """The removals of a folder.

    Attributes:
        going: files, lowest step first.
        staying: the others, lowest step first.
        damaged: descriptions of the damage by file; only files newer than `good` are checked.
        good: the newest valid checkpoint, which never goes; None if nothing was to go, or none is valid (then nothing
            goes).
    """

    going: tuple[Path, ...]
    staying: tuple[Path, ...]
    damaged: Mapping[Path, str]
    good: Path | None


def check_rules(keep_last: int | None, keep_every: int | None) -> None:
    """Raise UsageError unless the rules are whole numbers of at least 1, or None."""
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is not None:
            whole_number(name, value, least=1, hint=": the newest checkpoint always stays")


def whole_number(name: str, value: Any, *, least: int, hint: str = "") -> int:
    """Return an argument as int; raise UsageError unless it is a whole number of at least `least`."""
    try:
        number = operator.index(value)
    except TypeError:
        raise UsageError(f"{name} must be a whole number, not {value!r}") from None
    if number < least:
        raise UsageError(f"{name} must be at least {least}, not {number}{hint}")
    return number


def which_to_remove(steps: Iterable[int], *, keep_last: int | None, keep_every: int | None) -> set[int]:
    """Return the steps of checkpoints to remove. Pure. Raise UsageError as ``check_rules``.

    Args:
        keep_last: how many of the highest steps stay; None for 1 with `keep_every`, else for all.
        keep_every: multiples of this stay, too; None for none.
    """
    check_rules(keep_last, keep_every)
    ordered = sorted(set(steps))
    if keep_last is None and keep_every is None:
        return set()
    older = ordered[: -(keep_last or 1)]
    return {step for step in older if keep_every is None or step % keep_every}


def plan_removal(
    directory: str | os.PathLike[str],
    *,
    keep_last: int | None,
    keep_every: int | None,
    spare: Collection[Path] = (),
) -> Removal:
    """Choose the files to remove from a folder. Not collective; remove nothing.

    Open the newest files first, until one is valid: its footer is right, and with it everything but the tensors'
    elements. That one stays, whatever the rules are; if none is valid, all stay. So do targets of links that stay.
    `spare` lists files that always stay.
    Raise UsageError as ``check_rules``, OSError if the folder cannot be read.
    """
    files = checkpoint_files(directory)
    steps = which_to_remove(map(step_of, files), keep_last=keep_last, keep_every=keep_every)
    wanted = [path for path in files if step_of(path) in steps and path not in spare]
    used = in_use(wanted)
    wanted = [path for path in wanted if path not in used]
    if not wanted:
        return Removal((), tuple(files), {}, None)
    good, damaged = newest_good(files)
    going = tuple(path for path in wanted if path != good) if good is not None else ()
    linked = {os.path.realpath(path) for path in files if path not in going and path.is_symlink()}
    going = tuple(path for path in going if os.path.realpath(path) not in linked)
    return Removal(going, tuple(path for path in files if path not in going), damaged, good)


def remove(paths: Sequence[Path]) -> None:
    """Remove checkpoints with their parts, in this order; not collective. Open files remain readable.

    Raise CheckpointError at the first that cannot be removed.
    """
    for path in paths:
        try:
            remove_checkpoint(path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {reason(error)}") from error


def abandoned(directory: str | os.PathLike[str], now_s: float) -> list[Path]:
    """Return files that saves have left behind in a folder before `now_s` (Unix time). Not collective."""
    directory = Path(directory)
    targets = {match[1] for path in directory.iterdir() if (match := _PARTIAL_NAME.fullmatch(path.name))}
    partials = {partial for name in targets for partial in abandoned_partials(directory / name, now_s)}
    return sorted(path for path in partials.union(abandoned_parts(directory, now_s)) if path.is_file())


def newest_good(files: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """Return the newest valid checkpoint of files in order of steps, and the damage of later ones by file."""
    damaged: dict[Path, str] = {}
    for path in reversed(files):
        try:
            index = open_index(path)
            with BlockReader(index) as reader:
                for number in range(1, 1 + len(index.parts)):
                    reader.check_part(number)
        except CheckpointError as error:
            damaged[path] = str(error).removeprefix(f"{path}: ")
            continue
        return path, damaged
    return None, damaged


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep this process from removing a checkpoint during the block; not collective."""
    path = _known_as(path)
    with _reading_changes:
        _reading[path] += 1
    try:
        yield
    finally:
        with _reading_changes:
            _reading[path] -= 1


def in_use(paths: Iterable[Path]) -> set[Path]:
    """Return the files that this process is reading: within ``reading``, or with a descriptor."""
    with _reading_changes:
        read = {path for path, readers in _reading.items() if readers}
    found = set()
    opened = _open_files()
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            if _known_as(path) in read or (status.st_dev, status.st_ino) in opened:
                found.add(path)
    return found


def _known_as(path: str | os.PathLike[str]) -> Path:
    return Path(os.path.realpath(os.path.expanduser(path)))


def _open_files() -> set[tuple[int, int]]:
    """Return device and inode of all files that this process has open; empty where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                status = os.fstat(int(name))
                found.add((status.st_dev, status.st_ino))
    return found
