"""Collectives on the memory that a node shares: ranks read their neighbours' memory, and send messages to other nodes.

Each function is a generator of the conditions that it waits for. docs/developers/windows.md gives the reason of each.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import torch

from hpcfsdp.comm.mpi.messages import Call, Requests, UnlessFailed
from hpcfsdp.comm.mpi.window import Window
from hpcfsdp.comm.progress import Condition, Steps
from hpcfsdp.comm.reduce import Reduction, Tensors, reduce_into
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology


@dataclass(frozen=True)
class NodeView:
    """A rank with its neighbours, which share `window`, and with its proxies on other nodes."""

    window: Window
    topology: Topology
    rank: int

    @property
    def home(self) -> int:
        return self.topology.node_rank(self.rank)

    def proxies(self) -> Iterator[tuple[int, int]]:
        """Each other node, with the rank there that exchanges with this one."""
        for node in range(self.topology.num_nodes):
            if node != self.home:
                yield node, self.topology.proxy(self.rank, node)

    def unless_failed(self, call: Call, condition: Condition) -> Condition:
        """The condition. Where nodes exchange messages, it also raises if the call fails on another rank."""
        return condition if self.topology.num_nodes == 1 else UnlessFailed(call, condition)

    def owner(self, rank: int) -> int:
        """The local rank of the neighbour that reduces the piece of `rank`."""
        return self.topology.local_rank(self.topology.proxy(rank, self.home))


def labelled_barrier(window: Window, label: str) -> Steps:
    """Wait until all neighbours are here, with the same label."""
    with _exclusive(window):
        window.epoch += 1
        window.arrive(label)
        yield window.all_arrived()


def all_gather(call: Call, node: NodeView, whole: torch.Tensor, shard: torch.Tensor) -> Steps:
    """Make every rank's segment visible on this node. `whole` views the whole window."""
    window, numel = node.window, shard.numel()
    mine = whole[numel * node.rank : numel * (node.rank + 1)]
    in_place = mine.data_ptr() == shard.data_ptr()
    with _exclusive(window):
        window.done()
        if not in_place or node.topology.num_nodes > 1:
            # A slower neighbour may still read the memory that is written next.
            yield node.unless_failed(call, window.all_done())
        if not in_place:
            mine.copy_(shard.view(-1))
        window.epoch += 1
        if node.topology.num_nodes > 1:
            yield _exchange_between_nodes(call, node, whole.view(call.size, -1), mine)
        window.arrive(call.label)
        yield node.unless_failed(call, window.all_arrived())


def reduce_scatter(call: Call, node: NodeView, pieces: Tensors, output: torch.Tensor, reduction: Reduction) -> Steps:
    """`output` becomes this rank's piece reduced over all ranks. `pieces` view this rank's region, one each."""
    with _exclusive(node.window):
        yield from _reduce_mine(call, node, pieces, output, reduction)
        node.window.done()
        yield node.unless_failed(call, node.window.all_done())  # then the caller may change the input


def all_reduce(call: Call, node: NodeView, pieces: Tensors, reduction: Reduction) -> Steps:
    """All pieces become their reduction over all ranks. `pieces` view this rank's region, one for each rank."""
    window, mine = node.window, pieces[node.rank]
    with _exclusive(window):
        # In place: this rank alone reads its piece, in every neighbour's region and in its own.
        yield from _reduce_mine(call, node, pieces, mine, reduction)
        yield _exchange_between_nodes(call, node, pieces, mine)
        window.epoch += 1
        window.arrive(call.label)
        yield node.unless_failed(call, window.all_arrived())
        local = node.topology.local_rank(node.rank)
        for rank, piece in enumerate(pieces):
            if node.owner(rank) != local:
                piece.copy_(_in_region(window, node.owner(rank), piece))
        window.done()
        yield node.unless_failed(call, window.all_done())


def _reduce_mine(call: Call, node: NodeView, pieces: Tensors, output: torch.Tensor, reduction: Reduction) -> Steps:
    """Each node reduces the pieces of its ranks and their clients. Each rank then reduces the nodes' partial results.

    Nodes send partial results in the accumulation dtype, so each value is rounded once, for any topology.
    """
    window, nodes = node.window, node.topology.nodes
    requests = Requests(call)
    partials: list[torch.Tensor] = [output] * len(nodes)
    for other, proxy in node.proxies():
        partials[other] = torch.empty_like(
            output, dtype=reduction.accumulate if len(nodes[other]) > 1 else pieces[node.rank].dtype
        )
        requests.recv(partials[other], proxy)
    window.epoch += 1
    window.arrive(call.label)
    yield node.unless_failed(call, window.all_arrived())
    for client in node.topology.clients(node.rank):
        if len(nodes[node.home]) > 1:
            partial = torch.empty_like(pieces[client], dtype=reduction.accumulate)
            reduce_into(partial, _in_all_regions(window, pieces[client]), reduction.op, reduction.accumulate)
        else:
            partial = pieces[client]
        requests.send(partial, client)
    mine = _in_all_regions(window, pieces[node.rank])
    if len(nodes) == 1:
        reduce_into(output, mine, reduction.op, reduction.accumulate, divisor=reduction.divisor)
        return
    partials[node.home] = torch.empty_like(output, dtype=reduction.accumulate)
    reduce_into(partials[node.home], mine, reduction.op, reduction.accumulate)
    yield requests
    reduce_into(output, partials, reduction.op, reduction.accumulate, divisor=reduction.divisor)


def _exchange_between_nodes(call: Call, node: NodeView, pieces: Tensors, mine: torch.Tensor) -> Requests:
    """Send this rank's piece to its proxies, and receive those of its clients into `pieces`."""
    requests = Requests(call)
    for client in node.topology.clients(node.rank):
        requests.recv(pieces[client], client)
    for _, proxy in node.proxies():
        requests.send(mine, proxy)
    return requests


def _in_all_regions(window: Window, piece: torch.Tensor) -> list[torch.Tensor]:
    """The counterparts of a view of this rank's region, in all regions of the node."""
    return [_in_region(window, place, piece) for place in range(len(window.regions))]


def _in_region(window: Window, place: int, piece: torch.Tensor) -> torch.Tensor:
    begin = piece.storage_offset() - window.mine.storage_offset()
    return window.regions[place][begin : begin + piece.numel()]


@contextmanager
def _exclusive(window: Window) -> Iterator[None]:
    if window.is_busy:
        raise CommunicationError("another collective on the same memory is still under way: wait for it first")
    window.is_busy = True
    try:
        yield
    finally:
        window.is_busy = False
