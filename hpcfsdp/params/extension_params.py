"""Parameters that say themselves how they are gathered, by ``fsdp_pre_all_gather`` and ``fsdp_post_all_gather``.

These are torch's hooks for tensor subclasses: a rank's rows return tensors to be sent, such as codes and scales, and
make the unsharded parameter, of any class, of those of all ranks. All that a unit sends goes in one buffer of bytes.
The leaves, to which autograd adds gradients, stay plain tensors without memory; modules compute with `unsharded`.
"""

import functools
import inspect
import itertools
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.fsdp import MixedPrecisionPolicy

from hpcfsdp import _compat, timeline
from hpcfsdp.comm import raise_together
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.errors import EngineError
from hpcfsdp.params.dtensor_params import DTensorParams
from hpcfsdp.params.layout import contiguous_strides, round_up
from hpcfsdp.params.storage import Buffer, alloc_storage, free_storage, nothing_for, nothing_of

_HOOKS = ("fsdp_pre_all_gather", "fsdp_post_all_gather")
_ALIGNMENT = 16  # bytes: of the widest dtype
_Kind = tuple[tuple[int, ...], torch.dtype]


def has_gather_hooks(tensor: torch.Tensor, *, or_later: bool = False) -> bool:
    """Return whether a tensor has both hooks, from its class or of its own, or may get them later.

    Raise ValueError if it has one of them.
    """
    found = [hasattr(tensor, name) for name in _HOOKS]
    if any(found) and not all(found):
        has, lacks = _HOOKS if found[0] else reversed(_HOOKS)
        raise ValueError(
            f"a {type(tensor).__module__}.{type(tensor).__qualname__} has {has} and no {lacks}: define both, as one "
            "makes what the other gathers"
        )
    return all(found) or or_later


