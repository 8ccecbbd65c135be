"""The memory in which the gathered values of a flat parameter stand: three kinds with one face."""

from __future__ import annotations

import weakref
from typing import Protocol

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.flat.storage import alloc_storage, free_storage


class Buffer(Protocol):
    """Where the values of all shards come together.

    Attributes:
        full: 1-D, all shards; always the same tensor, whose memory may come and go.
        resident: whether the memory stays, so that values are there from one meeting of the ranks to the next.
    """

    full: torch.Tensor
    resident: bool

    @property
    def held_bytes(self) -> int:
        """Bytes that this rank holds for it now, beyond the shards."""

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> Work | None:
        """Collective. Have all shards stand in `full`."""

    def free(self) -> None:
        """Give the memory back, where it does not stay."""


class Whole:
    """One rank holds everything: the shard is the full parameter."""

    resident = True
    held_bytes = 0

    def __init__(self, shard: torch.Tensor) -> None:
        self.full = shard

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> None:
        del shard, async_op

    def free(self) -> None:
        pass


class Transient:
    """Memory taken for each gather and given back after use."""

    resident = False

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self.full = torch.empty(numel, dtype=dtype, device=device)  # until `free`: views are made of it first

    @property
    def held_bytes(self) -> int:
        return self.full.untyped_storage().size()

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> Work | None:
        alloc_storage(self.full, self.full.numel())
        if self._comm.size == 1:
            self.full.copy_(shard, non_blocking=True)
            return None
        ready = shard
        if shard.dtype != self.full.dtype or shard.device != self.full.device:
            ready = segment(self.full, self._comm)
            ready.copy_(shard, non_blocking=True)
        return self._comm.all_gather_into_tensor(self.full, ready, async_op=async_op)

    def free(self) -> None:
        free_storage(self.full)


class Resident:
    """Memory that all ranks share, of which each has one segment: gathered as soon as everyone has written its own.

    No byte moves, and a node holds every value once. The price is that a segment may be written only while no rank
    computes with it: whoever uses this has the ranks meet before the first and after the last use.
    """

    resident = True

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, *, is_cast: bool) -> None:
        """Collective over `comm`.

        Args:
            is_cast: the segment is a copy of the shard in another dtype, rather than the shard itself.
        """
        self.is_cast = is_cast
        self.full = comm.alloc(numel, dtype, gathered=True)
        weakref.finalize(self, comm.free, self.full).atexit = False
        self.segment = segment(self.full, comm)

    @property
    def held_bytes(self) -> int:
        return self.segment.numel() * self.segment.element_size() if self.is_cast else 0

    def gather(self, shard: torch.Tensor, *, async_op: bool) -> None:
        del shard, async_op

    def free(self) -> None:
        pass

    def write(self, shard: torch.Tensor) -> None:
        """Put this rank's values in place."""
        if shard.data_ptr() != self.segment.data_ptr():
            self.segment.copy_(shard)
