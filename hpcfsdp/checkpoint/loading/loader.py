"""``load``: each rank reads the runs it needs, wherever the ranks that wrote had their shards."""

import contextlib
import dataclasses
import functools
import os
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn

from hpcfsdp._compat import load_from_state_dict
from hpcfsdp.checkpoint.data_place import as_before_on_failure, sampler_of
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.index import CheckpointIndex, open_index
from hpcfsdp.checkpoint.format.plain_values import from_plain
from hpcfsdp.checkpoint.format.reader import BlockReader
from hpcfsdp.checkpoint.format.schema import CheckpointInfo
from hpcfsdp.checkpoint.loading.match import FileNames, Match, Rename, check_patterns, match_model, renaming
from hpcfsdp.checkpoint.retention import reading
from hpcfsdp.checkpoint.saving import rng
from hpcfsdp.checkpoint.saving.same_call import Facts, GivenPath, compare_calls
from hpcfsdp.comm import Communicator, of_rank_0, raise_together
from hpcfsdp.errors import CheckpointCorruptError, CheckpointError, CheckpointMismatchError, CheckpointReplacedError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.reshard.sharded_tensors import as_bytes
from hpcfsdp.state.model import (
    communicator_of,
    device_of,
    hold_shards,
    materialized,
    model_tensors,
    persistent_tensors,
    stateful_modules,
)
from hpcfsdp.state.optim.in_file import OptimizerRestore
from hpcfsdp.state.tensors import LocalPiece, StateTensor, TensorInfo, buffers_of, refuse_subclasses
from hpcfsdp.state.wrappers import CleanNames
from hpcfsdp.units.flat_unit import unit_of, units_in
from hpcfsdp.units.guard import showing_state

_TRIES = 5  # how often a file may be replaced by another while it is opened
_PARTLY = "; a part of the model was loaded before this error: load again before using the model"

_SPOILT = "; the floating-point tensors that were to be loaded are NaN now: load another file, or make the model anew"

Piece: TypeAlias = tuple[str, LocalPiece, torch.dtype]
"""The path in the file, this rank's memory of a run of elements, and their dtype in the file."""


