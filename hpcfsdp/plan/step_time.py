"""The time of a step: computation and communication on the queues of the engine, by an alpha-beta model of links.

The schedule follows the waits of ``docs/developers/streams.md``: a gather waits for the memory of the unit before the
last, or in the backward for that of the last; a unit waits for its values; a buffer of gradients waits for the
reduction of the one before. Collectives of several queues share the links, in the order of their calls.

On CPUs the core that computes moves the bytes, too: nothing overlaps. Neighbours read each other's memory.
"""

from __future__ import annotations

from dataclasses import dataclass

from hpcfsdp.plan.footprint import Footprint, Replay, ReplayedUnit
from hpcfsdp.plan.layouts import OPTIMIZERS, PlannedGroup, Setup
from hpcfsdp.plan.links import Links, RankGroup, Traffic
from hpcfsdp.plan.traced_step import StepEvent, TracedStep


@dataclass(frozen=True)
class Machine:
    """Where a step runs."""

    ranks_per_node: int  # of every node
    links: Links  # within and between nodes
    flops: float  # operations per second of a rank while it computes: the peak, times the efficiency
    memory_bytes_per_s: float  # of a device, for the optimizer; of a rank on CPUs, while all ranks use the memory
    on_cpu: bool = False  # whether ranks compute on CPUs, and those of a node share its memory


@dataclass(frozen=True)
class UnitCost:
    """Communication of one unit: of one gather, of another one in the backward, and of one reduction with that over
    replicas.
    """

    gather: Traffic
    again: Traffic  # a gather of what ``Setup.kept_over`` ranks have kept
    reduce: Traffic
    replicate: Traffic


@dataclass(frozen=True)
class StepTime:
    """A step of all ranks."""

    seconds: float  # of the whole step
    compute_s: float  # of forward and backward
    optimizer_s: float  # of the optimizer
    exposed_s: float  # in which computation waits for communication
    # gathers, reductions, replication: of all backwards of a step
    gathers: Traffic
    reductions: Traffic
    replication: Traffic
    by_unit: tuple[UnitCost, ...]  # of each unit, once

    @property
    def traffic(self) -> Traffic:
        """All collectives of a step."""
        return self.gathers + self.reductions + self.replication


def replay(step: TracedStep, setup: Setup, machine: Machine) -> tuple[Footprint, StepTime]:
    """Return memory and time of a step. It takes as long for one rank as for any number."""
    made = _Schedule(step, setup, machine)
    return made.run(), made.step_time()


