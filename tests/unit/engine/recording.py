"""Queues that prove, without a GPU, that no wait is missing: every access to memory is checked with vector clocks.

Work is done where it stands, as on a CPU, but it is *ordered* only as a GPU would order it: within its queue, after
what the program had done when it was put there, and after the events that its queue has waited for. Two accesses to
the same memory, one of them a write, that are not ordered are a race, whatever the values were this time. The method
is that of vector clocks (C. Fidge, 1988), as race detectors use it; see docs/developers/streams.md.
"""

from __future__ import annotations

import functools
import sys
from collections import Counter
from collections.abc import Callable, Iterable
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from hpcfsdp.engine.context import GradBuffer, Reductions
from hpcfsdp.engine.streams import OWN_STREAMS, Begin, Stream, Wait
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.gradient import ShardedGrad

Place = tuple[int, str]
"""Memory by name: its owner, and which part of it."""

Clock = dict[Stream, int]
"""How much of each queue has been done for certain."""

POOLS = {"values": Stream.GATHER, "grad": Stream.COMPUTE, "between": Stream.REDUCE}
"""Parts with memory that comes and goes, and the queue on which it is allocated."""


class Site(NamedTuple):
    """A wait in the source; `why` is None for ``drain``."""

    why: Wait | None
    queue: Stream
    where: str

    def __str__(self) -> str:
        return f"{self.queue.name} waits at {self.where} ({self.why.name if self.why else 'drain'})"


@dataclass(frozen=True)
class Event:
    """Everything up to some place in a queue is done."""

    clock: Clock


@dataclass(frozen=True)
class Access:
    """Something that was done with memory.

    Attributes:
        verb: "reads", "writes" or "frees".
        place: the name by which the memory was used.
        clock: what is certain to have been done before, itself included.
        where: in the source.
    """

    queue: Stream
    verb: str
    place: Place
    clock: Clock
    where: str

    def __str__(self) -> str:
        owner, part = self.place
        return f"{self.queue.name} {self.verb} {part!r} of {owner} at {self.where}"

    def is_before(self, other: Access) -> bool:
        return self.clock[self.queue] <= other.clock[self.queue]


class Race(NamedTuple):
    """Two accesses to the same memory that may come in either order, or at a time; or one to memory that is free."""

    first: Access | None
    second: Access

    def __str__(self) -> str:
        if self.first is None:
            return f"{self.second}, and nothing has been written there since it was free"
        return f"{self.second}, which nothing puts after: {self.first}"


class RaceError(AssertionError):
    """A race, raised where its second access is."""


@dataclass
class _Memory:
    """What has been done with one piece of memory since it was last written; one read of each queue is enough."""

    write: Access | None = None
    reads: dict[Stream, Access] = field(default_factory=dict)


