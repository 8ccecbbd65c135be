"""Failures of collectives: the rank that finds one informs the others, which may wait for messages from it."""

from __future__ import annotations

import threading
from dataclasses import dataclass

from mpi4py import MPI

from hpcfsdp.errors import CommunicationError, DifferentCallsError

_KEPT = 16
"""Failures that are stored: this rank may come to the call later than the rank on which it failed."""


@dataclass(frozen=True)
class Failure:
    """A message that does not fit the call of the rank that received it.

    Attributes:
        sequence: the number of the collective, the same on all ranks; 0 for none.
        rank, peer: the rank that received the message, and the one that sent it.
        mine, theirs: the calls of the two.
        text: what is wrong, if their calls are the same.
    """

    sequence: int
    rank: int
    peer: int
    mine: str
    theirs: str
    text: str = ""

    def error(self, label: str, rank: int, call: str) -> CommunicationError:
        """The error that `rank` raises.

        Args:
            label: the collective, for messages.
            call: the call of `rank`, to be compared with `mine` and `theirs`.
        """
        if self.text:
            where = "" if rank == self.rank else f"failed on rank {self.rank}: "
            return CommunicationError(f"{label} on rank {rank}: {where}{self.text}")
        other, theirs = (self.peer, self.theirs) if call == self.mine else (self.rank, self.mine)
        return DifferentCallsError(f"rank {rank} calls {call}, but rank {other} calls {theirs}")


class Failures:
    """The failures of the collectives of one communicator, sent to and received from other ranks. Not collective.

    Attributes:
        known: failures that other ranks have found, by the number of the collective.
    """

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        """
        Args:
            tag: of the messages about failures alone.
        """
        self.known: dict[int, Failure] = {}
        self._comm = comm
        self._tag = tag
        self._requests: list[MPI.Request] = []
        self._lock = threading.Lock()  # collectives of one communicator may advance on two threads

    def announce(self, failure: Failure) -> None:
        """Send a failure to all other ranks."""
        with self._lock:
            self._requests = [request for request in self._requests if not request.Test()]
            for step in range(1, self._comm.size):
                peer = (self._comm.rank + step) % self._comm.size
                self._requests.append(self._comm.isend(failure, dest=peer, tag=self._tag))

    def receive(self) -> None:
        """Receive the failures that other ranks have announced."""
        with self._lock:
            while (message := self._comm.improbe(tag=self._tag)) is not None:
                failure = message.recv()
                self.known[failure.sequence] = failure
            for sequence in sorted(self.known)[:-_KEPT]:
                del self.known[sequence]
