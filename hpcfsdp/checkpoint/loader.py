"""``load``: each rank reads the runs it needs, wherever the ranks that wrote had their shards."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Hashable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TypeAlias

import numpy as np
import torch
from torch import nn

from hpcfsdp.checkpoint import rng
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.inspect.names import hits, matching
from hpcfsdp.checkpoint.reader import BlockReader, CheckpointIndex, open_index
from hpcfsdp.checkpoint.retention import reading
from hpcfsdp.checkpoint.shares import rows_needed, share_of
from hpcfsdp.checkpoint.values import rebuilt
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import (
    CheckpointCorruptError,
    CheckpointError,
    CheckpointMismatchError,
    CheckpointReplacedError,
)
from hpcfsdp.state.materialize import materialized
from hpcfsdp.state.model import communicator_of, device_of, model_tensors, stateful_modules
from hpcfsdp.state.optimizer import OptimizerRestore, SavedTensor
from hpcfsdp.state.tensors import LocalPiece, StateTensor, staged_of

_MODEL = f"{schema.MODEL}/"

_TRIES = 5
"""How often a file may be replaced by another while it is opened."""

_Piece: TypeAlias = tuple[str, LocalPiece, torch.dtype]
"""The path in the file, and this rank's memory of a run of elements."""


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
        path: of the file.
        model: with the same parameters as the saved one; sharded, or a plain module (then every rank loads all of it).
            What of it is on the meta device gets memory of the CPU, and stays the same object.
        optimizer: None leaves the optimizer's part of the file unread.
        strict: False also takes a file that lacks some of the model's tensors, which stay as they are, and one that has
            more; the result lists both. Shapes and dtypes have to be the same in any case, and so has the optimizer.
        names: patterns of names of the model's tensors ("blocks.0.*", see ``inspect.names.matching``): the others, and
            the random number generators, stay as they are. Not together with an optimizer.
        verify: False compares no tensor with its checksums, and reads once: if the disk fails in the middle of it, a
            part of the model is loaded.
        files: what operates on the disk, for tests that have it fail.

    Returns:
        Step, world size, `extra` and more of the checkpoint.

    Raises:
        CheckpointError: there is no such file, it cannot be read, or a pattern matches nothing.
        CheckpointMismatchError: it belongs to another model or optimizer; names and shapes are listed.
        CheckpointCorruptError: it is damaged.
    """
    _check_arguments(names, optimizer)
    comm = communicator_of(model)
    path = Path(os.path.expanduser(path))
    with reading(path), contextlib.ExitStack() as stack, torch.no_grad():
        index, reader, peers = _opened_by_all(comm, stack, files or Files(), path, verify)
        with raise_together(comm):
            match, targets = _match_targets(index, model, names, strict, stack)
            restore = None if optimizer is None else _plan_optimizer(index, model, optimizer)
            tensors = [*targets, *(restore.tensors if restore is not None else ())]
            for staged in staged_of(tensors):
                staged.alloc()
            found = [(str(_path_in(index, tensor)), tensor) for tensor in targets]
            pieces = [item for path_in_file, tensor in found for item in _pieces(path_in_file, tensor)]
            if restore is not None:
                _read_optimizer(reader, restore)
            generators = None if names is not None else _generators(index, comm, device_of(model))
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
        if name in match.states:
            module.set_extra_state(rebuilt(*index.module_states[name]))
    if generators is not None:
        generators()
    return dataclasses.replace(index.info, missing=match.missing, unexpected=match.unexpected)


def _check_arguments(names: Sequence[str] | None, optimizer: torch.optim.Optimizer | None) -> None:
    if names is None:
        return
    if isinstance(names, str):
        raise TypeError(f"names= is {names!r}: give a list of names or patterns")
    if not names:
        raise ValueError("names= is empty: give names or patterns of tensors, or None for all")
    if optimizer is not None:
        raise ValueError("names= loads a part of a model, which the state of an optimizer does not fit: leave one out")


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


def _read_optimizer(reader: BlockReader, restore: OptimizerRestore) -> None:
    """Read the new state of an optimizer, which is beside the old one."""
    for tensor in restore.tensors:
        for item in _pieces(f"{schema.OPTIM_STATE}/{tensor.name}", tensor):
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


@dataclass(frozen=True)
class _Match:
    """Names of tensors of the model that are in the file, that are not, and of those of the file that are not in it."""

    found: frozenset[str]
    missing: tuple[str, ...]
    unexpected: tuple[str, ...]
    states: frozenset[str]
    """Of modules, beside tensors: those that the file has as well."""


def _match_targets(
    index: CheckpointIndex,
    model: nn.Module,
    names: Sequence[str] | None,
    strict: bool,
    stack: contextlib.ExitStack,
) -> tuple[_Match, list[StateTensor]]:
    """What of a model the file holds, and the tensors to be filled; they have memory from now on.

    Args:
        stack: takes memory away again from what had none, if it is left by an error.
    """
    tensors = model_tensors(model)
    match = _match_model(index, tensors, stateful_modules(model), names, strict)
    if any(piece.tensor.is_meta for tensor in tensors for piece in tensor.pieces):
        stack.enter_context(materialized(model, match.found, device_of(model)))
        tensors = model_tensors(model)
    return match, [tensor for tensor in tensors if tensor.name in match.found]


def _match_model(
    index: CheckpointIndex,
    targets: Sequence[StateTensor],
    states: Collection[str],
    names: Sequence[str] | None,
    strict: bool,
) -> _Match:
    """What of a model the file holds.

    Args:
        states: names of what modules keep beside tensors.

    Raises:
        CheckpointError: a pattern matches nothing in the file.
        CheckpointMismatchError: the file is of another model; the message lists what is missing, unexpected, different.
    """
    there = {path for path in (*index.tensors, *index.links) if path.startswith(_MODEL)}
    # Files of format 0.1, and of torch.distributed.checkpoint, know nothing of such states.
    known_states = set(index.module_states) if index.keeps_module_states else set(states)
    states = set(states)
    if names is not None:
        there = there.intersection(matching(index, names))
        if not there:
            raise CheckpointError(f"{index.info.path}: {names} match no tensor of the model, only the optimizer's")
        targets = [tensor for tensor in targets if any(hits(pattern, _paths(tensor)) for pattern in names)]
        known_states, states = (
            {name for name in found if any(hits(pattern, [_MODEL + name]) for pattern in names)}
            for found in (known_states, states)
        )
    missing = {t.name: f"{t.name} {list(t.shape)}" for t in targets if _path_in(index, t) is None}
    unexpected = {
        path.removeprefix(_MODEL): f"{path.removeprefix(_MODEL)} {list(index.resolve(path).shape)}"
        for path in sorted(there.difference(path for tensor in targets for path in _paths(tensor)))
    }
    missing |= {name: f"{name}, the state of a module" for name in sorted(states - known_states)}
    unexpected |= {name: f"{name}, the state of a module" for name in sorted(known_states - states)}
    lines = [line for tensor in targets for line in _differences(index, tensor)]
    if strict:
        lines = [f"  missing in the file: {text}" for text in missing.values()] + lines
        lines += [f"  unexpected in the file: {text}" for text in unexpected.values()]
    if lines:
        shown = lines[:40] + ([f"  ... and {len(lines) - 40} more"] if len(lines) > 40 else [])
        raise CheckpointMismatchError(f"{index.info.path}: the checkpoint is of another model\n" + "\n".join(shown))
    return _Match(
        frozenset(tensor.name for tensor in targets if tensor.name not in missing),
        tuple(sorted(missing)),
        tuple(unexpected),
        frozenset(states & set(index.module_states)),
    )


def _paths(tensor: StateTensor) -> list[str]:
    """What a tensor of the model may be called in a file."""
    return [f"{_MODEL}{name}" for name in (tensor.name, *tensor.aliases)]


def _path_in(index: CheckpointIndex, tensor: StateTensor) -> str | None:
    """What a tensor of the model is called in this file."""
    return next((path for path in _paths(tensor) if path in index.tensors or path in index.links), None)


def _differences(index: CheckpointIndex, tensor: StateTensor) -> list[str]:
    """What of a tensor, if the file has it, is not as in the model, in lines to be shown."""
    path = _path_in(index, tensor)
    if path is None:
        return []
    spec = index.resolve(path)
    dtype = str(tensor.dtype).removeprefix("torch.")
    lines = []
    if (spec.shape, spec.dtype) != (tensor.shape, dtype):
        lines.append(
            f"  differing: {tensor.name} is {list(spec.shape)} {spec.dtype} in the file, "
            f"{list(tensor.shape)} {dtype} in the model"
        )
    own = {further: index.links.get(further, further) for further in _paths(tensor) if further != path}
    return lines + [
        f"  differing: {further.removeprefix(_MODEL)} is a tensor of its own in the file, tied to {tensor.name} in the "
        "model"
        for further, real in own.items()
        if real in index.tensors and not _same_elements(index, path, real)
    ]


def _same_elements(index: CheckpointIndex, one: str, other: str) -> bool:
    """Whether two tensors of a file are equal bit by bit, as their checksums say.

    Writers that know nothing of ties, as torch.distributed.checkpoint does, have a tensor for each name.
    """
    left, right = index.resolve(one), index.resolve(other)
    fields = ["start", "numel", "count", "stride", "checksum"]
    return left is right or (
        (left.shape, left.dtype) == (right.shape, right.dtype)
        and np.array_equal(index.rows_of(one)[fields], index.rows_of(other)[fields])
    )


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
    try:
        return OptimizerRestore(model, optimizer, saved, index.scalars, index.param_groups)
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{index.info.path}: {error}") from None


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
