"""Bytes of tensors as MPI messages between two ranks."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from mpi4py import MPI

from hpcfsdp.errors import CommunicationError

_PART_BYTES = 1 << 30
"""A message of MPI has fewer than 2**31 elements: longer ones go in parts."""

_abandoned: list[Any] = []
"""What a collective that failed has left under way: MPI may read and write these tensors until the program ends."""


def _parts(tensor: torch.Tensor) -> Iterator[tuple[list[Any], int]]:
    """The tensor's bytes, as mpi4py takes buffers, and how many each has."""
    address, nbytes = tensor.data_ptr(), tensor.numel() * tensor.element_size()
    for begin in range(0, max(nbytes, 1), _PART_BYTES):
        count = min(_PART_BYTES, nbytes - begin)
        # Not tensor.numpy(): that marks the storage as shared, and a shared storage cannot be freed by resizing it.
        yield [MPI.buffer.fromaddress(address + begin, count), count, MPI.BYTE], count


class Mail:
    """Messages under way, sent and received. A ``Condition`` of progress.py that holds when all are through."""

    def __init__(self, comm: MPI.Intracomm, label: str, tag: int) -> None:
        self.source: int | None = None
        """The rank that the last message came from."""
        self._comm = comm
        self._label = label
        self._tag = tag
        self._status = MPI.Status()
        self._open: torch.Tensor | None = None
        # request, peer, bytes expected from it (None where sent), and the tensor, which must live until then
        self._posts: list[tuple[MPI.Request, int, int | None, torch.Tensor]] = []

    def send(self, tensor: torch.Tensor, to: int) -> None:
        """Post a message. The tensor must not change until the mail is through."""
        for part, _ in _parts(tensor):
            self._posts.append((self._comm.Isend(part, dest=to, tag=self._tag), to, None, tensor))

    def receive(self, tensor: torch.Tensor, source: int) -> None:
        """Post the place for a message."""
        for part, nbytes in _parts(tensor):
            request = self._comm.Irecv(part, source=source, tag=self._tag)
            self._posts.append((request, source, nbytes, tensor))

    def receive_from_anyone(self, tensor: torch.Tensor) -> None:
        """Take the first message that comes. Its place is posted when it is here: MPICH 5 loses some posted before."""
        self._open = tensor

    def holds(self) -> bool:
        if self._open is not None:
            letter = self._comm.Improbe(tag=self._tag, status=self._status)
            if letter is None:
                return False
            tensor, self._open, source = self._open, None, self._status.Get_source()
            for part, nbytes in _parts(tensor):
                request = letter.Irecv(part) if letter else self._comm.Irecv(part, source=source, tag=self._tag)
                self._posts.append((request, source, nbytes, tensor))
                letter = None
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
                got = self._status.Get_count(MPI.BYTE)
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