@public_call("checkpoint.load")
def load(
    path: str | os.PathLike[str],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None = None,
    strict: bool = True,
    names: Sequence[str] | None = None,
    verify: bool = True,
    fresh: bool = True,
    rename: Rename | None = None,
    cast: bool = False,
    data: Any = None,
) -> CheckpointInfo:
    """Load a checkpoint that any number of ranks wrote. Collective over the model's ranks.

    Restore parameters, buffers, the optimizer's state and hyper-parameters and the random number generators. Every byte
    is compared with its checksum while it is read. Nothing changes if the file does not fit. If a byte is damaged or
    the disk fails, on any rank, the error says so on all ranks, and the floating-point tensors that were to be loaded
    are NaN on all ranks, so that nobody goes on with a part of a checkpoint; see `fresh`. The optimizer then has the
    state that it had. With as many ranks as wrote the file each continues its own random numbers; further ranks get new
    ones, which depend on file and rank.

    Args:
        path: the file to load. Ranks other than 0 may pass None.
        model: with the same parameters as the saved one; sharded, or a plain module (then every rank loads all of it),
            with or without wrappers such as ``DistributedDataParallel``. Names in the file may contain those of
            wrappers. Tensors on the meta device get memory on the CPU, and stay the same objects.
        optimizer: the optimizer to load into; None leaves the optimizer's part of the file unread.
        strict: False also accepts a file that lacks some of the model's tensors, which then stay unchanged, or has more
            tensors; the result lists both. Shapes and dtypes, and the optimizer, always have to match.
        names: patterns for the names of the model's tensors ("blocks.0.*", see ``inspect.names.matching``): other
            tensors stay unchanged; without an optimizer the random number generators do, too. The optimizer, if given,
            must step only these tensors.
        fresh: whether the model holds nothing to keep, as one that has just been made; the same on all ranks. False
            keeps its values if the file is damaged: all ranks check every byte before anything changes. The tensors are
            then read twice, but for those on the meta device; the ranks of a node divide the first reading among them.
        rename: names in the file that the model has otherwise, of parameters, buffers and modules, with the optimizer's
            state: a dict of patterns (``{"backbone.*": "encoder.*"}``, the first that matches counts), or a function
            from the name in the file to that in the model. The error of a file that does not fit proposes one.
        cast: whether the model's tensors may have other dtypes than the file's, which are converted; else that is an
            error.
        data: what the training reads, which goes on at the sample where the file was saved, see ``save``; None leaves
            that part of the file unread.
        verify: False compares no checksums, and reads once. With ``fresh=False`` a part of the model is loaded if the
            disk fails in the middle.

    Returns:
        The checkpoint's step, world size, `extra` and more.

    Raises:
        CheckpointError: the file is missing or cannot be read, or a pattern matches nothing.
        CheckpointMismatchError: it belongs to another model or optimizer; names and shapes are listed.
        CheckpointCorruptError: it is damaged.
        DifferentCallsError: a rank makes another call, such as ``save``.
        DisagreementError: ranks give different values.
    """
    comm = communicator_of(model)

    def facts() -> Facts:
        check_patterns(names)
        renaming(rename)
        # Of models that are not sharded, ranks may have different parts, and load different names of one file.
        if data is not None:
            sampler_of(data)
        given = GivenPath(path) if comm.rank == 0 or path is not None else None
        return {"path": given, "fresh": bool(fresh), "data": data is not None}

    path = Path(compare_calls(comm, "checkpoint.load", facts)["path"].expanded)
    with reading(path):
        opening = functools.partial(_open_on_all_ranks, path=path, verify=verify)
        return load_from(
            comm,
            opening,
            model=model,
            optimizer=optimizer,
            strict=strict,
            names=names,
            verify=verify,
            fresh=fresh,
            rename=rename,
            cast=cast,
            data=data,
        )


@dataclasses.dataclass(frozen=True)
class Opened:
    """A source on one rank."""

    index: CheckpointIndex  # without rows of the states of random number generators
    reader: BlockReader  # within its context
    peers: list[int]  # the ranks that share this rank's page cache, this one among them
    drawn: rng.States  # the states of this rank's random number generators; empty for a source without any
    seed: int | None  # of new random numbers, for ranks beyond those that have saved


