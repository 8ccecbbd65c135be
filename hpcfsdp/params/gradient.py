"""The gradient of sharded parameters: assembled leaf by leaf, reduced over ranks, stored as ``grad``."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat, accelerator
from hpcfsdp.comm.communicator import Work
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import set_grad
from hpcfsdp.params.sharded_params import ShardedParams

CommHook = Callable[..., Any]


@dataclass
class ReduceOptions:
    """How a unit's gradients are reduced, as the program has chosen it. The same on all ranks."""

    divide_by: float | None = None  # the sum over all ranks is divided by it; None for the number of ranks
    hook: Callable[[torch.Tensor], Any] | None = (
        None  # changes this rank's part of each reduced gradient, 1-D, in place
    )
    scatter: Callable[[torch.Tensor], torch.Tensor] | None = None  # averages a gradient in place of the communicator
    over_replicas: bool = (
        True  # else what has been reduced over the shards' ranks is added up until it is over replicas
    )
    fills_unused: bool = False  # whether parameters that no rank has used get zeros
    num_buffers: int = 1  # for gradients of a unit that are assembled while earlier ones are reduced, on a device


class HeldGrad:
    """The gradient of backwards under ``no_sync``, held whole on each rank, and shown as ``grad``.

    Between such backwards the optimizer's parameters show views of it, so in-place changes by the program change it.
    Other changes of ``grad`` are read when the next backward begins.
    """

    def __init__(self, params: ShardedParams) -> None:
        self._params = params
        # 1-D, `padded_numel` elements of the accumulation dtype; None if the program has discarded it.
        self.whole: torch.Tensor | None = None
        # By parameter, with its version, from `show` to `end_show`; else empty.
        self.shown: list[tuple[torch.Tensor, int] | None] = []

    @property
    def shown_on(self) -> list[nn.Parameter]:
        """The parameters that show a held gradient."""
        pairs = zip(self._params.stepped, self.shown)  # noqa: B905
        return [param for param, shown in pairs if shown is not None and param.grad is shown[0]]

    def add(self, buffer: torch.Tensor) -> None:
        """Add a whole gradient of the reduce dtype."""
        if self.whole is None:
            self.whole = buffer.to(self._params.dtypes.accumulate, copy=True)
        else:
            self.whole.add_(buffer)

    def drop(self, averaged: list[torch.Tensor | None] | None) -> None:
        """Take ``grad`` off the parameters, and forget the held gradient. `averaged`: see ``end_show``."""
        if self.shown and averaged is not None:
            for index, (param, shown) in enumerate(zip(self._params.stepped, self.shown, strict=True)):
                if shown is None or param.grad is not shown[0]:
                    averaged[index] = param.grad

    def show(self, used: Sequence[bool], averaged: Sequence[torch.Tensor | None]) -> None:
        """Have the parameters of `used` leaves show their held gradients, others the `averaged` ones."""
        used = used if self._params.steps_each else [any(used)]
        noted: list[tuple[torch.Tensor, int] | None] = []
        for param, part, is_held, before in zip(self._params.stepped, self._parts(), used, averaged, strict=True):
            # ``.data`` has a version of its own: a change of one part must not change the versions of others.
            set_grad(param, part.data if is_held else before)
            noted.append((param.grad, param.grad._version) if is_held and param.grad is not None else None)
        self.shown = noted

    def end_show(self, averaged: list[torch.Tensor | None], used: list[bool]) -> None:
        """Take ``grad`` off the parameters, and adopt the program's changes of it.

        Gradients of earlier backwards, `averaged` by parameter, change where the program has discarded them with the
        held ones, or has assigned others; `used`, by leaf, where its gradient is gone. Refuses changes in place of held
        ones where there are averaged ones, too.
        """
        parts = self._parts()
        self._check_changes(averaged)
        for index, (param, shown) in enumerate(zip(self._params.stepped, self.shown, strict=True)):
            grad, param.grad = param.grad, None
            if shown is None:
                averaged[index] = grad
                continue
            if grad is shown[0]:
                if grad._version != shown[1]:  # to zero, as has been checked
                    averaged[index] = None
                continue
            averaged[index] = None
            if grad is not None and grad.shape == parts[index].shape:
                parts[index].copy_(grad)
                continue
            averaged[index] = grad  # of the shape of the shard
            parts[index].zero_()
            for leaf in [index] if self._params.steps_each else range(len(used)):
                used[leaf] = False
        self.shown = []
        if not any(used):
            self.whole = None

    def _check_changes(self, averaged: Sequence[torch.Tensor | None]) -> None:
        for index, (param, shown) in enumerate(zip(self._params.stepped, self.shown, strict=True)):
            if averaged[index] is None or shown is None or param.grad is not shown[0]:
                continue
            if param.grad._version != shown[1] and param.grad.any():
                fqn = self._params.layout.slots[index].fqn if self._params.steps_each else "the flat parameter"
                raise EngineError(
                    f"the gradient of {fqn!r} was changed in place between two backwards; it is the gradient that "
                    "no_sync holds on this rank, without the average of earlier backwards: change gradients after a "
                    "backward outside of no_sync, or discard all of them by zero_grad()"
                )

    def _parts(self) -> Sequence[torch.Tensor]:
        assert self.whole is not None
        return [place for (place,) in self._params.targets(self.whole)] if self._params.steps_each else (self.whole,)


