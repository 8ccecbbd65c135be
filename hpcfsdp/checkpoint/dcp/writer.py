"""``HDF5Writer``: ``torch.distributed.checkpoint.save`` writes one HDF5 file, each rank what it has of it."""

from __future__ import annotations

import dataclasses
import operator
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan as StatePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hpcfsdp.checkpoint.content import root_attributes, small_values
from hpcfsdp.checkpoint.dcp import entry_names as names
from hpcfsdp.checkpoint.dcp.entry_names import Entry
from hpcfsdp.checkpoint.draft import BlockWriter, Draft, DraftMissingError, errors_of, extent_rows
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.skeleton import Skeleton, build_skeleton
from hpcfsdp.checkpoint.plain_values import Types, plain
from hpcfsdp.checkpoint.save_plan import BLOCK_DTYPE, SavePlan, box_blocks, check_names, check_tiling
from hpcfsdp.errors import CheckpointError
from hpcfsdp.flat.layout import Box
from hpcfsdp.reshard.tiling import find_outside


@dataclasses.dataclass(frozen=True)
class Assignment:
    """What the coordinator tells a rank.

    Attributes:
        path, token: of the draft, see ``Draft``.
        items: what is planned for the rank, by the names and offsets of the items.
        places: by item, where its tensor is in the file, and where the tensor's bytes begin; None for other values.
    """

    path: Path
    token: str
    items: tuple[MetadataIndex, ...]
    places: tuple[tuple[TensorSpec, int] | None, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """What a rank tells the coordinator of an item.

    Attributes:
        sums: the checksums of its blocks, uint64, as bytes.
        value: of an item that is no tensor, or of a hyper-parameter that is one; as JSON and arrays can hold it.
        types: what ``value`` was.
    """

    sums: bytes = b""
    value: Any = None
    types: Types = ()


@dataclasses.dataclass
class _Pending:
    """What the coordinator keeps from planning to the end."""

    draft: Draft
    plan: SavePlan
    items: list[tuple[MetadataIndex, ...]]
    entries: dict[str, Entry]
    attributes: Mapping[str, Any]
    skeleton: Skeleton


class HDF5Writer(StorageWriter):
    """Writes a state dict into one HDF5 file: ``dcp.save(state, storage_writer=HDF5Writer(path))``.

    The file appears at its path when it is whole; until then, and after a failure on any rank, what was there before
    stays. The dicts ``model`` and ``optim`` (or ``optimizer``) of a state dict, as ``get_state_dict`` gives them,
    become what ``hpcfsdp.checkpoint.load`` reads. Nothing is pickled: values that are no tensors must be numbers,
    strings, lists, tuples, dicts, bytes or arrays.
    """

    def __init__(
        self,
        path: str | os.PathLike[str] | None = None,
        *,
        step: int = 0,
        extra: Mapping[str, Any] | None = None,
        config: Mapping[str, Any] | None = None,
        files: Files | None = None,
    ) -> None:
        """Not collective, touches no disk.

        Args:
            path: of the file, on a file system that all ranks share; the coordinator's counts. None: it is given to
                ``dcp.save`` as `checkpoint_id`.
            step: number of the training step, kept in the file.
            extra: further values, as ``hpcfsdp.checkpoint.save`` takes them; the coordinator's are kept.
            config: the configuration of the run, as JSON knows it.
            files: what operates on the disk, for tests that have it fail.
        """
        self._path = path
        self._step, self._extra, self._config = operator.index(step), dict(extra or {}), config
        self._files = files or Files()
        self._pending: _Pending | None = None
        self._discard: weakref.finalize | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike) -> bool:
        """Whether it is the path of a file that may be written: not a directory, nor an address of another kind."""
        return "://" not in os.fspath(checkpoint_id) and not os.path.isdir(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike | None = None) -> None:
        """Begin anew; not collective.

        Args:
            checkpoint_id: the path of the file, in place of the one that was given before.
        """
        self._abandon()
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Not collective; touches no disk.

        Raises:
            CheckpointError: there is no path, or ranks are not to talk to each other.
        """
        self._abandon()
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "use_collectives=False has each rank write a checkpoint of its own; one file needs all of them: leave "
                "it out"
            )
        if self._path is None:
            raise CheckpointError("no path: give one to HDF5Writer, or as checkpoint_id to torch's save")

    def prepare_local_plan(self, plan: StatePlan) -> StatePlan:
        """Not collective.

        Raises:
            CheckpointError: the planner leaves the plan to what it remembers of an earlier one.
        """
        if not plan.usable:
            raise CheckpointError(
                "the planner has the plan of an earlier save used again, which tells a storage nothing: use "
                "DefaultSavePlanner(enable_plan_caching=False)"
            )
        return plan

    def prepare_global_plan(self, plans: list[StatePlan]) -> list[StatePlan]:
        """Lay the file out and make it, all holes; on the coordinator alone.

        Raises:
            CheckpointError: a name, a dtype or a value cannot be kept, parts do not make up a whole, or the file cannot
                be made.
        """
        assert self._path is not None
        path = Path(os.path.abspath(os.path.expanduser(self._path)))
        with errors_of(path):
            entries = _entries(plans)
            small_values(self._kept_with(entries, {}), self._config)
            plan, tensors = _plan_tensors(plans, entries)
            attributes = root_attributes(self._step, len(plans))
            skeleton = build_skeleton(plan.specs, (), len(plan.blocks), attributes, {})
            token = secrets.token_hex(4)
            draft = Draft(self._files, path, token)
            self._discard = weakref.finalize(self, draft.discard)
            try:
                draft.create(skeleton.nbytes)
            except BaseException:
                self._abandon()
                raise
        items = [tuple(item.index for item in plan.items) for plan in plans]
        self._pending = _Pending(draft, plan, items, entries, attributes, skeleton)
        told = []
        for own, indices in zip(plans, items, strict=True):
            known = [tensors.get(index.fqn) for index in indices]
            places = tuple(None if i is None else (plan.specs[i], skeleton.offsets[i]) for i in known)
            assignment = Assignment(path, token, indices, places)
            told.append(dataclasses.replace(own, storage_data=assignment))
        return told

    def write_data(self, plan: StatePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Write this rank's items and force them to the disk; not collective.

        Raises:
            CheckpointError: they cannot be written, or a value cannot be kept. The file is then removed.
        """
        assignment = plan.storage_data
        draft = Draft(self._files, assignment.path, assignment.token)
        try:
            with errors_of(draft.path):
                if tuple(item.index for item in plan.items) != assignment.items:
                    raise CheckpointError("the planner's finish_plan has changed what this rank is to write")
                try:
                    results = _write_items(draft, plan.items, assignment, planner)
                except DraftMissingError:
                    raise CheckpointError(
                        f"{draft.partial} is not here: another rank has failed and removed it, or this one does not "
                        "see the file system of the coordinator"
                    ) from None
        except BaseException:
            draft.discard()  # nobody tells the coordinator in time to do it
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Make the file a checkpoint, of which all ranks have written their parts; on the coordinator alone.

        Raises:
            CheckpointError: that cannot be done; the file is then removed.
        """
        pending = self._pending
        assert pending is not None
        try:
            with errors_of(pending.draft.path):
                if [tuple(result.index for result in own) for own in results] != pending.items:
                    raise CheckpointError("ranks have written other items than was planned for them")
                sums = [b"".join(result.storage_data.sums for result in own) for own in results]
                rows = extent_rows(pending.plan, pending.skeleton.offsets, sums)
                rows = rows[np.lexsort((rows["start"], rows["tensor"]))]
                skeleton = build_skeleton(
                    pending.plan.specs,
                    (),
                    len(rows),
                    pending.attributes,
                    self._small_values(pending.entries, [result for own in results for result in own]),
                )
                if (skeleton.offsets, skeleton.table) != (pending.skeleton.offsets, pending.skeleton.table):
                    raise CheckpointError("HDF5 has laid the file out in two different ways")
                pending.draft.commit(skeleton, rows)
        except BaseException:
            self._abandon()
            raise
        self._keep()

    def _small_values(
        self, entries: Mapping[str, Entry], results: Iterable[WriteResult]
    ) -> dict[str, np.ndarray | bytes]:
        """The small datasets, with the values that ranks have told of."""
        entries = dict(entries)
        values: dict[str, Any] = {}
        groups: dict[int, dict[str, Any]] = {}
        scalars: dict[str, Any] = {}
        for result in results:
            name, written = result.index.fqn, result.storage_data
            entry = dataclasses.replace(entries[name], types=written.types)
            if entry.kind == names.GROUP and not _is_json(written.value):
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
            elif is_hyper_parameter(entry):
                groups.setdefault(int(entry.place[-2]), {})[str(entry.place[-1])] = written.value
        listed = [groups[number] for number in sorted(groups)] if groups else None
        small = small_values(self._kept_with(entries, values), self._config, listed, scalars)
        small[schema.STATE_DICT] = schema.to_json([entry.to_json() for entry in entries.values()])
        return small

    def _kept_with(self, entries: Mapping[str, Entry], values: Mapping[str, Any]) -> dict[str, Any]:
        """`extra` of the file: the values of entries, by name, and those that were given to this object.

        Raises:
            CheckpointError: both have something at one place.
        """
        found: dict[str | int, Any] = {}
        for name, entry in entries.items():
            if entry.kind == names.EXTRA:
                names.put(found, entry.place, values.get(name))
        both = [key for key in self._extra if key in found]
        if both:
            raise CheckpointError(f"extra[{both[0]!r}] is in the state dict too: rename one of them")
        return {**found, **self._extra}

    def _abandon(self) -> None:
        """Remove what an earlier save has left behind."""
        if self._discard is not None:
            self._discard()
        self._keep()

    def _keep(self) -> None:
        if self._discard is not None:
            self._discard.detach()
        self._discard = self._pending = None


def is_hyper_parameter(entry: Entry) -> bool:
    """Whether it is a tensor of the optimizer's param_groups."""
    return entry.kind == names.TENSOR and entry.dataset.startswith(f"{names.GROUP_TENSORS}/") and len(entry.place) == 4