def load_from(
    comm: Communicator,
    opening: Callable[[Communicator, contextlib.ExitStack], Opened],
    *,
    model: nn.Module,
    optimizer: torch.optim.Optimizer | None,
    strict: bool = True,
    names: Sequence[str] | None,
    verify: bool,
    fresh: bool,
    rename: Rename | None = None,
    cast: bool = False,
    data: Any = None,
) -> CheckpointInfo:
    """Do as ``load``, from any source, which `opening` opens. Collective over `comm`, the ranks of the model."""
    with contextlib.ExitStack() as stack, torch.no_grad():
        opened = opening(comm, stack)
        index, reader, peers = opened.index, opened.reader, opened.peers
        with raise_together(comm) as exchange:
            sampler = stack.enter_context(as_before_on_failure(data))
            if sampler is not None:
                sampler.load_state_dict(_data_of(index))
            hold_shards(model)
            in_file, match, targets, new, grown = _match_targets(
                reader, index, model, names, strict, stack, renaming(rename), cast
            )
            chosen = None if names is None else match.found
            restore = None if optimizer is None else _plan_optimizer(in_file, model, optimizer, chosen)
            states = {name: _module_state(in_file, name) for name in match.states}
            tensors = [*targets, *(restore.tensors if restore is not None else ())]
            for buffer in buffers_of(tensors):
                buffer.alloc()
            found = [(str(in_file.path_in(tensor)), tensor) for tensor in targets]
            places = [
                (f"{schema.OPTIM_STATE}/{in_file.state(t.name)}", t) for t in (restore.tensors if restore else ())
            ]
            state = [piece for item in places for piece in _pieces(index, *item)]
            draws = names is None or optimizer is not None
            generators = _generators(index, opened.drawn if draws else {}, opened.seed, device_of(model))
            kept = [] if fresh else [item for item in found if item[1].name not in new]
            twice = [piece for item in kept for piece in _pieces(index, *item)]
            once = [piece for item in found if fresh or item[1].name in new for piece in _pieces(index, *item)]
            needed = rows_needed(index, kept, peers, comm.size)
            exchange.mine = schema.checksum(needed)
        if restore is not None:
            _read_together(comm, reader, state)  # its new state is allocated next to the old one
            with raise_together(comm):
                restore.check()
        if verify and not fresh:
            alike = [rank for rank in peers if exchange.everyone[rank] == exchange.mine]
            # To keep the data would double the memory of the model; the second read is mostly from the page cache.
            with raise_together(comm):
                reader.check_rows(select_share(index, needed, alike.index(comm.rank), len(alike)))
        at_stake = [tensor for tensor in targets if fresh and tensor.buffer is None and tensor.name not in new]
        with _nan_on_failure(at_stake):
            _read_together(comm, reader, once, _SPOILT if at_stake else "")
        if not fresh:
            _read_together(comm, reader, twice, _PARTLY)
    for tensor, value in grown:
        tensor.data = value
    for buffer in buffers_of(tensors):
        buffer.scatter()
        buffer.free()
    if restore is not None:
        restore.apply()
    for name, module in stateful_modules(model).items():
        if name in states:
            module.set_extra_state(states[name])
    generators()
    return dataclasses.replace(index.info, missing=match.missing, unexpected=match.unexpected)


class IndexOfRank0:
    """An index, and states of random number generators, that rank 0 has and all others need. Collective over `comm`."""

    def __init__(self, comm: Communicator, make: Callable[[], CheckpointIndex]) -> None:
        """Share the index that `make` returns on rank 0; the states stay there."""
        self._comm, self._of_ranks = comm, rng.States()

        def made() -> tuple[CheckpointIndex, int]:
            index = make()
            self._of_ranks = states = index.rng
            if any(value.ndim != 2 or len(value) != index.info.world_size for value in states.values()):
                what = "its random number states are not those of its ranks"
                raise CheckpointCorruptError(f"{index.info.path}: {what}")
            seed = schema.checksum(np.ascontiguousarray(states.get("torch_cpu", np.empty(0))))
            # Those of thousands of ranks are too much for each of them.
            return dataclasses.replace(index, rng={kind: value[:0] for kind, value in states.items()}), seed

        self.index, self._seed = of_rank_0(comm, made)

    def opened(self, reader: BlockReader, peers: list[int]) -> Opened:
        """Send each rank its states."""
        comm, index = self._comm, self.index
        states = rng.scatter(comm, index.rng, self._of_ranks) if index.rng else {}
        is_new = comm.rank >= index.info.world_size and "torch_cpu" in states
        return Opened(index, reader, peers, states, self._seed ^ comm.rank if is_new else None)


def _open_on_all_ranks(comm: Communicator, stack: contextlib.ExitStack, path: Path, verify: bool) -> Opened:
    """Open the file on all ranks, with the index that rank 0 reads. Collective over `comm`.

    Start again if the file is replaced meanwhile.
    """
    for _ in range(_TRIES):
        shared = IndexOfRank0(comm, lambda: open_index(path))
        reader = BlockReader(shared.index, verify=verify)
        with raise_together(comm) as exchange, contextlib.suppress(CheckpointReplacedError):
            exchange.mine = stack.enter_context(reader).place()
        if None not in exchange.everyone:
            peers = [rank for rank, place in enumerate(exchange.everyone) if place == exchange.mine]
            return shared.opened(reader, peers)
        stack.close()
    raise CheckpointReplacedError(f"{path}: was replaced {_TRIES} times while it was opened: load another file")


