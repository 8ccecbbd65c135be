"""What of a state dict goes where in a model: found by the modules' own way of loading, without changing anything."""

from __future__ import annotations

import contextlib
import functools
import hashlib
import itertools
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import StateDictType
from torch.distributed.tensor import DTensor

from hpcfsdp import _compat
from hpcfsdp._compat import IncompatibleKeys, ShardedTensor
from hpcfsdp.api import unshard
from hpcfsdp.api.groups import Groups
from hpcfsdp.api.wrapper import FullyShardedDataParallel
from hpcfsdp.errors import StateDictError
from hpcfsdp.flat.param import FlatParam
from hpcfsdp.state.model import clean_fqn
from hpcfsdp.state.save import flat_numel, flat_params_shown, orig_params_shown, put_back
from hpcfsdp.state.settings import kind_of
from hpcfsdp.state.stand_in import StandIn
from hpcfsdp.state.transfer import OnFirst
from hpcfsdp.tensor.sharded import all_boxes, properties_of

Place = tuple[nn.Module, str]
"""A module and the name of a parameter or buffer in it."""


@dataclass
class _Shown:
    """What stands in a module while a state dict is read.

    Attributes:
        target: whose value it is: a parameter of a unit, a flat parameter, or any other tensor.
        tensor: what is shown.
        version: of `tensor`, as it was then: an own way of loading may write to it.
    """

    target: Any
    tensor: torch.Tensor
    version: int = 0


