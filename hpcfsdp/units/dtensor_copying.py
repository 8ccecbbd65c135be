"""``copy.deepcopy`` of modules of ``fully_shard``: rows are copied, nothing is gathered, the copy trains by itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hpcfsdp.params.storage import nothing_of
from hpcfsdp.units.dtensor_unit import DTensorUnit, dtensor_unit_of, dtensor_units_in, hide_leaf
from hpcfsdp.units.flat_unit import UNIT

Memo = dict[int, Any]

_CHOICES = (
    "reshard_choice",
    "reshard_after_backward",
    "unshards_in_backward",
    "keeps_back",
    "output_dtype",
    "gather",
    "separate_reductions",
)
"""What a program chooses for a unit of ``fully_shard`` by methods of its module."""


def copy_rows(module: nn.Module, memo: Memo) -> nn.Module:
    """Not collective. A copy of a module that was given to ``fully_shard``, with rows, unit and hooks of its own.

    As for other modules, gradients and hooks on parameters are not copied, nor are choices of units to prefetch.

    Raises:
        EngineError: a forward or backward is running.
    """
    unit = dtensor_unit_of(module)
    assert unit is not None
    for inner in dtensor_units_in(module):
        inner.check_at_rest("copy.deepcopy")
    made = memo[id(module)] = object.__new__(type(module))
    is_first = id(unit) not in memo
    copied = memo.setdefault(id(unit), object.__new__(DTensorUnit))  # hooks of modules ask for it
    # One that copies itself, as a parametrized module, may refuse to give its state.
    copies_itself = hasattr(super(FSDPModule, module), "__deepcopy__")
    state = dict(vars(module) if copies_itself else module.__getstate__())
    del state[UNIT]
    made.__setstate__(copy.deepcopy(state, memo))
    made.__dict__[UNIT] = copied
    if is_first:
        _fill_copy(unit, copied, memo)
    return made


def _fill_copy(unit: DTensorUnit, made: DTensorUnit, memo: Memo) -> None:
    modules = [copy.deepcopy(module, memo) for module in unit.modules]
    rows = []
    for each in unit.rows:
        sharded = copy.deepcopy(each.param.sharded, memo)
        leaf = nn.Parameter(nothing_of(each.shape, sharded.dtype, unit.device), requires_grad=sharded.requires_grad)
        hide_leaf(leaf, each.fqn, tuple(sharded.shape))
        places = [(copy.deepcopy(module, memo), name) for module, name in each.param.places]
        rows.append(replace(each, param=replace(each.param, sharded=sharded, leaf=leaf, places=places)))
    options = {"mesh": unit.mesh, "device": unit.device, "pin_memory": unit.pin_memory}
    made.__init__(unit.name, modules, rows, mixed_precision=unit.mixed_precision, **options)  # type: ignore[misc]
    made.mark()
    for name in _CHOICES:
        setattr(made, name, getattr(unit, name))
    made.reduce_options = replace(unit.reduce_options)
    made.uninitialised = [(fqn, memo.get(id(module), module), name) for fqn, module, name in unit.uninitialised]
