"""Every operation on the disk that a checkpoint needs, in one object, so that each of them can be made to fail.

Calls that the operating system may cut short (a write of fewer bytes, a signal) are repeated until all is done.
"""

from __future__ import annotations

import contextlib
import ctypes
import errno
import functools
import os
import secrets
import stat
from collections.abc import Sequence
from pathlib import Path

_BUFFERS_AT_ONCE = 1024
"""What POSIX promises a vectored call to take (IOV_MAX)."""

_NO_SUCH_CALL = (errno.EINVAL, errno.ENOTSUP, errno.EOPNOTSUPP)

_MOST_HOLES = 1 << 16
"""That are looked for in a file. What lies behind them is taken for data."""


def reason(error: OSError) -> str:
    """What an error of the operating system says, without the name of the file."""
    return error.strerror or (os.strerror(error.errno) if error.errno else str(error))


@functools.cache
def _system_id() -> str:
    """Of the kernel that runs; of this process alone, where that is not known."""
    try:
        return Path("/proc/sys/kernel/random/boot_id").read_text()
    except OSError:
        return secrets.token_hex(16)


def _fallocate(fd: int, nbytes: int) -> None:
    """As Linux has it. ``os.posix_fallocate`` writes into every block where the file system has no such call."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.fallocate(fd, 0, ctypes.c_int64(0), ctypes.c_int64(nbytes)):
        raise OSError(ctypes.get_errno(), os.strerror(ctypes.get_errno()))


def check_regular(mode: int) -> None:
    """Raise unless a file of this mode (``st_mode``) is a regular one.

    Raises:
        IsADirectoryError: it is a directory.
        OSError: it is a pipe, a device or a socket.
    """
    if stat.S_ISDIR(mode):
        raise IsADirectoryError(errno.EISDIR, "is a directory, not a file")
    if not stat.S_ISREG(mode):
        raise OSError(errno.EINVAL, "is not a regular file")


class System:
    """The calls themselves, as ``os`` has them; a test puts another object in this place."""

    open = staticmethod(os.open)
    close = staticmethod(os.close)
    pwritev = staticmethod(os.pwritev)
    preadv = staticmethod(os.preadv)
    fsync = staticmethod(os.fsync)
    ftruncate = staticmethod(os.ftruncate)
    fallocate = staticmethod(_fallocate)
    replace = staticmethod(os.replace)
    unlink = staticmethod(os.unlink)
    fstat = staticmethod(os.fstat)
    lseek = staticmethod(os.lseek)


class Files:
    """Reads and writes of whole ranges. Not collective.

    Every method raises ``OSError`` as the system call did.
    """

    def __init__(self, system: System | None = None) -> None:
        self._system = system or System()

    def create(self, path: Path, nbytes: int) -> int:
        """A new file of `nbytes` bytes, all holes; its descriptor.

        Raises:
            FileExistsError: there is a file of that name.
        """
        fd = self._repeated(self._system.open, path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o666)
        try:
            self._repeated(self._system.ftruncate, fd, nbytes)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def open_to_write(self, path: Path) -> int:
        """The descriptor of a file that is there."""
        return self._repeated(self._system.open, path, os.O_WRONLY | os.O_CLOEXEC)

    def open_to_read(self, path: Path) -> int:
        """The descriptor of a regular file. Waits for nobody: to open a pipe would be to wait for one that writes.

        Raises:
            IsADirectoryError: it is a directory.
            OSError: it is a pipe, a device or a socket; or as the system call did.
        """
        check_regular(os.stat(path).st_mode)  # to open a device may do something
        fd = self._repeated(self._system.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK)
        try:
            check_regular(self._repeated(self._system.fstat, fd).st_mode)
        except BaseException:
            self.close(fd)
            raise
        return fd

    def close(self, fd: int) -> None:
        """Give the descriptor back. A signal in between has closed it already (Linux)."""
        with contextlib.suppress(InterruptedError):
            self._system.close(fd)

    def size(self, fd: int) -> int:
        """Bytes of the file."""
        return self._repeated(self._system.fstat, fd).st_size

    def allocated(self, fd: int) -> int:
        """Bytes of the file that are not in holes. All of them, where the file system does not say."""
        status = self._repeated(self._system.fstat, fd)
        if status.st_blocks * 512 >= status.st_size:
            return status.st_size
        found = end = 0
        for _ in range(_MOST_HOLES):
            begin = self.next_data(fd, end)
            if begin is None:
                return found
            try:
                end = self._repeated(self._system.lseek, fd, begin, os.SEEK_HOLE)
            except OSError:
                return status.st_size
            found += end - begin
        return found + status.st_size - end

    def next_data(self, fd: int, begin: int) -> int | None:
        """The first byte from `begin` on that is in no hole; None if there is none. `begin` where that is not known."""
        try:
            return self._repeated(self._system.lseek, fd, begin, os.SEEK_DATA)
        except OSError as error:
            return None if error.errno == errno.ENXIO else begin

    def place(self, fd: int) -> tuple[str, int, int]:
        """Which file it is, and on which running system: two processes with the same share its pages in memory."""
        status = self._repeated(self._system.fstat, fd)
        return _system_id(), status.st_dev, status.st_ino

    def write(self, fd: int, buffers: Sequence[memoryview], offset: int) -> None:
        """Write buffers one after the other, all of them."""
        views = [view.cast("B") for view in buffers if view.nbytes]
        first = 0
        while first < len(views):
            written = self._repeated(self._system.pwritev, fd, views[first : first + _BUFFERS_AT_ONCE], offset)
            if written == 0:
                raise OSError(errno.EIO, "a write took no byte")
            offset += written
            while first < len(views) and written >= views[first].nbytes:
                written -= views[first].nbytes
                first += 1
            if written:
                views[first] = views[first][written:]

    def reserve(self, fd: int, nbytes: int) -> None:
        """Have room for the first `nbytes` bytes of a file, where the file system can promise it."""
        try:
            self._repeated(self._system.fallocate, fd, nbytes)
        except OSError as error:
            if error.errno not in (*_NO_SUCH_CALL, errno.ENOSYS):
                raise

    def read(self, fd: int, buffer: memoryview, offset: int) -> int:
        """Fill a buffer from the file; how many bytes there were: fewer only where the file ends."""
        done = 0
        while done < buffer.nbytes:
            got = self._repeated(self._system.preadv, fd, [buffer[done:]], offset + done)
            if got == 0:
                break
            done += got
        return done

    def sync(self, fd: int) -> None:
        """Force what has been written to the disk."""
        self._repeated(self._system.fsync, fd)

    @staticmethod
    def start_sync(fd: int, offset: int, nbytes: int) -> None:
        """Have the system begin to write a range to the disk, and return at once: a hint, which may do nothing.

        What it is told is that the range will not be read soon. Linux then begins to write what is dirty of it, which
        it else leaves to ``sync``: the disk would be idle until then.
        """
        with contextlib.suppress(AttributeError, OSError):
            os.posix_fadvise(fd, offset, nbytes, os.POSIX_FADV_DONTNEED)

    def rename(self, path: Path, target: Path) -> None:
        """Give a file its name, in place of one that has it; to be forced to the disk by ``sync_folder``."""
        self._repeated(self._system.replace, path, target)

    def sync_folder(self, path: Path) -> None:
        """Force the names in a folder to the disk, where the file system has such a call."""
        try:
            fd = self._repeated(self._system.open, path, os.O_RDONLY | os.O_CLOEXEC | os.O_DIRECTORY)
        except PermissionError:  # a folder may be written to and not be read
            return
        try:
            self.sync(fd)
        except OSError as error:
            if error.errno not in _NO_SUCH_CALL:
                raise
        finally:
            self.close(fd)

    def remove(self, path: Path) -> None:
        """Remove a file, if it is there."""
        with contextlib.suppress(FileNotFoundError):
            self._repeated(self._system.unlink, path)

    @staticmethod
    def _repeated(call, *arguments):
        while True:
            try:
                return call(*arguments)
            except InterruptedError:
                continue
