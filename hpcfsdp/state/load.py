"""A state dict loaded into a sharded model: read and compared as a whole on all ranks, and only then copied.

Torch goes through the modules of a plain model one by one. It hands each unit in it its part of the state dict, and
calls hooks on the way. All units are loaded at the end of that, or none.
"""

import contextlib
import copy
import dataclasses
from collections.abc import Callable, Iterator, Mapping
from typing import Any, NoReturn

import torch
import torch.distributed as dist
from torch import nn
from torch.distributed.tensor import DTensor

from hpcfsdp._compat import IncompatibleKeys, ShardedTensor
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import CrossedCallsError, HpcfsdpError, StateDictError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.params.layout import FlatLayout, ParamSlot
from hpcfsdp.reshard.sharded_tensors import fill_block
from hpcfsdp.state.load_plan import Hook, Incoming, ModelLoadPlan, equal, own_hook
from hpcfsdp.state.model import has_extra_state, ranks_of_model
from hpcfsdp.state.rank0 import FROM_RANK0, Rank0Source, checked
from hpcfsdp.state.shown import digest_of
from hpcfsdp.state.tensors import LocalShards, Rank0Tensor
from hpcfsdp.state.transfer import scatter
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units import summon
from hpcfsdp.units.flat_unit import FlatUnit, clean_path, flat_param_name
from hpcfsdp.units.unit_mesh import UnitMesh


def refuse_assign() -> NoReturn:
    """Say why ``assign=True`` is not supported."""
    raise StateDictError(
        "load_state_dict(assign=True) is not supported, because a sharded model keeps its own shards: load with "
        "assign=False, which copies into them"
    )


def load_model(
    module: nn.Module,
    state_dict: Mapping[str, Any] | None,
    *,
    strict: bool = True,
    assign: bool = False,
    from_rank0: bool = False,
) -> Any:
    """Load a state dict, or change nothing on any rank. Collective over the ranks of the model.

    If names are refused after loading, as hooks could have forgiven them, parameters, persistent buffers and extra
    states are restored; other changes that modules have made to themselves stay.

    Arguments, result and errors are those of ``StateDictMethods.load_state_dict``; with `from_rank0` the first rank
    alone has the state dict, of whole tensors, and that of other ranks is ignored.
    """
    plan, first = ModelLoadPlan(module), Rank0Source(module) if from_rank0 else None

    def read() -> None:
        if assign:
            refuse_assign()
        if first is not None:
            values, metadata = first.announce(state_dict)
        else:
            values, metadata = checked(state_dict, FROM_RANK0), getattr(state_dict, "_metadata", None)
        plan.read(values, "", metadata)
        # Hooks may forgive names, and are called when everything is loaded.
        plan.check(names=strict and not (plan.hooks_at_rest or any(plan.hooks.values())))

    units, names_differ = agree(plan, read)
    found, undo = IncompatibleKeys(plan.missing, plan.unexpected), None
    if strict and names_differ:
        with raise_together(ranks_of_model(module)):  # modules are asked for their extra states
            undo = _undoing(plan)
    commit(plan, first)
    finish(plan, units, found)
    try:
        with raise_together(ranks_of_model(module)):
            plan.check(names=strict)
    except StateDictError:
        if undo is not None:
            undo()
        raise
    return found


