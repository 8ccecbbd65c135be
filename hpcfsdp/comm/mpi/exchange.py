"""Collectives as messages between pairs of ranks, for tensors anywhere in memory.

Each function is a generator of the conditions that it waits for.
"""

import functools
from collections import deque
from collections.abc import Generator, Iterator, Sequence
from math import prod

import torch
from torch import Tensor

from hpcfsdp.comm.mpi.messages import MpiCall, Requests
from hpcfsdp.comm.progress import Condition, Sent, Steps
from hpcfsdp.comm.reduce import OptionalTensors, Reduction, Tensors, divide_, reduce_into
from hpcfsdp.errors import CommunicationError
from hpcfsdp.launch.topology import Topology

_MOST_PAIRS = 8
"""The number of ranks up to which each sends to all others at once; among more, small messages take rounds.

What that costs: docs/explanation/scaling.md.
"""
_ROUND_BYTES = 1 << 17
"""Bytes of one rank's piece up to which many messages cost more than to pass bytes on, or add them, in rounds."""
_SMALL_BYTES = 1 << 16
"""Bytes up to which a reduction is cheapest as one round of messages, with everything summed where it arrives."""
_CHUNK_BYTES = 1 << 20  # messages of a large reduction: what arrives is still in the cache when it is added


def all_to_all(call: MpiCall, outputs: OptionalTensors, inputs: OptionalTensors) -> Steps:
    """`outputs[i]` becomes ``inputs[rank]`` of rank i. None: the pair of ranks exchanges nothing this way."""
    requests = Requests(call)
    for peer in _others(call):
        if outputs[peer] is not None:
            requests.recv(outputs[peer], peer)
    for peer in _others(call):
        if inputs[peer] is not None:
            requests.send(inputs[peer], peer)
    if outputs[call.rank] is not None:
        _copy(outputs[call.rank], inputs[call.rank])
    yield requests


def send(call: MpiCall, tensor: Tensor, dst: int) -> Steps:
    requests = Requests(call)
    requests.send(tensor, dst)
    yield requests


def recv(requests: Requests) -> Steps:
    """Wait for a receive that is posted already."""
    try:
        yield requests
    finally:
        requests.cancel()  # the caller may keep it; messages that arrive later are for the next receive


