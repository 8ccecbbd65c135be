"""File objects for HDF5: one in memory that it writes, and one of known byte ranges that it reads.

HDF5 itself never writes to a disk: where it cannot flush, it ends the process (2.0), and its order of writes is not
specified. It never reads unchecked bytes either: damaged ones have made it crash and hang.
"""

import bisect
import io
import os
from collections.abc import Iterable, Iterator, Sequence

_PAGE = 1 << 16
_FEW = 16


class _Memory(io.RawIOBase):
    """A file object of `nbytes` bytes, with a position."""

    def __init__(self, nbytes: int) -> None:
        self.nbytes, self._position = nbytes, 0

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        base = {os.SEEK_SET: 0, os.SEEK_CUR: self._position, os.SEEK_END: self.nbytes}[whence]
        self._position = base + offset
        return self._position

    def readinto(self, buffer: bytearray | memoryview) -> int:
        view = memoryview(buffer).cast("B")
        self._fill(view, self._position)
        self._position += view.nbytes
        return view.nbytes

    def _fill(self, view: memoryview, offset: int) -> None:
        raise NotImplementedError


class SparseImage(_Memory):
    """A file in memory for ``h5py.File``. Only pages that were written take memory.

    A few zeros take none: HDF5 allocates the storage of each of thousands of tensors by writing one zero.
    """

    def __init__(self) -> None:
        super().__init__(0)
        self._pages: dict[int, bytearray] = {}
        self._shared: set[int] = set()  # pages that copies have as well

    def copy(self) -> "SparseImage":
        """Return a copy; both share each page until one of them writes to it."""
        image = SparseImage()
        image.nbytes, image._pages = self.nbytes, dict(self._pages)
        self._shared, image._shared = set(self._pages), set(self._pages)
        return image

    def _own(self, page: int) -> bytearray:
        """Return a page that may be changed."""
        if page in self._shared:
            self._shared.remove(page)
            self._pages[page] = self._pages[page].copy()
        return self._pages[page]

    def write(self, buffer: bytes | memoryview) -> int:
        view = memoryview(buffer).cast("B")
        for page, begin, part in _pages_of(view, self._position):
            if page not in self._pages:
                if part.nbytes <= _FEW and not any(part):
                    continue
                self._pages[page] = bytearray(_PAGE)
            self._own(page)[begin : begin + part.nbytes] = part
        self._position += view.nbytes
        if view.nbytes:
            self.nbytes = max(self.nbytes, self._position)
        return view.nbytes

    def truncate(self, nbytes: int) -> int:
        # What is cut off must not come back when the file grows again.
        self._pages = {page: data for page, data in self._pages.items() if page * _PAGE < nbytes}
        self._shared.intersection_update(self._pages)
        if (last := nbytes // _PAGE) in self._pages:
            self._own(last)[nbytes % _PAGE :] = bytes(_PAGE - nbytes % _PAGE)
        self.nbytes = nbytes
        return nbytes

    def written(self, begin: int, end: int) -> Iterator[tuple[int, bytes]]:
        """Yield the written pages between two places, adjacent ones together: (first byte, bytes)."""
        pages: Sequence[int] = range(begin // _PAGE, -(-end // _PAGE))
        if len(pages) > len(self._pages):
            pages = sorted(page for page in self._pages if page in pages)
        else:
            pages = [page for page in pages if page in self._pages]
        while pages and begin < end:
            count = next((n for n in range(1, len(pages)) if pages[n] != pages[0] + n), len(pages))
            first, stop = max(begin, pages[0] * _PAGE), min(end, (pages[count - 1] + 1) * _PAGE)
            parts = [memoryview(self._pages[page]) for page in pages[:count]]
            parts[-1] = parts[-1][: stop - pages[count - 1] * _PAGE]
            parts[0] = parts[0][first - pages[0] * _PAGE :]
            yield first, b"".join(parts)
            pages = pages[count:]

    def _fill(self, view: memoryview, offset: int) -> None:
        for page, begin, part in _pages_of(view, offset):
            known = self._pages.get(page)
            part[:] = bytes(part.nbytes) if known is None else known[begin : begin + part.nbytes]


class KnownRanges(_Memory):
    """A read-only file for ``h5py.File`` of which only some ranges are known: (first byte, bytes), not overlapping."""

    def __init__(self, nbytes: int, known: Iterable[tuple[int, bytes | bytearray]]) -> None:
        super().__init__(nbytes)
        self._known = sorted(known)
        self._begins = [begin for begin, _ in self._known]

    def _fill(self, view: memoryview, offset: int) -> None:
        end = offset + view.nbytes
        view[:] = bytes(view.nbytes)
        for begin, data in self._known[max(0, bisect.bisect_right(self._begins, offset) - 1) :]:
            if begin >= end:
                break
            low, high = max(offset, begin), min(end, begin + len(data))
            if low < high:
                view[low - offset : high - offset] = data[low - begin : high - begin]


def _pages_of(view: memoryview, offset: int):
    """(page, first byte within it, part of the buffer)."""
    done = 0
    while done < view.nbytes:
        page, begin = divmod(offset + done, _PAGE)
        part = view[done : done + _PAGE - begin]
        yield page, begin, part
        done += part.nbytes