@dataclass(frozen=True)
class InnerTensor:
    """A plain tensor within a parameter of a subclass, by its `path` of attributes, and how ranks share it."""

    path: tuple[str, ...]
    shape: tuple[int, ...]  # of the whole parameter's
    is_alike: bool  # whether each element belongs to one of the parameter
    is_cut: bool  # whether each rank has its part, in the order of the rows; else all have the same

    def of(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return it in a tensor of the subclass, or in rows of one."""
        return functools.reduce(getattr, self.path, tensor)


def inner_tensors(whole: torch.Tensor, rows: torch.Tensor) -> list[InnerTensor]:
    """Return the tensors within a parameter of a subclass, of which a rank has `rows`. Empty if it does not show them.

    Whoever reads those that are cut has to see whether they grow with the rows.
    """
    found, parts = [], dict(_within(rows))
    for path, tensor in _within(whole):
        part = parts.get(path)
        if part is None:  # a class may not keep what follows from the rest, such as a scale
            continue
        alike = tensor.shape == whole.shape and part.shape == rows.shape
        found.append(InnerTensor(path, tuple(tensor.shape), alike, alike or tensor.shape != part.shape))
    return found


def _within(tensor: torch.Tensor, path: tuple[str, ...] = ()) -> Iterator[tuple[tuple[str, ...], torch.Tensor]]:
    if not hasattr(tensor, "__tensor_flatten__"):
        yield path, tensor
        return
    for name in tensor.__tensor_flatten__()[0]:
        if isinstance(inner := getattr(tensor, name), torch.Tensor):
            yield from _within(inner, (*path, name))


@dataclass(frozen=True)
class HookArguments:
    """What the hooks are given of the unit."""

    mesh: DeviceMesh  # of one dimension: the ranks of the shards
    policy: MixedPrecisionPolicy
    as_out: Sequence[Callable[[torch.Tensor], torch.Tensor]]  # by parameter: makes `out` of what the hook has made


@dataclass(frozen=True)
class _Sent:
    """One tensor that a rank sends for a parameter; the same on all ranks."""

    shape: tuple[int, ...]
    dtype: torch.dtype
    begin: int  # its bytes in those of a rank
    end: int


class _InnerTensors(Buffer):
    """What parameters were gathered to, and what hooks have made of it: allocated and freed together."""

    stays = False

    def __init__(self, device: torch.device) -> None:
        self.full = nothing_for(1, torch.float32, device)  # it has the memory of no parameter
        self._tensors: dict[int, torch.Tensor] = {}

    def add(self, tensors: Sequence[torch.Tensor]) -> None:
        """Free these, too; they have memory now."""
        self._tensors.update((id(tensor), tensor) for tensor in tensors)
        self._count(sum(tensor.untyped_storage().nbytes() for tensor in tensors))

    def alloc(self) -> None:
        """Allocate the memory, unless it is there."""
        self._count(sum(t.numel() * t.element_size() for t in self._tensors.values() if alloc_storage(t, t.numel())))

    def free(self, keepers: Any = None) -> None:
        del keepers
        self._count(-sum(t.numel() * t.element_size() for t in self._tensors.values() if free_storage(t)))

    def holds(self, tensor: torch.Tensor) -> bool:
        """Return whether a plain tensor is in this memory."""
        place = tensor.untyped_storage().data_ptr()
        return place != 0 and any(t.untyped_storage().data_ptr() == place for t in self._tensors.values())

    @staticmethod
    def _count(nbytes: int) -> None:
        if nbytes and timeline.recorder is not None:
            timeline.recorder.count_gathered(nbytes)


class ExtensionParams(DTensorParams):
    """Parameters with gather hooks, of one dtype and device, whose rows stay the tensors that the program made."""

    def __init__(self, *args: Any, arguments: HookArguments, **kwargs: Any) -> None:
        """See ``DTensorParams``. `arguments` of the hooks."""
        self._arguments = arguments
        super().__init__(*args, **kwargs)
        count = len(self.params)
        # By parameter: what modules compute with, always the same object; None before the first gather.
        self.unsharded: list[torch.Tensor | None] = [None] * count
        self._out: list[torch.Tensor | None] = [None] * count  # the same, as the hook gets it
        self._outputs: list[list[torch.Tensor]] = [[] for _ in range(count)]
        self._metadata: list[Any] = [None] * count
        self._sent: list[list[_Sent]] | None = None
        self._gathered = torch.empty(0, dtype=torch.uint8, device=self.device)

    def _make_buffer(self, pin_memory: bool) -> Buffer:
        del pin_memory
        self._locals = [param.local for param in self.params]
        for local in self._locals:
            if type(local) is torch.Tensor:  # with hooks of its own: it was in memory that is made anew
                local.data = local.detach().clone()
        self._identities = [_compat.identity_of(param.sharded) for param in self.params]
        dtype, device = self.dtypes.compute, self.device
        self._views = [nothing_of(slot.shape, dtype, device) for slot in self.layout.slots]
        self._inner = _InnerTensors(device)
        return self._inner

    def _adopt(self, index: int, local: torch.Tensor) -> bool:
        before = self._locals[index]
        kinds = [(type(each), each.dtype, each.device, each.shape) for each in (before, local)]
        if kinds[0] != kinds[1] or not has_gather_hooks(local):
            return False
        self._locals[index] = local
        return True

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        return tensor.layout is torch.strided and self.is_unsharded and self._inner.holds(tensor)

    @torch.no_grad()
    def gather(self, async_op: bool = False) -> Work | None:
        comm = self.comm
        if self._kept.is_there:
            with comm.gathering_memory():
                alloc_storage(self._gathered, self._gathered.numel())
            return self._kept.gather(self._gathered, async_op=async_op)
        given = self._before_gather()
        with comm.gathering_memory():
            alloc_storage(self._gathered, self._gathered.numel())
        mine = segment(self._gathered, comm)
        for each, tensor in zip(itertools.chain(*self._sent), given, strict=True):
            _write(mine[each.begin : each.end], tensor, each)
        if self._own_gather is not None:
            self._gathered.copy_(self._own_gather(mine.clone()))
            return None
        if comm.size == 1:
            return None
        comm.announce_gather(self._gathered)
        return comm.all_gather_into_tensor(self._gathered, mine, async_op=async_op)

    def _before_gather(self) -> list[torch.Tensor]:
        """Return what this rank sends. Collective over `comm` the first time, to compare what the ranks send."""
        if self._sent is not None:
            found = [self._inputs(index) for index in range(len(self.params))]
            for index, (given, sent) in enumerate(zip(found, self._sent, strict=True)):
                now, before = self._kinds(index, given), [(each.shape, each.dtype) for each in sent]
                if now != before:
                    raise EngineError(f"{self._returns(index, now)}, where it has returned {_described(before)} before")
            return [each for given in found for each in given]
        with raise_together(self.comm) as exchange:
            found = [self._inputs(index) for index in range(len(self.params))]
            exchange.mine = [self._kinds(index, given) for index, given in enumerate(found)]
        first = exchange.everyone[0]
        for rank, others in enumerate(exchange.everyone):
            for index, (one, other) in enumerate(zip(first, others, strict=True)):
                if one != other:
                    raise EngineError(
                        f"{self._returns(index, one)} on rank 0 of its shards, and {_described(other)} on rank {rank}: "
                        "return tensors of the same shapes on all ranks, with the rows that the first rank has, or "
                        "with one row for each row of the shard"
                    ).on_all_ranks()
        self._plan(first)
        return [each for given in found for each in given]

    def _returns(self, index: int, kinds: Sequence[_Kind]) -> str:
        return f"fsdp_pre_all_gather of {self.layout.slots[index].fqn!r} returns {_described(kinds)}"

    def _inputs(self, index: int) -> Sequence[torch.Tensor]:
        """Call the first hook of a parameter."""
        param, slot = self.params[index], self.layout.slots[index]
        local = self._locals[index]
        if local.device != self.device:
            local = local.to(self.device, non_blocking=True)
        hook = local.fsdp_pre_all_gather  # type: ignore[attr-defined]
        arguments: tuple[Any, ...] = (self._arguments.mesh,)
        if len(inspect.signature(hook).parameters) > 1:
            shape = torch.Size(slot.shape)
            arguments += shape, contiguous_strides(shape), param.places[0][0], self._arguments.policy
        inputs, self._metadata[index] = hook(*arguments)
        return tuple(inputs)

    def _kinds(self, index: int, given: Sequence[torch.Tensor]) -> list[_Kind]:
        """Return shapes and dtypes in which tensors are sent: with as many rows as the first rank has."""
        slot, found = self.layout.slots[index], []
        rows = self._locals[index].shape[slot.dim]
        for tensor in given:
            shape = list(tensor.shape)
            if len(shape) > slot.dim and shape[slot.dim] == rows:
                shape[slot.dim] = slot.rows
            found.append((tuple(shape), tensor.dtype))
        return found

    def _plan(self, kinds: Sequence[Sequence[_Kind]]) -> None:
        """Lay out the buffer, and make the tensors for what all ranks send."""
        self._sent, end = [], 0
        for each in kinds:
            sent = []
            for shape, dtype in each:
                begin = round_up(end, _ALIGNMENT)
                end = begin + torch.Size(shape).numel() * dtype.itemsize
                sent.append(_Sent(shape, dtype, begin, end))
            self._sent.append(sent)
        size = self.comm.size
        self._gathered = torch.empty(size * round_up(end, _ALIGNMENT), dtype=torch.uint8, device=self.device)
        free_storage(self._gathered)
        for outputs, sent in zip(self._outputs, self._sent, strict=True):
            for each in sent:
                count = torch.Size(each.shape).numel()
                outputs.append(torch.empty(size * count, dtype=each.dtype, device=self.device))
        self._inner.add([output for outputs in self._outputs for output in outputs])

    @property
    def finish_gather(self) -> Callable[[], None] | None:
        return functools.partial(self._copy_out, self._kept.taking(self._gathered, self.keepers))

    @torch.no_grad()
    def _copy_out(self, take: Callable[[], None] | None) -> None:
        """Make the unsharded parameters of what was gathered, after `take` has kept a part of it."""
        if take is not None:
            take()
        assert self._sent is not None
        self._inner.alloc()
        by_rank = self._gathered.view(self.comm.size, -1)
        for index, (sent, outputs) in enumerate(zip(self._sent, self._outputs, strict=True)):
            for each, output in zip(sent, outputs, strict=True):
                if dim := self.layout.slots[index].dim:  # as torch has it: the whole, seen as rows of the shards
                    parts = by_rank[:, each.begin : each.end].contiguous().view(each.dtype).view(-1, *each.shape)
                    whole = list(each.shape)
                    whole[dim] *= self.comm.size
                    torch.cat(parts.unbind(), dim, out=output.view(whole))
                else:
                    output.view(self.comm.size, -1).view(torch.uint8).copy_(by_rank[:, each.begin : each.end])
            self._make(index, [o.view(-1, *each.shape[1:]) for o, each in zip(outputs, sent, strict=True)])
        free_storage(self._gathered)

    def _make(self, index: int, outputs: Sequence[torch.Tensor]) -> None:
        """Call the second hook of a parameter."""
        hook = self._locals[index].fsdp_post_all_gather  # type: ignore[attr-defined]
        metadata, dtype = self._metadata[index], self.dtypes.compute
        if self._out[index] is not None:
            hook(tuple(outputs), metadata, dtype, out=self._out[index])
            return
        whole, inner = hook(tuple(outputs), metadata, dtype)
        known = {id(output) for output in self._outputs[index]}
        places = {output.untyped_storage().data_ptr() for output in self._outputs[index]}
        own = [t for t in inner if id(t) not in known and t.untyped_storage().data_ptr() not in places]
        self._inner.add(own)
        shape = self.layout.slots[index].shape
        self.unsharded[index] = made = torch.as_strided(whole, shape, contiguous_strides(shape), 0)
        self._out[index] = self._arguments.as_out[index](made)

    def in_graph(self, index: int) -> torch.Tensor:
        """Return what modules compute with: its gradient comes to the leaf. Only while it is gathered."""
        value, leaf = self.unsharded[index], self.leaves[index]
        assert value is not None
        return _AtLeaf.apply(leaf, value) if leaf.requires_grad else value


class _AtLeaf(torch.autograd.Function):
    """A tensor in place of a leaf, to which its gradient goes."""

    @staticmethod
    def forward(_ctx: Any, _leaf: torch.Tensor, value: torch.Tensor) -> torch.Tensor:
        return value.detach()

    @staticmethod
    def backward(_ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None]:
        return grad, None


def _write(target: torch.Tensor, tensor: torch.Tensor, sent: _Sent) -> None:
    """Write a tensor into bytes, 1-D, with zeros in place of rows that the first rank has and this one has not."""
    wanted = target.view(sent.dtype).view(sent.shape)
    if tuple(tensor.shape) == sent.shape:
        wanted.copy_(tensor)
        return
    wanted.zero_()
    wanted[tuple(slice(size) for size in tensor.shape)].copy_(tensor)


def _described(kinds: Sequence[_Kind]) -> str:
    return ", ".join(f"{list(shape)} of {dtype}" for shape, dtype in kinds) or "nothing"
