"""Collectives on the memory that a node shares: peers are read instead of being sent to; only other nodes get messages.

Each function is a generator of the conditions it waits for. Why each wait is there: docs/design/windows.md.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hpcfsdp.comm.messages import Call, Heeding
from hpcfsdp.comm.progress import Condition, Steps
from hpcfsdp.comm.reduce import Reduction, reduce_into
from hpcfsdp.comm.window import Window
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology


@dataclass(frozen=True)
class Place:
    """A rank among its neighbours, who share `window`, and the proxies that stand for it on other nodes."""

    window: Window
    topology: Topology
    rank: int

    @property
    def home(self) -> int:
        return self.topology.node_rank(self.rank)

    @property
    def has_neighbours(self) -> bool:
        return len(self.topology.nodes[self.home]) > 1

    def proxies(self) -> Iterator[tuple[int, int]]:
        """Every other node with the rank there that exchanges with this one."""
        for node in range(self.topology.num_nodes):
            if node != self.home:
                yield node, self.topology.proxy(self.rank, node)

    def after(self, call: Call, turn: Condition) -> Condition:
        """What ranks wait for that take turns; where nodes exchange messages, a call may fail on another rank."""
        return turn if self.topology.num_nodes == 1 else Heeding(call, turn)

    def keeper(self, rank: int) -> int:
        """The local rank of the neighbour that handles the piece of `rank`."""
        return self.topology.local_rank(self.topology.proxy(rank, self.home))


def claim(window: Window) -> Steps:
    """Wait until no neighbour reads the window any more."""
    with _exclusive(window):
        window.done()
        yield window.all_done()


def labelled_barrier(window: Window, note: str) -> Steps:
    """Wait until all neighbours are here, with the same note."""
    with _exclusive(window):
        window.done()
        window.epoch += 1
        window.arrive(note)
        yield window.all_arrived()


def all_gather(call: Call, place: Place, whole: torch.Tensor, shard: torch.Tensor) -> Steps:
    """Make every rank's segment visible on this node. `whole` views the whole window."""
    window, numel = place.window, shard.numel()
    mine = whole[numel * place.rank : numel * (place.rank + 1)]
    in_place = mine.data_ptr() == shard.data_ptr()
    with _exclusive(window):
        window.done()
        if not in_place or place.topology.num_nodes > 1:
            yield place.after(call, window.all_done())  # a slower neighbour may still read what is overwritten here
        if not in_place:
            mine.copy_(shard.view(-1))
        window.epoch += 1
        if place.topology.num_nodes > 1:
            mail = call.mail()
            for client in place.topology.clients(place.rank):
                mail.receive(whole[numel * client : numel * (client + 1)], client)
            for _, proxy in place.proxies():
                mail.send(mine, proxy)
            yield mail
        window.arrive(call.label)
        yield place.after(call, window.all_arrived())


def reduce_scatter(
    call: Call, place: Place, pieces: Sequence[torch.Tensor], output: torch.Tensor, how: Reduction
) -> Steps:
    """`output` becomes this rank's piece reduced over all ranks. `pieces` view this rank's region, one each."""
    with _exclusive(place.window):
        yield from _reduce_mine(call, place, pieces, output, how)
        place.window.done()
        yield place.after(call, place.window.all_done())  # the input is the caller's to change when this is over


def all_reduce(call: Call, place: Place, pieces: Sequence[torch.Tensor], how: Reduction) -> Steps:
    """All pieces become their reduction over all ranks. `pieces` view this rank's region, one for each rank."""
    window, mine = place.window, pieces[place.rank]
    with _exclusive(window):
        # In place: this rank alone reads its piece, in every neighbour's region and in its own.
        yield from _reduce_mine(call, place, pieces, mine, how)
        mail = call.mail()
        for client in place.topology.clients(place.rank):
            mail.receive(pieces[client], client)
        for _, proxy in place.proxies():
            mail.send(mine, proxy)
        yield mail
        window.epoch += 1
        window.arrive(call.label)
        yield place.after(call, window.all_arrived())
        local = place.topology.local_rank(place.rank)
        for rank, piece in enumerate(pieces):
            if place.keeper(rank) != local:
                piece.copy_(_in_region(window, place.keeper(rank), piece))
        window.done()
        yield place.after(call, window.all_done())


def _reduce_mine(
    call: Call, place: Place, pieces: Sequence[torch.Tensor], output: torch.Tensor, how: Reduction
) -> Steps:
    """Each node reduces the pieces of all ranks, its own and its clients'; a rank then reduces what the nodes found.

    What a node has reduced travels in the accumulation dtype, so each value is rounded once, whatever the nodes are.
    """
    window, nodes = place.window, place.topology.nodes
    mail = call.mail()
    found: list[torch.Tensor] = [output] * len(nodes)
    for node, proxy in place.proxies():
        found[node] = torch.empty_like(
            output, dtype=how.accumulate if len(nodes[node]) > 1 else pieces[place.rank].dtype
        )
        mail.receive(found[node], proxy)
    window.epoch += 1
    window.arrive(call.label)
    yield place.after(call, window.all_arrived())
    for client in place.topology.clients(place.rank):
        if place.has_neighbours:
            partial = torch.empty_like(pieces[client], dtype=how.accumulate)
            reduce_into(partial, _everywhere(window, pieces[client]), how.op, how.accumulate)
        else:
            partial = pieces[client]
        mail.send(partial, client)
    mine = _everywhere(window, pieces[place.rank])
    if len(nodes) == 1:
        reduce_into(output, mine, how.op, how.accumulate, divisor=how.divisor)
        return
    found[place.home] = torch.empty_like(output, dtype=how.accumulate)
    reduce_into(found[place.home], mine, how.op, how.accumulate)
    yield mail
    reduce_into(output, found, how.op, how.accumulate, divisor=how.divisor)


def _everywhere(window: Window, piece: torch.Tensor) -> list[torch.Tensor]:
    """The counterparts of a view of this rank's region, in all regions of the node."""
    return [_in_region(window, place, piece) for place in range(len(window.regions))]


def _in_region(window: Window, place: int, piece: torch.Tensor) -> torch.Tensor:
    begin = piece.storage_offset() - window.mine.storage_offset()
    return window.regions[place][begin : begin + piece.numel()]


@contextmanager
def _exclusive(window: Window) -> Iterator[None]:
    if window.busy:
        raise CommunicationError("another collective on the same memory is still under way: wait for it first")
    window.busy = True
    try:
        yield
    finally:
        window.busy = False