class RecordingStreams:
    """Queues that do everything at once, and collect races.

    Memory of parts that come and go (``POOLS``) is modelled as a caching allocator has it: who writes a place first
    gets the memory that was freed last. So memory that is read under one name and written under another is a race, too.
    What is allocated on COMPUTE may go to anything that the module computes: freeing it counts as a write of COMPUTE.

    Attributes:
        races: found so far.
        sites: the waits that were come to, and how often.
        pieces: how many pieces of memory each part that comes and goes has needed.
        current: the queue that runs work now; COMPUTE when none does.
    """

    overlap = True

    def __init__(self, *, ignore: Callable[[Site], bool] | None = None, raises: bool = False) -> None:
        """
        Args:
            ignore: waits that are not done.
            raises: raise ``RaceError`` at the first race.
        """
        self.races: list[Race] = []
        self.sites: Counter[Site] = Counter()
        self.pieces: Counter[str] = Counter()
        self.current = Stream.COMPUTE
        self._ignore = ignore or (lambda site: False)
        self._raises = raises
        self._clocks: dict[Stream, Clock] = {queue: dict.fromkeys(Stream, 0) for queue in Stream}
        self._memory: dict[Place, _Memory] = {}
        self._free: dict[str, list[_Memory]] = {part: [] for part in POOLS}

    def launch(
        self,
        queue: Stream,
        begin: Begin,
        finish: Callable[[], None] | None = None,
        *,
        label: str = "",
        reads: Iterable[Place] = (),
        writes: Iterable[Place] = (),
    ) -> Event:
        self.touch(queue, reads=reads, writes=writes)
        with self._doing(queue):
            work = begin(False)
            if work is not None:
                work.wait()
            if finish is not None:
                finish()
        return self.record(queue)

    def record(self, queue: Stream) -> Event:
        return Event(dict(self._issue(queue)))

    def wait(self, queue: Stream, event: Event | None, why: Wait) -> None:
        self._wait(Site(why, queue, where()), event)

    def proceed(self) -> None:
        """Work goes on by itself."""

    def refuse_capture(self, what: str) -> None:
        """There are no graphs."""

    def touch(self, queue: Stream, *, reads: Iterable[Place] = (), writes: Iterable[Place] = ()) -> None:
        clock, at = dict(self._issue(queue)), where()
        for place in reads:
            self._check(Access(queue, "reads", place, clock, at))
        for place in writes:
            self._check(Access(queue, "writes", place, clock, at))

    def free(self, *places: Place) -> None:
        at = where()
        for place in places:
            if place not in self._memory:
                continue
            owner = POOLS[place[1]]
            if owner is Stream.COMPUTE:
                self._check(Access(owner, "frees", place, dict(self._issue(owner)), at))
            self._free[place[1]].append(self._memory.pop(place))

    def drain(self) -> None:
        site = Site(None, Stream.COMPUTE, where())
        for queue in OWN_STREAMS:
            self._wait(site, self.record(queue))

    def _wait(self, site: Site, event: Event | None) -> None:
        self.sites[site] += 1
        clock = self._issue(site.queue)
        if event is not None and not self._ignore(site):
            _join(clock, event.clock)

    def _issue(self, queue: Stream) -> Clock:
        """Put something on a queue, which is after all that the program has done. Returns the queue's clock."""
        program, clock = self._clocks[Stream.HOST], self._clocks[queue]
        program[Stream.HOST] += 1
        if queue is not Stream.HOST:
            _join(clock, program)
            clock[queue] += 1
        return clock

    @contextmanager
    def _doing(self, queue: Stream) -> Any:
        before, self.current = self.current, queue
        try:
            yield
        finally:
            self.current = before

    def _check(self, access: Access) -> None:
        memory = self._memory_of(access)
        earlier = [] if memory.write is None else [memory.write]
        if access.verb != "reads":
            earlier += memory.reads.values()
        for before in earlier:
            if not before.is_before(access):
                self._found(Race(before, access))
        if access.verb == "reads":
            memory.reads[access.queue] = access
        else:
            memory.write = access
            memory.reads = {}

    def _memory_of(self, access: Access) -> _Memory:
        memory, part = self._memory.get(access.place), access.place[1]
        if memory is not None:
            return memory
        memory = _Memory()
        if part in POOLS:
            if access.verb != "writes":
                self._found(Race(None, access))
            if self._free[part]:
                memory = self._free[part].pop()
            else:
                self.pieces[part] += 1
        self._memory[access.place] = memory
        return memory

    def _found(self, race: Race) -> None:
        self.races.append(race)
        if self._raises:
            raise RaceError(str(race))


