"""Values of parameters, and of what is laid out like them, between shards and the forms of a state dict."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch.distributed.fsdp import ShardingStrategy
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import ShardedTensor
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import StateDictError
from hpcfsdp.flat.layout import Box, FlatLayout, ParamSlot, Run
from hpcfsdp.observe.profile import Phase, profile
from hpcfsdp.reshard.boxes import chunk_box, whole_box
from hpcfsdp.reshard.move import MovePlan, RunsOf, batches, move
from hpcfsdp.reshard.placements import mesh_blocks
from hpcfsdp.reshard.runs import chunk_runs, cut_runs, whole_runs
from hpcfsdp.sharded.unit_mesh import UnitMesh
from hpcfsdp.state.blocks import Blocks, BoxesOf, gather_blocks, scatter_blocks
from hpcfsdp.state.shards import LocalShards
from hpcfsdp.state.tensors import Rank0Tensor, shape_and_dtype
from hpcfsdp.tensor.sharded import (
    all_boxes,
    create_chunk_dtensor,
    create_chunk_sharded_tensor,
    local_blocks,
    properties_of,
    ranks_of_tensor,
)

_BATCH_NUMEL = 1 << 20
"""Elements of small parameters that travel together: latency counts for less, and memory hardly."""


@dataclass(frozen=True)
class StateDictFormat:
    """How a state dict shows tensors.

    Attributes:
        sharded: as this rank's chunk of the rows, in a ``DTensor`` where the model was given a mesh, else in a
            ``ShardedTensor``; otherwise whole, and so they are under ``NO_SHARD``.
        rank0_only: the first rank alone has them, whole.
        offload_to_cpu: they lie in host memory.
        dtensor: in a ``DTensor`` without such a mesh, too.
    """

    sharded: bool = False
    rank0_only: bool = False
    offload_to_cpu: bool = False
    dtensor: bool = False

    def is_made_by(self, mesh: UnitMesh) -> bool:
        """Whether this rank takes part in the making: under `rank0_only` one replica does."""
        return mesh.is_first("replicate") or not self.rank0_only

    def is_shown_by(self, mesh: UnitMesh) -> bool:
        """Whether this rank gets the result."""
        return mesh.is_first() or not self.rank0_only

    def device(self, device: torch.device) -> torch.device:
        """Where the result lies of what lies on `device`."""
        return torch.device("cpu") if self.offload_to_cpu else device


@torch.no_grad()
def gather(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, device: torch.device, form: StateDictFormat
) -> list[Any]:
    """Collective over a replica of the unit. What a state dict shows of `parts`, for each slot; None for nothing.

    Results are new memory. Beyond it this takes memory for one gathered flat parameter where all ranks get whole
    tensors, and otherwise for a few parameters.

    Args:
        dtype, device: of the parts. Chunks of a sharded result lie there, too, unless they are offloaded.
        form: ranks that it leaves out get None for all slots, and need not call this if they are of another replica.
    """
    target = form.device(device)
    if form.sharded and mesh.strategy is not ShardingStrategy.NO_SHARD:
        return _chunks(mesh, parts, dtype, target, form)
    if mesh.tensor is None:
        return _whole(mesh, parts, dtype, target, form)
    return _joined(mesh, parts, _whole(mesh, parts, dtype, mesh.tensor.device, form), target, form)


def _whole(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, target: torch.device, form: StateDictFormat
) -> list[Any]:
    """Collective over ``mesh.shard``. Whole tensors, or whole blocks of them."""
    comm = mesh.shard
    if not form.rank0_only:
        return _everywhere(comm, parts, dtype, target)
    slots = parts.layout.slots
    found: list[Any] = [None] * len(slots)
    if not form.is_made_by(mesh):
        return found
    if comm.rank == 0:
        for index in parts.present:
            found[index] = torch.empty(slots[index].shape, dtype=dtype, device=target)
    _move(comm, parts, lambda rank: _whole_runs(parts) if rank == 0 else [], found, dtype)
    return found


def _joined(
    mesh: UnitMesh, parts: LocalShards, blocks: list[Any], target: torch.device, form: StateDictFormat
) -> list[Any]:
    """Collective over the ranks that are parallel over tensors, where they have `blocks`. The tensors of these."""
    assert mesh.tensor is not None
    comm = mesh.tensor
    for index in parts.present:
        local, block = blocks[index], parts.layout.slots[index].block
        if local is None:
            continue
        if parts.layout.slots[index].is_cut:
            shown = not form.rank0_only or comm.rank == 0
            local = local.contiguous()
            owned = local if comm.rank in block.owners else local.new_empty(0)
            boxes = [box if rank in block.owners else Box((0,), (0,)) for rank, box in enumerate(block.boxes)]
            outputs = [local.new_empty(box.sizes) for box in boxes] if shown else None
            if form.rank0_only:
                comm.gather(outputs, owned, 0)
            else:
                comm.all_gather(outputs, owned)
            if shown:
                local = torch.empty(block.shape, dtype=local.dtype, device=target)
                for rank in block.owners:
                    local[block.boxes[rank].slices].copy_(outputs[rank])
        blocks[index] = local.to(target) if form.is_shown_by(mesh) else None
    return blocks


def _everywhere(comm: Communicator, parts: LocalShards, dtype: torch.dtype, target: torch.device) -> list[Any]:
    layout = parts.layout
    found: list[Any] = [None] * len(layout.slots)
    if not parts.present:
        return found
    if comm.size == 1:
        pieces = parts.pieces(0)
        for index in parts.present:
            shape = layout.slots[index].shape
            found[index] = torch.empty(shape, dtype=dtype, device=target)
            if index in pieces:
                found[index].copy_(pieces[index].tensor.view(shape))
        return found
    shard, full = parts.assembled(comm.rank, comm.device, dtype), _scratch(layout.padded_numel, dtype, comm.device)
    comm.all_gather_into_tensor(full, shard)
    with profile(Phase.DEVICE_TO_HOST, full.nbytes) if target.type != full.device.type else contextlib.nullcontext():
        for index in parts.present:
            slot = layout.slots[index]
            found[index] = full[slot.offset : slot.end].view(slot.shape).to(target, copy=True)
    return found


@contextlib.contextmanager
def keeping_scratch() -> Iterator[None]:
    """A context in which memory for what is gathered is taken once, as large as the largest flat parameter.

    New memory costs the host as much as the copy that comes after.
    """
    token = _kept.set({})
    try:
        yield
    finally:
        _kept.reset(token)


_kept: contextvars.ContextVar[dict[torch.device, torch.Tensor] | None] = contextvars.ContextVar("scratch", default=None)


def _scratch(numel: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    kept, nbytes = _kept.get(), numel * dtype.itemsize
    if kept is None:
        return torch.empty(numel, dtype=dtype, device=device)
    if device not in kept or kept[device].numel() < nbytes:
        kept[device] = torch.empty(nbytes, dtype=torch.uint8, device=device)
    return kept[device][:nbytes].view(dtype)


def _chunks(
    mesh: UnitMesh, parts: LocalShards, dtype: torch.dtype, target: torch.device, form: StateDictFormat
) -> list[Any]:
    comm, slots = mesh.shard, parts.layout.slots
    shapes = [slot.shape for slot in slots]
    found: list[Any] = [None] * len(slots)
    present = parts.present
    for index in present:
        # A tensor without dimensions has no rows: it comes whole to all ranks.
        box = chunk_box(shapes[index], comm.size, comm.rank) if shapes[index] else Box((), ())
        if box is not None:
            found[index] = torch.empty(box.sizes, dtype=dtype, device=target)

    mine = sorted({run.index for run in parts.runs(comm.rank)})

    def wanted(rank: int) -> list[Run]:
        # Of what other ranks want, what this one cannot give does not matter: there are ranks x slots of it.
        return chunk_runs(shapes, comm.size, rank, present if rank == comm.rank else mine)

    uncut = [None if slot.is_cut else tensor for slot, tensor in zip(slots, found, strict=True)]
    _move(comm, _without_cut(parts), wanted, uncut, dtype)
    cut = {index: slots[index] for index in present if slots[index].is_cut}
    if cut:
        _gather_chunks(mesh, parts, cut, found, dtype, target)
    for index in present:
        shape = slots[index].whole_shape
        if not shape:
            continue
        described = found[index], shape, dtype, target
        if mesh.device_mesh is not None or mesh.tensor is not None or form.dtensor:
            found[index] = create_chunk_dtensor(*described, *mesh.placed(slots[index].block))
        else:
            ranks = mesh.ranks(mesh.dtensor_dim)
            found[index] = create_chunk_sharded_tensor(*described, mesh.process_group(), ranks)
    return found


def _without_cut(parts: LocalShards) -> LocalShards:
    slots = zip(parts.layout.slots, parts.tensors, strict=True)
    return replace(parts, tensors=[None if slot.is_cut else tensor for slot, tensor in slots])


def _gather_chunks(
    mesh: UnitMesh,
    parts: LocalShards,
    cut: Mapping[int, ParamSlot],
    found: list[Any],
    dtype: torch.dtype,
    target: torch.device,
) -> None:
    """Collective over the holders. The chunks of parameters that are cut twice."""
    holders = mesh.ranks(mesh.dtensor_dim, "tensor")
    boxes: list[dict[int, list[Box]]] = [{} for _ in holders]
    for index, slot in cut.items():
        device_mesh, placements = mesh.placed(slot.block)
        blocks = mesh_blocks(slot.whole_shape, device_mesh.mesh, placements)
        for rank, global_rank in enumerate(holders):
            boxes[rank][index] = [blocks[global_rank]]
    for index, (box,) in boxes[mesh.comm(mesh.dtensor_dim, "tensor").rank].items():
        found[index] = torch.empty(box.sizes, dtype=dtype, device=target)
    shards = {index: parts.tensors[index] for index in cut}
    targets = {index: found[index].view(-1) for index in cut}
    gather_blocks(Blocks(mesh, parts.layout, parts.whole_shard), shards, _held_by(boxes), targets, dtype)


def _move(comm: Communicator, parts: LocalShards, wanted: RunsOf, found: Sequence[Any], dtype: torch.dtype) -> None:
    plan = MovePlan.make(comm.rank, comm.size, parts.runs, wanted)
    target = [None if tensor is None else tensor.view(-1) for tensor in found]
    for part in plan.parts(_batches(parts.layout)):
        move(comm, part, parts.tensors, target, dtype)


@torch.no_grad()
def scatter(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> None:
    """Collective over the ranks of `mesh`, unless all of `values` are plain tensors. The way back from ``gather``.

    Args:
        parts: filled, converting to their dtype. What belongs to no slot is left alone.
        values: for each slot a tensor that every rank has whole, a ``ShardedTensor`` or ``DTensor`` over
            ``mesh.dtensor_ranks``, a ``Rank0Tensor``, or None to leave it alone; on all ranks alike, of the slot's
            shape.

    Raises:
        StateDictError: a distributed tensor lies on other ranks, or not all of it on these, or it is a ``DTensor`` of
            a placement that is no block of values. Raised by all ranks, before anything is filled.
    """
    values = [_local_if_replicated(mesh, value) for value in values]
    if mesh.tensor is not None:
        values = _own_blocks(mesh, parts, values)
    blocks = None
    if any(map(is_distributed, values)):
        blocks = _blocks_by_rank(mesh, parts, values)
    for run in parts.runs(mesh.shard.rank):
        if _kind(values[run.index]) is torch.Tensor:
            part = _flat(values[run.index])[run.start : run.start + run.numel]
            _place(parts, run).copy_(part)
    if blocks is not None:
        _fill_from_blocks(mesh.dtensor_ranks, parts, values, blocks)
    if any(_kind(value) is Rank0Tensor for value in values):
        _fill_from_first(mesh, parts, values)


def _own_blocks(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> list[Any]:
    """Collective over the ranks that are parallel over tensors. What there is for this rank's blocks.

    Distributed tensors are put in place already, and None is left of them, but for those that lie on the dtensor_ranks.
    """
    found: list[Any] = list(values)
    across = [None if is_distributed(value) and lies_on_dtensor_ranks(mesh, value) else value for value in values]
    _scatter_distributed(mesh, parts, across)
    for index, (slot, value) in enumerate(zip(parts.layout.slots, values, strict=True)):
        if is_distributed(value):
            found[index] = None if across[index] is not None else value
        elif _kind(value) is Rank0Tensor:
            found[index] = _block_from_first(mesh, slot, value)
        elif value is not None and slot.is_cut:
            found[index] = value[slot.block.box.slices]
    return found


def _held_by(boxes: Sequence[Mapping[int, Sequence[Box]]]) -> BoxesOf:
    return lambda rank, index: boxes[rank].get(index, ())


def is_distributed(value: Any) -> bool:
    """Whether a value is a ``ShardedTensor`` or a ``DTensor``."""
    return isinstance(value, (ShardedTensor, DTensor))


def lies_on_dtensor_ranks(mesh: UnitMesh, value: ShardedTensor | DTensor) -> bool:
    """Whether a distributed tensor lies on ``mesh.dtensor_ranks`` alone, with others like it for other blocks.

    Not collective, once these ranks know each other's names.
    """
    return set(mesh.ranks(mesh.dtensor_dim)).issuperset(ranks_of_tensor(value))


def _scatter_distributed(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> None:
    for dtype, chosen in _by_dtype(values, (ShardedTensor, DTensor)).items():
        holders = mesh.ranks(mesh.dtensor_dim, "tensor")
        boxes: list[dict[int, list[Box]]] = [{} for _ in holders]
        for index in sorted(chosen):
            check_blocks(parts.layout.slots[index].fqn, values[index], holders)
            everywhere, seen = all_boxes(values[index]), set[Box]()
            for rank, global_rank in enumerate(holders):
                held = everywhere.get(global_rank, [])
                if not seen.issuperset(held):  # replicas have the same
                    boxes[rank][index] = held
                    seen.update(held)
        sources = {index: _held(values[index]) for index in chosen}
        shards = {index: parts.tensors[index] for index in chosen}
        scatter_blocks(Blocks(mesh, parts.layout, parts.whole_shard), shards, _held_by(boxes), sources, dtype)


def _block_from_first(mesh: UnitMesh, slot: ParamSlot, value: Rank0Tensor) -> Rank0Tensor:
    """Collective over the ranks that are parallel over tensors. This rank's block, from the first of them."""
    assert mesh.tensor is not None
    shape = torch.Size(slot.shape)
    if not mesh.is_first("replicate", "shard"):
        return Rank0Tensor(shape, value.dtype)
    comm = mesh.tensor
    mine = torch.empty(shape, dtype=value.dtype, device=comm.device)
    inputs = None
    if comm.rank == 0:
        boxes = slot.block.boxes if slot.is_cut else [whole_box(shape)] * comm.size
        whole = value.tensor.detach().to(comm.device)
        inputs = [whole[box.slices].contiguous() for box in boxes]
    comm.scatter(mine, inputs, 0)
    return Rank0Tensor(shape, value.dtype, mine)


