"""New events in the order of units: ranks confirm them with each other before they send anything.

Ranks that gather different units at the same time would wait for each other forever, or mix up values of equal size. In
the first pass all ranks compare every event in a barrier. Later a rank that leaves the known paths notes it in the
store of torch.distributed and waits there for the others, because ranks that stay on the paths enter the collective
without asking. Other ranks see that wait like those in collectives, and it ends early where a missing rank waits for
this one elsewhere.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from itertools import zip_longest
from typing import Any

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.progress import Steps, run
from hpcfsdp.errors import CrossedCallsError, DifferentCallsError, DisagreementError
from hpcfsdp.hang import waits

PATIENCE_S = 600.0
"""How long a rank that leaves the known orders waits for the others to do the same."""
_ASK_EVERY_S = (0.001, 0.1)
"""Between two queries of the store, at first and after a second: all ranks query the same one."""
_RANKS_IN_A_WORD = 32
"""The store has signed 64-bit counters."""
_ALIKE = (
    "All ranks must call the same modules in the same order, and equally often: give every rank the same number of "
    "batches, take branches that depend on data on all ranks or on none, and where a module is left out by chance "
    "(layer drop) draw that from a torch.Generator with one seed for all ranks"
)
Event = tuple[str, str]
""""forward", "backward" or "end", and the name of the unit."""


@dataclass(eq=False)
class Node:
    """A node in the tree of known orders: an event after those of its parents."""

    event: Event
    depth: int
    digest: str
    parent: Node | None
    children: dict[Event, Node] = field(default_factory=dict)

    def add(self, event: Event) -> Node:
        digest = hashlib.blake2b(f"{self.digest} {event}".encode(), digest_size=6).hexdigest()
        child = self.children[event] = Node(event, self.depth + 1, digest, self)
        return child


class _Arrivals:
    """The ranks that have reached a new event, as bits of counters in the store: a ``Condition``."""

    def __init__(self, store: Any, key: str, comm: Communicator, label: str) -> None:
        self.keys = [f"{key}/{word}" for word in range(-(-comm.size // _RANKS_IN_A_WORD))]
        self._store = store
        self._comm = comm
        self._label = label
        self._began_s = self._ask_s = time.monotonic()
        self._words = [0] * len(self.keys)

    def steps(self) -> Steps:
        """Set this rank's bit, and wait for the others."""
        self._ask(self._comm.rank // _RANKS_IN_A_WORD, 1 << self._comm.rank % _RANKS_IN_A_WORD)
        yield self

    def holds(self) -> bool:
        now_s = time.monotonic()
        waited_s = now_s - self._began_s
        missing = self.missing()
        if missing and now_s >= self._ask_s:
            for word in sorted({rank // _RANKS_IN_A_WORD for rank in missing}):
                self._ask(word, 0)
            self._ask_s = now_s + min(max(_ASK_EVERY_S[0], waited_s / 10), _ASK_EVERY_S[1])
            missing = self.missing()
        if missing and waited_s > PATIENCE_S:
            raise DisagreementError(
                f"rank {self._comm.rank} reached {self._label}; {len(missing)} of {self._comm.size} ranks did not. "
                f"{_ALIKE}"
            )
        return not missing

    def missing(self) -> list[int]:
        return [
            rank
            for rank in range(self._comm.size)
            if not self._words[rank // _RANKS_IN_A_WORD] >> rank % _RANKS_IN_A_WORD & 1
        ]

    def _ask(self, word: int, mine: int) -> None:
        self._words[word] = self._store.add(self.keys[word], mine)


@dataclass
class Position:
    """The last event of this rank, the number of the model, and that of passes that have begun."""

    node: Node
    model: int = 1
    passes: int = 0

    @property
    def step(self) -> str:
        """The pass, for messages."""
        return f"step {self.passes}" + (f" of model {self.model}" if self.model > 1 else "")

    def text(self, event: Event, depth: int) -> str:
        """An event of this pass, for messages."""
        return f"{describe(event)} (event {depth} of {self.step})"

    def path(self) -> list[str]:
        """The events since the pass began."""
        found, node = [], self.node
        while node.parent is not None:
            found.append(describe(node.event))
            node = node.parent
        return found[::-1]


class Confirmation:
    """Compares new events between ranks: a ``waits.Member``. Arguments are those of ``Order``."""

    def __init__(self, comm: Communicator, label: str, position: Position) -> None:
        self._comm = comm
        self._label = label
        self._position = position
        self._keys: Sequence[str] = ()  # in the store, of the last new event
        self._event: Event | None = None  # being confirmed
        self.key = label
        self.world_ranks: Sequence[int] | None = getattr(comm, "world_ranks", None)
        waits.register(label, self)

    def confirm(self, event: Event) -> None:
        """Collective. Wait until all ranks reach the same new event.

        Raises:
            DisagreementError: another rank does something else. It names both.
        """
        at = self._position
        depth = at.node.depth + 1
        text = at.text(event, depth)
        store = _compat.default_store() if at.passes > 1 else None
        if store is None:
            self._compare(event, text)
            return
        label = self._label_of(event, at.node)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        arrivals = _Arrivals(store, f"hpcfsdp/order/{self._label}/{at.passes}/{depth}/{digest}", self._comm, label)
        self._event = event
        try:
            run(arrivals.steps(), label, self._comm.rank, float("inf"), False, self, (at.passes, depth))
        finally:
            self._event = None
        if self._comm.rank == 0:  # all have reached the new keys, and read the old ones no more
            for key in self._keys:
                store.delete_key(key)
        self._keys = arrivals.keys

    def called(self, number: tuple[int, int]) -> str | None:
        """The label of this rank's event at (pass, depth), see ``waits.Member``."""
        step, depth = number
        node, passes = self._position.node, self._position.passes
        if step != passes:
            return waits.NOTHING_YET if step > passes else waits.UNKNOWN
        if depth > node.depth:
            is_next = self._event is not None and depth == node.depth + 1
            return self._label_of(self._event, node) if is_next else waits.NOTHING_YET
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return self._label_of(node.event, node.parent or node)

    def departed(self) -> set[int]:
        """Not collective. The ranks that have left the program, as far as known."""
        return self._comm.departed() if hasattr(self._comm, "departed") else set()

    def _label_of(self, event: Event, parent: Node) -> str:
        """Names the wait for a new event; the same on all ranks that reach it, then and later."""
        expected = " or ".join(describe(known) for known in parent.children if known != event) or "nothing"
        return f"{self._position.text(event, parent.depth + 1)}, where in earlier steps it reached {expected}"

    def _compare(self, event: Event, text: str) -> None:
        """Collective. Raise on every rank unless all have reached the same event."""
        try:
            self._comm.labelled_barrier(text)
        except CrossedCallsError:  # the others are elsewhere
            raise
        except DifferentCallsError as error:
            path = [*self._position.path(), describe(event)]
            raise first_difference(self._comm, path, self._position.passes) or error from None


def first_difference(comm: Communicator, path: list[str], passes: int) -> DisagreementError | None:
    """Collective. The error that names the first event in which ranks differ; None if all have the same.

    All ranks call it whose labels differ in a barrier, be it for a new event or in between.
    """
    paths = comm.all_gather_object(path)
    for rank, other in enumerate(paths):
        for index, (first, second) in enumerate(zip_longest(paths[0], other, fillvalue="nothing more")):
            if first != second:
                error = DisagreementError(
                    f"ranks run modules in different orders: at event {index + 1} of step {passes} rank 0 runs "
                    f"{first}, but rank {rank} runs {second}. {_ALIKE}"
                )
                error.raised_on_all_ranks = True
                return error
    return None


def describe(event: Event) -> str:
    """An event for messages."""
    kind, name = event
    return f"the {kind} of {name!r}" if name else f"the {kind} of a step"
