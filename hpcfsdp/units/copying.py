"""``copy.deepcopy`` of a wrapped model: shards are copied, nothing is gathered, and the copy trains by itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import Any

from torch import nn

from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.units.assigned import watch_assignments
from hpcfsdp.units.flat_unit import WRAPPED, FlatUnit, units_in
from hpcfsdp.units.guard import guard_modules
from hpcfsdp.units.own import Ignored, OwnParam, OwnParams
from hpcfsdp.units.same_model import new_mark

Memo = dict[int, Any]


def copy_wrapper(unit: FlatUnit, memo: Memo) -> nn.Module:
    """Collective over the ranks of the units in a wrapper. A copy with shards, views and hooks of its own.

    As for other modules, gradients and hooks on parameters are not copied. Communicators are shared.

    Raises:
        EngineError: a forward or backward is running, or parameters are summoned.
    """
    wrapper = unit.wrapper
    for inner in units_in(wrapper):
        inner.check_at_rest("copy.deepcopy")
    made = wrapper.__class__.__new__(wrapper.__class__)
    memo[id(wrapper)] = made
    sharded_params = [_copy_flat(flat, memo) for flat in unit.sharded_params]
    module = copy.deepcopy(unit.module, memo)  # inner units, too
    copied = {"_modules": {WRAPPED: module}, "_unit": _copy_unit(unit, made, sharded_params, memo)}
    for name, value in wrapper.__dict__.items():
        made.__dict__[name] = copied[name] if name in copied else copy.deepcopy(value, memo)
    guard_modules(made.__dict__["_unit"])  # copies of the guard's hooks are inert
    return made


def _copy_flat(flat: FlatParam, memo: Memo) -> FlatParam:
    """Collective over ``flat.comm`` where ranks share memory."""
    leaves = []
    for leaf in flat.leaves:
        other = nn.Parameter.__new__(type(leaf), leaf.data, leaf.requires_grad)  # its memory is set below
        other.__dict__.update({name: value for name, value in leaf.__dict__.items() if name.startswith("_hpcfsdp")})
        memo[id(leaf)] = other
        leaves.append(other)
    made = flat.copy(leaves)
    memo[id(flat)], memo[id(flat.parameter)] = made, made.parameter
    return made


def _copy_own(own: OwnParams, memo: Memo) -> OwnParams:
    def entry_of(entry: OwnParam) -> OwnParam:
        places = [(copy.deepcopy(module, memo), name) for module, name in entry.places]
        return replace(entry, param=memo[id(entry.param)], places=places)

    groups = [[entry_of(entry) for entry in group] for group in own.groups]
    buffers = [memo.get(id(buffer), buffer) for buffer in own.buffers]
    return OwnParams(groups, buffers, list(own.buffer_fqns))


def _copy_unit(unit: FlatUnit, wrapper: nn.Module, sharded_params: list[FlatParam], memo: Memo) -> FlatUnit:
    views = []
    for view in unit.views:
        places = [(copy.deepcopy(module, memo), name) for module, name in view.places]
        views.append(replace(view, leaf=memo[id(view.leaf)], places=places))
    made = FlatUnit(
        wrapper,
        unit.name,
        sharded_params,
        views,
        mesh=unit.mesh,
        own=_copy_own(unit.own, memo),
        ignored=_copy_ignored(unit.ignored, memo),
        use_orig_params=unit.use_orig_params,
        mixed_precision=unit.mixed_precision,
        full_precision=unit.full_precision,
        flat_owner=copy.deepcopy(unit.flat_owner, memo),
    )
    made.marks = [(comm, new_mark(comm)) for comm, _ in unit.marks]
    made.reshard_choice = unit.reshard_choice
    made.prefetch_forward, made.prefetch_backward = unit.prefetch_forward, unit.prefetch_backward
    made.state_dict_settings, made.differing = unit.state_dict_settings, unit.differing
    made.computes_in_full = unit.computes_in_full
    made.param_names = {memo.get(id(module), module): names for module, names in unit.param_names.items()}
    for own, copied in ((unit.buffer_dtypes, made.buffer_dtypes), (unit.lowered_buffers, made.lowered_buffers)):
        copied.update(((memo.get(id(module), module), name), dtype) for (module, name), dtype in own.items())
    for grad, other in zip(unit.grads, made.grads, strict=True):
        other.comm_hook = grad.comm_hook
    for flat, group in zip(sharded_params, made.own.groups, strict=True):
        watch_assignments(made, flat, group)
    return made


def _copy_ignored(ignored: Ignored, memo: Memo) -> Ignored:
    def copied(entries: frozenset[Any]) -> frozenset[Any]:
        return frozenset(memo.get(id(entry), entry) for entry in entries)

    return Ignored(copied(ignored.modules), copied(ignored.params), copied(ignored.buffers))