def agree(plan: ModelLoadPlan, read: Callable[[], None]) -> tuple[list[FlatUnit], bool]:
    """Have all ranks read and compare, or raise what is wrong on any of them. Collective over the model's ranks.

    Return the units that have hooks on any rank, and whether a rank has names on one side alone; they may forgive it.
    """
    ranks = ranks_of_model(plan.module)
    with raise_together(ranks):  # what follows is collective, and one rank alone may be at work
        for unit in plan.units:
            unit.check_at_rest("load_state_dict")
    if dist.is_initialized():
        for unit in plan.units:
            unit.mesh.ranks(unit.mesh.dtensor_dim, "tensor")  # known from here on, even if this rank raises
    problem: Exception | None = None
    try:
        read()
    except CrossedCallsError:  # the others are in another call: they cannot be asked
        raise
    except Exception as error:
        problem = error
    turns = [turn for turn, hooks in enumerate(plan.hooks.values()) if hooks]
    message, digest = None if problem is None else str(problem), digest_of(sorted(plan.facts.items()))
    everyone = ranks.all_gather_object((message, digest, turns, bool(plan.missing or plan.unexpected)))
    if problem is None:
        wrong = next((f"rank {rank}: {text}" for rank, (text, *_) in enumerate(everyone) if text is not None), None)
        if wrong is None and any(other != digest for _, other, *_ in everyone):
            wrong = _difference(ranks.all_gather_object(plan.facts))
        problem = None if wrong is None else StateDictError(wrong)
    if isinstance(problem, HpcfsdpError):
        problem.raised_on_all_ranks = True
    if problem is not None:
        raise problem
    called = {turn for _, _, turns, _ in everyone for turn in turns}
    units = [unit for turn, unit in enumerate(plan.hooks) if turn in called]
    return units, any(names_differ for *_, names_differ in everyone)


def _difference(tables: list[dict[str, str]]) -> str:
    """Return a description of the first difference between ranks that have all read without an error."""
    rank = next(rank for rank, table in enumerate(tables) if table != tables[0])
    found = (
        (key, tables[0].get(key, "nothing"), tables[rank].get(key, "nothing")) for key in {**tables[0], **tables[rank]}
    )
    key, first, other = next(each for each in found if each[1] != each[2])
    return f"ranks load different state dicts: for {key!r} rank 0 has {first}, rank {rank} has {other}"


def commit(plan: ModelLoadPlan, first: Rank0Source | None) -> None:
    """Copy the values that have been found. Collective over the ranks of the model."""
    for unit in plan.units:
        for flat in unit.sharded_params:
            if flat in plan.found:  # as one parameter
                slot = ParamSlot(flat_param_name(0), (flat.layout.used_numel,), 0)
                layout = dataclasses.replace(flat.layout, slots=(slot,))
                _fill(plan.sharded[flat], flat, layout, [plan.found[flat]])
            else:
                _fill(unit.mesh, flat, flat.layout, [plan.found.get(leaf) for leaf in flat.leaves])
    with torch.no_grad():
        for target, source in plan.found.items():
            if target in plan.sharded:
                continue
            both = isinstance(source, DTensor) and isinstance(target, DTensor)
            if both and source.device_mesh == target.device_mesh:
                target.copy_(source)
            else:
                fill_block(target, _whole(source, first))
        arrived: dict[Incoming, torch.Tensor] = {}
        for put, incoming in plan.replaced:
            if incoming not in arrived:
                arrived[incoming] = _arrived(incoming, first)
            put(arrived[incoming])


def _whole(source: Any, first: Rank0Source | None) -> torch.Tensor:
    """Return it whole. Collective over the ranks of the model, or of a mesh, unless `source` is a plain tensor."""
    if isinstance(source, Rank0Tensor):
        assert first is not None
        return first.broadcast(source)
    return source.full_tensor() if isinstance(source, DTensor) else source


def _arrived(incoming: Incoming, first: Rank0Source | None) -> torch.Tensor:
    """Return the tensor that modules are to hold. Collective as ``_whole``, unless it is here."""
    tensor = incoming.source
    if not incoming.is_here:  # made whole, it may still be the caller's memory
        tensor = _whole(tensor, first).to(incoming.device, incoming.dtype, copy=True)
    return tensor if incoming.requires_grad is None else nn.Parameter(tensor, incoming.requires_grad)


