"""``average_checkpoints``: weights that are the mean of those of several checkpoints, read block by block."""

import contextlib
import math
import os
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import torch

from hpcfsdp.checkpoint.convert.output import MODEL, OPTIM, Progress, absolute, check_absent, no_progress
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.writer import write_alone
from hpcfsdp.errors import CheckpointMismatchError, UsageError


@dataclass(frozen=True)
class Averaged:
    """The result of an average."""

    path: Path
    step: int  # of the last checkpoint
    tensors: int
    nbytes: int
    weights: tuple[float, ...]  # of each checkpoint; they sum up to 1


def average_checkpoints(
    sources: Sequence[str | os.PathLike[str]],
    output: str | os.PathLike[str],
    *,
    weights: Sequence[float] | None = None,
    decay: float | None = None,
    state: str | None = None,
    force: bool = False,
    progress: Progress = no_progress,
) -> Averaged:
    """Write a checkpoint with the mean of the models of others; not collective. It has no optimizer.

    Floating-point and complex tensors are averaged, in float64 (of 16 bits in float32); of others those of the last
    file count, as a counter of batches. Every byte that is read is compared with its checksum.

    Args:
        sources: the checkpoint files, in the order of training.
        output: the checkpoint file, which appears there when it is whole.
        weights: of each file, not negative; None: equal ones.
        decay: instead of `weights`: each file counts this times as much as the next one, as in an exponential average.
        state: a name in the optimizer's state, such as "ema", of the values to take in place of the parameters.
        force: replace a file that is there.
        progress: of bytes that are read.

    Raises:
        UsageError: no files, or weights that do not fit.
        CheckpointMismatchError: the files belong to different models, or lack the `state`; the tensor is named.
        CheckpointError: a file cannot be read or written. CheckpointCorruptError: one is damaged.
    """
    shares = _shares(len(sources), weights, decay)
    target = absolute(output)
    check_absent(target, force=force)
    indexes = [open_index(source) for source in sources]
    specs = [spec for path, spec in indexes[0].tensors.items() if path.startswith(MODEL)]
    if not specs:
        raise CheckpointMismatchError(f"{indexes[0].info.path}: holds no model")
    _check_alike(indexes, specs)
    paths = {spec.path: _source_of(indexes, spec, state) for spec in specs}
    if state is not None and all(path == of for path, of in paths.items()):
        raise CheckpointMismatchError(f"{indexes[0].info.path}: the optimizer has no state {state!r} of any parameter")
    nbytes, links = sum(spec.nbytes for spec in specs), indexes[0].links
    with contextlib.ExitStack() as stack:
        readers = [stack.enter_context(BlockReader(index)) for index in indexes]
        advance = stack.enter_context(progress("averaging", nbytes * len(sources)))

        def read(spec: TensorSpec, start: int, numel: int) -> np.ndarray:
            parts = [reader.read(paths[spec.path], start, numel) for reader in readers]
            advance(sum(part.nbytes for part in parts))
            return _mean(parts, getattr(torch, spec.dtype), shares)

        write_alone(
            target,
            specs,
            read,
            links=[(alias, path) for alias, path in links.items() if path in paths],
            step=indexes[-1].info.step,
            extra={"averaged": [str(absolute(each)) for each in sources], "weights": list(shares), "of": state},
        )
    return Averaged(target, indexes[-1].info.step, len(specs), nbytes, shares)


def _shares(count: int, weights: Sequence[float] | None, decay: float | None) -> tuple[float, ...]:
    """Return the part of each file."""
    if not count:
        raise UsageError("give the checkpoints to average")
    if weights is not None and decay is not None:
        raise UsageError("give weights or a decay, not both")
    if decay is not None:
        if not 0 < decay <= 1:
            raise UsageError(f"the decay must be above 0 and at most 1, not {decay}")
        weights = [decay ** (count - 1 - place) for place in range(count)]
    found = [1.0] * count if weights is None else [float(each) for each in weights]
    if len(found) != count:
        raise UsageError(f"there are {len(found)} weights for {count} checkpoints: give one for each")
    total = sum(found)
    if not all(math.isfinite(each) and each >= 0 for each in found) or not total > 0:
        raise UsageError(f"the weights {found} must be numbers from 0 on, not all 0")
    return tuple(each / total for each in found)


def _check_alike(indexes: Sequence[CheckpointIndex], specs: Sequence[TensorSpec]) -> None:
    first = indexes[0].info.path
    for index in indexes[1:]:
        there = {path for path in index.tensors if path.startswith(MODEL)}
        for spec in specs:
            other = index.tensors.get(spec.path)
            if other is None or (other.shape, other.dtype) != (spec.shape, spec.dtype):
                has = "nothing" if other is None else f"{list(other.shape)} {other.dtype}"
                raise CheckpointMismatchError(
                    f"{spec.path} is {list(spec.shape)} {spec.dtype} in {first}, and {has} in {index.info.path}: "
                    "average checkpoints of one model"
                )
        if more := there.difference(spec.path for spec in specs):
            raise CheckpointMismatchError(f"{index.info.path} has {min(more)}, which {first} has not")


def _source_of(indexes: Sequence[CheckpointIndex], spec: TensorSpec, state: str | None) -> str:
    """Return where the values of a tensor are read."""
    if state is None:
        return spec.path
    path = f"{OPTIM}{spec.path.removeprefix(MODEL)}/{state}"
    has = [path in index.tensors for index in indexes]
    if not any(has):
        return spec.path  # a buffer, or a parameter that was never trained
    if not all(has):
        raise CheckpointMismatchError(f"{indexes[has.index(False)].info.path}: lacks {path}, which others have")
    other = indexes[0].tensors[path]
    if (other.shape, other.dtype) != (spec.shape, spec.dtype):
        what = f"{path} is {list(other.shape)} {other.dtype}, its parameter {list(spec.shape)} {spec.dtype}"
        raise CheckpointMismatchError(f"{indexes[0].info.path}: {what}")
    return path


def _mean(parts: Sequence[np.ndarray], dtype: torch.dtype, shares: Sequence[float]) -> np.ndarray:
    """Return the mean of blocks in the form in which they are given."""
    values = [torch.from_numpy(np.ascontiguousarray(part)).view(dtype) for part in parts]
    if len(parts) == 1 or not (dtype.is_floating_point or dtype.is_complex):
        return parts[-1]
    wide = torch.complex128 if dtype.is_complex else torch.float32 if dtype.itemsize <= 2 else torch.float64
    total = values[0].to(wide) * shares[0]
    for value, share in zip(values[1:], shares[1:], strict=True):
        total.add_(value.to(wide), alpha=share)
    result = total.to(dtype)
    return result.view(torch.uint8).numpy().view(schema.numpy_dtype(str(dtype).removeprefix("torch.")))
