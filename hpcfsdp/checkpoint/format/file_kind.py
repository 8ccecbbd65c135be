"""What a file is, by its first bytes: empty, no HDF5, cut off, another program's, or a checkpoint. Not collective."""

from __future__ import annotations

import re
import struct
from pathlib import Path

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.access import read_bytes
from hpcfsdp.errors import CheckpointCorruptError

HDF5_SIGNATURE = b"\x89HDF\r\n\x1a\n"
_ZIP_SIGNATURE = b"PK\x03\x04"
_OF_TORCH = ": a zip archive, as torch.save writes: hpcfsdp import --format pt converts it"
_HEAD_BYTES = 1 << 12
"""The root group's attributes are among these first bytes of a checkpoint."""

_MARK = re.compile(rb"\0format\0.{0,40}?(%b|%b)" % (schema.PART_FORMAT.encode(), schema.FORMAT.encode()), re.DOTALL)
"""The attribute ``format`` of the root group: HDF5 writes name, type, shape and text in a row."""

_SUPERBLOCK = struct.Struct("<8sBBBBQQQ")
"""Signature, version (2 or 3), sizes of offsets and lengths, flags, base address, extension, end of HDF5's part."""


def is_checkpoint(path: Path) -> bool:
    """Whether a regular file, also a truncated one, has the marks of a checkpoint. False for parts of one.

    Raises:
        OSError: the file cannot be read.
    """
    head = _head(path)
    mark = _MARK.search(head) if head.startswith(HDF5_SIGNATURE) else None
    return mark is not None and mark[1] == schema.FORMAT.encode()


def is_hdf5(path: Path) -> bool:
    """Whether a regular file begins as HDF5 does. Raises OSError if it cannot be read."""
    return _head(path).startswith(HDF5_SIGNATURE)


def _head(path: Path) -> bytes:
    with path.open("rb") as file:
        return file.read(_HEAD_BYTES)


def refuse_incomplete(fd: int, path: Path) -> None:
    """Raises CheckpointCorruptError for an open file without a footer that HDF5 cannot read, with the reason."""
    present = disk.size(fd)
    if not present:
        raise CheckpointCorruptError(f"{path}: is empty (0 bytes): was the copy complete?").of_kind("empty")
    head = bytes(read_bytes(fd, path, 0, min(present, _SUPERBLOCK.size)))
    if not head.startswith(HDF5_SIGNATURE):
        remedy = _OF_TORCH if head.startswith(_ZIP_SIGNATURE) else ""
        raise CheckpointCorruptError(
            f"{path}: not an HDF5 file ({sized(present)}, begins with {head[:8]!r}){remedy}"
        ).of_kind("not_hdf5")
    if len(head) < _SUPERBLOCK.size:
        raise CheckpointCorruptError(
            f"{path}: truncated: only {present} bytes present; was the copy complete?"
        ).of_kind("truncated")
    _, version, offset_size, length_size, _, base, _, end = _SUPERBLOCK.unpack(head)
    if version in (2, 3) and offset_size == length_size == 8 and base == 0 and end > present:
        raise CheckpointCorruptError(
            f"{path}: truncated: {sized(present, end)} present; was the copy complete?"
        ).of_kind("truncated")


def sized(present: int, whole: int | None = None) -> str:
    """A number of bytes, and of how many: "20.0 of 39.3 MB"; in bytes where two different numbers would look alike."""
    number, unit = _scaled(whole or present)
    if whole is None:
        return f"{present / number:.1f} {unit}" if number > 1 else f"{present} bytes"
    one, other = f"{present / number:.1f}", f"{whole / number:.1f}"
    return f"{one} of {other} {unit}" if number > 1 and one != other else f"{present} of {whole} bytes"


def _scaled(count: int) -> tuple[int, str]:
    for power, unit in ((4, "TB"), (3, "GB"), (2, "MB"), (1, "kB")):
        if count >= 1000**power:
            return 1000**power, unit
    return 1, "bytes"
