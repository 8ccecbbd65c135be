"""``HDF5Writer``: ``torch.distributed.checkpoint.save`` writes one HDF5 file; each rank writes its parts."""

import contextlib
import dataclasses
import functools
import logging
import operator
import os
import threading
import weakref
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan as StatePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hpcfsdp.checkpoint.dcp.columns import ColumnExchange, ExchangeRound, rows_blocks
from hpcfsdp.checkpoint.dcp.global_plan import box_of, plan_entries, plan_exchange, plan_tensors
from hpcfsdp.checkpoint.format import disk, entry_names as names, schema
from hpcfsdp.checkpoint.format.catalog import new_token
from hpcfsdp.checkpoint.format.entry_names import StateEntry
from hpcfsdp.checkpoint.format.metadata import MetadataImage, build_metadata_image
from hpcfsdp.checkpoint.format.plain_values import Types, to_plain
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.saving.content import root_attributes, small_values
from hpcfsdp.checkpoint.saving.plan import BLOCK_DTYPE, SavePlan, box_blocks
from hpcfsdp.checkpoint.saving.temporary import BlockWriter, TemporaryFile, TemporaryFileGoneError, naming_write_errors
from hpcfsdp.comm import Communicator, raise_together
from hpcfsdp.errors import CheckpointError
from hpcfsdp.reshard.sharded_tensors import as_bytes, checksum
from hpcfsdp.state.optim.values import digest
from hpcfsdp.state.shown import is_extra_state
from hpcfsdp.world import World, current_world

log = logging.getLogger("hpcfsdp.checkpoint")


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The coordinator's message to a rank. Tensors in the file come with their first bytes."""

    temporary: TemporaryFile
    items: tuple[MetadataIndex, ...]  # as they were planned
    places: tuple[tuple[TensorSpec, int] | None, ...]  # of items; None for other values than tensors
    num_ranks: int
    exchanged: frozenset[int] = frozenset()  # the items that ranks exchange for rows of their tensors
    rounds: tuple[ExchangeRound, ...] | None = None  # in which they do; None if no rank exchanges anything
    rows: Mapping[int, tuple[TensorSpec, int]] = dataclasses.field(default_factory=dict)  # by the number in `rounds`


@dataclasses.dataclass(frozen=True)
class Written:
    """A rank's message to the coordinator about an item. Checksums are uint64, as bytes."""

    sums: bytes = b""  # of its blocks
    value: Any = None  # of an item without tensor, or of a hyper-parameter that is one; as JSON and arrays
    types: Types = ()  # the original types in ``value``
    row_sums: bytes = b""  # of the first item alone: of the rows that are written instead of exchanged items


@dataclasses.dataclass
class _PlannedFile:
    """The coordinator's state between planning and ``finish``."""

    temporary: TemporaryFile
    plan: SavePlan
    items: list[tuple[MetadataIndex, ...]]
    entries: dict[str, StateEntry]
    attributes: Mapping[str, Any]
    metadata_image: MetadataImage


