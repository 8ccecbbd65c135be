"""``copy.deepcopy`` of a wrapped model: shards are copied, nothing is gathered, and the copy trains by itself."""

from __future__ import annotations

import copy
from dataclasses import replace
from typing import TYPE_CHECKING, Any

import torch
from torch import nn

from hpcfsdp.api.assigned import watch_assignments
from hpcfsdp.api.flatten import OwnParam, OwnParams
from hpcfsdp.api.guard import guard_modules
from hpcfsdp.api.ignored import Ignored
from hpcfsdp.api.unshard import WRAPPED, check_at_rest
from hpcfsdp.engine.unit import Unit
from hpcfsdp.flat.param import FlatParam

if TYPE_CHECKING:
    from hpcfsdp.api.wrapper import FullyShardedDataParallel

Memo = dict[int, Any]

_SHARED = ("_groups", "_given", "_apart", "_state_dict_settings")
"""Attributes of the wrapper that do not change."""


def copy_wrapper(wrapper: FullyShardedDataParallel, memo: Memo) -> FullyShardedDataParallel:
    """Collective over the ranks of the units in `wrapper`. A copy with shards, views and hooks of its own.

    As of other modules, gradients and hooks on parameters are not copied. Communicators are shared.

    Args:
        memo: that of ``copy.deepcopy``.

    Raises:
        EngineError: a forward or backward is running, or parameters are summoned.
    """
    for unit in wrapper.fsdp_modules(wrapper):
        check_at_rest(unit, "copy.deepcopy")
    made = wrapper.__class__.__new__(wrapper.__class__)
    memo[id(wrapper)] = made
    flats = [_copy_flat(flat, memo) for flat in wrapper._unit.flats]
    module = copy.deepcopy(wrapper.__dict__["_modules"][WRAPPED], memo)  # inner units, too
    own = _copy_own(wrapper._own, memo)
    unit = memo[id(wrapper._unit)] = _copy_unit(wrapper._unit, flats, own, memo)
    own_state = {
        "_modules": {WRAPPED: module},
        "_flat_owner": copy.deepcopy(wrapper._flat_owner, memo),
        "_own": own,
        "_unit": unit,
        "_root": None,
        "_is_root": False,
        "_ignored": _copy_ignored(wrapper._ignored, memo),
    }
    for name, value in wrapper.__dict__.items():
        if name in own_state:
            made.__dict__[name] = own_state[name]
        elif name in _SHARED:
            made.__dict__[name] = value
        elif isinstance(value, dict) and any(isinstance(_module_in(key), nn.Module) for key in value):
            made.__dict__[name] = {_copied(key, memo): entry for key, entry in value.items()}
        else:
            made.__dict__[name] = copy.deepcopy(value, memo)
    guard_modules(made)  # copies of the hooks guard nothing
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


def _copy_unit(unit: Unit, flats: list[FlatParam], own: OwnParams, memo: Memo) -> Unit:
    views = []
    for view in unit.views:
        places = [(copy.deepcopy(module, memo), name) for module, name in view.places]
        views.append(replace(view, leaf=memo[id(view.leaf)], places=places))
    made = Unit(unit.name, flats, views, reshard_after_forward=unit.reshard_after_forward)
    made.prefetch_forward, made.prefetch_backward = unit.prefetch_forward, unit.prefetch_backward
    for grad, other in zip(unit.grads, made.grads, strict=True):
        other.comm_hook = grad.comm_hook
    for flat, group in zip(flats, own.groups, strict=True):
        watch_assignments(made, flat, group)
    return made


def _copy_ignored(ignored: Ignored, memo: Memo) -> Ignored:
    def copied(entries: frozenset[Any]) -> frozenset[Any]:
        return frozenset(memo.get(id(entry), entry) for entry in entries)

    return Ignored(copied(ignored.modules), copied(ignored.params), copied(ignored.buffers))


def _module_in(key: Any) -> Any:
    return key[0] if isinstance(key, tuple) and key else key


def _copied(key: Any, memo: Memo) -> Any:
    if isinstance(key, tuple):
        return (memo.get(id(key[0]), key[0]), *key[1:])
    return memo.get(id(key), key) if isinstance(key, (nn.Module, torch.Tensor)) else key
