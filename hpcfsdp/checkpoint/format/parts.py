"""Part files: each stores the tensors' elements that one node wrote, next to the checkpoint file. Not collective.

A part's name is unique to one save, so that an old checkpoint and a new one never share a part; a checkpoint records
name, size and footer digest of its parts.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import time
from collections.abc import Iterator
from pathlib import Path

from hpcfsdp.checkpoint.format import disk
from hpcfsdp.checkpoint.format.access import is_hdf5
from hpcfsdp.checkpoint.format.catalog import abandoned_partials, was_abandoned
from hpcfsdp.checkpoint.format.footer import Footer, read_footer
from hpcfsdp.checkpoint.format.index import open_index
from hpcfsdp.errors import CheckpointError

_NAME = re.compile(r"(?P<stem>.+)\.[0-9a-f]{8}\.node-\d+\.h5")
_PARTIAL_NAME = re.compile(rf"\.{_NAME.pattern}\.[0-9a-f]+\.partial")
_LOOKED_AT = 64 << 20
"""Bytes at the beginning of a file that contain HDF5's metadata, with the names of other files."""


def remove_abandoned(path: Path) -> None:
    """Remove what earlier saves of a path have left behind, where that is possible."""
    with contextlib.suppress(OSError):
        now_s = time.time()
        for left in (*abandoned_partials(path, now_s), *abandoned_parts(path.parent, now_s, path.stem)):
            with contextlib.suppress(OSError):  # another saver removes or renames it, or another user owns it
                shutil.rmtree(left) if left.is_dir() else disk.remove(left)


def part_path(path: Path, token: str, node: int) -> Path:
    """Return the path of a node's part of the checkpoint `path`, with the 8 random digits of the save's token."""
    return path.with_name(f"{path.stem}.{token[:8]}.node-{node}.h5")


def is_part(path: Path) -> bool:
    """Return whether a file is named as a part of a checkpoint."""
    return _NAME.fullmatch(path.name) is not None


def parts_of(path: Path) -> list[Path]:
    """Return the paths of a checkpoint's parts, whether they exist or not."""
    index = open_index(path)
    return [_folder_of(path) / part.name for part in index.parts]


def owned_parts(path: Path) -> list[Path]:
    """Return the parts that become useless when `path` is removed or replaced; none where that is uncertain.

    Hard and symbolic links to a checkpoint, and copies of it in the same folder, still need its parts.
    """
    candidates = {part.name for part in _named_after(path)}
    if not candidates:  # the usual case, and opening a large index takes a while
        return []
    with contextlib.suppress(OSError, CheckpointError):
        if path.is_symlink() or path.stat().st_nlink > 1:
            return []
        index = open_index(path)
        names = [part.name for part in index.parts if part.name in candidates]
        others = (other for other in _checkpoints(path.parent) if other != path)
        if names and not any(_may_name(other, names, index.footer) for other in others):
            return [_folder_of(path) / name for name in names]
    return []


def remove_checkpoint(path: Path) -> None:
    """Remove a checkpoint and the parts that only it needs. Processes that have them open can still read them.

    The checkpoint goes first, so that none ever lacks a part. The parts of a damaged checkpoint are unknown; they stay
    until ``abandoned_parts`` finds them. Raise OSError where a file cannot be removed.
    """
    own = owned_parts(path)
    disk.remove(path)
    remove_parts(path.parent, own)


def remove_parts(folder: Path, parts: list[Path]) -> None:
    """Remove parts that no checkpoint of the folder needs any more; raise OSError where that fails."""
    if parts:
        disk.sync_folder(folder)  # the checkpoint that named them must not come back without them
    for part in parts:
        disk.remove(part)


def abandoned_parts(folder: Path, now_s: float, stem: str | None = None) -> list[Path]:
    """Return parts, complete or partial, that saves left behind: old, and not named by any checkpoint of the folder.

    If a possible checkpoint of the folder cannot be read, no complete part counts as abandoned. Raise OSError if the
    folder cannot be read.

    Args:
        now_s: Unix time; see ``catalog.was_abandoned``.
        stem: of the checkpoint's name; None for all checkpoints of the folder.
    """
    whole, partial = [], []
    for path in sorted(folder.iterdir()):
        for pattern, found in ((_NAME, whole), (_PARTIAL_NAME, partial)):
            match = pattern.fullmatch(path.name)
            if match and stem in (None, match["stem"]) and was_abandoned(path, now_s):
                found.append(path)
    if whole:
        try:
            named = {part.name for path in _checkpoints(folder) for part in parts_of(path)}
        except CheckpointError:
            return partial
        whole = [path for path in whole if path.name not in named]
    return whole + partial


def _checkpoints(folder: Path) -> Iterator[Path]:
    """HDF5 files of a folder, under any name, that are not named as parts."""
    for path in folder.iterdir():
        if path.is_file() and not is_part(path) and not path.name.endswith(".partial") and is_hdf5(path):
            yield path


def _may_name(path: Path, names: list[str], footer: Footer | None) -> bool:
    """Return whether an HDF5 file may name one of these parts of the checkpoint with this footer.

    Names are unique to a save: a file with a footer names them only if it is a copy of the checkpoint. Files of other
    programs are searched for the names.
    """
    with path.open("rb") as file:

        def read(begin: int, nbytes: int) -> bytes:
            file.seek(begin)
            return file.read(nbytes)

        with contextlib.suppress(ValueError):
            found = read_footer(os.fstat(file.fileno()).st_size, read)
            if found is not None:
                return found == footer
        head = read(0, _LOOKED_AT)
        return any(name.encode() in head for name in names)


def _named_after(path: Path) -> list[Path]:
    """Return parts with the name of a checkpoint, of any save."""
    with contextlib.suppress(OSError):
        found = (_NAME.fullmatch(other.name) for other in path.parent.iterdir())
        return [path.with_name(match.string) for match in found if match and match["stem"] == path.stem]
    return []


def _folder_of(path: Path) -> Path:
    """Return the folder of a checkpoint's parts, as HDF5 resolves it: that of the file itself, not of a link to it."""
    return Path(os.path.realpath(path)).parent
