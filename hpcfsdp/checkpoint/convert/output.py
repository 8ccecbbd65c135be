"""Write files for other programs: they appear when they are complete, or not at all."""

from __future__ import annotations

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.catalog import new_token, partial_path, partials_of
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.parts import remove_abandoned
from hpcfsdp.errors import CheckpointError

Step = Callable[[int], None]
"""Called with the number of bytes since its last call."""

Progress = Callable[[str, int], contextlib.AbstractContextManager[Step]]
"""Called with an activity and its number of bytes; gives a ``Step``."""


@contextlib.contextmanager
def no_progress(_what: str, _nbytes: int) -> Iterator[Step]:
    """Report no progress."""
    yield lambda _nbytes: None


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root, with ``~`` resolved."""
    return Path(os.path.abspath(os.path.expanduser(path)))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add the file's name to errors of reading."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {reason(error)}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name to errors of writing."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from error


def check_absent(path: Path, *, force: bool) -> None:
    """Raise CheckpointError if the path exists, unless `force`."""
    if not force and os.path.lexists(path):
        raise CheckpointError(f"{path}: exists already (--force replaces it)")


def check_room(folder: Path, nbytes: int) -> None:
    """Raise CheckpointError if the file system of an existing folder has too little room."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(f"{folder}: {nbytes} bytes are needed, {free} are free on that file system")


@contextlib.contextmanager
def new_files(
    sizes: Mapping[Path, int], *, force: bool, replaced: Collection[Path] = ()
) -> Iterator[Mapping[Path, int]]:
    """Write files of one folder under temporary names and rename them at the end, all or none.

    Yield descriptors by path. A single file replaces an older one atomically. Of several files the last is the index,
    without which the others are useless: an older index is removed first, so that old and new files never mix.

    Args:
        sizes: bytes to reserve, by path, in the order of renaming.
        force: whether these files, and those of `replaced`, may exist.
        replaced: further files of the folder, removed at the end.
    """
    first, index = next(iter(sizes)), list(sizes)[-1]
    # Killed between the names of the first files and that of the index: what is there belongs to no whole.
    interrupted = first != index and not os.path.lexists(index) and bool(partials_of(index))
    for path in (*sizes, *replaced):
        check_absent(path, force=force or interrupted)
    made = _missing_folders(first.parent)
    partials = {path: partial_path(path, new_token()) for path in sizes}
    fds: dict[Path, int] = {}
    named: list[Path] = []
    try:
        with writing(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            for path in sizes:
                remove_abandoned(path)
            check_room(first.parent, sum(sizes.values()))
            for path, nbytes in sizes.items():
                if path.is_dir():
                    raise CheckpointError(f"{path}: is a folder, and no file can take its place")
                fds[path] = disk.create(partials[path], nbytes)
            yield fds
            for path in sizes:
                disk.sync(fds[path])
                disk.close(fds.pop(path))
            several = first != index
            for path in (*replaced, index) if several else ():
                disk.remove(path)
            for path, partial in partials.items():
                disk.rename(partial, path)
                named.append(path)
            for path in () if several else replaced:
                disk.remove(path)
            disk.sync_folder(first.parent)
    except BaseException:
        incomplete = named if len(named) < len(sizes) else []
        for fd in fds.values():
            disk.close(fd)
        with contextlib.suppress(OSError):
            for partial in (*partials.values(), *incomplete):
                disk.remove(partial)
        _remove_folders(made)
        raise


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int, *, force: bool, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Write a folder under a temporary name and rename it at the end; yield the temporary folder.

    Args:
        ours: whether an existing folder may be replaced with `force`.
    """
    check_absent(path, force=force)
    exists = os.path.lexists(path)
    if exists and not ours(path):
        raise CheckpointError(f"{path}: is not a checkpoint of that format, so it is not replaced: remove it yourself")
    made = _missing_folders(path.parent)
    partial, old = (partial_path(path, new_token()) for _ in range(2))
    try:
        with writing(path):
            if exists:  # else what was put aside may be the folder that an interrupted export was to replace
                remove_abandoned(path)
            partial.mkdir(parents=True)
            check_room(partial, nbytes)
            yield partial
            disk.sync_folder(partial)
            if exists:
                path.rename(old)
            disk.rename(partial, path)
            disk.sync_folder(path.parent)
    except BaseException:
        if exists and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        _remove_folders(made)
        raise
    shutil.rmtree(old, ignore_errors=True)
    remove_abandoned(path)


def _missing_folders(path: Path) -> list[Path]:
    """Return a folder and its parents that do not exist, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_folders(made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # something else may have come into them
        for folder in made:
            folder.rmdir()
