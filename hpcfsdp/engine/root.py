"""What all units under one root share: the passes, the queues of work, gathering ahead, the end of a backward."""

from __future__ import annotations

import functools
import weakref
from collections import deque
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

import torch

from hpcfsdp import _compat
from hpcfsdp.comm import Communicator
from hpcfsdp.engine.order import Order
from hpcfsdp.engine.param_hooks import run_hooks
from hpcfsdp.engine.phase import Phase
from hpcfsdp.engine.reductions import Reductions, place
from hpcfsdp.engine.streams import Place, Queue, Streams, Wait, streams_for
from hpcfsdp.errors import CrossedCallsError, DifferentCallsError, DisagreementError, EngineError
from hpcfsdp.flat.gradient import FlatGrad
from hpcfsdp.launch import calls

if TYPE_CHECKING:
    from hpcfsdp.engine.unit import Unit


class Engine:
    """The common part of all units under one root.

    A pass is a call of the outermost unit with the backward that follows. Ranks meet before it, after its forward, and
    after its backward, and compare what they have done. Where they share the memory of the gathered values
    (``FlatParam.is_resident``), nobody may write a shard in between, and outside nobody reads those of others.

    Attributes:
        units: in the order in which the modules were registered, the root first.
        in_backward: whether a backward pass has begun and its end has been asked for.
        backwards: how many have begun.
        sync_grads: whether gradients are reduced; False within ``no_sync``.
    """

    def __init__(
        self,
        units: Sequence[Unit],
        everyone: Communicator,
        label: str,
        *,
        host: Communicator | None = None,
        streams: Streams | None = None,
    ) -> None:
        """Not collective.

        Args:
            everyone: all ranks that run these units.
            label: the same on all ranks, unlike that of any other engine.
            host: connects the same ranks through host memory, which they meet in; None if nothing does, and then only
                ranks that share the memory of gathered values meet.
        """
        self.units = list(units)
        flats = [flat for unit in units for flat in unit.flats]
        self.streams = streams or streams_for(flats[0].device if flats else everyone.device)
        self.in_backward = False
        self.backwards = 0
        self._offloads = any(flat.is_offloaded for flat in flats)
        self.sync_grads = True
        resident = [flat for flat in flats if flat.is_resident]
        self._resident = resident
        meeting = [flat.comm for flat in resident]
        if host is not None and host.size > 1:
            meeting.append(host)
        self._meeting = list(dict.fromkeys(meeting))
        self.order = Order(host or everyone, label, confirm=len(resident) < len(flats))
        self.reductions = Reductions(self.streams)
        for unit in units:
            for index, grad in enumerate(unit.grads):
                grad.name = f"{unit.name}[{index}]" if index else unit.name
                self.reductions.plan(grad)
        self._by_name = {unit.name: unit for unit in units}
        self._depth = 0
        self._passes = 0
        self._called: dict[Unit, None] = {}  # units with a backward to come, in the order in which their forward ended
        self._expected: list[tuple[Unit, bool, bool, int]] = []  # of each unit what was expected before this pass
        self._due: deque[Unit] = deque()
        self._ahead: set[Unit] = set()
        self._shards_written: Any = None
        self._retired: deque[tuple[Unit, Any]] = deque()  # resharded, with their memory still taken

    @property
    def is_busy(self) -> bool:
        """Whether a forward or a backward is running."""
        return self._depth > 0 or (self.in_backward and _compat.in_backward())

    @property
    def holds_grads(self) -> bool:
        """Whether ``no_sync`` has kept gradients back that have not been reduced since; the same on all ranks."""
        return any(grad.held.is_owed for unit in self.units for grad in unit.grads)

    def refuse_held(self, what: str, params: Iterable[torch.Tensor] | None = None) -> None:
        """Not collective. Refuse what needs gradients that are averaged over ranks while ``no_sync`` holds others.

        Args:
            what: the user does.
            params: it is done to; None for all.

        Raises:
            EngineError: with the name of a unit, and what to do.
        """
        if not self.holds_grads:
            return
        wanted = None if params is None else set(params)
        for unit in self.units:
            for grad in unit.grads:
                if any(wanted is None or param in wanted for param in grad.held.shown_on):
                    raise EngineError(
                        f"{what} would take gradients of {grad.name!r} that are those of rank {grad.flat.comm.rank} "
                        "alone, held by no_sync: run the last backward before it outside of no_sync, or throw the "
                        "gradients away by zero_grad()"
                    )

    # Passes

    def enter(self, unit: Unit) -> None:
        """Collective for the outermost call. A unit is called."""
        if self._depth == 0:
            self.recover()
            if not self.in_backward:
                self._begin_pass(unit)
        self._depth += 1

    def leave(self, unit: Unit, *, broken: bool) -> None:
        """Collective for the outermost call, unless `broken` by an exception. A unit's call ends."""
        self._depth -= 1
        if self._depth or self.in_backward:
            return
        self._reshard(list(self._ahead))
        if self._offloads:
            self.streams.wait(Queue.HOST, self.streams.record(Queue.GATHER), Wait.SHARDS_READ)
        if not torch.is_grad_enabled() or broken:
            self._reshard(self.units)
        self._free_retired(keep=0)
        if broken:
            self.order.forget()
            self._forget_forward()
        else:
            self._meet("end of the forward", unit)

    def expect_backward(self, unit: Unit) -> None:
        """A call of the unit has ended with outputs that gradients may come to."""
        self._called.pop(unit, None)
        self._called[unit] = None
        unit.owes_grads = True
        if not self.in_backward:  # not a recomputation, which adds no graph that is gone through later
            unit.num_calls += 1

    def _forget_forward(self) -> None:
        """Expect what was expected before this pass: it may have come to other units on other ranks."""
        for unit, was_called, owed_grads, num_calls in self._expected:
            unit.owes_grads, unit.num_calls = owed_grads, num_calls
            if not was_called:
                self._called.pop(unit, None)

    def rest(self) -> None:
        """Not collective. Reshard what a forward has left whole for a backward that may not come."""
        if self._depth == 0 and not self.in_backward:
            self._reshard(self.units)
            self._free_retired(keep=0)

    def recover(self) -> None:
        """Collective if a pass was broken off by an exception. Bring all units back to rest then."""
        if not self.in_backward or _compat.in_backward():
            return
        self.in_backward = False
        self._depth = 0
        self.order.forget()
        try:
            self.streams.drain()
        finally:
            self.reductions.drop()
            self._due.clear()
            self._called.clear()
            for unit in self.units:
                unit.reset()
            self._free_retired(keep=0)

    def _begin_pass(self, unit: Unit) -> None:
        for each in self.units:
            if each.phase is Phase.SUMMON and (each is unit or each in unit.inside):
                raise EngineError(f"{each.name}: the model was called within summon_full_params: leave that first")
        self._reshard(self.units)  # left over from a forward without a backward
        self._expected = [(each, each in self._called, each.owes_grads, each.num_calls) for each in self.units]
        self._passes += 1
        self.order.begin()
        for each in self.units:
            for flat in each.flats if each.phase is Phase.IDLE else ():
                flat.take_back()
        for flat in self._resident:
            flat.publish()
        self._meet("forward", unit)
        self._shards_written = self.streams.record(Queue.COMPUTE)

    def _meet(self, what: str, unit: Unit | None = None) -> None:
        """Collective. Wait for all ranks; they have done the same since the pass began, or all of them raise."""
        where = f" of {unit.name!r}" if unit is not None else ""
        mode = "" if torch.is_grad_enabled() or self.in_backward else " without gradients"
        note = f"{what}{where}{mode}, step {self._passes}, order {self.order.digest or 'new'}"
        for comm in self._meeting:
            try:
                comm.meet(note)
            except CrossedCallsError:  # the others are elsewhere
                raise
            except DifferentCallsError as error:
                raise self._explained(comm, error) from None

    def _explained(self, comm: Communicator, error: DifferentCallsError) -> Exception:
        """Collective. What ranks that met with different notes have done, unit by unit."""
        paths = comm.all_gather_object(self.order.path())
        for rank, path in enumerate(paths):
            for turn, (first, other) in enumerate(_zip_longest(paths[0], path)):
                if first != other:
                    found = DisagreementError(
                        f"ranks run modules in different orders: as turn {turn + 1} of step {self._passes} rank 0 has "
                        f"{first}, rank {rank} has {other}. All ranks must call the same modules in the same order, "
                        "and equally often"
                    )
                    found.collective = True
                    return found
        return error

    # Gathering

    def unshard(self, unit: Unit, *, ahead: bool = False) -> None:
        """Collective. Begin to gather a unit's parameters, unless that has begun.

        Args:
            ahead: another unit is computed with first.
        """
        if unit.is_gathered or not unit.gathers:
            return
        unit.is_gathered = True
        streams = self.streams
        streams.wait(Queue.GATHER, self._shards_written, Wait.SHARDS_WRITTEN)
        self._free_retired(keep=0 if ahead else 1, unless=unit)
        for flat in unit.gathers:
            unit.gathered = streams.launch(
                Queue.GATHER,
                lambda async_op, flat=flat: flat.gather(async_op=async_op),
                reads=[(id(flat), "shard")],
                writes=[(id(flat), "values")],
            )

    def await_unshard(self, unit: Unit) -> None:
        """Have the module compute with the gathered values."""
        self._ahead.discard(unit)
        self.streams.wait(Queue.COMPUTE, unit.gathered, Wait.VALUES_GATHERED)
        self.streams.touch(Queue.COMPUTE, reads=values_of(unit))
        for flat in unit.flats:
            flat.bind()

    def reshard(self, unit: Unit) -> None:
        """Free a unit's gathered values."""
        if unit in self._ahead:
            self._ahead.discard(unit)
            self.streams.wait(Queue.COMPUTE, unit.gathered, Wait.GATHERED_IN_VAIN)
        for flat in unit.flats:
            flat.unbind()
        if unit.is_gathered:
            unit.is_gathered = False
            self.streams.touch(Queue.COMPUTE, reads=values_of(unit))
            self._retired.append((unit, self.streams.record(Queue.COMPUTE)))
            if not self.streams.overlap:
                self._free_retired(keep=0)

    def _free_retired(self, *, keep: int, unless: Unit | None = None) -> None:
        """Free memory of units that were resharded, the oldest first; `unless` takes up its own again.

        The last one is kept while the next is gathered for immediate use: that goes into other memory, and does not
        wait until the one before has been computed with. What is gathered ahead has that much time anyway.
        """
        for unit, event in list(self._retired):
            if unit is not unless and len(self._retired) <= keep:
                return
            self._retired.remove((unit, event))
            self.streams.wait(Queue.GATHER, event, Wait.VALUES_USED)
            if unit is not unless:
                for flat in unit.gathers:
                    flat.free()
                self.streams.free(*values_of(unit))

    def gather_ahead(self, kind: str) -> None:
        """Collective. Begin to gather the unit that is known to do `kind` next."""
        name = self.order.upcoming(kind)
        unit = self._by_name.get(name) if name is not None else None
        if unit is not None and unit.gathers and not unit.is_gathered:
            self._ahead.add(unit)
            self.unshard(unit, ahead=True)

    def _reshard(self, units: Iterable[Unit]) -> None:
        for unit in units:
            if unit.phase is Phase.IDLE and (unit.is_gathered or unit.is_unsharded):
                self.reshard(unit)

    # Backward

    def begin_backward(self) -> None:
        """Gradients have come to the first unit of this backward."""
        if self.in_backward:
            return
        self.in_backward = True
        self.backwards += 1
        calls.begin_backward(self.units[0].name, functools.partial(_runs_backward, weakref.ref(self)))
        _compat.call_after_backward(self._finish_backward)
        self._due = deque(reversed(self._called))
        self.reductions.alloc()

    def take_turn(self, unit: Unit) -> None:
        """Collective. The unit's backward begins: those whose turn was before it, and got no gradient, take theirs now.

        Other ranks may have gradients for them, with which they wait. A unit that holds this one begins with it: both
        may return the same tensor, of which the inner one hears first.
        """
        if unit not in self._due:
            return
        while (first := self._due.popleft()) is not unit:
            first.begin_backward() if unit in first.inside else first.be_absent()

    def reduce_complete(self) -> None:
        """Collective, unless gradients are kept back. Reduce the gradients whose turn it is."""
        self.reductions.advance(keep_back=not self.sync_grads)

    @torch.no_grad()
    def _finish_backward(self) -> None:
        """Collective. Called once at the end of the backward pass."""
        for unit in self.units:
            if unit.phase is Phase.BACKWARD:
                unit.post_backward()
        while self._due:
            self._due.popleft().be_absent()
        if self.sync_grads:
            for unit in self.units:  # called in earlier passes without synchronisation, and not in this one
                if unit.owes_grads and unit not in self._called:
                    unit.be_absent()
        self._reshard(list(self._ahead))
        self._free_retired(keep=0)
        for unit in self.units:
            unit.join_at_the_end()
        self.reduce_complete()
        self.streams.wait(Queue.COMPUTE, self.streams.record(Queue.REDUCE), Wait.GRADS_REDUCED)
        if self._offloads:
            self.streams.wait(Queue.HOST, self.streams.record(Queue.REDUCE), Wait.GRADS_LANDED)
            self.streams.wait(Queue.HOST, self.streams.record(Queue.GATHER), Wait.SHARDS_READ)
        self._meet("end of the backward")
        self._settle()
        self._called.clear()
        for unit in self.units:
            unit.num_calls = 0
        self.in_backward = False
        for unit in self.units:
            for grad in unit.grads:
                run_hooks(grad.take_handed())

    def _settle(self) -> None:
        owing = [unit for unit in self.units if unit.owes_grads]
        if not self.sync_grads:
            for unit in owing:
                for grad in unit.grads:
                    grad.show_held()
            return
        self.reductions.settle()
        grads = [grad for unit in owing for grad in unit.grads]
        for grad in grads:
            home = Queue.HOST if grad.flat.is_offloaded else Queue.COMPUTE
            self.streams.touch(home, reads=[place(grad, "shard grad")], writes=[place(grad, "shard grad")])
        for grad, used in zip(grads, _used_anywhere(grads), strict=True):
            grad.settle(used)
        for unit in owing:
            unit.owes_grads = False


