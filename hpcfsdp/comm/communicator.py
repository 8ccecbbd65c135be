"""The protocol that the engine and the checkpoints speak, and what all its implementations share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal, Protocol

import torch

from hpcfsdp.errors import CommunicationError

ReduceOp = Literal["sum", "average", "product", "min", "max", "band", "bor", "bxor"]


class Work(Protocol):
    """A collective under way."""

    def wait(self) -> None:
        """Return when the result may be used. Raises what went wrong."""

    def is_completed(self) -> bool:
        """Whether the result may be used already; moves the collective on where it can."""


class Communicator(Protocol):
    """Collectives over `size` ranks. All methods are collective over them unless they say otherwise.

    Tensors are contiguous and on `device`. A call returns when its result may be used and its inputs may be changed; on
    a GPU that means: by work that is enqueued on the current stream afterwards. With ``async_op`` it returns a ``Work``
    at once, and the tensors must be left alone until that has been waited for. Work of one rank that is never waited
    for is completed by later calls.

    Tensors of float16, bfloat16 and fp8 are reduced in float32 unless `accumulate` says otherwise. An average of
    integers is their sum, divided and rounded towards zero. The order of
    reduction is fixed: equal input gives bitwise equal output, the same on all ranks.
    """

    rank: int
    size: int
    device: torch.device

    # Memory

    @property
    def shares_gathered(self) -> bool:
        """Whether memory from ``alloc(gathered=True)`` is one memory for all ranks."""

    @property
    def shares_memory(self) -> bool:
        """Whether some ranks read each other's memory from ``alloc``; the same on all ranks."""

    def alloc(self, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> torch.Tensor:
        """Memory of `numel` elements, 1-D and zero, on which the collectives of this communicator work best.

        Where ranks share a node's memory, peers read it directly instead of being sent its content.

        Args:
            gathered: memory for the output of ``all_gather_into_tensor``, of which a node may hold one copy for all of
                its ranks. A rank may write its own segment (``numel / size`` elements) only, and gathering that segment
                into the whole moves no bytes within the node. See ``release`` and ``claim``.
        """

    def free(self, tensor: torch.Tensor) -> None:
        """Not collective. Give back what ``alloc`` returned; the memory is gone when no rank uses it any more."""

    def release(self, full: torch.Tensor) -> None:
        """Not collective. Say that this rank reads gathered memory no more, until it is gathered again."""

    def claim(self, full: torch.Tensor) -> None:
        """Wait until all ranks that share gathered memory have released it: now its own segment may be written."""

    # Collectives on tensors

    def all_gather_into_tensor(
        self, output: torch.Tensor, shard: torch.Tensor, *, async_op: bool = False
    ) -> Work | None:
        """`output` (size * n elements) becomes the shards (n elements each) of all ranks, in rank order."""

    def reduce_scatter_tensor(
        self,
        output: torch.Tensor,
        full: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Work | None:
        """`output` (n elements) becomes segment `rank` of `full` (size * n elements), reduced over ranks.

        Three dtypes: values travel in that of `full`, are summed in `accumulate` (default: ``accumulate_dtype`` of
        `full`), and are kept in that of `output`.

        Args:
            label: what it is that is reduced. Where it costs nothing (in shared memory) ranks that reduce different
                things at a time raise; elsewhere it is for messages.
        """

    def all_reduce(
        self,
        tensor: torch.Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Work | None:
        """`tensor` becomes its reduction over all ranks, bitwise the same on each. See ``reduce_scatter_tensor``."""

    def broadcast(self, tensor: torch.Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """`tensor` becomes what it is on rank `src`."""

    def all_gather(
        self, outputs: Sequence[torch.Tensor], tensor: torch.Tensor, *, async_op: bool = False
    ) -> Work | None:
        """`outputs[i]` becomes rank i's `tensor`. Ranks may contribute different numbers of elements, also none."""

    def all_to_all(
        self, outputs: Sequence[torch.Tensor], inputs: Sequence[torch.Tensor], *, async_op: bool = False
    ) -> Work | None:
        """`outputs[i]` becomes ``inputs[rank]`` of rank i. Sizes may differ between pairs, and may be 0."""

    def gather(
        self, outputs: Sequence[torch.Tensor] | None, tensor: torch.Tensor, dst: int, *, async_op: bool = False
    ) -> Work | None:
        """On rank `dst` `outputs[i]` becomes rank i's `tensor`; `outputs` is None elsewhere. Sizes may differ."""

    def scatter(
        self, output: torch.Tensor, inputs: Sequence[torch.Tensor] | None, src: int, *, async_op: bool = False
    ) -> Work | None:
        """`output` becomes ``inputs[rank]`` of rank `src`; `inputs` is None elsewhere. Sizes may differ."""

    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait for all ranks."""

    def labelled_barrier(self, note: str) -> None:
        """Wait for all ranks, and raise on each of them, naming both, if one came with another note.

        Raises:
            CommunicationError: the notes differ.
        """

    # Collectives on small, picklable Python objects

    def all_gather_object(self, value: Any) -> list[Any]:
        """The values of all ranks in rank order."""

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """The value of rank `src`."""

    def subgroup(self, ranks: Sequence[int]) -> Communicator:
        """Collective over `ranks`, ascending ranks of this communicator, which the others need not call."""


def segment(full: torch.Tensor, comm: Communicator) -> torch.Tensor:
    """This rank's part of a 1-D tensor of ``comm.size`` equal parts, as a view."""
    numel = full.numel() // comm.size
    return full[comm.rank * numel : (comm.rank + 1) * numel]


_NARROW = {torch.float16, torch.bfloat16} | {
    getattr(torch, name)
    for name in ("float8_e4m3fn", "float8_e5m2", "float8_e4m3fnuz", "float8_e5m2fnuz", "float8_e8m0fnu")
    if hasattr(torch, name)
}
# torch has these dtypes but hardly any arithmetic for them; wider signed ones wrap around to the same bits.
_WITHOUT_ARITHMETIC = {
    torch.uint16: torch.int32,
    torch.uint32: torch.int64,
    torch.uint64: torch.int64,
    torch.complex32: torch.complex64,
}


def accumulate_dtype(dtype: torch.dtype, op: str = "sum") -> torch.dtype:
    """The dtype in which values of `dtype` are reduced by `op`."""
    if dtype in _NARROW:
        return torch.float32
    if op == "average" and not dtype.is_floating_point and not dtype.is_complex:
        return torch.int64  # an average fits where the sum that it is made of does not
    return _WITHOUT_ARITHMETIC.get(dtype, dtype)


def refuse_op(op: str, dtype: torch.dtype) -> str | None:
    """Why values of `dtype` cannot be reduced by `op`, None where they can."""
    whole = not dtype.is_floating_point and not dtype.is_complex
    if op not in ("sum", "average", "product", "min", "max", "band", "bor", "bxor"):
        return f"unknown reduction {op!r}"
    if op == "average" and dtype in (torch.bool, torch.uint64):
        return f"{dtype} has no average: sum, and divide in a dtype of your choice"
    if op in ("band", "bor", "bxor") and not whole:
        return f"{op} needs whole numbers or bool, not {dtype}"
    if op in ("min", "max") and (dtype.is_complex or dtype is torch.uint64):
        return f"{dtype} has no order that torch can compute with: {op} is not there"
    return None


def check_sizes(operation: str, comm: Communicator, full: torch.Tensor, shard: torch.Tensor) -> None:
    """Refuse tensors of which the one is not `size` times the other."""
    if full.numel() != comm.size * shard.numel():
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: the full tensor has {full.numel()} elements, the shard "
            f"{shard.numel()}; it must have {comm.size} times the shard's"
        )
    begin, end = _span(full)
    first, last = _span(shard)
    mine = begin + comm.rank * (end - begin) // comm.size
    if first < end and begin < last and (first != mine or last - first != (end - begin) // comm.size):
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: the shard lies within the full tensor, but is not "
            f"segment {comm.rank} of it: others would read what is being written"
        )


def _span(tensor: torch.Tensor) -> tuple[int, int]:
    begin = tensor.data_ptr()
    return begin, begin + tensor.numel() * tensor.element_size()


def check_same_numel(operation: str, comm: Communicator, output: torch.Tensor, given: torch.Tensor) -> None:
    """Refuse an output that cannot hold what its own rank contributes."""
    if output.numel() != given.numel():
        raise CommunicationError(
            f"{operation} on rank {comm.rank}: its own output has {output.numel()} elements, its input {given.numel()}"
        )


def check_alloc(comm: Communicator | PlainMemory, numel: int, gathered: bool) -> None:
    """Refuse a size that no memory can have, or that does not divide into segments."""
    if numel < 0 or (gathered and numel % comm.size):
        why = f"are not {comm.size} equal segments" if numel >= 0 else "are no size"
        raise CommunicationError(f"alloc on rank {comm.rank}: {numel} elements {why}")


class PlainMemory:
    """The memory of a communicator that shares none: what torch allocates, and nothing to wait for."""

    shares_memory = False

    rank: int
    size: int
    device: torch.device

    @property
    def shares_gathered(self) -> bool:
        return False

    def alloc(self, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> torch.Tensor:
        check_alloc(self, numel, gathered)
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def free(self, tensor: torch.Tensor) -> None:
        pass

    def release(self, full: torch.Tensor) -> None:
        pass

    def claim(self, full: torch.Tensor) -> None:
        pass


def check_members(comm: Communicator, ranks: Sequence[int]) -> list[int]:
    """Refuse a list that is not one of ascending ranks, this one among them; the list."""
    members = list(ranks)
    if comm.rank not in members or members != sorted(set(members) & set(range(comm.size))):
        raise CommunicationError(
            f"subgroup on rank {comm.rank} of {comm.size}: {members} must be ascending ranks of this communicator, "
            "this rank among them"
        )
    return members


def check_tensors(operation: str, comm: Communicator, *tensors: torch.Tensor, same_dtype: bool = True) -> None:
    """Refuse tensors that no transport could take as they are: other device, other dtype, holes in memory."""
    for tensor in tensors:
        where = f"{operation} on rank {comm.rank} of {comm.size}"
        if not isinstance(tensor, torch.Tensor):
            raise CommunicationError(f"{where}: expected tensors, got {type(tensor).__name__}")
        if tensor.device.type != comm.device.type:
            raise CommunicationError(
                f"{where}: the tensor is on {tensor.device}, this communicator works on {comm.device.type}; move it "
                f"with .to({comm.device.type!r})"
            )
        if tensor.layout is not torch.strided or not tensor.is_contiguous():
            how = tensor.layout if tensor.layout is not torch.strided else f"stride {tensor.stride()}"
            raise CommunicationError(f"{where}: the tensor of shape {tuple(tensor.shape)} is not contiguous ({how})")
        if same_dtype and tensor.dtype != tensors[0].dtype:
            raise CommunicationError(f"{where}: the tensors differ in dtype: {tensors[0].dtype} and {tensor.dtype}")


def check_peer(operation: str, comm: Communicator, peer: int) -> None:
    """Refuse a rank that is not in the communicator."""
    if not 0 <= peer < comm.size:
        raise CommunicationError(
            f"{operation} on rank {comm.rank}: there is no rank {peer}, they are 0 to {comm.size - 1}"
        )


def check_list(operation: str, comm: Communicator, what: str, tensors: Sequence[torch.Tensor] | None) -> None:
    """Refuse a list that does not hold one tensor for each rank."""
    if tensors is None or len(tensors) != comm.size:
        given = "None" if tensors is None else f"{len(tensors)} tensor(s)"
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: {what} must hold one tensor for each rank, got {given}"
        )
