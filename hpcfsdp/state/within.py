"""Units in a plain module that loads a state dict: all are loaded at the end of that, or none.

Torch goes through the modules one by one. It hands each unit its part of the state dict, and calls hooks on the way.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple

from torch import nn

from hpcfsdp._compat import IncompatibleKeys
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import CrossedCallsError, StateDictError
from hpcfsdp.hang.calls import public_call
from hpcfsdp.state.load import Agreed, agree, commit, finish, refuse_assign
from hpcfsdp.state.model import ranks_of_model
from hpcfsdp.state.reading import Reading, own_hook
from hpcfsdp.state.wrappers import clean_fqn
from hpcfsdp.units.flat_unit import WRAPPED, FlatUnit

_WAITING = "_hpcfsdp_waiting"
"""Where a module that loads a state dict keeps the units inside of it that are to be loaded."""


class _MetadataProbe(nn.Module):
    """In place of a module: notes the metadata that it is handed, and loads nothing.

    Torch keeps the versions of modules that a state dict has to itself, and hands each module its own.
    """

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
    """A unit's part of the state dict, until all parts are known.

    Args:
        state_dict: in which names begin with `prefix`.
        metadata: of the unit itself.
        missing, unexpected: added to, as by any module that loads its part.
        errors: what other modules refuse, when torch has been through all of them.
    """

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
        self.reading, self.keys = Reading(self.module), IncompatibleKeys(missing, unexpected)
        self._prefix, self._errors = prefix, errors
        self._problem: Exception | None = None
        self._values = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        self._metadata: dict[str, Any] = {prefix[:-1]: metadata} if metadata else {}
        probe = _MetadataProbe(self._metadata)
        # Wrappers take their own names out of keys, and some leave them in the metadata.
        for path, _ in self.module.named_modules(remove_duplicate=False):
            probe.add(path)
            probe.add(".".join(part for part in path.split(".") if part != WRAPPED))
            probe.add(clean_fqn(path))
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
            self.reading.read(self._values, self._prefix, self._metadata, within=True)
            self.reading.check(names=False)
        except Exception as error:  # raised on all ranks by ``agree``
            self._problem = error
        self.keys.missing_keys.extend(self.reading.missing)
        self.keys.unexpected_keys.extend(self.reading.unexpected)

    def agree(self) -> Agreed:
        """Collective over the ranks of the unit. Compare what ranks are about to load.

        Raises:
            EngineError: a unit is at work, or summoned.
            StateDictError: on every rank, if the values do not fit on one of them, or differ, or if other modules have
                refused theirs.
        """

        def found() -> None:
            if self._problem is not None:
                raise self._problem
            if self._errors:  # torch will raise
                raise StateDictError("\n\t".join(["Error(s) in loading state_dict:", *self._errors]))

        return agree(self.reading, found)


class _Waiting(NamedTuple):
    """The units that one call of ``load_state_dict`` has come to.

    Attributes:
        call: an object that this call alone hands to all modules.
    """

    call: object
    parts: list[LoadWithin]


def _load_all(parts: list[LoadWithin]) -> None:
    """Collective over the ranks of the units. Load all of them, or change nothing in any of them.

    Errors that modules raise after values are loaded, in extra states and hooks, undo nothing, as in a unit by itself:
    all units are loaded then, too.
    """
    problem: Exception | None = None
    agreed: list[Agreed] = []
    for part in parts:
        try:
            agreed.append(part.agree())
        except CrossedCallsError:
            raise
        except Exception as error:  # units may be on other ranks, which are at the next one
            problem = problem or error
    for part in parts:
        try:
            with raise_together(ranks_of_model(part.module)):
                if problem is not None:
                    raise problem
        except CrossedCallsError:
            raise
        except Exception as error:
            problem = problem or error
    if problem is not None:
        raise problem
    for part in parts:
        commit(part.reading, None)
    for part, each in zip(parts, agreed, strict=True):
        try:
            finish(part.reading, each, part.keys)
        except Exception as error:  # the others are to have their extra states, and may be on other ranks
            problem = problem or error
    if problem is not None:
        raise problem


@own_hook
@public_call("load_state_dict")
def load_when_known(wrapper: Any, _incompatible_keys: Any) -> None:
    """Read a unit's part, if a module around it loads a state dict; all units are loaded at the end of that.

    Torch calls it when it has been through all that is inside of the unit, the first of hooks.
    """
    within = wrapper.__dict__.pop("_load_within", None)
    if within is None:
        return
    part, root, call = within
    part.read()
    if root is None or root is part.module:  # no module around it is known
        _load_all([part])
        return
    waiting = root.__dict__.get(_WAITING)
    if waiting is None or waiting.call is not call:  # an earlier call that failed has left its own
        waiting = root.__dict__[_WAITING] = _Waiting(call, [])
    waiting.parts.append(part)
    if load_waiting not in root._load_state_dict_post_hooks.values():
        handle = root.register_load_state_dict_post_hook(load_waiting)
        root._load_state_dict_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


@own_hook
@public_call("load_state_dict")
def load_waiting(root: nn.Module, _incompatible_keys: Any) -> None:
    """Collective over the ranks of the units in `root`, when it has loaded a state dict. Load them, all or none.

    A hook that stays, for torch is going through the hooks when it is called.
    """
    waiting = root.__dict__.pop(_WAITING, None)
    if waiting is not None:
        _load_all(waiting.parts)
