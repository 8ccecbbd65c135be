"""``save``: every rank writes its own bytes of one HDF5 file, which appears under its name only when it is whole."""

from __future__ import annotations

import contextlib
import datetime
import errno
import operator
import os
import secrets
import shutil
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import nn

from hpcfsdp._version import __version__
from hpcfsdp.checkpoint import extra as extras, rng, schema, skeleton
from hpcfsdp.checkpoint.catalog import abandoned_partials, partial_path
from hpcfsdp.checkpoint.plan import SavePlan, plan_save
from hpcfsdp.comm import Communicator, assert_same, raise_together
from hpcfsdp.errors import CheckpointError
from hpcfsdp.state.model import communicator_of, device_of, model_tensors
from hpcfsdp.state.optim.compare import StateInfo
from hpcfsdp.state.optimizer import optimizer_state, state_elsewhere
from hpcfsdp.state.tensors import Staged, StateTensor, staged_of


def save(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    step: int = 0,
    extra: Mapping[str, Any] | None = None,
    config: Mapping[str, Any] | None = None,
) -> Path:
    """Collective over the model's ranks. Write model, optimizer and random number generators into one HDF5 file.

    The file is written under a temporary name beside `path`, forced to disk by every rank, and renamed: at any moment
    `path` is the previous file, the new one, or absent. A failure on any rank is raised on every rank.

    Args:
        path: of the file, on a file system that all ranks share; rank 0's counts. The directory is made if it is
            missing.
        model: sharded by ``FullyShardedDataParallel``, or a plain module (then rank 0 writes it).
        optimizer: built from ``model.parameters()``.
        step: number of the training step, kept in the file.
        extra: further values: nested dicts and lists of numbers, strings, arrays and tensors. Rank 0's are kept.
        config: the configuration of the run, as JSON knows it.

    Returns:
        The path.

    Raises:
        CheckpointError: the file cannot be written, or a value cannot be kept.
        DisagreementError: ranks hold different models or optimizers.
    """
    comm = communicator_of(model)
    path, token = comm.broadcast_object((Path(os.path.abspath(os.path.expanduser(path))), secrets.token_hex(4)))
    partial = partial_path(path, token)
    elsewhere = None if optimizer is None else state_elsewhere(comm, model, optimizer)
    with raise_together(comm), _errors_of(path):
        step = operator.index(step)
        tensors, small = _collect(model, optimizer, elsewhere, extra, config)
        plan = plan_save(tensors)
    assert_same(comm, step, "step")
    assert_same(comm, plan.fingerprint(), "the plan of the checkpoint (the tensors of model and optimizer)")
    small |= _gather_rng(comm, model)
    attributes = {
        "software": "hpcfsdp",
        "software_version": __version__,
        "date": datetime.datetime.now(datetime.timezone.utc).isoformat(timespec="seconds"),
        "step": np.int64(step),
        "world_size": np.int64(comm.size),
    }
    offsets: list[int] = []
    table_offset = 0
    try:
        with raise_together(comm), _errors_of(path):
            if comm.rank == 0:
                _check_room(path, plan.nbytes + skeleton.metadata_bytes(plan, small))
                for abandoned in abandoned_partials(path, time.time()):
                    abandoned.unlink(missing_ok=True)
                offsets, table_offset = skeleton.create(partial, plan, attributes, small)
        offsets = comm.broadcast_object(offsets)
        sums = _write_all_blocks(comm, path, partial, plan, [tensor for _, tensor in tensors], offsets)
        everyone = comm.all_gather_object(sums)
        with raise_together(comm), _errors_of(path):
            if comm.rank == 0:
                rows = _extent_rows(plan, offsets, {index: total for part in everyone for index, total in part})
                _write_table(partial, rows, table_offset)
                skeleton.commit(partial, plan, rows, small)
                _sync(partial)
                os.replace(partial, path)
                _sync_folder(path.parent)
    except BaseException:
        if comm.rank == 0:
            with contextlib.suppress(OSError):
                partial.unlink()
        raise
    return path


def _collect(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    elsewhere: Mapping[str, StateInfo] | None,
    extra: Mapping[str, Any] | None,
    config: Mapping[str, Any] | None,
) -> tuple[list[tuple[str, StateTensor]], dict[str, np.ndarray | bytes]]:
    """Tensors with the group each goes to, and the small datasets that are the same on all ranks."""
    tensors = [(schema.MODEL, tensor) for tensor in model_tensors(model)]
    small: dict[str, np.ndarray | bytes] = {}
    if optimizer is not None:
        state = optimizer_state(model, optimizer, elsewhere)
        tensors += [(schema.OPTIM_STATE, tensor) for tensor in state.tensors]
        small[schema.OPTIM_SCALARS] = schema.to_json(state.scalars)
        small[schema.PARAM_GROUPS] = schema.to_json([_plain_group(index, g) for index, g in enumerate(state.groups)])
    values, arrays = extras.split_arrays(dict(extra or {}))
    small[schema.EXTRA_VALUES] = schema.to_json(values)
    small |= {f"{schema.EXTRA_ARRAYS}/{name}": array for name, array in arrays.items()}
    try:
        small[schema.CONFIG] = schema.to_json(None if config is None else dict(config))
    except (TypeError, ValueError) as error:
        raise CheckpointError(f"config must hold what JSON knows: {error}") from None
    return tensors, small