@dataclass
class Reading:
    """What a state dict has for a module that holds units.

    For the time of ``read`` the modules have parameters without memory in place of their own, and loading puts the
    tensors of the state dict in place of these; so hooks work, and what modules override.

    Attributes:
        found: by parameter, flat parameter or other tensor, what is to be copied into it.
        keys: of each of these, the name by which it was found.
        facts: by name, what all ranks have to have alike.
        states: extra states that modules are to be given.
        replaced: buffers that a module has changed the shape of.
        missing, unexpected, errors: as of ``nn.Module.load_state_dict``.
    """

    module: nn.Module
    found: dict[Any, Any] = field(default_factory=dict)
    keys: dict[Any, str] = field(default_factory=dict)
    facts: dict[str, str] = field(default_factory=dict)
    states: list[tuple[nn.Module, Any]] = field(default_factory=list)
    replaced: list[tuple[Place, torch.Tensor]] = field(default_factory=list)
    missing: list[str] = field(default_factory=list)
    unexpected: list[str] = field(default_factory=list)
    errors: list[str] = field(default_factory=list)
    _shown: dict[Place, _Shown] = field(default_factory=dict)
    _metadata: Mapping[str, Any] = field(default_factory=dict)

    @property
    def units(self) -> list[FullyShardedDataParallel]:
        return FullyShardedDataParallel.fsdp_modules(self.module)

    @functools.cached_property
    def sharded(self) -> dict[Any, Groups]:
        """Parameters of units, and flat ones, with the groups that they are sharded over."""
        return {
            target: unit._groups for unit in self.units for flat in unit._unit.flats for target in (flat, *flat.leaves)
        }

    @property
    def digest(self) -> str:
        """A short text that is the same on all ranks if `facts` are."""
        return _digest(sorted(self.facts.items()))

    def read(self, values: Mapping[str, Any], prefix: str, metadata: Any, *, within: bool = False) -> None:
        """Find what of `values` goes where. Not collective.

        Args:
            values: tensors, ``ShardedTensor``, ``DTensor`` or ``OnFirst`` by name, and extra states.
            prefix: of the module's names.
            metadata: versions of modules, as ``nn.Module.state_dict`` attaches them; None if there are none.
            within: a module around this one loads, which calls the hooks of this one that run after loading.

        Raises:
            StateDictError: two names are one without those of wrappers.
        """
        for unit in self.units:
            for flat in unit._unit.flats:
                flat.take_back()
        # Versions of wrapped modules come after those of their wrappers, and are the ones that count.
        self._metadata = {clean(path, prefix).rstrip("."): facts for path, facts in (metadata or {}).items()}
        given: dict[str, Any] = {}
        for key, value in values.items():
            name = clean(key, prefix)
            if name in given:
                raise StateDictError(f"the state dict has {name!r} twice, if names of wrappers are left out")
            given[name] = _readable(value)
        with torch.no_grad(), _compat.assigning_without_swaps(), contextlib.ExitStack() as stack:
            for unit in self.units:
                stack.enter_context(self._blank(unit))
            stack.enter_context(self._plain())
            self._visit(self.module, given, prefix, run_hooks=not within)
            self._find_written()
        self.missing[:] = [clean(key, prefix) for key in self.missing]
        self.unexpected[:] = [clean(key, prefix) for key in self.unexpected]

    def problems(self, strict: bool) -> list[str]:
        """What keeps the state dict from being loaded, in the words of ``nn.Module``."""
        lines = list(self.errors)
        if not strict:
            return lines
        for what, keys in (("Unexpected", self.unexpected), ("Missing", self.missing)):
            if keys:
                quoted = ", ".join(f'"{key}"' for key in keys)
                lines.insert(0, f"{what} key(s) in state_dict: {quoted}. ")
        flat = unshard.flat_param_name(0)
        lacks, has = (any(key.rpartition(".")[2] == flat for key in keys) for keys in (self.missing, self.unexpected))
        if lacks != has:
            when = "is LOCAL_STATE_DICT, and was not" if lacks else "is not LOCAL_STATE_DICT, and was"
            lines.append(f"The state_dict_type {when} when the state dict was made: set the same one.")
        return lines

    @contextlib.contextmanager
    def _blank(self, unit: FullyShardedDataParallel) -> Iterator[None]:
        """A context in which the modules of a unit have parameters without memory or value."""
        if kind_of(unit, unit._state_dict_settings.state_dict_type) is StateDictType.LOCAL_STATE_DICT:
            flats = unit._unit.flats
            blanks = {flat: _blank_param((flat_numel(flat.layout),), flat.layout.dtype) for flat in flats}
            for index, flat in enumerate(flats):
                self._shown[unit._flat_owner, unshard.flat_param_name(index)] = _Shown(flat, blanks[flat])
            with flat_params_shown(unit, blanks.__getitem__):
                yield
            return
        values = {
            leaf: _blank_param(slot.shape, flat.layout.dtype)
            for flat in unit._unit.flats
            for leaf, slot in zip(flat.leaves, flat.layout.slots, strict=True)
        }
        for entry in unit._own.entries:
            for place in entry.places:
                self._shown[place] = _Shown(entry.param, values[entry.param])
        with orig_params_shown(unit, values):
            yield

    @contextlib.contextmanager
    def _plain(self) -> Iterator[None]:
        """A context in which modules have copies of their buffers; after it everything is where it was."""
        copies: dict[torch.Tensor, torch.Tensor] = {}
        places: list[tuple[Place, torch.Tensor]] = []
        for module, (name, tensor) in ((m, each) for m in self.module.modules() for each in _persistent(m)):
            if (module, name) in self._shown:
                continue
            if name in module._buffers and tensor not in copies:
                copies[tensor] = tensor.detach().clone()
            shown = copies.get(tensor, tensor)
            self._shown[module, name] = _Shown(tensor, shown, shown._version)
            places.append(((module, name), tensor))
        try:
            for (module, name), tensor in places:
                if name in module._buffers:
                    module._buffers[name] = copies[tensor]
            yield
        finally:
            for (module, name), tensor in places:
                registry = module._buffers if name in module._buffers else module._parameters
                put_back(module, name, tensor, copies.get(tensor, tensor), registry)

    def _visit(self, module: nn.Module, given: dict[str, Any], prefix: str, *, run_hooks: bool = True) -> None:
        """What ``nn.Module.load_state_dict`` does for a module and its children, by names without those of wrappers."""
        wrapped = next((n for n, child in module._modules.items() if child is not None and not clean_fqn(n)), None)
        if wrapped is not None:
            given = {f"{prefix}{wrapped}.{key[len(prefix) :]}": value for key, value in given.items()}
        self._load_own(module, given, prefix)
        for name, child in module._modules.items():
            if child is None:
                continue
            if name == wrapped:
                self._visit(child, {clean(key, prefix): value for key, value in given.items()}, prefix)
            else:
                begin = f"{prefix}{name}."
                self._visit(child, {key: value for key, value in given.items() if key.startswith(begin)}, begin)
        if run_hooks:
            told = IncompatibleKeys(self.missing, self.unexpected)
            for hook in list(module._load_state_dict_post_hooks.values()):
                if hook(module, told) is not None:
                    raise StateDictError(
                        f"a hook of {type(module).__name__} after load_state_dict returned a value: it should change "
                        "missing_keys and unexpected_keys in place"
                    )

    def _load_own(self, module: nn.Module, given: dict[str, Any], prefix: str) -> None:
        """Have a module read its own part of what is given, and note what it has put in place of what was shown."""
        metadata = {**self._metadata.get(prefix[:-1], {}), "assign_to_params_buffers": True}
        arguments = (given, prefix, metadata, True, self.missing, self.unexpected, self.errors)
        if isinstance(module, FullyShardedDataParallel):  # whose own way is to read with all that is inside
            nn.Module._load_from_state_dict(module, *arguments)
            return
        before, num_errors = {**module._parameters, **module._buffers}, len(self.errors)
        with self._state_kept(module, f"{prefix}_extra_state" in given, prefix):
            module._load_from_state_dict(*arguments)
        for name, was in before.items():
            shown = self._shown.get((module, name))
            now = module._parameters.get(name, module._buffers.get(name))
            if shown is None or now is None:
                continue
            if now is not was:
                self._note(prefix + name, shown.target, now)
            elif shown.tensor.is_meta and prefix + name in given and len(self.errors) == num_errors:
                self.errors.append(
                    f"{prefix + name}: {type(module).__name__} has a _load_from_state_dict of its own that writes to "
                    "its parameters; those of a sharded model can only be assigned: call nn.Module's, or use a hook"
                )

    @contextlib.contextmanager
    def _state_kept(self, module: nn.Module, is_given: bool, prefix: str) -> Iterator[None]:
        """A context in which a module that is given an extra state gets it later."""
        if not is_given or getattr(type(module), "set_extra_state", None) is nn.Module.set_extra_state:
            yield
            return
        self.facts[f"{prefix}_extra_state"] = "an extra state"
        module.__dict__["set_extra_state"] = lambda state: self.states.append((module, state))
        try:
            yield
        finally:
            module.__dict__.pop("set_extra_state", None)

    def _note(self, key: str, target: Any, now: torch.Tensor) -> None:
        source = now.source if isinstance(now, StandIn) else now
        if source is None:
            self.errors.append(
                f"{key}: a hook has computed it from a tensor that this rank does not have whole: load a full state "
                "dict, or give the hook's work to the module"
            )
            return
        try:
            self.facts[key] = _facts(source, self.sharded.get(target))
        except ValueError as error:
            self.errors.append(f"{key}: {error}")
            return
        self.found[target] = source
        self.keys[target] = key

    def _find_written(self) -> None:
        """Take over buffers that a module has written to, or has in another shape now."""
        for (module, name), shown in self._shown.items():
            now = module._buffers.get(name)
            if now is None or isinstance(shown.target, FlatParam):
                continue
            if now.shape != shown.target.shape:
                self.replaced.append(((module, name), now.detach().clone().to(shown.target.device)))
                self.found.pop(shown.target, None)
            elif now is shown.tensor and now._version != shown.version:
                self.found[shown.target] = now


