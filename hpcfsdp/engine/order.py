"""The order in which units are gathered: remembered, to gather ahead of time, and compared between ranks.

Ranks that gather different units at a time would wait for each other without end, or mix up values of equal size. Each
rank remembers the orders that all ranks have gone through together, as a tree: a step that follows a known path costs
nothing. A new turn is confirmed by all ranks before anything is sent. In the first pass all ranks meet at every turn;
later on a rank that leaves the known paths says so in the store of torch.distributed and waits for the others there,
because those that do not leave it are on their way into the collective already. That wait is one like those of
collectives: others are shown it, and it ends early where a rank that is missing waits for this one elsewhere.

A model that leaves out layers at random takes another path in each step. So the paths that were taken last are
remembered, and no others; all ranks forget the same ones, since they have taken the same.
"""

from __future__ import annotations

import hashlib
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator, waits
from hpcfsdp.comm.progress import Steps, run
from hpcfsdp.errors import CrossedCallsError, DifferentCallsError, DisagreementError

PATIENCE_S = 600.0
"""How long a rank that leaves the known orders waits for the others to do the same."""
_ASK_EVERY_S = (0.001, 0.1)
"""Between two questions to the store, at first and after a second: all ranks ask the same one."""
_RANKS_IN_A_WORD = 32
"""The store has counters of 64 bits, with a sign."""
MOST_PATHS = 64
"""How many orders are remembered: training and evaluation have a few each, layers that are left out at random all."""

Event = tuple[str, str]
"""What a unit does, and its name."""
END: Event = ("end", "")


@dataclass(eq=False)
class _Turn:
    """A place in the tree of known orders."""

    event: Event
    depth: int
    digest: str
    before: _Turn | None
    following: dict[Event, _Turn] = field(default_factory=dict)

    def follow(self, event: Event) -> _Turn:
        digest = hashlib.blake2b(f"{self.digest} {event}".encode(), digest_size=6).hexdigest()
        turn = self.following[event] = _Turn(event, self.depth + 1, digest, self)
        return turn


