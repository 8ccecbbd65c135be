"""Memory and values for modules built on the meta device; parameters that get no value are an error."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hpcfsdp.errors import EngineError
from hpcfsdp.reshard.sharded_tensors import fill_block
from hpcfsdp.units.options import NOTHING_IGNORED, Ignored
from hpcfsdp.units.own import is_unit

_WITHOUT_VALUES = {
    torch.empty,
    torch.empty_like,
    torch.empty_permuted,
    torch.empty_strided,
    torch.Tensor.new_empty,
    torch.Tensor.new_empty_strided,
}
"""Functions that return uninitialised memory."""

_SENTINEL_BYTE = 0xA5
"""Marks integers of two bytes and more as uninitialised: an unlikely initial value."""


@dataclass(frozen=True)
class _Owner:
    """A module that owns parameters or buffers on the meta device.

    Attributes:
        states: registry ("_parameters" or "_buffers"), name, and the tensor on the meta device.
    """

    fqn: str
    module: nn.Module
    states: tuple[tuple[str, str, torch.Tensor], ...]

    def names(self) -> Iterator[tuple[str, torch.Tensor | None]]:
        """FQN of each, and the tensor there now."""
        prefix = f"{self.fqn}." if self.fqn else ""
        for registry, name, _ in self.states:
            yield prefix + name, getattr(self.module, registry).get(name)


def materialize(
    module: nn.Module,
    *,
    device: torch.device,
    param_init_fn: Callable[[nn.Module], Any] | None,
    ignored: Ignored = NOTHING_IGNORED,
    values_count: bool = True,
) -> list[str]:
    """Give memory and values to parameters and buffers on the meta device below `module`, outside of units inside.

    Without `param_init_fn` each module that owns some gets memory on `device`, and its ``reset_parameters()`` (or
    ``_reset_parameters``) is called, inner modules before outer ones. Modules are built in that order, so the same seed
    mostly gives the values of a module built without the meta device. While these methods run a ``DTensor`` is whole;
    then this rank's block is kept. So with one seed on all ranks the values are those of a single process.

    `param_init_fn` is called with each module that owns some, and with each that owns no tensor but holds such modules,
    outer modules before inner ones, as by torch's FSDP. It gives memory and values to the module's own parameters and
    buffers, for example with ``module.to_empty(device=..., recurse=False)`` first. It finds DTensors.

    A parameter or buffer registered in several places stays one, with the values from the first of these modules.
    Uninitialised memory is an error: before the initialisation all memory holds NaN, afterwards none may. One-byte
    integers and ``bool`` cannot be marked: they are zero if not initialised.

    Args:
        ignored: modules that are not entered, and parameters that alone do not make a module an owner.
        values_count: False if another rank's values follow (``sync_module_states``): then memory is enough.

    Returns:
        The FQNs, within `module`, of the materialised parameters and buffers.

    Raises:
        TypeError: without `param_init_fn`, modules that have no ``reset_parameters``.
        ValueError: a tensor is still on the meta device, or has no value; or `param_init_fn` cannot be called.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"param_init_fn must be a function of a module, not {type(param_init_fn).__name__}")
    reached = list(_reached(module, ignored))
    owners = [owner for fqn, found in reached if (owner := _owner(fqn, found, ignored)) is not None]
    if not owners:
        return []
    with torch.no_grad():
        if param_init_fn is None:
            _reset(owners, device, values_count)
        else:
            _call(param_init_fn, owners, [found for _, found in reached])
        _check(owners, values_count, param_init_fn)
    return list(dict(name for owner in owners for name in owner.names()))


