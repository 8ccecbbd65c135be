"""An exponential moving average of sharded parameters, which lives in the state of their optimizer."""

from __future__ import annotations

import contextlib
import weakref
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from hpcfsdp import _compat
from hpcfsdp.errors import UsageError
from hpcfsdp.state.optim.keys import StepsWholeTensors

KEY = "ema"
_averaged: weakref.WeakSet[torch.optim.Optimizer] = weakref.WeakSet()


class ExponentialAverage:
    """Average parameters over the steps of their optimizer: ``average = decay * average + (1 - decay) * parameter``.

    The average of a parameter is the entry "ema" of its state in the optimizer, sharded like the parameter, of its
    dtype. So it is in checkpoints, in memory and in files (``/optim/state/<name>/ema``), and in state dicts, loads at
    any number of ranks, and needs no call for it: make this object before ``load``. It begins with the values after
    the first step in which a parameter has a gradient. Buffers are not averaged.

    Attributes:
        decay: between 0 and 1; may be changed between steps.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, decay: float = 0.999) -> None:
        """Not collective. Average after each ``step`` of `optimizer`, of a sharded or any other model.

        Raises:
            UsageError: `decay` is not between 0 and 1, or the optimizer steps whole tensors, or has an average.
        """
        if isinstance(optimizer, StepsWholeTensors):
            raise UsageError(
                f"a {type(optimizer).__name__} has its state whole on owners of parameters: average with an optimizer "
                "that steps shards, or average checkpoints (hpcfsdp average)"
            )
        if optimizer in _averaged:
            raise UsageError(f"this {type(optimizer).__name__} has an ExponentialAverage already")
        self.decay = decay
        self._optimizer = optimizer
        self._check()
        self._handle = optimizer.register_step_post_hook(lambda *_: self.update())
        _averaged.add(optimizer)

    def _check(self) -> None:
        if not isinstance(self.decay, (int, float)) or not 0 <= self.decay <= 1:
            raise UsageError(f"decay must be between 0 and 1, not {self.decay!r}")

    @torch.no_grad()
    def update(self) -> None:
        """Not collective. Average the parameters as they are now; each step does it."""
        self._check()
        averages, values = [], []
        for param, state in self._stepped():
            if KEY not in state:
                state[KEY] = param.detach().clone()
                continue
            averages.append(_compat.local_of(state[KEY]))
            values.append(_compat.local_of(param.detach()))
        for average, value in zip(averages, values, strict=True):
            average.lerp_(value.to(average.dtype), 1 - self.decay)

    def _stepped(self) -> Iterator[tuple[nn.Parameter, dict[str, Any]]]:
        """Yield parameters that have been stepped, with their state. An optimizer begins a state that is empty."""
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                if param.grad is not None or param in self._optimizer.state:
                    yield param, self._optimizer.state[param]

    @contextlib.contextmanager
    def swapped(self) -> Iterator[None]:
        """Return a context in which the parameters are the averages. Collective over the model's ranks if it computes.

        Parameters without an average stay. Do not step within it. It exchanges values in place, and needs memory for
        one parameter.
        """
        self._swap()
        try:
            yield
        finally:
            self._swap()

    @torch.no_grad()
    def _swap(self) -> None:
        for group in self._optimizer.param_groups:
            for param in group["params"]:
                average = self._optimizer.state[param].get(KEY) if param in self._optimizer.state else None
                if average is not None:
                    kept = _compat.local_of(param.detach()).clone()
                    param.copy_(average)
                    _compat.local_of(average).copy_(kept)

    def remove(self) -> None:
        """Not collective. Average no more, and forget the averages."""
        self._handle.remove()
        _averaged.discard(self._optimizer)
        for state in self._optimizer.state.values():
            state.pop(KEY, None)
