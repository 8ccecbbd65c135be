"""What an export has, and files for other programs: they appear when they are complete, or not at all."""

import contextlib
import os
import shutil
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.catalog import new_token, partial_path, partials_of
from hpcfsdp.checkpoint.format.disk import reason
from hpcfsdp.checkpoint.format.index import CheckpointIndex
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.inspect.names import matching
from hpcfsdp.checkpoint.retention import remove_abandoned
from hpcfsdp.errors import CheckpointError

MODEL = f"{schema.MODEL}/"
OPTIM = f"{schema.OPTIM_STATE}/"

Step = Callable[[int], None]
"""Called with the number of bytes since its last call."""

Progress = Callable[[str, int], contextlib.AbstractContextManager[Step]]
"""Called with an activity and its number of bytes; gives a ``Step``."""


@dataclass(frozen=True)
class Selection:
    """The content of an export."""

    tensors: dict[str, TensorSpec]  # by path, each once, in file order
    ties: dict[str, str]  # alias of a tensor -> its path in `tensors`
    groups: list[dict[str, Any]] | None  # of the optimizer; None without it
    scalars: dict[str, Any] | None

    @property
    def nbytes(self) -> int:
        return sum(spec.nbytes for spec in self.tensors.values())

    @property
    def outside_ties(self) -> dict[str, str]:
        """By names in other formats: those of parameters, and paths of optimizer state."""
        return {alias.removeprefix(MODEL): path.removeprefix(MODEL) for alias, path in self.ties.items()}


def select(index: CheckpointIndex, patterns: Sequence[str], optimizer: bool) -> Selection:
    """Choose tensors by patterns (none: all), with the optimizer's state or without. Raise CheckpointError for none."""
    if optimizer and index.param_groups is None:
        raise CheckpointError(f"{index.info.path}: holds no optimizer: leave --optimizer out")
    paths = [path for path in matching(index, patterns) if path.startswith((MODEL, OPTIM) if optimizer else MODEL)]
    if not paths:
        hint = "holds no model" if not patterns else "only the optimizer's state has such names: add --optimizer"
        raise CheckpointError(f"{index.info.path}: {hint}")
    tensors: dict[str, TensorSpec] = {}
    ties: dict[str, str] = {}
    kept: dict[str, str] = {}  # a tensor that is selected by an alias alone gets that name
    for path in paths:
        spec = index.resolve(path)
        if kept.setdefault(spec.path, path) == path:
            tensors[path] = spec
        else:
            ties[path] = kept[spec.path]
    if not optimizer:
        return Selection(tensors, ties, None, None)
    stepped = {path.removeprefix(OPTIM).rsplit("/", 1)[0] for path in tensors if path.startswith(OPTIM)}
    scalars = index.scalars or {}
    if patterns:
        scalars = {name: value for name, value in scalars.items() if name.rsplit("/", 1)[0] in stepped}
    return Selection(tensors, ties, index.param_groups, scalars)


@contextlib.contextmanager
def no_progress(_what: str, _nbytes: int) -> Iterator[Step]:
    """Report no progress."""
    yield lambda _nbytes: None


def absolute(path: str | os.PathLike[str]) -> Path:
    """Return a path from the root, with ``~`` resolved."""
    return Path(os.path.abspath(os.path.expanduser(path)))


@contextlib.contextmanager
def reading(path: Path) -> Iterator[None]:
    """Add the file's name to errors of reading."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{error.filename or path}: {reason(error)}") from error


@contextlib.contextmanager
def writing(path: Path) -> Iterator[None]:
    """Add the file's name to errors of writing."""
    try:
        yield
    except OSError as error:
        raise CheckpointError(f"{path}: cannot be written: {reason(error)}") from error


def check_absent(path: Path, *, force: bool) -> None:
    """Raise CheckpointError if the path exists, unless `force`."""
    if not force and os.path.lexists(path):
        raise CheckpointError(f"{path}: exists already (--force replaces it)")