def _is_json(value: Any) -> bool:
    try:
        schema.to_json(value)
    except TypeError:
        return False
    return True


def _entries(plans: Sequence[StatePlan]) -> dict[str, Entry]:
    """Where everything that is planned is to stand, by name."""
    paths: dict[str, Any] = {}
    for plan in plans:
        if isinstance(plan.planner_data, Mapping):
            paths |= plan.planner_data
    kinds: dict[str, set[bool]] = {}
    for item in (item for plan in plans for item in plan.items):
        kinds.setdefault(item.index.fqn, set()).add(item.type != WriteItemType.BYTE_IO)
    both = [name for name, found in kinds.items() if len(found) > 1]
    if both:
        raise CheckpointError(f"the state dict's {both[0]!r} is a tensor on some ranks, and none on others")
    # In the order of the state dict, whoever writes what; names that its planner does not tell of come last.
    ordered = [*(name for name in paths if name in kinds), *(name for name in kinds if name not in paths)]
    known = {name: _checked_path(name, paths.get(name)) for name in ordered}
    tensors = {name: path for name, path in known.items() if kinds[name] == {True}}
    return names.place_entries(tensors, {name: path for name, path in known.items() if name not in tensors})


def _checked_path(name: str, path: Any) -> names.Path:
    """What a planner says of where an entry is in the state dict, if it is what torch's own says."""
    if isinstance(path, tuple) and path and all(isinstance(key, (str, int)) for key in path):
        return path
    return (name,)


