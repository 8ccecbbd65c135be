"""Collectives that failed on one rank: it lets the others know, who may wait for messages that it will not send."""

from __future__ import annotations

import json
from dataclasses import asdict, dataclass

from mpi4py import MPI

from hpcfsdp.errors import CommunicationError, DifferentCallsError

_KEPT = 16
"""Failures that are remembered: this rank may come to the call later than the rank on which it failed."""


@dataclass(frozen=True)
class Failure:
    """What a rank has found to be wrong with a message.

    Attributes:
        sequence: the number of the collective, the same on all ranks; 0 for none.
        rank, peer: the rank that has found it, and the one that sent the message.
        mine, theirs: what the two have called.
        text: what is wrong if both have called the same.
    """

    sequence: int
    rank: int
    peer: int
    mine: str
    theirs: str
    text: str = ""

    def error(self, label: str, rank: int, call: str) -> CommunicationError:
        """What `rank` raises.

        Args:
            label: what it is in, for messages.
            call: what it has called, to be compared with `mine` and `theirs`.
        """
        if self.text:
            where = "" if rank == self.rank else f"failed on rank {self.rank}: "
            return CommunicationError(f"{label} on rank {rank}: {where}{self.text}")
        other, theirs = (self.peer, self.theirs) if call == self.mine else (self.rank, self.mine)
        return DifferentCallsError(f"rank {rank} calls {call}, but rank {other} calls {theirs}")


class Failures:
    """The failures of the collectives of one communicator that others have found."""

    def __init__(self, comm: MPI.Intracomm, tag: int) -> None:
        """Not collective.

        Args:
            tag: of the messages by which ranks let each other know; no others have it.
        """
        self._comm = comm
        self._tag = tag
        self._known: dict[int, Failure] = {}
        self._sent: list[tuple[MPI.Request, bytes]] = []

    def announce(self, failure: Failure) -> None:
        """Not collective. Let all other ranks know."""
        message = json.dumps(asdict(failure)).encode()
        self._sent = [pair for pair in self._sent if not pair[0].Test()]
        for step in range(1, self._comm.size):
            peer = (self._comm.rank + step) % self._comm.size
            self._sent.append((self._comm.Isend([message, MPI.BYTE], dest=peer, tag=self._tag), message))

    def of(self, sequence: int) -> Failure | None:
        """Not collective. What is known to be wrong with a collective, None for nothing."""
        return self._known.get(sequence)

    def listen(self) -> None:
        """Not collective. Take what other ranks have announced."""
        status = MPI.Status()
        while (message := self._comm.Improbe(tag=self._tag, status=status)) is not None:
            content = bytearray(status.Get_count(MPI.BYTE))
            message.Recv([content, MPI.BYTE])
            failure = Failure(**json.loads(content))
            self._known[failure.sequence] = failure
        for sequence in sorted(self._known)[:-_KEPT]:
            del self._known[sequence]
