"""``HDF5Writer``: ``torch.distributed.checkpoint.save`` writes one HDF5 file; each rank writes its parts."""

from __future__ import annotations

import dataclasses
import operator
import os
import secrets
import weakref
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any, cast

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan as StatePlan, SavePlanner, WriteItem
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from hpcfsdp.checkpoint.content import root_attributes, small_values
from hpcfsdp.checkpoint.dcp import entry_names as names
from hpcfsdp.checkpoint.dcp.entry_names import Entry
from hpcfsdp.checkpoint.dcp.global_plan import box_of, plan_entries, plan_tensors
from hpcfsdp.checkpoint.draft import BlockWriter, Draft, DraftMissingError, extent_rows, naming_write_errors
from hpcfsdp.checkpoint.files import Files
from hpcfsdp.checkpoint.format import schema
from hpcfsdp.checkpoint.format.schema import TensorSpec
from hpcfsdp.checkpoint.format.skeleton import Skeleton, build_skeleton
from hpcfsdp.checkpoint.plain_values import Types, to_plain
from hpcfsdp.checkpoint.save_plan import BLOCK_DTYPE, SavePlan, box_blocks
from hpcfsdp.errors import CheckpointError


@dataclasses.dataclass(frozen=True)
class Assignment:
    """The coordinator's message to a rank.

    Attributes:
        path, token: of the draft, see ``Draft``.
        items: the rank's planned items, by name and offsets.
        places: by item, its tensor in the file and the tensor's first byte; None for other values.
    """

    path: Path
    token: str
    items: tuple[MetadataIndex, ...]
    places: tuple[tuple[TensorSpec, int] | None, ...]


@dataclasses.dataclass(frozen=True)
class Written:
    """A rank's message to the coordinator about an item.

    Attributes:
        sums: the checksums of its blocks, uint64, as bytes.
        value: of an item without tensor, or of a hyper-parameter that is one; as JSON and arrays.
        types: the original types in ``value``.
    """

    sums: bytes = b""
    value: Any = None
    types: Types = ()


@dataclasses.dataclass
class _Pending:
    """The coordinator's state between planning and ``finish``."""

    draft: Draft
    plan: SavePlan
    items: list[tuple[MetadataIndex, ...]]
    entries: dict[str, Entry]
    attributes: Mapping[str, Any]
    skeleton: Skeleton