def _pieces(index: CheckpointIndex, path: str, tensor: StateTensor) -> list[Piece]:
    """Return this rank's pieces of a tensor at `path` in the file; raise CheckpointError for expanded memory."""
    for piece in tensor.pieces:
        if any(step == 0 and size > 1 for step, size in zip(piece.tensor.stride(), piece.tensor.shape, strict=True)):
            raise CheckpointError(f"{tensor.name!r} is an expanded tensor, which cannot be filled: make it contiguous")
    dtype = getattr(torch, index.resolve(path).dtype)
    return [(path, piece, dtype) for piece in tensor.pieces]


@contextlib.contextmanager
def _nan_on_failure(tensors: Sequence[StateTensor]) -> Iterator[None]:
    """Fill these tensors with NaN, as far as their dtypes have it, if the block raises. Not collective."""
    try:
        yield
    except BaseException:
        for piece in (piece for tensor in tensors for piece in tensor.pieces):
            if piece.tensor.is_floating_point() or piece.tensor.is_complex():
                piece.tensor.detach().fill_(torch.nan)
        raise


def _read_together(comm: Communicator, reader: BlockReader, pieces: Sequence[Piece], consequence: str = "") -> None:
    """Do as ``_read_pieces``, as the source has them. Collective over `comm`."""
    for some in reader.portions(pieces):
        with raise_together(comm):
            _read_pieces(reader, some, consequence)


def _read_pieces(reader: BlockReader, pieces: Sequence[Piece], consequence: str = "") -> None:
    """Read pieces, directly into their memory where that is possible. Errors end with the `consequence`."""
    direct, others = [], []
    for path, piece, dtype in pieces:
        memory = piece.tensor.detach()
        is_plain = memory.is_contiguous() and not memory.is_conj() and not memory.is_neg()
        if memory.device.type != "cpu" or not is_plain or memory.dtype != dtype:
            others.append((path, piece, dtype))
            continue
        memory.view(-1)[:0].zero_()  # autograd notices that the memory changes
        kind = schema.numpy_dtype(str(dtype).removeprefix("torch."))
        direct.append((path, piece.start, as_bytes(memory).view(kind)))
    try:
        reader.read_all(direct)
        for path, piece, dtype in others:
            piece.fill(torch.from_numpy(reader.read(path, piece.start, piece.numel)).view(dtype))
    except CheckpointError as error:
        if not consequence:
            raise
        raise type(error)(f"{error}{consequence}") from error


def _match_targets(
    reader: BlockReader,
    index: CheckpointIndex,
    model: nn.Module,
    names: Sequence[str] | None,
    strict: bool,
    stack: contextlib.ExitStack,
    rename: Callable[[str], str] | None,
    cast: bool,
) -> tuple[FileNames, Match, list[StateTensor], frozenset[str], list[tuple[torch.Tensor, torch.Tensor]]]:
    """Return the file's names, the match with the model, and the tensors to fill. They have memory from now on.

    Further results are the names of those that had none on this rank, and buffers that get another shape, with values.
    `stack` removes memory of meta tensors again after an error.
    """
    tensors = model_tensors(model)
    files = FileNames(index, {name for tensor in tensors for name in (tensor.name, *tensor.aliases)}, rename)
    grown = _grown(reader, files, model, tensors)
    shapes = {name: tuple(value.shape) for name, (_, value) in grown.items()}
    as_loaded = [dataclasses.replace(each, shape=shapes.get(each.name, each.shape)) for each in tensors]
    match = match_model(files, as_loaded, stateful_modules(model), names, strict, cast)
    new = frozenset(t.name for t in tensors if t.pieces and all(piece.tensor.is_meta for piece in t.pieces))
    if any(piece.tensor.is_meta for tensor in tensors for piece in tensor.pieces):
        stack.enter_context(materialized(model, match.found, device_of(model)))
        tensors = model_tensors(model)
    targets = [tensor for tensor in tensors if tensor.name in match.found and tensor.name not in grown]
    refuse_subclasses(targets)
    return files, match, targets, new, [pair for name, pair in grown.items() if name in match.found]


