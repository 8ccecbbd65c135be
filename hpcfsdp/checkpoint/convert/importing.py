"""``import_checkpoint``: a checkpoint from files of other programs, read piece by piece. Not collective."""

import contextlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from hpcfsdp.checkpoint.convert import safetensors
from hpcfsdp.checkpoint.convert.export import FORMATS, PT_SUFFIXES
from hpcfsdp.checkpoint.convert.output import Progress, absolute, check_absent, no_progress, reading
from hpcfsdp.checkpoint.convert.safetensors import open_safetensors
from hpcfsdp.checkpoint.convert.source import ImportSource
from hpcfsdp.checkpoint.format.access import naming_errors
from hpcfsdp.checkpoint.format.disk import check_regular
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.plan import check_names
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointError, UsageError

_STEPS = np.iinfo(np.int64)
TENSORS_LEAST, BYTES_PER_TENSOR = 1 << 17, 1 << 10
"""A source may have a tensor for so many bytes of tensors, besides the first: HDF5 takes about 0.1 ms for each."""


@dataclass(frozen=True)
class Imported:
    """The result of an import."""

    path: Path
    format: str  # of the source, one of ``FORMATS``
    step: int
    tensors: int  # of the model and of the optimizer
    nbytes: int  # of the tensors
    ties: tuple[tuple[str, str], ...]  # (alias, path of the tensor)
    has_optimizer: bool
    extra: tuple[str, ...]  # names of the values that were stored as ``extra``


def import_checkpoint(
    source: str | os.PathLike[str],
    output: str | os.PathLike[str],
    *,
    format: str | None = None,
    step: int | None = None,
    ties: Sequence[tuple[str, str]] = (),
    optimizer: bool = True,
    force: bool = False,
    progress: Progress = no_progress,
) -> Imported:
    """Write a checkpoint file from files of other programs; not collective. Execute nothing of them.

    Args:
        source: a file or folder of one of ``FORMATS``.
        output: the checkpoint file, which appears there when it is whole.
        format: one of ``FORMATS``; None: by the name and contents of `source`.
        step: of training; None: the source's, or 0.
        ties: (alias, name) of tied tensors of the model; equal, if the source has both.
        optimizer: False: leave the optimizer's state out.
        force: replace a file that is there.
        progress: of bytes that are read.

    Raises:
        UsageError: the format is not known, or `step` does not fit 64 bits.
        CheckpointError: the source cannot be read, or holds what a checkpoint cannot; or the file cannot be written.
        CheckpointCorruptError: the source is damaged.
    """
    if step is not None and not _STEPS.min <= step <= _STEPS.max:
        raise UsageError(f"--step {step} is no step: it must fit into 64 bits")
    path, target = absolute(source), absolute(output)
    with reading(path):
        if not path.is_dir():
            check_regular(path.stat().st_mode)
        kind = _format_of(path, format)
        check_absent(target, force=force)
        with contextlib.ExitStack() as stack:
            found = stack.enter_context(_opened(kind, path, optimizer))
            with naming_errors(path):
                check_names(found.specs, found.links)  # unsupported dtypes have no sizes
            found.tie(ties)
            if step is None:
                step = found.step or 0
                if not _STEPS.min <= step <= _STEPS.max:
                    raise CheckpointError(f"{path}: its step does not fit into 64 bits: give --step")
            elif found.step is not None and found.step != step:
                found.extra.setdefault("step", found.step)
            nbytes = sum(spec.nbytes for spec in found.specs)
            if len(found.specs) > TENSORS_LEAST + nbytes // BYTES_PER_TENSOR:
                raise CheckpointError(f"{path}: has {len(found.specs)} tensors, too many for their {nbytes} bytes")
            advance = stack.enter_context(progress("importing", nbytes))

            def read(spec: TensorSpec, start: int, numel: int) -> np.ndarray:
                with reading(path):
                    elements = found.read(spec, start, numel)
                advance(elements.nbytes)
                return elements

            values = {"extra": found.extra, "groups": found.groups, "scalars": found.scalars}
            write_alone(target, found.specs, read, links=found.links, step=step, **values)
    extra, ties, has_optimizer = tuple(map(str, found.extra)), tuple(found.links), found.groups is not None
    return Imported(target, kind, step, len(found.specs), nbytes, ties, has_optimizer, extra)


def _format_of(path: Path, kind: str | None) -> str:
    if kind is not None:
        if kind not in FORMATS:
            raise UsageError(f"unknown format {kind!r}; there are {', '.join(FORMATS)}")
        return kind
    if path.is_dir():
        if (path / ".metadata").is_file():
            return "dcp"
        if any(path.glob(f"*{safetensors.SUFFIX}")) or any(path.glob(f"*{safetensors.INDEX_SUFFIX}")):
            return "safetensors"
        raise CheckpointError(f"{path}: holds neither safetensors files nor the .metadata of a DCP checkpoint")
    if path.name.endswith((safetensors.SUFFIX, safetensors.INDEX_SUFFIX)):
        return "safetensors"
    if path.suffix in PT_SUFFIXES:
        return "pt"
    raise UsageError(f"{path}: the name does not determine the format: give --format {'|'.join(FORMATS)}")


def _opened(kind: str, path: Path, optimizer: bool) -> contextlib.AbstractContextManager[ImportSource]:
    if kind == "safetensors":
        return open_safetensors(path, optimizer=optimizer)
    from hpcfsdp.checkpoint.convert import torch_source  # loads torch, which safetensors do without

    if kind == "dcp" and not path.is_dir():
        raise CheckpointError(f"{path}: is a file; a DCP checkpoint is a folder")
    opened = torch_source.open_pt if kind == "pt" else torch_source.open_dcp
    return contextlib.nullcontext(opened(path, optimizer=optimizer))
