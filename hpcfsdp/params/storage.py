"""Storage of a tensor, allocated and freed while the tensor stays; the buffers of gathered parameters."""

import functools
import weakref
from collections.abc import Callable, Sequence
from math import prod
from typing import Literal

import torch

from hpcfsdp import timeline
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.comm.reduce import Tensors
from hpcfsdp.errors import EngineError

Keepers = Communicator | Literal["node"]
"""Who keeps gathered values from a forward to its backward: these ranks, each an equal part; or each node, all."""


def alloc_storage(tensor: torch.Tensor, size: int | Sequence[int]) -> bool:
    """Allocate storage for `size` elements, a number or a shape. Return False if it was allocated already.

    The content is undefined. Refuses storage of another size, and memory that is not torch's own.
    """
    storage = tensor.untyped_storage()
    wanted = (prod(size) if isinstance(size, Sequence) else size) * tensor.element_size()
    held = storage.size()
    if held == wanted:
        return False
    if held != 0:
        raise EngineError(f"the storage holds {held} bytes where {wanted} are to be allocated: free it first")
    _resize(storage, wanted)
    return True


def free_storage(tensor: torch.Tensor) -> bool:
    """Free the memory of `tensor` and of all its views. Return False if there was none.

    Sizes and strides stay. Refuses a tensor that does not span its storage, and memory that is not torch's own.
    """
    storage = tensor.untyped_storage()
    held = storage.size()
    if held == 0:
        return False
    spanned = tensor.numel()
    if not tensor.is_contiguous():
        spanned = 1 + sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride(), strict=True))
    if tensor.storage_offset() != 0 or spanned * tensor.element_size() != held:
        raise EngineError(
            f"the tensor is not the sole occupant of its storage: it starts at element {tensor.storage_offset()} and "
            f"has shape {tuple(tensor.shape)} of {tensor.dtype}, the storage holds {held} bytes"
        )
    _resize(storage, 0)
    return True


def nothing_for(count: int, dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return so many elements of NaN, so that what is read by mistake is seen; of 0 where there is no NaN."""
    value = torch.nan if dtype.is_floating_point or dtype.is_complex else 0
    return torch.full((count,), value, dtype=dtype, device=device)


def nothing_of(shape: Sequence[int], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Return a tensor of any shape with the memory of one element of ``nothing_for``."""
    return nothing_for(1, dtype, device)[0].expand(tuple(shape))


def data_ptr_allocated(tensor: torch.Tensor) -> bool:
    """Return whether `tensor` has memory: not after ``free_storage``, on the meta device, or without elements."""
    return tensor.untyped_storage().data_ptr() != 0


def _resize(storage: torch.UntypedStorage, size_bytes: int) -> None:
    try:
        storage.resize_(size_bytes)
    except RuntimeError:
        if storage.resizable():
            raise
        raise EngineError(
            f"the storage of {storage.size()} bytes cannot be resized to {size_bytes}: its memory is not torch's own "
            "(NumPy, shared memory, a window of MPI); copy the tensor first"
        ) from None


class Buffer:
    """Gathered parameters. Here they stay in memory; ``Transient`` allocates and frees it."""

    stays = True  # whether the memory stays, so that they are valid between two barriers
    full: torch.Tensor  # 1-D, all shards; always the same tensor, but its memory may be freed

    def gather(self, *mine: torch.Tensor, async_op: bool) -> Work | None:
        """Gather all shards, of which this rank has one, into `full`. Collective over the ranks of the shards."""
        del mine, async_op

    def free(self, keepers: Keepers | None = None) -> None:
        """Free the memory, unless it stays. `keepers` may keep the values, the same on all ranks."""


class Whole(Buffer):
    """One rank holds everything: the shard is the full parameter."""

    def __init__(self, shard: torch.Tensor) -> None:
        self.full = shard


class Transient(Buffer):
    """Memory that is allocated for each gather, and freed after use."""

    stays = False

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, device: torch.device) -> None:
        self._comm = comm
        self.full = torch.empty(numel, dtype=dtype, device=device)  # until `free`: the caller makes views of it first
        self._segment = segment(self.full, comm)

    def alloc(self) -> None:
        """Allocate the memory, unless it is there."""
        with self._comm.gathering_memory():
            changed = alloc_storage(self.full, self.full.numel())
        if changed and timeline.recorder is not None:
            timeline.recorder.count_gathered(self.full.numel() * self.full.element_size())

    def gather(self, *mine: torch.Tensor, async_op: bool) -> Work | None:
        (shard,) = mine
        self.alloc()
        if self._comm.size == 1:
            self.full.copy_(shard, non_blocking=True)
            return None
        ready = shard
        if shard.dtype != self.full.dtype or shard.device != self.full.device:
            ready = self._segment
            ready.copy_(shard, non_blocking=True)
        self._comm.announce_gather(self.full)
        return self._comm.all_gather_into_tensor(self.full, ready, async_op=async_op)

    def free(self, keepers: Keepers | None = None) -> None:
        del keepers
        if free_storage(self.full) and timeline.recorder is not None:
            timeline.recorder.count_gathered(-self.full.numel() * self.full.element_size())