def _runs_backward(engine: weakref.ref[Engine]) -> bool:
    """Whether the calling thread is in a backward that has come to an engine."""
    found = engine()
    return found is not None and found.in_backward and _compat.in_backward()


def _used_anywhere(grads: Sequence[FlatGrad]) -> list[list[bool]]:
    """Collective. For each gradient, which leaves had a part in it on any rank."""
    found = [grad.used for grad in grads]
    groups: dict[tuple[Communicator, Communicator | None], list[int]] = {}
    for index, grad in enumerate(grads):
        if not grad.is_alone:
            groups.setdefault((grad.flat.comm, grad.flat.replicas), []).append(index)
    for members in groups.values():
        flat = grads[members[0]].flat
        mine = [used for index in members for used in grads[index].used]
        wanted = [leaf.requires_grad for index in members for leaf in grads[index].flat.leaves]
        told = torch.tensor(mine, dtype=torch.uint8, device=flat.comm.device)
        for comm in (flat.comm, flat.replicas):
            if comm is not None and comm.size > 1:
                comm.all_reduce(told, "max")
        if all(used or not want for used, want in zip(mine, wanted, strict=True)):
            continue  # no need to wait for the device
        everyone = [bool(used) for used in told.tolist()]
        for index in members:
            count = len(grads[index].used)
            found[index], everyone = everyone[:count], everyone[count:]
    return found


def values_of(unit: Unit) -> list[Place]:
    """The names of the memory that a unit is gathered into."""
    return [(id(flat), "values") for flat in unit.gathers]


def _zip_longest(left: Sequence[str], right: Sequence[str]) -> Iterable[tuple[str, str]]:
    for turn in range(max(len(left), len(right))):
        yield (
            left[turn] if turn < len(left) else "nothing more",
            right[turn] if turn < len(right) else "nothing more",
        )
