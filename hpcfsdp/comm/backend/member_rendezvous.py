"""The rendezvous of the members of a new process group, in torch's store."""

from __future__ import annotations

import time
from typing import Any

from hpcfsdp.comm.progress import Steps, run
from hpcfsdp.errors import CommunicationError
from hpcfsdp.hang import departure


def wait_for_members(store: Any, rank: int, ranks: list[int], timeout_s: float) -> None:
    """Collective over `ranks`. Wait until all members of a group are here, and agree on the list of members.

    MPI itself would wait without end for a rank that does not know that it is a member, and would block all other
    collectives meanwhile.
    """
    rendezvous = MemberRendezvous(store, rank, ranks)
    try:
        run(rendezvous.steps(), f"new_group of ranks {ranks}", rank, timeout_s, False, rendezvous)
    except CommunicationError as error:
        rendezvous.end(str(error))
    rendezvous.close()


class MemberRendezvous:
    """Ranks that register in torch's store. A ``Condition`` and an ``Owner`` of progress.py.

    The first rank that knows the outcome stores it. It holds for all ranks, also for those that come later.
    """

    _COMPLETE = "all are here"
    _LONGEST_PAUSE_S = 0.05

    def __init__(self, store: Any, rank: int, ranks: list[int]) -> None:
        self._store = store
        self._ranks = ranks
        self._outcome: str | None = None
        self._next_poll_s = self._pause_s = 0.0
        mine = f"rank {rank} makes a group of ranks {ranks}"
        first = store.compare_set("members", "", mine).decode(errors="replace")
        store.set(f"here/{rank}", "")
        if first.rpartition(" of ")[2] != mine.rpartition(" of ")[2]:
            differ = f"{first}, but {mine}: all members must give the same"
            self.end(differ)
            if self._outcome == self._COMPLETE:  # the others have just finished, without this rank
                self._outcome = differ
        elif store.add("count", 1) == len(ranks):
            self.end(self._COMPLETE)

    def steps(self) -> Steps:
        yield self

    def holds(self) -> bool:
        now_s = time.monotonic()
        if self._outcome is None and now_s >= self._next_poll_s:
            self._pause_s = min(2 * self._pause_s + 1e-4, self._LONGEST_PAUSE_S)  # one store answers all ranks
            self._next_poll_s = now_s + self._pause_s
            if self._store.check(["outcome"]):
                self._outcome = self._store.get("outcome").decode(errors="replace")
        return self._outcome is not None

    def missing(self) -> list[int]:
        return [rank for rank in self._ranks if not self._store.check([f"here/{rank}"])]

    def departed(self) -> set[int]:
        return departure.departed()

    def end(self, outcome: str) -> None:
        """Not collective. Store the outcome, unless one is stored already."""
        self._outcome = self._store.compare_set("outcome", "", outcome).decode(errors="replace")

    def close(self) -> None:
        """Raise the error of the rendezvous. Without one, the last member deletes the keys.

        torch may give another group of the same ranks the name of a destroyed one, and with it the part of the store.
        The list of members stays there, for ranks that come with another list.
        """
        if self._outcome != self._COMPLETE:
            raise CommunicationError(self._outcome)
        if self._store.add("left", 1) == len(self._ranks):
            for key in ("count", "outcome", "left", *(f"here/{rank}" for rank in self._ranks)):
                self._store.delete_key(key)
