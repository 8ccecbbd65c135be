"""Bytes of tensors as MPI messages between two ranks."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from hpcfsdp.errors import CommunicationError

# Moving bytes needs no more of a dtype than its size; wide words keep the element count below MPI's 2**31.
_WORDS = ((8, MPI.INT64_T), (4, MPI.INT32_T), (2, MPI.INT16_T), (1, MPI.INT8_T))
_MAX_COUNT = 2**31 - 1

_abandoned: list[Any] = []
"""What a collective that failed has left under way: MPI may read and write these tensors until the program ends."""


def message(tensor: torch.Tensor) -> list[Any]:
    """The tensor's bytes, as mpi4py takes a buffer."""
    nbytes = tensor.numel() * tensor.element_size()
    size, word = next((size, word) for size, word in _WORDS if nbytes % size == 0)
    if nbytes // size > _MAX_COUNT:
        raise CommunicationError(
            f"one message of {nbytes} bytes ({tensor.numel()} x {tensor.dtype}) is over MPI's count limit: "
            "wrap the model in smaller units"
        )
    # Not tensor.numpy(): that marks the storage as shared, and a shared storage can never be freed by resizing it.
    return [MPI.buffer.fromaddress(tensor.data_ptr(), nbytes), nbytes // size, word]


class Mail:
    """Messages under way, sent and received. A ``Condition`` of progress.py that holds when all are through."""

    def __init__(self, comm: MPI.Intracomm, label: str, tag: int) -> None:
        self.source: int | None = None
        """The rank that the last message came from."""
        self._comm = comm
        self._label = label
        self._tag = tag
        self._status = MPI.Status()
        # request, peer, bytes expected from it (None where sent), and the tensor, which must live until then
        self._posts: list[tuple[MPI.Request, int, int | None, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Post a message. The tensor must not change until the mail is through."""
        self._posts.append((self._comm.Isend(message(tensor), dest=to, tag=self._tag), to, None, tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Post the place for a message."""
        request = self._comm.Irecv(message(tensor), source=source, tag=self._tag)
        self._posts.append((request, source, tensor.numel() * tensor.element_size(), tensor))

    def holds(self) -> bool:
        while self._posts:  # any test moves all messages along, so one at a time is enough
            request, peer, expected, _ = self._posts[-1]
            try:
                if not request.Test(self._status):
                    return False
            except MPI.Exception as error:
                raise self._refused(error, peer, expected) from None
            self._posts.pop()
            if expected is not None:
                self.source = self._status.Get_source()
                got = self._status.Get_elements(MPI.BYTE)  # Get_count knows no more than 2**31 - 1
                if got != expected:
                    raise self.mismatch(self.source, f"{got} bytes", expected)
        return True

    def __del__(self) -> None:
        _abandoned.extend(self._posts)

    def missing(self) -> list[int]:
        return sorted({peer for request, peer, _, _ in self._posts if peer >= 0 and not request.Get_status()})

    def _refused(self, error: MPI.Exception, peer: int, expected: int | None) -> CommunicationError:
        if expected is not None and error.Get_error_class() == MPI.ERR_TRUNCATE:
            return self.mismatch(peer, "more", expected)
        return CommunicationError(f"{self._label} on rank {self._comm.rank}: {error.Get_error_string()}")

    def mismatch(self, peer: int, got: str, expected: int) -> CommunicationError:
        """What there is to say when `peer` sent something else."""
        return CommunicationError(
            f"{self._label} on rank {self._comm.rank}: rank {peer} sent {got} where {expected} bytes were expected; "
            "sizes or dtypes differ between these ranks"
        )


@dataclass(frozen=True)
class Call:
    """One collective of one communicator: what its messages are known by."""

    comm: MPI.Intracomm
    label: str
    tag: int

    @property
    def rank(self) -> int:
        return self.comm.rank

    @property
    def size(self) -> int:
        return self.comm.size

    def mail(self) -> Mail:
        return Mail(self.comm, self.label, self.tag)


class Pending:
    """One nonblocking collective of MPI's own. A ``Condition`` of progress.py."""

    def __init__(self, request: MPI.Request, awaited: Sequence[int]) -> None:
        self._request = request
        self._awaited = awaited

    def holds(self) -> bool:
        return self._request.Test()

    def missing(self) -> Sequence[int]:
        return self._awaited
