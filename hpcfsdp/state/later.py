"""Units in a plain module that loads a state dict: all are loaded at the end of that, or none."""

from __future__ import annotations

from typing import Any, Protocol

from torch import nn

from hpcfsdp.launch.calls import public_call

WAITING = "_hpcfsdp_waiting"
"""Where a module that loads a state dict keeps the units inside of it that are to be loaded."""


class Part(Protocol):
    """A unit's part of what is loaded. See ``LoadWithin``."""

    module: nn.Module
    """The wrapper."""

    def read(self) -> None:
        """Not collective. Find what goes where."""

    def agree(self) -> Any:
        """Collective over the ranks of the unit. Compare what ranks are about to load."""

    def refuse(self, problem: Exception | None) -> None:
        """Collective over the ranks of the unit. Raise on all of them if another unit is not loaded on one of them."""

    def commit(self) -> None:
        """Collective over the ranks of the unit. Load it."""

    def finish(self, agreed: Any) -> None:
        """Collective over the ranks of the unit. Give modules their extra states, and call hooks."""


class _Waiting:
    """The units that one call of ``load_state_dict`` has come to: they are loaded when it has been through all.

    Args:
        call: an object that all modules are handed by this call alone.
    """

    def __init__(self, call: object) -> None:
        self.call = call
        self.units: list[Part] = []

    def load(self) -> None:
        """Collective over the ranks of the units. Load all of them, or change nothing in any of them.

        What modules raise when values are loaded, extra states and hooks, undoes nothing, as in a unit by itself: all
        units are loaded then, too.
        """
        problem: Exception | None = None
        agreed: list[Any] = []
        for unit in self.units:
            try:
                agreed.append(unit.agree())
            except Exception as error:  # units may lie on other ranks, which are at the next one
                problem = problem or error
        for unit in self.units:
            try:
                unit.refuse(problem)
            except Exception as error:
                problem = problem or error
        if problem is not None:
            raise problem
        for unit in self.units:
            unit.commit()
        for unit, each in zip(self.units, agreed, strict=True):
            try:
                unit.finish(each)
            except Exception as error:  # the others are to have their extra states, and may lie on other ranks
                problem = problem or error
        if problem is not None:
            raise problem


def _load_later(unit: Part, root: nn.Module | None, call: object) -> None:
    """Have a unit that has been read be loaded with all others at the end of a call; at once if there are no others.

    Args:
        root: whose ``load_state_dict`` was called, if it is known.
        call: see ``_Waiting``.
    """
    if root is unit.module:
        root = None
    waiting = None if root is None else root.__dict__.get(WAITING)
    if waiting is None or waiting.call is not call:  # what an earlier call has left, as it failed, is none of ours
        waiting = _Waiting(call)
    waiting.units.append(unit)
    if root is None:
        waiting.load()
        return
    root.__dict__[WAITING] = waiting
    if load_waiting not in root._load_state_dict_post_hooks.values():
        handle = root.register_load_state_dict_post_hook(load_waiting)
        root._load_state_dict_post_hooks.move_to_end(handle.id, last=False)  # type: ignore[attr-defined]


@public_call("load_state_dict")
def load_when_known(wrapper: Any, _incompatible_keys: Any) -> None:
    """Read a unit's part, if a module around it loads a state dict; all units are loaded at the end of that.

    Torch calls it when it has been through all that is inside of the unit, the first of hooks.
    """
    within = wrapper.__dict__.pop("_load_within", None)
    if within is not None:
        part, root, call = within
        part.read()
        _load_later(part, root, call)


@public_call("load_state_dict")
def load_waiting(root: nn.Module, _incompatible_keys: Any) -> None:
    """Collective over the ranks of the units in `root`, when it has loaded a state dict. Load them, all or none.

    A hook that stays, for torch is going through the hooks when it is called.
    """
    waiting = root.__dict__.pop(WAITING, None)
    if waiting is not None:
        waiting.load()


OWN_HOOKS = (load_when_known, load_waiting)
"""Hooks for the time after loading that are this package's."""