def check_room(folder: Path, nbytes: int) -> None:
    """Raise CheckpointError if the file system of an existing folder has too little room."""
    free = shutil.disk_usage(folder).free
    if free < nbytes:
        raise CheckpointError(f"{folder}: {nbytes} bytes are needed, {free} are free on that file system")


@contextlib.contextmanager
def new_files(
    sizes: Mapping[Path, int], *, force: bool, replaced: Collection[Path] = ()
) -> Iterator[Mapping[Path, int]]:
    """Write files of one folder, of these sizes, under temporary names and rename them at the end in order, or none.

    Yield descriptors by path. A single file replaces an older one atomically. Of several files the last is the index,
    without which the others are useless: an older index is removed first, so that old and new files never mix. The
    files, and those in `replaced`, which are removed at the end, may exist only with `force`.
    """
    first, index = next(iter(sizes)), list(sizes)[-1]
    # Killed between the names of the first files and that of the index: what is there belongs to no whole.
    interrupted = first != index and not os.path.lexists(index) and bool(partials_of(index))
    for path in (*sizes, *replaced):
        check_absent(path, force=force or interrupted)
    made = _missing_folders(first.parent)
    partials = {path: partial_path(path, new_token()) for path in sizes}
    fds: dict[Path, int] = {}
    named: list[Path] = []
    try:
        with writing(first):
            first.parent.mkdir(parents=True, exist_ok=True)
            for path in sizes:
                remove_abandoned(path)
            check_room(first.parent, sum(sizes.values()))
            for path, nbytes in sizes.items():
                if path.is_dir():
                    raise CheckpointError(f"{path}: is a folder, and no file can take its place")
                fds[path] = disk.create(partials[path], nbytes)
            yield fds
            for path in sizes:
                disk.sync(fds[path])
                disk.close(fds.pop(path))
            for path in (*replaced, index) if first != index else ():
                disk.remove(path)
            for path, partial in partials.items():
                disk.rename(partial, path)
                named.append(path)
            for path in replaced if first == index else ():
                disk.remove(path)
            disk.sync_folder(first.parent)
    except BaseException:
        incomplete = named if len(named) < len(sizes) else []
        for fd in fds.values():
            disk.close(fd)
        with contextlib.suppress(OSError):
            for partial in (*partials.values(), *incomplete):
                disk.remove(partial)
        _remove_folders(made)
        raise


@contextlib.contextmanager
def new_folder(path: Path, nbytes: int, *, force: bool, mark: str) -> Iterator[Path]:
    """Write a folder under a temporary name and rename it at the end; with `force` replace one with a file `mark`."""
    check_absent(path, force=force)
    exists = os.path.lexists(path)
    if exists and not (path / mark).is_file():
        raise CheckpointError(f"{path}: is not a checkpoint of that format, so it is not replaced: remove it yourself")
    made = _missing_folders(path.parent)
    partial, old = (partial_path(path, new_token()) for _ in range(2))
    try:
        with writing(path):
            if exists:  # else what was put aside may be the folder that an interrupted export was to replace
                remove_abandoned(path)
            partial.mkdir(parents=True)
            check_room(partial, nbytes)
            yield partial
            disk.sync_folder(partial)
            if exists:
                path.rename(old)
            disk.rename(partial, path)
            disk.sync_folder(path.parent)
    except BaseException:
        if exists and not os.path.lexists(path):
            with contextlib.suppress(OSError):
                old.rename(path)
        shutil.rmtree(partial, ignore_errors=True)
        _remove_folders(made)
        raise
    shutil.rmtree(old, ignore_errors=True)
    remove_abandoned(path)


def _missing_folders(path: Path) -> list[Path]:
    """Return a folder and its parents that do not exist."""
    return [folder for folder in (path, *path.parents) if not folder.exists()]


def _remove_folders(made: list[Path]) -> None:
    with contextlib.suppress(OSError):  # something else may have come into them
        for folder in made:
            folder.rmdir()