def finish(plan: ModelLoadPlan, units: list[FlatUnit], keys: Any) -> None:
    """Give modules extra states, and call hooks, which may change values and `keys`. Collective over the model."""
    ranks = ranks_of_model(plan.module)
    with raise_together(ranks):
        for module, state in plan.states:
            module.set_extra_state(state)
    for unit in units:
        with raise_together(ranks), summon.unshard_params_for_summon(unit, summon.UnshardArgs()):
            _call(plan.hooks[unit], keys)
    with raise_together(ranks):
        _call(plan.hooks_at_rest, keys)


def _call(hooks: list[Hook], keys: Any) -> None:
    for module, hook in hooks:
        if hook(module, keys) is not None:
            raise StateDictError(
                f"a hook of {type(module).__name__} after load_state_dict returned a value: it should change "
                "missing_keys and unexpected_keys in place"
            )


def _undoing(plan: ModelLoadPlan) -> Callable[[], None]:
    """Return a function that restores what is in a state dict of the model from a copy of this rank's part."""
    tensors = [flat.parameter.data for unit in plan.units for flat in unit.sharded_params]
    before = [(tensor, tensor.detach().clone()) for tensor in (*tensors, *plan.plain)]
    inside = {module for unit in plan.units for module in unit.wrapper.modules()}
    registries: list[dict[str, Any]] = [module._buffers for module in plan.module.modules()]
    registries += [module._parameters for module in plan.module.modules() if module not in inside]
    held = [(registry, dict(registry)) for registry in registries]
    states = [(each, _copied(each.get_extra_state())) for each, _ in plan.states if has_extra_state(each)]

    @torch.no_grad()
    def undo() -> None:
        for registry, tensors in held:
            registry.clear()
            registry.update(tensors)
        for tensor, values in before:
            if not equal(tensor, values):
                tensor.copy_(values)
        for each, state in states:
            each.set_extra_state(state)

    return undo


def _copied(state: Any) -> Any:
    """Return a copy, for a module may change its state in place; the state itself where there is none."""
    try:
        return copy.deepcopy(state)
    except Exception:  # whatever a class of a user's own raises
        return state


def _fill(mesh: UnitMesh, flat: FlatParam, layout: FlatLayout, values: list[Any]) -> None:
    """Copy values into the shard, as `layout` divides it. Collective over the ranks of `mesh`."""
    shard = flat.parameter.data
    are_sent = any(isinstance(value, (ShardedTensor, DTensor, Rank0Tensor)) for value in values)
    # Nothing may be received in memory that ranks share.
    target = shard.clone() if are_sent and flat.shares_gathered else shard
    scatter(mesh, LocalShards.of_shard(layout, target), values)
    if target is not shard:
        shard.copy_(target)


_WAITING = "_hpcfsdp_waiting"
"""Where a module that loads a state dict keeps an object that the call alone hands to all modules, and the units that
it has come to."""


class _MetadataProbe(nn.Module):
    """Stands in place of a module: notes the metadata that torch hands to it alone, and loads nothing."""

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self._found = found

    def add(self, path: str) -> None:
        """Add probes inside, at all places of a path."""
        probe = self
        for name in filter(None, path.split(".")):
            if name not in probe._modules:
                probe._modules[name] = _MetadataProbe(self._found)
            probe = probe._modules[name]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_rest: Any) -> None:
        if local_metadata:
            self._found[prefix[:-1]] = local_metadata


