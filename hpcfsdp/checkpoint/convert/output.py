"""Files that other programs are to read: they appear when they are whole, or not at all."""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping
from pathlib import Path

from hpcfsdp.checkpoint.catalog import partial_path
from hpcfsdp.checkpoint.files import Files, reason
from hpcfsdp.errors import CheckpointError

Step = Callable[[int], None]
"""Told how many bytes more have been dealt with."""

Progress = Callable[[str, int], contextlib.AbstractContextManager[Step]]
"""Told what is done and how many bytes there are in all; gives what is told of each step."""


@contextlib.contextmanager
def no_progress(_what: str, _nbytes: int) -> Iterator[Step]:
    """Tell nobody."""
    yield lambda _nbytes: None


def absolute(path: str | os.PathLike[str]) -> Path:
    """A path from the root, with ``~`` resolved."""
    return Path(os.path.abspath(os.path.expanduser(path)))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Have errors of the operating system name the file that could not be read."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {reason(error)}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Have errors of the operating system name the file that could not be written."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from error


def check_absent(path: Path, *, force: bool) -> None:
    """Raise if there is something at that place which may not be replaced.

    Raises:
        CheckpointError: there is.
    """
    if not force and os.path.lexists(path):
        raise CheckpointError(f"{path}: exists already (--force replaces it)")


def check_room(folder: Path, nbytes: int) -> None:
    """Raise if a file system has too little room. The folder has to be there.

    Raises:
        CheckpointError: it has; tells how much.
    """
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(f"{folder}: {nbytes} bytes are needed, {free} are free on that file system")


@contextlib.contextmanager
def new_files(
    files: Files, sizes: Mapping[Path, int], *, force: bool, replaced: Collection[Path] = ()
) -> Iterator[Mapping[Path, int]]:
    """Make files of one folder under names of their own; at the end they get their names, all or none.

    One file takes the place of an older one at once. Of several the last is one without which the others say nothing
    (an index): an older one of its name goes first, so that old and new ones are never taken together.

    Args:
        sizes: how many bytes of each are known to be needed. They get their names in this order.
        force: whether files of these names, and those of `replaced`, may be there.
        replaced: further files of that folder which the new ones stand in for; removed at the end.

    Yields:
        A descriptor to write with, by path.

    Raises:
        CheckpointError: there is such a file, there is no room, or the system refuses.
    """
    first = next(iter(sizes))
    for path in (*sizes, *replaced):
        check_absent(path, force=force)
    made = _missing_folders(first.parent)
    partials = {path: partial_path(path, secrets.token_hex(4)) for path in sizes}
    fds: dict[Path, int] = {}
    named: list[Path] = []
    try:
        with writing(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            check_room(first.parent, sum(sizes.values()))
            for path, nbytes in sizes.items():
                if path.is_dir():
                    raise CheckpointError(f"{path}: is a folder, and no file can take its place")
                fds[path] = files.create(partials[path], nbytes)
            yield fds
            for path in sizes:
                files.sync(fds[path])
                files.close(fds.pop(path))
            several = len(sizes) > 1
            for path in (*replaced, *list(sizes)[-1:]) if several else ():
                files.remove(path)
            for path, partial in partials.items():
                files.rename(partial, path)
                named.append(path)
            for path in () if several else replaced:
                files.remove(path)
            files.sync_folder(first.parent)
    except BaseException:
        incomplete = named if len(named) < len(sizes) else []
        for fd in fds.values():
            files.close(fd)
        with contextlib.suppress(OSError):
            for partial in (*partials.values(), *incomplete):
                files.remove(partial)
        _remove_folders(made)
        raise


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int, *, force: bool, ours: Callable[[Path], bool]) -> Iterator[Path]:
    """Make a folder under another name; it gets its own at the end.

    Args:
        ours: whether a folder that is there may be replaced with `force`.

    Yields:
        The folder to write into.

    Raises:
        CheckpointError: there is something of that name, there is no room, or the system refuses.
    """
    check_absent(path, force=force)
    exists = os.path.lexists(path)
    if exists and not ours(path):
        raise CheckpointError(f"{path}: is not a checkpoint of that format, so it is not replaced: remove it yourself")
    made = _missing_folders(path.parent)
    partial, old = (partial_path(path, secrets.token_hex(4)) for _ in range(2))
    files = Files()
    try:
        with writing(path):
            partial.mkdir(parents=True)
            check_room(partial, nbytes)
            yield partial
            files.sync_folder(partial)
            if exists:
                path.rename(old)
            files.rename(partial, path)
            files.sync_folder(path.parent)
    except BaseException:
        if exists and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        _remove_folders(made)
        raise
    shutil.rmtree(old, ignore_errors=True)


def _missing_folders(path: Path) -> list[Path]:
    """A folder and those above it that are not there, innermost first."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_folders(made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # something else may have come into them
        for folder in made:
            folder.rmdir()
