"""The order in which units are gathered: remembered, to gather ahead of time, and compared between ranks.

Ranks that gather different units at a time would wait for each other without end, or mix up values of equal size. Each
rank remembers the orders that all ranks have gone through together, as a tree: a step that follows a known path costs
nothing. A new turn is confirmed by all ranks before anything is sent. In the first pass all ranks meet at every turn;
later on a rank that leaves the known paths says so in the store of torch.distributed and waits for the others there,
because those that do not leave it are on their way into the collective already.

A model that leaves out layers at random takes another path in each step. So the paths that were taken last are
remembered, and no others; all ranks forget the same ones, since they have taken the same.
"""

from __future__ import annotations

import hashlib
import logging
import time
from dataclasses import dataclass, field
from typing import Any

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.errors import CrossedCallsError, DifferentCallsError, DisagreementError

log = logging.getLogger("hpcfsdp.order")

PATIENCE_S = 600.0
"""How long a rank that leaves the known orders waits for the others to do the same."""
_WARN_AFTER_S = 5.0
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
        self._confirmed: str | None = None  # the key in the store that the last new turn was confirmed with
        self._passes = 0

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
            found.append(_told(turn.event))
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

    def _have_confirmed(self, event: Event) -> None:
        text = f"{_told(event)} (turn {self._here.depth + 1} of step {self._passes})"
        store = _compat.default_store() if self._passes > 1 else None
        if store is None:
            self._compare(text)
            return
        digest = hashlib.blake2b(text.encode(), digest_size=16).hexdigest()
        key = f"hpcfsdp/order/{self._label}/{self._passes}/{self._here.depth}/{digest}"
        store.add(key, 1)
        began_s, warned = time.monotonic(), False
        while True:
            arrived = store.add(key, 0)
            if arrived >= self._comm.size:
                self._drop_key(store, key)
                return
            waited_s = time.monotonic() - began_s
            expected = " or ".join(map(_told, self._here.following)) or "nothing"
            said = (
                f"rank {self._comm.rank} comes to {text}, where in earlier steps it came to {expected}; "
                f"{self._comm.size - arrived} of {self._comm.size} ranks do not"
            )
            if waited_s > PATIENCE_S:
                raise DisagreementError(
                    f"{said}. All ranks must call the same modules in the same order, and equally often: give every "
                    "rank the same number of batches, and take branches that depend on data on all ranks or on none"
                )
            if waited_s > _WARN_AFTER_S and not warned:
                log.warning("%s yet", said)
                warned = True
            time.sleep(0.001)

    def _drop_key(self, store: Any, key: str) -> None:
        """Delete the key before: who has come to the new one, as all have, has no more need of it."""
        if self._comm.rank == 0 and self._confirmed is not None:
            store.delete_key(self._confirmed)
        self._confirmed = key

    def _compare(self, text: str) -> None:
        """Collective. Raise on every rank unless all have come to the same."""
        try:
            self._comm.meet(text)
        except CrossedCallsError:  # the others are elsewhere
            raise
        except DifferentCallsError as error:
            texts = self._comm.all_gather_object(text)
            rank = next((rank for rank, other in enumerate(texts) if other != texts[0]), 0)
            raised = DisagreementError(
                f"ranks run modules in different orders: rank 0 comes to {texts[0]}, rank {rank} comes to "
                f"{texts[rank]}. All ranks must call the same modules in the same order, and equally often"
            )
            raised.collective = True
            raise raised from error


def _told(event: Event) -> str:
    kind, name = event
    return f"the {kind} of {name!r}" if name else f"the {kind} of a step"
