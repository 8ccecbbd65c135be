"""``load``: each rank reads the runs it needs, wherever the ranks that wrote had their shards."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint import rng, schema
from hpcfsdp.checkpoint.reader import BlockReader, CheckpointIndex, open_index
from hpcfsdp.checkpoint.schema import CheckpointInfo
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError
from hpcfsdp.state.model import communicator_of, device_of, model_tensors
from hpcfsdp.state.optimizer import OptimizerRestore, SavedTensor
from hpcfsdp.state.tensors import LocalPiece, StateTensor, staged_of


def load(
    path: str | os.PathLike[str], *, model: nn.Module, optimizer: torch.optim.Optimizer | None = None
) -> CheckpointInfo:
    """Collective over the model's ranks. Load a checkpoint that any number of ranks wrote.

    Parameters, buffers, the optimizer's state and hyper-parameters and the random number generators become what they
    were. Every byte that is read is checked against its checksum, and nothing is changed before all ranks have read
    and checked theirs. With as many ranks as wrote the file each continues its own random numbers; ranks beyond those
    get new ones, which follow from the file and the rank.

    Args:
        path: of the file.
        model: with the same parameters as the saved one; sharded, or a plain module (then every rank loads all of it).
        optimizer: None leaves the optimizer's part of the file unread.

    Returns:
        Step, world size, `extra` and more of the checkpoint.

    Raises:
        CheckpointError: there is no such file, or it cannot be read.
        CheckpointMismatchError: it belongs to another model or optimizer; names and shapes are listed.
        CheckpointCorruptError: it is damaged.
    """
    comm = communicator_of(model)
    path = os.path.expanduser(path)
    index: CheckpointIndex | None = None
    with raise_together(comm):
        if comm.rank == 0:
            index = open_index(path)
    index = comm.broadcast_object(index)
    with raise_together(comm), torch.no_grad(), BlockReader(index) as reader:
        targets = model_tensors(model)
        _check_model(index, targets)
        for staged in staged_of(targets):
            staged.alloc()
        restore = None
        if optimizer is not None:
            restore = _plan_optimizer(index, model, optimizer)
            for staged in staged_of(restore.tensors):
                staged.alloc()
            for tensor in restore.tensors:
                for piece, values in _read_pieces(reader, schema.OPTIM_STATE, tensor):
                    piece.fill(values)
            restore.check()
        # Read aside first: a damaged block must not leave a model that is half old and half new.
        read = [item for tensor in targets for item in _read_pieces(reader, schema.MODEL, tensor)]
    for piece, values in read:
        piece.fill(values)
    for staged in staged_of([*targets, *(restore.tensors if restore is not None else ())]):
        staged.scatter()
        staged.free()
    if restore is not None:
        restore.apply()
    _restore_rng(index, comm, device_of(model))
    return index.info


def _read_pieces(reader: BlockReader, group: str, tensor: StateTensor) -> Iterator[tuple[LocalPiece, torch.Tensor]]:
    for piece in tensor.pieces:
        if any(step == 0 and size > 1 for step, size in zip(piece.tensor.stride(), piece.tensor.shape, strict=True)):
            raise CheckpointError(f"{tensor.name!r} is an expanded tensor, which cannot be filled: make it contiguous")
        values = reader.read(f"{group}/{tensor.name}", piece.start, piece.numel)
        yield piece, torch.from_numpy(values).view(tensor.dtype)


def _check_model(index: CheckpointIndex, targets: list[StateTensor]) -> None:
    """Raise unless the file holds just these tensors; the message lists what is missing, unexpected and different."""
    here = {f"{schema.MODEL}/{name}": tensor for tensor in targets for name in (tensor.name, *tensor.aliases)}
    there = {path for path in (*index.tensors, *index.links) if path.startswith(f"{schema.MODEL}/")}
    lines: list[str] = []
    for tensor in targets:
        path = f"{schema.MODEL}/{tensor.name}"
        if path not in there:
            lines.append(f"  missing in the file: {tensor.name} {list(tensor.shape)}")
            continue
        spec = index.resolve(path)
        dtype = str(tensor.dtype).removeprefix("torch.")
        if (spec.shape, spec.dtype) != (tensor.shape, dtype):
            lines.append(
                f"  differing: {tensor.name} is {list(spec.shape)} {spec.dtype} in the file, "
                f"{list(tensor.shape)} {dtype} in the model"
            )
        own = [alias for alias in tensor.aliases if index.links.get(f"{schema.MODEL}/{alias}", path) != path]
        own += [alias for alias in tensor.aliases if f"{schema.MODEL}/{alias}" in index.tensors]
        lines += [
            f"  differing: {alias} is a tensor of its own in the file, tied to {tensor.name} in the model"
            for alias in own
        ]
    for path in sorted(there.difference(here)):
        lines.append(f"  unexpected in the file: {path.split('/', 1)[1]} {list(index.resolve(path).shape)}")
    if lines:
        shown = lines[:40] + ([f"  ... and {len(lines) - 40} more"] if len(lines) > 40 else [])
        raise CheckpointMismatchError(f"{index.info.path}: the checkpoint is of another model\n" + "\n".join(shown))


def _plan_optimizer(index: CheckpointIndex, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerRestore:
    if index.param_groups is None or index.scalars is None:
        raise CheckpointMismatchError(
            f"{index.info.path}: holds no optimizer; load it with optimizer=None to start a new one"
        )
    prefix = f"{schema.OPTIM_STATE}/"
    saved = {
        path.removeprefix(prefix): SavedTensor(spec.shape, getattr(torch, spec.dtype))
        for path, spec in index.tensors.items()
        if path.startswith(prefix)
    }
    with _named(index):
        return OptimizerRestore(model, optimizer, saved, index.scalars, index.param_groups)


@contextlib.contextmanager
def _named(index: CheckpointIndex) -> Iterator[None]:
    try:
        yield
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{index.info.path}: {error}") from None


def _restore_rng(index: CheckpointIndex, comm: Communicator, device: torch.device) -> None:
    row = min(comm.rank, index.info.world_size - 1)
    try:
        rng.restore({kind: states[row] for kind, states in index.rng.items()}, device)
    except (IndexError, KeyError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{index.info.path}: its random number states do not fit: {error}") from error
    if comm.rank >= index.info.world_size and "torch_cpu" in index.rng:
        seed = schema.checksum(np.ascontiguousarray(index.rng["torch_cpu"])) ^ comm.rank
        rng.reseed(seed)
