"""The order in which units run: known from earlier iterations, or confirmed by all ranks before they send anything.

An iteration is a forward of the model with its backward. Ranks that gather different units at the same time would wait
for each other forever, or mix up parameters of equal size. In the first iteration all ranks compare every step of the
order in a barrier. Later a rank that leaves the known paths notes it in the store of torch.distributed and waits there
for the others, because ranks that stay on the paths enter the collective without asking. Other ranks see that wait like
those in collectives, and it ends early where a missing rank waits for this one elsewhere.
"""

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
from hpcfsdp.hang import events, waits

PATIENCE_S = 600.0  # how long a rank that leaves the known orders waits for the others to do the same
MOST_PATHS = 64
"""Remembered orders. Training and evaluation need a few each; layers skipped at random make a new one in each step."""
_ASK_EVERY_S = (0.001, 0.1)
"""Between two queries of the store, at first and after a second: all ranks query the same one."""
_RANKS_IN_A_WORD = 32  # the store has signed 64-bit counters
_ALIKE = (
    "All ranks must call the same modules in the same order, and equally often: give every rank the same number of "
    "batches, take branches that depend on data on all ranks or on none, and where a module is left out by chance "
    "(layer drop) draw that from a torch.Generator with one seed for all ranks"
)
Event = tuple[str, str]  # "forward", "backward" or "end", and the name of the unit
_END: Event = ("end", "")
_NOTED = {"forward": events.FORWARD, "backward": events.BACKWARD}


@dataclass(eq=False)
class Node:
    """A node in the tree of known orders: what is done after what its parents stand for."""

    event: Event
    depth: int
    digest: str
    parent: "Node | None"
    children: dict[Event, "Node"] = field(default_factory=dict)


