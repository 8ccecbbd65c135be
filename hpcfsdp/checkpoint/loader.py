"""``load``: each rank reads the runs it needs, wherever the ranks that wrote had their shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Hashable, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint import rng
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.match import FileNames, Match, check_patterns, match_model
from hpcfsdp.checkpoint.plain_values import rebuilt
from hpcfsdp.checkpoint.reader import BlockReader
from hpcfsdp.checkpoint.retention import reading
from hpcfsdp.checkpoint.same_call import Facts, GivenPath, enter
from hpcfsdp.checkpoint.shares import rows_needed, share_of
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReplacedError,
)
from hpcfsdp.launch.calls import public_call
from hpcfsdp.state.materialize import materialized
from hpcfsdp.state.model import communicator_of, device_of, model_tensors, stateful_modules
from hpcfsdp.state.optim.in_file import OptimizerRestore, check_saved
from hpcfsdp.state.tensors import LocalPiece, StateTensor, TensorInfo, staged_of
from hpcfsdp.state.wrappers import settle

_TRIES = 5
"""How often a file may be replaced by another while it is opened."""

_Piece: TypeAlias = tuple[str, LocalPiece, torch.dtype]
"""The path in the file, and this rank's memory of a run of elements."""


@public_call("checkpoint.load")
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    names: Sequence[str] | None = None,
    verify: bool = True,
    files: Files | None = None,
) -> CheckpointInfo:
    """Collective over the model's ranks. Load a checkpoint that any number of ranks wrote.

    Parameters, buffers, the optimizer's state and hyper-parameters and the random number generators become what they
    were. Every byte that is read is checked against its checksum, and nothing is changed before all ranks have checked
    theirs: what is loaded in place is read twice for that, first to be looked at only, which the ranks of a node divide
    among them. With as many ranks as wrote the file each continues its own random numbers; ranks beyond those get new
    ones, which follow from file and rank.

    Args:
        path: of the file. Ranks other than 0 may give None.
        model: with the same parameters as the saved one; sharded, or a plain module (then every rank loads all of it),
            in wrappers as ``DistributedDataParallel`` or not. Names in the file may be those that it has within
            wrappers. What of it is on the meta device gets memory of the CPU, and stays the same object.
        optimizer: None leaves the optimizer's part of the file unread.
        strict: False also takes a file that lacks some of the model's tensors, which stay as they are, and one that has
            more; the result lists both. Shapes and dtypes have to be the same in any case, and so has the optimizer.
        names: patterns of names of the model's tensors ("blocks.0.*", see ``inspect.names.matching``): the others stay
            as they are, and without an optimizer the random number generators too. An optimizer may step no others.
        verify: False compares no tensor with its checksums, and reads once: if the disk fails in the middle of it, a
            part of the model is loaded.
        files: what operates on the disk, for tests that have it fail.

    Returns:
        Step, world size, `extra` and more of the checkpoint.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or a pattern matches nothing.
        CheckpointMismatchError: it belongs to another model or optimizer; names and shapes are listed.
        CheckpointCorruptError: it is damaged.
        DifferentCallsError: a rank makes another call, as ``save``.
        DisagreementError: ranks give different values.
    """
    comm = communicator_of(model)

    def facts() -> Facts:
        check_patterns(names)
        # Of models that are not sharded, ranks may have different parts, and load different names of one file.
        return {"path": GivenPath(path) if comm.rank == 0 or path is not None else None}

    path = Path(enter(comm, "checkpoint.load", facts)["path"].expanded)
    with reading(path), contextlib.ExitStack() as stack, torch.no_grad():
        index, reader, peers = _opened_by_all(comm, stack, files or Files(), path, verify)
        with raise_together(comm):
            settle(model)
            in_file, match, targets = _match_targets(index, model, names, strict, stack)
            restore = None if optimizer is None else _plan_optimizer(in_file, model, optimizer)
            if restore is not None and names is not None:
                _check_steps_only(match.found, restore, index.info.path)
            states = {name: _module_state(in_file, name) for name in match.states}
            tensors = [*targets, *(restore.tensors if restore is not None else ())]
            for staged in staged_of(tensors):
                staged.alloc()
            found = [(str(in_file.path_in(tensor)), tensor) for tensor in targets]
            pieces = [item for path_in_file, tensor in found for item in _pieces(path_in_file, tensor)]
            if restore is not None:
                _read_optimizer(reader, in_file, restore)
            generators = None if names is not None and optimizer is None else _generators(index, comm, device_of(model))
            needed = rows_needed(index, found, peers, comm.size)
        if verify:
            _check_rows(comm, reader, index, needed, peers)
        with raise_together(comm):
            _read_pieces(reader, pieces)
    for staged in staged_of(tensors):
        staged.scatter()
        staged.free()
    if restore is not None:
        restore.apply()
    for name, module in stateful_modules(model).items():
        if name in states:
            module.set_extra_state(states[name])
    if generators is not None:
        generators()
    return dataclasses.replace(index.info, missing=match.missing, unexpected=match.unexpected)