def _reached(root: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """The FQNs and modules outside of units inside, inner ones before outer ones, each once."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored.modules or (module is not root and is_unit(module)):
            return
        seen.add(module)
        for name, child in module.named_children():
            yield from visit(child, f"{fqn}.{name}" if fqn else name)
        yield fqn, module

    return visit(root, "")


def _owner(fqn: str, module: nn.Module, ignored: Ignored) -> _Owner | None:
    states = tuple(
        (registry, name, tensor)
        for registry in ("_parameters", "_buffers")
        for name, tensor in getattr(module, registry).items()
        if tensor is not None and tensor.is_meta
    )
    # The user initialises a module that owns ignored parameters alone.
    if all(tensor in ignored.params for _, _, tensor in states):
        return None
    return _Owner(fqn, module, states)


def _reset(owners: list[_Owner], device: torch.device, values_count: bool) -> None:
    """Allocate memory, then call the modules' own methods."""
    methods = [
        getattr(owner.module, "reset_parameters", None) or getattr(owner.module, "_reset_parameters", None)
        for owner in owners
    ]
    lacking = [owner for owner, method in zip(owners, methods, strict=True) if method is None]
    if lacking and values_count:
        shown = ", ".join(
            f"{type(owner.module).__name__} {owner.fqn!r} ({', '.join(name for _, name, _ in owner.states)})"
            for owner in lacking
        )
        raise TypeError(
            f"modules on the meta device without a method reset_parameters(): {shown}; give them one that initialises "
            "their own parameters and buffers, or pass param_init_fn"
        )
    made: dict[int, torch.Tensor] = {}  # by the id of the meta tensor: a tied parameter is made once
    for owner in owners:
        for _, name, meta in owner.states:
            if id(meta) not in made:
                made[id(meta)] = _with_memory(meta, device)
            setattr(owner.module, name, made[id(meta)])  # not in the registry: an LSTM keeps a list too
    ties = _Ties(owners)
    for method in methods:
        if method is not None:
            method()
            ties.renew()
    ties.settle()
    _distribute(owners)


def _distribute(owners: list[_Owner]) -> None:
    """Replace the whole tensors by DTensors."""
    made: dict[int, torch.Tensor] = {}
    for owner in owners:
        for registry, name, meta in owner.states:
            if isinstance(meta, DTensor):
                if id(meta) not in made:
                    whole = getattr(owner.module, registry)[name]
                    block = torch.empty_like(meta.detach(), device=whole.device)
                    fill_block(block, whole)
                    made[id(meta)] = _like(meta, block)
                setattr(owner.module, name, made[id(meta)])


def _with_memory(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """The whole parameter or buffer on `device`, marked as uninitialised."""
    if isinstance(meta, DTensor):
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        _mark(tensor)
        return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor
    tensor = torch.empty_like(meta.detach(), device=device)
    _mark(tensor)
    return _like(meta, tensor)


def _like(meta: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the class and the attributes of the meta tensor."""
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter.__new__(type(meta), tensor, meta.requires_grad)
    else:
        tensor.requires_grad_(meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    return tensor


def _call(param_init_fn: Callable[[nn.Module], Any], owners: list[_Owner], reached: list[nn.Module]) -> None:
    """Call the user's function, and register the tensors that it makes in all places of those they replace."""
    ties = _Ties(owners)
    reach = set(reached)

    def visit(module: nn.Module) -> None:
        reach.discard(module)
        if _needs_init(module, reach):
            param_init_fn(module)
            ties.renew()
        for child in module.children():
            if child in reach:
                visit(child)

    with MarkEmpty():
        visit(reached[-1])
    ties.settle()


def _needs_init(module: nn.Module, inner: set[nn.Module]) -> bool:
    """Whether to call the user's function with a module."""
    own = _tensors_of([module])
    return any(tensor.is_meta for tensor in own or _tensors_of(child for child in module.modules() if child in inner))


def _tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    registries = (registry for module in modules for registry in (module._parameters, module._buffers))
    return [tensor for registry in registries for tensor in registry.values() if tensor is not None]


class _Ties:
    """Parameters and buffers that were registered in several places while they were on the meta device."""

    def __init__(self, owners: list[_Owner]) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for owner in owners:
            for _, name, meta in owner.states:
                places.setdefault(id(meta), []).append((owner.module, name))
        self._places = [where for where in places.values() if len(where) > 1]
        self._now = [getattr(module, name) for (module, name), *_ in self._places]
        self._first_values: list[torch.Tensor | None] = [None] * len(self._places)

    def renew(self) -> None:
        """Register a tensor that is new in one place in all places."""
        for number, where in enumerate(self._places):
            held = [getattr(module, name, None) for module, name in where]
            changed = [tensor for tensor in held if tensor is not None and tensor is not self._now[number]]
            if changed:
                self._now[number] = changed[-1]
                for module, name in where:
                    setattr(module, name, changed[-1])
            now = self._now[number]
            if self._first_values[number] is None and not now.is_meta and not _is_marked(now):
                self._first_values[number] = now.detach().clone()

    def settle(self) -> None:
        """Restore the values from the first module: of ``head.weight = embed.weight`` those from the embedding."""
        for now, first in zip(self._now, self._first_values, strict=True):
            if first is not None:
                now.copy_(first)


def states_on_meta(root: nn.Module) -> list[tuple[str, nn.Module, str]]:
    """Parameters and buffers on the meta device below `root`, outside of units inside: name, module, name there."""
    return [
        (f"{path}.{name}" if path else name, module, name)
        for path, module in _reached(root, NOTHING_IGNORED)
        for registry in (module._parameters, module._buffers)
        for name, tensor in registry.items()
        if tensor is not None and tensor.is_meta
    ]


def refuse_uninitialised(states: Iterable[tuple[str, nn.Module, str]]) -> None:
    """Not collective. Refuse parameters and buffers that are on the meta device, or that ``MarkEmpty`` has marked.

    Raises:
        EngineError: names the first.
    """
    for fqn, module, name in states:
        tensor = module._parameters.get(name, module._buffers.get(name))
        if tensor is not None and tensor.is_meta:
            raise EngineError(
                f"{fqn!r} is still on the meta device: call to_empty() of the whole model, and initialise it before "
                "the first forward"
            )
        if tensor is not None and _is_marked(tensor):
            raise EngineError(
                f"{fqn!r} has memory, but no value: to_empty() gives none, and buffers with persistent=False are in no "
                "checkpoint. Initialise it before the first forward, for instance by the module's reset_parameters()"
            )


class MarkEmpty(TorchFunctionMode):
    """While it is active, uninitialised memory is marked."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUES and isinstance(result, torch.Tensor):
            _mark(result)
        return result


def _mark(tensor: torch.Tensor) -> None:
    """Mark a tensor as uninitialised."""
    local = _local(tensor)
    if local.is_meta or local.layout is not torch.strided:
        return
    with torch.no_grad():
        if local.is_floating_point() or local.is_complex():
            local.fill_(float("nan"))
        elif _has_mark(local):
            local.fill_(_sentinel(local.dtype))
        else:
            local.zero_()


def _is_marked(tensor: torch.Tensor) -> bool:
    """Whether a tensor is uninitialised, at least in part."""
    local = _local(tensor)
    if not local.numel() or local.layout is not torch.strided:
        return False
    if local.is_complex():
        return bool(torch.view_as_real(local).isnan().any())
    if local.is_floating_point():
        wide = local if local.dtype.itemsize > 1 else local.float()  # torch has hardly any arithmetic for fp8
        return bool(wide.isnan().any())
    return _has_mark(local) and bool((local == _sentinel(local.dtype)).all())


def _has_mark(tensor: torch.Tensor) -> bool:
    return tensor.dtype in (torch.int16, torch.int32, torch.int64)


def _sentinel(dtype: torch.dtype) -> int:
    return int.from_bytes(bytes([_SENTINEL_BYTE]) * dtype.itemsize, "little", signed=True)


def _local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's block; reading more would be collective."""
    return tensor.to_local() if isinstance(tensor, DTensor) else tensor.detach()


def _check(owners: list[_Owner], values_count: bool, param_init_fn: Any) -> None:
    """Refuse tensors that are still on the meta device, or uninitialised."""
    found = [named for owner in owners for named in owner.names()]
    how = "param_init_fn" if param_init_fn is not None else "reset_parameters()"
    on_meta = [name for name, tensor in found if tensor is not None and tensor.is_meta]
    if on_meta:
        raise ValueError(f"{how} left tensors on the meta device: {', '.join(on_meta)}; give them memory and values")
    empty = [name for name, tensor in found if tensor is not None and _is_marked(tensor)] if values_count else []
    if empty:
        raise ValueError(
            f"{how} did not initialise, or only in part, or set to NaN: {', '.join(empty)}; every parameter and "
            "buffer of a module built on the meta device needs a value"
        )
