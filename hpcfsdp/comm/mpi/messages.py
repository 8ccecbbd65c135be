"""The messages of one collective, and the mismatches on other ranks that end it."""

from __future__ import annotations

import copy
from collections import deque
from collections.abc import Sequence
from typing import Any

import torch
from mpi4py import MPI

from hpcfsdp.comm.mpi.matching import Envelope, MessageMatcher, Mismatch, Mismatches, Receive, abandoned
from hpcfsdp.comm.progress import Condition
from hpcfsdp.errors import CommunicationError

_POLLED_RECEIVES = 8
"""Incomplete receives that a rank polls at a time."""
_POLLED_FAILURES = 64
"""Polls in vain after which a rank asks whether the call has failed on another rank."""


class MpiCall:
    """One collective of one communicator, or one message to or from another rank.

    Attributes:
        rank, size: of this rank among `ranks`, and their number.
        ranks: those that take part, as the communicator numbers them.
        label: describes the call in errors.
        envelope: of its messages.
    """

    __slots__ = ("envelope", "label", "matcher", "mismatches", "rank", "ranks", "size")

    def __init__(
        self,
        matcher: MessageMatcher,
        mismatches: Mismatches,
        label: str,
        tag: int,
        sequence: int = 0,
        *,
        expected: str | None = None,
        within: str | None = None,
    ) -> None:
        """
        Args:
            label: the same on all ranks.
            sequence: the number of the collective, the same on all ranks; 0 for calls that are not counted.
            expected: for a message between two ranks, what they must have in common; otherwise the label is compared.
            within: the label with the public call that this rank is in. That of other ranks may differ: a rank that has
                no more data takes part in the collectives of a backward without having one.
        """
        self.rank = matcher.rank
        self.size = matcher.size
        self.ranks: Sequence[int] = range(matcher.size)
        self.matcher = matcher
        self.mismatches = mismatches
        self.label = within or label
        self.envelope = Envelope(self.rank, tag, sequence, expected or self.label, expected or label, expected)

    def among(self, ranks: Sequence[int]) -> MpiCall:
        """The part of this call that only `ranks` take part in, this rank among them."""
        part = copy.copy(self)
        part.rank, part.size = ranks.index(self.rank), len(ranks)
        part.ranks = [self.ranks[rank] for rank in ranks]
        return part

    def check_mismatches(self, polls: int) -> None:
        """Not collective. Raise the mismatch that another rank has found in this collective.

        Args:
            polls: how often this rank has polled what it waits for.
        """
        sequence = self.envelope.sequence
        if not sequence:
            return
        if polls % _POLLED_FAILURES == 0:
            self.mismatches.receive()
        mismatch = self.mismatches.known.get(sequence)
        if mismatch is not None:
            raise self.error(mismatch)

    def error(self, mismatch: Mismatch) -> CommunicationError:
        return mismatch.error(self.label, self.rank, self.envelope.sent_label)


class Requests:
    """Sends and receives of one call. A ``Condition`` of progress.py that holds when all are complete."""

    def __init__(self, call: MpiCall) -> None:
        self.source: int | None = None
        """The rank that sent the last message."""
        self._call = call
        self._matcher = call.matcher
        self._receives: deque[Receive] = deque()
        self._mismatch: Mismatch | None = None
        self._polls = 0
        # request, rank, and the memory that it reads, which must exist until the request is complete
        self._sends: list[tuple[MPI.Request, int, Any]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Send a tensor. It must not change until all requests are complete."""
        to = self._call.ranks[to]
        self._sends += [(request, to, read) for request, read in self._matcher.send(self._call.envelope, tensor, to)]

    def recv(self, tensor: torch.Tensor, source: int | None) -> None:
        """Receive a tensor from a rank, from any if `source` is None."""
        receive = Receive(self._call.envelope, tensor, None if source is None else self._call.ranks[source])
        self._receives.append(receive)
        self._matcher.post(receive)

    def holds(self) -> bool:
        try:
            is_complete = self._test()
        except MPI.Exception as error:
            self.cancel()
            where = f"{self._call.label} on rank {self._call.rank}"
            raise CommunicationError(f"{where}: {error.Get_error_string()}") from None
        if not is_complete:
            self._polls += 1
            try:
                self._call.check_mismatches(self._polls)
            except CommunicationError:
                self.cancel()
                raise
        elif self._mismatch is not None:
            raise self._call.error(self._mismatch)
        return is_complete

    def cancel(self) -> None:
        """Receive nothing more, and leave sends pending."""
        for receive in self._receives:
            self._matcher.cancel(receive)
        self._receives.clear()
        abandoned.extend(self._sends)
        self._sends.clear()

    def __del__(self) -> None:
        if self._receives or self._sends:
            self.cancel()

    def missing(self) -> list[int]:
        unsent = {rank for request, rank, _ in self._sends if not request.Get_status()}
        awaited = [receive.source for receive in self._receives if not self._matcher.test(receive)]
        return sorted(unsent.union(rank for rank in awaited if rank is not None))

    def _test(self) -> bool:
        """Whether all requests are complete."""
        misses = 0
        while misses < min(len(self._receives), _POLLED_RECEIVES):
            receive = self._receives[0]
            if not self._matcher.test(receive):
                self._receives.rotate(-1)
                misses += 1
                continue
            self._receives.popleft()
            self.source = receive.source
            if receive.mismatch is not None:
                self._fail(receive.mismatch)
        if self._receives:
            return False
        while self._sends:  # any test advances all messages, so one at a time is enough
            if not self._sends[-1][0].Test():
                return False
            self._sends.pop()
        return True

    def _fail(self, mismatch: Mismatch) -> None:
        self._mismatch = self._mismatch or mismatch
        if mismatch.sequence:
            self.cancel()
            self._call.mismatches.announce(mismatch)


class UnlessFailed:
    """A ``Condition`` that also raises where the call has failed on another rank. See ``MpiCall.check_mismatches``."""

    def __init__(self, call: MpiCall, condition: Condition) -> None:
        self._call = call
        self._condition = condition
        self._polls = 0

    def holds(self) -> bool:
        if self._condition.holds():
            return True
        self._polls += 1
        self._call.check_mismatches(self._polls)
        return False

    def missing(self) -> Sequence[int]:
        return self._condition.missing()