class KeptPart:
    """This rank's part of values in a ``Transient``, or on their way there, which some ranks keep together."""

    def __init__(self) -> None:
        self._comm: Communicator | None = None
        self._part: torch.Tensor | None = None

    @property
    def is_there(self) -> bool:
        return self._part is not None

    def taking(self, gathered: torch.Tensor, keepers: Keepers | None) -> Callable[[], None] | None:
        """Return what keeps the part of 1-D values, on the stream that gathers them; None if no backward may follow."""
        if self.is_there or not isinstance(keepers, Communicator) or not torch.is_grad_enabled():
            return None
        return functools.partial(self._take, gathered, keepers)

    def _take(self, gathered: torch.Tensor, comm: Communicator) -> None:
        self._comm, self._part = comm, segment(gathered, comm).clone()

    def gather(self, gathered: torch.Tensor, *, async_op: bool) -> Work | None:
        """Gather the values again. Collective over the ranks that keep them."""
        assert self._comm is not None and self._part is not None
        self._comm.announce_gather(gathered)
        return self._comm.all_gather_into_tensor(gathered, self._part, async_op=async_op)

    def drop(self) -> None:
        self._comm = self._part = None


class NodeBuffer(Buffer):
    """Gathered parameters in memory that the ranks of a node share, where other nodes have a copy of their own.

    Each rank writes its own part, and what it receives from other nodes for all of its node. The memory is freed when
    all ranks of the node have freed it.
    """

    stays = False

    def __init__(
        self, comm: Communicator, numel: int, dtype: torch.dtype, parts_of: Callable[[torch.Tensor, int], Tensors]
    ) -> None:
        """`parts_of` the memory returns the views that are those of a rank. Collective over `comm`."""
        self._comm = comm
        self.full = comm.alloc(numel, dtype, gathered=True)
        weakref.finalize(self, comm.free, self.full).atexit = False
        self._parts = [parts_of(self.full, rank) for rank in range(comm.size)]
        self._is_filled = self._is_kept = False
        self._kept: tuple[Communicator, list[torch.Tensor]] | None = None  # this rank's part, and who has the others

    @property
    def share_bytes(self) -> int:
        """Bytes for each rank of the node."""
        return self.full.numel() * self.full.element_size() // self._comm.node_size

    def gather(self, *mine: torch.Tensor, async_op: bool) -> Work | None:
        if self._is_kept:
            self._is_kept = False
            return None
        if not self._is_filled and timeline.recorder is not None:
            timeline.recorder.count_gathered(self.share_bytes)
        self._is_filled = True
        if self._kept is not None:
            keepers, part = self._kept
            parts = [self._part_of(place, keepers) for place in range(keepers.size)]
            return self._comm.all_gather_parts(self.full, parts, part, within=keepers, async_op=async_op)
        return self._comm.all_gather_parts(self.full, self._parts, mine, async_op=async_op)

    def free(self, keepers: Keepers | None = None) -> None:
        self._is_kept = self._is_filled and keepers == "node"
        if keepers is None:
            self._kept = None
        elif isinstance(keepers, Communicator) and self._is_filled and self._kept is None:
            self._kept = keepers, [part.clone() for part in self._part_of(keepers.rank, keepers)]
        if self._is_filled and not self._is_kept:
            self._is_filled = False
            self._comm.release(self.full)
            if timeline.recorder is not None:
                timeline.recorder.count_gathered(-self.share_bytes)

    def _part_of(self, place: int, keepers: Communicator) -> list[torch.Tensor]:
        """Return the shards that one of the ranks keeps that together keep all."""
        count = self._comm.size // keepers.size
        return [view for parts in self._parts[place * count : (place + 1) * count] for view in parts]


class SharedBuffer(Buffer):
    """Gathered parameters in memory that all ranks share. Each rank writes its own segment; then they are gathered.

    No byte moves, and a node holds every value once. A segment may be written only while no rank computes with it, so
    the ranks meet in a barrier before its first and after its last use.
    """

    def __init__(self, comm: Communicator, numel: int, dtype: torch.dtype, *, is_cast: bool) -> None:
        """`is_cast`: the segment is a copy of the shard in another dtype, not the shard. Collective over `comm`."""
        self.is_cast = is_cast
        self.full = comm.alloc(numel, dtype, gathered=True)
        weakref.finalize(self, comm.free, self.full).atexit = False
        self.segment = segment(self.full, comm)

    def write(self, shard: torch.Tensor) -> None:
        """Copy this rank's shard into its segment, unless it is the segment."""
        if shard.data_ptr() != self.segment.data_ptr():
            self.segment.copy_(shard)
