"""A flat parameter: its shard, the buffer into which all shards are gathered, and the data of the leaves.

The leaves are the original parameters, the same objects as before. While the flat parameter is unsharded their data
views the buffer, so modules compute with the output of the all-gather without a copy. At rest it views

- one NaN expanded to their shape: shape and dtype are right, what is read by mistake is NaN, and writes raise or are
  lost; or
- with `use_orig_params` their own run of the shard, 1-D, which the optimizer steps.
"""

import weakref
from collections.abc import Callable, Sequence

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work
from hpcfsdp.errors import EngineError
from hpcfsdp.params.layout import FlatLayout, contiguous_strides
from hpcfsdp.params.sharded_params import Dtypes, ShardedParams
from hpcfsdp.params.storage import Buffer, KeptPart, NodeBuffer, SharedBuffer, Transient, Whole, nothing_for

flat_params: weakref.WeakSet["FlatParam"] = weakref.WeakSet()  # all of this process


class FlatParam(ShardedParams):
    """Parameters of one dtype and device, laid out by a ``FlatLayout`` and sharded over `comm`.

    Its ``parameter`` is this rank's shard, 1-D, ``layout.shard_numel`` elements. Without `use_orig_params` it is
    what the optimizer steps, and its ``grad`` the averaged gradient of the shard.
    """

    layout: FlatLayout

    def __init__(
        self,
        leaves: Sequence[nn.Parameter],
        layout: FlatLayout,
        comm: Communicator,
        *,
        reduce_comm: Communicator | None = None,
        replicas: Communicator | None = None,
        dtypes: Dtypes | None = None,
        device: torch.device | None = None,
        use_orig_params: bool = False,
        offload: bool = False,
        always_whole: bool = False,
    ) -> None:
        """Move the leaves' values, the same on all ranks, into the shards. Collective over `comm`.

        The computation is where the leaves are unless another `device` is given: then only the shard comes there, or
        none with `offload`. A single shard can be `always_whole`: the leaves hold their full data at rest too.
        """
        device = device or leaves[0].device
        super().__init__(layout, comm, device=device, reduce_comm=reduce_comm, replicas=replicas, dtypes=dtypes)
        self.leaves = tuple(leaves)  # the original parameters, in the order of the layout's slots
        self.use_orig_params = self.steps_leaves = self.steps_each = use_orig_params
        self.trained = any(leaf.requires_grad for leaf in self.leaves)  # of all, unless each has its own
        self._places = [(slot.shape, contiguous_strides(slot.shape), slot.offset) for slot in layout.slots]
        self._gaps = layout.gaps()
        runs = {run.index: slice(run.offset, run.offset + run.numel) for run in layout.runs(comm.rank)}
        self._runs = [runs.get(index, slice(0, 0)) for index in range(len(layout.slots))]

        self.home = torch.device("cpu") if offload else self.device
        self.changes_kind = self.dtypes.compute != self.dtypes.param or (use_orig_params and self.is_offloaded)
        self.shows_whole = always_whole
        shared, shard = self._new_shard(self.dtypes.compute)
        self._empty_leaves(shard)
        self._come_to_rest(shared, shard, self.dtypes.compute, self.trained)

    def _come_to_rest(
        self, shared: SharedBuffer | None, shard: torch.Tensor, compute: torch.dtype, trained: bool
    ) -> None:
        """Set up the buffer, from what ``_new_shard`` has made, the parameter, and the leaves at rest."""
        if shared is not None:
            self._buffer = shared
        elif self.comm.size == 1 and compute == shard.dtype and shard.device == self.device:
            self._buffer = Whole(shard)
        else:
            self._buffer = self._new_transient(compute)
        self.parameter = nn.Parameter(shard, requires_grad=trained)
        self._kept = KeptPart()
        self._others: dict[torch.dtype, tuple[Buffer, tuple[torch.Tensor, ...]]] = {}  # and their views
        # By leaf, the modules that should hold it, with its name there.
        self.places: Sequence[Sequence[tuple[nn.Module, str]]] = ()
        # Called where a module holds another parameter; may call `replace_leaf`.
        self.on_assigned: Callable[[], None] | None = None
        self._shard = shard  # a user may assign other data to ``parameter``
        self._nothing: torch.Tensor | None = None
        self._versions: list[int] = []  # of the leaves when it was last filled
        if self.shows_whole or self.use_orig_params:
            self._resting = list(self.shard_views(shard))
        else:
            self._nothing = nothing_for(len(self.leaves), self.layout.dtype, self.device)
            pairs = zip(self._nothing.unbind(), self.layout.slots, strict=True)
            self._resting = [nothing.expand(slot.shape) for nothing, slot in pairs]
        self._views = self._views_of(self._buffer.full)
        self._buffer.free()
        self._stays_bound = self.shows_whole and isinstance(self._buffer, Whole)
        self._bind(self._resting)
        flat_params.add(self)

    def copy(self, leaves: Sequence[nn.Parameter]) -> "FlatParam":
        """Return a copy at rest, with `leaves` that have no memory yet. Collective over `comm`."""
        made = object.__new__(FlatParam)
        made.__dict__.update(self.__dict__)
        made.leaves, made.is_unsharded = tuple(leaves), False
        compute = self._buffer.full.dtype
        shared, shard = self._new_shard(compute)
        shard.copy_(self._shard)
        made._come_to_rest(shared, shard, compute, self.parameter.requires_grad)
        return made

    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        return self.leaves if self.use_orig_params else (self.parameter,)

    def compute_in(self, dtype: torch.dtype) -> None:
        """Compute in `dtype` from now on, that of the shard or ``dtypes.compute``. Collective the first time."""
        if dtype == self._buffer.full.dtype:
            return
        self._others[self._buffer.full.dtype] = self._buffer, self._views
        if dtype not in self._others:
            buffer = self._new_shared(dtype, is_cast=True)
            buffer = buffer or self._new_transient(dtype)
            self._others[dtype] = buffer, self._views_of(buffer.full)
            buffer.free()
        self._buffer, self._views = self._others[dtype]

    def follow_requires_grad(self, unit: str) -> None:
        """Set the leaves' ``requires_grad`` to that of ``parameter``, without `use_orig_params`.

        Refuse one that the user has set for a leaf alone, and hooks that would never be called.
        """
        if _compat.hooks_on_gradient(self.parameter):
            raise EngineError(
                f"{unit}: register_hook was called on a flat parameter, which is not in the graph: use "
                "register_post_accumulate_grad_hook, which is called with the reduced gradient of the shard, or "
                "wrap with use_orig_params=True"
            )
        if self.parameter.requires_grad != self.trained:
            self.trained = self.parameter.requires_grad
            for leaf in self.leaves:
                leaf.requires_grad_(self.trained)
        for leaf, slot in zip(self.leaves, self.layout.slots):  # noqa: B905 (in each call of a unit)
            if leaf.requires_grad != self.trained:
                raise EngineError(
                    f"{unit}: requires_grad of {slot.fqn!r} was set to {leaf.requires_grad}, but it is part of a flat "
                    f"parameter with requires_grad={self.trained}: set it before wrapping, wrap with "
                    "use_orig_params=True, or set it for all of the unit by model.requires_grad_()"
                )

    def publish(self) -> None:
        if isinstance(self._buffer, SharedBuffer):
            self._buffer.write(self._shard)

    def gather(self, async_op: bool = False) -> Work | None:
        if isinstance(self._buffer, Transient) and self._kept.is_there:
            self._buffer.alloc()
            return self._kept.gather(self.full, async_op=async_op)
        return self._buffer.gather(self._shard, async_op=async_op)

    @property
    def finish_gather(self) -> Callable[[], None] | None:
        return self._kept.taking(self.full, self.keepers) if isinstance(self._buffer, Transient) else None

    def bind(self) -> None:
        self.is_unsharded = True
        if not self._stays_bound:
            self._bind(self._views)

    def unbind(self) -> None:
        self.is_unsharded = False
        if self._stays_bound:
            return
        if self._nothing is not None:
            versions = [leaf._version for leaf in self.leaves]
            if versions != self._versions:  # a user may have written to it
                self._versions = versions
                self._nothing.fill_(torch.nan if self.is_differentiable else 0)
        self._bind(self._resting)

    def adopt_user_data(self) -> None:
        """Copy data that a user has assigned (``param.data = ...``) into the shard, unless the leaves are whole."""
        if self.on_assigned is not None and not self.is_unsharded and self.assigned_name() is not None:
            self.on_assigned()
        if self.parameter.data_ptr() != self._shard.data_ptr() or self.parameter.numel() != self._shard.numel():
            self._replace(self._shard, self.parameter.data, "the flat parameter")
            self.parameter.data = self._shard
        expected = self._views if self.is_unsharded else self._resting
        each = zip(self.leaves, expected, self.layout.slots, strict=True)
        for leaf, values, slot in each if self.use_orig_params else ():
            if leaf.data_ptr() == values.data_ptr() and (self.is_unsharded or leaf.numel() == values.numel()):
                continue
            if self.is_unsharded:
                leaf.data = values
                raise EngineError(
                    f"the data of {slot.fqn!r} was replaced between a forward and its backward, while the parameter is "
                    "whole for both: replace it before the forward or after the backward"
                )
            self._replace(values, leaf.data, f"{slot.fqn!r}")
            leaf.data = values
            torch.autograd.graph.increment_version(leaf)

    def assigned_name(self) -> str | None:
        """Return the name of a parameter in place of which a module holds another one; None for none."""
        for leaf, places in zip(self.leaves, self.places):  # noqa: B905 (each forward of the unit comes here)
            for module, name in places:
                found = module._parameters.get(name)
                if found is not None and found is not leaf:
                    return name
        return None

    def replace_leaf(self, index: int, leaf: nn.Parameter) -> None:
        """Replace a leaf by another parameter of this rank's run, with its values; at rest, with `use_orig_params`."""
        resting, fqn = self._resting[index], self.layout.slots[index].fqn
        if leaf.shape != resting.shape:
            raise EngineError(
                f"rank {self.comm.rank}: a parameter of shape {tuple(leaf.shape)} was assigned to {fqn!r}, but "
                f"this rank holds {tuple(resting.shape)} of it: assign values for the shard, or whole parameters "
                "within FullyShardedDataParallel.summon_full_params(model)"
            )
        self._replace(resting, leaf.data, repr(fqn))
        leaf.data = resting
        self.leaves = (*self.leaves[:index], leaf, *self.leaves[index + 1 :])

    def shard_views(self, shard: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return the parameters' runs, 1-D, in what is laid out like the shard; in their shapes if ``shows_whole``."""
        return self._views_of(shard) if self.shows_whole else self._runs_of(shard)

    def grad_parts(self, num_blocks: int) -> list[tuple[int, torch.Tensor]]:
        """Return the parts of the gradient here, each with how many of `num_blocks` tensor-parallel ranks have it."""
        blocks = [slot.block for slot in self.layout.slots]
        copies = [num_blocks if block is None else block.boxes.count(block.box) for block in blocks]
        if self.use_orig_params:
            found = zip(copies, [leaf.grad for leaf in self.leaves], strict=True)
        elif self.parameter.grad is None or len(set(copies)) == 1:
            found = zip(copies[:1], [self.parameter.grad], strict=True)
        else:
            found = zip(copies, self._runs_of(self.parameter.grad), strict=True)
        return [(count, grad) for count, grad in found if grad is not None]

    def views(self, full: torch.Tensor) -> tuple[torch.Tensor, ...]:
        """Return views of a tensor laid out like ``full``, in the parameters' shapes."""
        return self._views if full is self._buffer.full else self._views_of(full)

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        return not self._stays_bound and super().owns_memory_of(tensor)

    def targets(self, buffer: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        return [(view,) for view in self.views(buffer)]

    def sources(self, index: int, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        return (grad,)

    def gaps(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        return [buffer[begin:end] for begin, end in self._gaps]

    def grads_of(self, reduced: torch.Tensor, used: Sequence[bool]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        if not self.use_orig_params:
            return [(self.parameter, reduced)] if any(used) else []
        found = zip(self.leaves, self.shard_views(reduced), self.layout.slots, used, strict=True)
        # Without elements there is nothing to step; some optimizers divide by the number of elements.
        return [(leaf, part) for leaf, part, slot, is_used in found if is_used and (part.numel() or not slot.numel)]

    def _new_shared(self, compute: torch.dtype, *, is_cast: bool) -> SharedBuffer | None:
        """Memory that ranks share to compute in a dtype, if they do. Collective over `comm` if so."""
        if not self.comm.shares_gathered or self.is_offloaded:
            return None
        return SharedBuffer(self.comm, self.layout.padded_numel, compute, is_cast=is_cast)

    def _new_transient(self, compute: torch.dtype) -> Buffer:
        """Memory that is freed after use. Collective over `comm` where nodes hold one copy."""
        if not self.comm.spans_nodes or self.is_offloaded:
            return Transient(self.comm, self.layout.padded_numel, compute, self.device)
        numel = self.layout.shard_numel

        def part(full: torch.Tensor, rank: int) -> Sequence[torch.Tensor]:
            return (full[rank * numel : (rank + 1) * numel],)

        return NodeBuffer(self.comm, self.layout.padded_numel, compute, part)

    def _new_shard(self, compute: torch.dtype) -> tuple[SharedBuffer | None, torch.Tensor]:
        """Memory that ranks share to compute in a dtype, if they do, and memory for the shard, which may be in it."""
        is_cast = compute != self.layout.dtype
        shared = self._new_shared(compute, is_cast=is_cast)
        return shared, self._zeros_for_shard() if shared is None or is_cast else shared.segment

    @torch.no_grad()
    def _empty_leaves(self, shard: torch.Tensor) -> None:
        """Copy this rank's runs of the leaves to `shard`; the leaves come to the device of the computation, empty."""
        nothing = torch.empty((), dtype=shard.dtype, device=self.device)
        runs = {run.index: run for run in self.layout.runs(self.comm.rank)}
        for index, (leaf, slot) in enumerate(zip(self.leaves, self.layout.slots, strict=True)):
            if index in runs:
                _, start, numel, _ = runs[index]
                shard[self._runs[index]].copy_(leaf.detach().reshape(-1)[start : start + numel])
            _compat.replace_data(leaf, nothing.expand(slot.shape))  # one by one, so that their memory is free

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


def set_grad(param: nn.Parameter, grad: torch.Tensor | None) -> None:
    """Give a parameter a gradient, which may have another dtype or shape, or be on another device."""
    if grad is None or (grad.dtype == param.dtype and grad.shape == param.shape and grad.device == param.device):
        param.grad = grad
        return
    # The setter refuses it, but the data of a gradient may be exchanged.
    values = grad.data
    grad.data = torch.empty_like(param)
    param.grad = grad
    grad.data = values
