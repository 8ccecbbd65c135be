"""Parameters that users assign to modules at rest, ``module.weight = nn.Parameter(...)``: taken over at next use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from torch import nn

from hpcfsdp.engine.phase import Phase
from hpcfsdp.engine.unit import Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.sharded import managed, optimizer_check
from hpcfsdp.sharded.own import OwnParam


def watch_assignments(unit: Unit, flat: FlatParam, entries: Sequence[OwnParam]) -> None:
    """Have a flat parameter look for assigned parameters whenever it adopts what users have put in its place.

    Args:
        entries: where each of its leaves is registered, in their order.
    """
    flat.places = [entry.places for entry in entries]
    flat.on_assigned = functools.partial(_take_over, weakref.ref(unit), weakref.ref(flat), entries)  # they hold it


def _take_over(unit_ref: weakref.ref[Unit], flat_ref: weakref.ref[FlatParam], entries: Sequence[OwnParam]) -> None:
    """Not collective. With `use_orig_params`, what modules hold becomes the leaf, as in torch's FSDP.

    Raises:
        EngineError: without `use_orig_params`; a tied parameter was replaced in one of its places alone; what was
            assigned has another number of elements than this rank's shard.
    """
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None or unit.phase is not Phase.IDLE:
        return
    for index, entry in enumerate(entries):
        held = [module._parameters.get(name) for module, name in entry.places]
        assigned = next((param for param in held if param is not None and param is not entry.param), None)
        if assigned is None:
            continue
        what = f"{unit.name}: another parameter of shape {tuple(assigned.shape)} was assigned to {entry.fqn!r}"
        if not flat.use_orig_params:
            raise EngineError(
                f"{what}, whose values the flat parameter has: assign it within "
                "FullyShardedDataParallel.summon_full_params(model), or wrap with use_orig_params=True"
            )
        if any(param is not assigned for param in held):
            places = ", ".join(map(repr, (entry.fqn, *entry.aliases)))
            raise EngineError(f"{what}, which is tied: assign the same one to all of {places}")
        if unit.views and entry.block is not None:
            raise EngineError(
                f"{what}, which is tensor-parallel: assign it within FullyShardedDataParallel.summon_full_params(model)"
            )
        _adopt(unit, flat, index, entry, assigned)


def _adopt(unit: Unit, flat: FlatParam, index: int, entry: OwnParam, assigned: nn.Parameter) -> None:
    flat.replace_leaf(index, assigned)
    unit.look_at_leaves()
    managed.replace(entry.param)
    managed.mark(assigned, entry.fqn, flat.layout.slots[index].whole_shape)
    entry.param = assigned
    optimizer_check.check_again()