def broadcast(call: MpiCall, tensor: Tensor, src: int) -> Steps:
    """`src` first sends an empty message to each rank. The bytes pass down a tree, in parts."""
    flat, place = tensor.view(-1), (call.rank - src) % call.size
    nothing, source_is_here, sends = torch.empty(0), Requests(call), Requests(call)
    if place:  # a rank that waits for its parent, which waits for `src`, would name the parent as missing
        source_is_here.recv(nothing, src)
    else:
        for peer in _others(call):
            sends.send(nothing, peer)
    # Without its lowest bit, a place in the tree is that of its parent.
    lowest = place & -place or 1 << (call.size - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
    children = [(src + place + step) % call.size for step in steps if place + step < call.size]
    parts = flat.split(max(1, _CHUNK_BYTES // flat.element_size()))
    receives = [Requests(call) for _ in parts]
    for part, receive in zip(parts, receives, strict=True):
        if place:
            receive.recv(part, (src + place - lowest) % call.size)
    yield source_is_here
    for part, receive in zip(parts, receives, strict=True):
        yield receive
        for child in children:
            sends.send(part, child)
    yield sends


def barrier(call: MpiCall) -> Steps:
    if call.size <= _MOST_PAIRS:
        yield from wait_for(call, range(call.size))
    else:
        yield from _gather_in_rounds(call, torch.empty(call.size, 0))


def gather_small(call: MpiCall, rows: Tensor) -> Steps:
    """`rows`, of which each rank has its own, become those of all."""
    if call.size <= _MOST_PAIRS:
        yield from all_to_all(call, list(rows), [rows[call.rank]] * call.size)
    else:
        yield from _gather_in_rounds(call, rows)


def wait_for(call: MpiCall, ranks: Sequence[int]) -> Steps:
    """Wait for all of `ranks`. Errors name the ranks that are missing, and those that make another call."""
    nothing, requests = torch.empty(0), Requests(call)
    for peer in ranks:
        if peer != call.rank:
            requests.recv(nothing, peer)
            requests.send(nothing, peer)
    yield requests


def reduce_scatter(call: MpiCall, pieces: Tensors, output: Tensor, reduction: Reduction) -> Steps:
    """`output` becomes this rank's piece reduced over all ranks."""
    largest = max(piece.numel() for piece in pieces)  # they may be unequal
    if not _takes_rounds(call, largest * output.element_size()):
        yield from _reduce_in_pairs(call, pieces, output, reduction)
        return
    rows = output.new_zeros(call.size, largest, dtype=reduction.accumulate)
    for row, piece in zip(rows, pieces, strict=True):
        row[: piece.numel()].copy_(piece)
    yield from _reduce_in_rounds(call, rows, reduction)
    total = rows[call.rank, : output.numel()]
    divide_(total, reduction.divisor)
    output.copy_(total)


def _takes_rounds(call: MpiCall, piece_bytes: int) -> bool:
    return call.size > _MOST_PAIRS and piece_bytes <= _ROUND_BYTES


def _gather_in_rounds(call: MpiCall, rows: Tensor) -> Steps:
    """Gather `rows`, one for each rank. A round doubles what each rank has."""
    for known, count in _rounds(call.size):
        requests, source = Requests(call), (call.rank + known) % call.size
        for run in _runs(source, count, call.size):
            requests.recv(rows[run], source)
        for run in _runs(call.rank, count, call.size):
            requests.send(rows[run], (call.rank - known) % call.size)
        yield requests


def _reduce_in_rounds(call: MpiCall, rows: Tensor, reduction: Reduction) -> Steps:
    """``rows[rank]`` becomes its reduction over all ranks; the other rows, in between, hold parts of their reductions.

    The rounds of ``_gather_in_rounds`` backwards: what would be received is sent, and what arrives is added.
    """
    for known, count in reversed(_rounds(call.size)):
        requests, to = Requests(call), (call.rank + known) % call.size
        runs = _runs(call.rank, count, call.size)
        received = [torch.empty_like(rows[run]) for run in runs]
        for part in received:
            requests.recv(part, (call.rank - known) % call.size)
        for run in _runs(to, count, call.size):
            requests.send(rows[run], to)
        yield requests
        for run, part in zip(runs, received, strict=True):
            mine = rows[run].view(-1)
            reduce_into(mine, [mine, part.view(-1)], reduction.op, reduction.accumulate)


def _rounds(size: int) -> list[tuple[int, int]]:
    """Return for each round of a gather how many rows a rank has, and how many it gets."""
    begins = [1 << round_ for round_ in range((size - 1).bit_length())]
    return [(known, min(known, size - known)) for known in begins]


def _runs(begin: int, count: int, size: int) -> list[slice]:
    """Return `count` of `size` rows from `begin` on, where the first follows the last."""
    end = begin + count
    return [slice(begin, end)] if end <= size else [slice(begin, size), slice(end - size)]


def _reduce_in_pairs(call: MpiCall, pieces: Tensors, output: Tensor, reduction: Reduction) -> Steps:
    """Do as ``reduce_scatter``. Each rank sends to all others.

    A rank offers all of its pieces at once, in chunks, and takes those of the others one after the other: while one is
    added, two are on their way. So no rank waits for another that computes, once that has begun, and the order of
    summation is fixed. Measured four times faster than MPI_Reduce_scatter_block in shared memory.
    """
    mine, sends = pieces[call.rank], Requests(call)
    largest = max(piece.numel() for piece in pieces)  # all ranks count the same chunks
    chunk = max(1, _CHUNK_BYTES // mine.element_size())
    begins = range(0, max(largest, 1), chunk)
    for peer in _others(call):
        for begin in begins:
            sends.send(pieces[peer][begin : begin + chunk], peer)
    total = output if output.dtype == reduction.accumulate else torch.empty_like(output, dtype=reduction.accumulate)
    _copy(total, mine)
    under_way: deque[tuple[Requests, int, Tensor]] = deque()
    for distance in range(1, call.size):
        for begin in begins:
            requests = Requests(call)
            received = torch.empty_like(mine[begin : begin + chunk])
            requests.recv(received, (call.rank - distance) % call.size)
            under_way.append((requests, begin, received))
            if len(under_way) > 2:
                yield from _add(*under_way.popleft(), total, reduction)
    while under_way:
        yield from _add(*under_way.popleft(), total, reduction)
    divide_(total, reduction.divisor)
    yield sends  # the caller may change the pieces then
    if total is not output:
        output.copy_(total)


def _add(requests: Requests, begin: int, received: Tensor, total: Tensor, reduction: Reduction) -> Steps:
    yield requests
    part = total[begin : begin + received.numel()]
    reduce_into(part, [part, received], reduction.op, reduction.accumulate)


def all_reduce(call: MpiCall, tensor: Tensor, reduction: Reduction, topology: Topology | None = None) -> Steps:
    """`tensor` becomes its reduction over all ranks. With a `topology` nodes first reduce a large one."""
    if tensor.nbytes * call.size <= _SMALL_BYTES:
        values = tensor.new_empty(call.size, tensor.numel())
        values[call.rank].copy_(tensor)
        yield from gather_small(call, values)
        reduce_into(tensor, list(values), reduction.op, reduction.accumulate, divisor=reduction.divisor)
        return
    if topology is not None and topology.num_nodes > 1 and (topology.ranks_per_node or 1) > 1:
        yield from _all_reduce_by_nodes(call, tensor, reduction, topology)
        return
    pieces = tensor.tensor_split(call.size)
    yield from reduce_scatter(call, pieces, pieces[call.rank], reduction)
    if not _takes_rounds(call, pieces[0].nbytes):
        yield from all_gather(call, pieces, pieces[call.rank])
        return
    rows = tensor.new_empty(call.size, pieces[0].numel())  # the first piece is the largest
    rows[call.rank, : pieces[call.rank].numel()].copy_(pieces[call.rank])
    yield from _gather_in_rounds(call, rows)
    for piece, row in zip(pieces, rows, strict=True):
        piece.copy_(row[: piece.numel()])


def _all_reduce_by_nodes(call: MpiCall, tensor: Tensor, reduction: Reduction, topology: Topology) -> Steps:
    """Do as ``all_reduce``, with equally many ranks on each node. Between nodes travel sums of whole nodes."""
    place = topology.local_rank(call.rank)
    node = call.among(topology.node_of(call.rank))
    counterparts = call.among([ranks[place] for ranks in topology.nodes])
    pieces, part = tensor.tensor_split(node.size), Reduction(reduction.op, reduction.accumulate, 1)
    total = torch.empty_like(pieces[place], dtype=reduction.accumulate)
    yield from reduce_scatter(node, pieces, total, part)
    yield from all_reduce(counterparts, total, part)
    divide_(total, reduction.divisor)
    pieces[place].copy_(total)
    yield from all_gather(node, pieces, pieces[place])


def all_reduce_sparse(call: MpiCall, tensor: Tensor, reduction: Reduction) -> Steps:
    """`tensor`, sparse COO of the same shape on all ranks, becomes the sum or average over the ranks, coalesced."""
    mine = tensor.detach().coalesce()
    indices, values = mine.indices().contiguous(), mine.values().contiguous()
    counts = [torch.empty(1, dtype=torch.int64) for _ in range(call.size)]
    yield from all_gather(call, counts, torch.tensor([values.shape[0]]))
    most, numbers = prod(tensor.shape[: indices.shape[0]]), [int(count) for count in counts]
    if not all(0 <= number <= most for number in numbers):
        raise CommunicationError(
            f"{call.label} on rank {call.rank}: ranks have {numbers} values in their sparse tensors, but the shape "
            f"has room for {most}: give tensors of the same shape on all ranks"
        )
    all_indices = [indices.new_empty(indices.shape[0], number) for number in numbers]
    all_values = [values.new_empty(number, *values.shape[1:]) for number in numbers]
    yield from all_gather(call, all_indices, indices)
    yield from all_gather(call, all_values, values)
    summed = torch.cat(all_values).to(reduction.accumulate)
    total = torch.sparse_coo_tensor(torch.cat(all_indices, 1), summed, tensor.shape, check_invariants=True)
    total = total.coalesce()
    divide_(total.values(), reduction.divisor)
    tensor.copy_(total.to(tensor.dtype))


def all_gather(call: MpiCall, outputs: Tensors, tensor: Tensor) -> Steps:
    """`outputs[i]` becomes rank i's `tensor`."""
    yield (yield from _receive_all(call, outputs, tensor))


def all_gather_into(call: MpiCall, whole: Tensor, tensor: Tensor, topology: Topology) -> Steps:
    """``whole[i]`` becomes rank i's `tensor`. A large one goes to every other node once: a proxy there passes it on."""
    if _takes_rounds(call, tensor.nbytes):
        _copy(whole[call.rank], tensor)
        yield from _gather_in_rounds(call, whole)
    else:
        sends = yield from _receive_all(call, list(whole), tensor, topology)
        yield Sent(sends.holds, sends.missing)


def _receive_all(
    call: MpiCall, outputs: Tensors, tensor: Tensor, topology: Topology | None = None
) -> Generator[Condition, None, Requests]:
    """Gather all tensors. Returns sends that may be under way still."""
    topology = topology or _single_ranks(call.size)
    home, sends = topology.node_rank(call.rank), Requests(call)
    neighbours = [peer for peer in _others(call) if topology.node_rank(peer) == home]
    clients = {rank: topology.clients(rank) for rank in (call.rank, *neighbours)}
    from_clients = [Requests(call) for _ in clients[call.rank]]
    for client, requests in zip(clients[call.rank], from_clients, strict=True):
        requests.recv(outputs[client], client)
    from_neighbours = Requests(call)
    for peer in neighbours:
        for rank in (peer, *clients[peer]):
            from_neighbours.recv(outputs[rank], peer)
    for peer in _others(call):
        if topology.proxy(call.rank, topology.node_rank(peer)) == peer or topology.node_rank(peer) == home:
            sends.send(tensor, peer)
    _copy(outputs[call.rank], tensor)

    def missing() -> list[int]:  # of all that is waited for, so that each is named
        return sorted({rank for requests in (*from_clients, from_neighbours) for rank in requests.missing()})

    for client, requests in zip(clients[call.rank], from_clients, strict=True):
        yield Condition(requests.holds, missing)
        for peer in neighbours:
            sends.send(outputs[client], peer)
    yield from_neighbours
    return sends


_single_ranks = functools.cache(functools.partial(Topology.regular, ranks_per_node=1))


def _others(call: MpiCall) -> Iterator[int]:
    """Yield all other ranks. Each rank begins with another one."""
    for distance in range(1, call.size):
        yield (call.rank + distance) % call.size


def _copy(output: Tensor, given: Tensor) -> None:
    if output.data_ptr() != given.data_ptr():
        output.view(-1).copy_(given.view(-1))
