"""Parameters that know their whole shape: each rank's rows of a parameter are a ``DTensor``, which the optimizer steps.

Between steps modules hold the ``DTensor`` parameters. While they compute they hold leaves, which view what was
gathered. Where the ranks share memory each parameter is whole in it, each rank's rows are its ``DTensor``'s memory, and
no byte moves, unless rows are cast or not contiguous. Nodes hold a copy each, which rows from other nodes reach where
they belong. Elsewhere the shards are gathered into a buffer and copied out from there: parameter by parameter on a CPU,
all of them by one kernel on a device, as are gradients on their way in.
"""

import functools
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import torch
from torch import nn

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm import Communicator
from hpcfsdp.comm.communicator import Work, segment
from hpcfsdp.comm.fake import FakeCommunicator
from hpcfsdp.errors import EngineError
from hpcfsdp.params.dtensor_layout import DTensorLayout
from hpcfsdp.params.layout import contiguous_strides
from hpcfsdp.params.sharded_params import Dtypes, ShardedParams, other_in_place_of
from hpcfsdp.params.storage import (
    Buffer,
    KeptPart,
    NodeBuffer,
    SharedBuffer,
    Transient,
    Whole,
    alloc_storage,
    free_storage,
    nothing_of,
)

Gather = Callable[[torch.Tensor], torch.Tensor]
"""The program's function that makes all shards, one after the other, of this rank's."""


@dataclass
class DTensorParam:
    """One parameter that ranks share by rows."""

    sharded: nn.Parameter  # the DTensor; the user may assign another one to the modules
    leaf: nn.Parameter  # what modules compute with: the parameter that they held before, which the program may have
    places: Sequence[tuple[nn.Module, str]]  # the modules that hold it, with its name there
    is_shown_elsewhere: bool = False  # whether modules compute with another tensor in place of the leaf

    @property
    def local(self) -> torch.Tensor:
        """This rank's rows."""
        return _compat.local_of(self.sharded)

    def adopt_assigned(self, fqn: str) -> nn.Parameter | None:
        """Take a parameter that the first of its modules holds instead of it, at rest, as after ``assign=True``.

        Return the parameter that it replaces, None if there is none. Refuse one of other ranks, placements or shape.
        """
        (module, name), before = self.places[0], self.sharded
        assigned = module._parameters.get(name)
        if assigned is before or assigned is None:
            return None
        wanted = before.device_mesh, before.placements, before.shape
        if (getattr(assigned, "device_mesh", None), getattr(assigned, "placements", None), assigned.shape) != wanted:
            raise EngineError(
                f"a {type(assigned.data).__name__} of shape {tuple(assigned.shape)} was assigned to {fqn!r}, which is "
                f"a DTensor of shape {tuple(before.shape)} with the placements {list(before.placements)}: assign one "
                "like it (torch.distributed.tensor.distribute_tensor)"
            )
        self.sharded = assigned
        self.register(assigned)
        return before

    def register(self, param: nn.Parameter) -> None:
        """Have the modules hold `param`."""
        for module, name in self.places:
            if _keeps_only_registry(module):
                module._parameters[name] = param
            else:
                setattr(module, name, param)


def _keeps_only_registry(module: nn.Module) -> bool:
    """Return whether a module holds its parameters in one place; an LSTM keeps a list, too."""
    return type(module).__setattr__ is nn.Module.__setattr__


