"""Whether ranks wait for each other in a circle: what each of them put on its streams, joined into one graph.

A trace is what one rank did, in the order in which its program did it (``Step``). An operation on a device starts when
the program has put it there, all before it on its stream has ended, and all before it on its hardware queue has
started: CUDA has few such queues, onto which it maps streams, and one whose first entry cannot start holds up the
others. A collective ends when it has started on all ranks of its group. Each of these is a necessity, so there is a
deadlock if and only if the graph has a cycle.
"""

from __future__ import annotations

import itertools
from collections import defaultdict, deque
from collections.abc import Callable, Hashable, Sequence
from typing import NamedTuple

HOST = "host"
"""The stream of the program: what stands there holds it up."""


class Group(NamedTuple):
    """A group as all of its ranks know it."""

    name: str
    ranks: tuple[int, ...]


class Step(NamedTuple):
    """One thing that a program does.

    Attributes:
        kind: "kernel", "record" or "wait" (an event), "collective", or "drain" (the program waits for all streams).
        stream: on which; ``HOST`` for what the program waits for itself.
        key: of the event, which is recorded once on its rank; or the ``Group``.
        label: of a collective, alike on all ranks; for messages otherwise.
    """

    kind: str
    stream: Hashable
    key: Hashable = None
    label: str = ""

    def __str__(self) -> str:
        where = "the program" if self.stream == HOST else f"stream {self.stream}"
        if self.kind == "collective":
            return f"{where}: {self.label} of {self.key.name}"
        if self.kind == "wait":
            return f"{where} waits for an event" + (f" ({self.label})" if self.label else "")
        return f"{where}: {self.kind}" + (f" of {self.label}" if self.label else "")


Trace = Sequence[Step]
Node = tuple[int, int, str]  # rank, place in its trace, and "begin", "start" or "end"


def own_queues(stream: Hashable) -> Hashable:
    """Each stream has a hardware queue of its own."""
    return stream


def one_queue(_stream: Hashable) -> Hashable:
    """All streams of a device share one, as with ``CUDA_DEVICE_MAX_CONNECTIONS=1``."""
    return 0


def difference_of_order(traces: Sequence[Trace]) -> str | None:
    """The first difference of what two ranks call, over all groups that they share; None if there is none.

    Kernels of several communicators at a time may hold each other up, so one order has to hold for all of them.
    """
    calls = [[(step.key, step.label) for step in trace if step.kind == "collective"] for trace in traces]
    for one, other in itertools.combinations(range(len(traces)), 2):
        mine, theirs = ([call for call in calls[rank] if {one, other} <= set(call[0].ranks)] for rank in (one, other))
        for place, (first, second) in enumerate(itertools.zip_longest(mine, theirs)):
            if first != second:
                what = [f"{call[1]!r} of {call[0].name}" if call else "nothing more" for call in (first, second)]
                return f"call {place} that ranks {one} and {other} share: {what[0]}, but {what[1]}"
    return None


def problem(traces: Sequence[Trace]) -> str | None:
    """What may have ranks wait for ever on some device; None if nothing can.

    Here every rank waits for the end of each step before the next one. On any device, whatever its queues and whatever
    its driver waits for, a step waits for earlier ones of its rank and for the same calls of others: what comes to its
    end in turn does so there too.
    """
    in_turn = [[each for step in trace for each in (step, Step("drain", HOST))] for trace in traces]
    found = difference_of_order(traces)
    if found is None and (chain := cycle(in_turn)) is not None:
        found = "ranks that do one thing after the other wait in a circle:\n" + "\n".join(chain)
    return found


def cycle(traces: Sequence[Trace], queue_of: Callable[[Hashable], Hashable] = own_queues) -> list[str] | None:
    """The chain of waits that ends where it began, one line for each; None if all ranks come to their end.

    Args:
        queue_of: the hardware queue of a stream.

    Raises:
        ValueError: something waits for an event that is recorded nowhere.
    """
    if _all_come_to_their_end(traces, queue_of):  # a hundred times as fast as the graph
        return None
    needs = _needs(traces, queue_of)
    followers: dict[Node, list[Node]] = defaultdict(list)
    left = {}
    for node, before in needs.items():
        left[node] = len(before)
        for each in before:
            followers[each].append(node)
    ready = [node for node, count in left.items() if not count]
    while ready:
        for follower in followers[ready.pop()]:
            left[follower] -= 1
            if not left[follower]:
                ready.append(follower)
    stuck = {node for node, count in left.items() if count}
    assert stuck
    at, seen = min(stuck), []
    while at not in seen:
        seen.append(at)
        at = next(node for node in needs[at] if node in stuck or node not in needs)
        if at not in needs:
            rank, _, what = at
            return [f"rank {rank} never calls {what}", *_lines(traces, seen[::-1])]
    return _lines(traces, seen[seen.index(at) :])


