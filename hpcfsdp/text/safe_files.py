"""Files in folders that other users may be able to write to: any name there may be a link, a pipe, or a huge file.

Opening one here never waits, and reads no device. A link is followed only if it belongs to this user or to root, as
Linux does it in /tmp, and no new file is written through a link. What is read has a limit.
"""

from __future__ import annotations

import contextlib
import errno
import os
import stat
from collections.abc import Iterator
from typing import BinaryIO

Name = str | os.PathLike[str]


def open_to_read(path: Name, *, folder: int | None = None) -> BinaryIO:
    """Return a regular file, to read. `folder` is the descriptor of the folder in which `path` begins.

    Raises OSError if it is missing, no regular file, or a link of another user.
    """
    return os.fdopen(_open(path, os.O_RDONLY, folder), "rb")


def read(path: Name, most_bytes: int, *, folder: int | None = None, own: bool = False) -> bytes:
    """Return the content of a file; if `own`, of one that belongs to this user or to root.

    Raises OSError as ``open_to_read``, and if there are more than `most_bytes`.
    """
    with open_to_read(path, folder=folder) as file:
        if own:
            _check_owner(file.fileno(), path)
        found = file.read(most_bytes + 1)
    if len(found) > most_bytes:
        raise OSError(errno.EFBIG, f"has more than {most_bytes} bytes", os.fspath(path))
    return found


def open_to_append(path: Name) -> int:
    """Open a file to append to, made if missing, or a device. Raise OSError as ``open_to_read``."""
    return _open(path, os.O_RDWR | os.O_APPEND | os.O_CREAT, None)


def is_torn(fd: int) -> bool:
    """Return whether a file ends within a line, as after a kill or on a full disk."""
    nbytes = os.fstat(fd).st_size
    return nbytes > 0 and os.pread(fd, 1, nbytes - 1) != b"\n"


def create(path: Name, *, folder: int | None = None) -> BinaryIO:
    """Return a new file, to write. Raise FileExistsError if there is anything of that name, be it a link to nothing."""
    flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
    return os.fdopen(os.open(path, flags, 0o666, dir_fd=folder), "wb")


@contextlib.contextmanager
def replacing(path: Name, *, folder: int | None = None) -> Iterator[BinaryIO]:
    """Return a file to write, which gets its name when it is whole. A link of that name is replaced, not followed.

    One process at a time: the temporary file has one name, so that the next one removes it after a kill.
    """
    parent, name = os.path.split(path)
    temporary = os.path.join(parent, f".{name}.partial")
    remove(temporary, folder=folder)
    try:
        with create(temporary, folder=folder) as file:
            yield file
        os.replace(temporary, path, src_dir_fd=folder, dst_dir_fd=folder)
    except BaseException:
        with contextlib.suppress(OSError):
            remove(temporary, folder=folder)
        raise


def replace(path: Name, data: bytes, *, folder: int | None = None) -> None:
    """Write a whole file; see ``replacing``."""
    with replacing(path, folder=folder) as file:
        file.write(data)


def remove(path: Name, *, folder: int | None = None) -> None:
    """Remove a file, if there is one. Raises OSError for a folder, or if that is not permitted."""
    with contextlib.suppress(FileNotFoundError):
        os.unlink(path, dir_fd=folder)


@contextlib.contextmanager
def own_folder(path: Name, *, folder: int | None = None, make: bool = False) -> Iterator[int]:
    """Return the descriptor of a folder that belongs to this user or to root.

    Raises OSError if it is missing, no folder, a link to one, or another user's.
    """
    if make:
        with contextlib.suppress(FileExistsError):
            os.mkdir(path, dir_fd=folder)
    fd = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
    try:
        _check_owner(fd, path)
        yield fd
    finally:
        os.close(fd)


def _open(path: Name, flags: int, folder: int | None) -> int:
    flags |= os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY
    try:
        fd = os.open(path, flags | os.O_NOFOLLOW, 0o666, dir_fd=folder)
    except OSError as error:
        if error.errno != errno.ELOOP:
            raise
        link = os.open(path, os.O_PATH | os.O_NOFOLLOW | os.O_CLOEXEC, dir_fd=folder)
        try:
            _check_owner(link, path)
            target = os.path.join(os.path.dirname(path), os.readlink("", dir_fd=link))
        finally:
            os.close(link)
        fd = os.open(target, flags, 0o666, dir_fd=folder)
    mode = os.fstat(fd).st_mode
    if not stat.S_ISREG(mode) and not (flags & os.O_APPEND and stat.S_ISCHR(mode)):
        os.close(fd)
        raise OSError(errno.EINVAL, "is not a regular file", os.fspath(path))
    return fd


def _check_owner(fd: int, path: Name) -> None:
    owner, user = os.fstat(fd).st_uid, os.geteuid()
    if owner not in (user, 0):
        raise PermissionError(errno.EPERM, f"belongs to the user {owner}, not to {user}", os.fspath(path))