class DTensorParams(ShardedParams):
    """Parameters of one dtype and device, laid out by a ``DTensorLayout`` and sharded over `comm`."""

    layout: DTensorLayout
    may_change_before_backward = True
    hides_whole_norm = False  # a DTensor knows the other ranks' part
    shows_held = False

    def __init__(
        self,
        params: Sequence[DTensorParam],
        layout: DTensorLayout,
        comm: Communicator,
        *,
        reduce_comm: Communicator | None = None,
        replicas: Communicator | None = None,
        dtypes: Dtypes | None = None,
        device: torch.device | None = None,
        pin_memory: bool = True,
        gather: Gather | None = None,
    ) -> None:
        """Move the rows to memory of this object. Collective over `comm` where ranks share memory.

        The computation is where the rows are unless another `device` is given. Memory of offloaded rows is pinned, for
        faster copies, if `pin_memory` says so. A `gather` of the program takes the place of the communicator's.
        """
        self.home = params[0].local.device
        super().__init__(
            layout, comm, device=device or self.home, reduce_comm=reduce_comm, replicas=replicas, dtypes=dtypes
        )
        self.params = tuple(params)  # in the order of the layout's slots
        self._own_gather = gather
        self._has_copied = False
        self._rows = [layout.rows(index) for index in range(len(layout.slots))]
        self._gaps = layout.gaps()
        self._columns = layout.columns()
        # All at once on a device; a CPU would copy them one by one anyway.
        self._copies_columns = accelerator.is_accelerator(self.device) and not all(slot.dim for slot in layout.slots)
        shapes = [slot.chunk_shape(slot.rows_of(comm.rank)[1]) for slot in layout.slots]
        self._places_in_shard = [
            (shape, contiguous_strides(shape), slot.offset) for shape, slot in zip(shapes, layout.slots, strict=True)
        ]
        self._kept = KeptPart()  # of `_gathered`
        self._own_gathered: torch.Tensor | None = None  # what the program has gathered, until `_copy_out`
        self._nothing: torch.Tensor | None = None  # zeros for gaps between gradients, see `fill`
        self._views: list[torch.Tensor] = []
        self._rows_in_shared: list[torch.Tensor] = []
        # This rank's rows, 1-D, `layout.shard_numel` elements; None where they are in shared memory.
        self.shard: torch.Tensor | None = None
        self._buffer = self._make_buffer(pin_memory)
        self.leaves = tuple(param.leaf for param in self.params)
        self._resting = self._views
        if not self._buffer.stays:  # a leaf without memory must not be read
            self._resting = [nothing_of(view.shape, view.dtype, view.device) for view in self._views]
        self._resting_pointers = [view.data_ptr() for view in self._resting]  # their memory stays
        for leaf, param, resting in zip(self.leaves, self.params, self._resting, strict=True):
            _compat.replace_data(leaf, resting)
            leaf.requires_grad_(param.sharded.requires_grad)
        self._buffer.free()
        # In each call of a unit: most modules have a registry alone.
        self._plain: list[tuple[dict[str, nn.Parameter | None], str, DTensorParam, nn.Parameter]] = []
        self._others: list[tuple[DTensorParam, nn.Parameter]] = []
        self._places: list[tuple[nn.Module, str, nn.Parameter]] = []
        self._lends = False
        for param, leaf in zip(self.params, self.leaves, strict=True):
            if param.is_shown_elsewhere:
                continue
            self._places += [(module, name, leaf) for module, name in param.places]
            if all(_keeps_only_registry(module) for module, _ in param.places):
                self._plain += [(module._parameters, name, param, leaf) for module, name in param.places]
            else:
                self._others.append((param, leaf))

    def _make_buffer(self, pin_memory: bool) -> Buffer:
        """Make the buffer for the whole parameters and the shard, and move the rows there."""
        layout, comm, dtypes = self.layout, self.comm, self.dtypes
        is_cast, is_home = dtypes.compute != layout.dtype, not self.is_offloaded
        buffer: Buffer | None = None
        shares = is_home and self._own_gather is None
        if comm.shares_gathered and shares:
            buffer = SharedBuffer(comm, layout.whole_numel, dtypes.compute, is_cast=is_cast)
            self._views = self._views_of(buffer.full)
            self._rows_in_shared = self._rows_in_whole(buffer.full, comm.rank)
        if buffer is not None and not is_cast and all(rows.is_contiguous() for rows in self._rows_in_shared):
            self._take(self._rows_in_shared)
            return buffer
        self.shard = self._zeros_for_shard(pin_memory=pin_memory)
        self._take(self._rows_of(self.shard))
        if buffer is not None:
            return buffer
        if comm.spans_nodes and shares:
            made = NodeBuffer(comm, layout.whole_numel, dtypes.compute, self._rows_in_whole)
            self._views = self._views_of(made.full)
            return made
        if comm.size == 1 and not is_cast and is_home:
            self._views = self._rows_of(self.shard)
            return Whole(self.shard)
        # Nothing is gathered into it: it needs no memory that the ranks' communicator knows.
        transient = Transient(FakeCommunicator(device=self.device), layout.whole_numel, dtypes.compute, self.device)
        self._views = self._views_of(transient.full)
        self._gathered = torch.empty(layout.padded_numel, dtype=dtypes.compute, device=self.device)
        self._segment = segment(self._gathered, comm)
        # Views are made once: their memory is allocated and freed, the tensors stay.
        self._wholes = self._wholes_of(transient.full) if self._copies_columns else []
        self._copied = [index for index, slot in enumerate(layout.slots) if slot.dim or not self._wholes]
        self._copied_to = [rows.of_param(self._views[index]) for index in self._copied for rows in self._rows[index]]
        self._copied_from = self._rows_in(self._gathered)
        free_storage(self._gathered)
        return transient

    def _rows_in_whole(self, full: torch.Tensor, rank: int) -> list[torch.Tensor]:
        """Return the rows of a rank in memory for the whole parameters."""
        pairs = zip(self._views_of(full), self.layout.slots, strict=True)
        return [view.narrow(slot.dim, *slot.rows_of(rank)) for view, slot in pairs]

    def _wholes_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        """Return a place in the memory of whole parameters for each column of the buffer of all shards.

        A parameter that is cut along another dimension than the first is not whole there, and is copied afterwards.
        """
        layout, found = self.layout, []
        for index, width in self._columns:
            start = layout.whole_numel - layout.gap_numel if index is None else layout.slots[index].start
            found.append(full.as_strided((layout.num_shards, width), (width, 1), full.storage_offset() + start))
        return found

    def _rows_in(self, shards: torch.Tensor) -> list[torch.Tensor]:
        """Return the rows to be copied one by one in a buffer of all shards."""
        return [rows.in_shards.of(shards) for index in self._copied for rows in self._rows[index]]

    @torch.no_grad()
    def _take(self, rows: Sequence[torch.Tensor]) -> None:
        """Copy the rows of the ``DTensor``s to new memory, which becomes theirs; one by one, to free the old."""
        self._locals = [_compat.at_its_storage(memory) for memory in rows]
        self._identities = [_compat.identity_of(param.sharded) for param in self.params]
        for param, memory in zip(self.params, self._locals, strict=True):
            memory.copy_(param.local)
            _compat.set_local(param.sharded, memory)

    @property
    def stepped(self) -> Sequence[nn.Parameter]:
        return [param.sharded for param in self.params]

    def follow_requires_grad(self, unit: str) -> None:
        del unit
        for param, leaf in zip(self.params, self.leaves):  # noqa: B905 (in each call of a unit)
            if leaf.requires_grad is not param.sharded.requires_grad:
                leaf.requires_grad_(param.sharded.requires_grad)

    def fits(self) -> bool:
        """Take rows that lie elsewhere, at rest. Return False if they have another dtype, device or shape.

        Refuse an assignment to ``.data`` of a parameter, which has no effect on a ``DTensor``.
        """
        if self.is_unsharded:
            self._refuse_data(self._views, map(torch.Tensor.data_ptr, self._views))
        else:
            self._refuse_data(self._resting, self._resting_pointers)
        for index, (param, memory) in enumerate(zip(self.params, self._locals)):  # noqa: B905 (in each call)
            local, identity = param.local, _compat.identity_of(param.sharded)
            if local is memory and identity == self._identities[index]:
                continue
            self._identities[index] = identity
            if local is memory:
                raise self._data_error(index)
            if not self._adopt(index, local):
                return False
        return True

    def _adopt(self, index: int, local: torch.Tensor) -> bool:
        """Take rows that lie elsewhere. Return False if they have another dtype, device or shape."""
        memory = self._locals[index]
        if local.data_ptr() == memory.data_ptr() and local.shape == memory.shape:
            return True
        if (local.dtype, local.device, local.shape) != (memory.dtype, memory.device, memory.shape):
            return False
        with torch.no_grad():
            memory.copy_(local)
        _compat.set_local(self.params[index].sharded, memory)
        self._has_copied = True
        return True

    def _refuse_data(self, expected: Sequence[torch.Tensor], pointers: Iterable[int]) -> None:
        for index, (leaf, pointer) in enumerate(zip(self.leaves, pointers)):  # noqa: B905 (in each call)
            if leaf.data_ptr() != pointer:
                leaf.data = expected[index]
                raise self._data_error(index)

    def _data_error(self, index: int) -> EngineError:
        return EngineError(
            f"the .data of {self.layout.slots[index].fqn!r} was assigned, which has no effect: the parameter is a "
            "DTensor. Copy values into it under torch.no_grad() instead: param.copy_(values)"
        )

    def pop_copied(self) -> bool:
        """Return whether ``fits`` has copied something since the last call."""
        copied, self._has_copied = self._has_copied, False
        return copied

    def owns_memory_of(self, tensor: torch.Tensor) -> bool:
        return not isinstance(self._buffer, Whole) and super().owns_memory_of(tensor)

    def adopt_user_data(self) -> None:
        """Do nothing: ``fits`` did it before the iteration."""

    def publish(self) -> None:
        if self._rows_in_shared and self.shard is not None:
            _compat.copy_to_each_(self._rows_in_shared, self._locals)

    def gather(self, async_op: bool = False) -> Work | None:
        if not isinstance(self._buffer, Transient):
            return self._buffer.gather(*self._locals, async_op=async_op)
        comm, shard = self.comm, self.shard
        assert shard is not None
        if self._own_gather is not None:
            self._own_gathered = self._own_gather(shard.to(self.device, self.dtypes.compute))
            return None
        with comm.gathering_memory():
            alloc_storage(self._gathered, self._gathered.numel())
        if self._kept.is_there:
            return self._kept.gather(self._gathered, async_op=async_op)
        ready = shard
        if shard.dtype != self.dtypes.compute or shard.device != self.device or comm.size == 1:
            ready = self._segment.copy_(shard, non_blocking=True)
        if comm.size == 1:
            return None
        comm.announce_gather(self._gathered)
        return comm.all_gather_into_tensor(self._gathered, ready, async_op=async_op)

    @property
    def finish_gather(self) -> Callable[[], None] | None:
        if not isinstance(self._buffer, Transient):
            return None
        take = None if self._own_gather is not None else self._kept.taking(self._gathered, self.keepers)
        return functools.partial(self._copy_out, take)

    @torch.no_grad()
    def _copy_out(self, take: Callable[[], None] | None) -> None:
        """Copy the parameters out of the gathered shards, after `take` has kept a part of these."""
        assert isinstance(self._buffer, Transient)
        self._buffer.alloc()
        if take is not None:
            take()
        own, self._own_gathered = self._own_gathered, None
        if self._wholes:
            by_rank = (self._gathered if own is None else own).view(self.layout.num_shards, -1)
            torch.split_with_sizes_copy(by_rank, [width for _, width in self._columns], 1, out=self._wholes)
        _compat.copy_to_each_(self._copied_to, self._copied_from if own is None else self._rows_in(own))
        free_storage(self._gathered)

    def bind(self) -> None:
        self.is_unsharded = True
        self._set_leaves(self._views)
        for registry, name, param, leaf in self._plain:
            if registry[name] is not param.sharded and registry[name] is not leaf:
                raise other_in_place_of(name)
            registry[name] = leaf
        for param, leaf in self._others:
            param.register(leaf)

    def in_graph(self, index: int) -> torch.Tensor:
        """Return what a module computes with of a parameter, part of a graph. Only while it is bound."""
        return self.leaves[index]

    def unbind(self) -> None:
        self.is_unsharded = False
        if self._lends:
            self._refuse_data(self._views, map(torch.Tensor.data_ptr, self._views))
        self._set_leaves(self._resting)
        self._register_rows()
        for module, name, _ in self._places if self._lends else ():
            module.__dict__.pop(name, None)
        self._lends = False

    def lend(self) -> None:
        """Have modules register rows, and compute with the whole parameters.

        Attributes are found before registered parameters, and no function that lists parameters sees them.
        """
        self._lends = True
        self._register_rows()
        for module, name, leaf in self._places:
            module.__dict__[name] = leaf

    def _set_leaves(self, values: Sequence[torch.Tensor]) -> None:
        if self._resting is not self._views:
            for leaf, value in zip(self.leaves, values):  # noqa: B905 (twice in each call of a unit)
                leaf.data = value

    def _register_rows(self) -> None:
        for registry, name, param, _ in self._plain:
            registry[name] = param.sharded
        for param, _ in self._others:
            param.register(param.sharded)

    def targets(self, buffer: torch.Tensor) -> Sequence[Sequence[torch.Tensor]]:
        return [[rows.in_shards.of(buffer) for rows in parts] for parts in self._rows]

    def sources(self, index: int, grad: torch.Tensor) -> Sequence[torch.Tensor]:
        return [rows.of_param(grad) for rows in self._rows[index]]

    def gaps(self, buffer: torch.Tensor) -> Sequence[torch.Tensor]:
        return [gap.of(buffer) for gap in self._gaps]

    def fill(self, buffer: torch.Tensor, grads: Sequence[torch.Tensor | None]) -> bool:
        layout, dtype = self.layout, self.dtypes.compute
        if not self._copies_columns or not _compat.cats_fused(dtype, buffer.dtype):
            return False
        ranks = layout.num_shards
        if self._nothing is None:  # kept: the kernel reads it with the gradients
            self._nothing = torch.zeros(layout.gap_numel, dtype=dtype, device=self.device)
        found, apart = [], []
        for index, width in self._columns:
            if index is None:
                found.append(self._nothing[: ranks * width])
                continue
            slot, grad = layout.slots[index], grads[index]
            if grad is not None and not slot.dim:
                found.append(grad.contiguous())
                continue
            leaves_gaps = grad is None or ranks * slot.rows != slot.shape[slot.dim]
            make = torch.zeros if leaves_gaps else torch.empty
            found.append(make(ranks * width, dtype=dtype, device=self.device))
            apart += [] if grad is None else [(rows, grad) for rows in self._rows[index]]
        _compat.cat_chunks(found, buffer.view(ranks, -1))
        places = [rows.in_shards.of(buffer) for rows, _ in apart]
        _compat.copy_to_each_(places, [rows.of_param(grad) for rows, grad in apart])
        return True

    def grads_of(self, reduced: torch.Tensor, used: Sequence[bool]) -> list[tuple[nn.Parameter, torch.Tensor]]:
        found = zip(self.params, self._rows_of(reduced), used, strict=True)
        return [(param.sharded, _compat.dtensor_like(param.sharded, rows)) for param, rows, is_used in found if is_used]

    def _views_of(self, full: torch.Tensor) -> list[torch.Tensor]:
        begin, slots = full.storage_offset(), self.layout.slots
        return [full.as_strided(slot.shape, contiguous_strides(slot.shape), begin + slot.start) for slot in slots]

    def _rows_of(self, shard: torch.Tensor) -> list[torch.Tensor]:
        """Return each parameter's rows in a tensor that is laid out like a shard."""
        begin = shard.storage_offset()
        return [shard.as_strided(shape, stride, begin + offset) for shape, stride, offset in self._places_in_shard]
