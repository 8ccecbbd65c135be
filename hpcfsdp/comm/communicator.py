"""The interface that the engine and the checkpoints use, and the checks of arguments that all transports share."""

import contextlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import torch
from torch import Tensor

from hpcfsdp import _compat
from hpcfsdp.comm.progress import Finished
from hpcfsdp.comm.reduce import ReduceOp, Reduction, Tensors, accumulate_dtype, refuse_op
from hpcfsdp.errors import CommunicationError
from hpcfsdp.hang import calls
from hpcfsdp.hang.waits import same_call
from hpcfsdp.launch.topology import Topology


class Work(Protocol):
    """A collective in progress."""

    def wait(self) -> None:
        """Return when the result may be used. Raises the error of the collective."""

    def is_completed(self) -> bool:
        """Return whether the result may be used already. Advances the collective where the transport allows it."""


_OF_GROUP = "high_priority min_ctas max_ctas cga_cluster_size".split()


@dataclass(frozen=True, kw_only=True)
class CommOptions:
    """How the ranks of a unit communicate on an accelerator: the same on all ranks, of any transport by default.

    On a CPU the first and the third change nothing. The last four are those of NCCL's process groups: gathers,
    reductions, and reductions over replicas then have groups of their own, made with them.
    """

    separate_reductions: bool | None = None
    """Whether reductions have a communicator beside that of gathers, and neither waits for the other. None: not under
    HIP, nor with CUDA_DEVICE_MAX_CONNECTIONS=1."""
    sums_by: Literal["hpcfsdp", "backend"] = "hpcfsdp"
    """Who adds up gradients over ranks: hpcfsdp, in at least float32; or the backend's own reduce-scatter and
    all-reduce, in the reduce dtype and with the divisions of torch's FSDP2."""
    memory: Literal["plain", "registered", "symmetric"] | None = None
    """Where values are gathered: memory of torch, memory that is registered with the backend, or torch's symmetric
    memory. None: plain, or registered with HPCFSDP_REGISTERED_MEMORY=1."""
    high_priority: bool = False
    """Whether kernels of collectives come before others (``is_high_priority_stream``)."""
    min_ctas: int | None = None
    """The fewest blocks of a collective's kernel, 1 or more; as the next one."""
    max_ctas: int | None = None
    """The most of them."""
    cga_cluster_size: int | None = None
    """Blocks that the device schedules together, 0 or more."""

    def __post_init__(self) -> None:
        """Raise ValueError for a value that is none of those."""
        allowed = [("separate_reductions", (None, True, False)), ("sums_by", ("hpcfsdp", "backend"))]
        allowed += [("memory", (None, "plain", "registered", "symmetric")), ("high_priority", (True, False))]
        for name, values in allowed:
            if getattr(self, name) not in values:
                raise ValueError(f"CommOptions: {name} is one of {values}, not {getattr(self, name)!r}")
        for name in _OF_GROUP[1:]:
            value, least = getattr(self, name), int(name != "cga_cluster_size")
            if value is not None and (isinstance(value, bool) or not isinstance(value, int) or value < least):
                raise ValueError(f"CommOptions: {name} is None or a number of at least {least}, not {value!r}")
        if None not in (self.min_ctas, self.max_ctas) and self.min_ctas > self.max_ctas:  # type: ignore[operator]
            raise ValueError(f"CommOptions: min_ctas={self.min_ctas} is more than max_ctas={self.max_ctas}")

    @property
    def of_group(self) -> tuple[tuple[str, Any], ...]:
        """The options of process groups that are given, with their names."""
        values = ((name, getattr(self, name)) for name in _OF_GROUP)
        return tuple((name, value) for name, value in values if value is not None and value is not False)


KEPT_PART = 1 / 8
"""The part of the node's memory up to which released memory is kept for the next gathers: to write to pages that are
new takes ten times as long as to others."""