def _grown(
    reader: BlockReader, files: FileNames, model: nn.Module, tensors: Sequence[StateTensor]
) -> dict[str, tuple[torch.Tensor, torch.Tensor]]:
    """Buffers of another shape in the file that their modules load all the same, and what they hold then, by name."""
    # Observers of quantisation have a ``_load_from_state_dict`` that resizes what has no values yet: it gets copies.
    by_name = {name: tensor for tensor in tensors for name in (tensor.name, *tensor.aliases)}
    found, name_of = {}, CleanNames.of(model)
    for path, module in model.named_modules():
        if getattr(module._load_from_state_dict, "__func__", None) is load_from_state_dict or unit_of(module):
            continue
        own = {name: buffer for name, buffer in persistent_tensors(module) if name in module._buffers}
        known = {name: by_name[name_of(path, name)] for name in own if name_of(path, name) in by_name}
        specs = {n: files.index.resolve(at) for n, tensor in known.items() if (at := files.path_in(tensor)) is not None}
        if all(spec.shape == own[name].shape for name, spec in specs.items()):
            continue
        dtypes = {name: getattr(torch, spec.dtype) for name, spec in specs.items()}
        read = {name: torch.from_numpy(reader.read(spec.path, 0, spec.numel)) for name, spec in specs.items()}
        given = {name: read[name].view(dtypes[name]).view(spec.shape) for name, spec in specs.items()}
        device, errors = device_of(model), list[str]()
        try:
            for name, buffer in own.items():
                module._buffers[name] = torch.empty_like(buffer, device=device) if buffer.is_meta else buffer.clone()
            with contextlib.ExitStack() as stack:
                for unit in units_in(model):  # whose parameters are not in what is given
                    stack.enter_context(showing_state(unit))
                module._load_from_state_dict(given, "", {"version": module._version}, True, [], [], errors)
            now = {name: module._buffers[name] for name in specs}
        finally:
            module._buffers.update(own)
        if not errors and all((now[n].shape, now[n].dtype) == (spec.shape, dtypes[n]) for n, spec in specs.items()):
            found.update({known[name].name: (own[name], value) for name, value in now.items()})
    return found


def _data_of(index: CheckpointIndex) -> dict[str, Any]:
    """Return the place in the data; raise CheckpointMismatchError for a file without it."""
    if index.info.data is None:
        what = "holds no place in the data; load it with data=None to begin at the first sample"
        raise CheckpointMismatchError(f"{index.info.path}: {what}")
    return index.info.data


def _plan_optimizer(
    in_file: FileNames, model: nn.Module, optimizer: torch.optim.Optimizer, chosen: Collection[str] | None
) -> OptimizerRestore:
    """Match the optimizer with the file's; it must step `chosen` parameters alone, if that is not None."""
    index = in_file.index
    if index.param_groups is None or index.scalars is None:
        what = "holds no optimizer; load it with optimizer=None to start a new one"
        raise CheckpointMismatchError(f"{index.info.path}: {what}")
    prefix = f"{schema.OPTIM_STATE}/"
    saved = {
        in_file.in_optimizer(path.removeprefix(prefix)): TensorInfo(spec.shape, getattr(torch, spec.dtype))
        for path, spec in index.tensors.items()
        if path.startswith(prefix)
    }
    try:
        restore = OptimizerRestore(model, optimizer, saved, *in_file.optimizer())
    except CheckpointMismatchError as error:
        raise CheckpointMismatchError(f"{index.info.path}: {error}") from None
    other = None if chosen is None else next((name for name in restore.param_names if name not in chosen), None)
    if other is not None:
        what = f"the optimizer steps {other!r}, which names= leaves out: choose all that it steps, or leave the"
        raise CheckpointError(f"{index.info.path}: {what} optimizer out")
    return restore