def check_blocks(key: str, value: ShardedTensor | DTensor, ranks: Sequence[int]) -> None:
    """See that a distributed tensor can be had from the ranks that a unit is sharded over. Not collective.

    Args:
        ranks: those of the world, see ``UnitMesh.ranks``.

    Raises:
        StateDictError: it lies on others, or not all of it on these, or it is no block of values on each.
    """
    try:
        boxes = all_boxes(value)
    except ValueError as error:
        raise StateDictError(f"{key!r}: {error}") from None
    covered = sum(box.numel for box in {box for rank in ranks for box in boxes.get(rank, ())})
    if covered != math.prod(properties_of(value)[0]):
        raise StateDictError(
            f"{key!r}: its {type(value).__name__} lies on the ranks {sorted(boxes)}, and not all of it on those that "
            f"the model is sharded over ({sorted(ranks)}): load it for these ranks, or gather it"
        )


def _local_if_replicated(mesh: UnitMesh, value: Any) -> Any:
    """The plain tensor of a ``DTensor`` that every rank has whole, which needs no communication; else the value."""
    if _kind(value) is DTensor and all(placement.is_replicate() for placement in value.placements):
        members = set(value.device_mesh.mesh.flatten().tolist())
        if members.issuperset(mesh.ranks(mesh.dtensor_dim)):
            return value.to_local()
    return value


