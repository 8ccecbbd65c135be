"""The arguments of ``FullyShardedDataParallel``: checked before anything is changed; what is ignored; policies."""

import warnings
from collections.abc import Iterable
from typing import Any

import torch
from torch import nn
from torch.distributed.fsdp import BackwardPrefetch, CPUOffload, FSDPModule, MixedPrecision

from hpcfsdp import _compat, accelerator
from hpcfsdp.units.flat_unit import unit_of, units_in
from hpcfsdp.units.materialize import reached
from hpcfsdp.units.mixed_precision import modules_outside
from hpcfsdp.units.own import NOTHING_IGNORED, Ignored, unit_fqn
from hpcfsdp.units.unit_mesh import UnitMesh
from hpcfsdp.world import current_world


def check_module(module: Any) -> None:
    """Refuse an object that is no module, or a module that is sharded already."""
    if not isinstance(module, nn.Module):
        raise TypeError(f"FullyShardedDataParallel wraps a torch.nn.Module, not {type(module).__name__}")
    if unit_of(module) is not None:
        raise ValueError("the module is already a FullyShardedDataParallel: wrap a module once")
    for name, inner in module.named_modules():
        if isinstance(inner, FSDPModule):
            what = f"{name!r}, a {type(inner).__name__}," if name else f"the {type(inner).__name__}"
            raise ValueError(
                f"{what} is already sharded with torch's fully_shard: shard a model with either fully_shard or hpcfsdp"
            )


def check_types(cpu_offload: Any, mixed_precision: Any, backward_prefetch: Any) -> None:
    """Refuse values that are not torch's configuration classes, and dtypes that are not floating-point."""
    for name, value, kind in (
        ("cpu_offload", cpu_offload, CPUOffload),
        ("mixed_precision", mixed_precision, MixedPrecision),
        ("backward_prefetch", backward_prefetch, BackwardPrefetch),
    ):
        if value is not None and not isinstance(value, kind):
            raise TypeError(f"{name} must be a {kind.__name__} or None, not {value!r}")
    for name in ("param_dtype", "reduce_dtype", "buffer_dtype"):
        dtype = getattr(mixed_precision, name, None)
        if dtype is not None and not (isinstance(dtype, torch.dtype) and dtype.is_floating_point):
            raise TypeError(f"mixed_precision: {name} must be a floating-point torch.dtype or None, not {dtype!r}")


def check_readers(module: nn.Module) -> None:
    """Refuse units inside of modules that read their children's parameters without calling the children."""
    for name, reader in module.named_modules():
        reads = isinstance(reader, (nn.MultiheadAttention, nn.TransformerEncoderLayer))
        inside = [child for child, m in reader.named_modules() if unit_of(m) is not None] if reads else []
        if inside:
            kind, where = type(reader).__name__, f" {name!r}" if name else ""
            raise ValueError(
                f"{inside[0]!r} is a unit inside of the {kind}{where}, which reads its children's parameters without "
                f"calling the children, and would read NaN: wrap the whole {kind}, for example with ModuleWrapPolicy"
            )


def target_device(mesh: UnitMesh, device_id: int | torch.device | None) -> torch.device | None:
    """Return the device to compute on, None for that of the module."""
    if isinstance(device_id, int):
        if device_id >= accelerator.device_count():
            raise ValueError(f"device_id={device_id}: this process sees {accelerator.device_count()} device(s)")
        return torch.device(accelerator.device_type(), device_id)
    if device_id is not None:
        return torch.device(device_id)
    ranks, world = mesh.dtensor_ranks, current_world()
    by_default = accelerator.is_accelerator(ranks.device) or (world is not None and ranks is world.communicator)
    return ranks.device if by_default else None


