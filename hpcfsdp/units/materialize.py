"""Memory and values for modules built on the meta device; parameters that get no value are an error."""

from collections.abc import Callable, Iterable, Iterator
from typing import Any, NamedTuple

import torch
from torch import nn
from torch.distributed.tensor import DTensor
from torch.overrides import TorchFunctionMode

from hpcfsdp import _compat
from hpcfsdp.errors import EngineError
from hpcfsdp.reshard.sharded_tensors import fill_block
from hpcfsdp.units.own import NOTHING_IGNORED, Ignored, is_unit

_WITHOUT_VALUES = {torch.empty, torch.empty_like, torch.empty_permuted, torch.empty_strided}
_WITHOUT_VALUES |= {torch.Tensor.new_empty, torch.Tensor.new_empty_strided}
"""Functions that return uninitialised memory."""

_INTEGERS = (torch.int16, torch.int32, torch.int64)
_SENTINELS = {dtype: int.from_bytes(b"\xa5" * dtype.itemsize, "little", signed=True) for dtype in _INTEGERS}
"""Fill uninitialised integers: unlikely initial values."""


class MetaTensor(NamedTuple):
    """A parameter or buffer that was on the meta device, with its module and name there."""

    fqn: str
    module: nn.Module
    name: str
    meta: torch.Tensor

    @property
    def now(self) -> torch.Tensor | None:
        """The tensor there now."""
        return self.module._parameters.get(self.name, self.module._buffers.get(self.name))


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
    integers and ``bool`` cannot be recognised: they are zero if not initialised.
    Unless `values_count`, another rank's values follow, and memory is enough. Parameters that are ignored alone do not
    make a module an owner. The FQNs of what has been materialised are returned.
    """
    if param_init_fn is not None and not callable(param_init_fn):
        raise ValueError(f"param_init_fn must be a function of a module, not {type(param_init_fn).__name__}")
    found = tensors_on_meta(module, ignored)
    if not found:
        return []
    with torch.no_grad():
        if param_init_fn is None:
            _reset(found, device, values_count)
        else:
            _call(param_init_fn, found, [inner for _, inner in reached(module, ignored)])
    how = "param_init_fn" if param_init_fn is not None else "reset_parameters()"
    now = [(each.fqn, each.now) for each in found if each.now is not None]
    if on_meta := [name for name, tensor in now if tensor.is_meta]:
        raise ValueError(f"{how} left tensors on the meta device: {', '.join(on_meta)}; give them memory and values")
    if empty := [name for name, tensor in now if values_count and _is_empty(tensor)]:
        raise ValueError(
            f"{how} did not initialise, or only in part, or set to NaN: {', '.join(empty)}; every parameter and "
            "buffer of a module built on the meta device needs a value"
        )
    return [each.fqn for each in found]


def tensors_on_meta(root: nn.Module, ignored: Ignored = NOTHING_IGNORED) -> list[MetaTensor]:
    """Not collective. Return what is on the meta device below `root`, outside of units inside; see ``materialize``."""
    found: list[MetaTensor] = []
    for path, module in reached(root, ignored):
        states = [
            MetaTensor(f"{path}.{name}" if path else name, module, name, tensor)
            for registry in (module._parameters, module._buffers)
            for name, tensor in registry.items()
            if tensor is not None and tensor.is_meta
        ]
        # The program initialises a module that owns ignored parameters alone.
        if any(each.meta not in ignored.params for each in states):
            found += states
    return found


def reached(root: nn.Module, ignored: Ignored) -> Iterator[tuple[str, nn.Module]]:
    """Return the FQNs and modules outside of units inside, inner ones before outer ones, each once."""
    seen: set[nn.Module] = set()

    def visit(module: nn.Module, fqn: str) -> Iterator[tuple[str, nn.Module]]:
        if module in seen or module in ignored.modules or (module is not root and is_unit(module)):
            return
        seen.add(module)
        for name, child in module.named_children():
            yield from visit(child, f"{fqn}.{name}" if fqn else name)
        yield fqn, module

    return visit(root, "")


def _reset(found: list[MetaTensor], device: torch.device, values_count: bool) -> None:
    """Allocate memory, then call the modules' own methods."""
    owners: dict[nn.Module, list[MetaTensor]] = {}
    for each in found:
        owners.setdefault(each.module, []).append(each)
    methods = {
        each: getattr(each, "reset_parameters", None) or getattr(each, "_reset_parameters", None) for each in owners
    }
    lacking = [
        f"{type(owner).__name__} {own[0].fqn.rpartition('.')[0]!r} ({', '.join(each.name for each in own)})"
        for owner, own in owners.items()
        if methods[owner] is None
    ]
    if lacking and values_count:
        raise TypeError(
            f"modules on the meta device without a method reset_parameters(): {', '.join(lacking)}; give them one that "
            "initialises their own parameters and buffers, or pass param_init_fn"
        )
    made: dict[int, torch.Tensor] = {}  # by the id of the meta tensor: a tied parameter is made once
    for _, module, name, meta in found:
        if id(meta) not in made:
            made[id(meta)] = _with_memory(meta, device)
        setattr(module, name, made[id(meta)])  # not in the registry: an LSTM keeps a list too
    ties = _Ties(found)
    for method in methods.values():
        if method is not None:
            method()
            ties.register_new()
    ties.restore_first_values()
    distributed: dict[int, torch.Tensor] = {}
    for each in found:
        if isinstance(each.meta, DTensor):
            if id(each.meta) not in distributed:
                block = torch.empty_like(each.meta.detach(), device=each.now.device)
                fill_block(block, each.now)
                distributed[id(each.meta)] = _like(each.meta, block)
            setattr(each.module, each.name, distributed[id(each.meta)])


