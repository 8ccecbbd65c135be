"""Collectives on the memory that a node shares: ranks read their neighbours' memory, and send messages to other nodes.

Each function is a generator of the conditions that it waits for. docs/developers/node-memory.md gives their reasons.
"""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor

from hpcfsdp import _compat
from hpcfsdp.comm import traffic
from hpcfsdp.comm.mpi.messages import MpiCall, Requests, UnlessFailed
from hpcfsdp.comm.mpi.node_memory import NodeMemory
from hpcfsdp.comm.progress import Condition, Steps
from hpcfsdp.comm.reduce import Reduction, Tensors, reduce_into
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology

_ALONE_BYTES = 1 << 14  # bytes of a part from which on a message of its own costs less than to copy it twice


@dataclass(frozen=True)
class NodeView:
    """A rank with its neighbours, which share `memory`, and with its proxies on other nodes."""

    memory: NodeMemory
    topology: Topology
    rank: int

    @property
    def home(self) -> int:
        return self.topology.node_rank(self.rank)

    def proxies(self) -> Iterator[tuple[int, int]]:
        """Yield each other node, with the rank there that exchanges with this one."""
        for node in range(self.topology.num_nodes):
            if node != self.home:
                yield node, self.topology.proxy(self.rank, node)

    def unless_failed(self, call: MpiCall, condition: Condition) -> Condition:
        """Return the condition. Where nodes exchange messages, it also raises if the call fails on another rank."""
        return condition if self.topology.num_nodes == 1 else UnlessFailed(call, condition)

    def owner(self, rank: int) -> int:
        """Return the local rank of the neighbour that reduces the piece of `rank`."""
        return self.topology.local_rank(self.topology.proxy(rank, self.home))


def labelled_barrier(memory: NodeMemory, label: str, rank: int, flag: bool) -> Steps:
    """Wait until all neighbours are here, with the same label. Then ``barrier_flags`` are those of all ranks."""
    with _exclusive(memory):
        memory.epoch += 1
        barrier_flags(memory)[rank] = flag
        memory.arrive(label)
        yield memory.all_arrived()


def barrier_flags(memory: NodeMemory) -> Tensor:
    """Return the flags of the last ``labelled_barrier``, by rank.

    Two for each rank in turn: a neighbour may be one barrier ahead before this rank has read its last one.
    """
    return memory.mine.view(-1, 2)[:, memory.epoch % 2]


def all_gather(call: MpiCall, node: NodeView, parts: Sequence[Tensors], mine: Tensors) -> Steps:
    """Make every rank's parts of the memory visible on this node. This rank's become `mine`, which may be there."""
    memory, spans_nodes = node.memory, node.topology.num_nodes > 1
    pairs = [
        (target, given) for target, given in zip(parts[node.rank], mine, strict=True) if not _is_same(target, given)
    ]
    with _exclusive(memory):
        memory.done()
        # A slower neighbour may still read the memory that is written next, or free its part of it.
        if spans_nodes:
            memory.fill()
            yield node.unless_failed(call, memory.all_cleared())
        elif pairs:
            yield node.unless_failed(call, memory.all_done())
        _copy([target for target, _ in pairs], [given for _, given in pairs])
        memory.epoch += 1
        if spans_nodes:
            yield from _exchange_parts(call, node, parts)
        memory.arrive(call.label)
        yield node.unless_failed(call, memory.all_arrived())


def _copy(targets: Tensors, sources: Tensors) -> None:
    traffic.count.copied += sum(target.nbytes for target in targets)
    _compat.copy_to_each_(targets, sources)


def _is_same(target: Tensor, given: Tensor) -> bool:
    return target.data_ptr() == given.data_ptr() and target.dtype == given.dtype


def reduce_scatter(call: MpiCall, node: NodeView, pieces: Tensors, output: Tensor, reduction: Reduction) -> Steps:
    """`output` becomes this rank's piece reduced over all ranks. `pieces` view this rank's region, one each."""
    with _exclusive(node.memory):
        yield from _reduce_mine(call, node, pieces, output, reduction)
        node.memory.done()
        yield node.unless_failed(call, node.memory.all_done())  # then the caller may change the input


def all_reduce(call: MpiCall, node: NodeView, pieces: Tensors, reduction: Reduction) -> Steps:
    """Have all pieces become their reduction over all ranks. `pieces` view this rank's region, one for each rank."""
    memory, mine = node.memory, pieces[node.rank]
    with _exclusive(memory):
        # In place: this rank alone reads its piece, in every neighbour's region and in its own.
        yield from _reduce_mine(call, node, pieces, mine, reduction)
        yield _exchange_between_nodes(call, node, pieces, mine)
        memory.epoch += 1
        memory.arrive(call.label)
        yield node.unless_failed(call, memory.all_arrived())
        local = node.topology.local_rank(node.rank)
        for rank, piece in enumerate(pieces):
            if node.owner(rank) != local:
                _copy([piece], [_in_region(memory, node.owner(rank), piece)])
        memory.done()
        yield node.unless_failed(call, memory.all_done())


