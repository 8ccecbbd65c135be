"""Choose which checkpoints of a folder stay, and remove the others, with their parts. Needs neither MPI nor torch.

A part stores the tensors' elements that one node wrote, next to the checkpoint file, which records name, size and
digest of its parts. A part's name is unique to one save: an old checkpoint and a new one never share a part.
"""

import contextlib
import operator
import os
import re
import shutil
import time
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import is_hdf5
from hpcfsdp.checkpoint.format.catalog import abandoned_partials, checkpoint_files, step_of, was_abandoned
from hpcfsdp.checkpoint.format.footer import Footer, read_footer
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import CheckpointError, UsageError

_PART_NAME = re.compile(r"(?P<stem>.+)\.[0-9a-f]{8}\.node-\d+\.h5")
_PARTIAL_NAME = re.compile(rf"\.{_PART_NAME.pattern}\.[0-9a-f]+\.partial")
_LOOKED_AT = 64 << 20  # bytes at the beginning of a file that contain HDF5's metadata, with the names of other files

_reading: list[str] = []
"""Paths, as often as they are being read. Threads change and copy it in one call, which no other one interrupts."""


@dataclass(frozen=True)
class Removal:
    """The removals of a folder: files that go, and the others, lowest step first."""

    going: tuple[Path, ...]
    staying: tuple[Path, ...]
    damaged: Mapping[Path, str]  # descriptions of the damage by file; only files newer than `good` are checked
    good: Path | None  # the newest valid checkpoint, which stays; None if nothing was to go, or none is valid


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

    The `keep_last` highest steps stay (None: 1 with `keep_every`, else all), and multiples of `keep_every`.
    """
    check_rules(keep_last, keep_every)
    ordered = sorted(set(steps))
    if keep_last is None and keep_every is None:
        return set()
    older = ordered[: -(keep_last or 1)]
    return {step for step in older if keep_every is None or step % keep_every}


def plan_removal(
    directory: str | os.PathLike[str], *, keep_last: int | None, keep_every: int | None, spare: Collection[Path] = ()
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
    good: Path | None = None
    damaged: dict[Path, str] = {}
    for path in reversed(files):
        try:
            index = open_index(path)
            with BlockReader(index) as reader:
                for number in range(1, 1 + len(index.parts)):
                    reader.check_part(number)
            good = path
            break
        except CheckpointError as error:
            damaged[path] = str(error).removeprefix(f"{path}: ")
    going = tuple(path for path in wanted if path != good) if good is not None else ()
    linked = {os.path.realpath(path) for path in files if path not in going and path.is_symlink()}
    going = tuple(path for path in going if os.path.realpath(path) not in linked)
    return Removal(going, tuple(path for path in files if path not in going), damaged, good)


def remove(paths: Sequence[Path]) -> None:
    """Remove checkpoints with the parts that only they need, in this order; not collective. Open files remain readable.

    A checkpoint goes first, so that none ever lacks a part. The parts of a damaged one are unknown; they stay until
    ``abandoned_parts`` finds them. Raise CheckpointError at the first that cannot be removed.
    """
    for path in paths:
        try:
            own = owned_parts(path)
            disk.remove(path)
            remove_parts(path.parent, own)
        except OSError as error:
            raise CheckpointError(f"{path}: cannot be removed: {disk.reason(error)}") from error


def abandoned(directory: str | os.PathLike[str], now_s: float) -> list[Path]:
    """Return files that saves have left behind in a folder before `now_s` (Unix time). Not collective."""
    directory = Path(directory)
    partials = {path for path in directory.glob(".*.*.partial") if was_abandoned(path, now_s)}
    return sorted(path for path in partials.union(abandoned_parts(directory, now_s)) if path.is_file())


@contextlib.contextmanager
def reading(path: str | os.PathLike[str]) -> Iterator[None]:
    """Keep this process from removing a checkpoint during the block; not collective."""
    name = _known_as(path)
    _reading.append(name)
    try:
        yield
    finally:
        _reading.remove(name)


def in_use(paths: Iterable[Path]) -> set[Path]:
    """Return the files that this process is reading: within ``reading``, or with a descriptor."""
    read, opened, found = set(_reading.copy()), _open_files(), set()
    for path in paths:
        with contextlib.suppress(OSError):
            status = path.stat()
            if _known_as(path) in read or (status.st_dev, status.st_ino) in opened:
                found.add(path)
    return found


def _known_as(path: str | os.PathLike[str]) -> str:
    return os.path.realpath(os.path.expanduser(path))


def _open_files() -> set[tuple[int, int]]:
    """Return device and inode of all files that this process has open; empty where the system does not list them."""
    found = set()
    with contextlib.suppress(OSError):
        for name in os.listdir("/dev/fd"):
            with contextlib.suppress(OSError):  # that of the listing itself is closed by now
                status = os.fstat(int(name))
                found.add((status.st_dev, status.st_ino))
    return found


def remove_abandoned(path: Path) -> None:
    """Remove what earlier saves of a path have left behind, where that is possible."""
    with contextlib.suppress(OSError):
        now_s = time.time()
        for left in (*abandoned_partials(path, now_s), *abandoned_parts(path.parent, now_s, path.stem)):
            with contextlib.suppress(OSError):  # another saver removes or renames it, or another user owns it
                shutil.rmtree(left) if left.is_dir() else disk.remove(left)


def part_path(path: Path, token: str, node: int) -> Path:
    """Return the path of a node's part of the checkpoint `path`, with the 8 random digits of the save's token."""
    return path.with_name(f"{path.stem}.{token[:8]}.node-{node}.h5")


def is_part(path: Path) -> bool:
    """Return whether a file is named as a part of a checkpoint."""
    return _PART_NAME.fullmatch(path.name) is not None


def owned_parts(path: Path) -> list[Path]:
    """Return the parts that become useless when `path` is removed or replaced; none where that is uncertain.

    Hard and symbolic links to a checkpoint, and copies of it in the same folder, still need its parts.
    """
    with contextlib.suppress(OSError, CheckpointError):
        matches = map(_PART_NAME.fullmatch, os.listdir(path.parent))
        candidates = {match.string for match in matches if match and match["stem"] == path.stem}
        # Usually there are none, and opening a large index takes a while.
        if not candidates or path.is_symlink() or path.stat().st_nlink > 1:
            return []
        index = open_index(path)
        names = [part.name for part in index.parts if part.name in candidates]
        others = (other for other in _checkpoints(path.parent) if other != path)
        if names and not any(_may_name(other, names, index.footer) for other in others):
            return [index.folder / name for name in names]
    return []


def remove_parts(folder: Path, parts: list[Path]) -> None:
    """Remove parts that no checkpoint of the folder needs any more; raise OSError where that fails."""
    if parts:
        disk.sync_folder(folder)  # the checkpoint that named them must not come back without them
    for part in parts:
        disk.remove(part)


def abandoned_parts(folder: Path, now_s: float, stem: str | None = None) -> list[Path]:
    """Return parts, complete or partial, that saves left behind: old, and not named by any checkpoint of the folder.

    With `stem`, only those of the checkpoint of that name; `now_s` is Unix time. If a possible checkpoint cannot be
    read, no complete part counts as abandoned. Raise OSError if the folder cannot be read.
    """
    whole, partial = [], []
    for path in sorted(folder.iterdir()):
        for pattern, found in ((_PART_NAME, whole), (_PARTIAL_NAME, partial)):
            match = pattern.fullmatch(path.name)
            if match and stem in (None, match["stem"]) and was_abandoned(path, now_s):
                found.append(path)
    if whole:
        try:
            named = {part.name for path in _checkpoints(folder) for part in open_index(path).parts}
        except CheckpointError:
            return partial
        whole = [path for path in whole if path.name not in named]
    return whole + partial


def _checkpoints(folder: Path) -> Iterator[Path]:
    """HDF5 files of a folder, under any name, that are not named as parts."""
    for path in folder.iterdir():
        if path.is_file() and not is_part(path) and not path.name.endswith(".partial") and is_hdf5(path):
            yield path


def _may_name(path: Path, names: list[str], footer: Footer | None) -> bool:
    """Return whether an HDF5 file may name one of these parts of the checkpoint with this footer."""
    # Names are unique to a save: a file with a footer names them only if it is a copy. Others are searched for names.
    with path.open("rb") as file:
        fd = file.fileno()
        with contextlib.suppress(ValueError):
            found = read_footer(os.fstat(fd).st_size, lambda begin, nbytes: os.pread(fd, nbytes, begin))
            if found is not None:
                return found == footer
        head = file.read(_LOOKED_AT)
        return any(name.encode() in head for name in names)
