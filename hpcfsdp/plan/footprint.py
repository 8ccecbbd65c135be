"""The memory of a rank during a step: the engine's allocations, replayed over its events.

The replay does what ``engine/context.py`` and ``params/gradient.py`` do, with numbers in place of tensors: which units
are gathered when, where gradients wait, what a reduction takes. Order matters: memory counts as taken when the program
asks for it, as in the counters of torch's allocators. On CPUs a rank has an equal part of what its node shares.
"""

from __future__ import annotations

import itertools
from collections import Counter, deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from hpcfsdp.comm.communicator import KEPT_PART
from hpcfsdp.engine.context import BUFFERS_BETWEEN_NODES, MOST_BETWEEN
from hpcfsdp.plan.layouts import KEEPS_VALUES, OPTIMIZERS, PlannedGroup, Setup, allocated, layouts_of
from hpcfsdp.plan.traced_step import EventKind, StepEvent, TracedStep

KINDS = ("parameters", "optimizer", "gradients", "gathered", "unit gradients", "activations", "scratch")
"""What memory is for: shards and buffers, the optimizer's state, shards of gradients, values of units that compute,
whole gradients on their way to a reduction, tensors of the computation, and what collectives and the optimizer take."""


@dataclass(frozen=True)
class Moment:
    """Memory at one point of a step."""

    what: str  # the point
    bytes_by_kind: Mapping[str, int]  # see ``KINDS``

    @property
    def nbytes(self) -> int:
        return sum(self.bytes_by_kind.values())


@dataclass(frozen=True)
class Footprint:
    """Memory of the rank that takes most."""

    at_rest: Moment  # on the device between steps
    peak: Moment  # on the device when most is taken
    host: Mapping[str, int]  # in host memory at its peak, under offload and with checkpoints in memory
    course: tuple[Moment, ...]  # the moments of a step with the most memory of each event, in order


def footprint(step: TracedStep, setup: Setup) -> Footprint:
    """Return the memory of the worst rank. It takes as long for one rank as for any number."""
    return Replay(step, setup).run()


@dataclass(eq=False)
class ReplayedUnit:
    """A unit while it is replayed."""

    index: int
    groups: tuple[PlannedGroup, ...]  # its layouts
    gathers: bool  # whether its values take memory while it computes
    keeps: bool  # whether they stay between forward and backward
    is_kept: bool = False  # whether they stay somewhere while they are not gathered, see ``Setup.kept_over``
    part_bytes: int = 0  # that this rank then holds of them
    is_gathered: bool = False
    in_backward: bool = False
    outstanding: dict[int, int] = field(default_factory=dict)  # by group, gradients that are still to come
    filling: set[int] = field(default_factory=set)  # groups that have a buffer, on CPUs
    waiting: Counter[int] = field(default_factory=Counter)  # by group, bytes of gradients on leaves