class LoadWithin:
    """A unit's part of a state dict until all parts are known. Arguments are those of ``_load_from_state_dict``."""

    def __init__(
        self,
        unit: FlatUnit,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self.unit, self.module = unit, unit.wrapper
        self.plan, self.keys = ModelLoadPlan(self.module), IncompatibleKeys(missing, unexpected)
        self._prefix, self._errors = prefix, errors  # what other modules refuse, when torch has been through all
        self._problem: Exception | None = None
        self._values = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        self._metadata: dict[str, Any] = {prefix[:-1]: metadata} if metadata else {}
        probe = _MetadataProbe(self._metadata)
        # Wrappers take their own names out of keys, and some leave them in the metadata.
        for path, _ in self.module.named_modules(remove_duplicate=False):
            for written in (path, clean_path(path), clean_fqn(path)):
                probe.add(written)
        for key in self._values:
            probe.add(key[len(prefix) :].rpartition(".")[0])
        own = self.module.__dict__
        self._modules, own["_modules"] = own["_modules"], probe._modules

    def read(self) -> None:
        """Not collective. Find what goes where, after torch has been through all modules inside of the unit.

        The module around the unit raises for missing names when it has been through all of its children. So missing
        names do not keep this unit from loading the rest; all other errors do.
        """
        self.module.__dict__["_modules"] = self._modules
        try:
            self.unit.check_at_rest("load_state_dict")
            if self._metadata.get(self._prefix[:-1], {}).get("assign_to_params_buffers"):
                refuse_assign()
            self.plan.read(self._values, self._prefix, self._metadata, within=True)
            self.plan.check(names=False)
        except Exception as error:  # raised on all ranks by ``agree``
            self._problem = error
        self.keys.missing_keys.extend(self.plan.missing)
        self.keys.unexpected_keys.extend(self.plan.unexpected)

    def check(self) -> None:
        """Raise what was wrong with this part, or with those of other modules."""
        if self._problem is not None:
            raise self._problem
        if self._errors:  # torch will raise
            raise StateDictError("\n\t".join(["Error(s) in loading state_dict:", *self._errors]))


def _load_all(parts: list[LoadWithin]) -> None:
    """Load all of them, or change nothing in any of them. Collective over the ranks of the units.

    Errors that modules raise after values are loaded, in extra states and hooks, undo nothing, as in a unit by itself:
    all units are loaded then, too.
    """
    problems: list[Exception] = []
    units_of_parts: list[list[FlatUnit]] = []
    for part in parts:
        with _noting(problems):  # units may be on other ranks, which are at the next one
            units_of_parts.append(agree(part.plan, part.check)[0])
    for part in parts:
        with _noting(problems), raise_together(ranks_of_model(part.module)):
            if problems:
                raise problems[0]
    if problems:
        raise problems[0]
    for part in parts:
        commit(part.plan, None)
    for part, units in zip(parts, units_of_parts, strict=True):
        with _noting(problems):  # the others are to have their extra states, and may be on other ranks
            finish(part.plan, units, part.keys)
    if problems:
        raise problems[0]


@contextlib.contextmanager
def _noting(problems: list[Exception]) -> Iterator[None]:
    """Append an error of the block; raise it where the others are in another call, and so make no further one."""
    try:
        yield
    except CrossedCallsError:
        raise
    except Exception as error:
        problems.append(error)


@own_hook
@public_call("load_state_dict")
def load_when_known(wrapper: Any, _incompatible_keys: Any) -> None:
    """Read a unit's part when torch has been through all inside of it; all units are loaded at the end."""
    within = wrapper.__dict__.pop("_load_within", None)
    if within is None:
        return
    part, root, call = within
    part.read()
    if root is None or root is part.module:  # no module around it is known
        _load_all([part])
        return
    started, parts = root.__dict__.get(_WAITING, (None, ()))
    if started is not call:  # an earlier call that failed has left its own
        _, parts = root.__dict__[_WAITING] = call, []
    parts.append(part)
    if load_waiting not in root._load_state_dict_post_hooks.values():
        handle = root.register_load_state_dict_post_hook(load_waiting)
        root._load_state_dict_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


@own_hook
@public_call("load_state_dict")
def load_waiting(root: nn.Module, _incompatible_keys: Any) -> None:
    """Load all units in `root`, or none. Collective over their ranks. It stays: torch is going through hooks."""
    if _WAITING in root.__dict__:
        _, parts = root.__dict__.pop(_WAITING)
        _load_all(parts)