def _reduce_mine(call: MpiCall, node: NodeView, pieces: Tensors, output: Tensor, reduction: Reduction) -> Steps:
    """Have each node reduce the pieces of its ranks and their clients. Each rank then reduces the nodes' partial
    results.

    Nodes send partial results in the accumulation dtype, so each value is rounded once, for any topology.
    """
    memory, nodes = node.memory, node.topology.nodes
    requests = Requests(call)
    partials: dict[int, Tensor] = {}
    for other, proxy in node.proxies():
        partials[other] = torch.empty_like(
            output, dtype=reduction.accumulate if len(nodes[other]) > 1 else pieces[node.rank].dtype
        )
        requests.recv(partials[other], proxy)
    memory.epoch += 1
    memory.arrive(call.label)
    yield node.unless_failed(call, memory.all_arrived())
    for client in node.topology.clients(node.rank):
        if len(nodes[node.home]) > 1:
            partial = torch.empty_like(pieces[client], dtype=reduction.accumulate)
            reduce_into(partial, _in_all_regions(memory, pieces[client]), reduction.op, reduction.accumulate)
            traffic.count.copied += partial.nbytes
        else:
            partial = pieces[client]
        requests.send(partial, client)
    if partials:
        yield requests
    here = _in_all_regions(memory, pieces[node.rank])
    sources = [source for other in range(len(nodes)) for source in ([partials[other]] if other in partials else here)]
    reduce_into(output, sources, reduction.op, reduction.accumulate, divisor=reduction.divisor)


def _exchange_between_nodes(call: MpiCall, node: NodeView, pieces: Tensors, mine: Tensor) -> Requests:
    """Send this rank's piece to its proxies, and receive those of its clients into `pieces`."""
    requests = Requests(call)
    for client in node.topology.clients(node.rank):
        requests.recv(pieces[client], client)
    for _, proxy in node.proxies():
        requests.send(mine, proxy)
    return requests


def _exchange_parts(call: MpiCall, node: NodeView, parts: Sequence[Tensors]) -> Steps:
    """Send this rank's parts to its proxies, and receive those of its clients where they belong.

    Parts that are not contiguous, and small ones, travel together, and are copied from and to their places.
    """
    requests, arriving = Requests(call), []
    for client in node.topology.clients(node.rank):
        alone, together, packed = _packed(parts[client])
        requests.recv([*alone, packed], client)
        arriving.append((together, packed))
    alone, together, packed = _packed(parts[node.rank])
    _copy(_unpacked(together, packed), together)
    for _, proxy in node.proxies():
        requests.send([*alone, packed], proxy)
    yield requests
    for together, packed in arriving:
        _copy(together, _unpacked(together, packed))


def _packed(parts: Tensors) -> tuple[list[Tensor], list[Tensor], Tensor]:
    """Return what is sent from where it is, what is sent together, and memory for that."""
    alone, together = [], []
    for part in parts:
        is_large = len(parts) == 1 or part.nbytes >= _ALONE_BYTES
        (alone if is_large and part.is_contiguous() else together).append(part)
    return alone, together, parts[0].new_empty(sum(part.numel() for part in together))


def _unpacked(parts: Tensors, packed: Tensor) -> list[Tensor]:
    """Return the places of parts in memory for all of them, in their shapes."""
    places = packed.split([part.numel() for part in parts]) if parts else ()
    return [place.view(part.shape) for place, part in zip(places, parts, strict=True)]


def _in_all_regions(memory: NodeMemory, piece: Tensor) -> list[Tensor]:
    """Return the counterparts of a view of this rank's region, in all regions of the node."""
    return [_in_region(memory, place, piece) for place in range(len(memory.regions))]


def _in_region(memory: NodeMemory, place: int, piece: Tensor) -> Tensor:
    begin = piece.storage_offset() - memory.mine.storage_offset()
    return memory.regions[place][begin : begin + piece.numel()]


@contextmanager
def _exclusive(memory: NodeMemory) -> Iterator[None]:
    if memory.is_busy:
        raise CommunicationError("another collective on the same memory is still under way: wait for it first")
    memory.is_busy = True
    try:
        yield
    finally:
        memory.is_busy = False
