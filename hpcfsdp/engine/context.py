"""What all units under one root share: queues of work, gathered memory, the order of units, the queue of reductions."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

from hpcfsdp.engine.order import Order
from hpcfsdp.engine.reductions import Reductions
from hpcfsdp.engine.streams import Queue, Streams, Wait
from hpcfsdp.flat.param import FlatParam


class Values:
    """The gathered values of one unit's flat parameters.

    Attributes:
        gathers: the flat parameters that are gathered, and not resident.
        places: the names of the memory that they are gathered into.
        is_gathered: whether that memory is taken; changed by ``Context`` alone.
        gathered: the event that the values are there; changed by ``Context`` alone.
    """

    def __init__(self, flats: Sequence[FlatParam]) -> None:
        self.flats = tuple(flats)
        self.gathers = tuple(flat for flat in self.flats if not flat.is_here)
        self.places = [(id(flat), "values") for flat in self.gathers]
        self.is_gathered = False
        self.gathered: Any = None

    @property
    def is_unsharded(self) -> bool:
        """Whether the module computes with them."""
        return any(flat.is_unsharded for flat in self.flats)


class Context:
    """The queues of work of one root, and what is gathered on them.

    Attributes:
        ahead: what is gathered, and has not been computed with yet.
        shards_written: the event that the optimizer has written the shards.
    """

    def __init__(self, streams: Streams, order: Order) -> None:
        self.streams = streams
        self.order = order
        self.reductions = Reductions(streams)
        self.ahead: dict[Values, None] = {}
        self.shards_written: Any = None
        self._by_name: Mapping[str, Values] = {}
        self._retired: deque[tuple[Values, Any]] = deque()  # resharded, with their memory still taken

    def name(self, values: Mapping[str, Values]) -> None:
        """Not collective. Say which unit has which values, for ``gather_ahead``."""
        self._by_name = values

    def unshard(self, values: Values, *, ahead: bool = False) -> None:
        """Collective. Begin to gather a unit's parameters, unless that has begun.

        Args:
            ahead: another unit is computed with first.
        """
        if values.is_gathered or not values.gathers:
            return
        values.is_gathered = True
        streams = self.streams
        streams.wait(Queue.GATHER, self.shards_written, Wait.SHARDS_WRITTEN)
        self.free_retired(keep=0 if ahead else 1, unless=values)
        for flat in values.gathers:
            values.gathered = streams.launch(
                Queue.GATHER,
                lambda async_op, flat=flat: flat.gather(async_op=async_op),
                reads=[(id(flat), "shard")],
                writes=[(id(flat), "values")],
            )

    def await_unshard(self, values: Values) -> None:
        """Have the module compute with the gathered values."""
        self.ahead.pop(values, None)
        self.streams.wait(Queue.COMPUTE, values.gathered, Wait.VALUES_GATHERED)
        self.streams.touch(Queue.COMPUTE, reads=values.places)
        for flat in values.flats:
            flat.bind()

    def reshard(self, values: Values) -> None:
        """Free a unit's gathered values."""
        if values in self.ahead:
            del self.ahead[values]
            self.streams.wait(Queue.COMPUTE, values.gathered, Wait.GATHERED_IN_VAIN)
        for flat in values.flats:
            flat.unbind()
        if values.is_gathered:
            values.is_gathered = False
            self.streams.touch(Queue.COMPUTE, reads=values.places)
            self._retired.append((values, self.streams.record(Queue.COMPUTE)))
            if not self.streams.overlap:
                self.free_retired(keep=0)

    def free_retired(self, *, keep: int, unless: Values | None = None) -> None:
        """Free memory of units that were resharded, the oldest first; `unless` takes up its own again.

        The last one is kept while the next is gathered for immediate use: that goes into other memory, and does not
        wait until the one before has been computed with. What is gathered ahead has that much time anyway.
        """
        for values, event in list(self._retired):
            if values is not unless and len(self._retired) <= keep:
                return
            self._retired.remove((values, event))
            self.streams.wait(Queue.GATHER, event, Wait.VALUES_USED)
            if values is not unless:
                for flat in values.gathers:
                    flat.free()
                self.streams.free(*values.places)

    def gather_ahead(self, kind: str) -> None:
        """Collective. Begin to gather the unit that is known to do `kind` next."""
        name = self.order.upcoming(kind)
        values = self._by_name.get(name) if name is not None else None
        if values is not None and values.gathers and not values.is_gathered:
            self.ahead[values] = None
            self.unshard(values, ahead=True)