def _with_memory(meta: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Return the whole parameter or buffer on `device`, filled as uninitialised."""
    if isinstance(meta, DTensor):
        tensor = torch.empty(meta.shape, dtype=meta.dtype, device=device)
        _fill(tensor)
        return nn.Parameter(tensor, meta.requires_grad) if isinstance(meta, nn.Parameter) else tensor
    tensor = torch.empty_like(meta.detach(), device=device)
    _fill(tensor)
    return _like(meta, tensor)


def _like(meta: torch.Tensor, tensor: torch.Tensor) -> torch.Tensor:
    """`tensor` with the class and the attributes of the meta tensor."""
    if isinstance(meta, nn.Parameter):
        tensor = nn.Parameter.__new__(type(meta), tensor, meta.requires_grad)
    else:
        tensor.requires_grad_(meta.requires_grad)
    tensor.__dict__.update(meta.__dict__)
    return tensor


def _call(param_init_fn: Callable[[nn.Module], Any], found: list[MetaTensor], reached: list[nn.Module]) -> None:
    """Call the program's function, and register the tensors that it makes in all places of those they replace."""
    ties = _Ties(found)
    reach = set(reached)

    def visit(module: nn.Module) -> None:
        reach.discard(module)
        if any(each.is_meta for each in _tensors_of([module]) or _tensors_of(reach.intersection(module.modules()))):
            param_init_fn(module)
            ties.register_new()
        for child in module.children():
            if child in reach:
                visit(child)

    with FillEmpty():
        visit(reached[-1])
    ties.restore_first_values()


def _tensors_of(modules: Iterable[nn.Module]) -> list[torch.Tensor]:
    registries = (registry for module in modules for registry in (module._parameters, module._buffers))
    return [tensor for registry in registries for tensor in registry.values() if tensor is not None]


class _Ties:
    """Parameters and buffers that were registered in several places while they were on the meta device."""

    def __init__(self, found: list[MetaTensor]) -> None:
        places: dict[int, list[tuple[nn.Module, str]]] = {}
        for _, module, name, meta in found:
            places.setdefault(id(meta), []).append((module, name))
        self._places = [where for where in places.values() if len(where) > 1]
        self._now = [getattr(module, name) for (module, name), *_ in self._places]
        self._first_values: list[torch.Tensor | None] = [None] * len(self._places)

    def register_new(self) -> None:
        """Register a tensor that is new in one place in all places."""
        for number, where in enumerate(self._places):
            held = [getattr(module, name, None) for module, name in where]
            changed = [tensor for tensor in held if tensor is not None and tensor is not self._now[number]]
            if changed:
                self._now[number] = changed[-1]
                for module, name in where:
                    setattr(module, name, changed[-1])
            now = self._now[number]
            if self._first_values[number] is None and not now.is_meta and not _is_empty(now):
                self._first_values[number] = now.detach().clone()

    def restore_first_values(self) -> None:
        """Restore the values from the first module: of ``head.weight = embed.weight`` those from the embedding."""
        for now, first in zip(self._now, self._first_values, strict=True):
            if first is not None:
                now.copy_(first)


def refuse_uninitialised(found: Iterable[MetaTensor]) -> None:
    """Not collective. Refuse parameters and buffers that are on the meta device, or that ``FillEmpty`` has filled."""
    for each in found:
        tensor = each.now
        if tensor is not None and tensor.is_meta:
            raise EngineError(
                f"{each.fqn!r} is still on the meta device: call to_empty() of the whole model, and initialise it "
                "before the first forward"
            )
        if tensor is not None and _is_empty(tensor):
            raise EngineError(
                f"{each.fqn!r} has memory, but no value: to_empty() gives none, and buffers with persistent=False are "
                "in no checkpoint. Initialise it before the first forward, for instance by the module's "
                "reset_parameters()"
            )


class FillEmpty(TorchFunctionMode):
    """While it is active, uninitialised memory is filled with NaN, or with an unlikely integer."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if func in _WITHOUT_VALUES and isinstance(result, torch.Tensor):
            _fill(result)
        return result


def _fill(tensor: torch.Tensor) -> None:
    """Fill a tensor without values, so that ``_is_empty`` knows it."""
    local = _compat.local_of(tensor).detach()
    if local.is_meta or local.layout is not torch.strided:
        return
    is_integer = not (local.is_floating_point() or local.is_complex())
    with torch.no_grad():
        if is_integer and local.dtype not in _SENTINELS:
            local.zero_()  # `fill_` knows no integers of less than a byte
        else:
            local.fill_(_SENTINELS[local.dtype] if is_integer else float("nan"))


def _is_empty(tensor: torch.Tensor) -> bool:
    """Return whether a tensor is uninitialised, at least in part."""
    local = _compat.local_of(tensor).detach()  # reading more would be collective
    if not local.numel() or local.layout is not torch.strided:
        return False
    if local.is_complex():
        return bool(torch.view_as_real(local).isnan().any())
    if local.is_floating_point():
        wide = local if local.dtype.itemsize > 1 else local.float()  # torch has hardly any arithmetic for fp8
        return bool(wide.isnan().any())
    return local.dtype in _SENTINELS and bool((local == _SENTINELS[local.dtype]).all())
