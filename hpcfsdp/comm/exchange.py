"""Collectives as messages between pairs of ranks, for tensors anywhere in memory.

Each function is a generator of the conditions it waits for.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence

import torch

from hpcfsdp.comm.messages import Call, Mail
from hpcfsdp.comm.progress import Steps
from hpcfsdp.comm.reduce import Reduction, divide_, reduce_into

_ALL_PAIRS = 128
"""Ranks up to which everyone may write to everyone just to say that it is there."""
_SMALL_BYTES = 1 << 16
"""Up to here a reduction is cheapest as one round of messages, with everything summed where it arrives."""
_CHUNK_BYTES = 1 << 20
"""Messages of a large reduction: what arrives is still in the cache when it is added."""


def all_gather(call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
    mail = call.mail()
    for peer in _others(call):
        mail.receive(outputs[peer], peer)
    for peer in _others(call):
        mail.send(tensor, peer)
    _copy(outputs[call.rank], tensor)
    yield mail


def all_to_all(call: Call, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor]) -> Steps:
    mail = call.mail()
    for peer in _others(call):
        mail.receive(outputs[peer], peer)
    for peer in _others(call):
        mail.send(inputs[peer], peer)
    _copy(outputs[call.rank], inputs[call.rank])
    yield mail


def deliver(call: Call, tensor: torch.Tensor, dst: int) -> Steps:
    mail = call.mail()
    mail.send(tensor, dst)
    yield mail


def accept(call: Call, tensor: torch.Tensor, src: int) -> Steps:
    mail = call.mail()
    mail.receive(tensor, src)
    yield mail


def accept_posted(mail: Mail) -> Steps:
    try:
        yield mail
    finally:
        mail.abandon()  # a handle may keep it; what comes later is for the next receive


def collect(call: Call, outputs: Sequence[torch.Tensor], tensor: torch.Tensor) -> Steps:
    mail = call.mail()
    for peer in _others(call):
        mail.receive(outputs[peer], peer)
    _copy(outputs[call.rank], tensor)
    yield mail


def distribute(call: Call, output: torch.Tensor, inputs: Sequence[torch.Tensor]) -> Steps:
    mail = call.mail()
    for peer in _others(call):
        mail.send(inputs[peer], peer)
    _copy(output, inputs[call.rank])
    yield mail


def broadcast(call: Call, tensor: torch.Tensor, src: int) -> Steps:
    """`src` lets all ranks know that it is there; the bytes go down a tree, each part on as soon as it is here."""
    flat, place = tensor.view(-1), (call.rank - src) % call.size
    nothing, there, passed_on = torch.empty(0), call.mail(), call.mail()
    if place:  # who waits for a parent that waits for `src` would name the parent as missing
        there.receive(nothing, src)
    else:
        for peer in _others(call):
            passed_on.send(nothing, peer)
    # Without its lowest bit, a place in the tree is that of its parent.
    lowest = place & -place or 1 << (call.size - 1).bit_length()
    steps = [1 << bit for bit in reversed(range(lowest.bit_length() - 1))]
    children = [(src + place + step) % call.size for step in steps if place + step < call.size]
    parts = flat.split(max(1, _CHUNK_BYTES // flat.element_size()))
    arrivals = [call.mail() for _ in parts]
    for part, arrival in zip(parts, arrivals, strict=True):
        if place:
            arrival.receive(part, (src + place - lowest) % call.size)
    yield there
    for part, arrival in zip(parts, arrivals, strict=True):
        yield arrival
        for child in children:
            passed_on.send(part, child)
    yield passed_on


def barrier(call: Call) -> Steps:
    """Wait for all ranks."""
    if call.size <= _ALL_PAIRS:
        yield from wait_for(call, range(call.size))
        return
    nothing, distance = torch.empty(0), 1
    while distance < call.size:  # each round a rank hears of twice as many
        mail = call.mail()
        mail.receive(nothing, (call.rank - distance) % call.size)
        mail.send(nothing, (call.rank + distance) % call.size)
        yield mail
        distance *= 2


def wait_for(call: Call, ranks: Sequence[int]) -> Steps:
    """Wait for all of `ranks`. Those that do not come are known, and those that come for something else."""
    nothing, mail = torch.empty(0), call.mail()
    for peer in ranks:
        if peer != call.rank:
            mail.receive(nothing, peer)
            mail.send(nothing, peer)
    yield mail


def reduce_scatter(call: Call, pieces: Sequence[torch.Tensor], output: torch.Tensor, how: Reduction) -> Steps:
    """`output` becomes this rank's piece reduced over all ranks, by pairwise exchange.

    Pieces go in chunks; two are on their way while a third is added. That needs little scratch memory, any dtype
    will do, and the order of summation is fixed. Measured four times faster than MPI_Reduce_scatter_block in shared
    memory.
    """
    mine = pieces[call.rank]
    largest = max(piece.numel() for piece in pieces)  # pieces may be unequal; all ranks count the same chunks
    chunk = max(1, _CHUNK_BYTES // mine.element_size())
    total = output if output.dtype == how.accumulate else torch.empty_like(output, dtype=how.accumulate)
    _copy(total, mine)
    under_way: deque[tuple[Mail, int, torch.Tensor]] = deque()
    for distance in range(1, call.size):
        to, source = (call.rank + distance) % call.size, (call.rank - distance) % call.size
        for begin in range(0, max(largest, 1), chunk):
            mail = call.mail()
            arriving = torch.empty_like(mine[begin : begin + chunk])
            mail.receive(arriving, source)
            mail.send(pieces[to][begin : begin + chunk], to)
            under_way.append((mail, begin, arriving))
            if len(under_way) > 2:
                yield from _add(*under_way.popleft(), total, how)
    while under_way:
        yield from _add(*under_way.popleft(), total, how)
    divide_(total, how.divisor)
    if total is not output:
        output.copy_(total)


def _add(mail: Mail, begin: int, arriving: torch.Tensor, total: torch.Tensor, how: Reduction) -> Steps:
    yield mail
    part = total[begin : begin + arriving.numel()]
    reduce_into(part, [part, arriving], how.op, how.accumulate)


def all_reduce(call: Call, tensor: torch.Tensor, how: Reduction) -> Steps:
    if tensor.numel() * tensor.element_size() * call.size <= _SMALL_BYTES:
        everyone = [torch.empty_like(tensor) if rank != call.rank else tensor for rank in range(call.size)]
        yield from all_gather(call, everyone, tensor)
        reduce_into(tensor, everyone, how.op, how.accumulate, divisor=how.divisor)
        return
    pieces = tensor.tensor_split(call.size)
    yield from reduce_scatter(call, pieces, pieces[call.rank], how)
    yield from all_gather(call, pieces, pieces[call.rank])


def _others(call: Call) -> Iterator[int]:
    """All other ranks, each rank beginning with another one."""
    for distance in range(1, call.size):
        yield (call.rank + distance) % call.size


def _copy(output: torch.Tensor, given: torch.Tensor) -> None:
    if output.data_ptr() != given.data_ptr():
        output.view(-1).copy_(given.view(-1))
