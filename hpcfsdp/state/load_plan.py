"""Which value of a state dict goes where in a model: found by the modules' own loading, without changing anything."""

import contextlib
import functools
import re
from collections.abc import Callable, Container, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor
from torch.nn.parameter import is_lazy

from hpcfsdp import _compat
from hpcfsdp.errors import StateDictError
from hpcfsdp.params.flat_param import FlatParam
from hpcfsdp.state.model import persistent_tensors, ranks_of_model
from hpcfsdp.state.rank0 import FROM_RANK0
from hpcfsdp.state.settings import kind_of
from hpcfsdp.state.shown import (
    StandIn,
    check_source,
    facts_of,
    flat_params_shown,
    is_extra_state,
    orig_params_shown,
    put_back,
    shown_for,
    source_of,
)
from hpcfsdp.state.wrappers import clean_fqn, with_clean_names
from hpcfsdp.units.flat_unit import FlatUnit, flat_param_name, unit_of, units_in
from hpcfsdp.units.unit_mesh import UnitMesh

Place = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass(eq=False)
class Incoming:
    """A tensor that a module is to hold, at one place or several, on a device and in a dtype."""

    source: Any  # the tensor itself, in memory of its own; or a ``DTensor`` or ``Rank0Tensor`` of the state dict
    is_here: bool  # whether it is the former; ranks make the latter whole together
    device: torch.device
    dtype: torch.dtype
    requires_grad: bool | None = None  # that of a parameter, None for a buffer


@dataclass(frozen=True)
class New:
    """A tensor that a module holds since it has begun to read; `made` is the one into which torch loads, if any."""

    place: Place
    tensor: torch.Tensor
    made: torch.Tensor | None
    is_param: bool
    is_persistent: bool

    def put(self, tensor: torch.Tensor) -> None:
        """Have the module hold `tensor` there."""
        module, name = self.place
        if name in module._parameters or name in module._buffers:
            setattr(module, name, tensor)
        elif self.is_param:
            module.register_parameter(name, tensor)  # type: ignore[arg-type]
        else:
            module.register_buffer(name, tensor, persistent=self.is_persistent)


class Registries:
    """The tensors that the modules of a model hold before they read a state dict."""

    def __init__(self, root: nn.Module) -> None:
        self._before = {module: (dict(module._parameters), dict(module._buffers)) for module in root.modules()}
        self.made: dict[Place, torch.Tensor] = {}  # registered by hooks before loading: torch loads into them

    def remove_new(self, kept: Container[Place]) -> list[New]:
        """Have modules hold what they held before, but at the places `kept`. Returns the tensors that were new."""
        found = []
        for module, (params, buffers) in self._before.items():
            for place, now in self.new_in(module):
                if place in kept:
                    continue
                _, name = place
                is_param, is_persistent = name in module._parameters, name not in module._non_persistent_buffers_set
                found.append(New(place, now, self.made.get(place), is_param, is_persistent))
                registry, before = (module._parameters, params) if is_param else (module._buffers, buffers)
                if name in before:
                    registry[name] = before[name]
                else:
                    del registry[name]
                    module._non_persistent_buffers_set.discard(name)
        return found

    def new_in(self, module: nn.Module) -> list[tuple[Place, torch.Tensor]]:
        """Return the tensors that a module holds since then, and where."""
        params, buffers = self._before.get(module, ({}, {}))
        return [
            ((module, name), now)
            for registry, before in ((module._parameters, params), (module._buffers, buffers))
            for name, now in registry.items()
            if now is not None and now is not before.get(name)
        ]


class LentTensors:
    """Copies of what is given to a module with a loading method of its own, which may write to what it assigns."""

    def __init__(self, module: nn.Module, given: dict[str, Any], prefix: str) -> None:
        self._copies: list[tuple[torch.Tensor, torch.Tensor]] = []
        if getattr(module._load_from_state_dict, "__func__", None) is _compat.load_from_state_dict:
            return
        for key, value in given.items():
            own = "." not in key[len(prefix) :] and isinstance(value, torch.Tensor) and not is_extra_state(key)
            if own and value.layout is torch.strided and not (value.is_meta or value.is_quantized):
                given[key] = value.clone()
                self._copies.append((value, given[key]))

    def original_of(self, now: torch.Tensor) -> torch.Tensor:
        """Return the caller's tensor, if `now` is a copy that was not written to: it needs no memory. Else `now`."""
        if not isinstance(now, StandIn):
            for value, copy in self._copies:
                is_copy = now.data_ptr() == copy.data_ptr() and now.stride() == copy.stride()
                if is_copy and now.dtype == value.dtype and torch.equal(now, value):
                    return value
        return now