class _Rank:
    """A rank on its way through its trace.

    Attributes:
        trace: its steps.
        at: the place of the program in it.
        streams: by stream, the places of what it has put there and has not ended.
        queues: by hardware queue, the places of what has not started.
        recorded: the events that have come.
    """

    def __init__(self, trace: Trace, queue_of: Callable[[Hashable], Hashable]) -> None:
        self.trace, self.at = trace, 0
        self._numbers, self._queue_of = _numbered(trace), queue_of
        self.streams: dict[Hashable, deque[int]] = defaultdict(deque)
        self.queues: dict[Hashable, deque[int]] = defaultdict(deque)
        self.recorded: set[Hashable] = set()

    def advance(self, started: dict[tuple[Hashable, int], set[int]], rank: int) -> bool:
        """Go as far as possible. Return whether that was anywhere."""
        before, moved = self.at, False
        while self.at < len(self.trace):
            step = self.trace[self.at]
            if step.stream == HOST:
                moved |= self._drain(started, rank)
                if not self._has_ended(self.at, started, rank):
                    break
            else:
                self.streams[step.stream].append(self.at)
                self.queues[self._queue_of(step.stream)].append(self.at)
            self.at += 1
        return self._drain(started, rank) or moved or self.at > before

    def _drain(self, started: dict[tuple[Hashable, int], set[int]], rank: int) -> bool:
        moved, again = False, True
        while again:
            again = False
            for stream, places in self.streams.items():
                queue = self.queues[self._queue_of(stream)]
                while places:
                    place = places[0]
                    waits_in_queue = bool(queue) and queue[0] <= place
                    if waits_in_queue and queue[0] != place:
                        break
                    ended = self._has_ended(place, started, rank)
                    if waits_in_queue and (ended or self.trace[place].kind != "wait"):
                        queue.popleft()
                        again = True
                    if not ended:
                        break
                    places.popleft()
                    again = True
            moved |= again
        return moved

    def _has_ended(self, place: int, started: dict[tuple[Hashable, int], set[int]], rank: int) -> bool:
        step = self.trace[place]
        if step.kind == "record":
            self.recorded.add(step.key)
        elif step.kind == "wait":
            return step.key in self.recorded
        elif step.kind == "drain":
            return not any(self.streams.values())
        elif step.kind == "collective":
            here = started[self._numbers[place]]
            here.add(rank)
            return len(here) == len(step.key.ranks)
        return True


def _all_come_to_their_end(traces: Sequence[Trace], queue_of: Callable[[Hashable], Hashable]) -> bool:
    ranks = [_Rank(trace, queue_of) for trace in traces]
    started: dict[tuple[Hashable, int], set[int]] = defaultdict(set)
    while any(each.advance(started, rank) for rank, each in enumerate(ranks)):
        pass
    return all(each.at == len(each.trace) and not any(each.streams.values()) for each in ranks)


def _lines(traces: Sequence[Trace], nodes: Sequence[Node]) -> list[str]:
    lines = [f"rank {rank}, {place}: {traces[rank][place]}" for rank, place, _ in nodes]
    return [line for place, line in enumerate(lines) if place == 0 or lines[place - 1] != line]


def _needs(traces: Sequence[Trace], queue_of: Callable[[Hashable], Hashable]) -> dict[Node, list[Node]]:
    """For each node, the nodes that come before it."""
    numbered = [_numbered(trace) for trace in traces]
    places: dict[tuple[Hashable, int], dict[int, int]] = defaultdict(dict)  # of each call of a group, by rank
    for rank, calls in enumerate(numbered):
        for place, call in calls.items():
            places[call][rank] = place
    needs: dict[Node, list[Node]] = {}
    for rank, trace in enumerate(traces):
        last: dict[tuple[str, Hashable], Node] = {}  # of each stream and each hardware queue
        recorded: dict[Hashable, Node] = {}
        program: Node | None = None
        for place, step in enumerate(trace):
            begin, start, end = ((rank, place, part) for part in ("begin", "start", "end"))
            needs[begin] = [program] if program else []
            needs[start], needs[end] = [begin], [start]
            if step.kind == "wait":
                if step.key not in recorded:
                    raise ValueError(f"rank {rank}, {place}: {step}, which is recorded nowhere")
                needs[end].append(recorded[step.key])
            elif step.kind == "drain":
                needs[end] += [node for (kind, _), node in last.items() if kind == "stream"]
            elif step.kind == "collective":
                calls, never = places[numbered[rank][place]], f"{step.label} of {step.key.name}"
                for each in step.key.ranks:
                    needs[end].append((each, calls[each], "start") if each in calls else (each, -1, never))
            if step.stream == HOST:
                program = end
                continue
            program, stream, queue = begin, ("stream", step.stream), ("queue", queue_of(step.stream))
            needs[start] += [last[key] for key in (stream, queue) if key in last]
            # A wait leaves its queue when the event has come, everything else when it has started.
            last[stream], last[queue] = end, end if step.kind == "wait" else start
            if step.kind == "record":
                recorded[step.key] = end
    return needs


def _numbered(trace: Trace) -> dict[int, tuple[Hashable, int]]:
    """The collectives of a rank: for the place of each its group, and its number there."""
    counts: dict[Hashable, int] = defaultdict(int)
    found = {}
    for place, step in enumerate(trace):
        if step.kind == "collective":
            found[place] = step.key, counts[step.key]
            counts[step.key] += 1
    return found
