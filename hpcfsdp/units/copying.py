"""``copy.deepcopy`` of sharded models: shards are copied, nothing is gathered, and the copy trains by itself.

As for other modules, gradients and hooks on parameters are not copied. Communicators are shared.
"""

from __future__ import annotations

import copy
from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.storage import nothing_of
from hpcfsdp.units.dtensor_unit import DTensorUnit, dtensor_unit_of, dtensor_units_in
from hpcfsdp.units.flat_unit import WRAPPED, FlatUnit, units_in
from hpcfsdp.units.guard import guard_modules
from hpcfsdp.units.options import Ignored
from hpcfsdp.units.own import UNIT, OwnParam, OwnParams, label
from hpcfsdp.units.same_model import new_label

Memo = dict[int, Any]
Places = Sequence[tuple[nn.Module, str]]

_CHOICES_FLAT = "reshard_choice", "state_dict_settings", "differing", "computes_in_full"
_CHOICES_DTENSOR = (
    *("reshard_choice", "reshard_after_backward", "unshards_in_backward", "keeps_back"),
    *("output_dtype", "gather", "separate_reductions"),
)
"""What a program chooses for a unit after its construction. Choices of units to prefetch are not copied."""


def _copy_places(places: Places, memo: Memo) -> list[tuple[nn.Module, str]]:
    return [(copy.deepcopy(module, memo), name) for module, name in places]


def _copy_attributes(unit: Any, made: Any, names: Iterable[str]) -> None:
    for name in names:
        setattr(made, name, getattr(unit, name))


def copy_wrapper(unit: FlatUnit, memo: Memo) -> nn.Module:
    """Copy the wrapper of `unit`, with its shards and hooks. Collective over the ranks of the units in a wrapper.

    `memo` is that of ``copy.deepcopy``.

    Raises:
        EngineError: a forward or backward is running, or parameters are summoned.
    """
    wrapper = unit.wrapper
    for inner in units_in(wrapper):
        inner.check_at_rest("copy.deepcopy")
    made = memo[id(wrapper)] = wrapper.__class__.__new__(wrapper.__class__)
    copied = memo[id(unit)] = object.__new__(FlatUnit)  # hooks of modules ask for it
    sharded_params = [_copy_flat(flat, memo) for flat in unit.sharded_params]
    module = copy.deepcopy(unit.module, memo)  # inner units, too
    _fill_flat_unit(unit, copied, made, sharded_params, memo)
    new = {"_modules": {WRAPPED: module}, "_unit": copied}
    for name, value in wrapper.__dict__.items():
        made.__dict__[name] = new[name] if name in new else copy.deepcopy(value, memo)
    guard_modules(copied, is_copy=True)
    return made


def _copy_flat(flat: FlatParam, memo: Memo) -> FlatParam:
    """Copy a flat parameter. Collective over ``flat.comm`` where ranks share memory."""
    leaves = []
    for leaf in flat.leaves:
        other = nn.Parameter.__new__(type(leaf), leaf.data, leaf.requires_grad)  # its memory is set below
        other.__dict__.update({name: value for name, value in leaf.__dict__.items() if name.startswith("_hpcfsdp")})
        memo[id(leaf)] = other
        leaves.append(other)
    made = flat.copy(leaves)
    memo[id(flat)], memo[id(flat.parameter)] = made, made.parameter
    return made


def _fill_flat_unit(
    unit: FlatUnit, made: FlatUnit, wrapper: nn.Module, sharded_params: list[FlatParam], memo: Memo
) -> None:
    """Make the copy a unit of its own. Collective over the ranks of the unit."""

    def entry_of(entry: OwnParam) -> OwnParam:
        return replace(entry, param=memo[id(entry.param)], places=_copy_places(entry.places, memo))

    groups = [[entry_of(entry) for entry in group] for group in unit.own.groups]
    buffers = [memo.get(id(buffer), buffer) for buffer in unit.own.buffers]
    ignored = (frozenset(memo.get(id(each), each) for each in kind) for kind in vars(unit.options.ignored).values())
    made.__init__(  # type: ignore[misc]
        wrapper,
        unit.name,
        sharded_params,
        mesh=unit.mesh,
        own=OwnParams(groups, buffers, list(unit.own.buffer_fqns)),
        options=replace(unit.options, ignored=Ignored(*ignored)),
        flat_owner=copy.deepcopy(unit.flat_owner, memo),
    )
    made.labels = [(comm, new_label(comm)) for comm, _ in unit.labels]
    _copy_attributes(unit, made, _CHOICES_FLAT)
    made.param_names = {memo.get(id(module), module): names for module, names in unit.param_names.items()}
    for own, copied in ((unit.buffer_dtypes, made.buffer_dtypes), (unit.lowered_buffers, made.lowered_buffers)):
        copied.update(((memo.get(id(module), module), name), dtype) for (module, name), dtype in own.items())
    for grad, other in zip(unit.grads, made.grads, strict=True):
        other.comm_hook = grad.comm_hook


def copy_fully_sharded(module: nn.Module, memo: Memo) -> nn.Module:
    """Not collective. Copy a module that was given to ``fully_shard``, with rows, unit and hooks of its own.

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
        _fill_dtensor_unit(unit, copied, memo)
    return made


def _fill_dtensor_unit(unit: DTensorUnit, made: DTensorUnit, memo: Memo) -> None:
    modules = [copy.deepcopy(module, memo) for module in unit.modules]
    own = []
    for each in unit.own:
        sharded = copy.deepcopy(each.param.sharded, memo)
        leaf = nn.Parameter(nothing_of(each.shape, sharded.dtype, unit.device), requires_grad=sharded.requires_grad)
        label(leaf, each.fqn, tuple(sharded.shape), hidden=True)
        places = _copy_places(each.param.places, memo)
        own.append(replace(each, param=replace(each.param, sharded=sharded, leaf=leaf, places=places)))
    made.__init__(unit.name, modules, own, mesh=unit.mesh, options=unit.options)  # type: ignore[misc]
    made.label_params()
    _copy_attributes(unit, made, _CHOICES_DTENSOR)
    made.reduce_options = replace(unit.reduce_options)
    made.uninitialised = [each._replace(module=memo.get(id(each.module), each.module)) for each in unit.uninitialised]
