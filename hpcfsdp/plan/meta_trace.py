"""A step of a model on the meta device: which units run, how many bytes tensors take meanwhile, how many operations.

The modules themselves run, with tensors that have shapes and no memory. What autograd saves is therefore counted and
not estimated. Two things differ from a device: kernels that need scratch memory do not show it, and attention and
RMSNorm are counted as fused kernels, as accelerators have them: without a matrix of scores or copies in float32.
"""

from __future__ import annotations

import contextlib
import functools
import weakref
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils.checkpoint import checkpoint
from torch.utils.flop_counter import flop_registry
from torch.utils.hooks import RemovableHandle

from hpcfsdp import _compat
from hpcfsdp.engine.nested import apply_to_tensors, tensors_in
from hpcfsdp.errors import UsageError
from hpcfsdp.params.layout import round_up
from hpcfsdp.plan.traced_step import EventKind, Param, PlannedUnit, StepEvent, TracedStep

ALLOCATED_BYTES = 512  # allocators of accelerators give multiples of it


def trace(
    model: nn.Module,
    units: Sequence[nn.Module],
    loss_of: Callable[[nn.Module], torch.Tensor],
    *,
    name: str,
    tokens: int,
    compute: torch.dtype | None = None,
    checkpointed: bool = False,
    fused: bool = True,
) -> TracedStep:
    """Run a forward and a backward of a model on the meta device. Its parameters take the dtype `compute`.

    `model` is made for this call, and a unit itself; the other `units` are modules inside of it. `loss_of` calls the
    model, and returns its loss. With `checkpointed`, each of `units` computes its forward again in the backward; with
    `fused`, attention and RMSNorm of ``torch.nn.functional`` count as fused kernels, and not as single operations.
    """
    modules = [*dict.fromkeys(units), model]
    planned, owned = describe_units(model, modules)
    if compute is not None:
        cast_floating(model, compute)
        cast = functools.partial(apply_to_tensors, functools.partial(_cast, compute))  # as the engine does
        model.register_forward_pre_hook(lambda _, args, kwargs: cast((args, kwargs)), with_kwargs=True)
    log = _EventLog(model.parameters())
    outer = {i for i, module in enumerate(modules) if not set(module.modules()).isdisjoint(modules[:i])}
    hooks = [_UnitEvents(index, params, log, index in outer) for index, params in enumerate(owned)]
    hooked = [(module, unit) for module, unit in zip(modules, hooks, strict=True) if owned[unit.index]]
    with contextlib.ExitStack() as stack:
        for module in modules[:-1] if checkpointed else ():
            module.forward = functools.partial(
                checkpoint, module.forward, use_reentrant=False, preserve_rng_state=False
            )
            stack.callback(delattr, module, "forward")
        for module, unit in hooked:
            for hook in unit.attach(module):
                stack.callback(hook.remove)
        # Not a mode of torch: these do not reach what a backward computes once more.
        kernels = {"scaled_dot_product_attention": functools.partial(_attention, log.meter), "rms_norm": _rms_norm}
        for name_of_kernel, kernel in kernels.items() if fused else ():
            stack.callback(setattr, F, name_of_kernel, getattr(F, name_of_kernel))
            setattr(F, name_of_kernel, kernel)
        stack.enter_context(log.meter)
        loss = loss_of(model)
        loss.backward()
        del loss
    for _, unit in reversed(hooked):  # the root first, as at the end of a backward of the engine
        unit.end_backward()
    log.close()
    return TracedStep(
        name,
        planned,
        tuple(log.events),
        buffer_bytes=sum(round_up(buffer.nbytes, ALLOCATED_BYTES) for buffer in set(model.buffers())),
        tokens=tokens,
        outer=frozenset(outer | {unit.index for unit in hooks if unit.num_calls > 1}),
        checkpointed=checkpointed,
        truths=log.meter.truths,
    )