def clean(key: str, prefix: str) -> str:
    """A name without those of wrappers after `prefix`."""
    return prefix + clean_fqn(key[len(prefix) :])


def _persistent(module: nn.Module) -> list[tuple[str, torch.Tensor]]:
    """A module's own parameters and persistent buffers."""
    return [
        (name, tensor)
        for name, tensor in itertools.chain(module._parameters.items(), module._buffers.items())
        if tensor is not None and name not in module._non_persistent_buffers_set
    ]


def _readable(value: Any) -> Any:
    """What modules are shown of a value."""
    if isinstance(value, (ShardedTensor, DTensor, OnFirst)):
        return StandIn.of(value)
    return value.detach() if isinstance(value, torch.Tensor) else value


def _blank_param(shape: Iterable[int], dtype: torch.dtype) -> nn.Parameter:
    return nn.Parameter(torch.empty(tuple(shape), dtype=dtype, device="meta"), requires_grad=False)


def _facts(source: Any, groups: Groups | None) -> str:
    """What all ranks have to have alike, in words, as they are about to move values together.

    Blocks are those of the ranks of ``groups.shard`` in their order: what replicas have lies on other ranks.
    """
    shape, dtype = (source.shape, source.dtype) if isinstance(source, OnFirst) else properties_of(source)
    is_distributed = isinstance(source, (ShardedTensor, DTensor))
    kind = type(source).__name__ if is_distributed or isinstance(source, OnFirst) else "tensor"
    facts = f"a {kind} {list(shape)} of {str(dtype).removeprefix('torch.')}"
    if is_distributed and groups is not None:
        boxes = all_boxes(source)
        facts += f" in blocks {_digest([boxes.get(rank) for rank in groups.global_ranks()])}"
    return facts


def _digest(value: Any) -> str:
    return hashlib.blake2b(repr(value).encode(), digest_size=8).hexdigest()
