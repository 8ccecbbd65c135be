"""The footer: the last bytes of a checkpoint file, which verify everything in it except the tensors' elements.

It follows HDF5's part of the file. A reader checks it before HDF5 sees a byte, and a truncated file has none. It is
written last, so it marks a complete checkpoint. Specified in docs/reference/checkpoint-format.md.
"""

import struct
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import xxhash

MAGIC = b"hpcfsdp\n"
_TRAILER = struct.Struct("<QQQQ8s")
_REGION = struct.Struct("<QQ")

MOST_REGIONS = 1 << 16  # of a file. It has a few; a reader keeps them all.


@dataclass(frozen=True)
class Footer:
    """The content of a footer, of a file of so many bytes."""

    file_bytes: int
    regions: tuple[tuple[int, int], ...]  # (first byte, number of bytes) of everything but tensors, ascending
    digest: int  # xxh3-64 of the regions, which contain the checksums of tensors: no two checkpoints have one digest

    def pack(self) -> bytes:
        """Return the bytes that end the file."""
        table = b"".join(_REGION.pack(*region) for region in self.regions)
        own = xxhash.xxh3_64_intdigest(table + struct.pack("<QQQ", self.file_bytes, len(self.regions), self.digest))
        return table + _TRAILER.pack(self.file_bytes, len(self.regions), self.digest, own, MAGIC)


def packed_bytes(regions: int) -> int:
    """Return the length of a footer over so many regions."""
    return _TRAILER.size + regions * _REGION.size


def make_footer(regions: Sequence[tuple[int, bytes | bytearray]], data_end: int) -> Footer:
    """Return the footer of these regions, (first byte, bytes) ascending, when it is written at `data_end`."""
    places = tuple((begin, len(data)) for begin, data in regions)
    return Footer(data_end + packed_bytes(len(places)), places, _digest(regions))


def _digest(regions: Iterable[tuple[int, bytes | bytearray]]) -> int:
    digest = xxhash.xxh3_64()
    for _, data in regions:
        digest.update(data)
    return digest.intdigest()


def read_footer(nbytes: int, read: Callable[[int, int], bytes | bytearray]) -> Footer | None:
    """Return the footer of a file, None without one; raise ValueError if damaged. `read` takes offset and length."""
    if nbytes < _TRAILER.size:
        return None
    file_bytes, count, digest, own, magic = _TRAILER.unpack(read(nbytes - _TRAILER.size, _TRAILER.size))
    if magic != MAGIC:
        return None
    length = packed_bytes(count)
    if count > MOST_REGIONS:  # before as many are read: nothing is known of this number yet
        raise ValueError(f"its last bytes are those of a file of {count} regions, and there are {MOST_REGIONS} at most")
    if file_bytes != nbytes or length > nbytes:
        raise ValueError(f"its last bytes are those of a file of {file_bytes} bytes, it has {nbytes}")
    table = read(nbytes - length, length - _TRAILER.size)
    if own != xxhash.xxh3_64_intdigest(table + struct.pack("<QQQ", file_bytes, count, digest)):
        raise ValueError("its last bytes do not have their checksum")
    footer = Footer(file_bytes, tuple(_REGION.iter_unpack(table)), digest)
    end = 0
    for begin, size in footer.regions:
        if begin < end or begin + size > nbytes - length:
            raise ValueError("the regions that its last bytes name overlap, or are not in the file")
        end = begin + size
    return footer


def read_regions(footer: Footer, read: Callable[[int, int], bytes | bytearray]) -> list[tuple[int, bytes | bytearray]]:
    """Read all regions; raise ValueError unless they have the footer's checksum."""
    found = [(begin, read(begin, size)) for begin, size in footer.regions]
    if _digest(found) != footer.digest:
        raise ValueError("its tables or small values do not have their checksum")
    return found
