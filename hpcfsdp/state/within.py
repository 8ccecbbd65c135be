"""A unit's part of loading a module around it, which torch goes through module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpcfsdp._compat import IncompatibleKeys
from hpcfsdp.comm import raise_together
from hpcfsdp.errors import StateDictError
from hpcfsdp.sharded.unit import WRAPPED, ShardedUnit
from hpcfsdp.state.load import Agreed, agree, commit, finish, refuse_assign
from hpcfsdp.state.ranks import ranks_of_model
from hpcfsdp.state.reading import Reading
from hpcfsdp.state.wrappers import clean_fqn


class Asking(nn.Module):
    """In place of a module: notes the metadata that it is handed, and loads nothing.

    Torch keeps the versions of modules that a state dict has to itself, and hands each module its own.
    """

    def __init__(self, found: dict[str, Any]) -> None:
        super().__init__()
        self._found = found

    def add(self, path: str) -> None:
        """Have others inside, at all places of a path."""
        asking = self
        for name in filter(None, path.split(".")):
            if name not in asking._modules:
                asking._modules[name] = Asking(self._found)
            asking = asking._modules[name]

    def _load_from_state_dict(self, state_dict: Any, prefix: str, local_metadata: dict[str, Any], *_rest: Any) -> None:
        if local_metadata:
            self._found[prefix[:-1]] = local_metadata


class LoadWithin:
    """What a unit has been given, until all is known that there is for it.

    Args:
        state_dict: in which names begin with `prefix`.
        metadata: of the unit itself.
        missing, unexpected: added to, as by any module that loads its part.
        errors: what other modules refuse, when torch has been through all of them.
    """

    def __init__(
        self,
        unit: ShardedUnit,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        missing: list[str],
        unexpected: list[str],
        errors: list[str],
    ) -> None:
        self.unit, self.module = unit, unit.wrapper
        self._prefix, self._keys = prefix, IncompatibleKeys(missing, unexpected)
        self._reading, self._errors = Reading(self.module), errors
        self._problem: Exception | None = None
        self._values = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        self._metadata: dict[str, Any] = {prefix[:-1]: metadata} if metadata else {}
        asking = Asking(self._metadata)
        # Wrappers take their own names out of keys, and some leave them in what is said of modules.
        for path, _ in self.module.named_modules(remove_duplicate=False):
            asking.add(path)
            asking.add(".".join(part for part in path.split(".") if part != WRAPPED))
            asking.add(clean_fqn(path))
        for key in self._values:
            asking.add(key[len(prefix) :].rpartition(".")[0])
        own = self.module.__dict__
        self._modules, own["_modules"] = own["_modules"], asking._modules

    def read(self) -> None:
        """Not collective. Find what goes where, now that torch has been through all that is inside of the unit.

        The module around it knows whether names may be missing, and raises when it has been through all of its
        children: what is missing does not keep this unit from loading the rest, and anything else that is wrong does.
        """
        self.module.__dict__["_modules"] = self._modules
        try:
            self.unit.check_at_rest("load_state_dict")
            if self._metadata.get(self._prefix[:-1], {}).get("assign_to_params_buffers"):
                refuse_assign()
            self._reading.read(self._values, self._prefix, self._metadata, within=True)
            self._reading.check(names=False)
        except Exception as error:  # the other ranks are to hear of it
            self._problem = error
        self._keys.missing_keys.extend(self._reading.missing)
        self._keys.unexpected_keys.extend(self._reading.unexpected)

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

        return agree(self._reading, found)

    def refuse(self, problem: Exception | None) -> None:
        """Collective over the ranks of the unit. Raise on all of them if another unit is not loaded on one of them."""
        with raise_together(ranks_of_model(self.module)):
            if problem is not None:
                raise problem

    def commit(self) -> None:
        """Collective over the ranks of the unit. Load it, and the units inside."""
        commit(self._reading, None)

    def finish(self, agreed: Agreed) -> None:
        """Collective over the ranks of the unit. Give modules their extra states, and call hooks."""
        finish(self._reading, agreed, self._keys)