class HDF5Writer(StorageWriter):
    """Writes a state dict into one HDF5 file: ``dcp.save(state, storage_writer=HDF5Writer(path))``.

    The file appears at its path when it is complete; until then, and after a failure on any rank, an earlier file
    stays. The dicts ``model`` and ``optim`` (or ``optimizer``) of a state dict, as ``get_state_dict`` gives them,
    become a checkpoint for ``hpcfsdp.checkpoint.load``. Nothing is pickled: other values must be numbers, strings,
    lists, tuples, dicts, bytes or arrays.
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
            path: the file to write, on a file system that all ranks share; the coordinator's path is used. None: pass
                the path to ``dcp.save`` as `checkpoint_id`.
            step: the number of the training step, stored in the file.
            extra: further values, as for ``hpcfsdp.checkpoint.save``; the coordinator's are stored.
            config: the configuration of the run, made of JSON values.
            files: the disk operations, for tests.
        """
        self._path = path
        self._step, self._extra, self._config = operator.index(step), dict(extra or {}), config
        self._files = files or Files()
        self._pending: _Pending | None = None
        self._discard: weakref.finalize[..., Any] | None = None

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        """Whether `checkpoint_id` can be the path of a new file: it is not a directory or a URL."""
        return "://" not in os.fspath(checkpoint_id) and not os.path.isdir(checkpoint_id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        """Starts again, with `checkpoint_id` as the path if given; not collective."""
        self._abandon()
        if checkpoint_id is not None:
            self._path = checkpoint_id

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        """Raises CheckpointError without a path, or without collectives. Not collective; touches no disk."""
        self._abandon()
        if not kwargs.get("use_collectives", True):
            raise CheckpointError(
                "with use_collectives=False each rank would write its own checkpoint, but one file needs all ranks: "
                "leave it out"
            )
        if self._path is None:
            raise CheckpointError("no path: give one to HDF5Writer, or as checkpoint_id to torch's save")

    def prepare_local_plan(self, plan: StatePlan) -> StatePlan:
        """Raises CheckpointError if the planner reuses an earlier plan. Not collective."""
        if not plan.usable:
            raise CheckpointError(
                "the planner reuses the plan of an earlier save without giving it to the storage: use "
                "DefaultSavePlanner(enable_plan_caching=False)"
            )
        return plan

    def prepare_global_plan(self, plans: list[StatePlan]) -> list[StatePlan]:
        """Lays the file out and makes it, all holes; on the coordinator alone.

        Raises CheckpointError for an invalid name, an unsupported dtype or value, parts that do not tile their tensor,
        or a file that cannot be made.
        """
        assert self._path is not None
        path = Path(os.path.abspath(os.path.expanduser(self._path)))
        with naming_write_errors(path):
            entries = plan_entries(plans)
            small_values(self._kept_with(entries, {}), self._config)
            plan, tensors = plan_tensors(plans, entries)
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
        messages = []
        for own, indices in zip(plans, items, strict=True):
            known = [tensors.get(index.fqn) for index in indices]
            places = tuple(None if i is None else (plan.specs[i], skeleton.offsets[i]) for i in known)
            assignment = Assignment(path, token, indices, places)
            messages.append(dataclasses.replace(own, storage_data=assignment))
        return messages

    def write_data(self, plan: StatePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        """Writes this rank's items and syncs them; not collective.

        Raises CheckpointError if that fails, or a value cannot be stored. The file is then removed.
        """
        assignment = plan.storage_data
        draft = Draft(self._files, assignment.path, assignment.token)
        try:
            with naming_write_errors(draft.path):
                if tuple(item.index for item in plan.items) != assignment.items:
                    raise CheckpointError(
                        "the planner's finish_plan changed this rank's items, which is not supported: use "
                        "DefaultSavePlanner"
                    )
                try:
                    results = _write_items(draft, plan.items, assignment, planner)
                except DraftMissingError:
                    raise CheckpointError(
                        f"{draft.partial} is not here: another rank failed and removed it, or this rank does not see "
                        "the coordinator's file system"
                    ) from None
        except BaseException:
            draft.discard()  # the coordinator would not know in time
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        """Commits the file after all ranks have written; on the coordinator alone.

        Raises CheckpointError if that fails; the file is then removed.
        """
        pending = self._pending
        assert pending is not None
        try:
            with naming_write_errors(pending.draft.path):
                if [tuple(result.index for result in own) for own in results] != pending.items:
                    raise CheckpointError("ranks have written other items than planned")
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
                    raise CheckpointError("HDF5 laid the file out in another way than when it was created")
                pending.draft.commit(skeleton, rows)
        except BaseException:
            self._abandon()
            raise
        self._keep()

    def _small_values(
        self, entries: Mapping[str, Entry], results: Iterable[WriteResult]
    ) -> dict[str, np.ndarray | bytes]:
        """The small datasets, with the values that ranks have reported."""
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
        """The file's `extra`: values of entries, by name, and those given to this object. Raises where they clash."""
        found: dict[Any, Any] = {}
        for name, entry in entries.items():
            if entry.kind == names.EXTRA:
                names.set_at(found, entry.place, values.get(name))
        both = [key for key in self._extra if key in found]
        if both:
            raise CheckpointError(f"extra[{both[0]!r}] is in the state dict too: rename one of them")
        return {**found, **self._extra}

    def _abandon(self) -> None:
        """Removes the file of an earlier save that did not finish."""
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


def _write_items(
    draft: Draft, items: Sequence[WriteItem], assignment: Assignment, planner: SavePlanner
) -> list[WriteResult]:
    """Writes tensors and looks up other values."""
    own = [
        (number, item, *place)
        for number, (item, place) in enumerate(zip(items, assignment.places, strict=True))
        if place is not None
    ]
    found = {number: _look_up(item, planner) for number, item in enumerate(items) if assignment.places[number] is None}
    per_item = [box_blocks(spec.shape, box_of(item), spec.itemsize) for _, item, spec, _ in own]
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
        is_group = spec.path.startswith(f"{names.GROUP_TENSORS}/")
        value = cast(torch.Tensor, planner.resolve_data(item)).tolist() if is_group else None
        found[number] = Written(sums[edges[place] : edges[place + 1]].tobytes(), value)
    sizes = {number: box_of(item).numel * spec.itemsize for number, item, spec, _ in own}
    return [WriteResult(item.index, sizes.get(number, 0), found[number]) for number, item in enumerate(items)]


def _look_up(item: WriteItem, planner: SavePlanner) -> Written:
    """The value of an item without tensor."""
    look_up = getattr(planner, "lookup_object", None)
    if look_up is None:
        raise CheckpointError(
            f"the state dict's {item.index.fqn!r} is no tensor, and the planner {type(planner).__name__} has no "
            "lookup_object to return it, only pickled bytes: derive the planner from DefaultSavePlanner"
        )
    return Written(b"", *to_plain(item.index.fqn, look_up(item.index)))


class _Memory:
    """The bytes of blocks, from the planner's tensors.

    One tensor at a time is made contiguous, or copied to the CPU.
    """

    def __init__(self, items: Sequence[WriteItem], plan: SavePlan, edges: np.ndarray, planner: SavePlanner) -> None:
        self._items, self._plan, self._planner = items, plan, planner
        numels = plan.blocks["numel"].astype(np.int64) * plan.blocks["count"]
        ends = np.cumsum(numels)
        first = np.append(ends - numels, 0)[edges[:-1]]  # of each item; one without blocks is not asked for
        self._begins = ends - numels - first[plan.blocks["tensor"]]
        self._ends = self._begins + numels
        self._flat: tuple[int, torch.Tensor] | None = None

    def bytes_of(self, index: int) -> np.ndarray:
        """The bytes of a block, by its place in the plan; see ``BytesOf``."""
        place = int(self._plan.blocks["tensor"][index])
        if self._flat is None or self._flat[0] != place:
            self._flat = place, self._tensor(place)
        part = self._flat[1][self._begins[index] : self._ends[index]]
        return part.cpu().view(torch.uint8).numpy()

    def _tensor(self, place: int) -> torch.Tensor:
        item, spec = self._items[place], self._plan.specs[place]
        data = cast(torch.Tensor, self._planner.resolve_data(item))  # compared below: a planner may give anything
        dtype = str(getattr(data, "dtype", type(data).__name__)).removeprefix("torch.")
        shape = tuple(getattr(data, "shape", ()))
        if (dtype, shape) != (spec.dtype, box_of(item).sizes):
            raise CheckpointError(
                f"{spec.path} was planned as {list(box_of(item).sizes)} {spec.dtype}, the planner gives {list(shape)} "
                f"{dtype}"
            )
        return data.detach().resolve_conj().resolve_neg().contiguous().view(-1)