def _blocks_by_rank(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> list[list[Run]]:
    """By rank, the runs of distributed tensors that this rank has to know of for its plan."""
    comm, places = mesh.dtensor_ranks, {rank: place for place, rank in enumerate(mesh.ranks(mesh.dtensor_dim))}
    wanted = {run.index for run in parts.runs(mesh.shard.rank)}
    found: list[list[Run]] = [[] for _ in range(comm.size)]
    for index, value in enumerate(values):
        if is_distributed(value):
            # What this rank wants may be anywhere; of the rest it gives what it has.
            needed = range(comm.size) if index in wanted else (comm.rank,)
            for rank, runs in _block_runs(index, value, parts.layout.slots[index], places, needed).items():
                found[rank] += runs
    return found


def _fill_from_blocks(comm: Communicator, parts: LocalShards, values: Sequence[Any], blocks: list[list[Run]]) -> None:
    for dtype, chosen in _by_dtype(values, (ShardedTensor, DTensor)).items():

        def sources(rank: int, chosen: set[int] = chosen) -> list[Run]:
            return [run for run in blocks[rank] if run.index in chosen]

        _receive(comm, parts, sources, lambda index: _held(values[index]), dtype, chosen)


def _fill_from_first(mesh: UnitMesh, parts: LocalShards, values: Sequence[Any]) -> None:
    comm = mesh.shard
    shapes = [slot.shape for slot in parts.layout.slots]
    for dtype, chosen in _by_dtype(values, (Rank0Tensor,)).items():
        if mesh.is_first("replicate"):
            whole = [run for run in whole_runs(shapes) if run.index in chosen]

            def sources(rank: int, whole: list[Run] = whole) -> list[Run]:
                return whole if rank == 0 else []

            _receive(comm, parts, sources, lambda index: _flat(values[index].tensor), dtype, chosen)
    if mesh.size("replicate") > 1:
        chosen = {index for index, value in enumerate(values) if _kind(value) is Rank0Tensor}
        _copy_from_first_replica(mesh, parts, chosen)


def _copy_from_first_replica(mesh: UnitMesh, parts: LocalShards, chosen: Collection[int]) -> None:
    """Collective over ``mesh.replicate``. The runs of `chosen` slots, a batch at a time."""
    replicate, runs = mesh.replicate, [run for run in parts.runs(mesh.shard.rank) if run.index in chosen]
    by_dtype: dict[torch.dtype, list[Run]] = {}
    for run in runs:
        by_dtype.setdefault(parts.tensors[run.index].dtype, []).append(run)
    for group, alike in ((group, alike) for group in _batches(parts.layout) for alike in by_dtype.values()):
        places = [_place(parts, run) for run in alike if run.index in group]
        if places:
            packed = torch.cat(places).to(replicate.device)
            replicate.broadcast(packed, 0)
            for place, values in zip(places, packed.split([place.numel() for place in places]), strict=True):
                place.copy_(values)


def _receive(
    comm: Communicator,
    parts: LocalShards,
    sources: RunsOf,
    held: Callable[[int], torch.Tensor | None],
    dtype: torch.dtype,
    chosen: Collection[int],
) -> None:
    """Collective over `comm`. Fill the `chosen` slots of `parts` from the runs that ranks hold of them.

    Args:
        held: the memory of this rank's runs of a slot; asked for when its turn comes, as it may be a copy.
    """

    def wanted(rank: int) -> list[Run]:
        own = min(rank, parts.layout.num_shards - 1)  # where nothing is sharded, all ranks want the same
        return [run for run in parts.runs(own) if run.index in chosen]

    plan = MovePlan.make(comm.rank, comm.size, sources, wanted)
    for part in plan.parts(_batches(parts.layout)):
        given = {step.index for steps in (part.kept, *part.sent) for step in steps}
        move(comm, part, {index: held(index) for index in given}, parts.tensors, dtype)


def _block_runs(
    index: int, value: Any, slot: ParamSlot, places: dict[int, int], needed: Collection[int]
) -> dict[int, list[Run]]:
    """The runs of a distributed tensor by the rank among `places`, in the memory that ``_held`` gives.

    They are runs of what the slot is, which may be a block of the tensor.

    Of replicas of a block the first is taken. Runs are listed for the ranks that are `needed`.

    Raises:
        StateDictError: see ``check_blocks``.
    """
    check_blocks(slot.fqn, value, list(places))
    found: dict[int, list[Run]] = {}
    seen: set[Box] = set()
    frame = slot.block.box if slot.block is not None else whole_box(slot.shape)
    for rank, boxes in all_boxes(value).items():
        if rank not in places:
            continue
        runs: list[Run] = []
        offset = 0
        for box in boxes:
            if box not in seen and places[rank] in needed:
                runs += cut_runs(index, frame, box, offset)
            seen.add(box)
            offset += box.numel
        found[places[rank]] = sorted(runs)
    return found


def _held(value: Any) -> torch.Tensor | None:
    """What this rank holds of a distributed tensor, block after block, 1-D."""
    blocks = [_flat(block) for _, block in local_blocks(value)]
    return blocks[0] if len(blocks) == 1 else torch.cat(blocks) if blocks else None


def _by_dtype(values: Sequence[Any], kinds: tuple[type, ...]) -> dict[torch.dtype, set[int]]:
    """Which values of some kinds have which dtype."""
    found: dict[torch.dtype, set[int]] = {}
    for index, value in enumerate(values):
        if _kind(value) in kinds:
            found.setdefault(shape_and_dtype(value)[1], set()).add(index)
    return found


def _kind(value: Any) -> type | None:
    for kind in (ShardedTensor, DTensor, Rank0Tensor, torch.Tensor):
        if isinstance(value, kind):
            return kind
    return None


def _flat(tensor: torch.Tensor | None) -> torch.Tensor | None:
    return None if tensor is None else tensor.detach().reshape(-1)


def _place(parts: LocalShards, run: Run) -> torch.Tensor:
    """The memory of a run, as a view."""
    return parts.tensors[run.index][run.offset : run.offset + run.numel]


def _whole_runs(parts: LocalShards) -> list[Run]:
    shapes = [slot.shape for slot in parts.layout.slots]
    return [run for run in whole_runs(shapes) if parts.tensors[run.index] is not None]


def _batches(layout: FlatLayout) -> list[range]:
    return batches([slot.numel for slot in layout.slots], _BATCH_NUMEL)
