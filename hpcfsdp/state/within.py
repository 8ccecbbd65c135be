"""A unit's part of loading a module around it, which torch goes through module by module."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from torch import nn

from hpcfsdp._compat import IncompatibleKeys
from hpcfsdp.api.wrapper import WRAPPED, FullyShardedDataParallel
from hpcfsdp.state.load import agree, commit, finish
from hpcfsdp.state.model import clean_fqn
from hpcfsdp.state.reading import Reading


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
    """

    def __init__(
        self,
        unit: FullyShardedDataParallel,
        state_dict: Mapping[str, Any],
        prefix: str,
        metadata: dict[str, Any],
        missing: list[str],
        unexpected: list[str],
    ) -> None:
        self._unit, self._prefix, self._keys = unit, prefix, IncompatibleKeys(missing, unexpected)
        self._values = {key: value for key, value in state_dict.items() if key.startswith(prefix)}
        self._metadata: dict[str, Any] = {prefix[:-1]: metadata} if metadata else {}
        asking = Asking(self._metadata)
        # Wrappers take their own names out of keys, and some leave them in what is said of modules.
        for path, _ in unit.named_modules(remove_duplicate=False):
            asking.add(path)
            asking.add(".".join(part for part in path.split(".") if part != WRAPPED))
            asking.add(clean_fqn(path))
        for key in self._values:
            asking.add(key[len(prefix) :].rpartition(".")[0])
        self._modules, unit.__dict__["_modules"] = unit.__dict__["_modules"], asking._modules

    def load(self) -> None:
        """Collective over the ranks of the unit. Load it, and the units inside, or change nothing on any rank.

        The module around it knows whether names may be missing, and raises when it has been through all of its
        children: what is missing does not keep this unit from loading the rest, and anything else that is wrong does.

        Raises:
            EngineError: a unit is at work, or summoned.
            StateDictError: on every rank, if the values do not fit on one of them, or differ.
        """
        self._unit.__dict__["_modules"] = self._modules
        reading = Reading(self._unit)

        def read() -> None:
            reading.read(self._values, self._prefix, self._metadata, within=True)
            reading.check(names=False)

        agreed = agree(reading, read)
        self._keys.missing_keys.extend(reading.missing)
        self._keys.unexpected_keys.extend(reading.unexpected)
        commit(reading, None)
        finish(reading, agreed, self._keys)