def _plan_tensors(plans: Sequence[StatePlan], entries: Mapping[str, Entry]) -> tuple[SavePlan, dict[str, int]]:
    """The tensors of a state dict and the blocks that ranks write, in the order of ranks and items.

    Returns:
        The plan, and by the name of an entry which tensor of it that is.
    """
    specs: dict[str, TensorSpec] = {}
    blocks, owners = [np.empty(0, BLOCK_DTYPE)], {}
    tensors = {name: number for number, name in enumerate(n for n, e in entries.items() if e.kind == names.TENSOR)}
    for rank, plan in enumerate(plans):
        for item in plan.items:
            if item.tensor_data is None:
                continue
            name = item.index.fqn
            spec, box = _spec(item, entries[name]), _box(item)
            if specs.setdefault(name, spec) != spec:
                raise CheckpointError(
                    f"{spec.path} is {list(spec.shape)} {spec.dtype} on rank {rank}, "
                    f"{list(specs[name].shape)} {specs[name].dtype} on rank {owners[name]}"
                )
            owners.setdefault(name, rank)
            if find_outside(spec.shape, [box]) is not None:
                raise CheckpointError(
                    f"rank {rank} has {list(box.sizes)} elements from {list(box.offsets)} on of {spec.path}, which is "
                    f"{list(spec.shape)}"
                )
            blocks.append(box_blocks(spec.shape, box, spec.itemsize))
            blocks[-1]["tensor"], blocks[-1]["rank"] = tensors[name], rank
    ordered = tuple(specs[name] for name in tensors)
    check_names(ordered, ())
    plan = SavePlan(ordered, np.concatenate(blocks), (), len(plans))
    check_tiling(plan)
    return plan, tensors


