"""Collectives of tensors that are anywhere in memory, for ranks of one node: in parts, through memory that they share.

Parts are so small that they stay in the cache while they pass. docs/developers/node-memory.md gives the reason of each
wait.
"""

import contextlib
import os
from collections import deque
from collections.abc import Callable, Generator
from typing import Any

import torch
from torch import Tensor

from hpcfsdp.comm.mpi import exchange
from hpcfsdp.comm.mpi.messages import MpiCall, UnlessFailed
from hpcfsdp.comm.mpi.node_memory import NodeMemory, identity, map_fd, memory_bytes, open_unnamed
from hpcfsdp.comm.progress import Condition, Steps
from hpcfsdp.comm.reduce import Reduction, Tensors, reduce_into

_PART_BYTES = 1 << 21
"""Bytes of a part. Smaller parts mean more meetings of ranks, and larger ones leave the cache before they are read."""
_MOST_BYTES = 1 << 27  # bytes of the parts of all ranks of a node together: one with many ranks has smaller parts
_PARTS = 2  # parts in a region, used in turn: one is filled while one is read
_PATH_BYTES = 256
_EPOCHS = 1 << 24  # epochs of the memory in one call, more than any tensor has parts


class StagingMemory:
    """The shared memory of one communicator through which tensors pass, made by the first call."""

    def __init__(self) -> None:
        self.memory: NodeMemory | None = None  # where a rank could not map it, too
        self.is_asked_for = False  # by a first call
        self.calls: deque[int] = deque()  # that use it, one after the other, in the same order on all ranks
        self.condition: Condition | None = None  # of the first of them


def in_turn(call: MpiCall, staging: StagingMemory, *way: Any) -> Steps:
    """Take the steps of a collective, `way` as ``_with_memory`` has it, when those begun before it have ended."""
    sequence = call.sequence
    staging.calls.append(sequence)
    try:
        yield Condition(
            lambda: staging.calls[0] == sequence,
            lambda: staging.condition.missing() if staging.condition is not None else [],
        )
        for condition in _with_memory(call, staging, *way):
            staging.condition = condition
            yield condition
    finally:
        if staging.calls[0] == sequence:
            staging.condition = None
        staging.calls.remove(sequence)


def _with_memory(
    call: MpiCall,
    staging: StagingMemory,
    through_memory: Callable[..., Steps],
    by_messages: Callable[..., Steps],
    *arguments: object,
) -> Steps:
    """Take the steps of a collective of this module; by messages where a rank could not map the memory."""
    yield from exchange.barrier(call)  # compares the calls
    if not staging.is_asked_for:
        staging.is_asked_for = True
        nbytes = 2 * _PARTS * _part_bytes(call.size)
        shared = yield from _share(call, memory_bytes(call.size, nbytes, gathered=False))
        if shared is not None:
            staging.memory = NodeMemory(shared, call.rank, range(call.size), nbytes, torch.uint8, gathered=False)
    if staging.memory is None:
        yield from by_messages(call, *arguments)
    else:
        yield from through_memory(call, staging.memory, *arguments)


