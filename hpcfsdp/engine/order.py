"""Turns of units that are new: ranks confirm them with each other before anything is sent.

Ranks that gather different units at a time would wait for each other without end, or mix up values of equal size. In
the first pass all ranks compare every turn in a barrier. Later on a rank that leaves the known paths writes so into the
store of torch.distributed and waits there for the others: ranks that do not leave the paths are on their way into the
collective already. Other ranks see that wait as they see those in collectives, and it ends early where a missing rank
waits for this one elsewhere.
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
Event = tuple[str, str]
"""What a unit does, and its name."""


@dataclass(eq=False)
class Turn:
    """A place in the tree of known orders."""

    event: Event
    depth: int
    digest: str
    before: Turn | None
    following: dict[Event, Turn] = field(default_factory=dict)

    def follow(self, event: Event) -> Turn:
        digest = hashlib.blake2b(f"{self.digest} {event}".encode(), digest_size=6).hexdigest()
        turn = self.following[event] = Turn(event, self.depth + 1, digest, self)
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


@dataclass
class Position:
    """Where this rank is.

    Attributes:
        turn: the last one of this pass that it has come to.
        passes: how many have begun.
    """

    turn: Turn
    passes: int = 0

    def text(self, event: Event, depth: int) -> str:
        """An event of this pass, for messages."""
        return f"{describe(event)} (turn {depth} of step {self.passes})"


class Confirmation:
    """Compares turns that are new between ranks: a ``waits.Member``."""

    def __init__(self, comm: Communicator, label: str, position: Position) -> None:
        """Not collective.

        Args:
            comm: all ranks that have to keep the same order.
            label: of the engine, the same on all ranks, unlike that of any other.
            position: of this rank; it moves on.
        """
        self._comm = comm
        self._label = label
        self._position = position
        self._keys: Sequence[str] = ()  # in the store, of the last new turn
        self._event: Event | None = None  # that is being confirmed
        self.key = label
        self.world_ranks: Sequence[int] | None = getattr(comm, "world_ranks", None)
        waits.register(label, self)

    def confirm(self, event: Event) -> None:
        """Collective. All ranks come to the same new turn.

        Raises:
            DisagreementError: another rank does something else; both are named.
        """
        at = self._position
        depth = at.turn.depth + 1
        text = at.text(event, depth)
        store = _compat.default_store() if at.passes > 1 else None
        if store is None:
            self._compare(text)
            return
        label = self._label_of(event, at.turn)
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        arrivals = _Arrivals(store, f"hpcfsdp/order/{self._label}/{at.passes}/{depth}/{digest}", self._comm, label)
        self._event = event
        try:
            run(arrivals.steps(), label, self._comm.rank, float("inf"), False, self, (at.passes, depth))
        finally:
            self._event = None
        if self._comm.rank == 0:  # all have come to the new keys, and need those before no more
            for key in self._keys:
                store.delete_key(key)
        self._keys = arrivals.keys

    def called(self, number: tuple[int, int]) -> str | None:
        """What this rank has come to in a turn of a pass, see ``waits.Member``."""
        step, depth = number
        turn, passes = self._position.turn, self._position.passes
        if step != passes:
            return waits.NOTHING_YET if step > passes else waits.UNKNOWN
        if depth > turn.depth:
            is_next = self._event is not None and depth == turn.depth + 1
            return self._label_of(self._event, turn) if is_next else waits.NOTHING_YET
        while turn.depth > depth and turn.before is not None:
            turn = turn.before
        return self._label_of(turn.event, turn.before or turn)

    def departed(self) -> set[int]:
        """Not collective. The ranks that are known to have left the program."""
        return self._comm.departed() if hasattr(self._comm, "departed") else set()

    def _label_of(self, event: Event, before: Turn) -> str:
        """Names the wait for a new turn; the same on all ranks that come to it, then and later."""
        expected = " or ".join(describe(known) for known in before.following if known != event) or "nothing"
        return f"{self._position.text(event, before.depth + 1)}, where in earlier steps it came to {expected}"

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


def describe(event: Event) -> str:
    """An event for messages."""
    kind, name = event
    return f"the {kind} of {name!r}" if name else f"the {kind} of a step"