class HDF5Writer(StorageWriter):
    """Write a state dict into one HDF5 file: ``dcp.save(state, storage_writer=HDF5Writer(path))``.

    The file appears at its path when it is complete; until then, and after a failure on any rank, an earlier file
    stays. The dicts ``model`` and ``optim`` (or ``optimizer``) of a state dict, as ``get_state_dict`` gives them,
    become a checkpoint for ``hpcfsdp.checkpoint.load``. Nothing is pickled: other values must be numbers, strings,
    lists, tuples, dicts, bytes or arrays.

    Ranks of ``hpcfsdp.init`` that have columns of a tensor, as with ``Shard(1)``, exchange them first, so that each
    writes whole rows. ``async_save`` in a thread, and ranks that are not all of the world's, write each run from where
    it is: on a parallel file system many short runs of several ranks take long.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int = 0,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
    ) -> None:
        """Not collective, touch no disk.

        Args:
            path: the file to write, on a file system that all ranks share; the coordinator's path is used. None: pass
                the path to ``dcp.save`` as `checkpoint_id`.
            step: the number of the training step, stored in the file.
            extra: further values, as for ``hpcfsdp.checkpoint.save``; the coordinator's are stored.
            config: the configuration of the run, made of JSON values.
        """
        self._path = path
        self._step, self._extra, self._config = operator.index(step), dict(extra or {}), config
        self._pending: _PlannedFile | None = None
        self._discard: weakref.finalize[..., Any] | None = None
        self._whole: list[WriteItem] = []  # what this rank has, also if the planner lets another rank write it

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Return whether `checkpoint_id` can be the path of a new file: it is not a directory or a URL."""
        return "://" not in os.fspath(checkpoint_id) and not os.path.isdir(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Start again, with `checkpoint_id` as the path if given; not collective."""
        self._abandon()
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raise CheckpointError without a path, or without collectives. Not collective; touch no disk."""
        self._abandon()
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "with use_collectives=False each rank would write its own checkpoint, but one file needs all ranks: "
                "leave it out"
            )
        if self._path is None:
            raise CheckpointError("no path: give one to HDF5Writer, or as checkpoint_id to torch's save")

    def prepare_local_plan(self, plan: StatePlan) -> StatePlan:
        """Report whether this rank can exchange parts; raise CheckpointError if the planner reuses an earlier plan."""
        if not plan.usable:
            raise CheckpointError(
                "the planner reuses the plan of an earlier save without giving it to the storage: use "
                "DefaultSavePlanner(enable_plan_caching=False)"
            )
        world, self._whole = _world_here(), [item for item in plan.items if item.type != WriteItemType.SHARD]
        return dataclasses.replace(plan, storage_data=None if world is None else (world.rank, world.size))

    def prepare_global_plan(self, plans: list[StatePlan]) -> list[StatePlan]:
        """Lay the file out and make it, all holes, or raise CheckpointError; on the coordinator alone."""
        assert self._path is not None
        path = Path(os.path.abspath(os.path.expanduser(self._path)))
        with naming_write_errors(path):
            entries = plan_entries(plans)
            small_values(self._kept_with(entries, {}), self._config)
            plan, tensors = plan_tensors(plans, entries)
            rounds: list[tuple[ExchangeRound, ...]] = []
            # On these ranks, and no others: they can talk to each other.
            if [each.storage_data for each in plans] == [(rank, len(plans)) for rank in range(len(plans))]:
                plan, rounds = plan_exchange(plans, plan, tensors)
            attributes = root_attributes(self._step, len(plans))
            metadata_image = build_metadata_image(plan.specs, (), len(plan.blocks), attributes, {})
            temporary = TemporaryFile(path, new_token())
            temporary.create(metadata_image.nbytes)
            self._discard = weakref.finalize(self, temporary.discard)
        items = [tuple(item.index for item in plan.items) for plan in plans]
        self._pending = _PlannedFile(temporary, plan, items, entries, attributes, metadata_image)
        in_file = list(zip(plan.specs, metadata_image.offsets, strict=True))
        messages = []
        for rank, (own, indices) in enumerate(zip(plans, items, strict=True)):
            places = tuple(in_file[tensors[index.fqn]] if index.fqn in tensors else None for index in indices)
            assignment = Assignment(temporary, indices, places, len(plans))
            if any(rounds):
                mine = rounds[rank]
                exchanged = frozenset(piece.place for round_ in mine for piece in round_.sent)
                rows = {rows.tensor: in_file[rows.tensor] for round_ in mine for rows in round_.rows}
                assignment = dataclasses.replace(assignment, exchanged=exchanged, rounds=mine, rows=rows)
            messages.append(dataclasses.replace(own, storage_data=assignment))
        return messages

    def write_data(self, plan: StatePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and sync them. Collective over the world if ranks exchange columns for rows."""
        assignment = plan.storage_data
        comm = None if assignment.rounds is None else cast(World, _world_here()).host
        try:
            results = _write_items(plan.items, assignment, planner, comm)
            whole = self._whole if assignment.num_ranks > 1 else ()
            digests = {item.index.fqn: _digest(item, planner) for item in whole}
            results.append(WriteResult(MetadataIndex(""), 0, digests))  # behind those of items
        except BaseException:
            assignment.temporary.discard()  # the coordinator would not know in time
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commit the file after all ranks have written, or raise CheckpointError; on the coordinator alone."""
        pending = self._pending
        assert pending is not None and self._discard is not None
        plan, planned = pending.plan, pending.metadata_image
        try:
            with naming_write_errors(pending.temporary.path):
                _compare(pending, [own[-1].storage_data for own in results])
                results = [own[:-1] for own in results]
                if [tuple(result.index for result in own) for own in results] != pending.items:
                    raise CheckpointError("ranks have written other items than planned")
                written = [[result.storage_data for result in own] for own in results]
                sums = [b"".join([*(each.sums for each in own), *(each.row_sums for each in own)]) for own in written]
                rows = plan.extent_rows(planned.offsets, sums)
                rows = rows[np.lexsort((rows["start"], rows["tensor"]))]
                small = self._small_values(pending.entries, [result for own in results for result in own])
                made = build_metadata_image(plan.specs, (), len(rows), pending.attributes, small)
                if (made.offsets, made.table) != (planned.offsets, planned.table):
                    raise CheckpointError("HDF5 laid the file out in another way than when it was created")
                pending.temporary.commit(made, rows)
        except BaseException:
            self._abandon()
            raise
        self._discard.detach()
        self._discard = self._pending = None

    def _small_values(
        self, entries: Mapping[str, StateEntry], results: Iterable[WriteResult]
    ) -> dict[str, np.ndarray | bytes]:
        """Return the small datasets, with the values that ranks have reported."""
        entries = dict(entries)
        values: dict[str, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        scalars: dict[str, Any] = {}
        for result in results:
            name, written = result.index.fqn, result.storage_data
            entry = dataclasses.replace(entries[name], types=written.types)
            if entry.kind == names.GROUP:
                try:
                    schema.to_json(written.value)
                except TypeError:
                    entry = dataclasses.replace(entry, kind=names.EXTRA, place=("optim", "param_groups", *entry.place))
            if entry.kind == names.SCALAR and type(written.value) not in (bool, int, float):
                entry = dataclasses.replace(entry, kind=names.EXTRA, place=("optim", "state", *entry.path[-2:]))
            entries[name] = entry
            if entry.kind == names.EXTRA:
                values[name] = written.value
            elif entry.kind == names.SCALAR:
                scalars[str(entry.place[0])] = written.value
            elif entry.kind == names.GROUP:
                groups.setdefault(int(entry.place[0]), {})[str(entry.place[1])] = written.value
            elif entry.dataset.startswith(f"{names.GROUP_TENSORS}/") and len(entry.place) == 4:  # of a hyper-parameter
                groups.setdefault(int(entry.place[-2]), {})[str(entry.place[-1])] = written.value
        listed = [groups[number] for number in sorted(groups)] if groups else None
        small = small_values(self._kept_with(entries, values), self._config, listed, scalars)
        small[schema.STATE_DICT] = schema.to_json([entry.to_json() for entry in entries.values()])
        return small

    def _kept_with(self, entries: Mapping[str, StateEntry], values: Mapping[str, Any]) -> dict[str, Any]:
        """Return the file's `extra`: values of entries, and those given to this object. Raise where they clash."""
        found: dict[Any, Any] = {}
        for name, entry in entries.items():
            if entry.kind == names.EXTRA:
                names.set_at(found, entry.place, values.get(name))
        both = [key for key in self._extra if key in found]
        if both:
            raise CheckpointError(f"extra[{both[0]!r}] is in the state dict too: rename one of them")
        return {**found, **self._extra}

    def _abandon(self) -> None:
        """Remove the file of an earlier save that did not finish."""
        if self._discard is not None:
            self._discard()
        self._discard = self._pending = None


def _world_here() -> World | None:
    """Return the world, if the ranks can exchange messages now: only the main thread may."""
    return current_world() if threading.current_thread() is threading.main_thread() else None


def _write_items(
    items: Sequence[WriteItem], assignment: Assignment, planner: SavePlanner, comm: Communicator | None
) -> list[WriteResult]:
    """Write tensors and look up other values. Collective over `comm`, None if ranks exchange nothing."""
    agree = functools.partial(_agreeing, comm, assignment.temporary)
    with contextlib.ExitStack() as stack:
        with agree():
            if tuple(item.index for item in items) != assignment.items:
                what = "the planner's finish_plan changed this rank's items, which is not supported"
                raise CheckpointError(f"{what}: use DefaultSavePlanner")
            own = [n for n, place in enumerate(assignment.places) if place and n not in assignment.exchanged]
            fd = -1
            if assignment.rows or any(box_of(items[number]).numel for number in own):
                fd = stack.enter_context(assignment.temporary.opened())
            written = {n: _look_up(items[n], planner) for n, place in enumerate(assignment.places) if place is None}
            written |= dict.fromkeys(assignment.exchanged, Written())
            written |= _write_own(fd, items, own, assignment, planner)
        row_sums = b""
        if comm is not None:
            exchange, values_of = ColumnExchange(comm), functools.partial(_values_of, items, assignment, planner)
            for round_ in assignment.rounds or ():
                specs = [assignment.rows[rows.tensor][0] for rows in round_.rows]
                arrays = exchange.rows_of(round_, specs, values_of, agree)
                with agree():
                    row_sums += _write_rows(fd, round_, arrays, assignment)
        with agree():
            if fd >= 0:
                disk.sync(fd)
            stack.close()
    if items:
        written[0] = dataclasses.replace(written[0], row_sums=row_sums)
    sizes = [place[0].itemsize if place else 0 for place in assignment.places]
    return [
        WriteResult(item.index, box_of(item).numel * size if size else 0, written[number])
        for number, (item, size) in enumerate(zip(items, sizes, strict=True))
    ]


@contextlib.contextmanager
def _agreeing(comm: Communicator | None, temporary: TemporaryFile) -> Iterator[None]:
    """Name the file in errors. Collective over `comm`, if there is one, at its end: all raise what one has raised."""
    with contextlib.nullcontext() if comm is None else raise_together(comm), naming_write_errors(temporary.path):
        try:
            yield
        except TemporaryFileGoneError:
            raise CheckpointError(
                f"{temporary.partial} is not here: another rank failed and removed it, or this rank does not see the "
                "coordinator's file system"
            ) from None


def _values_of(items: Sequence[WriteItem], assignment: Assignment, planner: SavePlanner, number: int) -> np.ndarray:
    """Return the values of an item that is exchanged, of the shape of its box."""
    spec, _ = cast(tuple[TensorSpec, int], assignment.places[number])
    flat = as_bytes(_flat(items[number], spec, planner).cpu())
    return flat.view(schema.numpy_dtype(spec.dtype)).reshape(box_of(items[number]).sizes)


def _write_own(
    fd: int, items: Sequence[WriteItem], own: Sequence[int], assignment: Assignment, planner: SavePlanner
) -> dict[int, Written]:
    """Write these items, tensors, from where they are. One at a time is made contiguous, or copied to the CPU."""
    places = [place for number in own if (place := assignment.places[number])]
    specs, offsets = [spec for spec, _ in places], [offset for _, offset in places]
    per_item = [box_blocks(spec.shape, box_of(items[n]), spec.itemsize) for n, spec in zip(own, specs, strict=True)]
    plan, edges = _plan_of(specs, per_item), np.cumsum([0, *map(len, per_item)])
    numels = plan.blocks["numel"].astype(np.int64) * plan.blocks["count"]
    begins = np.cumsum(numels) - numels
    first = np.append(begins, 0)[edges[:-1]]  # of each item; one without blocks is not asked for
    begins -= first[plan.blocks["tensor"]]
    flat: tuple[int, torch.Tensor] | None = None

    def bytes_of(index: int) -> np.ndarray:
        nonlocal flat
        place = int(plan.blocks["tensor"][index])
        if flat is None or flat[0] != place:
            flat = place, _flat(items[own[place]], specs[place], planner)
        return as_bytes(flat[1][begins[index] : begins[index] + numels[index]].cpu())

    sums = BlockWriter(fd, plan, offsets, bytes_of).write(np.arange(len(plan.blocks)))
    found = {}
    for number, spec, begin, end in zip(own, specs, edges[:-1], edges[1:], strict=True):
        is_group = spec.path.startswith(f"{names.GROUP_TENSORS}/")
        value = cast(torch.Tensor, planner.resolve_data(items[number])).tolist() if is_group else None
        found[number] = Written(sums[begin:end].tobytes(), value)
    return found


def _write_rows(fd: int, round_: ExchangeRound, arrays: Sequence[np.ndarray], assignment: Assignment) -> bytes:
    """Write the rows of a round; return the checksums of their blocks, uint64, as bytes."""
    places = [assignment.rows[rows.tensor] for rows in round_.rows]
    specs, offsets = [spec for spec, _ in places], [offset for _, offset in places]
    plan = _plan_of(specs, [rows_blocks(spec, rows) for spec, rows in zip(specs, round_.rows, strict=True)])
    flat = [array.reshape(-1) for array in arrays]

    def bytes_of(index: int) -> np.ndarray:
        tensor, start, numel = (int(plan.blocks[name][index]) for name in ("tensor", "start", "numel"))
        begin = start - round_.rows[tensor].start
        return flat[tensor][begin : begin + numel].view(np.uint8)

    return BlockWriter(fd, plan, offsets, bytes_of).write(np.arange(len(plan.blocks))).tobytes()


def _plan_of(specs: Sequence[TensorSpec], per_tensor: Sequence[np.ndarray]) -> SavePlan:
    """Return a plan of one rank, from the blocks of each tensor."""
    for number, blocks in enumerate(per_tensor):
        blocks["tensor"] = number
    return SavePlan(tuple(specs), np.concatenate([np.empty(0, BLOCK_DTYPE), *per_tensor]), (), 1)


def _digest(item: WriteItem, planner: SavePlanner) -> Any:
    """Return a number or text that is the same on all ranks with the same value."""
    if item.type == WriteItemType.TENSOR:
        return checksum(cast(torch.Tensor, planner.resolve_data(item)))
    written = _look_up(item, planner)
    return digest((written.value, written.types))


def _compare(pending: _PlannedFile, digests: Sequence[Mapping[str, Any]]) -> None:
    """Raise CheckpointError for a value that ranks have differently: the planner has chosen one of them."""
    # Statistics of a model, and parameters that ranks train on their own, are one rank's in all files.
    dtypes = {spec.path: getattr(torch, spec.dtype) for spec in pending.plan.specs}
    for name, entry in pending.entries.items():
        held = {rank: found[name] for rank, found in enumerate(digests) if name in found}
        first = min(held, default=0)
        other = next((rank for rank in held if held[rank] != held[first]), None)
        if other is None:
            continue
        what = f"the state dict's {name!r} has other values on rank {other} than on rank {first}"
        is_float = entry.kind == names.TENSOR and dtypes[entry.dataset].is_floating_point
        if entry.place[0] not in (schema.MODEL, "optim") or not (is_float or is_extra_state(name)):
            raise CheckpointError(
                f"{what}, and a file has one value of each name: call it {name + '.0'!r}, {name + '.1'!r}, ... on the "
                "ranks, or leave it out (hpcfsdp.checkpoint.save keeps the random numbers of all ranks)"
            )
        log.warning("%s: %s, and the file has those of one rank", pending.temporary.path, what)


def _look_up(item: WriteItem, planner: SavePlanner) -> Written:
    """Return the value of an item without tensor."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise CheckpointError(
            f"the state dict's {item.index.fqn!r} is no tensor, and the planner {type(planner).__name__} has no "
            "lookup_object to return it, only pickled bytes: derive the planner from DefaultSavePlanner"
        )
    return Written(b"", *to_plain(f"the state dict's {item.index.fqn!r}", look_up(item.index)))


def _flat(item: WriteItem, spec: TensorSpec, planner: SavePlanner) -> torch.Tensor:
    """Return an item's elements in row-major order, 1-D, on its device; raise CheckpointError for another tensor."""
    data = cast(torch.Tensor, planner.resolve_data(item))  # compared below: a planner may give anything
    dtype = str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")
    shape = tuple(getattr(data, "shape", ()))
    if (dtype, shape) != (spec.dtype, box_of(item).sizes):
        raise CheckpointError(
            f"{spec.path} was planned as {list(box_of(item).sizes)} {spec.dtype}, the planner gives {list(shape)} "
            f"{dtype}"
        )
    return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)