class ShardedGrad:
    """The gradients of sharded parameters. Methods stand in the order of a step, and run without autograd."""

    def __init__(self, params: ShardedParams, options: ReduceOptions | None = None) -> None:
        self.params = params
        self.options = options or ReduceOptions()
        self.name = ""  # for messages; the same on all ranks
        self.numel = params.layout.padded_numel  # of the full gradient, with padding
        # Of backwards under `no_sync`, if there were any since the last reduction: that is the same on all ranks.
        self.held: HeldGrad | None = None
        self.keeps_back = False  # whether it waits for a later synchronisation, as within `no_sync`; set by the unit
        self.outstanding = 0  # gradients of leaves still to come; counted by the unit
        self.buffer: torch.Tensor | None = None  # the full gradient in the reduce dtype while it is assembled
        self.arriving: torch.Tensor | None = None  # this rank's part, from `reduce` to `finish_reduce`
        self.comm_hook: tuple[Any, CommHook] | None = None  # a state, and what reduces the gradient; None to average
        self.used = [False] * len(params.leaves)  # by leaf, whether it has had a gradient here since the last `store`
        self._targets: Sequence[Sequence[torch.Tensor]] = ()
        self._filled = [False] * len(params.leaves)
        self._is_whole = False  # whether zeros are where no leaf has a gradient, too
        self._sent: torch.Tensor | None = None  # the buffer during its reduction
        self._reduced: torch.Tensor | None = None
        self._partial: torch.Tensor | None = None  # what has not been reduced over replicas yet
        self._landing: list[torch.Tensor] = []  # being copied to host memory, not to be read before `store`
        self._set_aside: list[torch.Tensor | None] | None = None  # ``grad`` of earlier backwards
        self._updated: list[torch.nn.Parameter] = []

    @property
    def has_replicas(self) -> bool:
        """Whether ``reduce_over_replicas`` follows ``reduce``."""
        over_replicas = self.params.replicas is not None and self.options.over_replicas
        return over_replicas and self.params.comm.size > 1 and self.comm_hook is None

    @property
    def _stays_partial(self) -> bool:
        return self.params.replicas is not None and not self.options.over_replicas

    @property
    def all_used(self) -> list[bool]:
        """``used`` if all leaves that require a gradient have had one."""
        return [used or leaf.requires_grad for used, leaf in zip(self.used, self.params.leaves, strict=True)]

    @property
    def has_all(self) -> bool:
        """Whether all leaves that require a gradient have had one."""
        return all(self.used) or self.used == self.all_used

    @property
    def has_waiting(self) -> bool:
        """Whether leaves have gradients, or ``no_sync`` holds some."""
        return self.held is not None or any(leaf.grad is not None for leaf in self.params.leaves)

    def prepare(self) -> None:
        """Take ``grad`` off the leaves before a backward. Raises as ``HeldGrad.end_show``."""
        if self.held is not None and self.held.shown:
            assert self._set_aside is not None
            self.held.end_show(self._set_aside, self.used)
        elif self.params.steps_leaves and self._set_aside is None:
            # They have the shape of the shard, and autograd will add whole gradients.
            self._set_aside = [leaf.grad for leaf in self.params.leaves]
            for leaf in self.params.leaves:
                leaf.grad = None

    def begin(self, buffer: torch.Tensor) -> None:
        """Assemble the gradient in `buffer`, 1-D, ``padded_numel`` elements of the reduce dtype."""
        self.buffer = buffer
        grads = [None if leaf.grad is None else self._take(index) for index, leaf in enumerate(self.params.leaves)]
        self._filled = [grad is not None for grad in grads]
        self.used = [used or filled for used, filled in zip(self.used, self._filled, strict=True)]
        self._is_whole = any(self._filled) and self.params.fill(buffer, grads)
        if self._is_whole:
            return
        self._targets = self.params.targets(buffer)
        waiting = [(index, grad) for index, grad in enumerate(grads) if grad is not None]
        targets = [target for index, _ in waiting for target in self._targets[index]]
        _compat.copy_to_each_(targets, [part for index, grad in waiting for part in self.params.sources(index, grad)])

    def move_from_leaf(self, index: int) -> None:
        """Move the gradient that autograd left on one leaf to its place in the buffer, cast to the reduce dtype."""
        if self.params.leaves[index].grad is None:
            return
        sources = self.params.sources(index, self._take(index))
        for target, source in zip(self._targets[index], sources, strict=True):
            if self._filled[index]:
                target.add_(source)
            else:
                target.copy_(source)
        self._filled[index] = self.used[index] = True

    def adopt_from_leaf_at_rest(self, index: int) -> bool:
        """Take a gradient of a leaf at rest, which is the shard. Return whether the program could compute with it."""
        leaf = self.params.leaves[index]
        if not self.params.steps_leaves or self.params.is_unsharded or (self.held is not None and self.held.shown):
            return False
        if self._set_aside is not None:
            before, grad, leaf.grad = self._set_aside[index], leaf.grad, None
            self._set_aside[index] = grad if before is None else before.add_(grad)
        return True

    def _take(self, index: int) -> torch.Tensor:
        """Return the gradient of a leaf, which has none afterwards."""
        leaf = self.params.leaves[index]
        grad, leaf.grad = leaf.grad, None
        assert grad is not None
        if grad.layout is not torch.strided:
            raise EngineError(
                f"the gradient of {self.params.layout.slots[index].fqn!r} is {grad.layout}: sparse gradients cannot be "
                "sharded; use a dense one"
            )
        return grad

    def keep_back(self) -> None:
        """Add the buffer to the held gradient (``no_sync``), and release it."""
        if self.buffer is None:
            return
        self._complete()
        if self.held is None:
            self.held = HeldGrad(self.params)
        self.held.add(self.buffer)
        self._drop_buffer()

    def complete(self) -> None:
        """Fill in zeros for leaves without a gradient, and add the held gradient, on the stream that has the buffer."""
        self._complete()
        if self.held is not None and self.held.whole is not None:
            self.buffer.copy_(self.held.whole.add_(self.buffer))
        self.held = None

    def reduce(self, label: str, async_op: bool) -> Work | None:
        """Begin to average the complete buffer over the shards' ranks; of one shard, over the replicas. Collective."""
        assert self.buffer is not None and self.arriving is None
        params, dtypes = self.params, self.params.dtypes
        full = self._sent = self.buffer
        self._drop_buffer()
        sharded = params.comm.size > 1
        if sharded and self.comm_hook is None and self.options.scatter is not None:
            self.arriving = self.options.scatter(full)
            return None
        if sharded:
            is_last = self.comm_hook is None and params.replicas is None
            dtype = dtypes.grad if is_last else dtypes.reduce
            self.arriving = torch.empty(params.layout.shard_numel, dtype=dtype, device=params.device)
        else:
            self.arriving = full
        if self.comm_hook is not None:
            state, hook = self.comm_hook
            hook(state, full, *([self.arriving] if sharded else []))
            return None
        if sharded:
            return params.reduce_comm.reduce_scatter_tensor(
                self.arriving, full, "average", accumulate=dtypes.accumulate, label=label, async_op=async_op
            )
        if params.replicas is None or not self.options.over_replicas:
            return None
        self.add_partial()
        return params.replicas.all_reduce(full, "average", accumulate=dtypes.accumulate, label=label, async_op=async_op)

    def reduce_over_replicas(self, label: str) -> None:
        """Average over the replicas what has been averaged over the shards' ranks. Collective over the replicas."""
        assert self.arriving is not None and self.params.replicas is not None
        self.params.replicas.all_reduce(self.arriving, "average", accumulate=self.params.dtypes.accumulate, label=label)

    def finish_reduce(self, *, own_buffer: bool) -> None:
        """Store the result of the reduction; its buffer is free afterwards, and an `own_buffer` is not used again."""
        assert self.arriving is not None
        params, arrived, self.arriving = self.params, self.arriving, None
        if self._stays_partial:
            own = arrived.clone() if arrived is self._sent and not own_buffer else arrived
            self._partial = own if self._partial is None else self._partial.add_(own)
            self._sent = None
            return
        if self.options.divide_by is not None:
            ranks = params.comm.size * (1 if params.replicas is None else params.replicas.size)
            arrived.mul_(ranks / self.options.divide_by)
        if self.options.hook is not None:
            self.options.hook(arrived)
        if arrived is self._sent and arrived.dtype == params.dtypes.grad and not own_buffer:
            arrived = arrived.clone()
        arrived = _copied_to(params.home, arrived.to(params.dtypes.grad))
        self._sent = None
        if params.is_offloaded:
            self._landing.append(arrived)
            return
        if self._reduced is None:
            self._reduced = arrived
        else:  # the unit was reduced before all of its gradients were complete
            self._reduced.add_(arrived)
        # Not onto leaves that still show whole values, or may get more gradients.
        if all(self.used) and not params.steps_leaves and not any(map(_compat.hooks_on_gradient, params.stepped)):
            self._update_grads(self.used)

    def store(self, used_anywhere: Sequence[bool]) -> None:
        """Store the result as ``grad``. Leaves that no rank has used keep the gradient they had."""
        if self._stays_partial:
            self.used = list(used_anywhere)
            return
        if self.options.fills_unused:
            used_anywhere = [leaf.requires_grad for leaf in self.params.leaves]
        self._update_grads(used_anywhere)
        self.used = [False] * len(self.used)
        self.restore_grads()

    def restore_grads(self) -> None:
        """Give the parameters the gradients that they had before this backward."""
        if self._set_aside is None:
            return
        for param, grad in zip(self.params.stepped, self._set_aside, strict=True):
            set_grad(param, grad)
        self._set_aside = None

    def show_held(self) -> None:
        """Have the parameters show the held gradient (``no_sync``) until the next backward begins."""
        if not self.params.shows_held:
            return
        if self.held is None or self.held.whole is None:
            self.restore_grads()
        elif not self.held.shown:
            if self._set_aside is None:
                self._set_aside = [param.grad for param in self.params.stepped]
            self.held.show(self.used, self._set_aside)

    def _update_grads(self, used: Sequence[bool]) -> None:
        reduced, self._reduced = self._reduced, None
        for landed in self._landing:
            reduced = landed if reduced is None else reduced.add_(landed)
        self._landing.clear()
        if reduced is None:
            return
        self.restore_grads()
        for param, part in self.params.grads_of(reduced, used):
            if param.requires_grad:  # it may have been frozen since the forward
                hooks = None if self.params.steps_leaves else _compat.hooks_on_gradient(param)  # autograd calls leaves'
                _add_grad(param, _hooked(hooks, part) if hooks else part)
                self._updated.append(param)

    def pop_updated(self) -> list[torch.nn.Parameter]:
        """Return the parameters that got reduced gradients since the last call."""
        updated, self._updated = self._updated, []
        if self.params.comm.size > 1 and self.params.hides_whole_norm:
            for param in updated:
                note_unchanged(param.grad)
        return updated

    def drop(self) -> None:
        """Forget all gradients: after an exception in a backward those that are complete differ by rank."""
        self._drop_buffer()
        self._sent = self.arriving = self._reduced = self._partial = None
        if self.held is not None:
            self.held.drop(self._set_aside)
            self.held = None
        self._landing.clear()
        self._updated.clear()
        self.used = [False] * len(self.used)
        if self._set_aside is not None or not self.params.steps_leaves:
            for leaf in self.params.leaves:
                leaf.grad = None
        self.restore_grads()

    def add_partial(self) -> None:
        """Add what earlier backwards have reduced over the shards' ranks alone."""
        if self._partial is not None:
            self.arriving.add_(self._partial)
            self._partial = None

    def _complete(self) -> None:
        assert self.buffer is not None
        if self._is_whole:
            return
        if not any(self._filled):
            self.buffer.zero_()
            return
        pairs = zip(self._filled, self._targets, strict=True)
        unused = [target for filled, targets in pairs for target in (() if filled else targets)]
        _compat.zero_each_([*unused, *self.params.gaps(self.buffer)])

    def _drop_buffer(self) -> None:
        self.buffer = None
        self._targets = ()