def describe_units(
    model: nn.Module, modules: Sequence[nn.Module]
) -> tuple[tuple[PlannedUnit, ...], list[dict[nn.Parameter, int]]]:
    """Return the units of these modules, the model last, and for each its own parameters with their indices."""
    names = {module: name for name, module in model.named_modules()}
    owners: dict[nn.Parameter, nn.Module] = {}
    owned: dict[nn.Module, dict[nn.Parameter, str]] = {module: {} for module in modules}

    def visit(module: nn.Module, owner: nn.Module, prefix: str) -> None:
        if module in owned and module is not owner:
            owner, prefix = module, ""
        for name, param in module.named_parameters(recurse=False):
            if owners.setdefault(param, owner) is not owner:
                raise UsageError(
                    f"plan: the parameter {prefix + name!r} of {type(owner).__name__} is also one of "
                    f"{type(owners[param]).__name__}, which is another unit: wrap a module that holds both"
                )
            owned[owner].setdefault(param, prefix + name)
        for name, child in module.named_children():
            visit(child, owner, f"{prefix}{name}.")

    visit(model, model, "")
    planned = tuple(
        PlannedUnit(
            names[module],
            type(module).__name__,
            tuple(Param(fqn, tuple(p.shape), p.dtype, p.requires_grad) for p, fqn in owned[module].items()),
        )
        for module in modules
    )
    return planned, [{param: index for index, param in enumerate(owned[module])} for module in modules]


def cast_floating(model: nn.Module, dtype: torch.dtype) -> None:
    """Cast parameters and buffers, but for complex ones, which ``nn.Module.to`` would take for real ones."""
    _compat.apply_to_module(model, functools.partial(_cast, dtype))


