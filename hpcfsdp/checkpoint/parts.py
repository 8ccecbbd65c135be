"""Files that hold a part of a checkpoint's tensors, beside the file that is the checkpoint. Not collective.

One such file stands for each node that wrote. Its name is of one save alone, so that an old checkpoint and a new one
never share a part; a checkpoint knows its parts by name, size and the digest of their seals.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from hpcfsdp.checkpoint.catalog import ABANDONED_AFTER_S
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format.seal import Seal, read_seal
from hpcfsdp.checkpoint.index import open_index
from hpcfsdp.errors import CheckpointError

_NAME = re.compile(r"(?P<stem>.+)\.[0-9a-f]{8}\.node-\d+\.h5")
_PARTIAL_NAME = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.partial")
_LOOKED_AT = 64 << 20
"""Bytes at the beginning of a file, among which those of HDF5's own lie that tell of other files."""

_HDF5 = b"\x89HDF\r\n\x1a\n"


def part_path(path: Path, token: str, node: int) -> Path:
    """Where the checkpoint `path` has the tensors' elements that the ranks of a node write.

    Args:
        token: of one save alone: 8 hexadecimal digits.
    """
    return path.with_name(f"{path.stem}.{token}.node-{node}.h5")


def is_part(path: Path) -> bool:
    """Whether a file is named as a part of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def parts_of(path: Path, files: Files | None = None) -> list[Path]:
    """The parts that a checkpoint names, whether they are there or not; none for one that is whole by itself.

    Raises:
        CheckpointError: it cannot be read.
    """
    index = open_index(path, files)
    return [_folder_of(path) / part.name for part in index.parts]


def owned_parts(path: Path, files: Files | None = None) -> list[Path]:
    """The parts that are of no use when `path` is removed or replaced; none where that is not certain.

    A checkpoint that has a second name, by a hard or a symbolic link, goes on to need its parts, and so does a copy of
    it in the same folder.
    """
    candidates = {part.name for part in _named_after(path)}
    if not candidates:  # the usual case, and opening a large index takes a while
        return []
    with contextlib.suppress(OSError, CheckpointError):
        if path.is_symlink() or path.stat().st_nlink > 1:
            return []
        index = open_index(path, files)
        names = [part.name for part in index.parts if part.name in candidates]
        others = (other for other in _checkpoints(path.parent) if other != path)
        if names and not any(_may_name(other, names, index.seal) for other in others):
            return [_folder_of(path) / name for name in names]
    return []


def remove_checkpoint(files: Files, path: Path) -> None:
    """Remove a checkpoint and the parts that it has to itself. A process that is reading one of the files goes on to.

    The checkpoint goes first: there is never one that lacks a part. Where it is damaged its parts cannot be known; they
    stay, and ``abandoned_parts`` finds them.

    Raises:
        OSError: a file cannot be removed.
    """
    own = owned_parts(path, files)
    files.remove(path)
    remove_parts(files, path.parent, own)


def remove_parts(files: Files, folder: Path, parts: list[Path]) -> None:
    """Remove parts in a folder that no checkpoint names any more.

    Raises:
        OSError: one cannot be removed.
    """
    if parts:
        files.sync_folder(folder)  # the checkpoint that named them must not come back without them
    for part in parts:
        files.remove(part)


def abandoned_parts(folder: Path, now_s: float, stem: str | None = None) -> list[Path]:
    """Parts, whole or partial, that savers left behind: old, and named by no checkpoint of the folder.

    Where a file of the folder may be a checkpoint, but cannot be read, all whole parts are taken to be its own.

    Args:
        now_s: Unix time. What was written to less than ``ABANDONED_AFTER_S`` before is not abandoned.
        stem: of the checkpoint's name; None for those of all checkpoints of the folder.

    Raises:
        OSError: the folder cannot be read.
    """
    whole, partial = [], []
    for path in sorted(folder.iterdir()):
        for pattern, found in ((_NAME, whole), (_PARTIAL_NAME, partial)):
            match = pattern.fullmatch(path.name)
            if match and stem in (None, match["stem"]) and now_s - path.stat().st_mtime > ABANDONED_AFTER_S:
                found.append(path)
    if whole:
        try:
            named = {part.name for path in _checkpoints(folder) for part in parts_of(path)}
        except CheckpointError:
            return partial
        whole = [path for path in whole if path.name not in named]
    return whole + partial


def _checkpoints(folder: Path) -> Iterator[Path]:
    """HDF5 files of a folder, under whatever name, that are not named as parts."""
    for path in folder.iterdir():
        if path.is_file() and not is_part(path) and not path.name.endswith(".partial"):
            with path.open("rb") as file:
                if file.read(len(_HDF5)) == _HDF5:
                    yield path


def _may_name(path: Path, names: list[str], seal: Seal | None) -> bool:
    """Whether an HDF5 file names one of these parts, of which the checkpoint with this seal does.

    Names are of one save alone, which has sealed one file: another sealed one that has them is a copy of it. In a file
    that other programs have written they are looked for.

    Raises:
        OSError: it cannot be read.
    """
    with path.open("rb") as file:

        def read(begin: int, nbytes: int) -> bytes:
            file.seek(begin)
            return file.read(nbytes)

        with contextlib.suppress(ValueError):
            found = read_seal(os.fstat(file.fileno()).st_size, read)
            if found is not None:
                return found == seal
        head = read(0, _LOOKED_AT)
        return any(name.encode() in head for name in names)


def _named_after(path: Path) -> list[Path]:
    """Parts that bear the name of a checkpoint, of whichever save."""
    with contextlib.suppress(OSError):
        found = (_NAME.fullmatch(other.name) for other in path.parent.iterdir())
        return [path.with_name(match.string) for match in found if match and match["stem"] == path.stem]
    return []


def _folder_of(path: Path) -> Path:
    """Where the parts of a checkpoint lie, as HDF5 looks for them too: beside the file itself, not a link to it."""
    return Path(os.path.realpath(path)).parent