class _Schedule(Replay):
    """A replay with a clock for each queue."""

    def __init__(self, step: TracedStep, setup: Setup, machine: Machine) -> None:
        super().__init__(step, setup)
        self._machine = machine
        per_node = machine.ranks_per_node
        self._is_one_queue = setup.comm_options.separate_reductions is False  # for gathers and reductions
        self._shards = RankGroup.of_shards(setup.shards, per_node)
        self._replicas = RankGroup.of_replicas(setup.replicas, setup.shards, per_node)
        known: dict[int, UnitCost] = {}
        for unit in self.units:
            if id(unit.groups) not in known:
                known[id(unit.groups)] = self._cost_of(unit)
        self._costs = [known[id(unit.groups)] for unit in self.units]
        self._compute = self._gathers = self._reductions = self._replication = 0.0  # the clocks
        self._busy_until = {"within": 0.0, "between": 0.0}  # of links
        self._busy = 0.0
        self._ready: dict[int, float] = {}
        self._used_until: dict[int, float] = {}
        self._buffer_free: dict[int, float] = {}
        self._sums = [Traffic(), Traffic(), Traffic()]

    def _cost_of(self, unit: ReplayedUnit) -> UnitCost:
        setup, per_node = self.setup, self._machine.ranks_per_node
        keepers = RankGroup.of_shards(setup.kept_over or setup.shards, per_node)
        gather, again, reduce, replicate = Traffic(), Traffic(), Traffic(), Traffic()
        for group in unit.groups:
            gather += self._gather_of(group, self._shards)
            again += Traffic() if setup.stays_in_node else self._gather_of(group, keepers)
            if group.trained:
                reduce += self._reduction_of(group)
                shard_bytes = group.layout.shard_numel * group.dtypes.reduce.itemsize
                if setup.replicas > 1:
                    replicate += self._replicas.all_reduce(shard_bytes, self._machine.links)
        return UnitCost(gather, again, reduce, replicate)

    def _gather_of(self, group: PlannedGroup, ranks: RankGroup) -> Traffic:
        nbytes = group.layout.padded_numel * group.dtypes.compute.itemsize
        if not self.on_host:
            return ranks.gather(nbytes, self._machine.links)
        if ranks.nodes == 1:
            return Traffic()
        return self._on_host(ranks, nbytes, 2 * nbytes / ranks.size)  # each rank copies its part to where others read

    def _on_host(self, ranks: RankGroup, nbytes: float, accessed: float) -> Traffic:
        """Return what it takes a rank to exchange its part of `nbytes` with other nodes, and to access memory."""
        machine, sent = self._machine, ranks.gather(nbytes, self._machine.links)
        between, links = sent.between_bytes, machine.links
        latency = (ranks.nodes > 1) * links.between.latency_s + (ranks.per_node > 1) * links.within.latency_s
        transfer = between / links.between.bytes_per_s + accessed / machine.memory_bytes_per_s
        return Traffic(accessed, between, latency, transfer, 1)

    def _reduction_of(self, group: PlannedGroup) -> Traffic:
        links, shards = self._machine.links, self._shards
        nbytes = group.layout.padded_numel * group.dtypes.reduce.itemsize
        if self.on_host:
            # Gradients move into the buffer; the node reduces what its ranks and their peers on other nodes get; these
            # partial results arrive, and become the shard.
            part, others = nbytes / shards.size, shards.nodes - 1
            partial = others * (shards.per_node + 1) * part if shards.per_node > 1 else 0
            return self._on_host(shards, nbytes, 2 * nbytes + partial + (others + shards.per_node + 1) * part)
        if group.dtypes.reduce == group.dtypes.accumulate or shards.nodes == 1:
            return shards.gather(nbytes, links)
        if self.setup.sums_by_node:  # within nodes, and what is left across them
            across = RankGroup(1, shards.nodes).gather(nbytes / shards.per_node, links)
            return RankGroup(shards.per_node, 1).gather(nbytes, links) + across
        return shards.all_to_all(nbytes, links)

    def step_time(self) -> StepTime:
        """Return the step that was run; every backward before the optimizer's step takes as long as the last."""
        times = self.setup.accumulation
        done = max(self._compute, self._reductions, self._replication)
        optimizer = self._optimizer_s()
        gathers, reductions, replication = (cost * times for cost in self._sums)
        return StepTime(
            times * done + optimizer,
            times * self._busy,
            optimizer,
            times * (done - self._busy),
            gathers,
            reductions,
            replication,
            tuple(self._costs),
        )

    def _optimizer_s(self) -> float:
        """Return its time: it reads and writes parameters and state, and reads gradients."""
        optimizer = OPTIMIZERS[self.setup.optimizer]
        passes = 2 + 2 * optimizer.values
        trained = [group for unit in self.units for group in unit.groups if group.trained]
        nbytes = sum(
            group.layout.shard_numel * (passes * group.dtypes.param.itemsize + group.dtypes.grad.itemsize)
            for group in trained
        )
        if self.on_host:
            shards = sum(group.layout.shard_numel * group.dtypes.param.itemsize for group in trained)
            nbytes = optimizer.loop_passes * shards
        return nbytes / self._machine.memory_bytes_per_s

    def on_compute(self, event: StepEvent) -> None:
        seconds = event.flops / self._machine.flops
        self._busy += seconds
        self._compute += seconds

    def _sent(self, ready_s: float, cost: Traffic) -> float:
        """Return when a collective ends that may begin at `ready_s`: as soon as its link has room."""
        if self.on_host:
            self._compute = max(ready_s, self._compute) + cost.seconds
            return self._compute
        link = "between" if cost.between_bytes else "within"
        begin = max(ready_s, self._busy_until[link])
        self._busy_until[link] = begin + cost.transfer_s
        return begin + cost.seconds

    def on_gather(self, unit: ReplayedUnit) -> None:
        cost = self._costs[unit.index].again if unit.is_kept else self._costs[unit.index].gather
        self._gathers = self._sent(max(self._gathers, self._reductions if self._is_one_queue else 0.0), cost)
        self._ready[unit.index] = self._gathers
        self._sums[0] += cost

    def on_bind(self, unit: ReplayedUnit) -> None:
        self._compute = max(self._compute, self._ready.get(unit.index, 0.0))

    def on_reshard(self, unit: ReplayedUnit) -> None:
        self._used_until[unit.index] = self._compute

    def on_free(self, unit: ReplayedUnit) -> None:
        self._gathers = max(self._gathers, self._used_until.get(unit.index, 0.0))

    def on_reduce(self, unit: ReplayedUnit, place: int) -> None:
        cost = self._costs[unit.index]
        self._compute = max(self._compute, self._buffer_free.get(place, 0.0))
        share = 1 / sum(group.trained for group in unit.groups)  # the groups of a unit are reduced one by one
        ready = max(self._reductions, self._compute, self._gathers if self._is_one_queue else 0.0)
        self._reductions = self._sent(ready, cost.reduce * share)
        done = self._reductions
        if self.setup.replicas > 1:
            done = self._sent(max(self._replication, done), cost.replicate * share)
            self._replication = done
        self._buffer_free[place] = done
        if place == min(index for index, group in enumerate(unit.groups) if group.trained):
            self._sums[1] += cost.reduce
            self._sums[2] += cost.replicate
