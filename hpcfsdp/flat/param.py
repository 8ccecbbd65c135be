"""A flat parameter: one shard that stays, a buffer in which all shards come together, and what the leaves view.

The original parameters stay the objects they were. While the flat parameter is unsharded their data views the buffer,
so the all-gather's output is what the module computes with, without a copy. At rest they view

- one NaN expanded to their shape: shape and dtype can be asked for, values read by mistake show at once, and writing
  raises or is forgotten; or
- with `use_orig_params` their own run of the shard, 1-D: what the optimizer steps.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.layout import FlatLayout
from hpcfsdp.flat.precision import Dtypes
from hpcfsdp.flat.storage import Buffer, Resident, Transient, Whole


class FlatParam:
    """Parameters of one dtype and device, laid out by a ``FlatLayout`` and sharded over `comm`.

    Attributes:
        layout: where each parameter lies.
        comm: the ranks that hold the shards.
        dtypes: of the shard, of the gathered values, of gradients.
        leaves: the original parameters, in the order of the layout's slots.
        parameter: this rank's shard, 1-D, ``layout.shard_numel`` elements. Without `use_orig_params` it is what the
            optimizer steps, and its ``grad`` is the averaged gradient of the shard.
        device: where the module computes; the shard lies there, too, unless it is offloaded.
        is_unsharded: whether the leaves hold their full values.
        trained: the ``requires_grad`` of all leaves, as far as is known; with `use_orig_params` each has its own.
        places: of each leaf, the modules that should hold it, with its name there, where users may assign another.
        on_assigned: called by ``adopt_user_data`` where a module holds another one; may call ``replace_leaf``.
    """

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        comm: Communicator,
        *,
        replicas: Communicator | None = None,
        dtypes: Dtypes | None = None,
        use_orig_params: bool = False,
        offload: bool = False,
        always_whole: bool = False,
    ) -> None:
        """Collective over `comm`. Take over the leaves' values, the same on all ranks.

        Args:
            replicas: ranks that hold the same shard as this one.
            offload: the shard lies in host memory.
            always_whole: the leaves show their values at rest, too; for one shard alone.
        """
        self.layout = layout
        self.comm = comm
        self.replicas = replicas
        self.dtypes = dtypes or Dtypes.plan(layout.dtype)
        self.leaves = tuple(leaves)
        self.use_orig_params = use_orig_params
        self.device = self.leaves[0].device
        self.is_unsharded = False
        self.trained = any(leaf.requires_grad for leaf in self.leaves)
        self._places = [(slot.shape, _row_major(slot.shape), slot.offset) for slot in layout.slots]
        runs = {run.index: slice(run.offset, run.offset + run.numel) for run in layout.runs(comm.rank)}
        self._runs = [runs.get(index, slice(0, 0)) for index in range(len(layout.slots))]

        full = self._flattened()
        self._buffer, shard = self._place(full, torch.device("cpu") if offload else self.device)
        self.parameter = nn.Parameter(shard, requires_grad=self.trained)
        self._always_whole = always_whole
        self._come_to_rest(shard)

    def _come_to_rest(self, shard: torch.Tensor) -> None:
        """Have the leaves show what they do at rest; buffer and parameter are there."""
        self._others: dict[torch.dtype, tuple[Buffer, tuple[torch.Tensor, ...]]] = {}  # and their views
        self.places: Sequence[Sequence[tuple[nn.Module, str]]] = ()
        self.on_assigned: Callable[[], None] | None = None
        self._shard = shard  # as the optimizer should find it; a user may have put something else in its place
        self._nothing_value = torch.nan if self.layout.dtype.is_floating_point or self.layout.dtype.is_complex else 0
        self._nothing = torch.full(
            (len(self.leaves),), self._nothing_value, dtype=self.layout.dtype, device=self.device
        )
        if self._always_whole or self.use_orig_params:
            self._resting = list(self.shard_views(shard))
        else:
            pairs = zip(self._nothing.unbind(), self.layout.slots, strict=True)
            self._resting = [nothing.expand(slot.shape) for nothing, slot in pairs]
        self._views = self._views_of(self._buffer.full)
        self._buffer.free()
        self._stays_bound = self._always_whole and isinstance(self._buffer, Whole)
        self._bind(self._resting)

    def copy(self, leaves: Sequence[nn.Parameter]) -> FlatParam:
        """Collective over `comm` where ranks share memory. Another one with the same values, at rest.

        Args:
            leaves: of the other, without memory of their own; their ``requires_grad`` counts.
        """
        made = object.__new__(FlatParam)
        made.__dict__.update(self.__dict__)
        made.leaves, made.is_unsharded = tuple(leaves), False
        shard, full = self._shard, self._buffer.full
        if isinstance(self._buffer, Resident):
            buffer: Buffer = Resident(self.comm, full.numel(), full.dtype, is_cast=self._buffer.is_cast)
            shard = shard.clone() if self._buffer.is_cast else buffer.segment.copy_(shard)
        elif isinstance(self._buffer, Whole):
            shard = shard.clone()
            buffer = Whole(shard)
        else:
            buffer = Transient(self.comm, full.numel(), full.dtype, self.device)
            shard = shard.clone().pin_memory() if shard.is_pinned() else shard.clone()
        made._buffer = buffer
        made.parameter = nn.Parameter(shard, requires_grad=self.parameter.requires_grad)
        made._come_to_rest(shard)
        return made

    @property
    def requires_grad(self) -> bool:
        return any(leaf.requires_grad for leaf in self.leaves)

    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        """The parameters that the optimizer has."""
        return self.leaves if self.use_orig_params else (self.parameter,)

    @property
    def versions(self) -> list[int]:
        """One number for each of ``stepped``, which changes in place count up; those of ``.data`` do not."""
        return [param._version for param in self.stepped]

    def mark_changed(self) -> None:
        """Count the versions up for a change that torch has not seen."""
        for param in self.stepped:
            torch.autograd.graph.increment_version(param)

    @property
    def is_differentiable(self) -> bool:
        """Whether its dtype can have gradients."""
        return self.layout.dtype.is_floating_point or self.layout.dtype.is_complex

    @property
    def is_here(self) -> bool:
        """Whether nothing has to be gathered: the values stay."""
        return self._buffer.resident

    @property
    def shows_whole(self) -> bool:
        """Whether the leaves hold their full values at rest, too."""
        return self._always_whole

    @property
    def is_offloaded(self) -> bool:
        """Whether the shard lies elsewhere than the module computes."""
        return self.parameter.device != self.device

    @property
    def is_resident(self) -> bool:
        """Whether ranks share the memory of the gathered values, and have to meet around its use."""
        return isinstance(self._buffer, Resident)

    @property
    def full(self) -> torch.Tensor:
        """The gathered values, 1-D, ``layout.padded_numel`` elements; without memory at rest unless it is resident."""
        return self._buffer.full

    @property
    def unsharded_bytes(self) -> int:
        """Bytes held for gathered values beyond the shard, 0 when at rest."""
        return self._buffer.held_bytes

    def compute_in(self, dtype: torch.dtype) -> None:
        """Collective over `comm`, the first time for a dtype. From now on gather values of another dtype; at rest only.

        For the dtype of the shard, or that of ``dtypes.compute``.
        """
        if dtype == self._buffer.full.dtype:
            return
        self._others[self._buffer.full.dtype] = self._buffer, self._views
        if dtype not in self._others:
            numel, home = self.layout.padded_numel, self.parameter.device
            if self.comm.shares_gathered and home == self.device:
                buffer: Buffer = Resident(self.comm, numel, dtype, is_cast=True)
            else:
                buffer = Transient(self.comm, numel, dtype, self.device)
            self._others[dtype] = buffer, self._views_of(buffer.full)
            buffer.free()
        self._buffer, self._views = self._others[dtype]

    def publish(self) -> None:
        """Have this rank's segment of resident memory hold the shard, before the ranks meet to use it."""
        if isinstance(self._buffer, Resident):
            self._buffer.write(self._shard)

    def gather(self, *, async_op: bool = False) -> Work | None:
        """Collective over `comm`. Bring all shards together; ``bind`` shows them to the module when that is done."""
        return self._buffer.gather(self._shard, async_op=async_op)

    def bind(self) -> None:
        """Let the leaves view the gathered values."""
        self.is_unsharded = True
        if not self._stays_bound:
            self._bind(self._views)

    def unbind(self) -> None:
        """Let the leaves view what they do at rest."""
        self.is_unsharded = False
        if self._stays_bound:
            return
        self._nothing.fill_(self._nothing_value)  # someone may have written to it
        self._bind(self._resting)

    def free(self) -> None:
        """Give back the memory of the gathered values, where it does not stay."""
        self._buffer.free()

    def reshard(self) -> None:
        """Free the gathered values; only the shard is left."""
        self.unbind()
        self.free()

    def unshard(self) -> None:
        """Collective over `comm`. Gather all shards; the leaves hold their full values afterwards."""
        if not self.is_unsharded:
            self.publish()
            if self.is_resident:
                self.comm.labelled_barrier("unshard")
            self.gather()
            self.bind()

    def adopt_user_data(self) -> None:
        """Copy what a user has put in place of the shard (``param.data = ...``) into it.

        Raises:
            EngineError: it has another number of elements.
        """
        if self.on_assigned is not None and not self.is_unsharded and self._is_assigned():
            self.on_assigned()
        if self.parameter.data_ptr() != self._shard.data_ptr() or self.parameter.numel() != self._shard.numel():
            self._replace(self._shard, self.parameter.data, "the flat parameter")
            self.parameter.data = self._shard
        if not self.use_orig_params or self.is_unsharded:
            return
        for leaf, resting, slot in zip(self.leaves, self._resting, self.layout.slots, strict=True):
            if leaf.data_ptr() != resting.data_ptr() or leaf.numel() != resting.numel():
                self._replace(resting, leaf.data, f"{slot.fqn!r}")
                leaf.data = resting

    def _is_assigned(self) -> bool:
        for leaf, places in zip(self.leaves, self.places):  # noqa: B905 (each forward of the unit comes here)
            for module, name in places:
                found = module._parameters.get(name)
                if found is not None and found is not leaf:
                    return True
        return False

    def replace_leaf(self, index: int, leaf: nn.Parameter) -> None:
        """Not collective, at rest, with `use_orig_params`. Have another parameter in place of a leaf, and its values.

        Raises:
            EngineError: it has another shape than this rank's shard of the parameter.
        """
        resting, fqn = self._resting[index], self.layout.slots[index].fqn
        if leaf.shape != resting.shape:
            raise EngineError(
                f"rank {self.comm.rank}: a parameter of shape {tuple(leaf.shape)} was assigned to {fqn!r}, of which "
                f"this rank holds {tuple(resting.shape)}: assign values for the shard, or assign whole parameters "
                "within FullyShardedDataParallel.summon_full_params(model)"
            )
        self._replace(resting, leaf.data, repr(fqn))
        leaf.data = resting
        self.leaves = (*self.leaves[:index], leaf, *self.leaves[index + 1 :])

    def shard_views(self, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each parameter's part of a tensor laid out like the shard: its run, 1-D, empty where it has none here.

        If one rank holds everything and shows it at rest, the parts have the parameters' shapes.
        """
        return self._views_of(shard) if self._always_whole else self._runs_of(shard)

    def grad_parts(self, num_blocks: int) -> list[tuple[int, torch.Tensor]]:
        """What there is of the gradient here, with how many ranks that are parallel over tensors have the same.

        Args:
            num_blocks: of such ranks; they all have what is not cut over them.
        """
        blocks = [slot.block for slot in self.layout.slots]
        copies = [num_blocks if block is None else block.copies for block in blocks]
        if self.use_orig_params:
            found = zip(copies, [leaf.grad for leaf in self.leaves], strict=True)
        elif self.parameter.grad is None or len(set(copies)) == 1:
            found = zip(copies[:1], [self.parameter.grad], strict=True)
        else:
            found = zip(copies, self._runs_of(self.parameter.grad), strict=True)
        return [(count, grad) for count, grad in found if grad is not None]

    def views(self, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Each parameter's elements in a tensor laid out like ``full``, as views of their shapes."""
        return self._views if full is self._buffer.full else self._views_of(full)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        """Whether `tensor` views the gathered values, which are gone after ``reshard``."""
        if tensor.layout is not torch.strided or not self.is_unsharded or self._stays_bound:
            return False
        if not tensor.numel():  # of which no memory is anyone's
            return False
        return tensor.untyped_storage().data_ptr() == self._buffer.full.untyped_storage().data_ptr()

    def _flattened(self) -> torch.Tensor:
        """The values of all leaves, whose own memory is given up one by one."""
        full = torch.empty(self.layout.padded_numel, dtype=self.layout.dtype, device=self.device)
        for begin, end in self.layout.gaps():
            full[begin:end].zero_()
        nothing = torch.empty((), dtype=full.dtype, device=self.device)
        for leaf, view, slot in zip(self.leaves, self._views_of(full), self.layout.slots, strict=True):
            view.copy_(leaf.detach())
            leaf.data = nothing.expand(slot.shape)
        return full

    def _place(self, full: torch.Tensor, home: torch.device) -> tuple[Buffer, torch.Tensor]:
        """The buffer, and the shard with its values."""
        numel, compute = self.layout.padded_numel, self.dtypes.compute
        mine = segment(full, self.comm)
        if self.comm.shares_gathered and home == self.device:
            buffer = Resident(self.comm, numel, compute, is_cast=compute != full.dtype)
            if compute != full.dtype:
                return buffer, mine.clone()
            buffer.write(mine)
            return buffer, buffer.segment
        if self.comm.size == 1 and compute == full.dtype and home == self.device:
            return Whole(full), full
        buffer = Transient(self.comm, numel, compute, self.device)
        if home == self.device:
            return buffer, mine.clone()
        shard = mine.to(home)
        return buffer, shard.pin_memory() if self.device.type == "cuda" else shard

    def _bind(self, values: Sequence[torch.Tensor]) -> None:
        for leaf, value in zip(self.leaves, values):  # noqa: B905 (this runs twice in each call of a unit)
            leaf.data = value

    def _views_of(self, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        begin = full.storage_offset()
        return tuple([full.as_strided(shape, stride, begin + offset) for shape, stride, offset in self._places])

    def _runs_of(self, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        return tuple([shard[run] for run in self._runs])

    @torch.no_grad()
    def _replace(self, target: torch.Tensor, values: torch.Tensor, what: str) -> None:
        if values.numel() != target.numel():
            raise EngineError(
                f"rank {self.comm.rank}: the data of {what} was replaced by a tensor of shape {tuple(values.shape)}, "
                f"but this rank's shard of it has {target.numel()} element(s): assign values for the shard, or assign "
                "whole parameters within FullyShardedDataParallel.summon_full_params(model)"
            )
        target.copy_(values.reshape(target.shape))


def _row_major(shape: tuple[int, ...]) -> tuple[int, ...]:
    strides, step = [], 1
    for extent in reversed(shape):
        strides.append(step)
        step *= max(1, extent)
    return tuple(reversed(strides))


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Give a parameter a gradient, which may have another dtype or shape."""
    if grad is None or (grad.dtype == param.dtype and grad.shape == param.shape):
        param.grad = grad
        return
    # The setter refuses it; what the gradient holds may be exchanged all the same.
    values = grad.data
    grad.data = torch.empty_like(param)
    param.grad = grad
    grad.data = values
