"""Bytes of files as numbered training and held-out sequences: any rank can read any sequence of any step."""

from __future__ import annotations

import hashlib
import os
import sysconfig
import zlib
from collections import OrderedDict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import NamedTuple

import numpy as np

from hpcfsdp.errors import DataError

SPLIT_BY_FILE_MIN = 20
"""With fewer files than this, the end of each file is held out instead of some of the files."""

_OPEN_FILES = 64
_SKIPPED_FOLDERS = {"site-packages", "dist-packages", "__pycache__"}
_STDLIB_SKIPPED_FOLDERS = _SKIPPED_FOLDERS | {"test", "tests", "idlelib"}


class Span(NamedTuple):
    """A run of bytes of one file."""

    path: str
    begin: int
    end: int


@dataclass(frozen=True)
class Split:
    """Spans to train on, spans to evaluate on, and where they come from."""

    train: tuple[Span, ...]
    held_out: tuple[Span, ...]
    source: str
    fingerprint: str
    """Changes when a file is added or removed, or changes its size."""


class Corpus:
    """Spans read as one long sequence of bytes. Keeps up to 64 files open, nothing in memory."""

    def __init__(self, spans: Sequence[Span]) -> None:
        self._spans = list(spans)
        self._ends = np.cumsum([span.end - span.begin for span in spans], dtype=np.int64)
        self._open: OrderedDict[str, int] = OrderedDict()

    def __len__(self) -> int:
        return int(self._ends[-1]) if len(self._ends) else 0

    def read(self, start: int, length: int) -> np.ndarray:
        """Return `length` bytes from `start` on, across files, as uint8."""
        output = np.empty(length, dtype=np.uint8)
        filled = 0
        index = int(np.searchsorted(self._ends, start, side="right"))
        while filled < length:
            span = self._spans[index]
            within = start + filled - (int(self._ends[index]) - (span.end - span.begin))
            count = min(length - filled, span.end - span.begin - within)
            output[filled : filled + count] = self._read_file(span.path, span.begin + within, count)
            filled, index = filled + count, index + 1
        return output

    def close(self) -> None:
        """Close all open files."""
        while self._open:
            os.close(self._open.popitem()[1])

    def _read_file(self, path: str, offset: int, count: int) -> np.ndarray:
        try:
            if path in self._open:
                self._open.move_to_end(path)
            else:
                self._open[path] = os.open(path, os.O_RDONLY)
                if len(self._open) > _OPEN_FILES:
                    os.close(self._open.popitem(last=False)[1])
            data = os.pread(self._open[path], count, offset)
        except OSError as error:
            raise DataError(f"{path}: {error.strerror}") from error
        if len(data) != count:
            raise DataError(f"{path}: became shorter while it was being read; start the run again")
        return np.frombuffer(data, dtype=np.uint8)


def make_split(paths: Sequence[str], held_out: float) -> Split:
    """Find the files and split them. Deterministic; a file stays on its side when others come or go.

    Args:
        paths: files, or folders to search for files (but for hidden ones and caches); none: the Python files of the
            standard library.
        held_out: fraction to hold out.
    """
    if paths:
        files = [found for path in paths for found in _files_below(Path(path), _SKIPPED_FOLDERS, "")]
        source = ", ".join(paths)
    else:
        root = Path(sysconfig.get_path("stdlib"))
        files = list(_files_below(root, _STDLIB_SKIPPED_FOLDERS, ".py"))
        source = f"Python's standard library, {root}"
    sized = [(str(path), name, size) for path, name in dict(files).items() if (size := _size(path)) > 0]
    if not sized:
        raise DataError(f"no bytes to learn from in {source}")
    train: list[Span] = []
    kept: list[Span] = []
    if len(sized) >= SPLIT_BY_FILE_MIN:
        for path, name, size in sized:
            side = kept if zlib.crc32(name.encode(errors="surrogateescape")) / 2**32 < held_out else train
            side.append(Span(path, 0, size))
    if not (train and kept):
        cuts = [(path, size - int(size * held_out), size) for path, _, size in sized]
        train = [Span(path, 0, cut) for path, cut, _ in cuts if cut]
        kept = [Span(path, cut, size) for path, cut, size in cuts if cut < size]
    listing = repr([(name, size) for _, name, size in sized]).encode(errors="surrogateescape")
    return Split(tuple(train), tuple(kept), source, hashlib.blake2b(listing, digest_size=8).hexdigest())


def num_windows(corpus_bytes: int, context: int) -> int:
    """Return the number of training sequences: of `context` bytes each, with the byte that follows them."""
    return (corpus_bytes - 1) // context


def share(samples: Sequence[int], accumulation: int, rank: int, size: int) -> list[Sequence[int]]:
    """Return this rank's samples in each micro-batch, of those of a step over all ranks."""
    parts = accumulation * size
    cuts = [len(samples) * part // parts for part in range(parts + 1)]
    return [samples[cuts[part * size + rank] : cuts[part * size + rank + 1]] for part in range(accumulation)]


def mask_seed(seed: int, step: int, part: int) -> int:
    """Return the seed of the dropout masks of part `part` of a step's data; the same on any number of ranks."""
    return int(np.random.default_rng([seed, step, part]).integers(2**63))


def spread_windows(corpus_bytes: int, length: int, count: int) -> list[int]:
    """Return the first bytes of up to `count` windows of `length` bytes, spread over a corpus without overlap."""
    count = min(count, corpus_bytes // length)
    slack = corpus_bytes - count * length
    return [index * length + slack * index // max(1, count - 1) for index in range(count)]


def _files_below(root: Path, skipped: set[str], suffix: str) -> list[tuple[Path, str]]:
    """Files below `root` with their names relative to it, sorted."""
    if root.is_file():
        return [(root, root.name)]
    if not root.exists():
        raise DataError(f"{root}: no such file or folder")
    if not os.access(root, os.R_OK | os.X_OK):
        raise DataError(f"{root}: cannot be read")
    found = []

    def refuse(error: OSError) -> None:
        raise DataError(f"{error.filename}: {error.strerror}") from error

    for folder, subfolders, names in os.walk(root, onerror=refuse):
        subfolders[:] = sorted(name for name in subfolders if name not in skipped and not name.startswith("."))
        for name in sorted(names):
            path = Path(folder, name)
            if name.endswith(suffix) and not name.startswith(".") and path.is_file():
                found.append((path, str(path.relative_to(root))))
    return found


def _size(path: Path) -> int:
    try:
        with open(path, "rb") as file:
            return os.fstat(file.fileno()).st_size
    except OSError as error:
        raise DataError(f"{path}: {error.strerror}") from error
