"""The root of a tree of units: runs their forwards, iterations, autograd's hooks, and the end of a backward."""

import contextlib
import functools
import warnings
import weakref
from collections import deque
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.engine.backward import ForwardCall
from hpcfsdp.engine.context import Context
from hpcfsdp.engine.order import Order
from hpcfsdp.engine.streams import Stream, Streams, Wait, streams_for
from hpcfsdp.engine.unit import TrainingState, Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.hang import calls
from hpcfsdp.params.gradient import ShardedGrad


class Root:
    """All units under the outermost one.

    An iteration is a call of the outermost unit with the backward that follows. Ranks meet in a labelled barrier before
    it, after its forward, and after its backward, and compare what they have done. Where they share the memory of
    gathered parameters (``ShardedParams.shares_gathered``), no rank may write a shard during a forward or backward, nor
    read those of others outside.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        everyone: Communicator,
        label: str,
        *,
        number: int = 1,
        host: Communicator | None = None,
        streams: Streams | None = None,
        lines: tuple[Communicator, Communicator | None] | None = None,
    ) -> None:
        """Join the units, in the order in which the modules were registered, the root first; `everyone` runs them.

        The `label` is the same on all ranks, and unlike that of any other root; roots with equal names have different
        `number`s, the same on all ranks. `host` connects the ranks through host memory, for the barriers: without it
        only ranks that share the memory of gathered parameters meet. `lines` are the ranks of `host` as shards and
        replicas; None if these are other ranks.
        """
        self.units = list(units)
        sharded_params = [flat for unit in units for flat in unit.sharded_params]
        self.device = sharded_params[0].device if sharded_params else everyone.device
        self._streams = streams or streams_for(self.device)
        self.in_backward = False  # whether a backward has begun, until `_finish_backward` ends it
        self._backwards = 0  # how many have begun
        self._is_running = functools.partial(_runs_backward, weakref.ref(self))
        self._offloads = any(flat.is_offloaded for flat in sharded_params)
        self._host_shards = self._offloads or not self._streams.overlap
        self._shared = [flat for flat in sharded_params if flat.shares_gathered]
        meeting = [flat.comm for flat in self._shared]
        if host is not None and host.size > 1:
            meeting.append(host)
        self._host, self._lines = host, lines
        self._counted_by = (host, everyone)
        self._meeting = list(dict.fromkeys(meeting))
        self._order = Order(host or everyone, label, number, confirm=len(self._shared) < len(sharded_params))
        self.context = Context(self._streams, self._order, {unit.name: unit.unsharded_params for unit in units})
        for unit in units:
            unit.attach(self.context, self._begin_backward)
        self._depth = 0
        self._is_transformed = False  # whether a function of torch.func calls the model
        self._changeable = [flat for flat in sharded_params if flat.may_change_before_backward]
        self._versions = self._current_versions()  # when ranks met
        self._is_stepped = False  # whether an optimizer has stepped since
        self._read_over: set[Communicator] = set()  # ranks that may still read what modules have shown
        self._called: dict[Unit, None] = {}  # units that expect a backward, in the order in which their forwards ended
        self._before: list[tuple[Unit, bool, bool, int]] = []  # backwards expected before this iteration
        self._has_trained: dict[Unit, bool] = {}  # since a step, those that backwards have reached
        self._has_warned = False  # of units that have not
        self._due: deque[Unit] = deque()  # units that expect this backward, in its order
        self._begun: list[Unit] = []  # units whose backward has begun, and perhaps not ended

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return self._depth > 0 or (self.in_backward and _compat.in_backward())

    @property
    def holds_grads(self) -> bool:
        """Whether ``no_sync`` keeps back gradients that are not reduced yet; the same on all ranks."""
        return any(grad.held is not None for unit in self.units for grad in unit.grads)

    def refuse_held(self, what: str, params: Iterable[torch.Tensor] | None = None) -> None:
        """Refuse the operation `what` on averaged gradients of `params` (None: all) while ``no_sync`` holds some."""
        wanted = None if params is None else set(params)
        for grad in (grad for unit in self.units for grad in unit.grads if grad.held is not None):
            if any(wanted is None or param in wanted for param in grad.held.shown_on):
                raise EngineError(
                    f"{what} would use gradients of {grad.name!r} of rank {grad.params.comm.rank} alone, held by "
                    "no_sync: run the last backward before it outside of no_sync, or discard the gradients with "
                    "zero_grad()"
                )

    @contextlib.contextmanager
    def no_sync(self) -> Iterator[None]:
        """Return a context in which backwards keep gradients back instead of reducing them."""
        before = [unit.keeps_back for unit in self.units]
        for unit in self.units:
            unit.keeps_back = True
        try:
            yield
        finally:
            for unit, kept_back in zip(self.units, before, strict=True):
                unit.keeps_back = kept_back

    # Parameters that the program asks for

    @property
    def _is_in_iteration(self) -> bool:
        return self._depth > 0 or self.in_backward

    def unshard(self, unit: Unit) -> None:
        """Begin to gather the parameters of a unit, which stay until ``reshard``. Collective over all ranks."""
        self._streams.refuse_capture(f"unshard of {unit.name!r}")
        unit.is_kept = True
        if not self._is_in_iteration and not unit.unsharded_params.is_gathered:
            if unit.unsharded_params.has_keepers:
                self.context.reshard(unit.unsharded_params)  # what was kept since a forward may be old
            self._publish("unshard", unit)
        self.context.unshard(unit.unsharded_params)

    def await_unshard(self, unit: Unit) -> None:
        """Have the modules of a unit hold what ``unshard`` gathers."""
        if unit.is_kept and not unit.unsharded_params.is_bound:
            self.context.await_unshard(unit.unsharded_params)
            unit.show()

    def reshard(self, units: Iterable[Unit], *, meet: bool = True) -> None:
        """Free the parameters of units that are neither in a forward nor in a backward.

        Collective outside of an iteration if modules have shown memory that ranks share: others may still read there
        what the optimizer writes next. Without `meet` this rank waits for them later, before an optimizer steps.
        """
        self._adopt_user_data()
        freed = [unit for unit in units if unit.is_idle and (unit.is_unsharded or unit.is_kept)]
        for unit in freed:
            unsharded = (flat for flat in unit.sharded_params if flat.is_unsharded)
            self._read_over.update(flat.comm for flat in unsharded if flat.shares_gathered)
            unit.reshard()
        if self._is_in_iteration:
            return
        if freed:
            self.context.free_retired(keep=0)
            self._await_reads_by_gathers()
        if meet and self._read_over:
            read_over, self._read_over = self._read_over, set()
            for comm in dict.fromkeys(flat.comm for flat in self._shared):  # in the same order on all ranks
                if comm in read_over:
                    comm.labelled_barrier(f"reshard within {self.units[0].name!r}")

    def _await_reads_by_gathers(self) -> None:
        """Prepare for a program that may write shards in host memory next."""
        if self._host_shards:
            self._streams.wait(Stream.HOST, self._streams.record(Stream.GATHER), Wait.SHARDS_READ)

    # Iterations

    def forward(
        self, unit: Unit, module: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], compiler: Any
    ) -> Any:
        """Call a unit's module, or another function that computes with its parameters, and has them gathered.

        Collective over the ranks of the unit. The `compiler` of torch.compile is set while the module runs.
        """
        self._enter(unit)
        broken = True
        try:
            unit.begin_forward()
            try:
                call, args, kwargs = unit.pre_forward(args, kwargs)
                _compat.set_compiler(compiler)
                try:
                    outputs = module(*args, **kwargs)
                finally:
                    _compat.set_compiler(None)
                outputs = unit.post_forward(call, outputs, self._pre_backward)
            except BaseException:
                unit.end_forward(broken=True)
                raise
            # Other ranks may compute outputs with parameters that this one leaves out.
            has_backward = call.has_backward or (_compat.records_backward() and unit.leaves.is_trained)
            if has_backward and unit.training_state is not TrainingState.RECOMPUTE:
                self._called.pop(unit, None)
                self._called[unit] = None
                unit.expect_backward(later=not self.in_backward)
            unit.end_forward(broken=False)
            broken = False
        finally:
            self._leave(unit, broken=broken)
        return outputs

    def _enter(self, unit: Unit) -> None:
        """Begin a call of a unit. Collective over all ranks for the outermost call."""
        if self._depth == 0:
            self._streams.refuse_capture(f"the forward of {unit.name!r}")
            self._is_transformed = _compat.in_transform()
            self.recover()
            if not self.in_backward:
                self._begin_iteration(unit)
        self._depth += 1

    @_compat.outside_of_modes
    def _leave(self, unit: Unit, *, broken: bool) -> None:
        """End a call of a unit. Collective over all ranks for the outermost call, unless `broken` by an exception."""
        self._depth -= 1
        if self._depth or self.in_backward:
            return
        self._reshard([each for each in self.units if each.unsharded_params in self.context.ahead])  # in vain
        self._reshard([each for each in self.units if each.complete_forward()])
        self._await_reads_by_gathers()
        if broken:
            self._reshard(self.units)
        elif not torch.is_grad_enabled() and not self._is_transformed:
            self._reshard(self._left_over())
        self._unbind(self.units if self._is_transformed else self._called if torch.is_grad_enabled() else ())
        self.context.free_retired(keep=0)
        if broken:
            self._order.forget()
            # Other ranks may have called other units in this iteration: expect the backwards from before it.
            for each, was_called, owes_grads, num_calls in self._before:
                each.owes_grads, each.num_calls = owes_grads, num_calls
                if not was_called:
                    self._called.pop(each, None)
        else:
            self._meet("end of the forward", unit)

    def rest(self) -> None:
        """Reshard what a forward or the program has left unsharded, between iterations. Collective as ``reshard``."""
        if not self._is_in_iteration:
            self.reshard(self.units)

    def before_step(self, params: Collection[nn.Parameter]) -> None:
        """Prepare for a step of an optimizer on `params`. Collective as ``reshard`` if some are of this root."""
        # Others may be of a model that is gone, and that the ranks have forgotten at different times.
        stepped = [
            each for each in self.units if any(p in params for flat in each.sharded_params for p in flat.stepped)
        ]
        if not self._is_in_iteration:
            self.reshard(self.units, meet=bool(stepped))
        self._is_stepped |= bool(stepped)
        untrained = [unit.name for unit in stepped if not self._has_trained.pop(unit, True)]
        if untrained and not self._has_warned:
            self._has_warned = True
            more = f" and of {len(untrained) - 1} more" if len(untrained) > 1 else ""
            warnings.warn(
                f"no parameter of the unit {untrained[0]!r}{more} has got a gradient before this step, on any rank, "
                "although the forward called it: a module that computes with detached parameters, with .data, or with "
                "copies that it has kept, does not train. Ignore this warning if the loss does not depend on it",
                stacklevel=4,
            )

    @property
    def _has_changed(self) -> bool:
        """Whether parameters that may change before a backward have, since ranks met."""
        # Fused and foreach optimizers do not change the version of a DTensor.
        return bool(self._changeable) and (self._is_stepped or self._versions != self._current_versions())

    def _current_versions(self) -> list[list[int]]:
        return [flat.versions for flat in self._changeable]

    def recover(self) -> None:
        """Bring all units back to rest if there was an exception in a backward. Collective over all ranks."""
        if not self.in_backward or _compat.in_backward():
            return
        self.in_backward = False
        self._depth = 0
        try:
            self._streams.drain()
        finally:
            self._due.clear()
            self.forget_step()

    def forget_step(self) -> None:
        """Drop gradients that are held or not complete, and expect no backward."""
        self._order.forget()
        self.context.reductions.drop()
        self._called.clear()
        for unit in self.units:
            unit.reset()
        self.context.free_retired(keep=0)

    @_compat.outside_of_modes
    def _begin_iteration(self, unit: Unit) -> None:
        for each in self.units:
            if each.training_state is TrainingState.SUMMON and (each is unit or each in unit.inside):
                raise EngineError(
                    f"{each.name}: the model was called within summon_full_params: leave that context first"
                )
        self._adopt_user_data()
        self._reshard(self.units if self._has_changed else self._left_over())
        self._before = [(each, each in self._called, each.owes_grads, each.num_calls) for each in self.units]
        self._order.begin()
        self._publish("forward", unit)

    def _adopt_user_data(self) -> None:
        for unit in self.units:
            for flat in unit.sharded_params if unit.is_idle else ():
                flat.adopt_user_data()

    def _publish(self, what: str, unit: Unit | None = None) -> None:
        """Let gathers read the shards as they are now. Collective over all ranks."""
        for flat in self._shared:
            flat.publish()
        self._meet(what, unit)
        self._versions, self._is_stepped = self._current_versions(), False
        event, self.context.user_event = self.context.user_event, None
        copied = [flat for flat in self._changeable if flat.pop_copied()]  # later than the event
        self.context.shards_written = self._streams.record(Stream.COMPUTE) if copied or event is None else event

    def _meet(self, what: str, unit: Unit | None = None, *, flag: bool = False) -> list[Communicator]:
        """Wait for all ranks, which must have done the same. Return the communicators in which one has set `flag`."""
        flagged = []
        where = f" of {unit.name!r}" if unit is not None else ""
        mode = "" if torch.is_grad_enabled() or self.in_backward else " without gradients"
        for comm in self._meeting:
            # Ranks that share units inside alone have made other models, and count them differently.
            step = self._order.step if comm in self._counted_by else f"step {self._order.iterations}"
            text = f"{what}{where}{mode}, {step}, order {self._order.digest or 'new'}"
            if self._order.meet(comm, text, flag=flag):
                flagged.append(comm)
        return flagged

    def _reshard(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.is_idle and unit.is_unsharded:
                unit.reshard()

    def _unbind(self, lent: Collection[Unit]) -> None:
        """Have modules hold what an optimizer may step; the program computes on with those of the units `lent`."""
        for unit in self.units:
            if unit.unsharded_params.is_bound and not (unit.is_kept or unit.is_in_graph):
                if unit in lent:
                    unit.lend(stays=self._is_transformed)
                else:
                    unit.unbind()

    def _left_over(self) -> list[Unit]:
        """Units that may have been gathered and do not need it any more, unless the program wants to keep them so."""
        return [unit for unit in self.units if not (unit.stays_unsharded or unit.is_in_graph)]

    # Backward

    def _pre_backward(self, unit: Unit, call: ForwardCall) -> None:
        """Gather a unit's parameters, called by a hook on an output. Collective the first time in a backward."""
        if unit.training_state is TrainingState.FORWARD:
            raise EngineError(
                f"{unit.name}: backward ran through the unit while its forward was still running: call backward "
                "after the forward has returned"
            )
        if torch.is_grad_enabled():  # the graph of what is computed now has a backward of its own
            for each in dict.fromkeys([*reversed(self._called), unit]):
                each.join_graph()
            return
        self._begin_backward()
        if call.backward == self._backwards:  # another output of the same call
            return
        call.backward = self._backwards
        unit.check_versions(call)
        if unit.is_idle:
            for each in self._begun:
                if unit not in each.inside and each not in unit.inside:
                    each.finish_when_complete(is_followed=True)
            self._begun = [each for each in self._begun if not each.is_idle]
            self._run_unused_before(unit)
            unit.begin_backward()
            self._begun.append(unit)
        unit.pre_backward(call)

    def _begin_backward(self) -> None:
        """Begin a backward: its first unit has got a gradient."""
        if not self.in_backward:
            self._start_backward()
            _compat.call_after_backward(self._finish_backward)

    def _start_backward(self) -> None:
        self._streams.refuse_capture(f"the backward of {self.units[0].name!r}")
        self.in_backward = True
        self._backwards += 1
        calls.backward.label = f'backward of "{self.units[0].name}"'
        calls.backward.is_running = self._is_running
        self._adopt_user_data()
        self._due = deque(unit for unit in reversed(self._called) if not unit.is_in_graph)
        self._begun.clear()
        if self._has_changed:
            self._publish("backward, after a change of parameters")
        self.context.reductions.alloc()
        for unit in reversed(self._called):
            if unit.is_in_graph:  # its leaves may get gradients by derivatives alone
                unit.begin_backward()
                self._begun.append(unit)

    def _run_unused_before(self, unit: Unit) -> None:
        """Run the backward of units that are due before this one and got no gradient. Collective over all ranks.

        Other ranks may have gradients for them, and wait with these. A unit that holds this one begins its backward
        with it: both may return the same tensor, and the hook of the inner one runs first.
        """
        if unit not in self._due:
            return
        while (first := self._due.popleft()) is not unit:
            if unit in first.inside:
                first.begin_backward()
                self._begun.append(first)
            else:
                first.run_unused_backward()

    def reduce_held(self) -> None:
        """Reduce the gradients that backwards have held back, or left on the leaves, outside of a backward.

        Collective over all ranks.
        """
        self.recover()
        if any(unit.owes_grads and not unit.keeps_back for unit in self.units):
            self._start_backward()
            self._due.clear()  # each has had its backward
            self._called.clear()
            self._finish_backward()

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """End a backward; called by autograd. Collective over all ranks."""
        streams = self._streams
        # All ranks reduce and gather in one order. A rank that used the units that are due has ended those before them
        # when it came to these, but units around others, which end with the last of them.
        for unit in self._begun:
            if unit.training_state is TrainingState.BACKWARD and not unit.inside:
                unit.post_backward()
        while self._due:
            self._due.popleft().run_unused_backward()
        for unit in self.units:
            if unit.training_state is TrainingState.BACKWARD:
                unit.post_backward()
        for unit in self.units:  # called in earlier iterations under no_sync, and not in this one
            if unit.owes_grads and unit not in self._called and not unit.keeps_back:
                unit.run_unused_backward(gathers=False)
        ahead = self.context.ahead  # in vain, as what was kept for a backward that did not come
        self._reshard(
            [each for each in self.units if each.unsharded_params in ahead or each.unsharded_params.has_keepers]
        )
        self.context.free_retired(keep=0)
        for unit in self.units:
            unit.enqueue_at_the_end()
        self.context.reductions.advance()
        for stream in (Stream.REDUCE, Stream.REPLICATE):
            reduced = streams.record(stream)
            streams.wait(Stream.COMPUTE, reduced, Wait.GRADS_REDUCED)
            if self._offloads:
                streams.wait(Stream.HOST, reduced, Wait.GRADS_LANDED)
        self._await_reads_by_gathers()
        self._unbind([unit for unit in self.units if not unit.reshard_after_backward])
        reduced = [unit for unit in self.units if unit.owes_grads and not unit.keeps_back]
        has_all = all(grad.has_all for unit in reduced for grad in unit.grads)
        self._store_grads(reduced, self._meet("end of the backward", flag=has_all))
        self._called.clear()
        for unit in self.units:
            unit.end_backward()
        self.in_backward = False
        for unit in self.units:
            unit.leaves.run_hooks()

    def _store_grads(self, reduced: Sequence[Unit], have_all: Collection[Communicator]) -> None:
        """Store the gradients of `reduced` units as ``grad``, and show those that others hold.

        A rank of each communicator in `have_all` has used all leaves. Other ranks ask each other what they have used.
        """
        for unit in self.units:
            for grad in unit.grads if unit.owes_grads and unit.keeps_back else ():
                grad.show_held()
        self.context.reductions.release()
        used = iter(self._used_anywhere([grad for unit in reduced for grad in unit.grads], have_all))
        for unit in reduced:
            by_grad = [next(used) for _ in unit.grads]
            for grad, used_leaves in zip(unit.grads, by_grad, strict=True):
                grad.store(used_leaves)
            if any(map(any, by_grad)):
                self._has_trained[unit] = True
            elif unit.leaves.is_trained and any(p.requires_grad for grad in unit.grads for p in grad.params.stepped):
                self._has_trained.setdefault(unit, False)  # it required gradients then, and does now

    @_compat.outside_of_modes
    def _used_anywhere(self, grads: Sequence[ShardedGrad], have_all: Collection[Communicator]) -> list[Sequence[bool]]:
        """For each gradient, by leaf, whether any rank has used the leaf. Collective unless that is known."""
        found: list[Sequence[bool]] = [grad.used for grad in grads]
        groups: dict[tuple[Communicator, Communicator | None], list[int]] = {}
        for index, grad in enumerate(grads):
            if grad.params.comm.size > 1 or grad.params.replicas is not None:  # other ranks contribute
                groups.setdefault((grad.params.comm, grad.params.replicas), []).append(index)
        for (shards, replicas), members in groups.items():
            over = [
                comm for comm in (grads[members[0]].params.reduce_comm, replicas) if comm is not None and comm.size > 1
            ]
            if self._host is not None and (shards, replicas) == self._lines:
                over = [self._host]  # the device need not be asked
            if len(over) == 1 and over[0] in have_all:
                for index in members:
                    found[index] = grads[index].all_used
                continue
            mine = [used for index in members for used in grads[index].used]
            device = over[0].device  # from pinned memory the copy does not hold up the program
            anywhere = torch.tensor(mine, dtype=torch.uint8, pin_memory=device.type != "cpu")
            anywhere = anywhere.to(device, non_blocking=True)
            for comm in over:
                comm.all_reduce(anywhere, "max")
            if device.type != "cpu" and all(grads[index].has_all for index in members):
                continue  # no need to wait for the device
            everyone = [bool(used) for used in anywhere.tolist()]
            for index in members:
                count = len(grads[index].used)
                found[index], everyone = everyone[:count], everyone[count:]
        return found


def _runs_backward(root: weakref.ref[Root]) -> bool:
    """Return whether the calling thread is in a backward of units of a root."""
    found = root()
    return found is not None and found.in_backward and _compat.in_backward()
