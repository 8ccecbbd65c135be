"""All-reduce of tensors that are anywhere in memory, for ranks of one node: in parts, through memory that they share.

A rank copies a part of its tensor to its region, reduces its piece of the part over all regions, and copies the others'
pieces back. docs/developers/node-memory.md gives the reason of each wait.
"""

import contextlib
import os
from collections import deque
from collections.abc import Generator

import torch
from torch import Tensor

from hpcfsdp.comm.mpi import exchange
from hpcfsdp.comm.mpi.messages import MpiCall, UnlessFailed
from hpcfsdp.comm.mpi.node_memory import NodeMemory, identity, map_fd, memory_bytes, open_unnamed
from hpcfsdp.comm.progress import Condition, Steps
from hpcfsdp.comm.reduce import Reduction, Tensors, reduce_into

_PART_BYTES = 1 << 22
"""Bytes of a part. Smaller parts mean more meetings of ranks, and larger ones leave the cache before they are read."""
_MOST_BYTES = 1 << 27  # bytes of the parts of all ranks of a node together: one with many ranks has smaller parts
_PARTS = 3  # parts in a region, used in turn: one is filled and one read while one is reduced
_LEAST_BYTES = 1 << 18
_PATH_BYTES = 256
_EPOCHS = 1 << 24  # epochs of the memory in one call, more than any tensor has parts


class StagingMemory:
    """The shared memory of one communicator through which tensors pass, made by the first call."""

    def __init__(self) -> None:
        self.memory: NodeMemory | None = None  # where a rank could not map it, too
        self.is_asked_for = False  # by a first call
        self.calls: deque[int] = deque()  # that use it, one after the other, in the same order on all ranks
        self.condition: Condition | None = None  # of the first of them


def pays(tensor: Tensor) -> bool:
    """Return whether a tensor is large enough for ``all_reduce``."""
    return tensor.nbytes >= _LEAST_BYTES


def all_reduce(call: MpiCall, staging: StagingMemory, tensor: Tensor, reduction: Reduction) -> Steps:
    """`tensor` becomes its reduction over all ranks, which share a node."""
    sequence = call.sequence
    staging.calls.append(sequence)
    try:
        yield Condition(
            lambda: staging.calls[0] == sequence,
            lambda: staging.condition.missing() if staging.condition is not None else [],
        )
        for condition in _in_turn(call, staging, tensor, reduction):
            staging.condition = condition
            yield condition
    finally:
        if staging.calls[0] == sequence:
            staging.condition = None
        staging.calls.remove(sequence)


def _in_turn(call: MpiCall, staging: StagingMemory, tensor: Tensor, reduction: Reduction) -> Steps:
    yield from exchange.barrier(call)  # compares the calls
    if not staging.is_asked_for:
        staging.is_asked_for = True
        nbytes = _PARTS * _part_bytes(call.size)
        shared = yield from _share(call, memory_bytes(call.size, nbytes, gathered=False))
        if shared is not None:
            staging.memory = NodeMemory(shared, call.rank, range(call.size), nbytes, torch.uint8, gathered=False)
    if staging.memory is None:
        yield from exchange.all_reduce(call, tensor, reduction)
    else:
        yield from _reduce_parts(call, staging.memory, tensor, reduction)


def _part_bytes(size: int) -> int:
    return min(_PART_BYTES, _MOST_BYTES // (_PARTS * size) // 4096 * 4096)


def _reduce_parts(call: MpiCall, memory: NodeMemory, tensor: Tensor, reduction: Reduction) -> Steps:
    memory.epoch = call.sequence * _EPOCHS
    parts = tensor.split(max(1, _part_bytes(call.size) // tensor.element_size()))
    regions = [region.view(tensor.dtype).chunk(_PARTS) for region in memory.regions]

    def staged(number: int) -> list[Tensors]:
        """Return for each rank its pieces of a part in shared memory."""
        numel = parts[number].numel()
        return [region[number % _PARTS][:numel].tensor_split(call.size) for region in regions]

    def fill(number: int) -> Condition:
        for rank, (given, piece) in enumerate(
            zip(parts[number].tensor_split(call.size), staged(number)[call.rank], strict=True)
        ):
            if rank != call.rank:  # that piece is reduced here, from where it is
                piece.copy_(given)
        memory.arrive(None)
        return UnlessFailed(call, memory.all_arrived(compare=False))

    memory.epoch += 1
    filled = deque([fill(0)])
    for number, part in enumerate(parts):
        memory.epoch += 1
        if number + 1 < len(parts):
            filled.append(fill(number + 1))
        yield filled.popleft()
        pieces, shared = part.tensor_split(call.size), staged(number)
        mine = [pieces[rank] if rank == call.rank else shared[rank][call.rank] for rank in range(call.size)]
        reduced = shared[call.rank][call.rank]
        reduce_into(reduced, mine, reduction.op, reduction.accumulate, divisor=reduction.divisor)
        memory.done()
        yield UnlessFailed(call, memory.all_done())
        for owner, piece in enumerate(pieces):
            piece.copy_(shared[owner][owner])


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
