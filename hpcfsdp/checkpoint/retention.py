"""Which checkpoints of a folder stay, and the removal of the others. Needs neither MPI nor torch."""

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

from hpcfsdp.checkpoint.catalog import abandoned_partials, checkpoint_files, step_of
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.checkpoint.parts import abandoned_parts, remove_checkpoint
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.errors import CheckpointError, UsageError

_PARTIAL_NAME = re.compile(r"\.(.+)\.[^.]+\.partial")

_reading: Counter[Path] = Counter()
_reading_changes = threading.Lock()


@dataclass(frozen=True)
class Removal:
    """What is to go from a folder.

    Attributes:
        going: files, lowest step first.
        staying: the others, lowest step first.
        damaged: by file, what is wrong with it; of those that were looked at, from the newest down to the newest good.
        good: the newest file that is a whole checkpoint, which never goes; None where nothing was to go, or if there is
            none (then nothing goes).
    """

    going: tuple[Path, ...]
    staying: tuple[Path, ...]
    damaged: Mapping[Path, str]
    good: Path | None


def check_rules(keep_last: int | None, keep_every: int | None) -> None:
    """Raise unless these are rules.

    Raises:
        UsageError: one that is no whole number, or not positive.
    """
    for name, value in (("keep_last", keep_last), ("keep_every", keep_every)):
        if value is None:
            continue
        try:
            number = operator.index(value)
        except TypeError:
            raise UsageError(f"{name} must be a whole number, not {value!r}") from None
        if number < 1:
            raise UsageError(f"{name} must be at least 1, not {value}: the newest checkpoint always stays")


def which_to_remove(steps: Iterable[int], *, keep_last: int | None, keep_every: int | None) -> set[int]:
    """The steps whose checkpoints are not to be kept. Pure.

    Args:
        steps: of all checkpoints, in any order.
        keep_last: how many of the highest steps stay; None for 1 where `keep_every` is given, else for all.
        keep_every: multiples of this stay, too; None for none.

    Raises:
        UsageError: a number that is not positive.
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
    """Find out what is to go from a folder; not collective, removes nothing.

    Before anything is to go the newest files are opened, one after the other, until one is good: its seal is right, and
    with it all but the tensors' elements. That one stays, whatever the rules say; if none is good, all stay.

    Args:
        keep_last, keep_every: see ``which_to_remove``.
        spare: files that stay in any case.

    Raises:
        UsageError: a number that is not positive.
        OSError: the folder cannot be read.
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
    return Removal(going, tuple(path for path in files if path not in going), damaged, good)


def remove(files: Files, paths: Sequence[Path]) -> None:
    """Remove checkpoints, with the files that hold parts of them, in the order given; not collective.

    Another process that is reading one goes on to read it: on POSIX a file lives until nobody has it open.

    Raises:
        CheckpointError: one cannot be removed; those after it are left.
    """
    for path in paths:
        try:
            remove_checkpoint(files, path)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {os.strerror(error.errno or 0)}") from error


def abandoned(directory: str | os.PathLike[str], now_s: float) -> list[Path]:
    """Files of a folder that savers, to whatever path in it, have left behind; not collective, removes nothing.

    Args:
        now_s: Unix time. What was written to less than ``catalog.ABANDONED_AFTER_S`` before is not abandoned.

    Raises:
        OSError: the folder cannot be read.
    """
    directory = Path(directory)
    targets = {match[1] for path in directory.iterdir() if (match := _PARTIAL_NAME.fullmatch(path.name))}
    partials = {partial for name in targets for partial in abandoned_partials(directory / name, now_s)}
    return sorted(path for path in partials.union(abandoned_parts(directory, now_s)) if path.is_file())


def newest_good(files: Sequence[Path]) -> tuple[Path | None, dict[Path, str]]:
    """The newest file that is a whole checkpoint, and what is wrong with those after it; not collective.

    Args:
        files: lowest step first.
    """
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
    """Keep this process from removing a checkpoint while the block runs; not collective."""
    path = _known_as(path)
    with _reading_changes:
        _reading[path] += 1
    try:
        yield
    finally:
        with _reading_changes:
            _reading[path] -= 1


def in_use(paths: Iterable[Path]) -> set[Path]:
    """Those of the files that this process is reading: within ``reading``, or open."""
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
    """Device and inode of all that this process has open; nothing where the system does not list it."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                status = os.fstat(int(name))
                found.add((status.st_dev, status.st_ino))
    return found
