"""``copy.deepcopy`` of sharded models, without gradients and hooks on parameters. Shards are copied, none gathered."""

import copy
import uuid
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from torch import nn
from torch.distributed.fsdp import FSDPModule

from hpcfsdp.params.storage import nothing_of
from hpcfsdp.units.dtensor_unit import DTensorUnit, dtensor_units_in
from hpcfsdp.units.flat_unit import WRAPPED, FlatUnit, units_in
from hpcfsdp.units.guard import guard_modules
from hpcfsdp.units.own import UNIT, Ignored, OwnParams, label

# What a program chooses for a unit after its construction. Choices of units to prefetch are not copied.
_CHOICES_FLAT = "reshard_choice keepers_choice state_dict_settings differing computes_in_full".split()
_CHOICES_DTENSOR = "reshard_choice keepers_choice reshard_after_backward unshards_in_backward".split()
_CHOICES_DTENSOR += ["keeps_back", "mp_policy", "gather"]


def _copy_places(places: Sequence[tuple[nn.Module, str]], memo: dict[int, Any]) -> list[tuple[nn.Module, str]]:
    return [(copy.deepcopy(module, memo), name) for module, name in places]


def copy_wrapper(unit: FlatUnit, memo: dict[int, Any]) -> nn.Module:
    """Copy the wrapper of `unit`, with its shards and hooks. Collective over the ranks of the units in a wrapper."""
    wrapper = unit.wrapper
    for inner in units_in(wrapper):
        inner.check_at_rest("copy.deepcopy")
    made = memo[id(wrapper)] = wrapper.__class__.__new__(wrapper.__class__)
    copied = memo[id(unit)] = object.__new__(FlatUnit)  # hooks of modules ask for it
    sharded_params = []
    for flat in unit.sharded_params:  # collective over ``flat.comm`` where ranks share memory
        for leaf in flat.leaves:
            other = nn.Parameter.__new__(type(leaf), leaf.data, leaf.requires_grad)  # its memory is set below
            other.__dict__.update({name: value for name, value in vars(leaf).items() if name.startswith("_hpcfsdp")})
            memo[id(leaf)] = other
        copied_flat = flat.copy([memo[id(leaf)] for leaf in flat.leaves])
        memo[id(flat)], memo[id(flat.parameter)] = copied_flat, copied_flat.parameter
        sharded_params.append(copied_flat)
    module = copy.deepcopy(unit.module, memo)  # inner units, too
    groups = [
        [replace(entry, param=memo[id(entry.param)], places=_copy_places(entry.places, memo)) for entry in group]
        for group in unit.own.groups
    ]
    buffers = {fqn: memo.get(id(buffer), buffer) for fqn, buffer in unit.own.buffers.items()}
    ignored = (frozenset(memo.get(id(each), each) for each in kind) for kind in vars(unit.options.ignored).values())
    copied.__init__(  # type: ignore[misc]
        made,
        unit.name,
        sharded_params,
        mesh=unit.mesh,
        own=OwnParams(groups, buffers),
        options=replace(unit.options, ignored=Ignored(*ignored)),
        flat_owner=copy.deepcopy(unit.flat_owner, memo),
    )
    copied.labels = [(comm, comm.broadcast_object(uuid.uuid4().hex[:12])) for comm, _ in unit.labels]
    for name in _CHOICES_FLAT:
        setattr(copied, name, getattr(unit, name))
    copied.param_names = {memo.get(id(inner), inner): names for inner, names in unit.param_names.items()}
    for own, others in ((unit.buffer_dtypes, copied.buffer_dtypes), (unit.lowered_buffers, copied.lowered_buffers)):
        others.update(((memo.get(id(inner), inner), name), dtype) for (inner, name), dtype in own.items())
    for grad, other in zip(unit.grads, copied.grads, strict=True):
        other.comm_hook = grad.comm_hook
    new = {"_modules": {WRAPPED: module}, "_unit": copied}
    for name, value in wrapper.__dict__.items():
        made.__dict__[name] = new[name] if name in new else copy.deepcopy(value, memo)
    guard_modules(copied, is_copy=True)
    return made


def copy_fully_sharded(module: nn.Module, memo: dict[int, Any]) -> nn.Module:
    """Not collective. Copy a module that was given to ``fully_shard``, with rows, unit and hooks of its own."""
    unit = module.__dict__[UNIT]
    for inner in dtensor_units_in(module):
        inner.check_at_rest("copy.deepcopy")
    made = memo[id(module)] = object.__new__(type(module))
    is_first = id(unit) not in memo
    copied = memo.setdefault(id(unit), object.__new__(DTensorUnit))  # hooks of modules ask for it
    for sharded in [each.param.sharded for each in unit.own if id(each.param.sharded) not in memo]:
        # torch would copy the gradient of a DTensor, and cannot where that begins within its memory.
        memo[id(sharded)] = nn.Parameter(sharded.detach().clone(), sharded.requires_grad)
        vars(memo[id(sharded)]).update(copy.deepcopy(vars(sharded), memo))
    # One that copies itself, as a parametrized module, may refuse to give its state.
    copies_itself = hasattr(super(FSDPModule, module), "__deepcopy__")
    state = dict(vars(module) if copies_itself else module.__getstate__())
    del state[UNIT]
    made.__setstate__(copy.deepcopy(state, memo))
    made.__dict__[UNIT] = copied
    if not is_first:
        return made
    modules = [copy.deepcopy(each, memo) for each in unit.modules]
    own = []
    for each in unit.own:
        sharded = copy.deepcopy(each.param.sharded, memo)
        leaf = nn.Parameter(nothing_of(each.shape, sharded.dtype, unit.device), requires_grad=sharded.requires_grad)
        label(leaf, each.fqn, tuple(sharded.shape), hidden=True)
        places = _copy_places(each.param.places, memo)
        own.append(replace(each, param=replace(each.param, sharded=sharded, leaf=leaf, places=places)))
    copied.__init__(unit.name, modules, own, unit.mesh, unit.options)
    copied.label_params()
    for name in _CHOICES_DTENSOR:
        setattr(copied, name, getattr(unit, name))
    copied.reduce_options = replace(unit.reduce_options)
    copied.uninitialised = [each._replace(module=memo.get(id(each.module), each.module)) for each in unit.uninitialised]
    return made