class Order:
    """What this iteration has done, compared with what earlier iterations did, and with the other ranks.

    Each rank remembers, as a tree, the orders that all ranks have followed together. A step along a known path costs
    nothing. A model that skips layers at random takes another path in each iteration, so only the latest paths are
    kept. All ranks forget the same ones, since they have followed the same. The diagnosis of hangs asks it, see
    ``waits.register``.
    """

    def __init__(self, comm: Communicator, label: str, number: int = 1, *, confirm: bool) -> None:
        """Begin with nothing known. All ranks of `comm` have to keep the order, of their model with this `number`.

        The `label` of the engine is the same on all ranks, and unlike that of any other. Ranks `confirm` what is new,
        or the caller compares ``digest``.
        """
        self._root = self._at = Node(("begin", ""), 0, "", None)
        self._comm, self._number = comm, number
        self.iterations = 0  # how many have begun
        self._ends: dict[Node, None] = {}  # of the remembered paths, the latest last
        self._confirms = confirm and comm.size > 1
        self._keys: Sequence[str] = ()  # in the store, of what was confirmed last
        self._next: Event | None = None  # being confirmed
        self.key = label
        self.world_ranks: Sequence[int] | None = getattr(comm, "world_ranks", None)
        waits.register(label, self)

    @property
    def digest(self) -> str:
        """A short text, equal on ranks that have done the same since the iteration began."""
        return self._at.digest

    @property
    def step(self) -> str:
        """The iteration, for messages; the same on all ranks, and unlike that of another model."""
        return f"step {self.iterations}" + (f" of model {self._number}" if self._number > 1 else "")

    @property
    def is_at_the_end(self) -> bool:
        """Whether earlier iterations have all ended here."""
        return self._at.children.keys() == {_END}

    def begin(self) -> None:
        """Begin an iteration. Collective over `comm` where the last one ended in a new way."""
        if self._at is not self._root:
            self.note(_END)
        self.forget()
        self.iterations += 1
        events.ring.note(events.PASS, str(self.iterations))

    def note(self, event: Event) -> None:
        """Note that this rank is about to do `event`, as all others. Collective over `comm` where that is new."""
        if event[0] in _NOTED:
            events.ring.note(_NOTED[event[0]], event[1])
        at = self._at
        if event not in at.children:
            if self._confirms:
                self._confirm(event)
            digest = hashlib.blake2b(f"{at.digest} {event}".encode(), digest_size=6).hexdigest()
            at.children[event] = Node(event, at.depth + 1, digest, at)
        self._at = at.children[event]

    def upcoming(self, kind: str) -> str | None:
        """Return the unit that will do `kind` next, if earlier iterations all went on in one way.

        In a backward a unit may compute its forward once more, which does not count. Where another one does, it is that
        one, whose parameters are needed first.
        """
        at = self._at
        recomputes = at.parent is not None and at.parent.event == ("backward", at.event[1])
        in_backward = kind == "backward" and (at.event[0] == "backward" or recomputes)
        while len(at.children) == 1:
            ((known, name), at) = next(iter(at.children.items()))
            if known == kind or (in_backward and known == "forward" and name != self._at.event[1]):
                return name
            if not (in_backward and known == "forward"):
                break
        return None

    def path(self) -> list[str]:
        """Return what was done since the iteration began."""
        found, node = [], self._at
        while node.parent is not None:
            found.append(_describe(node.event))
            node = node.parent
        return found[::-1]

    def forget(self) -> None:
        """End the iteration here. Its path is remembered; the oldest is forgotten if there are too many."""
        end, self._at = self._at, self._root
        if end is self._root:
            return
        self._ends.pop(end, None)
        self._ends[end] = None
        if len(self._ends) > MOST_PATHS:
            node = next(iter(self._ends))
            del self._ends[node]
            while node.parent is not None and not node.children and node not in self._ends:
                del node.parent.children[node.event]
                node = node.parent

    def meet(self, comm: Communicator, label: str, *, following: Event | None = None, flag: bool = False) -> bool:
        """Wait for some or all ranks, which do what `label` says. Return whether one has set `flag`. Collective.

        An error on all ranks names the first difference of their orders, `following` included, or else of labels.
        """
        try:
            return comm.labelled_barrier(label, flag)
        except CrossedCallsError:  # the others are in another call
            raise
        except DifferentCallsError as error:
            path = [*self.path(), *([] if following is None else [_describe(following)])]
            raise self._first_difference(comm.all_gather_object(path)) or error from None

    def called(self, number: tuple[int, int]) -> str | None:
        """Return the label of this rank's event at (iteration, depth), see ``waits.register``."""
        iteration, depth = number
        if iteration != self.iterations:
            return waits.NOTHING_YET if iteration > self.iterations else waits.UNKNOWN
        node = self._at
        if depth > node.depth:
            is_next = self._next is not None and depth == node.depth + 1
            return self._label_of(self._next, node) if is_next else waits.NOTHING_YET
        while node.depth > depth and node.parent is not None:
            node = node.parent
        return self._label_of(node.event, node.parent or node)

    def departed(self) -> set[int]:
        """Return the ranks that have left the program, as far as known."""
        return self._comm.departed() if hasattr(self._comm, "departed") else set()

    def _confirm(self, event: Event) -> None:
        """Wait until all ranks are about to do `event`, which is new. Collective over `comm`."""
        depth = self._at.depth + 1
        text = self._text(event, depth)
        store = _compat.default_store() if self.iterations > 1 else None
        if store is None:
            self.meet(self._comm, text, following=event)
            return
        label = self._label_of(event, self._at)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        arrivals = _Arrivals(store, f"hpcfsdp/order/{self.key}/{self.iterations}/{depth}/{digest}", self._comm, label)
        self._next = event
        try:
            run(arrivals.steps(), label, self._comm.rank, float("inf"), False, self, (self.iterations, depth))
        finally:
            self._next = None
        if self._comm.rank == 0:  # all have reached the new keys, and read the old ones no more
            for key in self._keys:
                store.delete_key(key)
        self._keys = arrivals.keys

    def _text(self, event: Event, depth: int) -> str:
        return f"{_describe(event)} (event {depth} of {self.step})"

    def _label_of(self, event: Event, parent: Node) -> str:
        """Return the name of the wait for what is new; the same on all ranks that reach it, then and later."""
        expected = " or ".join(_describe(known) for known in parent.children if known != event) or "nothing"
        return f"{self._text(event, parent.depth + 1)}, where in earlier steps it reached {expected}"

    def _first_difference(self, paths: Sequence[Sequence[str]]) -> DisagreementError | None:
        """Return the error that names the first place where `paths` of ranks differ; None if they are the same."""
        for rank, other in enumerate(paths):
            for index, (first, second) in enumerate(zip_longest(paths[0], other, fillvalue="nothing more")):
                if first != second:
                    return DisagreementError(
                        f"ranks run modules in different orders: at event {index + 1} of step {self.iterations} rank 0 "
                        f"runs {first}, but rank {rank} runs {second}. {_ALIKE}"
                    ).on_all_ranks()
        return None


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
        words, size = self._words, _RANKS_IN_A_WORD
        return [rank for rank in range(self._comm.size) if not words[rank // size] >> rank % size & 1]

    def _ask(self, word: int, mine: int) -> None:
        self._words[word] = self._store.add(self.keys[word], mine)


def _describe(event: Event) -> str:
    kind, name = event
    return f"the {kind} of {name!r}" if name else f"the {kind} of a step"