class Replay:
    """One step, in the order in which a program asks for memory. ``step_time`` adds times to it."""

    def __init__(self, step: TracedStep, setup: Setup) -> None:
        self.step, self.setup = step, setup
        self.on_host = setup.node_bytes > 0
        keeps, last = setup.strategy in KEEPS_VALUES, len(step.units) - 1
        if setup.kept_over and setup.front == "class":
            last = -1  # the outermost unit frees its values, as the program asks
        self.units = [
            ReplayedUnit(index, groups, any(_gathers(group, setup) for group in groups), keeps or index == last)
            for index, groups in enumerate(layouts_of(step.units, setup))
        ]
        backwards = [event.unit for event in step.events if event.kind is EventKind.BACKWARD]
        forwards = [event.unit for event in step.events if event.kind is EventKind.FORWARD]
        self._next = dict(itertools.pairwise(backwards))
        # On CPUs messages arrive while the unit before computes.
        self._next_forward = dict(itertools.pairwise(forwards)) if self.on_host and setup.nodes_of_shards > 1 else {}
        self._last_backward = backwards[-1] if backwards else -1
        self._now: Counter[str] = Counter()
        self._course: list[Moment] = []
        self._what = ""
        self._retired: deque[ReplayedUnit] = deque()
        self._ahead: dict[ReplayedUnit, None] = {}
        self._queue: dict[tuple[int, int], None] = {}
        self._slots: dict[tuple[torch.dtype, int], int] = {}  # bytes that a reduction has left behind
        self._between: deque[int] = deque()  # bytes of shards that the reduction over replicas has read
        self._at_end: list[ReplayedUnit] = []
        self._released: dict[tuple[int, int], int] = {}  # of a node's memory, what ranks have released and not freed
        self._buffers: dict[Any, deque[int]] = {}  # for gradients, on CPUs where ranks do not share them
        self._in_reduction = 0  # bytes that the last reduction takes until the next one, on CPUs

    def run(self) -> Footprint:
        """Replay the step after others: the optimizer has its state, and gradients are freed."""
        setup, optimizer = self.setup, OPTIMIZERS[self.setup.optimizer]
        groups = [group for unit in self.units for group in unit.groups]
        trained = [group for group in groups if group.trained]
        stepped = [allocated(numel, group.dtypes.param) for group in trained for numel in group.stepped]
        state = optimizer.values * sum(stepped)
        scalars = 0 if setup.offload else optimizer.on_device * len(stepped) * allocated(1, torch.float32)
        shards = sum(allocated(group.layout.shard_numel, group.dtypes.param) for group in groups)
        grads = sum(allocated(group.layout.shard_numel, group.dtypes.grad) for group in trained)
        host = {}
        self._now["parameters"] = self.step.buffer_bytes
        if setup.front == "class":  # modules hold a number for each parameter
            self._now["parameters"] += sum(allocated(len(group.params), group.dtypes.param) for group in groups)
        else:  # zeros between gradients, to be copied with them
            gaps = ((group.layout.gap_numel, group.dtypes.compute) for group in trained)
            self._now["parameters"] += sum(allocated(numel, dtype) for numel, dtype in gaps if numel)
        if setup.offload:
            scratch = optimizer.scratch * sum(stepped)
            host = {"parameters": shards, "optimizer": state, "gradients": grads, "scratch": scratch}
        else:
            self._now["parameters"] += shards
            self._now["optimizer"] = state + scalars
        if self.on_host:
            self._take_shared_memory(groups)
        if setup.memory_copies:  # replicas divide the work of saving
            host["checkpoints"] = setup.memory_copies * -(-(shards + state) // setup.replicas)
        at_rest = self._moment("between steps")
        if setup.accumulation > 1 and not setup.offload:
            self._now["gradients"] = grads
        for event in self.step.events:
            self._on_event(event)
        self._finish()
        if not setup.offload:
            self._what = "optimizer step"
            in_loop = optimizer.loop_scratch * max(stepped, default=0)
            self._taken("scratch", in_loop if self.on_host else optimizer.scratch * sum(stepped))
        peak = max(self._course, key=lambda moment: moment.nbytes, default=at_rest)
        return Footprint(at_rest, peak, host, tuple(self._course))

    def _no_schedule(self, *_: Any) -> None: ...

    # What ``step_time`` hears of the same step: modules compute from an event to the next one; the values of a unit
    # begin to be gathered; modules compute with them from here on, and have done so; the next gather may write the
    # memory of the unit; a group of its gradients begins to be reduced.
    on_compute = on_gather = on_bind = on_reshard = on_free = on_reduce = _no_schedule

    # Memory

    def _moment(self, what: str) -> Moment:
        return Moment(what, {kind: self._now[kind] for kind in KINDS})

    def _mark(self) -> None:
        """Note the memory now, unless more has been noted for the same event."""
        if self._course and self._course[-1].what == self._what:
            if sum(self._now.values()) <= self._course[-1].nbytes:
                return
            self._course.pop()
        self._course.append(self._moment(self._what))

    def _take(self, kind: str, nbytes: int) -> None:
        self._now[kind] += nbytes
        self._mark()

    def _taken(self, kind: str, nbytes: int) -> None:
        """Take memory and give it back at once."""
        self._take(kind, nbytes)
        self._now[kind] -= nbytes

    def _take_shared_memory(self, groups: Sequence[PlannedGroup]) -> None:
        """Take what stays in the memory of a node: released values, those in another dtype, buffers of gradients."""
        setup, buffers = self.setup, Counter[torch.dtype]()
        for group in groups:
            dtypes = group.dtypes
            if setup.shards > 1 and setup.nodes_of_shards == 1 and dtypes.compute != dtypes.param:
                self._now["parameters"] += allocated(group.layout.shard_numel, dtypes.compute)
            if group.trained and self._shares_buffers:
                nbytes = allocated(group.layout.padded_numel, dtypes.reduce)
                buffers[dtypes.reduce] = max(buffers[dtypes.reduce], nbytes)
        self._now["unit gradients"] += self._num_buffers * buffers.total()
        for event in self.step.events:
            if event.kind is EventKind.BACKWARD_END and setup.nodes_of_shards > 1:  # as the step before has left it
                self._gather(self.units[event.unit])
                self._free(self.units[event.unit])
        self._course.clear()

    @property
    def _shares_buffers(self) -> bool:
        """Whether ranks of a node read each other's buffers of gradients."""
        return self.on_host and (self.setup.neighbours > 1 or (self.setup.shards == 1 < self.setup.replicas))

    @property
    def _num_buffers(self) -> int:
        return BUFFERS_BETWEEN_NODES if self._shares_buffers and self.setup.nodes_of_shards > 1 else 2

    # Events

    def _on_event(self, event: StepEvent) -> None:
        unit = self.units[event.unit]
        name = self.step.units[event.unit].name or "the model"
        if event.kind is not EventKind.GRADIENT:
            self._what = f"{event.kind.value} of {name}"
        if event.kind is EventKind.FORWARD:
            self._unshard(unit)
            self._unshard_ahead(self._next_forward.get(unit.index))
            self._ahead.pop(unit, None)
            self.on_bind(unit)
        elif event.kind is EventKind.FORWARD_END:
            if not unit.keeps:
                self._reshard(unit, after_forward=True)
            if event.unit == len(self.units) - 1:
                self._free_retired(keep=0)
        elif event.kind is EventKind.BACKWARD:
            self._begin_backward(unit)
        elif event.kind is EventKind.GRADIENT:
            self._what = f"backward of {name}"
            self._has_grad(unit, event.param)
        else:
            self._reshard(unit)
            unit.in_backward = False
            self._advance()
        self._taken("activations", event.high)
        self._now["activations"] += event.net
        self.on_compute(event)

    def _unshard(self, unit: ReplayedUnit, *, ahead: bool = False) -> None:
        if unit.is_gathered or not unit.gathers:
            return
        unit.is_gathered = True
        is_there = unit in self._retired
        self._free_retired(keep=0 if ahead else 1, unless=unit)
        if not is_there:
            self._gather(unit)
        self.on_gather(unit)

    def _gather(self, unit: ReplayedUnit) -> None:
        setup = self.setup
        if unit.is_kept and setup.stays_in_node:
            return
        for place, group in enumerate(unit.groups):
            if not _gathers(group, setup) or self._released.pop((unit.index, place), 0):
                continue
            # All shards arrive, and the parameters are copied from there; on CPUs they arrive where they belong.
            copied = setup.front == "fully_shard" and not self.on_host
            arriving = allocated(group.layout.padded_numel, group.dtypes.compute) if copied else 0
            self._take("scratch", arriving)
            self._take("gathered", self._gathered_bytes(group))
            if setup.kept_over and not (setup.stays_in_node or unit.keeps or unit.is_kept):
                part = allocated(group.layout.padded_numel // setup.kept_over, group.dtypes.compute)
                unit.part_bytes += part
                self._take("gathered", part)
            self._now["scratch"] -= arriving

    def _gathered_bytes(self, group: PlannedGroup) -> int:
        nbytes = allocated(group.gathered_numel, group.dtypes.compute)
        return nbytes // self.setup.neighbours if self.on_host else nbytes

    def _reshard(self, unit: ReplayedUnit, *, after_forward: bool = False) -> None:
        self._ahead.pop(unit, None)
        if not unit.is_gathered:
            return
        unit.is_gathered = False
        unit.is_kept = after_forward and self.setup.kept_over > 0
        self._retired.append(unit)
        self.on_reshard(unit)
        if self.on_host or self._ahead or (unit.in_backward and unit.index == self._last_backward):
            self._free_retired(keep=0)

    def _free_retired(self, *, keep: int, unless: ReplayedUnit | None = None) -> None:
        for unit in list(self._retired):
            if unit is not unless and len(self._retired) <= keep:
                return
            self._retired.remove(unit)
            self.on_free(unit)
            if unit is not unless:
                self._free(unit)

    def _free(self, unit: ReplayedUnit) -> None:
        """Free the values of a unit, but for what is kept. Memory of a node stays up to a part of all."""
        setup = self.setup
        if unit.is_kept and setup.stays_in_node:
            return
        for place, group in enumerate(unit.groups):
            if _gathers(group, setup):
                nbytes = self._gathered_bytes(group)
                if self.on_host and setup.nodes_of_shards > 1:
                    self._released[unit.index, place] = nbytes
                else:
                    self._now["gathered"] -= nbytes
        while sum(self._released.values()) * setup.neighbours > KEPT_PART * setup.node_bytes:
            self._now["gathered"] -= self._released.pop(next(iter(self._released)))
        if not unit.is_kept:
            self._now["gathered"] -= unit.part_bytes
            unit.part_bytes = 0

    def _unshard_ahead(self, following: int | None) -> None:
        """Gather the next unit, unless that only has to be read."""
        upcoming = None if following is None else self.units[following]
        if upcoming is not None and upcoming.gathers and not upcoming.is_gathered:
            self._ahead[upcoming] = None
            self._unshard(upcoming, ahead=True)

    def _begin_backward(self, unit: ReplayedUnit) -> None:
        unit.in_backward = True
        unit.outstanding = {place: len(group.params) for place, group in enumerate(unit.groups) if group.trained}
        if unit.index in self.step.outer:
            self._at_end.append(unit)
        else:
            self._enqueue(unit)
        self._unshard(unit)
        self._unshard_ahead(self._next.get(unit.index))
        self._ahead.pop(unit, None)
        self.on_bind(unit)

    def _enqueue(self, unit: ReplayedUnit) -> None:
        self._queue |= {(unit.index, place): None for place in reversed(unit.outstanding)}

    def _has_grad(self, unit: ReplayedUnit, param: int) -> None:
        place = next(place for place, group in enumerate(unit.groups) if param in group.members)
        group = unit.groups[place]
        nbytes = allocated(group.params[group.members.index(param)].numel, group.dtypes.compute)
        unit.waiting[place] += nbytes
        self._take("unit gradients", nbytes)
        unit.outstanding[place] -= 1
        if self.on_host and (unit.index, place) in self._queue:
            self._fill_buffer(unit, place)

    def _fill_buffer(self, unit: ReplayedUnit, place: int) -> None:
        """Move gradients from leaves to their buffer, on a CPU; the last buffers but one are free."""
        group = unit.groups[place]
        if not self._shares_buffers and place not in unit.filling:
            buffers = self._buffers.setdefault((group.dtypes.reduce, place), deque())
            if len(buffers) == self._num_buffers:
                self._now["unit gradients"] -= buffers.popleft()
            buffers.append(allocated(group.layout.padded_numel, group.dtypes.reduce))
            self._take("unit gradients", buffers[-1])
        unit.filling.add(place)
        self._now["unit gradients"] -= unit.waiting.pop(place, 0)

    def _finish(self) -> None:
        self._what = "end of the backward"
        self._free_retired(keep=0)
        for unit in self._at_end:
            self._enqueue(unit)
        self._advance()
        self._now["unit gradients"] -= sum(self._slots.values()) + sum(map(sum, self._buffers.values()))
        self._slots.clear()
        self._buffers.clear()
        self._now["scratch"] -= self._in_reduction
        self._in_reduction = 0
        self._now["unit gradients"] -= sum(self._between)
        self._between.clear()
        self._mark()

    # Reductions

    def _advance(self) -> None:
        while self._queue:
            index, place = next(iter(self._queue))
            if self.units[index].outstanding[place]:
                return
            (self._reduce_on_host if self.on_host else self._reduce)(self.units[index], place)
            del self._queue[index, place]

    def _reduce_on_host(self, unit: ReplayedUnit, place: int) -> None:
        """Begin to reduce a buffer, on a CPU."""
        self._fill_buffer(unit, place)
        unit.filling.discard(place)
        self.on_reduce(unit, place)
        setup, group = self.setup, unit.groups[place]
        grad = allocated(group.layout.shard_numel, group.dtypes.grad)
        self._now["scratch"] -= self._in_reduction
        self._in_reduction = 0
        if setup.shards == setup.replicas == 1 and group.dtypes.reduce == group.dtypes.grad:
            self._now["unit gradients"] -= self._buffers[group.dtypes.reduce, place].pop()  # it becomes the gradient
            self._now["gradients"] += grad
        else:
            self._take("gradients", grad)
            nbytes = host_scratch(group, setup)
            self._take("scratch", nbytes)
            # Neighbours reduce for each other, and wait for each other until the next one; messages alone come sooner.
            self._in_reduction = nbytes if setup.neighbours > 1 else 0
            self._now["scratch"] -= nbytes - self._in_reduction
        if setup.accumulation > 1:
            self._now["gradients"] -= grad

    def _reduce(self, unit: ReplayedUnit, place: int) -> None:
        """Copy the gradients of a unit into one buffer, and reduce it; the buffer stays until the next reduction."""
        self.on_reduce(unit, place)
        setup, group = self.setup, unit.groups[place]
        dtypes, layout = group.dtypes, group.layout
        slot = dtypes.reduce, place
        self._now["unit gradients"] -= self._slots.pop(slot, 0)
        buffer = allocated(layout.padded_numel, dtypes.reduce)
        self._take("unit gradients", buffer)
        self._now["unit gradients"] -= unit.waiting.pop(place, 0)
        grad = allocated(layout.shard_numel, dtypes.grad)
        if setup.shards > 1:
            arriving_dtype = dtypes.grad if setup.replicas == 1 else dtypes.reduce
            arriving = allocated(layout.shard_numel, arriving_dtype)
            if len(self._between) >= MOST_BETWEEN:
                self._now["unit gradients"] -= self._between.popleft()
            self._take("gradients", arriving)
            self._taken("scratch", scatter_scratch(group, setup, arriving_dtype))
            if setup.replicas > 1:
                self._taken("scratch", all_reduce_scratch(layout.shard_numel, group, setup.replicas))
                if arriving_dtype != dtypes.grad:
                    self._take("gradients", grad)
                    self._now["gradients"] -= arriving
                    self._now["unit gradients"] += arriving
                self._between.append(arriving if arriving_dtype != dtypes.grad else 0)
            self._slots[slot] = buffer
        else:
            if setup.replicas > 1:
                self._taken("scratch", all_reduce_scratch(layout.padded_numel, group, setup.replicas))
            if dtypes.reduce != dtypes.grad:
                self._take("gradients", grad)
                self._slots[slot] = buffer
            elif setup.offload:
                self._now["gradients"] += grad
                self._slots[slot] = buffer
            else:  # the buffer becomes the gradient
                self._now["unit gradients"] -= buffer
                self._now["gradients"] += buffer
        if setup.offload or setup.accumulation > 1:  # copied to the host, or added to those that are there
            self._now["gradients"] -= grad


def _gathers(group: PlannedGroup, setup: Setup) -> bool:
    """Return whether gathered values take memory: not where one rank computes with the shard itself."""
    if setup.node_bytes and setup.shards > 1:  # the shards of a node's ranks are the values
        return setup.nodes_of_shards > 1
    return setup.shards > 1 or setup.offload or group.dtypes.compute != group.dtypes.param


def scatter_scratch(group: PlannedGroup, setup: Setup, output: torch.dtype) -> int:
    """Return bytes that a reduce-scatter takes, besides its input and output."""
    dtypes, shard = group.dtypes, group.layout.shard_numel
    sent = allocated(group.layout.padded_numel, dtypes.reduce)
    total = 0 if output == dtypes.accumulate else allocated(shard, dtypes.accumulate)
    if dtypes.reduce == dtypes.accumulate:
        return total
    # Ranks send values in 16 bits and add them up in 32: each receives all parts, those of a node first.
    if setup.sums_by_node:
        of_node = allocated(shard * setup.nodes_of_shards, dtypes.reduce)
        within = sent + allocated(shard * setup.nodes_of_shards, dtypes.accumulate)
        return sent + of_node + max(within, of_node + total)
    return sent + total


def host_scratch(group: PlannedGroup, setup: Setup) -> int:
    """Return bytes that a reduction on CPUs takes: partial results to and from other nodes."""
    others, dtypes = setup.nodes_of_shards - 1, group.dtypes
    if setup.neighbours == 1:  # each of the others sends this rank's part of its gradients
        return others * allocated(group.layout.shard_numel, dtypes.reduce)
    return 2 * others * allocated(group.layout.shard_numel, dtypes.accumulate)


def all_reduce_scratch(numel: int, group: PlannedGroup, ranks: int) -> int:
    """Return bytes that an all-reduce of so many elements takes, besides them."""
    dtypes = group.dtypes
    if dtypes.reduce == dtypes.accumulate:
        return 0
    part = -(-numel // ranks)
    padded = allocated(part * ranks, dtypes.reduce)
    return 2 * padded + allocated(part, dtypes.reduce) + allocated(part, dtypes.accumulate)