def _opened_by_all(
    comm: Communicator, stack: contextlib.ExitStack, files: Files, path: Path, verify: bool
) -> tuple[CheckpointIndex, BlockReader, list[int]]:
    """Collective over `comm`. The index, as rank 0 reads it, the same file opened by all ranks, and the ranks whose
    system keeps it in its memory for this rank, too.

    A file that is replaced by a newer one meanwhile is given up for that.
    """
    for _ in range(_TRIES):
        index: CheckpointIndex | None = None
        with raise_together(comm):
            if comm.rank == 0:
                index = open_index(path, files)
        index = comm.broadcast_object(index)
        reader = BlockReader(index, files, verify=verify)
        place: Hashable = None  # it has been replaced
        with raise_together(comm), contextlib.suppress(CheckpointReplacedError):
            place = stack.enter_context(reader).place()
        places = comm.all_gather_object(place)
        if None not in places:
            return index, reader, [rank for rank, other in enumerate(places) if other == place]
        stack.close()
    raise CheckpointReplacedError(f"{path}: was replaced {_TRIES} times while it was opened: load another file")


def _pieces(path: str, tensor: StateTensor) -> list[_Piece]:
    """What this rank has of a tensor that stands under `path` in the file.

    Raises:
        CheckpointError: it cannot be filled.
    """
    for piece in tensor.pieces:
        if any(step == 0 and size > 1 for step, size in zip(piece.tensor.stride(), piece.tensor.shape, strict=True)):
            raise CheckpointError(f"{tensor.name!r} is an expanded tensor, which cannot be filled: make it contiguous")
    return [(path, piece, tensor.dtype) for piece in tensor.pieces]


def _read_optimizer(reader: BlockReader, in_file: FileNames, restore: OptimizerRestore) -> None:
    """Read the new state of an optimizer, which is beside the old one."""
    for tensor in restore.tensors:
        for item in _pieces(f"{schema.OPTIM_STATE}/{in_file.in_file(tensor.name)}", tensor):
            _read_piece(reader, *item)
    restore.check()


def _check_rows(
    comm: Communicator, reader: BlockReader, index: CheckpointIndex, needed: np.ndarray, peers: Sequence[int]
) -> None:
    """Collective over `comm`. Look at all before anything is changed: damage must not leave a half-loaded model.

    To keep what is read here would take as much memory as the model. When it is read again, it is most often in the
    system's memory.

    Args:
        needed: rows of the table of extents, all that this rank needs.
        peers: the ranks of this node. Those for which the same rows are needed divide them.
    """
    digests = comm.all_gather_object(schema.checksum(needed))
    alike = [rank for rank in peers if digests[rank] == digests[comm.rank]]
    with raise_together(comm):
        reader.check_rows(share_of(index, needed, alike.index(comm.rank), len(alike)))


def _read_pieces(reader: BlockReader, pieces: Sequence[_Piece]) -> None:
    try:
        for item in pieces:
            _read_piece(reader, *item)
    except CheckpointError as error:
        raise type(error)(f"{error}; a part of the model has been loaded before that: load it again") from error


