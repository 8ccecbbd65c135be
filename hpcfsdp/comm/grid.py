"""Collectives over the ranks of two communicators, where no communicator covers all of them."""

from __future__ import annotations

from typing import Any

from hpcfsdp.comm.communicator import Communicator


class Grid:
    """The ranks of two orthogonal communicators. Rank 0 is rank 0 of both; `inner` ranks are consecutive."""

    def __init__(self, inner: Communicator | Grid, outer: Communicator) -> None:
        self._inner, self._outer = inner, outer
        self.rank = outer.rank * inner.size + inner.rank
        self.size = inner.size * outer.size
        self.device = inner.device

    def all_gather_object(self, value: Any) -> list[Any]:
        """Collective over all ranks. Their values in rank order."""
        rows = self._outer.all_gather_object(self._inner.all_gather_object(value))
        return [other for row in rows for other in row]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Collective over all ranks. The value of rank `src`."""
        row, place = divmod(src, self._inner.size)
        if self._outer.rank == row:
            value = self._inner.broadcast_object(value, place)
        return self._outer.broadcast_object(value, row)

    def broadcast(self, tensor: Any, src: int) -> None:
        """Collective over all ranks. `tensor` becomes the tensor of rank `src`."""
        row, place = divmod(src, self._inner.size)
        if self._outer.rank == row:
            self._inner.broadcast(tensor, place)
        self._outer.broadcast(tensor, row)