def _cast(dtype: torch.dtype, tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to(dtype) if tensor.is_floating_point() else tensor


def _grouped_mm_flops(a: torch.Tensor, b: torch.Tensor, *_: Any, **_options: Any) -> int:
    """Count matrix products of experts: rows of `a`, or what is summed over, are divided among them."""
    groups = a.shape[0] if a.dim() == b.dim() == 3 else 1
    return 2 * groups * a.shape[-2] * a.shape[-1] * b.shape[-1]


_FORMULAS = {_compat.GROUPED_MM: _grouped_mm_flops}  # operations that torch's counter does not know


class _Meter(_compat.TorchDispatchMode):
    """Counts bytes of tensors that are alive, and operations."""

    def __init__(self, params: Sequence[torch.Tensor]) -> None:
        super().__init__()
        self.live = 0  # bytes now
        self.high = self.flops = 0  # most bytes, and operations, since they were last set
        self.truths = 0  # truth values of tensors that the program has asked for, and which count as true
        self._params = [param.untyped_storage() for param in params]  # which keeps their addresses
        self._known = {id(storage): 0 for storage in self._params}

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is _compat.READ_VALUE and args[0].is_meta and args[0].dtype == torch.bool:
            self.truths += 1  # such as whether a mask masks nothing
            return True
        found = func(*args, **(kwargs or {}))
        formula = flop_registry.get(func.overloadpacket) or _FORMULAS.get(func.overloadpacket)
        if formula is not None:
            self.flops += formula(*args, **(kwargs or {}), out_val=found)
        for tensor in tensors_in(found):
            storage = tensor.untyped_storage()
            if id(storage) not in self._known:
                nbytes = round_up(storage.nbytes(), ALLOCATED_BYTES)
                self._known[id(storage)] = nbytes
                self.live += nbytes
                self.high = max(self.high, self.live)
                weakref.finalize(storage, self._freed, id(storage)).atexit = False
        return found

    def _freed(self, address: int) -> None:
        self.live -= self._known.pop(address)


class _EventLog:
    """The events of a step."""

    def __init__(self, params: Iterator[torch.Tensor]) -> None:
        self.meter = _Meter(list(params))
        self.events: list[StepEvent] = []
        self._open: tuple[EventKind, int, int, int] | None = None

    def note(self, kind: EventKind, unit: int, param: int = 0) -> None:
        """Note an event: what has been counted since the last one belongs to that."""
        self.close()
        self._open = kind, unit, param, self.meter.live

    def close(self) -> None:
        """End the last event."""
        meter = self.meter
        if self._open is not None:
            kind, unit, param, before = self._open
            high = max(meter.high, meter.live) - before
            self.events.append(StepEvent(kind, unit, param, max(high, 0), meter.live - before, meter.flops))
        self._open = None
        meter.high, meter.flops = meter.live, 0


class _UnitEvents:
    """Notes the events of one unit, when the engine would act on them."""

    def __init__(self, index: int, params: dict[nn.Parameter, int], log: _EventLog, is_outer: bool) -> None:
        self.index = index
        self.num_calls = 0
        self._params, self._log, self._is_outer = params, log, is_outer
        self._grads_left = sum(param.requires_grad for param in params)
        self._has_frozen = self._grads_left < len(params)
        self._inputs_left = self._num_inputs = 0
        self._in_backward = self._has_ended = False

    def attach(self, module: nn.Module) -> list[RemovableHandle]:
        """Note the events of a module until the hooks are removed."""
        hooks = [
            module.register_forward_pre_hook(self._before_forward, with_kwargs=True),
            module.register_forward_hook(self._after_forward),
        ]
        for param, index in self._params.items():
            if param.requires_grad:
                hooks.append(param.register_post_accumulate_grad_hook(functools.partial(self._has_grad, index=index)))
        return hooks

    def _before_forward(self, _module: nn.Module, args: Any, kwargs: Any) -> Any:
        self.num_calls += 1
        self._log.note(EventKind.FORWARD, self.index)
        return apply_to_tensors(self._lend, (args, kwargs))

    def _lend(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a view of an input, whose gradient arrives when the backward of this call is over."""
        if not tensor.requires_grad or not torch.is_grad_enabled():
            return tensor
        self._num_inputs += 1
        self._inputs_left += 1
        view = tensor.view_as(tensor)
        view.register_hook(self._input_done)
        return view

    def _after_forward(self, _module: nn.Module, _args: Any, outputs: Any) -> None:
        for tensor in tensors_in(outputs):
            if tensor.requires_grad:
                tensor.register_hook(self._output_has_grad)
        self._log.note(EventKind.FORWARD_END, self.index)

    def _output_has_grad(self, _grad: torch.Tensor) -> None:
        if not self._in_backward:
            self._in_backward = True
            self._log.note(EventKind.BACKWARD, self.index)

    def _has_grad(self, param: nn.Parameter, index: int) -> None:
        param.grad = None  # counted by the event
        self._log.note(EventKind.GRADIENT, self.index, index)
        self._grads_left -= 1
        self._end_if_complete()

    def _input_done(self, _grad: torch.Tensor) -> None:
        self._inputs_left -= 1
        self._end_if_complete()

    def _end_if_complete(self) -> None:
        waits = not self._num_inputs and (self._is_outer or self._has_frozen)
        if not self._grads_left and not self._inputs_left and not waits:
            self.end_backward()

    def end_backward(self) -> None:
        """End the backward of the unit, if it has begun."""
        if self._in_backward and not self._has_ended:
            self._has_ended = True
            self._log.note(EventKind.BACKWARD_END, self.index)


def _rms_norm(
    input: torch.Tensor, normalized_shape: Any, weight: torch.Tensor | None = None, eps: float | None = None
) -> torch.Tensor:
    made: torch.Tensor = _FusedRmsNorm.apply(input, weight, len(tuple(normalized_shape)))
    return made


def _attention(
    meter: _Meter,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    **_options: Any,
) -> torch.Tensor:
    lengths = query.shape[-2] * key.shape[-2]
    flops = 2 * query.shape[:-2].numel() * lengths * (query.shape[-1] + value.shape[-1]) // (2 if is_causal else 1)
    made: torch.Tensor = _FusedAttention.apply(meter, flops, query, key, value, attn_mask)
    return made


class _FusedRmsNorm(torch.autograd.Function):
    """RMSNorm by a kernel that saves its input and one number for each row."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor | None, dims: int) -> torch.Tensor:
        rows = x.new_empty(x.shape[:-dims], dtype=torch.float32)
        ctx.save_for_backward(x, rows, *([] if weight is None else [weight]))
        return torch.empty_like(x)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        x, _, *weight = ctx.saved_tensors
        return torch.empty_like(x), torch.empty_like(weight[0]) if weight else None, None


class _FusedAttention(torch.autograd.Function):
    """Attention by a kernel that saves its inputs, its output and one number for each row of scores."""

    @staticmethod
    def forward(
        ctx: Any,
        meter: _Meter,
        flops: int,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None,
    ) -> torch.Tensor:
        *batch, length, _ = query.shape
        # As kernels do it: the heads of a token are neighbours, and merging them needs no copy.
        output = query.new_empty((*batch[:-1], length, *batch[-1:], value.shape[-1])).transpose(-3, -2)
        scales = query.new_empty(query.shape[:-1], dtype=torch.float32)
        ctx.save_for_backward(query, key, value, output, scales, *(() if mask is None else (mask,)))
        ctx.meter, ctx.flops = meter, flops
        meter.flops += flops
        return output

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> Any:
        query, key, value, *_ = ctx.saved_tensors
        ctx.meter.flops += 5 * ctx.flops // 2  # with the scores once more
        return None, None, torch.empty_like(query), torch.empty_like(key), torch.empty_like(value), None
