"""Prefixes of names in state dicts, and the outermost of a set of modules."""

from __future__ import annotations

from collections.abc import Iterable, MutableMapping
from typing import Any, TypeVar

from torch import nn

ModuleT = TypeVar("ModuleT", bound=nn.Module)


def replace_by_prefix(state_dict: MutableMapping[str, Any], old_prefix: str, new_prefix: str) -> None:
    """Rename the keys that begin with `old_prefix` to begin with `new_prefix`, in place. Their order is kept.

    Raises:
        ValueError: the prefixes are equal, or two entries would get the same name; nothing was changed.
    """
    if old_prefix == new_prefix:
        raise ValueError(f"the old and the new prefix are both {old_prefix!r}: nothing would change")
    renamed: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for key, value in state_dict.items():
        name = new_prefix + key[len(old_prefix) :] if key.startswith(old_prefix) else key
        if name in renamed:
            raise ValueError(
                f"{origin[name]!r} and {key!r} would both be {name!r} with {new_prefix!r} for {old_prefix!r}"
            )
        renamed[name], origin[name] = value, key
    if any(name != key for name, key in origin.items()):
        state_dict.clear()  # unlike one by one, this keeps the order; attributes of the mapping stay
        state_dict.update(renamed)


def get_root_modules(modules: Iterable[ModuleT]) -> list[ModuleT]:
    """Those of `modules` that no other of them contains, in the order given. Visits each module once."""
    given = list(modules)
    contained: set[int] = set()
    seen: set[int] = set()
    for start in given:
        pending: list[nn.Module] = [start]
        while pending:
            module = pending.pop()
            if id(module) in seen:
                continue
            seen.add(id(module))
            for child in module.children():
                if child is not start:
                    contained.add(id(child))
                pending.append(child)
    return [module for module in given if id(module) not in contained]
