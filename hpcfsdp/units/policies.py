"""The choice of submodules that become units, by a policy."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import nn

from hpcfsdp import _compat
from hpcfsdp.units.options import NOTHING_IGNORED, Ignored

Policy = Callable[..., Any]


def choose_units(root: nn.Module, policy: Any, ignored: Ignored = NOTHING_IGNORED) -> dict[nn.Module, dict[str, Any]]:
    """The submodules of `root` (never `root` itself) that the policy chooses, inner ones before outer ones.

    Args:
        policy: one of torch's policy objects (``ModuleWrapPolicy``, ``CustomPolicy``), or a function
            ``policy(module=, recurse=, nonwrapped_numel=) -> bool`` as for torch's FSDP. It is called with
            ``recurse=True`` to decide whether to enter a module, then with ``recurse=False`` to decide whether to wrap
            it. ``nonwrapped_numel`` counts the elements below it that are in no unit.
        ignored: modules that are never wrapped, and parameters that are not counted.

    Returns:
        Each module with the constructor arguments that the policy gives it.
    """
    if _compat.is_policy_object(policy):
        wanted = _compat.run_wrap_policy(policy, root, set(ignored.modules))
        order = [module for module in _post_order(root) if module in wanted and _has_parameters(module, ignored)]
        return {module: wanted[module] for module in order if module is not root}
    if not callable(policy):
        raise TypeError(f"auto_wrap_policy must be a function or one of torch's wrap policies, not {policy!r}")
    chosen: dict[nn.Module, dict[str, Any]] = {}
    seen: set[nn.Module] = set(ignored.modules)

    def visit(module: nn.Module) -> int:
        """Returns the elements below `module` that chosen units own."""
        numel = sum(param.numel() for param in module.parameters() if param not in ignored.params)
        wrapped = 0
        if not policy(module=module, recurse=True, nonwrapped_numel=numel):
            return wrapped  # skip the module and all inside
        for child in module.children():
            if child not in seen:
                seen.add(child)
                wrapped += visit(child)
        if (
            module is not root
            and _has_parameters(module, ignored)
            and policy(module=module, recurse=False, nonwrapped_numel=numel - wrapped)
        ):
            chosen[module] = {}
            return numel
        return wrapped

    visit(root)
    return chosen


def check_ties(root: nn.Module, units: dict[nn.Module, dict[str, Any]], ignored: Ignored = NOTHING_IGNORED) -> None:
    """Raise a ValueError if two units would own one (tied) parameter: only one of them could gather it."""
    owner: dict[nn.Parameter, tuple[nn.Module, str]] = {}

    def visit(module: nn.Module, prefix: str, unit: nn.Module) -> None:
        for name, param in module.named_parameters(recurse=False):
            if param in ignored.params:
                continue
            first_unit, first_name = owner.setdefault(param, (unit, prefix + name))
            if first_unit is not unit:
                raise ValueError(
                    f"parameters {first_name!r} and {prefix + name!r} are tied but the policy puts them in different "
                    "units: wrap the smallest module that holds both instead, or neither"
                )
        for name, child in module._modules.items():
            if child is not None:
                visit(child, f"{prefix}{name}.", child if child in units else unit)

    visit(root, "", root)


def _has_parameters(module: nn.Module, ignored: Ignored) -> bool:
    return any(param not in ignored.params for param in module.parameters())


def _post_order(root: nn.Module) -> list[nn.Module]:
    found: dict[nn.Module, None] = {}

    def visit(module: nn.Module) -> None:
        for child in module.children():
            if child not in found:
                visit(child)
        found[module] = None

    visit(root)
    return list(found)