def _spec(item: WriteItem, entry: Entry) -> TensorSpec:
    dtype = str(item.tensor_data.properties.dtype).removeprefix("torch.")
    if not schema.supported(dtype):
        raise CheckpointError(f"{entry.dataset!r} has dtype {dtype}, which checkpoints do not hold")
    return TensorSpec(entry.dataset, tuple(item.tensor_data.size), dtype)


def _box(item: WriteItem) -> Box:
    return Box(tuple(item.tensor_data.chunk.offsets), tuple(item.tensor_data.chunk.sizes))


def _write_items(
    draft: Draft, items: Sequence[WriteItem], assignment: Assignment, planner: SavePlanner
) -> list[WriteResult]:
    """Write tensors, look up values."""
    own = [
        (number, item, *place)
        for number, (item, place) in enumerate(zip(items, assignment.places, strict=True))
        if place is not None
    ]
    found = {number: _look_up(item, planner) for number, item in enumerate(items) if assignment.places[number] is None}
    per_item = [box_blocks(spec.shape, _box(item), spec.itemsize) for _, item, spec, _ in own]
    for place, blocks in enumerate(per_item):
        blocks["tensor"] = place
    plan = SavePlan(tuple(spec for _, _, spec, _ in own), np.concatenate([np.empty(0, BLOCK_DTYPE), *per_item]), (), 1)
    edges = np.cumsum([0, *map(len, per_item)])
    memory = _Memory([item for _, item, _, _ in own], plan, edges, planner)
    sums = np.zeros(0, np.uint64)
    if len(plan.blocks):
        with draft.opened() as fd:
            writer = BlockWriter(draft.files, fd, plan, [offset for *_, offset in own], memory.bytes_of)
            sums = writer.write(np.arange(len(plan.blocks)))
            draft.files.sync(fd)
    for place, (number, item, spec, _) in enumerate(own):
        value = planner.resolve_data(item).tolist() if spec.path.startswith(f"{names.GROUP_TENSORS}/") else None
        found[number] = Written(sums[edges[place] : edges[place + 1]].tobytes(), value)
    sizes = {number: _box(item).numel * spec.itemsize for number, item, spec, _ in own}
    return [WriteResult(item.index, sizes.get(number, 0), found[number]) for number, item in enumerate(items)]


def _look_up(item: WriteItem, planner: SavePlanner) -> Written:
    """The value of an item that is no tensor."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise CheckpointError(
            f"the state dict's {item.index.fqn!r} is no tensor, and the planner {type(planner).__name__} has no "
            "lookup_object to get it from, only pickled bytes: derive it from DefaultSavePlanner"
        )
    return Written(b"", *plain(item.index.fqn, look_up(item.index)))


class _Memory:
    """The bytes of blocks, from what the planner has for items; one tensor at a time is made flat, or brought here."""

    def __init__(self, items: Sequence[WriteItem], plan: SavePlan, edges: np.ndarray, planner: SavePlanner) -> None:
        self._items, self._plan, self._planner = items, plan, planner
        numels = plan.blocks["numel"].astype(np.int64) * plan.blocks["count"]
        ends = np.cumsum(numels)
        first = np.append(ends - numels, 0)[edges[:-1]]  # of each item; one without blocks is not asked for
        self._begins = ends - numels - first[plan.blocks["tensor"]]
        self._ends = self._begins + numels
        self._flat: tuple[int, torch.Tensor] | None = None

    def bytes_of(self, index: int) -> np.ndarray:
        """Of a block, by its place in the plan; see ``BytesOf``."""
        place = int(self._plan.blocks["tensor"][index])
        if self._flat is None or self._flat[0] != place:
            self._flat = place, self._tensor(place)
        part = self._flat[1][self._begins[index] : self._ends[index]]
        return part.cpu().view(torch.uint8).numpy()

    def _tensor(self, place: int) -> torch.Tensor:
        item, spec = self._items[place], self._plan.specs[place]
        data = self._planner.resolve_data(item)
        dtype = str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")
        shape = tuple(getattr(data, "shape", ()))
        if (dtype, shape) != (spec.dtype, _box(item).sizes):
            raise CheckpointError(
                f"{spec.path} was planned as {list(_box(item).sizes)} {spec.dtype}, the planner gives {list(shape)} "
                f"{dtype}"
            )
        return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)
