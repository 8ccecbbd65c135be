"""Opens checkpoint files: reads their bytes and footers, and gives HDF5 the parts it may parse. Not collective."""

from __future__ import annotations

import contextlib
import errno
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.footer import Footer, read_footer, read_regions
from hpcfsdp.checkpoint.format.image import KnownRanges
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError

LEAST_ROOM_BYTES = 16 << 20
"""Of memory that any file may ask for."""

ROOM_PER_BYTE = 8
"""Further bytes of memory that a file may claim for each of its bytes on the disk."""

_KINDS = {errno.ENOENT: "missing", errno.EACCES: "permission", errno.EPERM: "permission"}


class MemoryBudget:
    """The memory that a file may claim, in proportion to its size on the disk.

    Holes let a small file claim any size.
    """

    def __init__(self, nbytes: int) -> None:
        self._allocated = nbytes
        self._left = LEAST_ROOM_BYTES + ROOM_PER_BYTE * nbytes

    @classmethod
    def of_file(cls, fd: int) -> MemoryBudget:
        """The budget of an open file."""
        return cls(disk.allocated(fd))

    def claim(self, nbytes: int) -> None:
        """Claims bytes; raises ValueError when the file has claimed too many."""
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(
                f"it takes {self._allocated} bytes on the disk, and to look into it would take more than "
                f"{LEAST_ROOM_BYTES} and {ROOM_PER_BYTE} times as many of memory"
            )


def unreadable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """The error of a file or folder that cannot be opened, with its kind."""
    return CheckpointError(f"{path}: {reason(error)}").of_kind(_KINDS.get(error.errno, "unreadable"))


@contextlib.contextmanager
def open_file(path: Path, footer: Footer | None = None) -> Iterator[int]:
    """Opens a checkpoint file to read, as a descriptor; raises CheckpointError where that fails.

    With `footer`, raises CheckpointReplacedError if the file has another one by now.
    """
    try:
        fd = disk.open_to_read(path)
    except IsADirectoryError:
        what = "is a directory, not a checkpoint file (hpcfsdp ls lists those in it)"
        raise CheckpointError(f"{path}: {what}").of_kind("directory") from None
    except OSError as error:
        raise unreadable(path, error) from None
    try:
        if footer is not None and read_file_footer(fd, path) != footer:
            raise CheckpointReplacedError(f"{path}: has been replaced since it was opened: open it again")
        yield fd
    finally:
        with contextlib.suppress(OSError):  # nothing was written, and all bytes that were read have been verified
            disk.close(fd)


@contextlib.contextmanager
def open_hdf5(fd: int, path: Path, footer: Footer | None) -> Iterator[h5py.File]:
    """Opens a file in HDF5, which sees only the regions that the footer names. Their checksum is verified first."""
    if footer is None:
        with os.fdopen(os.dup(fd), "rb") as plain, h5py.File(plain, "r") as file:
            yield file
        return
    known = read_file_regions(fd, path, footer)
    with h5py.File(KnownRanges(footer.file_bytes, known), "r") as file:
        yield file


def read_file_regions(fd: int, path: Path, footer: Footer) -> list[tuple[int, bytes | bytearray]]:
    """Reads and verifies all regions of an open file: (first byte, bytes)."""
    with naming_damage(path):
        MemoryBudget.of_file(fd).claim(sum(nbytes for _, nbytes in footer.regions))
        return read_regions(footer, lambda begin, nbytes: read_bytes(fd, path, begin, nbytes))


def read_file_footer(fd: int, path: Path) -> Footer | None:
    """The footer of an open file; None if it has none. Raises CheckpointCorruptError for a damaged footer."""
    with naming_damage(path):
        return read_footer(disk.size(fd), lambda begin, nbytes: read_bytes(fd, path, begin, nbytes))


def read_bytes(fd: int, path: Path, begin: int, nbytes: int) -> bytearray:
    """Reads exactly `nbytes` bytes; raises CheckpointCorruptError where the file ends before."""
    buffer = bytearray(nbytes)
    with naming_damage(path):
        if disk.read(fd, memoryview(buffer), begin) < nbytes:
            raise CheckpointCorruptError(f"{path}: has become shorter while it was read")
    return buffer


@contextlib.contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Adds the file's name to a CheckpointError without it."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error}") from None


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Adds the file's name to errors: OSError becomes CheckpointError, ValueError becomes CheckpointCorruptError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}").of_kind("unreadable") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {error}") from None