class Communicator:
    """Collectives over `size` ranks. All methods are collective over them unless they say otherwise.

    Tensors are contiguous and on `device`. A call returns when its result may be used and its inputs may be changed; on
    a GPU that means: by work that is enqueued on the current stream afterwards. With ``async_op`` it returns a ``Work``
    at once, and the caller must not touch the tensors until it has waited for that. Later calls complete work that a
    rank never waits for.

    Tensors of float16, bfloat16 and fp8 are reduced in float32 unless `accumulate` names another dtype. An average of
    integers is their sum, divided and rounded towards zero. The order of reduction is fixed: equal input gives bitwise
    equal output, the same on all ranks.

    This class checks arguments, and allocates memory that no other rank sees. Its subclasses are the transports: they
    implement the methods that begin with an underscore.
    """

    rank: int
    size: int
    device: torch.device
    shares_gathered = False  # whether memory from ``alloc(gathered=True)`` is one memory for all ranks
    shares_memory = False  # whether some ranks read each other's memory from ``alloc``; the same on all ranks
    spans_nodes = False  # whether others of them only exchange messages
    node_size = 1  # ranks that share memory with this one, itself included
    topology: Topology | None = None  # which ranks share a node, where that is known

    # Memory

    @_compat.outside_of_modes
    @torch.inference_mode(False)
    def alloc(self, numel: int, dtype: torch.dtype, *, gathered: bool = False) -> Tensor:
        """Allocate `numel` elements, 1-D and zero, for which the collectives of this communicator are fastest.

        Where ranks share a node's memory, peers read it directly and receive no messages. Memory that is `gathered` is
        for the output of ``all_gather_into_tensor``: a node may hold one copy for all of its ranks. A rank may write
        its own segment (``numel / size`` elements) only, and only when no rank reads it: a barrier separates reads from
        writes. Gathering that segment moves no bytes within the node.
        """
        if numel < 0:
            raise CommunicationError(f"alloc on rank {self.rank}: size must be >= 0, got {numel}")
        if gathered and numel % self.size:
            raise CommunicationError(
                f"alloc on rank {self.rank}: {numel} elements do not divide into {self.size} equal segments"
            )
        return self._alloc(numel, dtype, gathered)

    def free(self, tensor: Tensor) -> None:
        """Not collective. Free what ``alloc`` returned. The memory exists until no rank uses it any more."""

    def all_gather_parts(
        self,
        memory: Tensor,
        parts: Sequence[Tensors],
        mine: Tensors,
        *,
        within: "Communicator | None" = None,
        async_op: bool = False,
    ) -> Work | None:
        """Gather into `memory` from ``alloc(gathered=True)``: ``parts[i]``, views of it, become rank i's `mine`.

        Parts of different ranks may not overlap, and their elements are the same on all ranks. Those of `mine` are
        cast. For ranks of several nodes: each receives a part of what comes from other nodes, for all of its node.
        `within` are ranks of whole nodes that alone have the parts, and gather.
        """
        raise NotImplementedError

    def release(self, memory: Tensor) -> None:
        """Not collective. Free memory of ``all_gather_parts`` until the next one: once all ranks of the node say so.

        A part of the node's memory may stay in use, for the next gathers. Ranks of one node free nothing.
        """

    def gathering_memory(self) -> contextlib.AbstractContextManager[Any]:
        """Return a context in which to allocate the output of a gather, right before it, where ``alloc`` does not."""
        return contextlib.nullcontext()

    def announce_gather(self, output: Tensor) -> None:
        """Have peers know memory of ``gathering_memory``, right before a gather into it."""

    # Choices

    def choosing(self, options: CommOptions) -> "Communicator":
        """Not collective. Return the same communicator with other options, as far as they concern its collectives."""
        del options
        return self

    def lacking(self, options: CommOptions) -> list[str]:
        """Not collective. Return the options that the backend does not have, as text."""
        named = [f"{name}={value!r}" for name, value in options.of_group]
        return named + ["sums_by='backend'"] * (options.sums_by == "backend")

    # Collectives on tensors

    @_compat.outside_of_modes
    def all_gather_into_tensor(self, output: Tensor, shard: Tensor, *, async_op: bool = False) -> Work | None:
        """`output` (size * n elements) becomes the shards (n elements each) of all ranks, in rank order."""
        label = f"all_gather_into_tensor of {describe(shard)}"
        self._check(label, shard, output)
        check_sizes(label, self, output, shard)
        return _ended(self._all_gather_into_tensor(label, output, shard, async_op), async_op)

    @_compat.outside_of_modes
    def reduce_scatter_tensor(
        self,
        output: Tensor,
        full: Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Work | None:
        """`output` (n elements) becomes segment `rank` of `full` (size * n elements), reduced over ranks.

        Three dtypes: ranks send values in that of `full`, sum them in `accumulate` (default: ``accumulate_dtype`` of
        `full`), and store the result in that of `output`. `label` names the values: in shared memory, where the
        comparison is free, ranks that reduce values of different names at the same time raise. Elsewhere it is part of
        messages.
        """
        label = _reduction_label(label, "reduce_scatter_tensor", op, full, accumulate)
        self._check(label, full)
        self._check(label, written=[output])  # may have another dtype
        check_sizes(label, self, full, output)
        reduction = self._reduction(label, op, full, accumulate)
        return _ended(self._reduce_scatter_tensor(label, output, full, reduction, async_op), async_op)

    @_compat.outside_of_modes
    def all_reduce(
        self,
        tensor: Tensor,
        op: ReduceOp,
        *,
        accumulate: torch.dtype | None = None,
        label: str = "",
        async_op: bool = False,
    ) -> Work | None:
        """`tensor` becomes its reduction over all ranks, bitwise the same on each. See ``reduce_scatter_tensor``."""
        label = _reduction_label(label, "all_reduce", op, tensor, accumulate)
        self._check(label, written=[tensor])
        reduction = self._reduction(label, op, tensor, accumulate)
        return _ended(self._all_reduce(label, tensor, reduction, async_op), async_op)

    @_compat.outside_of_modes
    def broadcast(self, tensor: Tensor, src: int, *, async_op: bool = False) -> Work | None:
        """`tensor` becomes the tensor of rank `src`."""
        label = f"broadcast from {src} of {describe(tensor)}"
        self._check(label, written=[tensor])
        check_peer(label, self, src)
        return _ended(self._broadcast(label, tensor, src, async_op), async_op)

    @_compat.outside_of_modes
    def all_gather(self, outputs: Tensors, tensor: Tensor, *, async_op: bool = False) -> Work | None:
        """`outputs[i]` becomes rank i's `tensor`. Ranks may contribute different numbers of elements, also none."""
        label = f"all_gather of {tensor.dtype}"
        check_list(label, self, "outputs", outputs)
        self._check(label, tensor, written=outputs)
        check_same_numel(label, self, outputs[self.rank], tensor)
        return _ended(self._all_gather(label, outputs, tensor, async_op), async_op)

    @_compat.outside_of_modes
    def all_to_all(self, outputs: Tensors, inputs: Tensors, *, async_op: bool = False) -> Work | None:
        """`outputs[i]` becomes ``inputs[rank]`` of rank i. Sizes may differ between pairs, and may be 0."""
        check_list("all_to_all", self, "outputs", outputs)
        check_list("all_to_all", self, "inputs", inputs)
        label = f"all_to_all of {inputs[0].dtype}"
        self._check(label, *inputs, written=outputs)
        check_same_numel(label, self, outputs[self.rank], inputs[self.rank])
        return _ended(self._exchange(label, outputs, inputs, async_op), async_op)

    @_compat.outside_of_modes
    def gather(self, outputs: Tensors | None, tensor: Tensor, dst: int, *, async_op: bool = False) -> Work | None:
        """`outputs[i]` on rank `dst` becomes rank i's `tensor`; `outputs` is None elsewhere. Sizes may differ."""
        label = f"gather to {dst} of {tensor.dtype}"
        check_peer(label, self, dst)
        self._check(label, tensor)
        if self.rank == dst:
            check_list(label, self, "outputs", outputs)
            self._check(label, tensor, written=outputs)
            check_same_numel(label, self, outputs[dst], tensor)
        received = outputs if self.rank == dst else [None] * self.size
        return _ended(self._exchange(label, received, self._only(dst, tensor), async_op), async_op)

    @_compat.outside_of_modes
    def scatter(self, output: Tensor, inputs: Tensors | None, src: int, *, async_op: bool = False) -> Work | None:
        """`output` becomes ``inputs[rank]`` of rank `src`; `inputs` is None elsewhere. Sizes may differ."""
        label = f"scatter from {src} of {output.dtype}"
        check_peer(label, self, src)
        self._check(label, written=[output])
        if self.rank == src:
            check_list(label, self, "inputs", inputs)
            self._check(label, output, *inputs)
            check_same_numel(label, self, output, inputs[src])
        sent = inputs if self.rank == src else [None] * self.size
        return _ended(self._exchange(label, self._only(src, output), sent, async_op), async_op)

    @_compat.outside_of_modes
    def barrier(self, *, async_op: bool = False) -> Work | None:
        """Wait for all ranks."""
        return _ended(self._barrier(async_op), async_op)

    @_compat.outside_of_modes
    def labelled_barrier(self, label: str, flag: bool = False) -> bool:
        """Wait for all ranks, and return whether any has set `flag`. All raise, naming both, if labels differ."""
        return self._labelled_barrier(label, flag) if self.size > 1 else flag

    # Collectives on small, picklable Python objects

    @_compat.outside_of_modes
    def all_gather_object(self, value: Any) -> list[Any]:
        """Return the values of all ranks in rank order. Raises on all ranks if they are in different public calls."""
        return same_call(self._all_gather_object((calls.current(), value)))

    @_compat.outside_of_modes
    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank `src`."""
        check_peer("broadcast_object", self, src)
        return self._broadcast_object(value, src)

    def subgroup(self, ranks: Sequence[int]) -> "Communicator":
        """Return a communicator of these. Collective over `ranks`, ascending ranks of this communicator."""
        members = list(ranks)
        if self.rank not in members or members != sorted(set(members) & set(range(self.size))):
            raise CommunicationError(
                f"subgroup on rank {self.rank} of {self.size}: {members} must be ascending ranks of this communicator, "
                "this rank among them"
            )
        return self._subgroup(members)

    # What transports implement. After the label come these arguments, and `async_op`. None: the result may be used.

    _all_gather_into_tensor: Callable[..., Work | None]  # output, shard
    _reduce_scatter_tensor: Callable[..., Work | None]  # output, full, reduction
    _all_reduce: Callable[..., Work | None]  # tensor, reduction
    _broadcast: Callable[..., Work | None]  # tensor, src
    _exchange: Callable[..., Work | None]
    """`outputs[i]` becomes ``inputs[rank]`` of rank i. None: the pair of ranks exchanges nothing this way."""

    def _all_gather(self, label: str, outputs: Tensors, tensor: Tensor, async_op: bool) -> Work | None:
        return self._exchange(label, outputs, [tensor] * self.size, async_op)

    # Others have no label, or complete before they return

    _barrier: Callable[[bool], Work | None]
    _labelled_barrier: Callable[[str, bool], bool]
    _all_gather_object: Callable[[Any], list[Any]]
    _broadcast_object: Callable[[Any, int], Any]
    _subgroup: Callable[[list[int]], "Communicator"]

    def _alloc(self, numel: int, dtype: torch.dtype, gathered: bool) -> Tensor:
        return torch.zeros(numel, dtype=dtype, device=self.device)

    def _check(self, label: str, *tensors: Tensor, written: Tensors = ()) -> None:
        """Raise unless all are contiguous tensors of one dtype on `device`, and may be read, and written to."""
        where, given = f"{label} on rank {self.rank} of {self.size}", (*tensors, *written)
        for tensor in given:
            if not isinstance(tensor, Tensor):
                raise CommunicationError(f"{where}: expected tensors, got {type(tensor).__name__}")
            if tensor.device.type != self.device.type:
                raise CommunicationError(
                    f"{where}: the tensor is on {tensor.device}, this communicator works on {self.device.type}; "
                    f"move it with .to({self.device.type!r})"
                )
            if tensor.layout is not torch.strided or not tensor.is_contiguous():
                layout = tensor.layout if tensor.layout is not torch.strided else f"stride {tensor.stride()}"
                raise CommunicationError(
                    f"{where}: the tensor of shape {tuple(tensor.shape)} is not contiguous ({layout})"
                )
            if tensor.dtype != given[0].dtype:
                raise CommunicationError(f"{where}: the tensors differ in dtype: {given[0].dtype} and {tensor.dtype}")

    def _reduction(self, label: str, op: ReduceOp, tensor: Tensor, accumulate: torch.dtype | None) -> Reduction:
        problem = refuse_op(op, tensor.dtype)
        if problem:
            raise CommunicationError(f"{label} on rank {self.rank}: {problem}")
        return Reduction(op, accumulate or accumulate_dtype(tensor.dtype, op), self.size)

    def _only(self, rank: int, tensor: Tensor) -> list[Tensor | None]:
        return [tensor if other == rank else None for other in range(self.size)]


def _ended(work: Work | None, async_op: bool) -> Work | None:
    """Return what a call of a collective returns; a transport that has completed it returns no work."""
    return work or (Finished() if async_op else None)


class Grid:
    """Collectives over the ranks of two orthogonal communicators, where no communicator covers all of them.

    Rank 0 is rank 0 of both, and `inner` ranks are consecutive.
    """

    def __init__(self, inner: "Communicator | Grid", outer: Communicator) -> None:
        self._inner, self._outer = inner, outer
        self.rank = outer.rank * inner.size + inner.rank
        self.size = inner.size * outer.size
        self.device = inner.device

    def all_gather_object(self, value: Any) -> list[Any]:
        """Return their values in rank order. Collective over all ranks of the grid."""
        parts = self._outer.all_gather_object(self._inner.all_gather_object(value))
        return [other for part in parts for other in part]

    def broadcast_object(self, value: Any, src: int = 0) -> Any:
        """Return the value of rank `src`. Collective over all ranks of the grid."""
        row, place = divmod(src, self._inner.size)
        if self._outer.rank == row:
            value = self._inner.broadcast_object(value, place)
        return self._outer.broadcast_object(value, row)

    def broadcast(self, tensor: Any, src: int) -> None:
        """`tensor` becomes the tensor of rank `src`. Collective over all ranks of the grid."""
        row, place = divmod(src, self._inner.size)
        if self._outer.rank == row:
            self._inner.broadcast(tensor, place)
        self._outer.broadcast(tensor, row)


def segment(full: Tensor, comm: Communicator) -> Tensor:
    """Return this rank's part of a 1-D tensor of ``comm.size`` equal parts, as a view."""
    numel = full.numel() // comm.size
    return full[comm.rank * numel : (comm.rank + 1) * numel]


def describe(tensor: Tensor) -> str:
    return f"{tensor.numel()} x {tensor.dtype}"


def _reduction_label(label: str, operation: str, op: str, tensor: Tensor, accumulate: torch.dtype | None) -> str:
    prefix = f"{label}: " if label else ""
    return f"{prefix}{operation}({op}) of {describe(tensor)}" + (f" in {accumulate}" if accumulate else "")


def check_sizes(operation: str, comm: Communicator, full: Tensor, shard: Tensor) -> None:
    """Raise unless `full` has `size` times the elements of `shard`, and `shard` is not another rank's segment of it."""
    if full.numel() != comm.size * shard.numel():
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: the full tensor has {full.numel()} elements, the shard "
            f"{shard.numel()}; it must have {comm.size} times the shard's"
        )
    begin, first = full.data_ptr(), shard.data_ptr()
    end, last = begin + full.nbytes, first + shard.nbytes
    mine = begin + comm.rank * (end - begin) // comm.size
    if first < end and begin < last and (first != mine or last - first != (end - begin) // comm.size):
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: the shard is a part of the full tensor, but is not "
            f"segment {comm.rank} of it: other ranks would read what this rank writes"
        )


def check_same_numel(operation: str, comm: Communicator, output: Tensor, given: Tensor) -> None:
    """Raise unless a rank's output for itself has the size of its input for itself."""
    if output.numel() != given.numel():
        raise CommunicationError(
            f"{operation} on rank {comm.rank}: its own output has {output.numel()} elements, its input {given.numel()}"
        )


def check_peer(operation: str, comm: Communicator, peer: int) -> None:
    """Raise unless `peer` is a rank of the communicator."""
    if not 0 <= peer < comm.size:
        raise CommunicationError(
            f"{operation} on rank {comm.rank}: there is no rank {peer}, they are 0 to {comm.size - 1}"
        )


def check_list(operation: str, comm: Communicator, what: str, tensors: Tensors | None) -> None:
    """Raise unless the list has one tensor for each rank."""
    if tensors is None or len(tensors) != comm.size:
        given = "None" if tensors is None else f"{len(tensors)} tensor(s)"
        raise CommunicationError(
            f"{operation} on rank {comm.rank} of {comm.size}: {what} must hold one tensor for each rank, got {given}"
        )
