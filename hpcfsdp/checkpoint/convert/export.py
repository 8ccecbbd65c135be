"""``export_checkpoint``: a checkpoint in another format, written piece by piece. Not collective."""

import functools
import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfsdp.checkpoint.convert import safetensors
from hpcfsdp.checkpoint.convert.output import Progress, Selection, Step, absolute, new_files, no_progress, select
from hpcfsdp.checkpoint.convert.safetensors import TensorEntry
from hpcfsdp.checkpoint.format import disk, schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.errors import CheckpointError, UsageError

FORMATS = ("safetensors", "pt", "dcp")
PT_SUFFIXES = (".pt", ".pth", ".bin", ".ckpt", ".tar")


@dataclass(frozen=True)
class Exported:
    """The result of an export."""

    format: str  # one of ``FORMATS``, or "peft"
    files: tuple[Path, ...]
    tensors: int
    nbytes: int  # of the tensors
    ties: Mapping[str, str]  # alias of a tensor -> the name under which it was written


def export_checkpoint(
    source: str | os.PathLike[str] | CheckpointIndex,
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    names: Sequence[str] = (),
    shard_bytes: int | None = None,
    optimizer: bool = False,
    force: bool = False,
    progress: Progress = no_progress,
) -> Exported:
    """Write a checkpoint's tensors in another format; not collective. Every byte is checked against its checksum.

    A few blocks are in memory at a time. The output appears when it is complete; a failure leaves nothing.

    Args:
        source: a checkpoint file.
        output: for "safetensors" a file, or a folder as ``from_pretrained`` reads it; for "pt" a file, for "dcp" a
            folder.
        format: one of ``FORMATS``; None: by the name of `output`.
        names: patterns of the tensors to export; none: all of the model.
        shard_bytes: split safetensors into files of at most so many bytes of tensors, in a folder.
        optimizer: export the optimizer's state and hyper-parameters too.
        force: replace existing files.
        progress: of bytes that are read; twice of each for torch's formats, which are verified first.

    Raises:
        UsageError: an unknown format, or options that do not fit it.
        CheckpointError: the output exists, no tensor is selected, there is no room, or it cannot be written.
        CheckpointCorruptError: the checkpoint is damaged.
    """
    target = absolute(output)
    kind = _format_of(target, format, shard_bytes)
    index = source if isinstance(source, CheckpointIndex) else open_index(os.path.expanduser(source))
    selection = select(index, names, optimizer)
    if kind == "safetensors":
        write, passes = functools.partial(_to_safetensors, shard_bytes=shard_bytes), 1
    else:
        from hpcfsdp.checkpoint.convert import torch_output  # loads torch, which safetensors do without

        write, passes = torch_output.to_pt if kind == "pt" else torch_output.to_dcp, 2
    with progress("exporting", passes * selection.nbytes) as step:
        written = write(index, selection, target, force, step)
    return Exported(kind, tuple(written), len(selection.tensors), selection.nbytes, selection.outside_ties)


def _format_of(target: Path, kind: str | None, shard_bytes: int | None) -> str:
    if kind is None:
        if target.suffix == safetensors.SUFFIX or shard_bytes is not None:
            kind = "safetensors"
        elif target.suffix in PT_SUFFIXES:
            kind = "pt"
        else:
            raise UsageError(f"{target}: the name does not determine the format: give --format {'|'.join(FORMATS)}")
    if kind not in FORMATS:
        raise UsageError(f"unknown format {kind!r}; there are {', '.join(FORMATS)}")
    if shard_bytes is not None:
        if kind != "safetensors":
            raise UsageError(f"--shard-bytes is for safetensors, not for {kind}")
        if target.suffix == safetensors.SUFFIX:
            raise UsageError(f"{target}: --shard-bytes writes a folder: give a name without {safetensors.SUFFIX}")
        if shard_bytes < 1:
            raise UsageError(f"--shard-bytes must be at least 1, not {shard_bytes}")
    return kind


def _to_safetensors(
    index: CheckpointIndex, selection: Selection, target: Path, force: bool, step: Step, *, shard_bytes: int | None
) -> list[Path]:
    """Write files for ``from_pretrained``; see ``export_checkpoint``."""
    names = [(path.removeprefix(f"{schema.MODEL}/"), spec) for path, spec in selection.tensors.items()]
    inside = {name: path for (name, _), path in zip(names, selection.tensors, strict=True)}
    ties = selection.outside_ties
    shards = [names] if shard_bytes is None else safetensors.split(names, shard_bytes)
    paths = _shard_paths(target, len(shards))
    common = {"format": "pt", safetensors.STEP_KEY: str(index.info.step)}
    if selection.groups is not None:
        common[safetensors.GROUPS_KEY] = schema.to_json(selection.groups).decode()
        common[safetensors.SCALARS_KEY] = schema.to_json(selection.scalars).decode()
    files: dict[Path, tuple[bytes, list[TensorEntry]]] = {}
    for number, (path, shard) in enumerate(zip(paths, shards, strict=True)):
        here = {name for name, _ in shard}
        tied = {alias: name for alias, name in ties.items() if name in here}
        files[path] = safetensors.pack(shard, {**tied, **(common if number == 0 else {"format": "pt"})})
    sizes = {path: len(head) + sum(entry.nbytes for entry in entries) for path, (head, entries) in files.items()}
    listing = b""
    if len(paths) > 1:
        weight_map = {entry.name: path.name for path, (_, entries) in files.items() for entry in entries}
        listing = safetensors.index_of(weight_map, selection.nbytes)
        sizes[target / safetensors.INDEX_NAME] = len(listing)
    with BlockReader(index) as reader, new_files(sizes, force=force, replaced=_others(target, sizes)) as fds:
        for path, (head, entries) in files.items():
            write_tensors(reader, inside, head, entries, fds[path], step)
        if listing:
            disk.write(fds[target / safetensors.INDEX_NAME], [memoryview(listing)], 0)
    return list(sizes)


def _shard_paths(target: Path, count: int) -> list[Path]:
    if target.suffix == safetensors.SUFFIX:
        return [target]
    if target.exists() and not target.is_dir():
        raise CheckpointError(f"{target}: is a file; give the name of a folder, or one that ends in .safetensors")
    if count == 1:
        return [target / safetensors.WHOLE_NAME]
    return [target / f"model-{number:05d}-of-{count:05d}.safetensors" for number in range(1, count + 1)]


def _others(target: Path, sizes: Mapping[Path, int]) -> list[Path]:
    """Return weights in the folder that a reader would take for a part of the new ones."""
    if target.suffix == safetensors.SUFFIX or not target.is_dir():
        return []
    wholes = (target / safetensors.WHOLE_NAME, target / safetensors.INDEX_NAME)
    found = (*wholes, *sorted(target.glob("model-*-of-*.safetensors")))
    return [path for path in found if path.exists() and path not in sizes]


def write_tensors(
    reader: BlockReader, paths: Mapping[str, str], head: bytes, entries: Iterable[TensorEntry], fd: int, step: Step
) -> None:
    """Write a safetensors file; `paths` are those of the tensors in the checkpoint, by their new names."""
    disk.write(fd, [memoryview(head)], 0)
    for entry in entries:
        begin = entry.begin
        for block in reader.blocks(paths[entry.name]):
            disk.write(fd, [memoryview(block.view(np.uint8))], begin)
            begin += block.nbytes
            step(block.nbytes)
