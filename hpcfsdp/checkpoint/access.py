"""Opening checkpoint files: their bytes, their seals, and what of them HDF5 may see. Not collective."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator
from pathlib import Path

import h5py

from hpcfsdp.checkpoint.files import Files, reason
from hpcfsdp.checkpoint.format.image import Stretches
from hpcfsdp.checkpoint.format.seal import Seal, read_regions, read_seal
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError

LEAST_ROOM_BYTES = 16 << 20
"""Of memory that any file may ask for."""

ROOM_PER_BYTE = 8
"""How many bytes of memory a file may ask for, beside those, for each that it takes on the disk."""


class Room:
    """The memory that a file may ask for: in proportion to what it takes on the disk.

    A small file can claim any size: by holes, or by a dataset with a thousand names.
    """

    def __init__(self, nbytes: int) -> None:
        """
        Args:
            nbytes: that the file takes on the disk.
        """
        self._allocated = nbytes
        self._left = LEAST_ROOM_BYTES + ROOM_PER_BYTE * nbytes

    @classmethod
    def of(cls, files: Files, fd: int) -> Room:
        """That of an open file.

        Raises:
            OSError: the system does not say how long it is.
        """
        return cls(files.allocated(fd))

    def take(self, nbytes: int) -> None:
        """Ask for bytes.

        Raises:
            ValueError: there have been too many.
        """
        self._left -= nbytes
        if self._left < 0:
            raise ValueError(
                f"it takes {self._allocated} bytes on the disk, and to look into it would take more than "
                f"{LEAST_ROOM_BYTES} and {ROOM_PER_BYTE} times as many of memory"
            )


@contextlib.contextmanager
def opened(files: Files, path: Path) -> Iterator[int]:
    """The descriptor of a checkpoint file.

    Raises:
        CheckpointError: there is no such file, or it cannot be opened.
    """
    try:
        fd = files.open_to_read(path)
    except IsADirectoryError:
        raise CheckpointError(f"{path}: is a directory, not a checkpoint file") from None
    except OSError as error:
        raise CheckpointError(f"{path}: {reason(error)}") from None
    try:
        yield fd
    finally:
        with contextlib.suppress(OSError):  # nothing was written; all that was read has been checked
            files.close(fd)


@contextlib.contextmanager
def hdf5_of(files: Files, fd: int, path: Path, seal: Seal | None) -> Iterator[h5py.File]:
    """What HDF5 may see of an open file: of one with a seal the regions that it names, which are checked here.

    Raises:
        CheckpointError: it cannot be read.
        CheckpointCorruptError: the regions do not have their checksum.
    """
    if seal is None:
        with os.fdopen(os.dup(fd), "rb") as plain, h5py.File(plain, "r") as file:
            yield file
        return
    known = regions_of(files, fd, path, seal)
    with h5py.File(Stretches(seal.file_bytes, known), "r") as file:
        yield file


def regions_of(files: Files, fd: int, path: Path, seal: Seal) -> list[tuple[int, bytes | bytearray]]:
    """The bytes of all regions of an open file: (first byte, bytes).

    Raises:
        CheckpointError: it cannot be read.
        CheckpointCorruptError: they do not have their checksum, or are mostly holes.
    """
    with damage(path):
        Room.of(files, fd).take(sum(nbytes for _, nbytes in seal.regions))
        return read_regions(seal, lambda begin, nbytes: bytes_of(files, fd, path, begin, nbytes))


def seal_of(files: Files, fd: int, path: Path) -> Seal | None:
    """The seal of an open file; None if it has none.

    Raises:
        CheckpointCorruptError: it is damaged.
    """
    with damage(path):
        return read_seal(files.size(fd), lambda begin, nbytes: bytes_of(files, fd, path, begin, nbytes))


def bytes_of(files: Files, fd: int, path: Path, begin: int, nbytes: int) -> bytearray:
    """Bytes of an open file.

    Raises:
        CheckpointError: they cannot be read.
        CheckpointCorruptError: the file ends before.
    """
    buffer = bytearray(nbytes)
    with damage(path):
        if files.read(fd, memoryview(buffer), begin) < nbytes:
            raise CheckpointCorruptError(f"{path}: has become shorter while it was read")
    return buffer


@contextlib.contextmanager
def damage(path: Path) -> Iterator[None]:
    """Have what goes wrong name the file: errors of the system, and ``ValueError`` that says what is damaged."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {reason(error)}") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {error}") from None