def _part_bytes(size: int) -> int:
    return min(_PART_BYTES, _MOST_BYTES // (_PARTS * size) // 4096 * 4096)


def all_reduce(call: MpiCall, memory: NodeMemory, tensor: Tensor, reduction: Reduction) -> Steps:
    """`tensor` becomes its reduction over all ranks, each of which reduces its piece of every part."""
    parts = tensor.split(max(1, _part_bytes(call.size) // tensor.element_size()))
    given, reduced = _places(memory, tensor.dtype)

    def mine(part: Tensor) -> slice:
        return slice(part.numel() * call.rank // call.size, part.numel() * (call.rank + 1) // call.size)

    def fill(number: int) -> None:
        part, place = parts[number], given[call.rank][number % _PARTS]
        piece = mine(part)  # is reduced here, from where it is
        place[: piece.start].copy_(part[: piece.start])
        place[piece.stop : part.numel()].copy_(part[piece.stop :])

    def reduce(number: int) -> None:
        part, turn = parts[number], number % _PARTS
        piece = mine(part)
        sources = [(part if rank == call.rank else places[turn])[piece] for rank, places in enumerate(given)]
        reduce_into(reduced[turn][piece], sources, reduction.op, reduction.accumulate, divisor=reduction.divisor)

    def take(number: int) -> None:
        parts[number].copy_(reduced[number % _PARTS][: parts[number].numel()])

    return _in_parts(call, memory, len(parts), fill, reduce, take)


def reduce_scatter(call: MpiCall, memory: NodeMemory, pieces: Tensor, output: Tensor, reduction: Reduction) -> Steps:
    """`output` becomes this rank's row of `pieces` reduced over all ranks."""
    parts = pieces.split(max(1, _part_bytes(call.size) // output.element_size() // call.size), 1)
    outputs = output.split(parts[0].shape[1])
    given, _ = _places(memory, output.dtype)
    order = [(call.rank - distance) % call.size for distance in range(call.size)]  # of summation, as by messages

    def rows(rank: int, number: int) -> Tensor:
        part = parts[number]
        return part if rank == call.rank else given[rank][number % _PARTS][: part.numel()].view_as(part)

    def fill(number: int) -> None:
        part = parts[number]
        place = given[call.rank][number % _PARTS][: part.numel()].view_as(part)
        place[: call.rank].copy_(part[: call.rank])
        place[call.rank + 1 :].copy_(part[call.rank + 1 :])

    def reduce(number: int) -> None:
        sources = [rows(rank, number)[call.rank] for rank in order]
        reduce_into(outputs[number], sources, reduction.op, reduction.accumulate, divisor=reduction.divisor)

    return _in_parts(call, memory, len(parts), fill, reduce)


def all_gather_into(call: MpiCall, memory: NodeMemory, whole: Tensor, tensor: Tensor) -> Steps:
    """``whole[i]`` becomes rank i's `tensor`."""
    parts = tensor.split(max(1, _part_bytes(call.size) // 2 // tensor.element_size()))
    outputs = whole.split(parts[0].numel(), 1)
    given, _ = _places(memory, tensor.dtype)

    def fill(number: int) -> None:
        given[call.rank][number % _PARTS][: parts[number].numel()].copy_(parts[number])

    def take(number: int) -> None:
        for rank, output in enumerate(outputs[number]):
            if rank != call.rank:
                output.copy_(given[rank][number % _PARTS][: output.numel()])
            elif output.data_ptr() != parts[number].data_ptr():
                output.copy_(parts[number])

    return _in_parts(call, memory, len(parts), fill, take)


_LEAST_BYTES: dict[Callable[..., Steps], int] = {all_reduce: 1 << 18, reduce_scatter: 1 << 20, all_gather_into: 1 << 22}
"""Bytes of the full tensor from which this way is the faster one on 2, 3 and 4 ranks."""


def pays(through_memory: Callable[..., Steps], full: Tensor) -> bool:
    """Return whether a full tensor is large enough for a collective of this module."""
    return full.nbytes >= _LEAST_BYTES[through_memory]


def _places(memory: NodeMemory, dtype: torch.dtype) -> tuple[list[Tensors], Tensors]:
    """Return for each rank the places of the parts that it gives, and the places of reduced ones, in the first region.

    One place of reduced parts for all ranks: they are copied from there as a whole.
    """
    halves = [region.view(dtype).chunk(2) for region in memory.regions]
    return [half.chunk(_PARTS) for half, _ in halves], halves[0][1].chunk(_PARTS)


def _in_parts(
    call: MpiCall,
    memory: NodeMemory,
    count: int,
    fill: Callable[[int], None],
    reduce: Callable[[int], None],
    take: Callable[[int], None] | None = None,
) -> Steps:
    """Pass `count` parts, by number: `fill` a place, `reduce` what all ranks have filled, `take` what all have reduced.

    A part is filled before the rank waits for the one before it: its peers reduce meanwhile.
    """

    def at(number: int) -> NodeMemory:
        memory.epoch = call.sequence * _EPOCHS + number
        return memory

    for number in range(-1, count):
        if number + 1 < count:
            fill(number + 1)
            at(number + 1).arrive(None)
        if number >= 0:
            yield UnlessFailed(call, at(number).all_arrived(compare=False))
            reduce(number)
            at(number).done()
            if take is not None or number + _PARTS < count:  # that part has the same place
                yield UnlessFailed(call, at(number).all_done())
            if take is not None:
                take(number)


def _share(call: MpiCall, nbytes: int) -> Generator[Condition, None, Tensor | None]:
    """Return memory that all ranks have mapped, None if one could not. The lowest rank makes it, without a name."""
    made, memory, found = -1, None, torch.zeros(_PATH_BYTES, dtype=torch.uint8)
    try:
        if call.rank == 0:
            with contextlib.suppress(OSError):
                made, path, _ = open_unnamed(None, nbytes)
                text = " ".join(map(str, (path, *identity(made)))).encode()
                found[: len(text)] = torch.frombuffer(bytearray(text), dtype=torch.uint8)
        yield from exchange.broadcast(call, found, 0)
        with contextlib.suppress(OSError, RuntimeError, ValueError):
            path, *wanted = bytes(found.tolist()).rstrip(b"\0").decode().split()
            fd = made if call.rank == 0 else open_unnamed(path, nbytes)[0]
            try:
                memory = map_fd(fd, nbytes) if list(map(str, identity(fd))) == wanted else None
            finally:
                if fd != made:
                    os.close(fd)
        has_mapped = [torch.empty(1, dtype=torch.bool) for _ in range(call.size)]
        yield from exchange.all_gather(call, has_mapped, torch.tensor([memory is not None]))
        return memory if all(has_mapped) else None
    finally:
        if made >= 0:
            os.close(made)