def resolve_ignored(
    root: nn.Module,
    ignored_modules: Iterable[nn.Module] | None,
    ignored_states: Iterable[nn.Parameter] | Iterable[nn.Module] | Ignored | None,
) -> Ignored:
    """Return what the wrapper of `root` ignores. The lists may contain modules and parameters outside of `root`.

    `root` also ignores what units within `root` ignore, wherever it is tied. Units inside of an ignored module stay
    units. `ignored_states` may be the ``Ignored`` of an outer wrapper.
    """
    if ignored_modules is not None and ignored_states is not None:
        raise ValueError("ignored_modules and ignored_states were both given: pass ignored_states alone")
    others = [replicated_in(root), *(unit.options.ignored for unit in units_in(root))]
    if isinstance(ignored_states, Ignored):
        others.append(ignored_states)
        ignored_states = None
    modules, params = _entries("ignored_modules", ignored_modules, (nn.Module,)), []
    for entry in _entries("ignored_states", ignored_states, (nn.Parameter, nn.Module)):
        (modules if isinstance(entry, nn.Module) else params).append(entry)
    if ignored_states is not None and modules and params:
        raise ValueError(
            f"ignored_states holds {len(modules)} module(s) and {len(params)} parameter(s): give either modules or "
            "parameters"
        )
    before = _union(others)
    modules, params = _not_sharded(root, modules, params, before)
    given = _with_tensors(modules, params)
    if root in given.modules:
        warnings.warn(
            f"the {type(root).__name__} to be wrapped is among the ignored modules itself: none of it is sharded",
            stacklevel=3,
        )
    return _union([before, given])


def replicated_in(root: nn.Module, params: Iterable[nn.Parameter] = ()) -> Ignored:
    """Return what is left alone: `params`, and modules in `root` under torch's ``replicate``, which reduces itself."""
    return _with_tensors((module for module in root.modules() if _compat.is_replicated(module)), params)


def _union(parts: Iterable[Ignored]) -> Ignored:
    return Ignored(*(frozenset().union(*kind) for kind in zip(*(vars(part).values() for part in parts), strict=True)))


def _with_tensors(roots: Iterable[nn.Module], params: Iterable[nn.Parameter]) -> Ignored:
    """Return `params`, and all modules from `roots` down to units, with their parameters and buffers."""
    modules = frozenset(found for root in roots for found in modules_outside(root))
    own = ([each for module in modules for each in vars(module)[kind].values()] for kind in ("_parameters", "_buffers"))
    kept, buffers = (frozenset(each for each in tensors if each is not None) for tensors in own)
    return Ignored(modules, kept.union(params), buffers)


def _not_sharded(
    root: nn.Module, modules: list[nn.Module], params: list[nn.Parameter], before: Ignored
) -> tuple[list[nn.Module], list[nn.Parameter]]:
    """Return the entries without those that units within `root` have sharded; these stay so, as in torch's FSDP."""
    for module in modules:
        if unit_of(module) is not None:
            raise ValueError(
                f"an ignored {type(module).__name__} is already sharded: ignore modules where that one is wrapped, "
                "or wrap the outer module with auto_wrap_policy instead"
            )
    wrappers = [unit.wrapper for unit in units_in(root)]
    sharded: set[Any] = {module for wrapper in wrappers for module in wrapper.modules()} - before.modules
    sharded |= {param for wrapper in wrappers for param in wrapper.parameters()}
    sharded |= {param for param in params if unit_fqn(param) is not None}
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
    """Return the entries of an argument as a list. It may be a generator."""
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


def choose_units(root: nn.Module, policy: Any, ignored: Ignored = NOTHING_IGNORED) -> dict[nn.Module, dict[str, Any]]:
    """Return the submodules of `root` (never `root` itself) that the policy chooses, with their arguments, inner first.

    Args:
        policy: one of torch's policy objects (``ModuleWrapPolicy``, ``CustomPolicy``), or a function
            ``policy(module=, recurse=, nonwrapped_numel=) -> bool`` as for torch's FSDP. It is called with
            ``recurse=True`` to decide whether to enter a module, then with ``recurse=False`` to decide whether to wrap
            it. ``nonwrapped_numel`` counts the elements below it that are in no unit.
        ignored: modules that are never wrapped, and parameters that are not counted.
    """
    wanted = _compat.run_wrap_policy(policy, root, set(ignored.modules))
    if wanted is not None:
        order = [module for _, module in reached(root, NOTHING_IGNORED) if module is not root]
        return {module: wanted[module] for module in order if module in wanted and _has_parameters(module, ignored)}
    if not callable(policy):
        raise TypeError(f"auto_wrap_policy must be a function or one of torch's wrap policies, not {policy!r}")
    chosen: dict[nn.Module, dict[str, Any]] = {}
    seen: set[nn.Module] = set(ignored.modules)

    def visit(module: nn.Module) -> int:
        """Return the elements below `module` that chosen units own."""
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