def _module_state(in_file: FileNames, name: str) -> Any:
    """Return a module's extra state from the file; raise CheckpointCorruptError where it is damaged."""
    try:
        return from_plain(*in_file.index.module_states[in_file.in_file(name)])
    except (AttributeError, IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        what = f"the saved state of the module {name!r} does not have the form that hpcfsdp writes"
        raise CheckpointCorruptError(f"{in_file.index.info.path}: {what}") from error


def _generators(
    index: CheckpointIndex, drawn: rng.States, seed: int | None, device: torch.device
) -> Callable[[], None]:
    """Return a function that restores the random number generators. It has been tried, so that it will not fail."""
    if not drawn:  # as in files of converters and of torch.distributed.checkpoint
        return lambda: None
    before = rng.capture(device)
    try:
        rng.restore(drawn, device)
    except (IndexError, KeyError, OverflowError, RuntimeError, TypeError, ValueError) as error:
        raise CheckpointCorruptError(f"{index.info.path}: its random number states do not fit: {error}") from error
    finally:
        rng.restore(before, device)
    return functools.partial(rng.restore, drawn, device) if seed is None else functools.partial(rng.reseed, seed)


_RANGE_BYTES = 64 << 20
"""The longest range. Ranks that read near each other were faster than ranks far from each other in a file."""


def rows_needed(
    index: CheckpointIndex, tensors: Iterable[tuple[str, StateTensor]], peers: Sequence[int], num_ranks: int
) -> np.ndarray:
    """Return rows of the table of extents, by their places in it, that a node needs; in the order of the file.

    They include all rows that this rank needs. Ranks of a node (`peers`, with this one) usually find the same rows, but
    may not where parameters are laid out differently for some of them. `tensors` to load come with their paths.
    """
    is_peer = np.zeros(num_ranks, bool)
    is_peer[list(peers)] = True
    needed = [np.empty(0, np.int64)]
    for path, tensor in tensors:
        first, end = index.first_rows[index.resolve(path).path]
        places = np.arange(first, end)
        needed.append(places if is_peer.all() else places[_overlapping(index.extents[first:end], tensor, is_peer)])
    places = np.unique(np.concatenate(needed))
    rows = index.extents[places]
    return places[np.lexsort((rows["byte_offset"], rows["file"]))]


def select_share(index: CheckpointIndex, places: np.ndarray, number: int, count: int) -> np.ndarray:
    """Return the rows that rank `number` of `count` verifies. These ranks have equal `places`, in file order."""
    rows = index.extents[places]
    itemsizes = np.array([spec.itemsize for spec in index.tensors.values()], np.int64)
    nbytes = rows["numel"].astype(np.int64) * rows["count"].astype(np.int64) * itemsizes[rows["tensor"]]
    # A row belongs to the range with its middle. The ranks take ranges in turn.
    turns = max(1, -(-int(nbytes.sum()) // (count * _RANGE_BYTES)))
    ranges = (np.cumsum(nbytes) - nbytes // 2 - 1) * (turns * count) // max(1, nbytes.sum())
    return np.asarray(places[ranges % count == number])


def _overlapping(rows: np.ndarray, tensor: StateTensor, is_peer: np.ndarray) -> np.ndarray:
    """Return for each row whether it has elements that a rank of this node needs. `is_peer` is by rank."""
    ours = is_peer[tensor.runs.ranks].any(axis=1)
    edges = tensor.runs.edges
    # What every rank has whole counts in the runs as rank 0's; it is among this rank's own.
    own = [(piece.start, piece.start + piece.numel) for piece in tensor.pieces if piece.numel]
    begins = np.sort(np.append(edges[:-1][ours], [begin for begin, _ in own]).astype(np.int64))
    ends = np.sort(np.append(edges[1:][ours], [end for _, end in own]).astype(np.int64))
    first = rows["start"].astype(np.int64)
    last = first + schema.row_spans(rows)
    # Of the needed ranges that begin before a row ends, some do not end before it begins.
    return np.asarray(np.searchsorted(begins, last) > np.searchsorted(ends, first, side="right"))