def declare_accesses(streams: RecordingStreams, patch: Any) -> None:
    """Have the engine's objects declare to `streams` what memory they use.

    Args:
        patch: a ``pytest.MonkeyPatch``.
    """
    gathered: set[FlatParam] = set()
    slots: dict[ShardedGrad, GradBuffer] = {}

    def values_of(flat: FlatParam) -> Place:
        return id(flat), "values"

    def buffer_of(grad: ShardedGrad) -> Place:
        return id(slots[grad]), "grad"

    def shard_of(grad: ShardedGrad) -> Place:
        return id(grad.params), "shard grad"

    def gather(flat: FlatParam, _async_op: bool) -> None:
        gathered.add(flat)
        streams.touch(Stream.GATHER, reads=[(id(flat), "shard")], writes=[values_of(flat)])

    def bind(flat: FlatParam) -> None:
        if not flat.stays_gathered:
            streams.touch(Stream.COMPUTE, reads=[values_of(flat)])

    def unbind(flat: FlatParam) -> None:
        if flat in gathered:
            gathered.remove(flat)
            streams.touch(Stream.COMPUTE, reads=[values_of(flat)])

    def release(slot: GradBuffer) -> None:
        if slot.in_use is not None and slot.memory is None:
            streams.free((id(slot), "grad"))

    def store(grad: ShardedGrad, _used: Any) -> None:
        queue = Stream.HOST if grad.params.is_offloaded else Stream.COMPUTE
        streams.touch(queue, reads=[shard_of(grad)], writes=[shard_of(grad)])

    def write_buffer(grad: ShardedGrad, *_buffer: Any) -> None:
        streams.touch(Stream.COMPUTE, writes=[buffer_of(grad)])

    def reduce(grad: ShardedGrad, _label: str, _async_op: bool) -> None:
        streams.touch(Stream.REDUCE, reads=[buffer_of(grad)], writes=[shard_of(grad)])

    before = functools.partial(_declare_before, patch)
    before(FlatParam, "gather", gather)
    before(FlatParam, "bind", bind)
    before(FlatParam, "unbind", unbind)
    before(FlatParam, "free", lambda flat: streams.free(values_of(flat)))
    before(Reductions, "_begin", lambda _queue, grad, slot: slots.update({grad: slot}))
    before(GradBuffer, "release", release)
    before(ShardedGrad, "begin", write_buffer)
    before(ShardedGrad, "complete", write_buffer)
    before(ShardedGrad, "reduce", reduce)
    before(ShardedGrad, "store", store)
    _declare_replicas(streams, before)


def _declare_replicas(streams: RecordingStreams, before: Callable[..., None]) -> None:
    """Declare what REDUCE writes for REPLICATE to read, in memory of its own."""
    between: list[Place] = []

    def reduce(grad: ShardedGrad, _label: str, _async_op: bool) -> None:
        if grad.has_replicas:
            between.append((id(grad), "between"))
            streams.touch(Stream.REDUCE, writes=between[-1:])

    def reduce_over_replicas(grad: ShardedGrad, _label: str) -> None:
        streams.touch(Stream.REPLICATE, reads=[(id(grad), "between")])

    def release(_reductions: Reductions) -> None:
        streams.free(*between)
        between.clear()

    before(ShardedGrad, "reduce", reduce)
    before(ShardedGrad, "reduce_over_replicas", reduce_over_replicas)
    before(Reductions, "_free_between", lambda _reductions: streams.free(between.pop(0)))
    before(Reductions, "release", release)


def _declare_before(patch: Any, owner: type, name: str, declare: Callable[..., Any]) -> None:
    """Have a method `declare` what it will do."""
    original = getattr(owner, name)

    def declared(self: Any, *args: Any, **kwargs: Any) -> Any:
        declare(self, *args)
        return original(self, *args, **kwargs)

    patch.setattr(owner, name, declared)


def _join(clock: Clock, other: Clock) -> None:
    for queue, done in other.items():
        clock[queue] = max(clock[queue], done)


RECORDS_ACCESSES = True
"""Messages pass over places in files that set this: nothing is done there but recording."""


def where() -> str:
    """Where in the source something is done, as far as it is not about recording."""
    frame = sys._getframe(1)
    while frame.f_back is not None and _is_about_others(frame.f_globals):
        frame = frame.f_back
    return f"{Path(frame.f_code.co_filename).name}:{frame.f_lineno} {frame.f_code.co_name}"


def _is_about_others(module: dict[str, Any]) -> bool:
    return "RECORDS_ACCESSES" in module or module.get("__name__", "").split(".")[0] in ("torch", "contextlib")
