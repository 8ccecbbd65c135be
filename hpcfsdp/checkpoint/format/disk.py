"""All disk operations of checkpoints, on whole ranges. Not collective. Each raises ``OSError`` as the system call did.

Calls that the operating system cuts short (a partial write, a signal) are repeated until they are complete.
"""

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import stat
from collections.abc import Sequence
from contextvars import ContextVar
from pathlib import Path
from typing import Any

_BUFFERS_AT_ONCE = 1024  # what POSIX promises a vectored call to take (IOV_MAX)
_NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

_MOST_HOLES = 1 << 16  # most holes that are searched for in a file. The bytes after them count as data.


def reason(error: OSError) -> str:
    """Return the operating system's description of an error, without the file's name."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


@functools.cache
def _system_id() -> str:
    """Return the running kernel's id; one of this process alone where the kernel has none."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return secrets.token_hex(16)


def _fallocate(fd: int, nbytes: int) -> None:
    """Linux's fallocate. ``os.posix_fallocate`` writes to every block where the file system lacks the call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def check_regular(mode: int) -> None:
    """Raise unless `mode`, a `st_mode`, is of a regular file: IsADirectoryError for a directory, else OSError."""
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file")


class System:
    """The system calls, as ``os`` provides them."""

    open, close, pwritev, preadv = map(staticmethod, (os.open, os.close, os.pwritev, os.preadv))
    fsync, ftruncate, fallocate = map(staticmethod, (os.fsync, os.ftruncate, _fallocate))
    replace, unlink, fstat, lseek = map(staticmethod, (os.replace, os.unlink, os.fstat, os.lseek))


SYSTEM: ContextVar[Any] = ContextVar("SYSTEM", default=System)
"""What makes the calls. Tests set it to a disk that fails, in a thread and the threads of saves that it begins."""


def create(path: Path, nbytes: int) -> int:
    """Make a file of `nbytes` bytes, all holes; return its descriptor. Raise FileExistsError if it exists."""
    fd = _call("open", path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
    try:
        _call("ftruncate", fd, nbytes)
    except BaseException:
        close(fd)
        raise
    return fd


def open_to_write(path: Path) -> int:
    """Return the descriptor of a file that is there, and no link."""
    return _call("open", path, os.O_WRONLY | os.O_CLOEXEC | os.O_NOFOLLOW)


def open_to_read(path: Path) -> int:
    """Return the descriptor of a regular file; see ``check_regular``. Opening a pipe would wait for its writer."""
    check_regular(os.stat(path).st_mode)  # to open a device may do something
    fd = _call("open", path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
    try:
        check_regular(_call("fstat", fd).st_mode)
    except BaseException:
        close(fd)
        raise
    return fd


def close(fd: int) -> None:
    """Close the descriptor. After a signal Linux has closed it already."""
    with contextlib.suppress(InterruptedError):
        SYSTEM.get().close(fd)


def size(fd: int) -> int:
    """Return the bytes of the file."""
    return _call("fstat", fd).st_size


def allocated(fd: int) -> int:
    """Return the bytes of the file outside of holes; all bytes where the file system does not report holes."""
    status = _call("fstat", fd)
    if status.st_blocks * 512 >= status.st_size:
        return status.st_size
    found = end = 0
    for _ in range(_MOST_HOLES):
        begin = next_data(fd, end)
        if begin is None:
            return found
        try:
            end = _call("lseek", fd, begin, os.SEEK_HOLE)
        except OSError:
            return status.st_size
        found += end - begin
    return found + status.st_size - end


def next_data(fd: int, begin: int) -> int | None:
    """Return the first byte from `begin` on outside of holes, None without one; `begin` if holes are not reported."""
    try:
        return _call("lseek", fd, begin, os.SEEK_DATA)
    except OSError as error:
        return None if error.errno == errno.ENXIO else begin


def place(fd: int) -> tuple[str, int, int]:
    """Return the running system and the file: processes with equal values share the file's pages in memory."""
    status = _call("fstat", fd)
    return _system_id(), status.st_dev, status.st_ino


def write(fd: int, buffers: Sequence[memoryview], offset: int) -> None:
    """Write all bytes of the buffers, one buffer after the other."""
    views = [view.cast("B") for view in buffers if view.nbytes]
    first = 0
    while first < len(views):
        written = _call("pwritev", fd, views[first : first + _BUFFERS_AT_ONCE], offset)
        if written == 0:
            raise OSError(errno.EIO, "a write took no byte")
        offset += written
        while first < len(views) and written >= views[first].nbytes:
            written -= views[first].nbytes
            first += 1
        if written:
            views[first] = views[first][written:]


def write_runs(fd: int, data: memoryview, count: int, offset: int, stride: int) -> None:
    """Write `count` runs of as many bytes each, which follow each other in `data`, `stride` bytes apart."""
    # There may be a million of them, a row of a matrix each, so they do not go through ``write``.
    data, pwritev = data.cast("B"), SYSTEM.get().pwritev
    nbytes = data.nbytes // count
    for begin in range(0, count * nbytes, nbytes):
        run = data[begin : begin + nbytes]
        try:
            written = pwritev(fd, (run,), offset)
        except InterruptedError:
            written = 0
        if written != nbytes:
            write(fd, [run[written:]], offset + written)
        offset += stride


def reserve(fd: int, nbytes: int) -> None:
    """Reserve room for the first `nbytes` bytes, where the file system supports it."""
    try:
        _call("fallocate", fd, nbytes)
    except OSError as error:
        if error.errno not in (*_NO_SUCH_CALL, errno.ENOSYS):
            raise


def read(fd: int, buffer: memoryview, offset: int) -> int:
    """Fill a buffer from the file; return the number of bytes, smaller only at the file's end."""
    done = 0
    while done < buffer.nbytes:
        got = _call("preadv", fd, [buffer[done:]], offset + done)
        if got == 0:
            break
        done += got
    return done


def sync(fd: int) -> None:
    """Force written bytes to the disk."""
    _call("fsync", fd)


def start_sync(fd: int, offset: int, nbytes: int) -> None:
    """Hint to begin writing a range to the disk; return at once."""
    # Linux starts to write the dirty pages of what will not be read soon; they would wait for ``sync``, the disk idle.
    with contextlib.suppress(AttributeError, OSError):
        os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)


def rename(path: Path, target: Path) -> None:
    """Rename a file, replacing any other; ``sync_folder`` forces it to the disk."""
    _call("replace", path, target)


def sync_folder(path: Path) -> None:
    """Force the names in a folder to the disk, where the file system supports it."""
    try:
        fd = _call("open", path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
    except PermissionError:  # a folder may be written to and not be read
        return
    try:
        sync(fd)
    except OSError as error:
        if error.errno not in _NO_SUCH_CALL:
            raise
    finally:
        close(fd)


def remove(path: Path) -> None:
    """Remove a file, if it exists."""
    with contextlib.suppress(FileNotFoundError):
        _call("unlink", path)


def _call(name: str, *arguments: Any) -> Any:
    """Make a call of the system, and repeat it while signals interrupt it."""
    call = getattr(SYSTEM.get(), name)
    while True:
        try:
            return call(*arguments)
        except InterruptedError:
            continue
