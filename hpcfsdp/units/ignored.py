"""The modules, parameters and buffers that a wrapper ignores, from the user's arguments."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from hpcfsdp import _compat
from hpcfsdp.units import managed
from hpcfsdp.units.flat_unit import unit_of, units_in
from hpcfsdp.units.own import Ignored


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | Ignored | None,
) -> Ignored:
    """What the wrapper of `root` ignores. The lists may contain modules and parameters outside of `root`.

    `root` also ignores what units within `root` ignore, wherever it is tied. Units inside of an ignored module stay
    units.

    Args:
        ignored_states: instead of `ignored_modules`: modules, or parameters, or the ``Ignored`` of an outer wrapper.

    Raises:
        TypeError: an entry is no module (or parameter), or the argument is not iterable.
        ValueError: both arguments are given, modules and parameters are mixed, or an entry is a unit.

    Warns:
        UserWarning: `root` itself is ignored, or an entry is sharded by a unit inside already, and stays so.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states were both given: pass ignored_states alone")
    others = [unit.ignored for unit in units_in(root)]
    if isinstance(ignored_states, Ignored):
        others.append(ignored_states)
        ignored_states = None
    others.append(replicated_in(root))
    modules, params = _entries("ignored_modules", ignored_modules, (nn.Module,)), []
    for entry in _entries("ignored_states", ignored_states, (nn.Parameter, nn.Module)):
        (modules if isinstance(entry, nn.Module) else params).append(entry)
    if ignored_states is not None and modules and params:
        raise ValueError(
            f"ignored_states holds {len(modules)} module(s) and {len(params)} parameter(s): give either modules or "
            "parameters"
        )
    before = Ignored(
        frozenset().union(*(other.modules for other in others)),
        frozenset().union(*(other.params for other in others)),
        frozenset().union(*(other.buffers for other in others)),
    )
    modules, params = _not_sharded(root, modules, params, before)
    inside = dict.fromkeys(found for module in modules for found in _below(module))
    if root in inside:
        warnings.warn(
            f"the {type(root).__name__} to be wrapped is among the ignored modules itself: none of it is sharded",
            stacklevel=3,
        )
    return Ignored(
        before.modules.union(inside),
        before.params.union(params, _own(inside, "_parameters")),
        before.buffers.union(_own(inside, "_buffers")),
    )


def replicated_in(root: nn.Module, params: Iterable[nn.Parameter] = ()) -> Ignored:
    """What is left alone: `params`, and modules in `root` under torch's ``replicate``, which has its own reductions."""
    outermost = [module for module in root.modules() if _compat.is_replicated(module)]
    modules = dict.fromkeys(found for module in outermost for found in _below(module))
    return Ignored(
        frozenset(modules), frozenset([*params, *_own(modules, "_parameters")]), frozenset(_own(modules, "_buffers"))
    )


def _not_sharded(
    root: nn.Module,
    modules: list[nn.Module],
    params: list[nn.Parameter],
    before: Ignored,
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """The entries without those that units within `root` have sharded; these stay sharded, as in torch's FSDP."""
    for module in modules:
        if unit_of(module) is not None:
            raise ValueError(
                f"an ignored {type(module).__name__} is already sharded: ignore modules where that one is wrapped, "
                "or wrap the outer module with auto_wrap_policy instead"
            )
    wrappers = [unit.wrapper for unit in units_in(root)]
    sharded: set[Any] = {module for wrapper in wrappers for module in wrapper.modules()} - before.modules
    sharded |= {param for wrapper in wrappers for param in wrapper.parameters()}
    sharded |= {param for param in params if managed.unit_fqn(param) is not None}
    sharded -= before.params
    left = [entry for entry in (*modules, *params) if entry in sharded]
    if left:
        one = left[0]
        what = f"a {type(one).__name__}" if isinstance(one, nn.Module) else f"a parameter of shape {tuple(one.shape)}"
        warnings.warn(
            f"{len(left)} of the ignored modules or parameters (the first: {what}) are already sharded by a unit "
            "inside, and stay sharded: ignore them where that unit is wrapped",
            stacklevel=4,
        )
    return [entry for entry in modules if entry not in sharded], [entry for entry in params if entry not in sharded]


def _entries(argument: str, given: Any, kinds: tuple[type, ...]) -> list[Any]:
    """The entries of an argument as a list. It may be a generator."""
    wanted = " or ".join(f"torch.nn.{kind.__name__}" for kind in kinds)
    if given is None:
        return []
    try:
        entries = list(given)
    except TypeError:
        raise TypeError(f"{argument} must be a list of {wanted}, not {type(given).__name__}") from None
    for place, entry in enumerate(entries):
        if not isinstance(entry, kinds):
            shown = repr(entry) if isinstance(entry, (str, int, float, type)) else "one"
            raise TypeError(f"{argument}[{place}] must be a {wanted}, not {shown} of type {type(entry).__name__}")
    return entries


def _below(module: nn.Module) -> Iterator[nn.Module]:
    yield module
    for child in module.children():
        if unit_of(child) is None:
            yield from _below(child)


def _own(modules: Iterable[nn.Module], registry: str) -> list[Any]:
    return [tensor for module in modules for tensor in getattr(module, registry).values() if tensor is not None]