def _plain_group(index: int, group: dict[str, Any]) -> dict[str, Any]:
    plain: dict[str, Any] = {}
    for key, value in group.items():
        if isinstance(value, torch.Tensor):
            value = value.tolist()
        try:
            schema.to_json(value)
        except (TypeError, ValueError):
            raise CheckpointError(
                f"param_groups[{index}][{key!r}] of the optimizer is a {type(value).__name__}, which cannot be saved"
            ) from None
        plain[key] = value
    return plain


def _gather_rng(comm: Communicator, model: nn.Module) -> dict[str, np.ndarray]:
    everyone = comm.all_gather_object(rng.capture(device_of(model)))
    return {f"{schema.RNG}/{kind}": np.stack([states[kind] for states in everyone]) for kind in everyone[0]}


def _check_room(path: Path, needed_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.is_dir():
        raise IsADirectoryError("there is a directory of that name")
    free = shutil.disk_usage(path.parent).free
    if free < needed_bytes:
        raise CheckpointError(f"{needed_bytes} bytes are needed, {free} are free on that file system")


def _write_all_blocks(
    comm: Communicator,
    path: Path,
    partial: Path,
    plan: SavePlan,
    tensors: Sequence[StateTensor],
    offsets: Sequence[int],
) -> list[tuple[int, int]]:
    """Collective over `comm`. Write this rank's blocks and force them to disk; the index and checksum of each.

    What has to be put together first is put together, written and forgotten one after the other.
    """
    sums: list[tuple[int, int]] = []
    blocks: dict[Staged | None, list[int]] = {}
    for index, block in enumerate(plan.blocks):
        if block.rank == comm.rank:
            blocks.setdefault(tensors[block.tensor].staged, []).append(index)
    with contextlib.ExitStack() as stack:
        with raise_together(comm), _errors_of(path):
            fd = os.open(partial, os.O_WRONLY)
            stack.callback(os.close, fd)
            sums += _write_blocks(fd, plan, tensors, offsets, blocks.get(None, ()))
        for staged in staged_of(tensors):
            staged.gather()
            with raise_together(comm), _errors_of(path):
                sums += _write_blocks(fd, plan, tensors, offsets, blocks.get(staged, ()))
            staged.free()
        with raise_together(comm), _errors_of(path):
            os.fsync(fd)
    return sums


def _write_blocks(
    fd: int, plan: SavePlan, tensors: Sequence[StateTensor], offsets: Sequence[int], blocks: Iterable[int]
) -> list[tuple[int, int]]:
    """Write some blocks of the plan; the index and checksum of each."""
    sums: list[tuple[int, int]] = []
    for index in blocks:
        block = plan.blocks[index]
        tensor, spec = tensors[block.tensor], plan.specs[block.tensor]
        piece = next(p for p in tensor.pieces if p.start <= block.start < p.start + p.numel)
        data = piece.slice(block.start, block.numel).view(torch.uint8).numpy()
        sums.append((index, schema.checksum(data)))
        _write_all(fd, data, offsets[block.tensor] + block.start * spec.itemsize)
    return sums


def _write_table(partial: Path, rows: np.ndarray, offset: int) -> None:
    fd = os.open(partial, os.O_WRONLY)
    try:
        _write_all(fd, rows.view(np.uint8), offset)
        os.fsync(fd)
    finally:
        os.close(fd)


def _write_all(fd: int, data: np.ndarray, offset: int) -> None:
    view = memoryview(data)
    while view:  # one call may write less than asked for
        written = os.pwrite(fd, view, offset)
        view, offset = view[written:], offset + written


def _extent_rows(plan: SavePlan, offsets: Sequence[int], sums: Mapping[int, int]) -> np.ndarray:
    rows = np.zeros(len(plan.blocks), dtype=schema.EXTENT_DTYPE)
    for index, block in enumerate(plan.blocks):
        at = offsets[block.tensor] + block.start * plan.specs[block.tensor].itemsize
        rows[index] = (block.tensor, block.rank, block.start, block.numel, at, sums[index])
    return rows


def _sync_folder(path: Path) -> None:
    try:
        _sync(path)
    except OSError as error:
        # The file has its name already. Some file systems have no such call for folders, some folders cannot be opened.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP, errno.EACCES):
            raise


def _sync(path: Path) -> None:
    fd = os.open(path, os.O_RDONLY)
    try:
        os.fsync(fd)
    finally:
        os.close(fd)


@contextlib.contextmanager
def _errors_of(path: Path) -> Iterator[None]:
    """Have every error name the file, also those of the operating system and of HDF5."""
    try:
        yield
    except CheckpointError as error:
        if str(error).startswith(f"{path}: "):
            raise
        raise type(error)(f"{path}: {error}") from error
    except OSError as error:
        reason = os.strerror(error.errno) if error.errno else str(error)
        raise CheckpointError(f"{path}: cannot write the checkpoint: {reason}") from error