_VERSION = "_hpcfsdp_version"


def note_unchanged(grad: torch.Tensor | None) -> None:
    """Note the version of a shard's gradient."""
    if grad is not None:
        setattr(grad, _VERSION, grad._version)


def is_noted(grad: torch.Tensor) -> bool:
    """Return whether ``note_unchanged`` was called with the gradient."""
    return hasattr(grad, _VERSION)


def is_changed(grad: torch.Tensor) -> bool:
    """Return whether the gradient was changed in place since ``note_unchanged``."""
    return getattr(grad, _VERSION, grad._version) != grad._version


def _copied_to(home: torch.device, grad: torch.Tensor) -> torch.Tensor:
    if grad.device == home:
        return grad
    pinned = accelerator.is_accelerator(grad.device)
    landed = torch.empty(grad.shape, dtype=grad.dtype, device=home, pin_memory=pinned)
    return landed.copy_(grad, non_blocking=True)


def _hooked(hooks: Mapping[int, Callable[[torch.Tensor], Any]], grad: torch.Tensor) -> torch.Tensor:
    """Return what the hooks of ``register_hook`` make of a parameter's gradient."""
    for hook in list(hooks.values()):
        changed = hook(grad)
        grad = grad if changed is None else changed
    return grad


def _add_grad(param: torch.nn.Parameter, grad: torch.Tensor) -> None:
    if param.grad is not None:
        if getattr(param.grad, "placements", None) == getattr(grad, "placements", None):
            _compat.local_of(param.grad).add_(_compat.local_of(grad))
        else:
            param.grad.add_(grad)
    elif isinstance(grad, DTensor):  # of the parameter's kind
        param.grad = grad
    else:
        set_grad(param, grad)
