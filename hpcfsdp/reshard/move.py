"""Values of tensors moved from one distribution over ranks to another."""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass

import torch

from hpcfsdp.comm import Communicator
from hpcfsdp.params.layout import Run
from hpcfsdp.reshard.runs import Move, intersect

RunsOf = Callable[[int], Sequence[Run]]
"""The runs that a rank holds."""

BATCH_NUMEL = 1 << 20
"""Elements of small parameters that travel together: latency counts for less, and memory hardly."""

Flat = Sequence[torch.Tensor | None] | Mapping[int, torch.Tensor | None]
"""Memory by the index of moves, 1-D each; None, or no entry, for tensors without elements on this rank."""


@dataclass(frozen=True)
class MovePlan:
    """The moves that one rank takes part in. Made from distributions alone, without a message.

    Attributes:
        kept: from this rank's memory to its own.
        sent: by rank; a target offset is one in that rank's memory.
        received: by rank; a source offset is one in that rank's memory.
    """

    kept: list[Move]
    sent: list[list[Move]]
    received: list[list[Move]]

    @classmethod
    def make(cls, rank: int, size: int, sources: RunsOf, targets: RunsOf) -> MovePlan:
        """Plan for `rank` of `size`. Every element of `targets` is in `sources` once."""
        mine, wanted = sources(rank), targets(rank)
        sent: list[list[Move]] = [[] for _ in range(size)]
        received: list[list[Move]] = [[] for _ in range(size)]
        for other in range(size):
            if other != rank:
                sent[other] = intersect(mine, targets(other)) if mine else []
                received[other] = intersect(sources(other), wanted) if wanted else []
        return cls(intersect(mine, wanted), sent, received)

    def parts(self, groups: Iterable[range]) -> Iterator[MovePlan]:
        """This plan, one range of tensors after the other; ascending ranges that hold all of them."""
        stops, size, nothing = [group.stop for group in groups], len(self.sent), list[Move]()
        everything = [self.kept, *self.sent, *self.received]
        # Most ranks have no move in most groups: only moves that exist are listed.
        cuts: list[dict[int, list[Move]]] = [{} for _ in stops]
        for which, moves in enumerate(everything):
            for step in moves:
                cuts[bisect_right(stops, step.index)].setdefault(which, []).append(step)
        for cut in cuts:
            lists = [nothing] * len(everything)
            for which, moves in cut.items():
                lists[which] = moves
            yield MovePlan(lists[0], lists[1 : 1 + size], lists[1 + size :])


def batches(sizes: Sequence[int], limit: int | None = None) -> list[range]:
    """Ranges of consecutive tensors with at most `limit` elements (``BATCH_NUMEL``) together, or one larger tensor."""
    limit = BATCH_NUMEL if limit is None else limit
    found, begin, held = [], 0, 0
    for index, size in enumerate(sizes):
        if index > begin and held + size > limit:
            found.append(range(begin, index))
            begin, held = index, 0
        held += size
    return [*found, range(begin, len(sizes))] if sizes else []


@torch.no_grad()
def move(comm: Communicator, plan: MovePlan, source: Flat, target: Flat, dtype: torch.dtype) -> None:
    """Collective over `comm`. Bring values from `source` to `target` on all ranks as planned.

    A single run of the right dtype and device is sent from, or received in, its place. All else is copied through
    temporary memory.

    Args:
        source: of any dtype, contiguous or not.
        target: of `dtype` where it is received in place; any other is converted to.
        dtype: in which values travel, the same on all ranks.
    """
    for index, begin, to, numel in plan.kept:
        target[index][to : to + numel].copy_(source[index][begin : begin + numel])
    if comm.size == 1:
        return
    nothing = torch.empty(0, dtype=dtype, device=comm.device)
    outputs = [_receive_buffer(target, moves, comm, dtype, nothing) for moves in plan.received]
    comm.all_to_all(outputs, [_packed(source, moves, comm, dtype, nothing) for moves in plan.sent])
    for moves, arrived in zip(plan.received, outputs, strict=True):
        _unpack(target, moves, arrived)


def _packed(
    source: Flat, moves: list[Move], comm: Communicator, dtype: torch.dtype, nothing: torch.Tensor
) -> torch.Tensor:
    if not moves:
        return nothing
    if len(moves) == 1:
        index, begin, _, numel = moves[0]
        return source[index][begin : begin + numel].to(comm.device, dtype).contiguous()
    packed, at = torch.empty(sum(m.numel for m in moves), dtype=dtype, device=comm.device), 0
    for index, begin, _, numel in moves:
        packed[at : at + numel].copy_(source[index][begin : begin + numel])
        at += numel
    return packed


def _receive_buffer(
    target: Flat, moves: list[Move], comm: Communicator, dtype: torch.dtype, nothing: torch.Tensor
) -> torch.Tensor:
    """The memory to receive in: the place of a single run, if it fits."""
    if not moves:
        return nothing
    index, _, begin, numel = moves[0]
    if len(moves) == 1 and target[index].device == comm.device and target[index].dtype == dtype:
        return target[index][begin : begin + numel]
    return torch.empty(sum(m.numel for m in moves), dtype=dtype, device=comm.device)


def _unpack(target: Flat, moves: list[Move], arrived: torch.Tensor) -> None:
    at = 0
    for index, _, begin, numel in moves:
        place, values = target[index][begin : begin + numel], arrived[at : at + numel]
        if place.data_ptr() != values.data_ptr():
            place.copy_(values)
        at += numel
