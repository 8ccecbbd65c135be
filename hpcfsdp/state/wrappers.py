"""Modules around a model, as DistributedDataParallel: their names are left out of checkpoints and state dicts."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from torch import nn
from torch.nn.parallel import DistributedDataParallel
from torch.optim.swa_utils import AveragedModel

from hpcfsdp.errors import StateDictError
from hpcfsdp.units.flat_unit import WRAPPED

CHILD = "module"
"""The name under which wrappers that forward everything to one model register it."""

NUM_AVERAGED = "n_averaged"
"""The buffer of an AveragedModel that counts: no part of the model that it averages."""

_KNOWN = (DistributedDataParallel, nn.DataParallel, AveragedModel)

# Names that wrappers put into a module's path; a state dict knows the module without them.
_PARTS = {WRAPPED, "_checkpoint_wrapped_module", "_orig_mod"}

_FLAT_PARAM = "_flat_param"
"""The beginning of the names of flat parameters, which are registered in the wrapped module."""


def clean_fqn(name: str, prefix: str = "") -> str:
    """Return a module path or parameter name without the parts after `prefix` that only wrappers add."""
    return prefix + ".".join(part for part in name[len(prefix) :].split(".") if part not in _PARTS)


def with_clean_names(state_dict: Mapping[str, Any], prefix: str = "") -> dict[str, Any]:
    """Return a state dict by clean names. Raises a ``StateDictError`` if two entries have the same."""
    found: dict[str, Any] = {}
    for key, value in state_dict.items():
        name = clean_fqn(key, prefix)
        if name in found:
            raise StateDictError(f"the state dict has {name!r} twice once the names of wrappers are removed")
        found[name] = value
    return found


@dataclass(frozen=True)
class CleanNames:
    """The names of a model's parameters and modules without those of the wrappers around it.

    A wrapper is a DistributedDataParallel, DataParallel or AveragedModel, wherever it stands; and, from the outermost
    module on inwards, each module that has one child, called ``module``, and nothing else.
    """

    wrappers: frozenset[str] = frozenset()  # their paths, without the parts that ``clean_fqn`` takes out

    @classmethod
    def of(cls, model: nn.Module) -> CleanNames:
        """Return those of a model; not collective."""
        found = {path for path, module in model.named_modules(remove_duplicate=False) if isinstance(module, _KNOWN)}
        return cls(frozenset(clean_fqn(path) for path in found.union(_outermost(model))))

    def __call__(self, path: str, name: str) -> str:
        """Return the name in the model of `name` in the module at `path`."""
        clean = clean_fqn(f"{path}.{name}" if path else name)
        if not self.wrappers:
            return clean
        kept, before = [], ""
        for part in clean.split("."):
            if part != CHILD or before not in self.wrappers:
                kept.append(part)
            before = f"{before}.{part}" if before else part
        return ".".join(kept)


def _outermost(model: nn.Module) -> Iterator[str]:
    """Return the paths of wrappers of any class that stand one in the other, from the model itself on."""
    path, module = "", model
    while len(module._modules) == 1:
        [(name, child)] = module._modules.items()
        is_empty = not module._buffers and all(param.startswith(_FLAT_PARAM) for param in module._parameters)
        if child is None or (clean_fqn(name) and not (name == CHILD and (is_empty or isinstance(module, _KNOWN)))):
            return
        if name == CHILD:
            yield path
        path, module = f"{path}.{name}" if path else name, child