def _read_piece(reader: BlockReader, path: str, piece: LocalPiece, dtype: torch.dtype) -> None:
    """Read a piece, straight into its memory where its elements lie in order there."""
    memory = piece.tensor.detach()
    if memory.device.type != "cpu" or not memory.is_contiguous() or memory.is_conj() or memory.is_neg():
        piece.fill(torch.from_numpy(reader.read(path, piece.start, piece.numel)).view(dtype))
        return
    kind = schema.numpy_dtype(str(dtype).removeprefix("torch."))
    reader.read_into(path, piece.start, memory.view(-1).view(torch.uint8).numpy().view(kind))
    memory.view(-1)[:0].zero_()  # autograd is told that the memory has changed


def _match_targets(
    index: CheckpointIndex,
    model: nn.Module,
    names: Sequence[str] | None,
    strict: bool,
    stack: contextlib.ExitStack,
) -> tuple[FileNames, Match, list[StateTensor]]:
    """Names in the file, what of a model it holds, and the tensors to be filled; they have memory from now on.

    Args:
        stack: takes memory away again from what had none, if it is left by an error.
    """
    tensors = model_tensors(model)
    files = FileNames(index, {name for tensor in tensors for name in (tensor.name, *tensor.aliases)})
    match = match_model(files, tensors, stateful_modules(model), names, strict)
    if any(piece.tensor.is_meta for tensor in tensors for piece in tensor.pieces):
        stack.enter_context(materialized(model, match.found, device_of(model)))
        tensors = model_tensors(model)
    return files, match, [tensor for tensor in tensors if tensor.name in match.found]


def _plan_optimizer(in_file: FileNames, model: nn.Module, optimizer: torch.optim.Optimizer) -> OptimizerRestore:
    index = in_file.index
    if index.param_groups is None or index.scalars is None:
        raise CheckpointMismatchError(
            f"{index.info.path}: holds no optimizer; load it with optimizer=None to start a new one"
        )
    prefix = f"{schema.OPTIM_STATE}/"
    saved = {
        in_file.in_model(path.removeprefix(prefix)): TensorInfo(spec.shape, getattr(torch, spec.dtype))
        for path, spec in index.tensors.items()
        if path.startswith(prefix)
    }
    try:
        check_saved(index.param_groups, index.scalars)
        return OptimizerRestore(model, optimizer, saved, *in_file.optimizer())
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{index.info.path}: {error}") from None


def _check_steps_only(chosen: Collection[str], restore: OptimizerRestore, path: Path) -> None:
    """Raise if an optimizer steps what is not loaded.

    Args:
        chosen: names of the tensors that are.

    Raises:
        CheckpointError: it does.
    """
    others = [name for name in restore.param_names if name not in chosen]
    if others:
        raise CheckpointError(
            f"{path}: the optimizer steps {others[0]!r}, which names= leaves out: choose all that it steps, or leave "
            "the optimizer out"
        )


def _module_state(in_file: FileNames, name: str) -> Any:
    """What a module keeps beside tensors, as the file has it.

    Raises:
        CheckpointCorruptError: it cannot be made of that.
    """
    try:
        return rebuilt(*in_file.index.module_states[in_file.in_file(name)])
    except (AttributeError, IndexError, KeyError, TypeError, ValueError) as error:
        path = in_file.index.info.path
        raise CheckpointCorruptError(f"{path}: the state of a module {name!r} is not as a saver writes it") from error


def _generators(index: CheckpointIndex, comm: Communicator, device: torch.device) -> Callable[[], None]:
    """What puts the random number generators where they were. It has been tried: nothing fails any more.

    Raises:
        CheckpointCorruptError: the file's states are none of generators.
    """
    if not index.rng:  # written by a converter, or through torch.distributed.checkpoint
        return lambda: None
    row = min(comm.rank, index.info.world_size - 1)
    before = rng.capture(device)
    try:
        states = {kind: of_ranks[row] for kind, of_ranks in index.rng.items()}
        rng.restore(states, device)
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{index.info.path}: its random number states do not fit: {error}") from error
    finally:
        rng.restore(before, device)
    if comm.rank < index.info.world_size or "torch_cpu" not in index.rng:
        return functools.partial(rng.restore, states, device)
    return functools.partial(rng.reseed, schema.checksum(np.ascontiguousarray(index.rng["torch_cpu"])) ^ comm.rank)