class _Arrivals:
    """The ranks that have come to a new turn, as the store knows them: a ``Condition``."""

    def __init__(self, store: Any, key: str, comm: Communicator, label: str) -> None:
        """
        Args:
            key: of the turn, unlike that of any other.
            label: what this rank comes to, for a message.
        """
        self.keys = [f"{key}/{word}" for word in range(-(-comm.size // _RANKS_IN_A_WORD))]
        self._store = store
        self._comm = comm
        self._label = label
        self._began_s = self._ask_s = time.monotonic()
        self._words = [0] * len(self.keys)

    def steps(self) -> Steps:
        """Say that this rank has come, and wait for the others."""
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
                f"rank {self._comm.rank} comes to {self._label}; {len(missing)} of {self._comm.size} ranks do not. All "
                "ranks must call the same modules in the same order, and equally often: give every rank the same "
                "number of batches, and take branches that depend on data on all ranks or on none"
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


class Order:
    """What the units of one engine have done in this pass (a forward with its backward), against passes before."""

    def __init__(self, comm: Communicator, label: str, *, confirm: bool) -> None:
        """Not collective.

        Args:
            comm: all ranks that have to keep the same order.
            label: of the engine, the same on all ranks, unlike that of any other.
            confirm: have the ranks confirm each new turn; else it is for others to compare ``digest``.
        """
        self._comm = comm
        self._label = label
        self._confirm = confirm and comm.size > 1
        self._root = self._here = _Turn(("begin", ""), 0, "", None)
        self._ends: dict[_Turn, None] = {}  # of the paths that are remembered, the one taken last at the end
        self._confirmed: Sequence[str] = ()  # the keys in the store that the last new turn was confirmed with
        self._confirming: Event | None = None
        self._passes = 0
        self.key = label
        self.world_ranks: Sequence[int] | None = getattr(comm, "world_ranks", None)
        waits.register(label, self)

    @property
    def digest(self) -> str:
        """A short text that ranks share when they have done the same since the pass began."""
        return self._here.digest

    def begin(self) -> None:
        """Collective where the last pass ended in a new way. Begin a pass."""
        if self._here is not self._root:
            self.note(END)
        self._close()
        self._passes += 1

    def note(self, event: Event) -> None:
        """Collective where the turn is new. This rank is about to do `event`.

        Raises:
            DisagreementError: another rank does something else; both are named.
        """
        known = self._here.following.get(event)
        if known is None:
            if self._confirm:
                self._have_confirmed(event)
            known = self._here.follow(event)
        self._here = known

    def upcoming(self, kind: str) -> str | None:
        """The unit that will do `kind` next, if it is known from passes before."""
        following = self._here.following
        if len(following) != 1:
            return None
        known, name = next(iter(following))
        return name if known == kind else None

    def path(self) -> list[str]:
        """What this rank has done since the pass began."""
        found, turn = [], self._here
        while turn.before is not None:
            found.append(_describe(turn.event))
            turn = turn.before
        return found[::-1]

    def forget(self) -> None:
        """Not collective. Begin anew after a pass that an exception broke off."""
        self._close()

    def _close(self) -> None:
        """Remember the path of this pass, and forget the one that was taken longest ago if there are too many."""
        end, self._here = self._here, self._root
        if end is self._root:
            return
        self._ends.pop(end, None)
        self._ends[end] = None
        if len(self._ends) > MOST_PATHS:
            self._forget_path(next(iter(self._ends)))

    def _forget_path(self, end: _Turn) -> None:
        """Take a path out of the tree, as far as no other one goes along it."""
        del self._ends[end]
        turn = end
        while turn.before is not None and not turn.following and turn not in self._ends:
            del turn.before.following[turn.event]
            turn = turn.before

    def called(self, number: tuple[int, int]) -> str | None:
        """What this rank has come to in a turn of a pass, see ``waits.Member``."""
        step, depth = number
        if step != self._passes:
            return waits.NOTHING_YET if step > self._passes else waits.UNKNOWN
        if depth > self._here.depth:
            is_next = self._confirming is not None and depth == self._here.depth + 1
            return self._label_of(self._confirming, self._here) if is_next else waits.NOTHING_YET
        turn = self._here
        while turn.depth > depth and turn.before is not None:
            turn = turn.before
        return self._label_of(turn.event, turn.before or turn)

    def departed(self) -> set[int]:
        """Not collective. The ranks of which it is known that they have left the program."""
        return self._comm.departed() if hasattr(self._comm, "departed") else set()

    def _text(self, event: Event, depth: int) -> str:
        return f"{_describe(event)} (turn {depth} of step {self._passes})"

    def _label_of(self, event: Event, before: _Turn) -> str:
        """Of the wait for a turn that is new; the same on all ranks that come to it, then and later."""
        expected = " or ".join(_describe(known) for known in before.following if known != event) or "nothing"
        return f"{self._text(event, before.depth + 1)}, where in earlier steps it came to {expected}"

    def _have_confirmed(self, event: Event) -> None:
        depth = self._here.depth + 1
        text = self._text(event, depth)
        store = _compat.default_store() if self._passes > 1 else None
        if store is None:
            self._compare(text)
            return
        label = self._label_of(event, self._here)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        key = f"hpcfsdp/order/{self._label}/{self._passes}/{depth}/{digest}"
        arrivals = _Arrivals(store, key, self._comm, label)
        self._confirming = event
        try:
            steps, number = arrivals.steps(), (self._passes, depth)
            run(steps, label, self._comm.rank, float("inf"), False, self, number)
        finally:
            self._confirming = None
        self._drop_keys(store, arrivals.keys)

    def _drop_keys(self, store: Any, keys: Sequence[str]) -> None:
        """Delete the keys before: who has come to the new ones, as all have, has no more need of them."""
        if self._comm.rank == 0:
            for key in self._confirmed:
                store.delete_key(key)
        self._confirmed = keys

    def _compare(self, text: str) -> None:
        """Collective. Raise on every rank unless all have come to the same."""
        try:
            self._comm.labelled_barrier(text)
        except CrossedCallsError:  # the others are elsewhere
            raise
        except DifferentCallsError as error:
            texts = self._comm.all_gather_object(text)
            rank = next((rank for rank, other in enumerate(texts) if other != texts[0]), 0)
            raised = DisagreementError(
                f"ranks run modules in different orders: rank 0 comes to {texts[0]}, rank {rank} comes to "
                f"{texts[rank]}. All ranks must call the same modules in the same order, and equally often"
            )
            raised.raised_on_all_ranks = True
            raise raised from error


def _describe(event: Event) -> str:
    kind, name = event
    return f"the {kind} of {name!r}" if name else f"the {kind} of a step"
