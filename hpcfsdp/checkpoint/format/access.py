"""Open checkpoint files: what they are, their bytes and footers, and the parts that HDF5 may parse. Not collective."""

import contextlib
import errno
import os
import re
import struct
from collections.abc import Iterator
from pathlib import Path

import h5py

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.footer import Footer, read_footer, read_regions
from hpcfsdp.checkpoint.format.image import KnownRanges
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointReplacedError

LEAST_ROOM_BYTES = 16 << 20  # of memory that any file may ask for
ROOM_PER_BYTE = 8  # further bytes of memory that a file may claim for each of its bytes on the disk
_KINDS = {errno.ENOENT: "missing", errno.EACCES: "permission", errno.EPERM: "permission"}


class MemoryBudget:
    """The memory that a file may claim, by its size on the disk: holes let a small file claim any size."""

    def __init__(self, nbytes: int) -> None:
        self._allocated = nbytes
        self._left = LEAST_ROOM_BYTES + ROOM_PER_BYTE * nbytes

    @classmethod
    def of_file(cls, fd: int) -> "MemoryBudget":
        """Return the budget of an open file."""
        return cls(disk.allocated(fd))

    def claim(self, nbytes: int) -> None:
        """Claim bytes; raise ValueError when the file has claimed too many."""
        self._left -= nbytes
        if self._left < 0:
            what = f"it takes {self._allocated} bytes on the disk, and to look into it would take more than "
            raise ValueError(f"{what}{LEAST_ROOM_BYTES} and {ROOM_PER_BYTE} times as many of memory")


def unreadable(path: str | os.PathLike[str], error: OSError) -> CheckpointError:
    """Return the error of a file or folder that cannot be opened, with its kind."""
    return CheckpointError(f"{path}: {disk.reason(error)}").of_kind(_KINDS.get(error.errno, "unreadable"))


@contextlib.contextmanager
def open_file(path: Path, footer: Footer | None = None) -> Iterator[int]:
    """Open a file to read, as a descriptor; raise CheckpointError, or CheckpointReplacedError for another `footer`."""
    try:
        fd = disk.open_to_read(path)
    except IsADirectoryError:
        what = f"{path}: is a directory, not a checkpoint file (hpcfsdp ls lists those in it)"
        raise CheckpointError(what).of_kind("directory") from None
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
    """Open a file in HDF5, which sees only the regions that the footer names. Their checksum is verified first."""
    if footer is None:
        with os.fdopen(os.dup(fd), "rb") as plain, h5py.File(plain, "r") as file:
            yield file
        return
    known = read_file_regions(fd, path, footer)
    with h5py.File(KnownRanges(footer.file_bytes, known), "r") as file:
        yield file


def read_file_regions(fd: int, path: Path, footer: Footer) -> list[tuple[int, bytes | bytearray]]:
    """Read and verify all regions of an open file: (first byte, bytes)."""
    with naming_damage(path):
        MemoryBudget.of_file(fd).claim(sum(nbytes for _, nbytes in footer.regions))
        return read_regions(footer, lambda begin, nbytes: read_bytes(fd, path, begin, nbytes))


def read_file_footer(fd: int, path: Path) -> Footer | None:
    """Return the footer of an open file; None if it has none. Raise CheckpointCorruptError for a damaged footer."""
    with naming_damage(path):
        return read_footer(disk.size(fd), lambda begin, nbytes: read_bytes(fd, path, begin, nbytes))


def read_bytes(fd: int, path: Path, begin: int, nbytes: int) -> bytearray:
    """Read exactly `nbytes` bytes; raise CheckpointCorruptError where the file ends before."""
    buffer = bytearray(nbytes)
    with naming_damage(path):
        if disk.read(fd, memoryview(buffer), begin) < nbytes:
            raise CheckpointCorruptError(f"{path}: has become shorter while it was read")
    return buffer


@contextlib.contextmanager
def naming_errors(path: Path) -> Iterator[None]:
    """Add the file's name to a CheckpointError without it."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(str(path)):
            raise
        raise type(error)(f"{path}: {error}") from None


@contextlib.contextmanager
def naming_damage(path: Path) -> Iterator[None]:
    """Add the file's name to errors: OSError becomes CheckpointError, ValueError becomes CheckpointCorruptError."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be read: {disk.reason(error)}").of_kind("unreadable") from error
    except ValueError as error:
        raise CheckpointCorruptError(f"{path}: damaged: {error}") from None


HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ZIP_SIGNATURE = b"PK\x03\x04"
_OF_TORCH = ": a zip archive, as torch.save writes: hpcfsdp import --format pt converts it"
_HEAD_BYTES = 1 << 12  # the root group's attributes are among these first bytes of a checkpoint
_MARK = re.compile(rb"\0format\0.{0,40}?(%b|%b)" % (schema.PART_FORMAT.encode(), schema.FORMAT.encode()), re.DOTALL)
"""The attribute ``format`` of the root group: HDF5 writes name, type, shape and text in a row."""

_SUPERBLOCK = struct.Struct("<8sBBBBQQQ")
"""Signature, version (2 or 3), sizes of offsets and lengths, flags, base address, extension, end of HDF5's part."""


def is_checkpoint(path: Path) -> bool:
    """Return whether a regular file, also a truncated one, is marked as a checkpoint, not as a part. Raise OSError."""
    head = _head(path)
    mark = _MARK.search(head) if head.startswith(HDF5_SIGNATURE) else None
    return mark is not None and mark[1] == schema.FORMAT.encode()


def is_hdf5(path: Path) -> bool:
    """Return whether a regular file begins as HDF5 does. Raise OSError if it cannot be read."""
    return _head(path).startswith(HDF5_SIGNATURE)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def refuse_incomplete(fd: int, path: Path) -> None:
    """Raise CheckpointCorruptError for an open file without a footer that HDF5 cannot read, with the reason."""
    present = disk.size(fd)
    if not present:
        raise CheckpointCorruptError(f"{path}: is empty (0 bytes): was the copy complete?").of_kind("empty")
    head = bytes(read_bytes(fd, path, 0, min(present, _SUPERBLOCK.size)))
    if not head.startswith(HDF5_SIGNATURE):
        remedy = _OF_TORCH if head.startswith(_ZIP_SIGNATURE) else ""
        what = f"not an HDF5 file ({sized(present)}, begins with {head[:8]!r}){remedy}"
        raise CheckpointCorruptError(f"{path}: {what}").of_kind("not_hdf5")
    there = f"only {present} bytes"
    if len(head) == _SUPERBLOCK.size:
        _, version, offset_size, length_size, _, base, _, end = _SUPERBLOCK.unpack(head)
        if version not in (2, 3) or offset_size != 8 or length_size != 8 or base != 0 or end <= present:
            return
        there = sized(present, end)
    what = f"truncated: {there} present; was the copy complete?"
    raise CheckpointCorruptError(f"{path}: {what}").of_kind("truncated")


def sized(present: int, whole: int | None = None) -> str:
    """Return bytes, and of how many, as text: "20.0 of 39.3 MB"; in bytes where two numbers would look alike."""
    units = ((1000**power, unit) for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")))
    number, unit = next((scale for scale in units if (whole or present) >= scale[0]), (1, "bytes"))
    if whole is None:
        return f"{present / number:.1f} {unit}" if number > 1 else f"{present} bytes"
    one, other = f"{present / number:.1f}", f"{whole / number:.1f}"
    return f"{one} of {other} {unit}" if number > 1 and one != other else f"{present} of {whole} bytes"
