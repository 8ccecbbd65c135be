"""Parameters that users assign to modules at rest, ``module.weight = nn.Parameter(...)``: adopted at the next use."""

from __future__ import annotations

import functools
import weakref
from collections.abc import Sequence

from hpcfsdp.engine.unit import Unit
from hpcfsdp.errors import EngineError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.units import managed, optimizer_check
from hpcfsdp.units.own import OwnParam


def watch_assignments(unit: Unit, flat: FlatParam, entries: Sequence[OwnParam]) -> None:
    """Have ``flat.adopt_user_data`` adopt assigned parameters. `entries`: those of its leaves, in their order."""
    flat.places = [entry.places for entry in entries]
    flat.on_assigned = functools.partial(_adopt_assigned, weakref.ref(unit), weakref.ref(flat), entries)  # no cycle


def _adopt_assigned(unit_ref: weakref.ref[Unit], flat_ref: weakref.ref[FlatParam], entries: Sequence[OwnParam]) -> None:
    """Not collective. With `use_orig_params` an assigned parameter becomes the leaf, as in torch's FSDP.

    Raises:
        EngineError: without `use_orig_params`; a tied parameter was replaced in one of its places alone; the assigned
            one has another number of elements than this rank's run.
    """
    unit, flat = unit_ref(), flat_ref()
    if unit is None or flat is None or not unit.is_idle:
        return
    for index, entry in enumerate(entries):
        held = [module._parameters.get(name) for module, name in entry.places]
        assigned = next((param for param in held if param is not None and param is not entry.param), None)
        if assigned is None:
            continue
        what = f"{unit.name}: another parameter of shape {tuple(assigned.shape)} was assigned to {entry.fqn!r}"
        if not flat.use_orig_params:
            raise EngineError(
                f"{what}, which is part of a flat parameter: assign it within "
                "FullyShardedDataParallel.summon_full_params(model), or wrap with use_orig_params=True"
            )
        if any(param is not assigned for param in held):
            places = ", ".join(map(repr, (entry.fqn, *entry.aliases)))
            raise EngineError(f"{what}, which is tied: assign the same parameter to all of {places}")
        if unit.views and entry.block is not None:
            raise EngineError(
                f"{what}, which is tensor-parallel: assign it within FullyShardedDataParallel.summon_full_params(model)"
            )
        flat.replace_leaf(index, assigned)
        unit.look_at_leaves()
        managed.replace(entry.param)
        managed.mark(assigned, entry.fqn, flat.layout.slots[index].whole_shape)
        entry.param = assigned
        optimizer_check.check_again()