Hook = tuple[nn.Module, Callable[..., Any]]
"""A module and what it has registered to be called when it has been loaded."""

_own_hooks: list[Callable[..., Any]] = []

_REMEDY = "load a full state dict, or do the hook's work in a load_state_dict post-hook of the module"


def own_hook(hook: Callable[..., Any]) -> Callable[..., Any]:
    """Mark a hook of this package for the time after loading: torch calls it, a ``ModelLoadPlan`` does not."""
    _own_hooks.append(hook)
    return hook


class _Placeholder(NamedTuple):
    """What a module holds for a `target` while it reads: a blank without memory, or for no unit's a copy."""

    target: Any
    tensor: torch.Tensor


@dataclass
class ModelLoadPlan:
    """The values of a state dict for a module that holds units.

    During ``read`` the modules have parameters without memory in place of their own, and loading puts tensors of the
    state dict in place of these. So hooks and overridden methods work.
    """

    module: nn.Module
    found: dict[Any, Any] = field(default_factory=dict)  # by tensor, flat parameters too, what is to be copied into it
    facts: dict[str, str] = field(default_factory=dict)  # by name, a description that must be the same on all ranks
    states: list[tuple[nn.Module, Any]] = field(default_factory=list)  # extra states that modules are to be given
    # Of the modules of each unit, inner units first: called when values are there, with whole parameters.
    hooks: dict[FlatUnit, list[Hook]] = field(default_factory=dict)
    hooks_at_rest: list[Hook] = field(default_factory=list)  # of other modules, and of wrappers: called after these
    # How to put a tensor where a module holds a buffer of another shape, or held none; and the tensor.
    replaced: list[tuple[Callable[[torch.Tensor], None], Incoming]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _shown: dict[Place, _Placeholder] = field(default_factory=dict)
    _metadata: Mapping[str, Any] = field(default_factory=dict)
    _names: dict[nn.Module, str] = field(default_factory=dict)
    _registries: Registries = field(init=False)
    _is_empty: bool = False

    @property
    def units(self) -> list[FlatUnit]:
        return units_in(self.module)

    @functools.cached_property
    def sharded(self) -> dict[Any, UnitMesh]:
        """Parameters of units, and flat ones, which tensor-parallel ranks do not share, with their meshes."""
        found: dict[Any, UnitMesh] = {}
        for unit in self.units:
            for flat in unit.sharded_params:
                found[flat] = unit.mesh.with_tensor(None)
                found.update(dict.fromkeys(flat.leaves, unit.mesh))
        return found

    @property
    def plain(self) -> list[torch.Tensor]:
        """Persistent buffers, and parameters that no unit owns."""
        return list(dict.fromkeys(s.target for s in self._shown.values() if s.target not in self.sharded))

    def read(self, values: Mapping[str, Any], prefix: str, metadata: Any, *, within: bool = False) -> None:
        """Find where each of `values` goes, tensors of any kind and extra states by name. Not collective.

        Args:
            metadata: versions of modules, as ``nn.Module.state_dict`` attaches them; None if there are none.
            within: a module around this one loads, and calls the hooks of this one for the time after loading.
        """
        for unit in self.units:
            for flat in unit.sharded_params:
                flat.adopt_user_data()
        # Versions of wrapped modules come after those of their wrappers, and are the ones that count.
        self._metadata = {clean_fqn(path, prefix).rstrip("."): facts for path, facts in (metadata or {}).items()}
        clean = with_clean_names(values, prefix)
        given = {name: value if is_extra_state(name) else shown_for(value) for name, value in clean.items()}
        self._is_empty = not given
        with torch.no_grad(), _compat.assigning_without_swaps(), contextlib.ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(self._blank(unit))
            stack.enter_context(self._plain())
            paths = self.module.named_modules()
            self._names = {module: clean_fqn(prefix + path, prefix).rstrip(".") for path, module in paths}
            self._registries = Registries(self.module)
            try:
                self._visit(self.module, given, prefix, self.hooks_at_rest)
            finally:
                new = self._registries.remove_new(self._shown)
            self._find_written()
            self._find_new(new)
        if within:
            self.hooks_at_rest = [(module, hook) for module, hook in self.hooks_at_rest if module is not self.module]
        self.missing[:] = [clean_fqn(key, prefix) for key in self.missing]
        self.unexpected[:] = [clean_fqn(key, prefix) for key in self.unexpected]

    def check(self, *, names: bool) -> None:
        """Raise a ``StateDictError`` with all errors, and wrong `names`, in the words of ``nn.Module``."""
        lines, missing, unexpected = [], self.missing if names else [], self.unexpected if names else []
        for what, keys in (("Missing", missing), ("Unexpected", unexpected)):
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                lines.append(f"{what} key(s) in state_dict: {quoted}. ")
        if missing and self._is_empty:
            lines.append(f"The state dict is empty: {FROM_RANK0}.")
        flat = flat_param_name(0)
        lacks, has = (any(key.rpartition(".")[2] == flat for key in keys) for keys in (missing, unexpected))
        if lacks != has:
            when = "is LOCAL_STATE_DICT, and was not" if lacks else "is not LOCAL_STATE_DICT, and was"
            lines.append(f"The state_dict_type {when} when the state dict was made: set the same one.")
        if lines or self.errors:
            what = f"Error(s) in loading state_dict for {type(self.module).__name__}:"
            raise StateDictError("\n\t".join([what, *lines, *self.errors]))

    def _blank(self, unit: FlatUnit) -> contextlib.AbstractContextManager[None]:
        """Return a context in which the modules of a unit have parameters without memory or value."""
        if kind_of(unit, unit.state_dict_settings.state_dict_type) is StateDictType.LOCAL_STATE_DICT:
            flats = unit.sharded_params
            blanks = {flat: _blank_param((flat.layout.used_numel,), flat.layout.dtype) for flat in flats}
            for index, flat in enumerate(flats):
                self._shown[unit.flat_owner, flat_param_name(index)] = _Placeholder(flat, blanks[flat])
            return flat_params_shown(unit, blanks)
        values = {
            leaf: _blank_param(slot.whole_shape, flat.layout.dtype)
            for flat in unit.sharded_params
            for leaf, slot in zip(flat.leaves, flat.layout.slots, strict=True)
        }
        for entry in unit.own.entries:
            for place in entry.places:
                self._shown[place] = _Placeholder(entry.param, values[entry.param])
        return orig_params_shown(unit, values)

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """Return a context in which modules have copies of buffers and of parameters that no unit owns."""
        copies: dict[torch.Tensor, torch.Tensor] = {}
        places: list[tuple[Place, dict[str, Any], torch.Tensor]] = []
        for module, (name, tensor) in ((m, each) for m in self.module.modules() for each in persistent_tensors(m)):
            if (module, name) in self._shown:
                continue
            if is_lazy(tensor):
                raise StateDictError(
                    f"{name!r} of {type(module).__name__} has no shape yet: call the module once before loading"
                )
            if tensor not in copies:
                copy = tensor.detach().clone()
                # Without gradients what is loaded may be of any dtype, as where it is copied.
                copies[tensor] = copy if name in module._buffers else nn.Parameter(copy, requires_grad=False)
            self._shown[module, name] = _Placeholder(tensor, copies[tensor])
            places.append(((module, name), _registry(module, name), tensor))
        try:
            for (_, name), registry, tensor in places:
                registry[name] = copies[tensor]
            yield
        finally:
            for (module, name), registry, tensor in places:
                if name not in registry:
                    registry[name] = None  # a module that has deleted it has it again
                put_back(module, name, tensor, copies[tensor], registry)

    def _visit(self, module: nn.Module, given: dict[str, Any], prefix: str, hooks: list[Hook]) -> None:
        """Do as ``nn.Module.load_state_dict`` for a module and its children, by clean names; hooks go to `hooks`."""
        unit = unit_of(module)
        hooks_inside: list[Hook] = hooks if unit is None else []
        wrapped = next((n for n, child in module._modules.items() if child is not None and not clean_fqn(n)), None)
        if wrapped is not None:
            own = {prefix + name for name, _ in persistent_tensors(module)}
            own |= {f"{prefix}_extra_state"} if _takes_extra_state(module) else set()
            given = {key if key in own else f"{prefix}{wrapped}.{key[len(prefix) :]}": given[key] for key in given}
        self._load_own(module, given, prefix)
        for name, child in module._modules.items():
            if child is None:
                continue
            if name == wrapped:
                inside = {clean_fqn(key, prefix): value for key, value in given.items() if key not in own}
                self._visit(child, inside, prefix, hooks_inside)
            else:
                begin = f"{prefix}{name}."
                inside = {key: value for key, value in given.items() if key.startswith(begin)}
                self._visit(child, inside, begin, hooks_inside)
        its_hooks = hooks if unit is None else self.hooks_at_rest
        its_hooks += [(module, hook) for hook in module._load_state_dict_post_hooks.values() if hook not in _own_hooks]
        if unit is not None:
            self.hooks.setdefault(unit, []).extend(hooks_inside)

    def _load_own(self, module: nn.Module, given: dict[str, Any], prefix: str) -> None:
        """Have a module read its own part of `given`, and note what it has put in place of the tensors shown to it."""
        metadata = {**self._metadata.get(prefix[:-1], {}), "assign_to_params_buffers": True}
        arguments = (given, prefix, metadata, True, self.missing, self.unexpected, self.errors)
        before, num_errors = {**module._parameters, **module._buffers}, len(self.errors)
        lent = LentTensors(module, given, prefix)
        with contextlib.ExitStack() as stack:
            stack.enter_context(self._state_kept(module, f"{prefix}_extra_state" in given, prefix))
            key, pre_hooks, registries = object(), module._load_state_dict_pre_hooks, self._registries
            pre_hooks[key] = lambda *_: registries.made.update(registries.new_in(module))  # type: ignore[index]
            stack.callback(pre_hooks.pop, key, None)
            stack.enter_context(_explaining_missing_values(module, prefix))
            if unit_of(module) is not None:  # its own method reads all modules inside
                _compat.load_from_state_dict(module, *arguments)
            else:
                module._load_from_state_dict(*arguments)
        for name, was in before.items():
            shown = self._shown.get((module, name))
            now = module._parameters.get(name, module._buffers.get(name))
            if shown is None or now is None:
                continue
            if now is not was:
                self._note(prefix + name, shown, lent.original_of(now), may_grow=name in module._buffers)
            elif shown.tensor.is_meta and prefix + name in given and len(self.errors) == num_errors:
                self.errors.append(
                    f"{prefix + name}: {type(module).__name__} has a _load_from_state_dict of its own that has not "
                    "assigned it, and what it may have written to it is lost, as parameters of a sharded model have no "
                    "memory while they are loaded: call nn.Module's, or use a hook; to leave the parameter as it is, "
                    "take its name out of the state dict"
                )

    @contextlib.contextmanager
    def _state_kept(self, module: nn.Module, is_given: bool, prefix: str) -> Iterator[None]:
        """Return a context in which a module that is given an extra state gets it later."""
        if not is_given or not _takes_extra_state(module):
            yield
            return
        self.facts[f"{prefix}_extra_state"] = "an extra state"
        own = {name: value for name, value in module.__dict__.items() if name == "set_extra_state"}
        module.__dict__["set_extra_state"] = lambda state: self.states.append((module, state))
        try:
            yield
        finally:
            del module.__dict__["set_extra_state"]
            module.__dict__.update(own)

    def _note(self, key: str, shown: _Placeholder, now: torch.Tensor, *, may_grow: bool) -> None:
        """Note the tensor `now` that a module has put in place of the one shown to it, or an error."""
        target = shown.target
        mesh = self.sharded.get(target)
        try:
            source = source_of(key, now, "a tensor", _REMEDY)
            shape = now.shape if may_grow else shown.tensor.shape
            check_source(key, source, None if mesh else target, shape, mesh)
            # Tensor-parallel ranks have different flat parameters.
            alike = not isinstance(target, FlatParam) or all(unit.mesh.tensor is None for unit in self.units)
            self.facts[key] = facts_of(source, mesh) if alike else type(source).__name__
        except StateDictError as error:
            self.errors.append(str(error))
        else:
            self.found[target] = source

    def _find_written(self) -> None:
        """Note tensors that modules have written to, and buffers that have another shape now."""
        grown: dict[torch.Tensor, tuple[str, torch.Tensor, torch.dtype]] = {}
        places: list[tuple[Place, torch.Tensor]] = []
        for (module, name), shown in self._shown.items():
            now = _registry(module, name).get(name)
            if now is None or shown.target in self.sharded:
                continue
            if now.shape == shown.target.shape:
                if now is shown.tensor and not equal(now, shown.target):
                    self.found[shown.target] = now
            elif name in module._buffers:
                # What is loaded into a buffer that has grown first is converted, and what takes its place is not.
                like = self._registries.made.get((module, name), shown.tensor)
                dtype = like.dtype if like.shape == now.shape else now.dtype
                grown[shown.target] = self._key(module, name), now, dtype  # in several places: the last value counts
                places.append(((module, name), shown.target))
                self.found.pop(shown.target, None)
            else:
                self.errors.append(f"{type(module).__name__} has changed the shape of its parameter {name!r}")
        made = {target: self._incoming(key, now, target.device, dtype) for target, (key, now, dtype) in grown.items()}
        for (module, name), target in places:
            if (found := made[target]) is not None:
                self.replaced.append((functools.partial(setattr, module, name), found))

    def _find_new(self, new: list[New]) -> None:
        """Note tensors that modules have registered where they held none."""
        in_units = {module for unit in self.units for module in unit.wrapper.modules()}
        device = ranks_of_model(self.module).device
        found: dict[torch.Tensor, Incoming | None] = {}
        for each in new:
            module, name = each.place
            key = self._key(module, name)
            if each.is_param and module in in_units:
                self.errors.append(
                    f"{key}: {type(module).__name__} has registered a parameter while it was loaded, and a sharded "
                    "model has those that it was built with: register it before the module is wrapped"
                )
                continue
            made = each.tensor if each.made is None else each.made
            if made not in found:
                there = device if each.made is None or made.is_meta else made.device
                found[made] = self._incoming(key, each.tensor, there, made.dtype, is_param=each.is_param)
            if (incoming := found[made]) is not None:
                self.replaced.append((each.put, incoming))
                if isinstance(each.tensor, StandIn) or each.tensor is not each.made:
                    self.facts[key] = facts_of(incoming.source, None)  # others are a module's own, on each rank

    def _incoming(
        self, key: str, now: torch.Tensor, device: torch.device, dtype: torch.dtype, *, is_param: bool = False
    ) -> Incoming | None:
        """Return the tensor that a module is to hold; None if it is noted as an error."""
        requires_grad = now.requires_grad if is_param else None
        if not isinstance(now, StandIn) and not now.is_meta:  # the caller's, or a copy of it
            return Incoming(now.detach().to(device, dtype, copy=True), True, device, dtype, requires_grad)
        try:
            source = source_of(key, now, "a tensor", _REMEDY)
            if source is now:
                raise StateDictError(
                    f"{key!r}: while loading, its module created this tensor on the meta device, where its "
                    "parameters are until everything is loaded, and the state dict has no values for it: pass "
                    "device= where the module creates it"
                )
            check_source(key, source, None, now.shape, None)
        except StateDictError as error:
            if str(error) not in self.errors:
                self.errors.append(str(error))
            return None
        return Incoming(source, False, device, dtype, requires_grad)

    def _key(self, module: nn.Module, name: str) -> str:
        return f"{self._names[module]}.{name}" if self._names[module] else name


@contextlib.contextmanager
def _explaining_missing_values(module: nn.Module, prefix: str) -> Iterator[None]:
    """Return a context in which errors of a module that loads its own part say which values are not here."""
    try:
        yield
    except (RuntimeError, TypeError) as error:  # of several kinds, which have nothing else in common
        if isinstance(error, StateDictError) or not re.search(r"(?i)\bmeta\b|register_meta", str(error)):
            raise
        where = f" at {prefix[:-1]!r}" if prefix else ""
        raise StateDictError(
            f"{type(module).__name__}{where} reads or writes values while it loads that this rank does not have: a "
            "sharded model's parameters have no values until everything is loaded, and tensors of other ranks have "
            f"none here. Use a load_state_dict post-hook, or pass the whole state dict on every rank ({error})"
        ) from error


def _takes_extra_state(module: nn.Module) -> bool:
    return getattr(type(module), "set_extra_state", None) is not nn.Module.set_extra_state


def _registry(module: nn.Module, name: str) -> dict[str, Any]:
    return module._buffers if name in module._buffers else module._parameters


def equal(tensor: torch.Tensor, other: torch.Tensor) -> bool:
    """Return whether two tensors of one shape are known to hold the same on this rank."""
    tensor, other = (each.to_local() if isinstance(each, DTensor) else each for each in (tensor, other))
    return tensor.is_meta or torch.equal(tensor, other)


def _blank_param(shape: Iterable[int], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"), requires_grad=False)
